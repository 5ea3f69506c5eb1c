/*
 * vsock: a polling virtio-vsock driver with a few services, so that the device can be tried from
 * the host without an operating system: port 7    sends back what comes port 9    counts what
 * comes; at its end answers with the count, 16 hexadecimal digits port 19   sends 16 MiB, byte i of
 * each 64 KiB being i * 7, then ends port 20   sends for ever others    are refused With "g" on the
 * command line it first connects to host port 700, says "hello", ends its side, and repeats the
 * answer on the console. Says "up" when it is ready, "R" for each reset it gets.
 */
#include <stdbool.h>

#include "tiny.h"

#define REGISTERS 0xd0000000ull
#define QUEUE_SIZE 64u
#define QUEUE_AT(q) (0x1000000ull + (uint64_t)(q)*0x10000u)
#define HEADERS_AT 0x1040000ull
#define PATTERN_AT 0x1080000ull
#define BUFFERS_AT 0x1100000ull
#define BUFFER_BYTES 4096u
#define HEADER_BYTES 44u
#define CONNECTIONS 256u
#define BLOCK_BYTES 65536u
#define SOURCE_BYTES (16u << 20)
#define OUR_CREDIT (256u << 10)

enum op { REQUEST = 1, RESPONSE, RST, SHUTDOWN, RW, CREDIT_UPDATE, CREDIT_REQUEST };

struct desc {
    uint64_t addr;
    uint32_t len;
    uint16_t flags, next;
};

struct ring {
    uint16_t flags, idx;
    uint16_t slots[QUEUE_SIZE];
};

struct used {
    uint16_t flags, idx;
    struct {
        uint32_t id, len;
    } slots[QUEUE_SIZE];
};

struct header {
    uint32_t src_cid, src_cid_high, dst_cid, dst_cid_high, src_port, dst_port, len;
    uint16_t type, op;
    uint32_t flags, buf_alloc, fwd_cnt;
};

struct conn {
    uint32_t port, host_port; /* port 0: free */
    uint32_t received, sent, peer_alloc, peer_forwarded;
};

static struct conn conns[CONNECTIONS];
static uint16_t rx_seen, tx_count;

static volatile struct desc *descs(unsigned q)
{
    return (volatile struct desc *)QUEUE_AT(q);
}

static volatile struct ring *avail(unsigned q)
{
    return (volatile struct ring *)(QUEUE_AT(q) + 0x4000);
}

static volatile struct used *used(unsigned q)
{
    return (volatile struct used *)(QUEUE_AT(q) + 0x8000);
}

static void reg_write(unsigned offset, uint32_t v)
{
    *(volatile uint32_t *)(REGISTERS + offset) = v;
}

static void barrier(void)
{
    __asm__ volatile("lock orl $0, (%%rsp)" ::: "memory");
}

static void offer(unsigned q, uint16_t head)
{
    avail(q)->slots[avail(q)->idx % QUEUE_SIZE] = head;
    barrier(); /* the slot before the index */
    avail(q)->idx++;
    barrier(); /* the index before the device's wish is looked at */
    if ((used(q)->flags & 1) == 0)
        reg_write(0x50, q);
}

static void start_queue(unsigned q)
{
    reg_write(0x30, q);
    reg_write(0x38, QUEUE_SIZE);
    reg_write(0x80, (uint32_t)QUEUE_AT(q));
    reg_write(0x90, (uint32_t)QUEUE_AT(q) + 0x4000);
    reg_write(0xa0, (uint32_t)QUEUE_AT(q) + 0x8000);
    reg_write(0x44, 1);
}

static void start_driver(void)
{
    reg_write(0x70, 0);
    reg_write(0x70, 1 | 2);
    reg_write(0x24, 1);
    reg_write(0x20, 1); /* VERSION_1 */
    reg_write(0x70, 1 | 2 | 8);
    for (unsigned q = 0; q < 3; q++)
        start_queue(q);
    reg_write(0x70, 1 | 2 | 8 | 4);
    for (uint16_t i = 0; i < QUEUE_SIZE; i++) {
        descs(0)[i].addr = BUFFERS_AT + (uint64_t)i * BUFFER_BYTES;
        descs(0)[i].len = BUFFER_BYTES;
        descs(0)[i].flags = 2;
        offer(0, i);
    }
}

/* Waits until the device has taken it: one packet at a time is enough here. */
static void send_packet(struct conn *c, enum op op, uint32_t flags, uint64_t payload, uint32_t len)
{
    volatile struct header *h = (volatile struct header *)HEADERS_AT;
    h->src_cid = 3;
    h->dst_cid = 2;
    h->src_cid_high = h->dst_cid_high = 0;
    h->src_port = c->port;
    h->dst_port = c->host_port;
    h->len = len;
    h->type = 1;
    h->op = (uint16_t)op;
    h->flags = flags;
    h->buf_alloc = OUR_CREDIT;
    h->fwd_cnt = c->received;
    descs(1)[0].addr = HEADERS_AT;
    descs(1)[0].len = HEADER_BYTES;
    descs(1)[0].flags = len > 0;
    descs(1)[0].next = 1;
    descs(1)[1].addr = payload;
    descs(1)[1].len = len;
    descs(1)[1].flags = 0;
    offer(1, 0);
    tx_count++;
    while (used(1)->idx != tx_count)
        __asm__ volatile("pause");
    barrier();
    c->sent += len;
}

static struct conn *find(uint32_t port, uint32_t host_port)
{
    for (unsigned i = 0; i < CONNECTIONS; i++) {
        if (conns[i].port == port && conns[i].host_port == host_port)
            return &conns[i];
    }
    return NULL;
}

static struct conn *find_free(void)
{
    for (unsigned i = 0; i < CONNECTIONS; i++) {
        if (conns[i].port == 0)
            return &conns[i];
    }
    return NULL;
}

static struct conn *begin(uint32_t port, uint32_t host_port)
{
    struct conn *c = find_free();
    if (c == NULL)
        return NULL;
    c->port = port;
    c->host_port = host_port;
    c->received = c->sent = c->peer_alloc = c->peer_forwarded = 0;
    return c;
}

static void take_request(uint32_t port, uint32_t host_port, uint32_t alloc, uint32_t forwarded)
{
    bool known = port == 7 || port == 9 || port == 19 || port == 20;
    struct conn *c = known ? begin(port, host_port) : NULL;
    if (c == NULL) {
        struct conn refused = {.port = port, .host_port = host_port};
        send_packet(&refused, RST, 0, 0, 0);
        return;
    }
    c->peer_alloc = alloc;
    c->peer_forwarded = forwarded;
    send_packet(c, RESPONSE, 0, 0, 0);
}

static void take_data(struct conn *c, uint64_t payload, uint32_t len)
{
    c->received += len;
    if (c->port == 7)
        send_packet(c, RW, 0, payload, len);
    else if (c->received % (OUR_CREDIT / 2) < len)
        send_packet(c, CREDIT_UPDATE, 0, 0, 0);
    if (c->port < 1000)
        return;
    for (uint32_t i = 0; i < len; i++) /* our own connection to the host */
        say_byte((char)*(volatile uint8_t *)(payload + i));
}

static void take_shutdown(struct conn *c, uint32_t flags)
{
    if (c->port == 9 && (flags & 2) != 0) {
        volatile char *text = (volatile char *)(HEADERS_AT + 64);
        for (unsigned i = 0; i < 16; i++)
            text[i] = "0123456789abcdef"[((uint64_t)c->received >> (60 - 4 * i)) & 15];
        send_packet(c, RW, 0, HEADERS_AT + 64, 16);
    }
    /* Port 7 has sent back all by now, and the others want no more either. */
    send_packet(c, SHUTDOWN, 3, 0, 0);
}

static void take_packet(uint64_t at)
{
    volatile struct header *h = (volatile struct header *)at;
    struct conn *c = find(h->dst_port, h->src_port);
    if (h->op == REQUEST) {
        take_request(h->dst_port, h->src_port, h->buf_alloc, h->fwd_cnt);
        return;
    }
    if (c == NULL)
        return;
    c->peer_alloc = h->buf_alloc;
    c->peer_forwarded = h->fwd_cnt;
    if (h->op == RW) {
        take_data(c, at + HEADER_BYTES, h->len);
    } else if (h->op == SHUTDOWN) {
        take_shutdown(c, h->flags);
    } else if (h->op == CREDIT_REQUEST) {
        send_packet(c, CREDIT_UPDATE, 0, 0, 0);
    } else if (h->op == RST) {
        say_byte('R');
        c->port = 0;
    } else if (h->op == RESPONSE) {
        volatile char *text = (volatile char *)(HEADERS_AT + 64);
        for (unsigned i = 0; i < 5; i++)
            text[i] = "hello"[i];
        send_packet(c, RW, 0, HEADERS_AT + 64, 5);
        send_packet(c, SHUTDOWN, 2, 0, 0);
    }
}

static void receive_all(void)
{
    while (used(0)->idx != rx_seen) {
        barrier(); /* the index before the entry */
        uint16_t id = (uint16_t)used(0)->slots[rx_seen % QUEUE_SIZE].id;
        rx_seen++;
        take_packet(BUFFERS_AT + (uint64_t)id * BUFFER_BYTES);
        offer(0, id);
    }
}

static void send_streams(void)
{
    for (unsigned i = 0; i < CONNECTIONS; i++) {
        struct conn *c = &conns[i];
        if (c->port != 19 && c->port != 20)
            continue;
        if (c->peer_alloc - (c->sent - c->peer_forwarded) < BLOCK_BYTES)
            continue;
        if (c->port == 20 || c->sent < SOURCE_BYTES)
            send_packet(c, RW, 0, PATTERN_AT, BLOCK_BYTES);
        if (c->port == 19 && c->sent == SOURCE_BYTES) {
            c->sent++; /* said once */
            send_packet(c, SHUTDOWN, 3, 0, 0);
        }
    }
}

void guest_main(const uint8_t *boot_params)
{
    for (uint32_t i = 0; i < BLOCK_BYTES; i++)
        *(volatile uint8_t *)(PATTERN_AT + i) = (uint8_t)(i * 7);
    start_driver();
    if (command_line(boot_params)[0] == 'g')
        send_packet(begin(1000, 700), REQUEST, 0, 0, 0);
    say("up\n");
    for (;;) {
        receive_all();
        send_streams();
    }
}
