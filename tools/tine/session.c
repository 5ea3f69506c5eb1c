/*
 * session: see session.h. One thread; signals that are to reach the program come by a signalfd.
 */
#include "tools/tine/session.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include "tools/tine/exec_client.h"
#include "tools/tine/rpc.h"
#include "vmm/core/base64.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"

#define CONNECT_MS 10000 /* the VMM itself gives up after 5 s */
#define CAPTURE_MAX (64u << 20)

int session_add_env(struct session *s, const char *text, struct err *e)
{
    const char *eq = strchr(text, '=');
    if (eq == NULL || eq == text)
        return err_set(e, ERR_USAGE, 0, "environment entry \"%s\" is not NAME=value", text);
    if (s->env_count == SESSION_ENV_MAX)
        return err_set(e, ERR_LIMIT, 0, "more than %d environment entries", SESSION_ENV_MAX);
    s->env[s->env_count++] = text;
    return 0;
}

int session_set_timeout(struct session *s, const char *text, struct err *e)
{
    char *end = NULL;
    double seconds = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(seconds) || seconds < 0.001 || seconds > 4e6)
        return err_set(e, ERR_USAGE, 0,
                       "time-out \"%s\" is not a number of seconds from 0.001 to 4000000", text);
    s->timeout_ms = (uint32_t)(seconds * 1000);
    return 0;
}

/* One line of the vsock convention, byte by byte: what follows it belongs to the stream. */
static int read_line(int fd, char *line, size_t size, struct err *e)
{
    size_t len = 0;
    uint64_t end = clock_mono_ns() + CONNECT_MS * 1000000ull;
    while (len < size - 1) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        uint64_t now = clock_mono_ns();
        int n = now >= end ? 0 : poll(&p, 1, (int)((end - now) / 1000000u) + 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0)
            return err_set(e, ERR_GUEST, ETIMEDOUT, "no answer to CONNECT");
        ssize_t got = read(fd, line + len, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return err_set(e, ERR_GUEST, ECONNRESET, "vsock socket closed without an answer");
        if (line[len] == '\n')
            break;
        len++;
    }
    line[len] = '\0';
    return 0;
}

/* The refusal in the words of somebody who knows the machine's state. */
static int refused(const struct machines *m, const char *id, const char *reason, struct err *e)
{
    struct rpc r;
    json_t *status = NULL;
    if (machines_connect(m, id, &r, NULL) == 0) {
        (void)rpc_call(&r, "status", NULL, 2000, &status, NULL); /* only for the message */
        rpc_close(&r);
    }
    const char *state = json_string_value(json_object_get(status, "state"));
    if (state != NULL && strcmp(state, "paused") == 0)
        (void)err_set(e, ERR_STATE, 0, "the machine is paused: tine resume %s first", id);
    else if (state != NULL && strcmp(state, "booting") == 0)
        (void)err_set(e, ERR_STATE, 0,
                      "the machine is booting, its agent has not said hello yet (%s)", reason);
    else if (state != NULL && strcmp(state, "renewing") == 0)
        (void)err_set(e, ERR_STATE, 0, "the copy has not renewed itself yet (%s)", reason);
    else
        (void)err_set(e, ERR_GUEST, 0, "the agent does not answer on vsock port %u: %s",
                      WIRE_VSOCK_EXEC_PORT, reason);
    json_decref(status);
    return -ECONNREFUSED;
}

/* A connection to the agent's exec port. */
static int connect_agent(const struct machines *m, const char *id, struct err *e)
{
    char path[SOCK_PATH_MAX + 1], line[128];
    int rc = machines_path(m, id, ".vsock", path, e);
    if (rc < 0)
        return rc;
    CLEANUP_FD int fd = sock_connect(path, e);
    if (fd == -ENOENT || fd == -ECONNREFUSED) {
        struct rpc r;
        rc = machines_connect(m, id, &r, e); /* no machine at all is the better message */
        if (rc < 0)
            return rc;
        rpc_close(&r);
        return err_set(e, ERR_STATE, 0, "nobody listens on %s", path);
    }
    if (fd < 0)
        return fd;
    int n = snprintf(line, sizeof line, "CONNECT %u\n", WIRE_VSOCK_EXEC_PORT);
    rc = fd_write_full(fd, line, (size_t)n, e);
    if (rc == 0)
        rc = read_line(fd, line, sizeof line, e);
    if (rc < 0)
        return rc;
    if (strncmp(line, "OK ", 3) == 0)
        return take_fd(&fd);
    return refused(m, id, strncmp(line, "ERR ", 4) == 0 ? line + 4 : line, e);
}

/* Our terminal as the guest's: raw while the program runs, as it was afterwards. */
struct terminal {
    bool is_raw;
    struct termios before;
};

static void terminal_restore(struct terminal *t)
{
    if (t->is_raw)
        (void)tcsetattr(STDIN_FILENO, TCSANOW, &t->before); /* gone: nothing to restore */
    t->is_raw = false;
}

static int terminal_raw(struct terminal *t, struct err *e)
{
    if (tcgetattr(STDIN_FILENO, &t->before) < 0)
        return err_set(e, ERR_USAGE, errno, "-t needs a terminal on standard input");
    struct termios raw = t->before;
    cfmakeraw(&raw);
    if (tcsetattr(STDIN_FILENO, TCSANOW, &raw) < 0)
        return err_sys(e, "terminal");
    t->is_raw = true;
    return 0;
}

/* Signals that are the program's to get. Returns a signalfd, the signals blocked. */
static int catch_for_program(sigset_t *before, struct err *e)
{
    static const int passed[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH};
    sigset_t set;
    (void)sigemptyset(&set);
    for (size_t i = 0; i < sizeof passed / sizeof passed[0]; i++)
        (void)sigaddset(&set, passed[i]);
    if (sigprocmask(SIG_BLOCK, &set, before) < 0)
        return err_sys(e, "sigprocmask");
    int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return fd < 0 ? err_sys(e, "signalfd") : fd;
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

/* Text where it is text, else base64, and which of both it is. */
static void add_output(json_t *o, const char *name, const struct exec_capture *cap,
                       uint64_t dropped)
{
    char key[32];
    json_t *text = json_stringn(cap->len > 0 ? (const char *)cap->data : "", cap->len);
    bool is_text = text != NULL;
    if (text == NULL) {
        char *b = malloc(BASE64_LEN(cap->len) + 1);
        if (b != NULL) {
            base64_encode(cap->data, cap->len, b);
            text = json_string(b);
        }
        free(b);
    }
    (void)json_object_set_new(o, name, text);
    (void)snprintf(key, sizeof key, "%s_encoding", name);
    (void)json_object_set_new(o, key, json_string(is_text ? "utf-8" : "base64"));
    (void)snprintf(key, sizeof key, "%s_dropped", name);
    (void)json_object_set_new(o, key, json_integer((json_int_t)(cap->dropped + dropped)));
}

static json_t *outcome_json(const struct exec_result *r, const struct exec_capture *out,
                            const struct exec_capture *err)
{
    char text[512];
    exec_result_describe(r, text, sizeof text);
    json_t *o = json_pack(
        "{s:o, s:o, s:b, s:s?}", "exit_code",
        r->outcome == EXEC_EXITED ? json_integer(r->exit.value) : json_null(), "signal",
        r->outcome == EXEC_SIGNALED ? json_integer(r->exit.value) : json_null(), "timed_out",
        r->outcome == EXEC_TIMED_OUT, "error", text[0] != '\0' ? text : NULL);
    add_output(o, "stdout", out, r->exit.stdout_dropped);
    add_output(o, "stderr", err, r->exit.stderr_dropped);
    return o;
}

static int report(const struct cli *c, const char *id, const struct exec_result *r,
                  const struct exec_capture *out, const struct exec_capture *err)
{
    int status = exec_result_status(r);
    if (c->json) {
        int rc = cli_print_json(c, outcome_json(r, out, err));
        return rc == CLI_OK ? status : CLI_EXEC_FAILED;
    }
    /* A signal is the program's own affair and shows in the status, as in a shell. */
    if (r->outcome != EXEC_EXITED && r->outcome != EXEC_SIGNALED) {
        char text[512];
        exec_result_describe(r, text, sizeof text);
        (void)fprintf(stderr, "tine %s: %s: %s\n", c->name, id, cli_clean(text));
    }
    return status;
}

static void window_size(struct exec_request *req)
{
    struct winsize ws;
    if (ioctl(STDIN_FILENO, TIOCGWINSZ, &ws) == 0) {
        req->rows = ws.ws_row;
        req->cols = ws.ws_col;
    }
}

static int run_on(const struct cli *c, const char *id, int conn, const struct session *s,
                  struct err *e)
{
    sigset_t before;
    struct terminal terminal = {.is_raw = false};
    struct exec_result result = {0};
    struct exec_capture out = {.cap_bytes = CAPTURE_MAX}, err = {.cap_bytes = CAPTURE_MAX};
    struct exec_request req = {.argv = s->argv,
                               .env = s->env,
                               .cwd = s->cwd,
                               .timeout_ms = s->timeout_ms,
                               .flags = s->terminal ? WIRE_EXEC_PTY : 0};
    struct exec_io io = {.stdin_fd = is_open(STDIN_FILENO) ? STDIN_FILENO : -1,
                         .stdout_fd = STDOUT_FILENO,
                         .stderr_fd = STDERR_FILENO,
                         .winsize_fd = s->terminal ? STDIN_FILENO : -1,
                         .capture_stdout = c->json ? &out : NULL,
                         .capture_stderr = c->json ? &err : NULL};
    CLEANUP_FD int signals = catch_for_program(&before, e);
    int rc = signals < 0 ? signals : 0;
    io.signal_fd = signals;
    if (rc == 0 && s->terminal) {
        window_size(&req);
        rc = terminal_raw(&terminal, e);
    }
    if (rc == 0)
        rc = exec_client_run(conn, &req, &io, &result, e);
    terminal_restore(&terminal);
    (void)sigprocmask(SIG_SETMASK, &before, NULL); /* a mask we were given: cannot fail */
    if (rc == 0)
        rc = report(c, id, &result, &out, &err);
    free(out.data);
    free(err.data);
    return rc;
}

int session_run(const struct cli *c, const struct machines *m, const char *id,
                const struct session *s, struct err *e)
{
    struct session with_term = *s;
    char term[128];
    const char *ours = getenv("TERM");
    if (s->terminal && ours != NULL) {
        /* The one thing of our environment the program gets, first: an -e TERM=… comes later. */
        (void)snprintf(term, sizeof term, "TERM=%s", ours);
        memmove(&with_term.env[1], &with_term.env[0], s->env_count * sizeof s->env[0]);
        with_term.env[0] = term;
        with_term.env[++with_term.env_count] = NULL;
    }
    CLEANUP_FD int conn = connect_agent(m, id, e);
    if (conn < 0)
        return conn;
    return run_on(c, id, conn, &with_term, e);
}
