/*
 * vsock_guest: see vsock_guest.h.
 */
#include "tests/unit/vsock_guest.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <cmocka.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/log.h"
#include "vmm/core/num.h"

#define RAM_BYTES (8u << 20)
#define HOLE_START 0xc0000000ull
#define HOLE_END 0x100000000ull
#define RING_BASE(q) (0x10000ull * ((q) + 1))
#define DESC(q) RING_BASE(q)
#define AVAIL(q) (RING_BASE(q) + 0x4000)
#define USED(q) (RING_BASE(q) + 0x8000)
#define RX_DATA 0x100000ull
#define TX_DATA 0x300000ull
#define TX_HEADERS 0x2f0000ull

static void on_opened(void *arg)
{
    ((struct vsock_guest *)arg)->opened++;
}

static void on_data(void *arg, const void *bytes, size_t len)
{
    struct vsock_guest *g = arg;
    assert_true(g->control_len + len <= sizeof g->control);
    memcpy(g->control + g->control_len, bytes, len);
    g->control_len += len;
}

static void on_closed(void *arg)
{
    ((struct vsock_guest *)arg)->closed++;
}

static const struct vsock_control_ops control_ops = {
    .opened = on_opened, .data = on_data, .closed = on_closed};

static void count_interrupt(void *ctx, uint32_t gsi)
{
    ((struct vsock_guest *)ctx)->interrupts++;
}

static int listen_at(const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    (void)snprintf(addr.sun_path, sizeof addr.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&addr, sizeof addr), 0);
    assert_int_equal(listen(fd, 4096), 0);
    return fd;
}

static void start_device(struct vsock_guest *g, bool gate_closed)
{
    static const uint32_t granted[] = {GUEST_GRANTED_PORT, GUEST_GRANTED_PORT + 1};
    char path[128];
    struct err e = {0};
    log_set_level(LOG_ERROR);
    assert_int_equal(loop_init(&g->loop, &e), 0);
    (void)snprintf(g->dir, sizeof g->dir, "/tmp/tine-vsock-XXXXXX");
    assert_non_null(mkdtemp(g->dir));
    (void)snprintf(g->path, sizeof g->path, "%s/m.vsock", g->dir);
    (void)snprintf(path, sizeof path, "%s_%u", g->path, GUEST_GRANTED_PORT);
    g->granted_listener = listen_at(path);
    struct vsock_spec spec = {.listener_fd = listen_at(g->path),
                              .socket_path = g->path,
                              .granted_ports = granted,
                              .granted_count = 2,
                              .control = &control_ops,
                              .control_arg = g,
                              .gate_closed = gate_closed};
    assert_int_equal(vsock_create(&g->dev, &spec, &g->ram, &g->loop, &e), 0);
    g->v = vsock_of(g->dev);
    g->dev->irq = (struct irq_line){.raise = count_interrupt, .ctx = g, .gsi = 5};
}

void guest_start(struct vsock_guest *g, bool gate_closed, bool with_driver)
{
    *g = (struct vsock_guest){0};
    assert_int_equal(ram_create(&g->ram, RAM_BYTES, HOLE_START, HOLE_END, false, NULL), 0);
    start_device(g, gate_closed);
    if (with_driver)
        guest_driver_ok(g);
}

void guest_copy(struct vsock_guest *g, struct vsock_guest *from)
{
    struct err e = {0};
    size_t len;
    *g = (struct vsock_guest){.hold_rx = from->hold_rx, .held = from->held};
    assert_int_equal(from->dev->ops->quiesce(from->dev, &e), 0);
    void *blob = guest_save(from, &len);
    assert_int_equal(ram_create(&g->ram, RAM_BYTES, HOLE_START, HOLE_END, false, NULL), 0);
    memcpy(g->ram.regions[0].host, from->ram.regions[0].host, RAM_BYTES);
    memcpy(g->rings, from->rings, sizeof g->rings);
    from->dev->ops->resume(from->dev);
    start_device(g, true);
    if (guest_restore(g, blob, len, &e) < 0)
        fail_msg("%s", e.text);
    free(blob);
}

void *guest_save(struct vsock_guest *g, size_t *len)
{
    struct state_writer w;
    struct err e = {0};
    const void *p;
    assert_int_equal(state_writer_init(&w, &e), 0);
    assert_int_equal(virtio_device_save(g->dev, &w, &e), 0);
    assert_int_equal(state_finish(&w, &p, len, &e), 0);
    void *blob = malloc(*len);
    assert_non_null(blob);
    memcpy(blob, p, *len);
    state_writer_free(&w);
    return blob;
}

int guest_restore(struct vsock_guest *g, const void *blob, size_t len, struct err *e)
{
    struct state_node root;
    int rc = state_open(blob, len, &root, e);
    return rc < 0 ? rc : virtio_device_restore(g->dev, &root, e);
}

void guest_stop(struct vsock_guest *g)
{
    char path[128];
    g->dev->ops->free(g->dev);
    loop_close(&g->loop);
    ram_free(&g->ram);
    fd_close(&g->granted_listener);
    (void)unlink(g->path);
    (void)snprintf(path, sizeof path, "%s_%u", g->path, GUEST_GRANTED_PORT);
    (void)unlink(path);
    assert_int_equal(rmdir(g->dir), 0);
}

static void put16(struct vsock_guest *g, uint64_t at, uint16_t v)
{
    assert_int_equal(ram_write(&g->ram, gpa(at), &v, sizeof v), 0);
}

static uint16_t get16(struct vsock_guest *g, uint64_t at)
{
    uint16_t v = 0;
    assert_int_equal(ram_read(&g->ram, gpa(at), &v, sizeof v), 0);
    return v;
}

static void put_desc(struct vsock_guest *g, unsigned q, unsigned i, uint64_t addr, uint32_t len,
                     uint16_t flags)
{
    uint8_t d[16];
    le64_put(d, addr);
    le32_put(d + 8, len);
    le16_put(d + 12, flags);
    le16_put(d + 14, (uint16_t)((i + 1) % GUEST_QUEUE_SIZE));
    assert_int_equal(ram_write(&g->ram, gpa(DESC(q) + 16ull * i), d, sizeof d), 0);
}

static void offer(struct vsock_guest *g, unsigned q, uint16_t head)
{
    put16(g, AVAIL(q) + 4 + 2u * (g->rings[q].avail % GUEST_QUEUE_SIZE), head);
    put16(g, AVAIL(q) + 2, ++g->rings[q].avail);
}

static bool take_used(struct vsock_guest *g, unsigned q, uint32_t elem[2])
{
    if (get16(g, USED(q) + 2) == g->rings[q].seen)
        return false;
    uint64_t at = USED(q) + 4 + 8u * (g->rings[q].seen++ % GUEST_QUEUE_SIZE);
    assert_int_equal(ram_read(&g->ram, gpa(at), elem, 8), 0);
    return true;
}

void guest_driver_ok(struct vsock_guest *g)
{
    struct err e = {0};
    memset(g->ram.regions[0].host, 0, RX_DATA);
    virtio_device_set_features(g->dev, VIRTIO_F_VERSION_1 | VIRTIO_F_RING_INDIRECT_DESC);
    for (unsigned q = 0; q < 3; q++) {
        struct virtqueue *vq = &g->dev->queues[q];
        g->rings[q] = (struct guest_ring_state){0};
        vq->size = GUEST_QUEUE_SIZE;
        vq->desc_gpa = DESC(q);
        vq->avail_gpa = AVAIL(q);
        vq->used_gpa = USED(q);
        assert_int_equal(virtqueue_enable(vq, &e), 0);
    }
    g->held = 0;
    for (unsigned i = 0; i < GUEST_QUEUE_SIZE && !g->hold_rx; i++) {
        put_desc(g, VSOCK_RXQ, i, RX_DATA + (uint64_t)i * GUEST_RX_BYTES, GUEST_RX_BYTES, 2);
        offer(g, VSOCK_RXQ, (uint16_t)i);
    }
    g->dev->status = VIRTIO_STATUS_ACKNOWLEDGE | VIRTIO_STATUS_DRIVER | VIRTIO_STATUS_FEATURES_OK |
                     VIRTIO_STATUS_DRIVER_OK;
    g->dev->ops->activate(g->dev);
}

void guest_post_rx(struct vsock_guest *g, uint32_t bytes)
{
    unsigned i = g->rings[VSOCK_RXQ].avail % GUEST_QUEUE_SIZE;
    put_desc(g, VSOCK_RXQ, i, RX_DATA + (uint64_t)i * GUEST_RX_BYTES, bytes, 2);
    offer(g, VSOCK_RXQ, (uint16_t)i);
    g->dev->ops->notify(g->dev, VSOCK_RXQ);
}

void guest_run(struct vsock_guest *g)
{
    struct err e = {0};
    /* Each round handles what is ready; the device re-arms itself, so a few idle ones mean done. */
    for (unsigned i = 0; i < 12; i++)
        assert_int_equal(loop_round(&g->loop, 0, &e), 0);
}

struct vsock_header guest_header(uint32_t guest_port, uint32_t host_port, uint16_t op)
{
    return (struct vsock_header){.src_cid = VSOCK_GUEST_CID,
                                 .dst_cid = VSOCK_HOST_CID,
                                 .src_port = guest_port,
                                 .dst_port = host_port,
                                 .type = VSOCK_TYPE_STREAM,
                                 .op = op,
                                 .buf_alloc = 1u << 20};
}

void guest_send(struct vsock_guest *g, const struct vsock_header *h, const void *payload,
                uint32_t bytes, uint32_t piece)
{
    uint8_t raw[VSOCK_HEADER_BYTES];
    uint32_t elem[2];
    unsigned n = 0;
    vsock_header_encode(raw, h);
    /* A slot of its own, so that packets may wait in the queue. */
    unsigned head = g->rings[VSOCK_TXQ].avail % GUEST_QUEUE_SIZE;
    assert_int_equal(ram_write(&g->ram, gpa(TX_HEADERS + 64ull * head), raw, sizeof raw), 0);
    assert_int_equal(ram_write(&g->ram, gpa(TX_DATA), payload, bytes), 0);
    put_desc(g, VSOCK_TXQ, head, TX_HEADERS + 64ull * head, sizeof raw, bytes > 0 ? 1 : 0);
    n++;
    for (uint32_t at = 0; at < bytes; at += piece) {
        uint32_t len = (uint32_t)min_u64(piece, bytes - at);
        put_desc(g, VSOCK_TXQ, (head + n++) % GUEST_QUEUE_SIZE, TX_DATA + at, len,
                 at + len < bytes ? 1 : 0);
    }
    assert_true(n <= GUEST_QUEUE_SIZE);
    offer(g, VSOCK_TXQ, (uint16_t)head);
    g->dev->ops->notify(g->dev, VSOCK_TXQ);
    if (g->v->quiesced || !virtio_device_is_live(g->dev))
        return;
    guest_run(g);
    while (take_used(g, VSOCK_TXQ, elem))
        assert_int_equal(elem[1], 0); /* the device writes nothing there */
}

void guest_send_op(struct vsock_guest *g, uint32_t guest_port, uint32_t host_port, uint16_t op)
{
    struct vsock_header h = guest_header(guest_port, host_port, op);
    guest_send(g, &h, NULL, 0, 1);
}

bool guest_receive(struct vsock_guest *g, struct packet *p)
{
    uint32_t elem[2];
    uint8_t raw[VSOCK_HEADER_BYTES];
    if (!take_used(g, VSOCK_RXQ, elem)) {
        guest_run(g);
        if (!take_used(g, VSOCK_RXQ, elem))
            return false;
    }
    uint64_t at = RX_DATA + (uint64_t)elem[0] * GUEST_RX_BYTES;
    assert_true(elem[1] >= sizeof raw);
    assert_int_equal(ram_read(&g->ram, gpa(at), raw, sizeof raw), 0);
    vsock_header_decode(&p->h, raw);
    p->len = elem[1] - VSOCK_HEADER_BYTES;
    assert_int_equal(p->h.len, p->len);
    assert_int_equal(p->h.src_cid, VSOCK_HOST_CID);
    assert_int_equal(p->h.dst_cid, VSOCK_GUEST_CID);
    assert_int_equal(ram_read(&g->ram, gpa(at + VSOCK_HEADER_BYTES), p->payload, p->len), 0);
    if (g->hold_rx)
        g->held++;
    else
        guest_post_rx(g, GUEST_RX_BYTES);
    return true;
}

void guest_expect(struct vsock_guest *g, struct packet *p, uint16_t op)
{
    if (!guest_receive(g, p))
        fail_msg("no packet, expected op %u", op);
    assert_int_equal(p->h.op, op);
}

void guest_expect_nothing(struct vsock_guest *g)
{
    struct packet p;
    if (guest_receive(g, &p))
        fail_msg("packet with op %u, expected none", p.h.op);
}

void guest_expire_handshakes(struct vsock_guest *g)
{
    struct vsock_conn *c;
    TAILQ_FOREACH (c, &g->v->handshakes, handshake)
        c->deadline_ns = 1;
    g->v->handshake_timer.deadline_ns = 1;
    guest_run(g);
}

int host_connect(struct vsock_guest *g)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    (void)snprintf(addr.sun_path, sizeof addr.sun_path, "%s", g->path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof addr), 0);
    return fd;
}

int host_say(struct vsock_guest *g, const char *line)
{
    int fd = host_connect(g);
    assert_int_equal(send(fd, line, strlen(line), 0), strlen(line));
    guest_run(g);
    return fd;
}

size_t host_read(struct vsock_guest *g, int fd, char *buf, size_t room, bool *eof)
{
    size_t len = 0;
    *eof = false;
    guest_run(g);
    while (len < room - 1) {
        ssize_t n = recv(fd, buf + len, room - 1 - len, 0);
        *eof = n == 0;
        if (n <= 0)
            break;
        len += (size_t)n;
        guest_run(g);
    }
    buf[len] = '\0';
    return len;
}

void host_expect(struct vsock_guest *g, int fd, const char *text, bool eof)
{
    char buf[512];
    bool ended;
    (void)host_read(g, fd, buf, sizeof buf, &ended);
    assert_string_equal(buf, text);
    assert_int_equal(ended, eof);
}

int host_open(struct vsock_guest *g, uint32_t guest_port, uint32_t *host_port)
{
    char line[64];
    struct packet p;
    (void)snprintf(line, sizeof line, "CONNECT %u\n", guest_port);
    int fd = host_say(g, line);
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    assert_int_equal(p.h.dst_port, guest_port);
    *host_port = p.h.src_port;
    guest_send_op(g, guest_port, *host_port, VSOCK_OP_RESPONSE);
    (void)snprintf(line, sizeof line, "OK %u\n", *host_port);
    host_expect(g, fd, line, false);
    return fd;
}

unsigned count_fds(void)
{
    unsigned n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d) != NULL)
        n++;
    (void)closedir(d);
    return n;
}
