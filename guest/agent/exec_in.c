/*
 * exec_in: frames from the client of an exec connection, and the program's stdin. Loop thread.
 *
 * The stdin window makes sure that every frame can be taken as soon as it arrives: the buffer `in`
 * is as large as the window, so reading from the client never waits for the program.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#define VEOF_CHAR 4 /* the terminal's end-of-file character, as termios has it by default */

void exec_input_close(struct exec *x)
{
    if (x->in_fd >= 0)
        close(x->in_fd);
    x->in_fd = -1;
    x->in_len = x->in_off = 0;
    if (x->big != NULL)
        munmap(x->big, x->big_size);
    x->big = NULL;
}

/* The program has closed its stdin: what comes from now on is dropped, and no more is granted. */
static void input_dead(struct exec *x)
{
    exec_input_close(x);
    x->in_dead = true;
}

static void input_wait(struct agent *a, struct exec *x)
{
    x->in_blocked = true;
    if (x->in_watched)
        return;
    x->in_watched = true;
    if (loop_watch(a, EPOLL_CTL_ADD, x->in_fd, EPOLLOUT | EPOLLET, SOURCE_STDIN, x) < 0)
        exec_error(a, x, WIRE_ERR_NO_MEMORY, "cannot watch the program's input");
}

/* End of input: closes the pipe, or tells the terminal (twice if a line is unfinished). */
static bool input_finish(struct exec *x)
{
    if ((x->flags & WIRE_EXEC_PTY) == 0) {
        input_dead(x);
        return true;
    }
    static const uint8_t eof[2] = {VEOF_CHAR, VEOF_CHAR};
    ssize_t n = write(x->in_fd, eof, x->in_midline ? 2 : 1);
    if (n < 0 && errno == EAGAIN)
        return false;
    input_dead(x);
    return true;
}

void exec_input_flush(struct agent *a, struct exec *x)
{
    while (!x->in_blocked && x->in_fd >= 0 && x->in_len > 0) {
        size_t run = sizeof x->in - x->in_off;
        run = run < x->in_len ? run : x->in_len;
        ssize_t n = write(x->in_fd, x->in + x->in_off, run);
        if (n < 0 && errno == EAGAIN) {
            input_wait(a, x);
            return;
        }
        if (n <= 0) {
            input_dead(x);
            return;
        }
        x->in_midline = x->in[x->in_off + (size_t)n - 1] != '\n';
        x->in_off = (x->in_off + (uint32_t)n) % (uint32_t)sizeof x->in;
        x->in_len -= (uint32_t)n;
        x->credit += (uint32_t)n;
    }
    if (x->in_fd >= 0 && x->in_eof && x->in_len == 0 && !x->in_blocked && !input_finish(x))
        input_wait(a, x);
}

static void input_append(struct exec *x, const uint8_t *data, uint32_t len)
{
    uint32_t size = (uint32_t)sizeof x->in;
    uint32_t at = (x->in_off + x->in_len) % size;
    uint32_t first = size - at < len ? size - at : len;
    memcpy(x->in + at, data, first);
    memcpy(x->in, data + first, len - first);
    x->in_len += len;
}

static void stdin_frame(struct agent *a, struct exec *x, const uint8_t *data, uint32_t len)
{
    if ((x->flags & WIRE_EXEC_STDIN) == 0 || x->in_eof) {
        exec_error(a, x, WIRE_ERR_STATE, "stdin was not asked for or has ended");
        return;
    }
    if (len > x->window) {
        exec_error(a, x, WIRE_ERR_WINDOW, "more stdin than was granted");
        return;
    }
    x->window -= len;
    if (x->in_dead)
        return;
    input_append(x, data, len);
    exec_input_flush(a, x);
}

static void signal_frame(struct agent *a, struct exec *x, uint32_t n)
{
    if (n < 1 || n > WIRE_SIGNAL_MAX) {
        exec_error(a, x, WIRE_ERR_MALFORMED, "no such signal");
        return;
    }
    if (x->reaped)
        return;
    /* On a terminal: its foreground group, as if typed there; before there is one, the leader's. */
    pid_t group = 0;
    if ((x->flags & WIRE_EXEC_PTY) == 0 || x->out[0].fd < 0 ||
        ioctl(x->out[0].fd, TIOCGPGRP, &group) < 0 || group <= 1)
        group = x->pid;
    (void)kill(-group, (int)n); /* ESRCH: all ended, EXIT is on its way */
}

static void winsize_frame(struct agent *a, struct exec *x, const uint8_t *p)
{
    if ((x->flags & WIRE_EXEC_PTY) == 0) {
        exec_error(a, x, WIRE_ERR_STATE, "no terminal");
        return;
    }
    struct winsize size = {.ws_row = wire_get16(p), .ws_col = wire_get16(p + 2)};
    if (x->out[0].fd >= 0)
        (void)ioctl(x->out[0].fd, TIOCSWINSZ, &size); /* the terminal may just have ended */
}

/* Checks that exactly the announced strings are there. Sets *cwd; leaves req at the arguments. */
static int strings_check(struct wire_exec *req, const char **cwd)
{
    const char *dir = wire_exec_next(req);
    if (dir == NULL)
        return -EINVAL;
    struct wire_exec walk = *req;
    for (uint32_t i = 0; i < walk.argc; i++)
        if (wire_exec_next(&walk) == NULL)
            return -EINVAL;
    for (uint32_t i = 0; i < walk.envc; i++) {
        const char *entry = wire_exec_next(&walk);
        if (entry == NULL || entry[0] == '=' || strchr(entry, '=') == NULL)
            return -EINVAL;
    }
    if (walk.strings_len != 0)
        return -EINVAL;
    *cwd = dir;
    return 0;
}

static void start(struct agent *a, struct exec *x, const struct wire_exec *req, const char *cwd)
{
    uint32_t what = 0;
    x->flags = req->flags;
    x->output_cap_bytes = req->output_cap_bytes;
    x->in_eof = (req->flags & WIRE_EXEC_STDIN) == 0;
    int error = exec_spawn(a, x, req, cwd, &what);
    if (error != 0) {
        uint32_t words[2] = {(uint32_t)error, what};
        const char *text = what == WIRE_FAILED_CWD ? cwd : req->strings;
        exec_put_text(x, WIRE_FAILED, words, 2, text);
        x->last_queued = true;
        x->deadline_ns = a->now_ns + EXEC_LINGER_NS;
        return;
    }
    if (x->last_queued)
        return;
    uint8_t pid[4];
    wire_put32(pid, (uint32_t)x->pid);
    exec_put_frame(x, WIRE_STARTED, pid, sizeof pid);
    x->deadline_ns = req->timeout_ms != 0 ? a->now_ns + (uint64_t)req->timeout_ms * 1000000u : 0;
}

static void exec_frame(struct agent *a, struct exec *x, const uint8_t *payload, uint32_t len)
{
    struct wire_exec req;
    const char *cwd;
    int rc = wire_exec_head_decode(payload, len, &req);
    if (rc == 0)
        rc = strings_check(&req, &cwd);
    if (rc == 0)
        start(a, x, &req, cwd);
    else if (rc == -ENOTSUP)
        exec_error(a, x, WIRE_ERR_VERSION, "unknown version of EXEC");
    else if (rc == -E2BIG)
        exec_error(a, x, WIRE_ERR_TOO_LARGE, "too many arguments or environment entries");
    else
        exec_error(a, x, WIRE_ERR_MALFORMED, "malformed EXEC");
}

static void frame_act(struct agent *a, struct exec *x, uint32_t type, const uint8_t *payload,
                      uint32_t len)
{
    if (x->started == (type == WIRE_EXEC)) {
        exec_error(a, x, WIRE_ERR_STATE,
                   x->started ? "a second EXEC" : "the first frame must be EXEC");
        return;
    }
    switch (type) {
    case WIRE_EXEC:
        exec_frame(a, x, payload, len);
        break;
    case WIRE_STDIN:
        stdin_frame(a, x, payload, len);
        break;
    case WIRE_STDIN_EOF:
        if ((x->flags & WIRE_EXEC_STDIN) == 0 || x->in_eof)
            exec_error(a, x, WIRE_ERR_STATE, "stdin was not asked for or has ended");
        x->in_eof = true;
        break;
    case WIRE_SIGNAL:
        signal_frame(a, x, wire_get32(payload));
        break;
    case WIRE_WINSIZE:
        winsize_frame(a, x, payload);
        break;
    default:
        exec_error(a, x, WIRE_ERR_MALFORMED, "a frame of the wrong direction");
        break;
    }
}

/* Moves the beginning of a large EXEC out of rx. False: an error was queued. */
static bool big_begin(struct agent *a, struct exec *x, uint32_t length)
{
    void *p = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        exec_error(a, x, WIRE_ERR_NO_MEMORY, "no memory for the request");
        return false;
    }
    x->big = p;
    x->big_size = length;
    x->big_len = x->rx_len - WIRE_HEADER_SIZE;
    memcpy(x->big, x->rx + WIRE_HEADER_SIZE, x->big_len);
    x->rx_len = 0;
    return true;
}

static void big_receive(struct agent *a, struct exec *x)
{
    ssize_t n = recv(x->conn, x->big + x->big_len, x->big_size - x->big_len, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) {
        exec_gone(a, x);
        return;
    }
    x->big_len += (uint32_t)n;
    if (x->big_len < x->big_size)
        return;
    uint8_t *big = x->big;
    uint32_t size = x->big_size;
    x->big = NULL;
    frame_act(a, x, WIRE_EXEC, big, size);
    munmap(big, size);
}

/* Acts on the frames at hand. */
static void frames_parse(struct agent *a, struct exec *x)
{
    uint32_t used = 0;
    while (!x->last_queued && x->conn >= 0 && x->rx_len - used >= WIRE_HEADER_SIZE) {
        struct wire_header h = wire_header_get(x->rx + used);
        int rc = wire_header_check(h);
        if (rc < 0) {
            exec_error(a, x, rc == -EMSGSIZE ? WIRE_ERR_TOO_LARGE : WIRE_ERR_MALFORMED,
                       rc == -EMSGSIZE ? "frame too long for its type" : "malformed frame");
            return;
        }
        if (x->rx_len - used < WIRE_HEADER_SIZE + h.length) {
            if (WIRE_HEADER_SIZE + h.length <= sizeof x->rx)
                break;
            /* Only EXEC may be this long, and only as the first frame, so `used` is 0. */
            if (x->started)
                exec_error(a, x, WIRE_ERR_STATE, "a second EXEC");
            else
                (void)big_begin(a, x, h.length);
            return;
        }
        frame_act(a, x, h.type, x->rx + used + WIRE_HEADER_SIZE, h.length);
        used += WIRE_HEADER_SIZE + h.length;
    }
    x->rx_len -= used;
    if (used > 0 && x->rx_len > 0)
        memmove(x->rx, x->rx + used, x->rx_len);
}

void exec_receive(struct agent *a, struct exec *x)
{
    if (x->big != NULL) {
        big_receive(a, x);
        return;
    }
    ssize_t n = recv(x->conn, x->rx + x->rx_len, sizeof x->rx - x->rx_len, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) {
        exec_gone(a, x);
        return;
    }
    x->rx_len += (uint32_t)n;
    frames_parse(a, x);
}
