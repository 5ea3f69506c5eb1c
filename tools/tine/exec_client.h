/*
 * exec_client: the host side of one exec connection (docs/agent-protocol.md 2).
 *
 * The command line connects (vsock convention of the machine's socket), then hands the connected fd
 * to exec_client_run(), which sends the request and moves bytes until the program has ended. One
 * thread; blocks in poll. The caller ignores SIGPIPE or lives with it.
 */
#pragma once

#include "guest/agent/wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;

/* What to run. Strings and lists are the caller's and stay untouched. */
struct exec_request {
    const char *const *argv;   /* NULL-terminated, at least one */
    const char *const *env;    /* NULL-terminated NAME=value list, or NULL */
    const char *cwd;           /* NULL: "/" */
    uint32_t flags;            /* enum wire_exec_flags; STDIN is set by exec_client_run */
    uint32_t timeout_ms;       /* 0: none */
    uint16_t rows, cols;       /* with PTY */
    uint64_t output_cap_bytes; /* for each stream, counted in the guest; 0: none */
    uint32_t uid, gid;         /* with IDENTITY */
};

/* Output kept in memory, up to cap_bytes; `data` is the caller's to free(). Starts zeroed. */
struct exec_capture {
    uint8_t *data;
    size_t len;
    size_t cap_bytes;
    uint64_t dropped; /* bytes that came after the cap was reached */
};

/* Where the bytes go. fds are borrowed and their flags are not changed. */
struct exec_io {
    int stdin_fd;  /* -1: the program gets end-of-file at once */
    int stdout_fd; /* -1: dropped, or captured */
    int stderr_fd;
    int signal_fd;  /* a signalfd whose signals are passed on, or -1; SIGWINCH becomes WINSIZE */
    int winsize_fd; /* the terminal whose size WINSIZE tells, or -1 */
    struct exec_capture *capture_stdout, *capture_stderr; /* NULL: to the fds */
};

enum exec_outcome {
    EXEC_EXITED = 1,  /* exit.value is the code */
    EXEC_SIGNALED,    /* exit.value is the signal */
    EXEC_TIMED_OUT,   /* the agent killed it */
    EXEC_NOT_STARTED, /* failed_errno (the guest's) and failed_what (enum wire_failed_what) */
    EXEC_REFUSED,     /* refused_code (enum wire_error_code) */
};

struct exec_result {
    enum exec_outcome outcome;
    uint32_t pid;          /* in the guest, 0 if it never started */
    struct wire_exit exit; /* for the first three outcomes */
    uint32_t failed_errno, failed_what;
    uint32_t refused_code;
    char text[WIRE_TEXT_MAX + 1]; /* the program, folder or reason that the last two name */
};

/*
 * Runs one command over `conn` (connected, blocking or not; stays the caller's, is at its end
 * afterwards). Returns 0 with *result filled when the agent told the outcome, whatever it is.
 * ERR_GUEST (-EPROTO, -ECONNRESET): the agent broke the protocol or the connection ended early.
 * ERR_USAGE (-E2BIG, -EINVAL): the request does not fit the protocol. ERR_HOST: poll, memory, or
 * -EPIPE when our own stdout or stderr is closed; ending the connection then ends the program.
 */
int exec_client_run(int conn, const struct exec_request *request, const struct exec_io *io,
                    struct exec_result *result, struct err *e);

/* The exit status a shell would show: code, 128+signal, 124 for a time-out, 127 missing program,
 * 126 for any other failure to start, 125 for a refusal. */
int exec_result_status(const struct exec_result *result);

/* One sentence on an outcome that is not an ordinary exit, e.g. "start: foo: No such file or
 * directory". Empty for EXEC_EXITED. */
void exec_result_describe(const struct exec_result *result, char *out, size_t size);
