/*
 * exec_out: the program's output and the agent's small frames to the client. Loop thread.
 *
 * `tx` is refilled only when it is empty, and pipes are read only into it: a slow client leaves the
 * rest in the pipes and so slows its own program. Output is read to where it is sent from, behind
 * room for its frame header.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

void exec_put_frame(struct exec *x, uint32_t type, const void *payload, size_t len)
{
    if (x->tx_len + WIRE_HEADER_SIZE + len > sizeof x->tx)
        return;
    wire_header_put(x->tx + x->tx_len, type, (uint32_t)len);
    memcpy(x->tx + x->tx_len + WIRE_HEADER_SIZE, payload, len);
    x->tx_len += WIRE_HEADER_SIZE + (uint32_t)len;
}

void exec_put_text(struct exec *x, uint32_t type, const uint32_t *words, size_t nwords,
                   const char *text)
{
    uint8_t payload[8 + WIRE_TEXT_MAX];
    size_t len = strnlen(text, WIRE_TEXT_MAX);
    for (size_t i = 0; i < nwords; i++)
        wire_put32(payload + 4 * i, words[i]);
    memcpy(payload + 4 * nwords, text, len);
    exec_put_frame(x, type, payload, 4 * nwords + len);
}

/* Sends what is in tx. True if it is empty afterwards. */
static bool tx_flush(struct agent *a, struct exec *x)
{
    while (x->tx_off < x->tx_len) {
        ssize_t n =
            send(x->conn, x->tx + x->tx_off, x->tx_len - x->tx_off, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN)
            return false;
        if (n < 0) {
            exec_gone(a, x);
            return false;
        }
        x->tx_off += (uint32_t)n;
    }
    x->tx_off = x->tx_len = 0;
    return true;
}

/* Where and how much to read: into tx behind a header, or into scratch once the cap is reached. */
struct target {
    uint8_t *buf;
    size_t size;
    bool dropped;
};

static struct target stream_target(struct agent *a, struct exec *x, const struct stream *s,
                                   size_t room)
{
    struct target t = {.buf = x->tx + x->tx_len + WIRE_HEADER_SIZE, .size = room};
    uint64_t cap = x->output_cap_bytes;
    if (cap != 0 && s->sent >= cap)
        t = (struct target){.buf = a->scratch, .size = sizeof a->scratch, .dropped = true};
    else if (cap != 0 && cap - s->sent < t.size)
        t.size = (size_t)(cap - s->sent);
    if (s->bounded && s->remaining < t.size)
        t.size = (size_t)s->remaining;
    return t;
}

/* One read. True if a frame was added to tx. */
static bool stream_read(struct agent *a, struct exec *x, struct stream *s, size_t room)
{
    struct target t = stream_target(a, x, s, room);
    ssize_t n = read(s->fd, t.buf, t.size);
    if (n < 0 && errno == EAGAIN && !s->bounded) {
        s->ready = false;
        return false;
    }
    if (n <= 0 && (x->flags & WIRE_EXEC_PTY) != 0 && !x->reaped) {
        /* The other side is closed, maybe on the way to exit: closing ours now would send the
         * leader a SIGHUP. */
        s->ready = false;
        return false;
    }
    if (n <= 0) { /* end of file; EIO on a terminal */
        stream_close(s);
        return false;
    }
    if (s->bounded && (s->remaining -= (uint64_t)n) == 0)
        stream_close(s);
    else if ((size_t)n < t.size && !s->hangup && (x->flags & WIRE_EXEC_PTY) == 0)
        s->ready = false; /* a short read empties a pipe; the next byte is a new edge */
    if (t.dropped) {
        s->dropped += (uint64_t)n;
        return false;
    }
    s->sent += (uint64_t)n;
    wire_header_put(x->tx + x->tx_len, s->type, (uint32_t)n);
    x->tx_len += WIRE_HEADER_SIZE + (uint32_t)n;
    return true;
}

static void credit_put(struct exec *x)
{
    /* Few frames: half a window at a time, or all that is owed once nothing is left to send. */
    if (x->credit == 0 || x->in_dead || x->in_eof ||
        (x->credit < WIRE_STDIN_WINDOW / 2 && x->window > 0))
        return;
    uint8_t payload[4];
    wire_put32(payload, x->credit);
    exec_put_frame(x, WIRE_CREDIT, payload, sizeof payload);
    x->window += x->credit;
    x->credit = 0;
}

/* Fills an empty tx from what is ready, both outputs in turn. */
static void tx_fill(struct agent *a, struct exec *x)
{
    bool both = x->out[0].ready && x->out[1].ready;
    credit_put(x);
    for (unsigned i = 0; i < 2; i++) {
        struct stream *s = &x->out[(x->turn + i) & 1];
        if (s->fd >= 0 && s->ready)
            (void)stream_read(a, x, s, both ? WIRE_DATA_MAX / 2 : WIRE_DATA_MAX);
    }
    x->turn ^= 1;
}

static bool has_ready(const struct exec *x)
{
    return x->out[0].ready || x->out[1].ready;
}

void exec_output_pump(struct agent *a, struct exec *x)
{
    for (unsigned round = 0; round < EXEC_PUMP_ROUNDS; round++) {
        if (!tx_flush(a, x) || x->last_queued)
            return;
        tx_fill(a, x);
        if (x->tx_len == 0 && !has_ready(x))
            return;
    }
    if (tx_flush(a, x))
        x->runnable = has_ready(x);
}

void exec_output_drain(struct agent *a, struct exec *x)
{
    for (unsigned i = 0; i < 2; i++) {
        struct stream *s = &x->out[i];
        if (s->fd < 0 || s->bounded)
            continue;
        s->ready = true;
        if ((x->flags & WIRE_EXEC_PTY) != 0) {
            /* A terminal passes output on by itself for a while, then reads fail with EIO. */
            if (x->pty_deadline_ns == 0)
                x->pty_deadline_ns = a->now_ns + EXEC_PTY_GRACE_NS;
            continue;
        }
        int left = 0;
        if (ioctl(s->fd, FIONREAD, &left) < 0 || left <= 0) {
            stream_close(s);
            continue;
        }
        s->bounded = true;
        s->remaining = (uint64_t)left;
    }
}

void exec_queue_exit(struct exec *x)
{
    uint8_t frame[WIRE_HEADER_SIZE + WIRE_EXIT_SIZE];
    bool signaled = WIFSIGNALED(x->wstatus);
    struct wire_exit e = {
        .kind = signaled ? WIRE_EXIT_SIGNALED : WIRE_EXIT_EXITED,
        .value = (uint32_t)(signaled ? WTERMSIG(x->wstatus) : WEXITSTATUS(x->wstatus)),
        .flags = (signaled && WCOREDUMP(x->wstatus) ? WIRE_EXIT_CORE : 0u) |
                 (x->survivors ? WIRE_EXIT_SURVIVORS : 0u),
        .stdout_sent = x->out[0].sent,
        .stdout_dropped = x->out[0].dropped,
        .stderr_sent = x->out[1].sent,
        .stderr_dropped = x->out[1].dropped,
    };
    if (x->end == END_TIMEOUT) {
        e.kind = WIRE_EXIT_TIMEOUT;
        e.value = signaled ? e.value : SIGKILL;
    }
    (void)wire_exit_encode(&e, frame, sizeof frame); /* the buffer fits exactly */
    exec_put_frame(x, WIRE_EXIT, frame + WIRE_HEADER_SIZE, WIRE_EXIT_SIZE);
}
