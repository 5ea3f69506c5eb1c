/*
 * vsock_conn: connections (virtio 1.2, 5.10.6): the table, what a packet of the guest does to one,
 * credit, and which packet it sends next. Called by the other vsock files, loop thread only.
 *
 * Invariants: a connection is in the table exactly in the states REQUESTED, OPEN and RESET; it has
 * at most one pending packet of each kind, so what waits for receive buffers is bounded by the
 * number of connections; numbers of the guest's credit are only compared, never used as a size.
 */
#include "devices/vsock_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"

static struct vsock_bucket *bucket_of(struct vsock *v, uint32_t guest_port, uint32_t host_port)
{
    uint64_t key = ((uint64_t)guest_port << 32 | host_port) * 0x9e3779b97f4a7c15u;
    return &v->table[(key >> 40) % VSOCK_BUCKETS];
}

struct vsock_conn *vsock_conn_find(struct vsock *v, uint32_t guest_port, uint32_t host_port)
{
    struct vsock_conn *c;
    LIST_FOREACH (c, bucket_of(v, guest_port, host_port), bucket) {
        if (c->guest_port == guest_port && c->host_port == host_port)
            return c;
    }
    return NULL;
}

struct vsock_conn *vsock_conn_new(struct vsock *v, enum conn_state state)
{
    struct vsock_conn *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->owner = v;
    c->state = state;
    c->fd = -1;
    c->source.fd = -1;
    c->to_host.cap = VSOCK_BUF_ALLOC;
    c->to_guest.cap = VSOCK_CONTROL_BYTES_MAX;
    TAILQ_INSERT_TAIL(&v->all, c, all);
    v->conn_count++;
    return c;
}

void vsock_conn_bind(struct vsock_conn *c, uint32_t guest_port, uint32_t host_port)
{
    c->guest_port = guest_port;
    c->host_port = host_port;
    LIST_INSERT_HEAD(bucket_of(c->owner, guest_port, host_port), c, bucket);
    c->in_table = true;
}

static void unbind(struct vsock_conn *c)
{
    if (c->in_table)
        LIST_REMOVE(c, bucket);
    c->in_table = false;
}

static void dequeue(struct vsock_conn *c)
{
    if (c->queued)
        TAILQ_REMOVE(&c->owner->rx_fifo, c, fifo);
    c->queued = false;
}

void vsock_conn_end_handshake(struct vsock_conn *c)
{
    if (c->in_handshake)
        TAILQ_REMOVE(&c->owner->handshakes, c, handshake);
    c->in_handshake = false;
}

/* In a fork child (forgotten) the epoll set is the parent's, so the source must not be removed. */
static void close_host(struct vsock_conn *c)
{
    struct vsock *v = c->owner;
    if (!v->forgotten)
        loop_remove(v->loop, &c->source);
    fd_close(&c->fd);
    v->buffered_bytes -= c->to_host.len;
    vsock_ring_clear(&c->to_host);
    vsock_ring_clear(&c->to_guest);
}

void vsock_conn_bury(struct vsock_conn *c)
{
    struct vsock *v = c->owner;
    if (c->state == CONN_GONE)
        return;
    close_host(c);
    unbind(c);
    dequeue(c);
    vsock_conn_end_handshake(c);
    TAILQ_REMOVE(&v->all, c, all);
    TAILQ_INSERT_TAIL(&v->graveyard, c, all);
    v->conn_count--;
    c->state = CONN_GONE;
    vsock_control_ended(c);
}

void vsock_reap(struct vsock *v)
{
    struct vsock_conn *c;
    while ((c = TAILQ_FIRST(&v->graveyard)) != NULL) {
        TAILQ_REMOVE(&v->graveyard, c, all);
        free(c);
    }
}

void vsock_drop_all(struct vsock *v, const char *reason)
{
    struct vsock_conn *c;
    while ((c = TAILQ_FIRST(&v->all)) != NULL) {
        if (c->in_handshake)
            vsock_unix_say_error(c, "%s", reason);
        vsock_conn_bury(c);
    }
    v->rst_count = 0;
}

void vsock_conn_reset(struct vsock_conn *c)
{
    bool guest_knows = c->state == CONN_OPEN || c->state == CONN_RESET ||
                       (c->state == CONN_REQUESTED && (c->pending & PENDING_REQUEST) == 0);
    if (!guest_knows) {
        vsock_conn_bury(c);
        return;
    }
    close_host(c);
    vsock_conn_end_handshake(c);
    c->state = CONN_RESET;
    c->pending = PENDING_RST;
    vsock_control_ended(c);
    vsock_conn_touch(c);
}

/* The guest has no part in it any more; its last bytes still go to the host peer. */
static void drain_or_bury(struct vsock_conn *c)
{
    if (c->to_host.len == 0 || c->host_deaf) {
        vsock_conn_bury(c);
        return;
    }
    unbind(c);
    dequeue(c);
    c->state = CONN_DRAIN;
    c->pending = 0;
    vsock_conn_touch(c);
}

/* 5.10.6.3: both counters run modulo 2^32; a guest that lies only stops its own stream. */
uint32_t vsock_conn_credit(const struct vsock_conn *c)
{
    uint32_t in_flight = c->tx_cnt - c->peer_fwd_cnt;
    return in_flight >= c->peer_buf_alloc ? 0 : c->peer_buf_alloc - in_flight;
}

/* The guest hears of room in time: half a buffer is left when it does. */
void vsock_conn_note_forwarded(struct vsock_conn *c, uint32_t n)
{
    c->fwd_cnt += n;
    if (c->state == CONN_OPEN && (uint32_t)(c->fwd_cnt - c->fwd_cnt_sent) >= VSOCK_BUF_ALLOC / 2)
        c->pending |= PENDING_CREDIT_UPDATE;
}

static bool has_bytes(const struct vsock_conn *c)
{
    if (c->state != CONN_OPEN || c->host_eof || (c->guest_shut & VSOCK_SHUT_RECEIVE) != 0)
        return false;
    return c->control ? c->to_guest.len > 0 : c->readable;
}

static uint32_t shut_to_tell(const struct vsock_conn *c)
{
    uint32_t wanted = (c->host_deaf ? VSOCK_SHUT_RECEIVE : 0) | (c->host_eof ? VSOCK_SHUT_SEND : 0);
    return c->state == CONN_OPEN ? wanted & ~c->shut_sent : 0;
}

static bool has_packet(const struct vsock_conn *c)
{
    if (c->waits_for_gate && !c->owner->gate_open)
        return false;
    return c->pending != 0 || shut_to_tell(c) != 0 || (has_bytes(c) && vsock_conn_credit(c) > 0);
}

static uint32_t wanted_events(const struct vsock_conn *c)
{
    uint32_t events = 0;
    if (c->state == CONN_LINE)
        events |= EPOLLIN;
    if (c->state == CONN_OPEN && !c->readable && !c->host_eof &&
        (c->guest_shut & VSOCK_SHUT_RECEIVE) == 0)
        events |= EPOLLIN;
    if (c->to_host.len > 0)
        events |= EPOLLOUT;
    return events;
}

/*
 * A source without events still reports that its peer has gone, which is wanted until it has been
 * seen (host_deaf); afterwards it would be reported again and again, so it leaves the loop.
 */
static void watch(struct vsock_conn *c)
{
    struct loop *loop = c->owner->loop;
    uint32_t events = wanted_events(c);
    if (c->fd < 0)
        return;
    if (events == 0 && c->host_deaf)
        loop_remove(loop, &c->source);
    else if (c->source.serial != 0)
        loop_set_events(loop, &c->source, events);
    else if (loop_add(loop, &c->source, c->fd, events, vsock_unix_event, c, NULL) < 0)
        vsock_conn_reset(c); /* the host has no room for it */
}

void vsock_conn_touch(struct vsock_conn *c)
{
    struct vsock *v = c->owner;
    if (c->state == CONN_GONE)
        return;
    if (c->state == CONN_OPEN && c->host_deaf && c->host_eof && c->fd >= 0)
        close_host(c); /* nothing can pass any more; the guest is told by SHUTDOWN */
    if (has_bytes(c) && vsock_conn_credit(c) == 0 && !c->credit_asked) {
        c->credit_asked = true;
        c->pending |= PENDING_CREDIT_REQUEST;
    }
    if (!c->queued && has_packet(c)) {
        TAILQ_INSERT_TAIL(&v->rx_fifo, c, fifo);
        c->queued = true;
    }
    if (c != v->event_conn) /* the queues run first: mostly its events need no change then */
        watch(c);
}

void vsock_touch_all(struct vsock *v)
{
    struct vsock_conn *c, *next;
    for (c = TAILQ_FIRST(&v->all); c != NULL; c = next) {
        next = TAILQ_NEXT(c, all); /* before c can move to the graveyard */
        vsock_conn_touch(c);
    }
}

static void update_credit(struct vsock_conn *c, const struct vsock_header *h)
{
    c->peer_buf_alloc = h->buf_alloc;
    c->peer_fwd_cnt = h->fwd_cnt;
    if (vsock_conn_credit(c) > 0)
        c->credit_asked = false;
}

static bool is_granted(const struct vsock *v, uint32_t port)
{
    for (unsigned i = 0; i < v->grant_count; i++) {
        if (v->grants[i] == port)
            return true;
    }
    return false;
}

/* A late RST must not hit the connection that takes over its ports. */
static void forget_rst(struct vsock *v, uint32_t guest_port, uint32_t host_port)
{
    for (unsigned i = 0; i < v->rst_count; i++) {
        struct vsock_rst *r = &v->rsts[(v->rst_first + i) % VSOCK_RSTS_MAX];
        if (r->guest_port == guest_port && r->host_port == host_port)
            r->type = 0;
    }
}

static void handle_request(struct vsock *v, const struct vsock_header *h)
{
    forget_rst(v, h->src_port, h->dst_port);
    if (h->dst_port == VSOCK_CONTROL_PORT) {
        vsock_control_accept(v, h);
        return;
    }
    struct vsock_conn *c = NULL;
    int fd = -1;
    if (v->gate_open && is_granted(v, h->dst_port) && v->conn_count < VSOCK_CONNECTIONS_MAX)
        fd = vsock_unix_connect(v, h->dst_port);
    if (fd >= 0)
        c = vsock_conn_new(v, CONN_OPEN);
    if (c == NULL) {
        fd_close(&fd);
        vsock_queue_rst(v, h->src_port, h->dst_port, VSOCK_TYPE_STREAM);
        return;
    }
    c->fd = take_fd(&fd);
    vsock_conn_bind(c, h->src_port, h->dst_port);
    update_credit(c, h);
    c->pending = PENDING_RESPONSE;
    vsock_conn_touch(c);
}

static void handle_shutdown(struct vsock_conn *c, const struct vsock_header *h)
{
    c->guest_shut |= h->flags & VSOCK_SHUT_BOTH;
    /* The VMM's own end has no use for half a connection. */
    if (c->guest_shut == VSOCK_SHUT_BOTH || (c->control && c->guest_shut != 0)) {
        vsock_queue_rst(c->owner, c->guest_port, c->host_port, VSOCK_TYPE_STREAM);
        drain_or_bury(c);
        return;
    }
    if ((c->guest_shut & VSOCK_SHUT_RECEIVE) != 0 && c->fd >= 0)
        (void)shutdown(c->fd, SHUT_RD); /* the peer then gets EPIPE; fails only if it has gone */
    vsock_unix_flush(c);
}

static void handle_data(struct vsock_conn *c, const struct vsock_header *h)
{
    struct vsock *v = c->owner;
    if ((c->guest_shut & VSOCK_SHUT_SEND) != 0) {
        vsock_bad_packet(v, h, "data after its own shutdown");
        vsock_conn_reset(c);
    } else if (h->len > VSOCK_BUF_ALLOC - c->to_host.len) {
        vsock_bad_packet(v, h, "more data than credit");
        vsock_conn_reset(c);
    } else if (c->control) {
        vsock_control_receive(c, h->len);
    } else {
        vsock_unix_receive(c, h->len);
    }
}

static void handle_open(struct vsock_conn *c, const struct vsock_header *h)
{
    switch (h->op) {
    case VSOCK_OP_RW:
        handle_data(c, h);
        break;
    case VSOCK_OP_CREDIT_UPDATE:
        break;
    case VSOCK_OP_CREDIT_REQUEST:
        c->pending |= PENDING_CREDIT_UPDATE;
        break;
    case VSOCK_OP_SHUTDOWN:
        handle_shutdown(c, h);
        break;
    case VSOCK_OP_RST:
        drain_or_bury(c);
        break;
    case VSOCK_OP_REQUEST: /* the guest has forgotten the old one */
        vsock_conn_bury(c);
        handle_request(c->owner, h);
        break;
    default:
        vsock_bad_packet(c->owner, h, "operation does not fit an open connection");
        vsock_conn_reset(c);
    }
}

static void handle_requested(struct vsock_conn *c, const struct vsock_header *h)
{
    if (h->op == VSOCK_OP_RESPONSE && (c->pending & PENDING_REQUEST) == 0) {
        vsock_unix_accepted(c);
        return;
    }
    if (h->op == VSOCK_OP_RST) {
        vsock_unix_say_error(c, "refused: nothing listens on guest port %u", c->guest_port);
        vsock_conn_bury(c);
        return;
    }
    vsock_bad_packet(c->owner, h, "operation does not answer a request");
    vsock_unix_say_error(c, "refused: the guest broke the vsock protocol");
    vsock_conn_reset(c);
}

void vsock_handle_packet(struct vsock *v, const struct vsock_header *h)
{
    struct vsock_conn *c = vsock_conn_find(v, h->src_port, h->dst_port);
    if (c != NULL && c->state == CONN_RESET && (h->op == VSOCK_OP_REQUEST || h->op == VSOCK_OP_RST))
        vsock_conn_bury(c); /* the guest knows that it has ended */
    else if (c != NULL && c->state == CONN_RESET)
        return;
    if (c == NULL || c->state == CONN_GONE) {
        if (h->op == VSOCK_OP_REQUEST)
            handle_request(v, h);
        else if (h->op != VSOCK_OP_RST)
            vsock_queue_rst(v, h->src_port, h->dst_port, VSOCK_TYPE_STREAM);
        return;
    }
    update_credit(c, h);
    if (c->state == CONN_REQUESTED)
        handle_requested(c, h);
    else
        handle_open(c, h);
    vsock_conn_touch(c);
}

void vsock_write_header(struct vsock_conn *c, const struct chain *chain, uint16_t op, uint32_t len,
                        uint32_t flags)
{
    struct vsock_header h = {
        .src_cid = VSOCK_HOST_CID,
        .dst_cid = VSOCK_GUEST_CID,
        .src_port = c->host_port,
        .dst_port = c->guest_port,
        .len = len,
        .type = VSOCK_TYPE_STREAM,
        .op = op,
        .flags = flags,
        .buf_alloc = VSOCK_BUF_ALLOC,
        .fwd_cnt = c->fwd_cnt,
    };
    uint8_t raw[VSOCK_HEADER_BYTES];
    vsock_header_encode(raw, &h);
    (void)chain_write(chain, 0, raw, sizeof raw); /* the caller has checked the room */
    c->fwd_cnt_sent = c->fwd_cnt;
    c->pending &= ~PENDING_CREDIT_UPDATE; /* every header carries the credit */
}

/* Bytes of payload put behind the header; 0: none just now; -EPROTO. */
static int fill_data(struct vsock_conn *c, const struct chain *chain, struct err *e)
{
    uint64_t room = chain->write_bytes - VSOCK_HEADER_BYTES;
    if (room == 0)
        return err_set(e, ERR_GUEST, EPROTO, "vsock receive buffer has no room behind the header");
    room = min_u64(min_u64(room, VSOCK_PACKET_BYTES_MAX), vsock_conn_credit(c));
    if (c->control) {
        uint32_t n = vsock_control_read(c, chain, (uint32_t)room);
        c->tx_cnt += n;
        return (int)n;
    }
    int n = vsock_unix_read(c, chain, (uint32_t)room);
    if (n < 0 && n != -EAGAIN) {
        vsock_conn_reset(c);
        return 0;
    }
    c->host_eof = n == 0;
    c->readable = n > 0 && (uint64_t)n == room; /* a short read has emptied the socket */
    if (n <= 0)
        return 0;
    c->tx_cnt += (uint32_t)n;
    return n;
}

int vsock_conn_fill(struct vsock_conn *c, const struct chain *chain, struct err *e)
{
    uint16_t op = VSOCK_OP_INVALID;
    uint32_t flags = 0, len = 0;
    dequeue(c);
    if (c->pending == 0 || (c->pending & ~PENDING_ANY_TIME) == 0) {
        int n = has_bytes(c) && vsock_conn_credit(c) > 0 ? fill_data(c, chain, e) : 0;
        if (n < 0)
            return n;
        len = (uint32_t)n;
    }
    if (len > 0) {
        op = VSOCK_OP_RW;
    } else if ((c->pending & PENDING_RST) != 0) {
        op = VSOCK_OP_RST;
    } else if ((c->pending & PENDING_REQUEST) != 0) {
        op = VSOCK_OP_REQUEST;
        c->pending &= ~PENDING_REQUEST;
    } else if ((c->pending & PENDING_RESPONSE) != 0) {
        op = VSOCK_OP_RESPONSE;
        c->pending &= ~PENDING_RESPONSE;
    } else if ((flags = shut_to_tell(c)) != 0) {
        op = VSOCK_OP_SHUTDOWN;
        c->shut_sent |= flags;
        flags = c->shut_sent;
    } else if ((c->pending & PENDING_CREDIT_REQUEST) != 0) {
        op = VSOCK_OP_CREDIT_REQUEST;
        c->pending &= ~PENDING_CREDIT_REQUEST;
    } else if ((c->pending & PENDING_CREDIT_UPDATE) != 0) {
        op = VSOCK_OP_CREDIT_UPDATE;
    }
    if (op != VSOCK_OP_INVALID)
        vsock_write_header(c, chain, op, len, flags);
    if (op == VSOCK_OP_RST)
        vsock_conn_bury(c);
    vsock_conn_touch(c);
    return op == VSOCK_OP_INVALID ? 0 : (int)(VSOCK_HEADER_BYTES + len);
}
