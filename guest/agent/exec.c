/*
 * exec: one exec connection from accept to close (docs/agent-protocol.md 2), on the loop thread.
 *
 * A slot is freed when three things are over: its connection is closed, its program is reaped, and
 * no sweep is under way. Bytes move in exec_in.c and exec_out.c; this file decides what is over.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

void stream_close(struct stream *s)
{
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
    s->ready = false;
}

static void conn_close(struct exec *x)
{
    if (x->conn >= 0)
        close(x->conn);
    x->conn = -1;
    x->tx_len = x->tx_off = 0;
}

/* Tells a client there is no room. Best effort: it is a fresh socket with an empty buffer. */
static void refuse(int conn)
{
    static const char text[] = "all exec connections are in use";
    uint8_t frame[WIRE_HEADER_SIZE + 4 + sizeof text - 1];
    wire_header_put(frame, WIRE_ERROR, sizeof frame - WIRE_HEADER_SIZE);
    wire_put32(frame + WIRE_HEADER_SIZE, WIRE_ERR_BUSY);
    memcpy(frame + WIRE_HEADER_SIZE + 4, text, sizeof text - 1);
    (void)send(conn, frame, sizeof frame, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(conn);
}

/* Resets the head of a slot; its buffers are left untouched, so they cost no page faults. */
static void slot_init(struct agent *a, struct exec *x, int conn)
{
    memset(x, 0, offsetof(struct exec, rx));
    x->used = true;
    x->serial = ++a->serial;
    x->conn = conn;
    x->in_fd = x->out[0].fd = x->out[1].fd = -1;
    x->window = WIRE_STDIN_WINDOW;
    x->deadline_ns = a->now_ns + EXEC_REQUEST_TIMEOUT_NS;
    a->used_slots |= 1ull << (x - a->exec);
}

void exec_accept(struct agent *a)
{
    int conn = accept4(a->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (conn < 0)
        return; /* gone again, or out of fds: the listener stays ready, others go on */
    if (a->used_slots == UINT64_MAX) {
        refuse(conn);
        return;
    }
    /* The lowest free slot: its pages are the likeliest to be there already. */
    struct exec *x = &a->exec[__builtin_ctzll(~a->used_slots)];
    slot_init(a, x, conn);
    x->conn_events = EPOLLIN | EPOLLRDHUP;
    if (loop_watch(a, EPOLL_CTL_ADD, conn, x->conn_events, SOURCE_CONN, x) < 0) {
        conn_close(x);
        return; /* exec_advance frees the slot */
    }
    exec_receive(a, x); /* the request is likely to be here: saves a turn of the loop */
}

void exec_kill(struct agent *a, struct exec *x, enum exec_end why)
{
    if (why > x->end)
        x->end = why;
    if (x->started)
        sweep_start(a, x);
}

void exec_gone(struct agent *a, struct exec *x)
{
    conn_close(x);
    exec_input_close(x);
    stream_close(&x->out[0]);
    stream_close(&x->out[1]);
    exec_kill(a, x, END_GONE);
}

void exec_error(struct agent *a, struct exec *x, enum wire_error_code code, const char *text)
{
    if (x->last_queued)
        return;
    uint32_t word = code;
    exec_put_text(x, WIRE_ERROR, &word, 1, text);
    x->last_queued = true;
    x->deadline_ns = a->now_ns + EXEC_LINGER_NS;
    exec_input_close(x);
    stream_close(&x->out[0]);
    stream_close(&x->out[1]);
    exec_kill(a, x, END_GONE);
}

static void conn_event(struct agent *a, struct exec *x, uint32_t events)
{
    if (x->conn < 0)
        return;
    if ((events & (EPOLLERR | EPOLLHUP)) != 0 && (events & EPOLLIN) == 0) {
        exec_gone(a, x);
        return;
    }
    /* After the last frame nothing is read; a full hang-up still ends the wait for the client. */
    if (x->last_queued) {
        if ((events & (EPOLLERR | EPOLLHUP)) != 0)
            exec_gone(a, x);
        return;
    }
    if ((events & (EPOLLIN | EPOLLRDHUP)) != 0)
        exec_receive(a, x);
}

static void stream_event(struct stream *s, uint32_t events)
{
    if (s->fd < 0)
        return;
    s->ready = true;
    if ((events & (EPOLLHUP | EPOLLERR)) != 0)
        s->hangup = true;
}

void exec_event(struct agent *a, struct exec *x, enum source source, uint32_t events)
{
    switch (source) {
    case SOURCE_CONN:
        conn_event(a, x, events);
        break;
    case SOURCE_STDIN:
        x->in_blocked = false;
        break;
    case SOURCE_STDOUT:
        stream_event(&x->out[0], events);
        break;
    case SOURCE_STDERR:
        stream_event(&x->out[1], events);
        break;
    default:
        break;
    }
}

/*
 * The one place that waits for children, so nobody's status is taken by another. Orphans that were
 * re-parented to us are nobody's: waiting for them is all there is to do.
 */
void exec_reap(struct agent *a)
{
    int wstatus;
    pid_t pid;
    while ((pid = waitpid(-1, &wstatus, WNOHANG | __WALL)) > 0) {
        for (uint64_t m = a->used_slots; m != 0; m &= m - 1) {
            struct exec *x = &a->exec[__builtin_ctzll(m)];
            if (!x->started || x->reaped || x->pid != pid)
                continue;
            x->reaped = true;
            x->wstatus = wstatus;
            if (x->end == END_NONE && (x->flags & WIRE_EXEC_KILL_REST) != 0)
                exec_kill(a, x, END_REST);
            break;
        }
    }
}

uint64_t exec_deadline(const struct exec *x)
{
    uint64_t d = x->deadline_ns != 0 ? x->deadline_ns : NEVER_NS;
    if (x->sweeping && x->sweep_next_ns < d)
        d = x->sweep_next_ns;
    if (x->pty_deadline_ns != 0 && x->out[0].fd >= 0 && x->pty_deadline_ns < d)
        d = x->pty_deadline_ns;
    return d;
}

void exec_tick(struct agent *a, struct exec *x)
{
    if (x->pty_deadline_ns != 0 && a->now_ns >= x->pty_deadline_ns)
        stream_close(&x->out[0]);
    if (x->deadline_ns == 0 || a->now_ns < x->deadline_ns)
        return;
    x->deadline_ns = 0;
    if (x->last_queued)
        exec_gone(a, x);
    else if (!x->started)
        exec_error(a, x, WIRE_ERR_TIMEOUT, "the request did not arrive in time");
    else if (!x->reaped)
        exec_kill(a, x, END_TIMEOUT);
}

/* Watches conn for what matters now: room to write, and frames unless the last one is queued. */
static void conn_watch(struct agent *a, struct exec *x)
{
    uint32_t want = x->last_queued ? 0u : EPOLLIN | EPOLLRDHUP;
    if (x->tx_len > x->tx_off)
        want |= EPOLLOUT;
    if (x->conn < 0 || want == x->conn_events)
        return;
    x->conn_events = want;
    if (loop_watch(a, EPOLL_CTL_MOD, x->conn, want, SOURCE_CONN, x) < 0)
        exec_gone(a, x);
}

static void slot_free(struct agent *a, struct exec *x)
{
    exec_input_close(x);
    stream_close(&x->out[0]);
    stream_close(&x->out[1]);
    x->used = false;
    a->used_slots &= ~(1ull << (x - a->exec));
}

void exec_advance(struct agent *a, struct exec *x)
{
    x->runnable = false;
    if (x->in_fd >= 0)
        exec_input_flush(a, x);
    bool over = x->started && x->reaped && !x->sweeping;
    if (over && !x->last_queued && x->end != END_GONE)
        exec_output_drain(a, x);
    if (x->conn >= 0)
        exec_output_pump(a, x);
    if (over && !x->last_queued && x->conn >= 0 && x->out[0].fd < 0 && x->out[1].fd < 0 &&
        x->tx_len == x->tx_off) {
        exec_queue_exit(x);
        x->last_queued = true;
        x->deadline_ns = a->now_ns + EXEC_LINGER_NS;
        exec_output_pump(a, x);
    }
    if (x->last_queued && x->tx_len == x->tx_off)
        conn_close(x);
    conn_watch(a, x);
    if (x->conn < 0 && (!x->started || (x->reaped && !x->sweeping)))
        slot_free(a, x);
}
