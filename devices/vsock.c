/*
 * vsock: the virtio-vsock device (virtio 1.2, 5.10): life cycle and the three queues. Created and
 * driven by the machine through vsock.h and by the transport through virtio_device_ops, loop thread
 * only.
 *
 * Invariant: the queues are touched in run_queues alone, which runs at the end of the outermost
 * vsock_leave, and only while the driver is live and the device is not quiesced. What happens in
 * between only changes connections, and those queue themselves for the guest (rx_fifo).
 */
#include "devices/vsock_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

#define VSOCK_DEVICE_ID 19u
/* One packet adds at most two: for itself, and for the control connection it replaces. */
#define RSTS_PER_PACKET 2u

static void fault(struct vsock *v, const struct err *why)
{
    virtio_device_fault(&v->base, why);
    vsock_drop_all(v, "reset: the guest's vsock driver broke the rules");
}

void vsock_bad_packet(struct vsock *v, const struct vsock_header *h, const char *why)
{
    v->base.guest_fault_count++;
    log_limited(&v->base.guest_faults, LOG_WARN,
                "%s: guest packet op %u, port %u to %u, %u bytes: %s", v->base.name, h->op,
                h->src_port, h->dst_port, h->len, why);
}

void vsock_queue_rst(struct vsock *v, uint32_t guest_port, uint32_t host_port, uint16_t type)
{
    for (unsigned i = 0; i < v->rst_count; i++) {
        const struct vsock_rst *r = &v->rsts[(v->rst_first + i) % VSOCK_RSTS_MAX];
        if (r->guest_port == guest_port && r->host_port == host_port && r->type == type)
            return;
    }
    if (v->rst_count == VSOCK_RSTS_MAX)
        return; /* tx_run stops before this can happen */
    v->rsts[(v->rst_first + v->rst_count) % VSOCK_RSTS_MAX] =
        (struct vsock_rst){.guest_port = guest_port, .host_port = host_port, .type = type};
    v->rst_count++;
}

/* One packet of the guest, copied header first (5.10.6). */
static void take_packet(struct vsock *v)
{
    const struct chain *chain = &v->tx_chain;
    uint8_t raw[VSOCK_HEADER_BYTES] = {0};
    struct vsock_header h;
    size_t got = chain_read(chain, 0, raw, sizeof raw);
    vsock_header_decode(&h, raw);
    if (got < sizeof raw) {
        vsock_bad_packet(v, &h, "cut header");
    } else if (h.src_cid != VSOCK_GUEST_CID || h.dst_cid != VSOCK_HOST_CID) {
        vsock_bad_packet(v, &h, "CID is neither the guest's nor the host's");
    } else if (h.type != VSOCK_TYPE_STREAM) {
        vsock_bad_packet(v, &h, "not a stream");
        if (h.op != VSOCK_OP_RST && h.type != 0)
            vsock_queue_rst(v, h.src_port, h.dst_port, h.type);
    } else if (h.op == VSOCK_OP_RW && h.len > chain->read_bytes - VSOCK_HEADER_BYTES) {
        vsock_bad_packet(v, &h, "longer than its buffer");
        struct vsock_conn *c = vsock_conn_find(v, h.src_port, h.dst_port);
        if (c != NULL)
            vsock_conn_reset(c);
        else
            vsock_queue_rst(v, h.src_port, h.dst_port, VSOCK_TYPE_STREAM);
    } else {
        vsock_handle_packet(v, &h);
    }
}

/* Nothing there: asks for a notification and looks once more, as a packet may have come between. */
static int pop_or_listen(struct virtqueue *q, struct chain *chain, struct err *e)
{
    int rc = virtqueue_pop(q, chain, e);
    if (rc != 0)
        return rc;
    virtqueue_notifications(q, true);
    return virtqueue_pop(q, chain, e);
}

static void on_work_timer(void *arg)
{
    struct vsock *v = arg;
    vsock_enter(v);
    vsock_leave(v);
}

/* The rest of the work after the loop has looked at everything else. */
static void run_again_soon(struct vsock *v)
{
    loop_timer_arm(v->loop, &v->work_timer, 0, on_work_timer, v);
}

static bool has_room_for_rsts(const struct vsock *v)
{
    return v->rst_count + RSTS_PER_PACKET <= VSOCK_RSTS_MAX;
}

/* True if something was given back to the guest. tx_pending stays set when it stopped early. */
static bool tx_run(struct vsock *v)
{
    struct virtqueue *q = &v->base.queues[VSOCK_TXQ];
    struct err e = {0};
    unsigned done = 0;
    virtqueue_notifications(q, false);
    while (done < VSOCK_TX_BUDGET && has_room_for_rsts(v)) {
        int rc = pop_or_listen(q, &v->tx_chain, &e);
        if (rc == 0) {
            v->tx_pending = false;
            break;
        }
        if (rc > 0) {
            take_packet(v);
            rc = virtqueue_push(q, v->tx_chain.head, 0, &e);
            done++;
        }
        if (rc < 0) {
            fault(v, &e);
            break;
        }
    }
    return done > 0;
}

static int fill_rst(struct vsock *v, struct err *e)
{
    const struct vsock_rst r = v->rsts[v->rst_first];
    struct vsock_header h = {
        .src_cid = VSOCK_HOST_CID,
        .dst_cid = VSOCK_GUEST_CID,
        .src_port = r.host_port,
        .dst_port = r.guest_port,
        .type = r.type,
        .op = VSOCK_OP_RST,
    };
    uint8_t raw[VSOCK_HEADER_BYTES];
    v->rst_first = (v->rst_first + 1) % VSOCK_RSTS_MAX;
    v->rst_count--;
    if (r.type == 0) /* withdrawn */
        return 0;
    vsock_header_encode(raw, &h);
    (void)chain_write(&v->rx_chain, 0, raw, sizeof raw);
    return VSOCK_HEADER_BYTES;
}

/* One packet into the popped chain; resets go first, then each connection in its turn. */
static int fill_next(struct vsock *v, struct err *e)
{
    if (v->rx_chain.write_bytes < VSOCK_HEADER_BYTES)
        return err_set(e, ERR_GUEST, EPROTO,
                       "receive buffer of %llu bytes is shorter than a header",
                       (unsigned long long)v->rx_chain.write_bytes);
    if (v->rst_count > 0)
        return fill_rst(v, e);
    return vsock_conn_fill(TAILQ_FIRST(&v->rx_fifo), &v->rx_chain, e);
}

static bool rx_run(struct vsock *v)
{
    struct virtqueue *q = &v->base.queues[VSOCK_RXQ];
    struct err e = {0};
    unsigned done = 0;
    virtqueue_notifications(q, false);
    while (v->rst_count > 0 || !TAILQ_EMPTY(&v->rx_fifo)) {
        if (done == VSOCK_RX_BUDGET) {
            run_again_soon(v);
            break;
        }
        int rc = pop_or_listen(q, &v->rx_chain, &e);
        if (rc == 0)
            break; /* the guest notifies when it has put new buffers there */
        int n = rc < 0 ? rc : fill_next(v, &e);
        if (n > 0) {
            n = virtqueue_push(q, v->rx_chain.head, (uint32_t)n, &e);
            done++;
        } else if (n == 0) {
            virtqueue_unpop(q);
        }
        if (n < 0) {
            fault(v, &e);
            break;
        }
    }
    return done > 0;
}

static bool may_use_queues(const struct vsock *v)
{
    return !v->quiesced && virtio_device_is_live(&v->base);
}

static void run_queues(struct vsock *v)
{
    bool tx_used = false, rx_used = false;
    if (may_use_queues(v) && v->tx_pending)
        tx_used = tx_run(v);
    if (may_use_queues(v))
        rx_used = rx_run(v);
    if (may_use_queues(v) && v->tx_pending && has_room_for_rsts(v))
        run_again_soon(v); /* otherwise it goes on when new receive buffers take the resets */
    if (tx_used && virtio_device_is_live(&v->base))
        virtio_device_signal(&v->base, &v->base.queues[VSOCK_TXQ]);
    if (rx_used && virtio_device_is_live(&v->base))
        virtio_device_signal(&v->base, &v->base.queues[VSOCK_RXQ]);
}

void vsock_enter(struct vsock *v)
{
    v->depth++;
}

void vsock_leave(struct vsock *v)
{
    if (v->depth == 1) {
        run_queues(v);
        struct vsock_conn *c = v->event_conn;
        v->event_conn = NULL;
        if (c != NULL)
            vsock_conn_touch(c);
        if (c != NULL && c->state == CONN_RESET)
            run_queues(v); /* its host socket could not be watched */
        vsock_reap(v);
    }
    v->depth--;
}

static void config_read(struct virtio_device *dev, uint32_t offset, void *data, unsigned len)
{
    uint8_t config[8];
    le64_put(config, VSOCK_GUEST_CID); /* 5.10.4 */
    memset(data, 0, len);
    if (offset < sizeof config)
        memcpy(data, config + offset, (size_t)min_u64(len, sizeof config - offset));
}

static void kick(struct virtio_device *dev)
{
    struct vsock *v = vsock_of(dev);
    vsock_enter(v);
    v->tx_pending = true;
    vsock_leave(v);
}

static void notify(struct virtio_device *dev, unsigned queue)
{
    struct vsock *v = vsock_of(dev);
    vsock_enter(v);
    if (queue == VSOCK_TXQ)
        v->tx_pending = true;
    vsock_leave(v); /* new receive buffers are used there; the event queue has no events */
}

static void reset(struct virtio_device *dev)
{
    struct vsock *v = vsock_of(dev);
    vsock_enter(v);
    v->tx_pending = false;
    vsock_drop_all(v, "reset: the guest has reset its vsock driver");
    vsock_reap(v);
    v->depth--; /* not vsock_leave: the rings are the driver's again */
}

static int quiesce(struct virtio_device *dev, struct err *e)
{
    vsock_of(dev)->quiesced = true; /* nothing is ever in flight between two calls */
    return 0;
}

static void resume(struct virtio_device *dev)
{
    vsock_of(dev)->quiesced = false;
    vsock_of(dev)->paused = false;
    kick(dev);
}

static void free_device(struct virtio_device *dev)
{
    struct vsock *v = vsock_of(dev);
    v->control_ops = NULL; /* its owner asked for this end */
    vsock_drop_all(v, "reset: the machine has ended");
    vsock_reap(v);
    if (!v->forgotten) {
        loop_remove(v->loop, &v->listener);
        loop_timer_cancel(v->loop, &v->handshake_timer);
        loop_timer_cancel(v->loop, &v->work_timer);
        loop_timer_cancel(v->loop, &v->listener_timer);
    }
    fd_close(&v->listener_fd);
    fd_close(&v->spare_fd);
    free(v->path);
    free(v);
}

static const struct virtio_device_ops ops = {
    .config_read = config_read,
    .activate = kick,
    .reset = reset,
    .notify = notify,
    .quiesce = quiesce,
    .resume = resume,
    .save = vsock_save,
    .restore = vsock_restore,
    .free = free_device,
};

static int check_spec(const struct vsock_spec *spec, struct err *e)
{
    struct sockaddr_un addr;
    if (spec->granted_count > VSOCK_GRANTS_MAX)
        return err_set(e, ERR_LIMIT, 0, "%u granted vsock ports, at most %u are possible",
                       spec->granted_count, VSOCK_GRANTS_MAX);
    for (unsigned i = 0; i < spec->granted_count; i++) {
        uint32_t port = spec->granted_ports[i];
        if (port == VSOCK_CONTROL_PORT || port == VSOCK_PORT_ANY)
            return err_set(e, ERR_USAGE, 0, "vsock port %u cannot be granted", port);
        int len =
            snprintf(NULL, 0, "%s_%u", spec->socket_path == NULL ? "" : spec->socket_path, port);
        if (spec->socket_path == NULL || len < 0 || (size_t)len >= sizeof addr.sun_path)
            return err_set(e, ERR_USAGE, 0,
                           "socket path of granted port %u has %d bytes (%s_%u), expected 1 to %zu",
                           port, len, spec->socket_path == NULL ? "" : spec->socket_path, port,
                           sizeof addr.sun_path - 1);
    }
    return 0;
}

int vsock_create(struct virtio_device **out, const struct vsock_spec *spec, const struct ram *ram,
                 struct loop *loop, struct err *e)
{
    CLEANUP_FD int listener_fd = spec->listener_fd;
    int rc = check_spec(spec, e);
    if (rc < 0)
        return rc;
    struct vsock *v = calloc(1, sizeof *v);
    if (v == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "vsock device");
    v->base = (struct virtio_device){.ops = &ops,
                                     .name = "vsock",
                                     .device_id = VSOCK_DEVICE_ID,
                                     .features = VIRTIO_F_VERSION_1 | VIRTIO_F_RING_INDIRECT_DESC |
                                                 VIRTIO_F_RING_EVENT_IDX,
                                     .queue_count = 3};
    for (unsigned i = 0; i < v->base.queue_count; i++)
        v->base.queues[i].ram = ram;
    v->loop = loop;
    v->listener_fd = v->spare_fd = v->listener.fd = -1;
    v->gate_open = !spec->gate_closed;
    v->next_host_port = VSOCK_HOST_PORT_FIRST;
    v->control_ops = spec->control;
    v->control_arg = spec->control_arg;
    TAILQ_INIT(&v->all);
    TAILQ_INIT(&v->rx_fifo);
    TAILQ_INIT(&v->handshakes);
    TAILQ_INIT(&v->graveyard);
    for (unsigned i = 0; i < spec->granted_count; i++)
        v->grants[v->grant_count++] = spec->granted_ports[i];
    v->path = strdup(spec->socket_path == NULL ? "" : spec->socket_path);
    if (v->path == NULL)
        rc = err_set(e, ERR_HOST, ENOMEM, "vsock device");
    v->listener_fd = take_fd(&listener_fd);
    if (rc == 0 && v->listener_fd >= 0)
        rc = vsock_unix_listen(v, e);
    if (rc < 0) {
        free_device(&v->base);
        return rc;
    }
    *out = &v->base;
    return 0;
}

void vsock_open_gate(struct virtio_device *dev)
{
    struct vsock *v = vsock_of(dev);
    struct vsock_conn *c, *next;
    vsock_enter(v);
    v->gate_open = true;
    vsock_touch_all(v);
    for (c = TAILQ_FIRST(&v->handshakes); c != NULL; c = next) {
        next = TAILQ_NEXT(c, handshake);
        if (c->state == CONN_HELD)
            vsock_unix_request(c);
    }
    vsock_leave(v);
}

void vsock_set_paused(struct virtio_device *dev, bool paused)
{
    vsock_of(dev)->paused = paused; /* clients that came before wait for their time limit */
}

void vsock_forget(struct virtio_device *dev)
{
    struct vsock *v = vsock_of(dev);
    struct vsock_conn *c;
    v->forgotten = true;
    TAILQ_FOREACH (c, &v->all, all)
        fd_close(&c->fd);
    fd_close(&v->listener_fd);
    fd_close(&v->spare_fd);
}
