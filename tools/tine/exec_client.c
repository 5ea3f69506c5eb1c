/*
 * exec_client: see exec_client.h. One struct pump per call, on the caller's stack and thread.
 *
 * Nothing is read that could not be put down: output frames are read only while the previous one is
 * written out, stdin only into granted window. Our own stdin, stdout and stderr may be shared with
 * other processes, so they stay blocking: a read or a small write follows a poll that said it can.
 */
#include "tools/tine/exec_client.h"

#include "vmm/core/err.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIPE_WRITE_MAX                                                                             \
    4096u /* PIPE_BUF: a pipe that polls writable takes this without blocking                      \
           */
#define TX_SIZE (WIRE_EXEC_PAYLOAD_MAX + WIRE_HEADER_SIZE)
#define RX_SIZE (WIRE_DATA_MAX + WIRE_HEADER_SIZE)
#define CAPTURE_STEP_BYTES 65536u

struct pump {
    int conn;
    const struct exec_io *io;
    struct exec_result *result;
    bool stdin_open, signals_open, ended, conn_write_dead, started;
    uint32_t window;
    uint8_t *tx; /* TX_SIZE: the request, later stdin and signals */
    size_t tx_off, tx_len;
    uint8_t *rx; /* RX_SIZE */
    size_t rx_len;
    /* Output that is being written: a piece of rx, before the next frame is looked at. */
    int out_fd;
    size_t out_off, out_len, frame_len;
};

enum { AT_CONN, AT_STDIN, AT_OUT, AT_SIGNALS, AT_COUNT };

static size_t list_count(const char *const *list, size_t *bytes)
{
    size_t n = 0;
    for (; list != NULL && list[n] != NULL; n++)
        *bytes += strlen(list[n]) + 1;
    return n;
}

static uint8_t *list_put(uint8_t *at, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(list[i]) + 1;
        memcpy(at, list[i], len);
        at += len;
    }
    return at;
}

static int request_encode(struct pump *p, const struct exec_request *r, struct err *e)
{
    const char *cwd = r->cwd != NULL ? r->cwd : "";
    size_t bytes = WIRE_EXEC_HEAD_SIZE + strlen(cwd) + 1;
    size_t argc = list_count(r->argv, &bytes), envc = list_count(r->env, &bytes);
    if (argc == 0)
        return err_set(e, ERR_USAGE, EINVAL, "no command given");
    if (argc > WIRE_ARGC_MAX || envc > WIRE_ENVC_MAX || bytes > WIRE_EXEC_PAYLOAD_MAX)
        return err_set(e, ERR_USAGE, E2BIG,
                       "%zu arguments and %zu environment entries of %zu bytes "
                       "(limits: %u, %u, %u)",
                       argc, envc, bytes, WIRE_ARGC_MAX, WIRE_ENVC_MAX, WIRE_EXEC_PAYLOAD_MAX);
    for (size_t i = 0; i < envc; i++)
        if (r->env[i][0] == '=' || strchr(r->env[i], '=') == NULL)
            return err_set(e, ERR_USAGE, EINVAL, "environment entry '%s' is not NAME=value",
                           r->env[i]);
    struct wire_exec head = {
        .flags = r->flags | (p->io->stdin_fd >= 0 ? WIRE_EXEC_STDIN : 0u),
        .timeout_ms = r->timeout_ms,
        .rows = r->rows,
        .cols = r->cols,
        .output_cap_bytes = r->output_cap_bytes,
        .uid = r->uid,
        .gid = r->gid,
        .argc = (uint32_t)argc,
        .envc = (uint32_t)envc,
    };
    wire_header_put(p->tx, WIRE_EXEC, (uint32_t)bytes);
    (void)wire_exec_head_encode(&head, p->tx + WIRE_HEADER_SIZE, WIRE_EXEC_HEAD_SIZE);
    uint8_t *at = p->tx + WIRE_HEADER_SIZE + WIRE_EXEC_HEAD_SIZE;
    at = list_put(at, &cwd, 1);
    at = list_put(at, r->argv, argc);
    (void)list_put(at, r->env, envc);
    p->tx_len = WIRE_HEADER_SIZE + bytes;
    return 0;
}

/* A write error is not the end: the agent may have said why before it closed. */
static void conn_write(struct pump *p)
{
    ssize_t n =
        send(p->conn, p->tx + p->tx_off, p->tx_len - p->tx_off, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n < 0) {
        p->conn_write_dead = true;
        p->tx_off = p->tx_len = 0;
        return;
    }
    p->tx_off += (size_t)n;
    if (p->tx_off == p->tx_len)
        p->tx_off = p->tx_len = 0;
}

/* Appends a small frame behind what waits; room is there because stdin is read into an empty tx. */
static void frame_put(struct pump *p, uint32_t type, const uint8_t *payload, size_t len)
{
    if (p->conn_write_dead || p->tx_len + WIRE_HEADER_SIZE + len > TX_SIZE)
        return;
    wire_header_put(p->tx + p->tx_len, type, (uint32_t)len);
    if (len > 0)
        memcpy(p->tx + p->tx_len + WIRE_HEADER_SIZE, payload, len);
    p->tx_len += WIRE_HEADER_SIZE + len;
    conn_write(p);
}

static void stdin_read(struct pump *p)
{
    size_t room = p->window < WIRE_DATA_MAX ? p->window : WIRE_DATA_MAX;
    ssize_t n = read(p->io->stdin_fd, p->tx + WIRE_HEADER_SIZE, room);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) { /* an unreadable stdin (closed, a folder) is an empty one */
        p->stdin_open = false;
        frame_put(p, WIRE_STDIN_EOF, NULL, 0);
        return;
    }
    wire_header_put(p->tx, WIRE_STDIN, (uint32_t)n);
    p->tx_len = WIRE_HEADER_SIZE + (size_t)n;
    p->window -= (uint32_t)n;
    conn_write(p);
}

static void signals_read(struct pump *p)
{
    struct signalfd_siginfo info;
    if (read(p->io->signal_fd, &info, sizeof info) != (ssize_t)sizeof info) {
        p->signals_open = errno == EAGAIN || errno == EINTR;
        return;
    }
    uint8_t payload[4];
    if (info.ssi_signo != SIGWINCH) {
        wire_put32(payload, info.ssi_signo);
        frame_put(p, WIRE_SIGNAL, payload, sizeof payload);
        return;
    }
    struct winsize size;
    if (p->io->winsize_fd < 0 || ioctl(p->io->winsize_fd, TIOCGWINSZ, &size) < 0)
        return;
    wire_put16(payload, size.ws_row);
    wire_put16(payload + 2, size.ws_col);
    frame_put(p, WIRE_WINSIZE, payload, sizeof payload);
}

static int capture_add(struct exec_capture *c, const uint8_t *data, size_t len, struct err *e)
{
    size_t keep = c->cap_bytes - c->len < len ? c->cap_bytes - c->len : len;
    c->dropped += len - keep;
    if (keep == 0)
        return 0;
    size_t have = (c->len + CAPTURE_STEP_BYTES - 1) / CAPTURE_STEP_BYTES * CAPTURE_STEP_BYTES;
    if (c->len + keep > have || c->data == NULL) {
        size_t want = (c->len + keep + CAPTURE_STEP_BYTES - 1) / CAPTURE_STEP_BYTES;
        uint8_t *grown = realloc(c->data, want * CAPTURE_STEP_BYTES);
        if (grown == NULL)
            return err_sys(e, "keep %zu bytes of output", c->len + keep);
        c->data = grown;
    }
    memcpy(c->data + c->len, data, keep);
    c->len += keep;
    return 0;
}

/* An output frame: captured now, or written piece by piece as its fd takes it. */
static int output_begin(struct pump *p, bool is_stdout, size_t len, struct err *e)
{
    struct exec_capture *c = is_stdout ? p->io->capture_stdout : p->io->capture_stderr;
    p->out_fd = is_stdout ? p->io->stdout_fd : p->io->stderr_fd;
    if (c != NULL)
        return capture_add(c, p->rx + WIRE_HEADER_SIZE, len, e);
    p->out_off = WIRE_HEADER_SIZE;
    p->out_len = p->out_fd >= 0 ? len : 0;
    return 0;
}

static int output_write(struct pump *p, struct err *e)
{
    struct stat st;
    size_t len = p->out_len;
    if (len > PIPE_WRITE_MAX && (fstat(p->out_fd, &st) < 0 || !S_ISREG(st.st_mode)))
        len = PIPE_WRITE_MAX;
    ssize_t n = write(p->out_fd, p->rx + p->out_off, len);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n < 0)
        return err_sys(e, "write the program's output");
    p->out_off += (size_t)n;
    p->out_len -= (size_t)n;
    return 0;
}

static void text_take(struct exec_result *r, const uint8_t *text, size_t len)
{
    memcpy(r->text, text, len);
    r->text[len] = 0;
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)r->text[i] < ' ' || r->text[i] == 0x7f)
            r->text[i] = '?'; /* the guest chose these bytes; a terminal may show them */
}

static int proto_error(struct err *e, const char *what)
{
    return err_set(e, ERR_GUEST, EPROTO, "the agent sent %s", what);
}

static int ending_act(struct pump *p, struct wire_header h, const uint8_t *payload, struct err *e)
{
    struct exec_result *r = p->result;
    static const enum exec_outcome outcomes[] = {[WIRE_EXIT_EXITED] = EXEC_EXITED,
                                                 [WIRE_EXIT_SIGNALED] = EXEC_SIGNALED,
                                                 [WIRE_EXIT_TIMEOUT] = EXEC_TIMED_OUT};
    switch (h.type) {
    case WIRE_EXIT:
        if (!p->started || wire_exit_decode(payload, h.length, &r->exit) < 0)
            return proto_error(e, "a malformed EXIT");
        r->outcome = outcomes[r->exit.kind];
        break;
    case WIRE_FAILED:
        r->outcome = EXEC_NOT_STARTED;
        r->failed_errno = wire_get32(payload);
        r->failed_what = wire_get32(payload + 4);
        text_take(r, payload + 8, h.length - 8);
        break;
    case WIRE_ERROR:
        r->outcome = EXEC_REFUSED;
        r->refused_code = wire_get32(payload);
        text_take(r, payload + 4, h.length - 4);
        break;
    default:
        return proto_error(e, "a frame that only the host sends");
    }
    p->ended = true;
    return 0;
}

static int frame_act(struct pump *p, struct wire_header h, struct err *e)
{
    const uint8_t *payload = p->rx + WIRE_HEADER_SIZE;
    switch (h.type) {
    case WIRE_STARTED:
        p->started = true;
        p->result->pid = wire_get32(payload);
        return 0;
    case WIRE_STDOUT:
    case WIRE_STDERR:
        if (!p->started)
            return proto_error(e, "output before STARTED");
        return output_begin(p, h.type == WIRE_STDOUT, h.length, e);
    case WIRE_CREDIT: {
        uint32_t more = wire_get32(payload);
        if (more > WIRE_STDIN_WINDOW - p->window)
            return proto_error(e, "more stdin credit than the window");
        p->window += more;
        return 0;
    }
    default:
        return ending_act(p, h, payload, e);
    }
}

/* Acts on complete frames until one needs output written. */
static int frames_parse(struct pump *p, struct err *e)
{
    while (!p->ended) {
        if (p->out_len > 0)
            return 0;
        p->rx_len -= p->frame_len;
        memmove(p->rx, p->rx + p->frame_len, p->rx_len);
        p->frame_len = 0;
        if (p->rx_len < WIRE_HEADER_SIZE)
            return 0;
        struct wire_header h = wire_header_get(p->rx);
        if (wire_header_check(h) < 0 || h.length > WIRE_DATA_MAX)
            return proto_error(e, "a malformed frame");
        if (p->rx_len < WIRE_HEADER_SIZE + h.length)
            return 0;
        p->frame_len = WIRE_HEADER_SIZE + h.length;
        int rc = frame_act(p, h, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int conn_read(struct pump *p, struct err *e)
{
    ssize_t n = recv(p->conn, p->rx + p->rx_len, RX_SIZE - p->rx_len, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n <= 0)
        return err_set(e, ERR_GUEST, n < 0 ? errno : ECONNRESET,
                       "the connection to the agent ended before the command did");
    p->rx_len += (size_t)n;
    return frames_parse(p, e);
}

static void poll_fill(const struct pump *p, struct pollfd fds[AT_COUNT])
{
    bool reading = p->out_len == 0;
    short conn = (short)((reading ? POLLIN : 0) | (p->tx_len > 0 ? POLLOUT : 0));
    bool take_stdin =
        p->stdin_open && p->started && p->tx_len == 0 && p->window > 0 && !p->conn_write_dead;
    /* While output waits for its reader, only the end of the agent is of interest on conn. */
    fds[AT_CONN] = (struct pollfd){.fd = p->conn, .events = conn};
    fds[AT_STDIN] = (struct pollfd){.fd = take_stdin ? p->io->stdin_fd : -1, .events = POLLIN};
    fds[AT_OUT] = (struct pollfd){.fd = reading ? -1 : p->out_fd, .events = POLLOUT};
    fds[AT_SIGNALS] =
        (struct pollfd){.fd = p->signals_open ? p->io->signal_fd : -1, .events = POLLIN};
    if (!reading && conn == 0)
        fds[AT_CONN].fd = -1; /* a hang-up would make poll return at once, again and again */
}

static int pump_turn(struct pump *p, struct err *e)
{
    struct pollfd fds[AT_COUNT];
    poll_fill(p, fds);
    if (poll(fds, AT_COUNT, -1) < 0)
        return errno == EINTR ? 0 : err_sys(e, "poll");
    int rc = 0;
    if (fds[AT_OUT].revents != 0) {
        rc = output_write(p, e);
        if (rc == 0 && p->out_len == 0)
            rc = frames_parse(p, e);
    }
    if (rc == 0 && (fds[AT_CONN].revents & (POLLOUT | POLLERR | POLLHUP)) != 0 && p->tx_len > 0)
        conn_write(p);
    if (rc == 0 && p->out_len == 0 && !p->ended &&
        (fds[AT_CONN].revents & (POLLIN | POLLHUP | POLLERR)) != 0)
        rc = conn_read(p, e);
    if (fds[AT_STDIN].revents != 0 && p->tx_len == 0)
        stdin_read(p);
    if (fds[AT_SIGNALS].revents != 0)
        signals_read(p);
    return rc;
}

int exec_client_run(int conn, const struct exec_request *request, const struct exec_io *io,
                    struct exec_result *result, struct err *e)
{
    struct exec_result got = {.pid = 0};
    struct pump p = {.conn = conn,
                     .io = io,
                     .result = &got,
                     .stdin_open = io->stdin_fd >= 0,
                     .signals_open = io->signal_fd >= 0,
                     .window = WIRE_STDIN_WINDOW,
                     .out_fd = -1};
    p.tx = malloc(TX_SIZE);
    p.rx = malloc(RX_SIZE);
    int rc = p.tx == NULL || p.rx == NULL ? err_sys(e, "buffers for exec") : 0;
    if (rc == 0)
        rc = request_encode(&p, request, e);
    if (rc == 0)
        conn_write(&p);
    while (rc == 0 && !p.ended)
        rc = pump_turn(&p, e);
    free(p.tx);
    free(p.rx);
    if (rc == 0)
        *result = got;
    return rc;
}

int exec_result_status(const struct exec_result *r)
{
    switch (r->outcome) {
    case EXEC_EXITED:
        return (int)(r->exit.value & 0xff);
    case EXEC_SIGNALED:
        return 128 + (int)(r->exit.value & 0x7f);
    case EXEC_TIMED_OUT:
        return 124;
    case EXEC_NOT_STARTED:
        return r->failed_what == WIRE_FAILED_PROGRAM && r->failed_errno == ENOENT ? 127 : 126;
    case EXEC_REFUSED:
        return 125;
    }
    return 125;
}

void exec_result_describe(const struct exec_result *r, char *out, size_t size)
{
    static const char *const what[] = {[WIRE_FAILED_CWD] = "working directory",
                                       [WIRE_FAILED_PROGRAM] = "start",
                                       [WIRE_FAILED_IDENTITY] = "change user for",
                                       [WIRE_FAILED_RESOURCES] = "prepare",
                                       [WIRE_FAILED_PTY] = "terminal for"};
    bool known = r->failed_what >= WIRE_FAILED_CWD && r->failed_what <= WIRE_FAILED_PTY;
    switch (r->outcome) {
    case EXEC_EXITED:
        out[0] = 0;
        break;
    case EXEC_SIGNALED:
        (void)snprintf(out, size, "killed by signal %u", r->exit.value);
        break;
    case EXEC_TIMED_OUT:
        (void)snprintf(out, size, "time-out: killed");
        break;
    case EXEC_NOT_STARTED:
        (void)snprintf(out, size, "%s: %s: %s", known ? what[r->failed_what] : "start", r->text,
                       strerror((int)r->failed_errno));
        break;
    case EXEC_REFUSED:
        (void)snprintf(out, size, "the agent refused: %s", r->text);
        break;
    }
}
