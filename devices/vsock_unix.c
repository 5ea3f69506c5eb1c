/*
 * vsock_unix: the host side of vsock. Clients of the listener say "CONNECT <port>\n" and get
 * "OK <host port>\n" or "ERR <reason>\n"; guest connections to granted ports go to "<path>_<port>";
 * open connections are pumped. Called by the loop and the other vsock files, loop thread only.
 *
 * Every socket is non-blocking and written with MSG_NOSIGNAL: a peer may vanish at any point. Event
 * flags are hints only; what a read, write or poll says counts.
 */
#include "devices/vsock_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "devices/vsock_line.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"

#define ACCEPTS_PER_EVENT 16
#define DISCARD_ROUNDS 16
#define TIMEOUT_S (VSOCK_CONNECT_TIMEOUT_NS / 1000000000u)
#define LISTENER_REST_NS 100000000u

void vsock_unix_say_error(struct vsock_conn *c, const char *fmt, ...)
{
    char text[160], line[180];
    va_list ap;
    if (c->fd < 0)
        return;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    int n = snprintf(line, sizeof line, "ERR %s\n", text);
    /* Nothing was sent on this socket before, so a short line fits, unless the client has gone. */
    (void)!send(c->fd, line, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT);
    /* Unread bytes at the close would make the client's next read fail instead of end. */
    uint8_t rest[4096];
    for (unsigned i = 0; i < DISCARD_ROUNDS; i++) {
        if (recv(c->fd, rest, sizeof rest, MSG_DONTWAIT) <= 0)
            break;
    }
}

static void refuse(struct vsock_conn *c, const char *why)
{
    vsock_unix_say_error(c, "%s", why);
    vsock_conn_reset(c);
}

static void on_handshake_timer(void *arg)
{
    struct vsock *v = arg;
    struct vsock_conn *c;
    vsock_enter(v);
    uint64_t now = clock_mono_ns();
    while ((c = TAILQ_FIRST(&v->handshakes)) != NULL && c->deadline_ns <= now) {
        if (v->paused)
            vsock_unix_say_error(c, "paused: the machine is paused");
        else if (c->state == CONN_LINE)
            vsock_unix_say_error(c, "timed out: no CONNECT line within %llu s", TIMEOUT_S);
        else if (c->state == CONN_HELD)
            vsock_unix_say_error(c, "timed out: this copy was not renewed within %llu s",
                                 TIMEOUT_S);
        else
            vsock_unix_say_error(c, "timed out: the guest did not answer within %llu s", TIMEOUT_S);
        vsock_conn_reset(c);
    }
    if (c != NULL)
        loop_timer_arm(v->loop, &v->handshake_timer, c->deadline_ns - now, on_handshake_timer, v);
    vsock_leave(v);
}

/* All have the same time limit, so the list is in the order of deadlines. */
static void begin_handshake(struct vsock *v, struct vsock_conn *c)
{
    c->deadline_ns = clock_mono_ns() + VSOCK_CONNECT_TIMEOUT_NS;
    TAILQ_INSERT_TAIL(&v->handshakes, c, handshake);
    c->in_handshake = true;
    if (v->handshake_timer.deadline_ns == 0)
        loop_timer_arm(v->loop, &v->handshake_timer, VSOCK_CONNECT_TIMEOUT_NS, on_handshake_timer,
                       v);
}

static bool take_host_port(struct vsock *v, uint32_t guest_port, uint32_t *out)
{
    for (unsigned tries = 0; tries <= VSOCK_CONNECTIONS_MAX + 1; tries++) {
        uint32_t port = v->next_host_port++;
        if (v->next_host_port == VSOCK_PORT_ANY)
            v->next_host_port = VSOCK_HOST_PORT_FIRST;
        if (vsock_conn_find(v, guest_port, port) == NULL) {
            *out = port;
            return true;
        }
    }
    return false;
}

void vsock_unix_request(struct vsock_conn *c)
{
    uint32_t host_port;
    if (!take_host_port(c->owner, c->guest_port, &host_port)) {
        refuse(c, "busy: no free host port");
        return;
    }
    vsock_conn_bind(c, c->guest_port, host_port);
    c->state = CONN_REQUESTED;
    c->pending = PENDING_REQUEST;
    vsock_conn_touch(c);
}

void vsock_unix_accepted(struct vsock_conn *c)
{
    char line[32];
    int n = snprintf(line, sizeof line, "OK %u\n", c->host_port);
    vsock_conn_end_handshake(c);
    c->state = CONN_OPEN;
    if (send(c->fd, line, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT) != n)
        vsock_conn_reset(c); /* the client has gone */
}

static void line_complete(struct vsock_conn *c)
{
    struct vsock *v = c->owner;
    uint32_t port;
    if (vsock_line_parse(c->line, c->line_len, &port) < 0) {
        refuse(c, "bad request: expected CONNECT <port>, port 0 to 4294967294");
    } else if (v->paused) {
        refuse(c, "paused: the machine is paused");
    } else if (!virtio_device_is_live(&v->base)) {
        refuse(c, "not ready: the guest has not started its vsock driver");
    } else {
        c->guest_port = port;
        c->state = CONN_HELD;
        if (v->gate_open)
            vsock_unix_request(c);
    }
}

/* Takes bytes up to the newline and none behind it: those are the guest's. */
static void read_line(struct vsock_conn *c)
{
    uint8_t *at = c->line + c->line_len;
    ssize_t n = recv(c->fd, at, sizeof c->line - c->line_len, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        vsock_conn_bury(c);
        return;
    }
    const uint8_t *newline = memchr(at, '\n', (size_t)n);
    size_t take = newline != NULL ? (size_t)(newline - at) + 1 : (size_t)n;
    if (recv(c->fd, at, take, MSG_DONTWAIT) != (ssize_t)take) {
        vsock_conn_bury(c); /* cannot be: the bytes were there and nobody else reads */
        return;
    }
    c->line_len += (unsigned)take;
    if (newline != NULL)
        line_complete(c);
    else if (c->line_len == sizeof c->line)
        refuse(c, "bad request: line too long");
}

static void add_client(struct vsock *v, int *fd)
{
    struct vsock_conn *c = NULL;
    bool full = v->conn_count >= VSOCK_CONNECTIONS_MAX;
    if (!full)
        c = vsock_conn_new(v, CONN_LINE);
    if (c == NULL) {
        struct vsock_conn refused = {.owner = v, .fd = *fd};
        vsock_unix_say_error(&refused, "busy: %u connections are open", v->conn_count);
        return;
    }
    c->fd = take_fd(fd);
    begin_handshake(v, c);
    read_line(c); /* most clients have sent it by now */
    vsock_conn_touch(c);
}

/* Out of fds: one is kept to tell a client so. False when it could not be used. */
static bool refuse_one_without_fds(struct vsock *v)
{
    fd_close(&v->spare_fd);
    CLEANUP_FD int fd = accept4(v->listener_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
        struct vsock_conn refused = {.owner = v, .fd = fd};
        vsock_unix_say_error(&refused, "busy: the VMM is out of file descriptors");
        fd_close(&fd);
    }
    v->spare_fd = fcntl(v->listener_fd, F_DUPFD_CLOEXEC, 0);
    return v->spare_fd >= 0;
}

static void on_listener(void *arg, uint32_t events);

static void on_listener_rested(void *arg)
{
    struct vsock *v = arg;
    loop_set_events(v->loop, &v->listener, EPOLLIN);
}

static void on_listener(void *arg, uint32_t events)
{
    struct vsock *v = arg;
    vsock_enter(v);
    for (unsigned i = 0; i < ACCEPTS_PER_EVENT; i++) {
        CLEANUP_FD int fd = accept4(v->listener_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            add_client(v, &fd);
            continue;
        }
        if (errno == EAGAIN)
            break;
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if ((errno == EMFILE || errno == ENFILE) && v->spare_fd >= 0 && refuse_one_without_fds(v))
            continue;
        /* Without a pause the same event would come again at once, for ever. */
        loop_set_events(v->loop, &v->listener, 0);
        loop_timer_arm(v->loop, &v->listener_timer, LISTENER_REST_NS, on_listener_rested, v);
        break;
    }
    vsock_leave(v);
}

int vsock_unix_listen(struct vsock *v, struct err *e)
{
    v->spare_fd = fcntl(v->listener_fd, F_DUPFD_CLOEXEC, 0);
    if (v->spare_fd < 0)
        return err_sys(e, "reserve a file descriptor");
    return loop_add(v->loop, &v->listener, v->listener_fd, EPOLLIN, on_listener, v, e);
}

int vsock_unix_connect(struct vsock *v, uint32_t port)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int n = snprintf(addr.sun_path, sizeof addr.sun_path, "%s_%u", v->path, port);
    if (n < 0 || (size_t)n >= sizeof addr.sun_path)
        return -ENAMETOOLONG;
    CLEANUP_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    /* A Unix socket connects at once or not at all (EAGAIN: the listener's backlog is full). */
    if (connect(fd, (struct sockaddr *)&addr, sizeof addr) < 0)
        return -errno;
    return take_fd(&fd);
}

/* The host peer takes nothing any more: what waits for it is forgotten, the guest will be told. */
static void become_deaf(struct vsock_conn *c)
{
    c->host_deaf = true;
    c->owner->buffered_bytes -= c->to_host.len;
    vsock_conn_note_forwarded(c, c->to_host.len);
    vsock_ring_clear(&c->to_host);
}

/* Bytes written, 0 when the socket is full; on an error 0 as well and the connection is deaf. */
static uint32_t write_some(struct vsock_conn *c, struct iovec *iov, size_t count)
{
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = count};
    ssize_t n = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        become_deaf(c);
    return n > 0 ? (uint32_t)n : 0;
}

void vsock_unix_flush(struct vsock_conn *c)
{
    struct iovec spans[2];
    while (c->to_host.len > 0) {
        int count = vsock_ring_peek(&c->to_host, spans);
        uint32_t n = write_some(c, spans, (size_t)count);
        if (n == 0)
            break;
        vsock_ring_consume(&c->to_host, n);
        c->owner->buffered_bytes -= n;
        vsock_conn_note_forwarded(c, n);
    }
    if (c->to_host.len > 0)
        return;
    if (c->state == CONN_DRAIN) {
        vsock_conn_bury(c);
    } else if ((c->guest_shut & VSOCK_SHUT_SEND) != 0 && !c->wr_shut && c->fd >= 0) {
        (void)shutdown(c->fd, SHUT_WR); /* fails only if the peer has gone */
        c->wr_shut = true;
    }
}

/* Payload [skip, skip + len) of the packet in tx_chain into to_host. */
static void keep(struct vsock_conn *c, uint32_t skip, uint32_t len)
{
    struct vsock *v = c->owner;
    struct iovec spans[2];
    if (v->buffered_bytes + len > VSOCK_BUFFERED_MAX ||
        !vsock_ring_reserve(&c->to_host, len, spans)) {
        vsock_conn_reset(c); /* the host has no memory for it; other connections go on */
        return;
    }
    uint64_t at = VSOCK_HEADER_BYTES + (uint64_t)skip;
    (void)chain_read(&v->tx_chain, at, spans[0].iov_base, spans[0].iov_len);
    (void)chain_read(&v->tx_chain, at + spans[0].iov_len, spans[1].iov_base, spans[1].iov_len);
    vsock_ring_commit(&c->to_host, len);
    v->buffered_bytes += len;
}

/* The part [offset, offset + len) of the segments [first, last) as an iovec; returns its length. */
static size_t iov_of(const struct chain *c, unsigned first, unsigned last, uint64_t offset,
                     uint64_t len, struct iovec *iov)
{
    size_t n = 0;
    for (unsigned i = first; i < last && len > 0; i++) {
        const struct chain_segment *s = &c->segments[i];
        if (offset >= s->len) {
            offset -= s->len;
            continue;
        }
        uint64_t take = min_u64(len, s->len - offset);
        iov[n++] = (struct iovec){.iov_base = (uint8_t *)s->host + offset, .iov_len = take};
        len -= take;
        offset = 0;
    }
    return n;
}

void vsock_unix_receive(struct vsock_conn *c, uint32_t len)
{
    const struct chain *chain = &c->owner->tx_chain;
    uint32_t sent = 0;
    if (len == 0)
        return;
    if (!c->host_deaf && c->to_host.len == 0) {
        struct iovec iov[CHAIN_SEGMENTS_MAX];
        size_t n = iov_of(chain, 0, chain->readable, VSOCK_HEADER_BYTES, len, iov);
        sent = write_some(c, iov, n);
        vsock_conn_note_forwarded(c, sent);
    }
    if (c->host_deaf)
        vsock_conn_note_forwarded(c, len - sent); /* was under way when the peer went */
    else if (sent < len)
        keep(c, sent, len - sent);
}

int vsock_unix_read(struct vsock_conn *c, const struct chain *chain, uint32_t room)
{
    struct iovec iov[CHAIN_SEGMENTS_MAX];
    size_t count = iov_of(chain, chain->readable, chain->count, VSOCK_HEADER_BYTES, room, iov);
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = count};
    ssize_t n = recvmsg(c->fd, &msg, MSG_DONTWAIT);
    if (n < 0)
        return errno == EINTR ? -EAGAIN : -errno;
    return (int)n;
}

/* The flags may be those of an earlier connection at the same address in the same loop round. */
static bool peer_has_gone(const struct vsock_conn *c, uint32_t events)
{
    if ((events & (EPOLLHUP | EPOLLERR)) == 0)
        return false;
    struct pollfd p = {.fd = c->fd};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLERR)) != 0;
}

static void open_event(struct vsock_conn *c, uint32_t events, bool gone)
{
    if (gone && !c->host_deaf)
        become_deaf(c);
    if (c->to_host.len > 0)
        vsock_unix_flush(c);
    if ((c->guest_shut & VSOCK_SHUT_RECEIVE) != 0)
        c->host_eof = c->host_eof || gone; /* nobody will read what is left */
    else if (!c->host_eof && (gone || (events & EPOLLIN) != 0))
        c->readable = true;
}

void vsock_unix_event(void *arg, uint32_t events)
{
    struct vsock_conn *c = arg;
    struct vsock *v = c->owner;
    vsock_enter(v);
    v->event_conn = c;
    bool gone = peer_has_gone(c, events);
    switch (c->state) {
    case CONN_LINE:
        read_line(c);
        break;
    case CONN_HELD:
    case CONN_REQUESTED:
        if (gone)
            vsock_conn_reset(c);
        break;
    case CONN_OPEN:
        open_event(c, events, gone);
        break;
    case CONN_DRAIN:
        if (gone)
            vsock_conn_bury(c);
        else
            vsock_unix_flush(c);
        break;
    case CONN_RESET:
    case CONN_GONE:
        break; /* closed: no source any more */
    }
    vsock_conn_touch(c);
    vsock_leave(v);
}
