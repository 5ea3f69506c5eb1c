/*
 * Fuzz target of the vsock device: the input is a script in which a guest and its host clients do
 * what they like, in any order: packets with chosen fields, raw descriptors, receive buffers of any
 * size, connects, data, vanishing peers, pauses, resets, copies. After each step the device's books
 * must balance. Seeds: seeds/vsock.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "devices/vsock_internal.h"
#include "vmm/core/err.h"
#include "vmm/core/log.h"
#include "vmm/core/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RAM_BYTES (512u << 10)
#define QUEUE 16u
#define DESC(q) (0x1000ull * ((q) + 1))
#define AVAIL(q) (DESC(q) + 0x400)
#define USED(q) (DESC(q) + 0x800)
#define DATA 0x8000ull
#define CLIENTS 4
#define STEPS_MAX 200

struct world {
    const uint8_t *in;
    size_t left;
    struct ram ram;
    struct loop loop;
    struct virtio_device *dev;
    struct vsock *v;
    uint16_t avail[3];
    int clients[CLIENTS];
    uint32_t last_host_port;
};

static int listener = -1, granted = -1;
static char path[64];

static int listen_at(const char *at)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    (void)snprintf(addr.sun_path, sizeof addr.sun_path, "%s", at);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&addr, sizeof addr) < 0 || listen(fd, 64) < 0)
        abort();
    return fd;
}

static void remove_sockets(void)
{
    char at[100];
    (void)unlink(path);
    (void)snprintf(at, sizeof at, "%s_700", path);
    (void)unlink(at);
    *strrchr(path, '/') = '\0';
    (void)rmdir(path);
}

/* The sockets live as long as the process: making them is dear. */
static void make_sockets(void)
{
    char dir[] = "/tmp/tine-fuzz-XXXXXX", at[100];
    if (listener >= 0)
        return;
    if (mkdtemp(dir) == NULL)
        abort();
    (void)snprintf(path, sizeof path, "%s/v", dir);
    (void)snprintf(at, sizeof at, "%s_700", path);
    listener = listen_at(path);
    granted = listen_at(at);
    (void)atexit(remove_sockets);
    log_set_level(LOG_ERROR);
}

static void drain(int fd)
{
    for (int c; (c = accept4(fd, NULL, NULL, SOCK_NONBLOCK)) >= 0;)
        (void)close(c);
}

static uint8_t take(struct world *w)
{
    if (w->left == 0)
        return 0;
    w->left--;
    return *w->in++;
}

static uint32_t take32(struct world *w)
{
    uint32_t b[4] = {take(w), take(w), take(w), take(w)};
    return b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24;
}

static void on_control(void *arg)
{
}

static void on_control_data(void *arg, const void *bytes, size_t len)
{
    struct world *w = arg;
    if (len > 0 && *(const uint8_t *)bytes == 'e')
        (void)vsock_control_send(w->dev, bytes, len, NULL); /* an owner that answers at once */
    if (len > 0 && *(const uint8_t *)bytes == 'g')
        vsock_open_gate(w->dev);
}

static const struct vsock_control_ops control_ops = {
    .opened = on_control, .data = on_control_data, .closed = on_control};

static void make_device(struct world *w, bool gate_closed)
{
    static const uint32_t grants[] = {700, 701};
    struct vsock_spec spec = {.listener_fd = dup(listener),
                              .socket_path = path,
                              .granted_ports = grants,
                              .granted_count = 2,
                              .control = &control_ops,
                              .control_arg = w,
                              .gate_closed = gate_closed};
    if (vsock_create(&w->dev, &spec, &w->ram, &w->loop, NULL) < 0)
        abort();
    w->v = vsock_of(w->dev);
}

static void put(struct world *w, uint64_t at, const void *p, size_t len)
{
    (void)ram_write(&w->ram, gpa(at), p, len); /* outside RAM: nothing happens */
}

static void put_desc(struct world *w, unsigned q, unsigned i, uint64_t addr, uint32_t len,
                     uint16_t flags)
{
    uint8_t d[16];
    le64_put(d, addr);
    le32_put(d + 8, len);
    le16_put(d + 12, flags);
    le16_put(d + 14, (uint16_t)((i + 1) % QUEUE));
    put(w, DESC(q) + 16 * (i % QUEUE), d, sizeof d);
}

static void offer(struct world *w, unsigned q, unsigned head)
{
    uint16_t v = (uint16_t)head;
    put(w, AVAIL(q) + 4 + 2 * (w->avail[q] % QUEUE), &v, 2);
    v = ++w->avail[q];
    put(w, AVAIL(q) + 2, &v, 2);
}

static void driver_ok(struct world *w, bool event_idx)
{
    memset(w->ram.regions[0].host, 0, DATA);
    virtio_device_set_features(w->dev, VIRTIO_F_VERSION_1 | VIRTIO_F_RING_INDIRECT_DESC |
                                           (event_idx ? VIRTIO_F_RING_EVENT_IDX : 0));
    for (unsigned q = 0; q < 3; q++) {
        struct virtqueue *vq = &w->dev->queues[q];
        vq->size = QUEUE;
        vq->desc_gpa = DESC(q);
        vq->avail_gpa = AVAIL(q);
        vq->used_gpa = USED(q);
        w->avail[q] = 0;
        if (virtqueue_enable(vq, NULL) < 0)
            abort();
    }
    w->dev->status = 15;
    w->dev->ops->activate(w->dev);
}

static void kick(struct world *w, unsigned q)
{
    if (virtio_device_is_live(w->dev))
        w->dev->ops->notify(w->dev, q);
}

/* Ports from a small choice, so that packets often meet a connection. */
static uint32_t pick_port(struct world *w, uint8_t b)
{
    static const uint32_t ports[] = {1, 700, 701, 1024, 5, VSOCK_HOST_PORT_FIRST, 0xffffffffu};
    return b % 8 == 7 ? w->last_host_port : ports[b % 8 % 7];
}

static void guest_packet(struct world *w)
{
    uint8_t raw[VSOCK_HEADER_BYTES], ports = take(w), op = take(w), shape = take(w);
    uint32_t len = take(w) * 41u;
    struct vsock_header h = {.src_cid = VSOCK_GUEST_CID,
                             .dst_cid = VSOCK_HOST_CID,
                             .src_port = pick_port(w, ports & 15),
                             .dst_port = pick_port(w, ports >> 4),
                             .len = (shape & 1) != 0 ? take32(w) : len,
                             .type = op > 250 ? op : VSOCK_TYPE_STREAM,
                             .op = op % 9,
                             .flags = shape >> 6,
                             .buf_alloc = (shape & 2) != 0 ? take32(w) : 4096,
                             .fwd_cnt = (shape & 4) != 0 ? take32(w) : 0};
    unsigned slot = w->avail[1] % QUEUE;
    uint64_t at = DATA + 0x8000 + slot * 0x4000ull;
    vsock_header_encode(raw, &h);
    put(w, at, raw, sizeof raw);
    put_desc(w, 1, slot, at, (shape & 8) != 0 ? 44 : 44 + len, (shape & 8) != 0 && len > 0);
    put_desc(w, 1, slot + 1, at + 44, len, 0);
    offer(w, 1, slot);
    kick(w, 1);
}

static void raw_ring(struct world *w)
{
    unsigned q = take(w) % 3, i = take(w);
    uint64_t addr = take32(w);
    uint32_t len = take32(w);
    put_desc(w, q, i, addr % (RAM_BYTES + 64), len % (RAM_BYTES + 64), (uint16_t)(take(w) % 8));
    offer(w, q, take(w) % (QUEUE + 1));
    kick(w, q);
}

static void post_rx(struct world *w)
{
    unsigned count = take(w) % QUEUE, bytes = take(w) * 16u;
    for (unsigned i = 0; i < count; i++) {
        unsigned slot = w->avail[0] % QUEUE;
        put_desc(w, 0, slot, DATA + 0x50000 + slot * 0x1000ull, bytes, 2);
        offer(w, 0, slot);
    }
    kick(w, 0);
}

static void host_client(struct world *w)
{
    uint8_t what = take(w), text[64], junk[4096];
    int *fd = &w->clients[what % CLIENTS];
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    switch (what / CLIENTS % 6) {
    case 0:
        if (*fd >= 0)
            (void)close(*fd);
        memcpy(addr.sun_path, path, sizeof path);
        *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(*fd, (struct sockaddr *)&addr, sizeof addr); /* backlog full: unconnected */
        (void)send(*fd, "CONNECT 1024\n", what > 127 ? 13 : 9, MSG_NOSIGNAL);
        break;
    case 1:
        for (unsigned i = 0, n = take(w) % sizeof text; i < n; i++)
            (void)send(*fd, (text[0] = take(w), text), 1, MSG_NOSIGNAL);
        break;
    case 2:
        memset(junk, what, sizeof junk);
        (void)send(*fd, junk, sizeof junk, MSG_NOSIGNAL);
        break;
    case 3:
        (void)recv(*fd, junk, sizeof junk, 0);
        break;
    case 4:
        (void)shutdown(*fd, what > 127 ? SHUT_WR : SHUT_RD);
        break;
    default:
        if (*fd >= 0)
            (void)close(*fd);
        *fd = accept4(granted, NULL, NULL, SOCK_NONBLOCK);
    }
}

static void copy_machine(struct world *w)
{
    struct state_writer sw;
    struct state_node root;
    const void *blob;
    size_t len;
    bool was_quiesced = w->v->quiesced;
    (void)w->dev->ops->quiesce(w->dev, NULL);
    if (state_writer_init(&sw, NULL) < 0 || virtio_device_save(w->dev, &sw, NULL) < 0 ||
        state_finish(&sw, &blob, &len, NULL) < 0)
        abort();
    vsock_forget(w->dev);
    loop_close_inherited(&w->loop);
    w->dev->ops->free(w->dev);
    struct err e = {0};
    if (loop_init(&w->loop, NULL) < 0)
        abort();
    make_device(w, true);
    if (state_open(blob, len, &root, &e) < 0 || virtio_device_restore(w->dev, &root, &e) < 0) {
        (void)fprintf(stderr, "own state refused: %s\n", e.text);
        abort();
    }
    if (!was_quiesced)
        w->dev->ops->resume(w->dev);
    state_writer_free(&sw);
}

static void expire(struct world *w)
{
    struct vsock_conn *c;
    TAILQ_FOREACH (c, &w->v->handshakes, handshake)
        c->deadline_ns = 1;
    if (w->v->handshake_timer.deadline_ns != 0)
        w->v->handshake_timer.deadline_ns = 1;
}

static void control_line(struct world *w)
{
    uint8_t text[255];
    unsigned n = take(w) % 255u;
    memset(text, 'c', sizeof text);
    (void)vsock_control_send(w->dev, text, n, NULL);
}

/* The books: what is counted is what is there. */
static void check(struct world *w)
{
    struct vsock *v = w->v;
    struct vsock_conn *c;
    uint64_t buffered = 0;
    unsigned count = 0, in_fifo = 0;
    TAILQ_FOREACH (c, &v->all, all) {
        count++;
        buffered += c->to_host.len;
        assert(c->state >= CONN_LINE && c->state < CONN_GONE);
        assert(c->to_host.len <= VSOCK_BUF_ALLOC &&
               (c->to_host.len > 0) == (c->to_host.buf != NULL));
        assert(c->in_table ==
               (c->state == CONN_REQUESTED || c->state == CONN_OPEN || c->state == CONN_RESET));
        assert(!c->in_table || vsock_conn_find(v, c->guest_port, c->host_port) != NULL);
        assert(c->in_handshake == (c->state <= CONN_REQUESTED));
        assert(c->control == (c == v->control));
        assert(c->state != CONN_RESET || (c->fd < 0 && c->pending != 0));
        in_fifo += c->queued;
        if (c->in_table && !c->control)
            w->last_host_port = c->host_port;
    }
    TAILQ_FOREACH (c, &v->rx_fifo, fifo)
        in_fifo--;
    assert(in_fifo == 0 && TAILQ_EMPTY(&v->graveyard) && v->depth == 0 && v->event_conn == NULL);
    assert(count == v->conn_count && buffered == v->buffered_bytes);
    assert(v->rst_count <= VSOCK_RSTS_MAX);
}

/* Small socket buffers, so that bytes soon have to wait for their reader. */
static void shrink_sockets(struct world *w)
{
    struct vsock_conn *c;
    int bytes = 2048;
    TAILQ_FOREACH (c, &w->v->all, all) {
        if (c->fd >= 0 && c->to_host.len == 0)
            (void)setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    }
}

static void step(struct world *w)
{
    uint8_t what = take(w);
    shrink_sockets(w);
    switch (what % 16) {
    case 0 ... 3:
        guest_packet(w);
        break;
    case 4:
        raw_ring(w);
        break;
    case 5:
    case 6:
        post_rx(w);
        break;
    case 7 ... 9:
        host_client(w);
        break;
    case 10:
        (void)w->dev->ops->quiesce(w->dev, NULL);
        break;
    case 11:
        vsock_set_paused(w->dev, what > 127);
        w->dev->ops->resume(w->dev);
        break;
    case 12:
        if (what > 127)
            virtio_device_reset(w->dev);
        if (w->dev->status == 0)
            driver_ok(w, what > 191);
        break;
    case 13:
        copy_machine(w);
        break;
    case 14:
        if (what > 127)
            expire(w);
        else
            vsock_open_gate(w->dev);
        break;
    default:
        control_line(w);
    }
    for (unsigned i = 0; i < 4; i++) {
        if (loop_round(&w->loop, 0, NULL) < 0)
            abort();
    }
    check(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct world w = {.in = data, .left = size, .clients = {-1, -1, -1, -1}};
    make_sockets();
    if (ram_create(&w.ram, RAM_BYTES, 0xc0000000u, 0x100000000u, false, NULL) < 0 ||
        loop_init(&w.loop, NULL) < 0)
        abort();
    make_device(&w, false);
    driver_ok(&w, size % 2 != 0);
    for (unsigned i = 0; i < STEPS_MAX && w.left > 0; i++)
        step(&w);
    virtio_device_reset(w.dev);
    check(&w);
    w.dev->ops->free(w.dev);
    loop_close(&w.loop);
    ram_free(&w.ram);
    for (unsigned i = 0; i < CLIENTS; i++) {
        if (w.clients[i] >= 0)
            (void)close(w.clients[i]);
    }
    drain(listener);
    drain(granted);
    return 0;
}
