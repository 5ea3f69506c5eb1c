/*
 * control_client: see control_client.h.
 */
#include "vmm/control_client.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "vmm/control.h"
#include "vmm/control_parse.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

#define READ_CHUNK 65536
#define KEEP_BUFFER 65536 /* an empty buffer larger than this is given back */

static void client_free(struct client *c)
{
    free(c->in);
    free(c->out);
    free(c);
}

static void enter(struct client *c)
{
    c->busy++;
}

/* Not inlined: the compiler would then see a use after free that `busy` rules out. */
static __attribute__((noinline)) void leave(struct client *c)
{
    if (--c->busy == 0 && c->dead)
        client_free(c);
}

/* What to listen for follows from the state alone. */
static void update_events(struct client *c)
{
    uint32_t events = 0;
    if (c->dead)
        return;
    if (!c->eof && !c->closing && c->pending < CONTROL_PENDING_MAX)
        events |= EPOLLIN;
    if (c->out_off < c->out_len)
        events |= EPOLLOUT;
    loop_set_events(c->loop, &c->source, events);
}

void client_drop(struct client *c)
{
    if (c->dead)
        return;
    enter(c);
    c->dead = true;
    loop_timer_cancel(c->loop, &c->partial_timer);
    loop_timer_cancel(c->loop, &c->resume_timer);
    loop_remove(c->loop, &c->source);
    fd_close(&c->fd);
    c->ops->gone(c->arg, c);
    leave(c);
}

void client_forget(struct client *c)
{
    fd_close(&c->fd);
    c->dead = true;
    if (c->busy == 0) /* else the fork happened below one of its own lines: freed on the way up */
        client_free(c);
}

static bool grow(char **buf, size_t *cap, size_t need)
{
    if (need <= *cap)
        return true;
    size_t cap_new = *cap == 0 ? 4096 : *cap;
    while (cap_new < need)
        cap_new *= 2;
    char *p = realloc(*buf, cap_new);
    if (p == NULL)
        return false;
    *buf = p;
    *cap = cap_new;
    return true;
}

static void shrink(char **buf, size_t *cap)
{
    if (*cap > KEEP_BUFFER) {
        free(*buf);
        *buf = NULL;
        *cap = 0;
    }
}

/* Sends what it can. Drops the client on a dead connection. */
static void flush_output(struct client *c)
{
    while (!c->dead && c->out_off < c->out_len) {
        ssize_t n =
            send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (n < 0) {
            client_drop(c);
            return;
        }
        c->out_off += (size_t)n;
    }
    if (c->out_off == c->out_len) {
        c->out_off = c->out_len = 0;
        shrink(&c->out, &c->out_cap);
    }
}

/* After a flush: a client that is done and has all its answers is closed. */
static void settle(struct client *c)
{
    if (c->dead)
        return;
    bool all_out = c->out_len == 0;
    if (all_out && (c->closing || (c->eof && c->pending == 0 && c->in_len == 0)))
        client_drop(c);
    else
        update_events(c);
}

void client_send(struct client *c, const char *bytes, size_t len)
{
    if (c->dead)
        return;
    enter(c);
    if (c->out_off > 0) {
        memmove(c->out, c->out + c->out_off, c->out_len - c->out_off);
        c->out_len -= c->out_off;
        c->out_off = 0;
    }
    uint64_t need;
    if (!add_u64(c->out_len, len, &need) || need > CONTROL_OUTPUT_MAX ||
        !grow(&c->out, &c->out_cap, need)) {
        client_drop(c);
    } else {
        memcpy(c->out + c->out_len, bytes, len);
        c->out_len += len;
        flush_output(c);
        settle(c);
    }
    leave(c);
}

void client_finish(struct client *c)
{
    enter(c);
    c->closing = true;
    loop_timer_cancel(c->loop, &c->partial_timer);
    settle(c);
    leave(c);
}

static void on_partial_timeout(void *arg)
{
    struct client *c = arg;
    enter(c);
    c->ops->broken(c->arg, c, RPC_TOO_SLOW);
    client_finish(c);
    leave(c);
}

/* Handles complete lines until none is left or the client is held back. */
static void process_lines(struct client *c)
{
    size_t start = 0;
    while (!c->dead && !c->closing && c->pending < CONTROL_PENDING_MAX) {
        char *nl = memchr(c->in + start + c->in_scanned, '\n', c->in_len - start - c->in_scanned);
        if (nl == NULL) {
            c->in_scanned = c->in_len - start;
            break;
        }
        size_t len = (size_t)(nl - (c->in + start));
        c->in_scanned = 0;
        if (len > CONTROL_LINE_MAX) {
            c->ops->broken(c->arg, c, RPC_TOO_LARGE);
            client_finish(c);
            break;
        }
        c->ops->line(c->arg, c, c->in + start, len);
        start += len + 1;
    }
    if (c->dead)
        return;
    memmove(c->in, c->in + start, c->in_len - start);
    c->in_len -= start;
    if (c->in_len == 0)
        shrink(&c->in, &c->in_cap);
}

/* The clock of a begun line runs only while we would read the rest of it. */
static void watch_partial(struct client *c)
{
    bool partial = c->in_len > 0 && c->in_scanned == c->in_len;
    if (c->closing || c->eof || !partial || c->pending >= CONTROL_PENDING_MAX)
        loop_timer_cancel(c->loop, &c->partial_timer);
    else if (c->partial_timer.deadline_ns == 0)
        loop_timer_arm(c->loop, &c->partial_timer, CONTROL_PARTIAL_NS, on_partial_timeout, c);
}

static void go_on(struct client *c)
{
    if (c->in_len > 0) {
        size_t before = c->in_len;
        process_lines(c);
        if (!c->dead && c->in_len < before)
            loop_timer_cancel(c->loop, &c->partial_timer); /* what is left is a new line */
    }
    if (!c->dead && !c->closing && c->in_scanned > CONTROL_LINE_MAX) {
        c->ops->broken(c->arg, c, RPC_TOO_LARGE);
        client_finish(c);
    }
    if (!c->dead && c->eof && c->pending < CONTROL_PENDING_MAX)
        c->in_len = c->in_scanned = 0; /* a last line without its newline is no message */
    if (!c->dead)
        watch_partial(c);
    settle(c);
}

static void on_resume(void *arg)
{
    struct client *c = arg;
    enter(c);
    go_on(c);
    leave(c);
}

static void read_some(struct client *c)
{
    if (!grow(&c->in, &c->in_cap, c->in_len + READ_CHUNK)) {
        client_drop(c);
        return;
    }
    ssize_t n = recv(c->fd, c->in + c->in_len, READ_CHUNK, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK))
        return;
    if (n < 0) {
        client_drop(c);
        return;
    }
    if (n == 0)
        c->eof = true;
    c->in_len += (size_t)n;
    go_on(c);
}

static void on_event(void *arg, uint32_t events)
{
    struct client *c = arg;
    enter(c);
    if (events & EPOLLOUT) {
        flush_output(c);
        settle(c);
    }
    if (!c->dead && (events & EPOLLIN))
        read_some(c);
    /* Both directions gone, and nothing left to read that we still want. */
    if (!c->dead && (events & (EPOLLHUP | EPOLLERR)) && !(events & EPOLLIN))
        client_drop(c);
    leave(c);
}

int client_create(struct client **out, struct loop *loop, int fd, const struct client_ops *ops,
                  void *arg, struct err *e)
{
    struct client *c = calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "control client");
    c->fd = fd;
    c->loop = loop;
    c->ops = ops;
    c->arg = arg;
    int rc = loop_add(loop, &c->source, fd, EPOLLIN, on_event, c, e);
    if (rc < 0) {
        client_free(c);
        return rc;
    }
    *out = c;
    return 0;
}

void client_begin_request(struct client *c)
{
    c->pending++;
}

void client_end_request(struct client *c)
{
    c->pending--;
    if (c->dead)
        return;
    /* Not from here: an op may be answering, and the next line would call the next op inside it. */
    if (c->in_len > 0 || c->eof)
        loop_timer_arm(c->loop, &c->resume_timer, 0, on_resume, c);
    update_events(c);
}

void client_drain(struct client *c, int timeout_ms)
{
    uint64_t end = clock_mono_ns() + (uint64_t)timeout_ms * 1000000u;
    enter(c);
    flush_output(c);
    while (!c->dead && c->out_len > 0) {
        uint64_t now = clock_mono_ns();
        if (now >= end)
            break;
        struct pollfd p = {.fd = c->fd, .events = POLLOUT};
        (void)poll(&p, 1, (int)((end - now) / 1000000u) + 1); /* a time-out ends at `now >= end` */
        flush_output(c);
    }
    leave(c);
}
