/*
 * wire: the frames between the VMM, the host tools and tine-agent (docs/agent-protocol.md).
 *
 * Shared by the agent (in the guest), tine-vmm and the command line, so it includes nothing of
 * theirs. Structures in memory are decoded forms, never overlaid on bytes: encoders write into a
 * buffer whose size they check, decoders take exactly the payload of one frame, check every length
 * and leave their output untouched on failure. All return 0 (encoders: the number of bytes) or
 * -errno. Pointers in decoded forms point into the payload. Any thread.
 */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define WIRE_PROTOCOL 1u
#define WIRE_VSOCK_HOST_CID 2u
#define WIRE_VSOCK_CONTROL_PORT 1u
#define WIRE_VSOCK_EXEC_PORT 1024u

#define WIRE_HEADER_SIZE 8u
#define WIRE_HELLO_MIN 4u
#define WIRE_HELLO_MAX 512u
#define WIRE_RENEW_SIZE 168u
#define WIRE_RENEWED_SIZE 24u
#define WIRE_HOSTNAME_MAX 63u
#define WIRE_ID_SIZE 16u
#define WIRE_ENTROPY_SIZE 64u
#define WIRE_CONTROL_PAYLOAD_MAX WIRE_HELLO_MAX

#define WIRE_EXEC_VERSION 1u
#define WIRE_EXEC_HEAD_SIZE 40u
#define WIRE_EXEC_PAYLOAD_MAX (1u << 20)
#define WIRE_ARGC_MAX 16384u
#define WIRE_ENVC_MAX 4096u
#define WIRE_DATA_MAX 65536u
#define WIRE_STDIN_WINDOW 65536u
#define WIRE_TEXT_MAX 256u
#define WIRE_EXIT_SIZE 48u
#define WIRE_SIGNAL_MAX 64u
#define WIRE_EXEC_CONNECTIONS_MAX 64u

enum wire_type {
    WIRE_HELLO = 1,
    WIRE_RENEW = 2,
    WIRE_RENEWED = 3,
    WIRE_SHUTDOWN = 4,
    WIRE_BYE = 5,

    WIRE_EXEC = 16,
    WIRE_STDIN = 17,
    WIRE_STDIN_EOF = 18,
    WIRE_SIGNAL = 19,
    WIRE_WINSIZE = 20,
    WIRE_STARTED = 32,
    WIRE_FAILED = 33,
    WIRE_STDOUT = 34,
    WIRE_STDERR = 35,
    WIRE_EXIT = 36,
    WIRE_CREDIT = 37,

    WIRE_ERROR = 63,
};

/* `step` of RENEWED. */
enum wire_renew_step {
    WIRE_STEP_NONE = 0,
    WIRE_STEP_PAYLOAD = 1,
    WIRE_STEP_ENTROPY = 2,
    WIRE_STEP_RESEED = 3,
    WIRE_STEP_CLOCK = 4,
    WIRE_STEP_HOSTNAME = 5,
    WIRE_STEP_MACHINE_ID = 6,
    WIRE_STEP_GENERATION = 7,
};

enum wire_exec_flags {
    WIRE_EXEC_STDIN = 1,
    WIRE_EXEC_PTY = 2,
    WIRE_EXEC_IDENTITY = 4,
    WIRE_EXEC_KILL_REST = 8,
    WIRE_EXEC_FLAGS_ALL = 15,
};

/* `what` of FAILED. */
enum wire_failed_what {
    WIRE_FAILED_CWD = 1,
    WIRE_FAILED_PROGRAM = 2,
    WIRE_FAILED_IDENTITY = 3,
    WIRE_FAILED_RESOURCES = 4,
    WIRE_FAILED_PTY = 5,
};

enum wire_exit_kind {
    WIRE_EXIT_EXITED = 1,
    WIRE_EXIT_SIGNALED = 2,
    WIRE_EXIT_TIMEOUT = 3,
};

enum wire_exit_flags {
    WIRE_EXIT_CORE = 1,
    WIRE_EXIT_SURVIVORS = 2,
};

enum wire_error_code {
    WIRE_ERR_MALFORMED = 1,
    WIRE_ERR_TOO_LARGE = 2,
    WIRE_ERR_VERSION = 3,
    WIRE_ERR_BUSY = 4,
    WIRE_ERR_STATE = 5,
    WIRE_ERR_WINDOW = 6,
    WIRE_ERR_TIMEOUT = 7,
    WIRE_ERR_NO_MEMORY = 8,
};

struct wire_header {
    uint32_t type;
    uint32_t length; /* of the payload, bytes */
};

struct wire_renew {
    uint64_t wall_clock_ns; /* since the epoch */
    uint8_t entropy[WIRE_ENTROPY_SIZE];
    uint8_t generation_id[WIRE_ID_SIZE];
    uint8_t machine_id[WIRE_ID_SIZE];
    uint8_t hostname_len;
    char hostname[WIRE_HOSTNAME_MAX + 1]; /* decoded: NUL-terminated */
};

struct wire_renewed {
    uint32_t status; /* 0 or a positive errno of the guest */
    uint32_t step;   /* enum wire_renew_step */
    uint8_t generation_id[WIRE_ID_SIZE];
};

/* The fixed part of EXEC; `strings` is what follows, checked by wire_exec_next(). */
struct wire_exec {
    uint32_t flags;
    uint32_t timeout_ms;
    uint16_t rows, cols;
    uint64_t output_cap_bytes;
    uint32_t uid, gid;
    uint32_t argc, envc;
    const char *strings;
    size_t strings_len;
};

struct wire_exit {
    uint32_t kind;
    uint32_t value;
    uint32_t flags;
    uint64_t stdout_sent, stdout_dropped;
    uint64_t stderr_sent, stderr_dropped;
};

static inline void wire_put16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static inline void wire_put32(uint8_t *p, uint32_t v)
{
    wire_put16(p, (uint16_t)v);
    wire_put16(p + 2, (uint16_t)(v >> 16));
}

static inline void wire_put64(uint8_t *p, uint64_t v)
{
    wire_put32(p, (uint32_t)v);
    wire_put32(p + 4, (uint32_t)(v >> 32));
}

static inline uint16_t wire_get16(const uint8_t *p)
{
    return (uint16_t)(p[0] | (p[1] << 8));
}

static inline uint32_t wire_get32(const uint8_t *p)
{
    return (uint32_t)wire_get16(p) | ((uint32_t)wire_get16(p + 2) << 16);
}

static inline uint64_t wire_get64(const uint8_t *p)
{
    return (uint64_t)wire_get32(p) | ((uint64_t)wire_get32(p + 4) << 32);
}

static inline void wire_header_put(uint8_t out[WIRE_HEADER_SIZE], uint32_t type, uint32_t length)
{
    wire_put32(out, type);
    wire_put32(out + 4, length);
}

static inline struct wire_header wire_header_get(const uint8_t in[WIRE_HEADER_SIZE])
{
    return (struct wire_header){.type = wire_get32(in), .length = wire_get32(in + 4)};
}

/* Smallest and largest payload of a type. -EPROTO for a type this protocol does not know. */
static inline int wire_length_bounds(uint32_t type, uint32_t *min, uint32_t *max)
{
    uint32_t lo, hi;
    switch (type) {
    case WIRE_HELLO:
        lo = WIRE_HELLO_MIN, hi = WIRE_HELLO_MAX;
        break;
    case WIRE_RENEW:
        lo = hi = WIRE_RENEW_SIZE;
        break;
    case WIRE_RENEWED:
        lo = hi = WIRE_RENEWED_SIZE;
        break;
    case WIRE_SHUTDOWN:
    case WIRE_BYE:
    case WIRE_STDIN_EOF:
        lo = hi = 0;
        break;
    case WIRE_EXEC:
        lo = WIRE_EXEC_HEAD_SIZE, hi = WIRE_EXEC_PAYLOAD_MAX;
        break;
    case WIRE_STDIN:
    case WIRE_STDOUT:
    case WIRE_STDERR:
        lo = 1, hi = WIRE_DATA_MAX;
        break;
    case WIRE_SIGNAL:
    case WIRE_WINSIZE:
    case WIRE_STARTED:
    case WIRE_CREDIT:
        lo = hi = 4;
        break;
    case WIRE_FAILED:
        lo = 8, hi = 8 + WIRE_TEXT_MAX;
        break;
    case WIRE_EXIT:
        lo = hi = WIRE_EXIT_SIZE;
        break;
    case WIRE_ERROR:
        lo = 4, hi = 4 + WIRE_TEXT_MAX;
        break;
    default:
        return -EPROTO;
    }
    *min = lo;
    *max = hi;
    return 0;
}

/* -EPROTO: unknown type or too short for it; -EMSGSIZE: too long for it. */
static inline int wire_header_check(struct wire_header h)
{
    uint32_t min, max;
    int rc = wire_length_bounds(h.type, &min, &max);
    if (rc < 0)
        return rc;
    if (h.length < min)
        return -EPROTO;
    return h.length > max ? -EMSGSIZE : 0;
}

/* Writes a whole frame (header and 168 bytes). Returns its size, or -ENOSPC / -EINVAL. */
static inline int wire_renew_encode(const struct wire_renew *r, uint8_t *out, size_t cap)
{
    if (cap < WIRE_HEADER_SIZE + WIRE_RENEW_SIZE)
        return -ENOSPC;
    if (r->hostname_len > WIRE_HOSTNAME_MAX)
        return -EINVAL;
    wire_header_put(out, WIRE_RENEW, WIRE_RENEW_SIZE);
    uint8_t *p = out + WIRE_HEADER_SIZE;
    memset(p, 0, WIRE_RENEW_SIZE);
    wire_put64(p, r->wall_clock_ns);
    memcpy(p + 8, r->entropy, WIRE_ENTROPY_SIZE);
    memcpy(p + 72, r->generation_id, WIRE_ID_SIZE);
    memcpy(p + 88, r->machine_id, WIRE_ID_SIZE);
    p[104] = r->hostname_len;
    memcpy(p + 105, r->hostname, r->hostname_len);
    return (int)(WIRE_HEADER_SIZE + WIRE_RENEW_SIZE);
}

/* What a machine may be called (docs/protocol.md), and capitals. */
static inline bool wire_hostname_char_ok(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.' || c == '_';
}

/* -EPROTO: wrong length; -EINVAL: host name or machine id that is not allowed. */
static inline int wire_renew_decode(const uint8_t *p, size_t len, struct wire_renew *out)
{
    static const uint8_t zeros[WIRE_ID_SIZE];
    if (len != WIRE_RENEW_SIZE)
        return -EPROTO;
    uint8_t n = p[104];
    if (n > WIRE_HOSTNAME_MAX || memcmp(p + 88, zeros, sizeof zeros) == 0)
        return -EINVAL;
    for (size_t i = 0; i < n; i++)
        if (!wire_hostname_char_ok((char)p[105 + i]))
            return -EINVAL;
    out->wall_clock_ns = wire_get64(p);
    memcpy(out->entropy, p + 8, WIRE_ENTROPY_SIZE);
    memcpy(out->generation_id, p + 72, WIRE_ID_SIZE);
    memcpy(out->machine_id, p + 88, WIRE_ID_SIZE);
    out->hostname_len = n;
    memset(out->hostname, 0, sizeof out->hostname);
    memcpy(out->hostname, p + 105, n);
    return 0;
}

/* Writes a whole frame. Returns its size, or -ENOSPC. */
static inline int wire_renewed_encode(const struct wire_renewed *r, uint8_t *out, size_t cap)
{
    if (cap < WIRE_HEADER_SIZE + WIRE_RENEWED_SIZE)
        return -ENOSPC;
    wire_header_put(out, WIRE_RENEWED, WIRE_RENEWED_SIZE);
    wire_put32(out + 8, r->status);
    wire_put32(out + 12, r->step);
    memcpy(out + 16, r->generation_id, WIRE_ID_SIZE);
    return (int)(WIRE_HEADER_SIZE + WIRE_RENEWED_SIZE);
}

static inline int wire_renewed_decode(const uint8_t *p, size_t len, struct wire_renewed *out)
{
    if (len != WIRE_RENEWED_SIZE)
        return -EPROTO;
    out->status = wire_get32(p);
    out->step = wire_get32(p + 4);
    memcpy(out->generation_id, p + 8, WIRE_ID_SIZE);
    return 0;
}

/* `text` points into the payload and is not NUL-terminated. -EPROTO: length or protocol number. */
static inline int wire_hello_decode(const uint8_t *p, size_t len, const char **text,
                                    size_t *text_len)
{
    if (len < WIRE_HELLO_MIN || len > WIRE_HELLO_MAX || wire_get32(p) != WIRE_PROTOCOL)
        return -EPROTO;
    *text = (const char *)p + 4;
    *text_len = len - 4;
    return 0;
}

/* Writes the fixed part of an EXEC payload (40 bytes); the strings follow it. */
static inline int wire_exec_head_encode(const struct wire_exec *x, uint8_t *out, size_t cap)
{
    if (cap < WIRE_EXEC_HEAD_SIZE)
        return -ENOSPC;
    wire_put32(out, WIRE_EXEC_VERSION);
    wire_put32(out + 4, x->flags);
    wire_put32(out + 8, x->timeout_ms);
    wire_put16(out + 12, x->rows);
    wire_put16(out + 14, x->cols);
    wire_put64(out + 16, x->output_cap_bytes);
    wire_put32(out + 24, x->uid);
    wire_put32(out + 28, x->gid);
    wire_put32(out + 32, x->argc);
    wire_put32(out + 36, x->envc);
    return (int)WIRE_EXEC_HEAD_SIZE;
}

/* -EPROTO: length; -ENOTSUP: version; -EINVAL: flags; -E2BIG: too many strings. */
static inline int wire_exec_head_decode(const uint8_t *p, size_t len, struct wire_exec *out)
{
    if (len < WIRE_EXEC_HEAD_SIZE || len > WIRE_EXEC_PAYLOAD_MAX)
        return -EPROTO;
    if (wire_get32(p) != WIRE_EXEC_VERSION)
        return -ENOTSUP;
    uint32_t flags = wire_get32(p + 4), argc = wire_get32(p + 32), envc = wire_get32(p + 36);
    if ((flags & ~(uint32_t)WIRE_EXEC_FLAGS_ALL) != 0 || argc == 0)
        return -EINVAL;
    if (argc > WIRE_ARGC_MAX || envc > WIRE_ENVC_MAX)
        return -E2BIG;
    *out = (struct wire_exec){
        .flags = flags,
        .timeout_ms = wire_get32(p + 8),
        .rows = wire_get16(p + 12),
        .cols = wire_get16(p + 14),
        .output_cap_bytes = wire_get64(p + 16),
        .uid = wire_get32(p + 24),
        .gid = wire_get32(p + 28),
        .argc = argc,
        .envc = envc,
        .strings = (const char *)p + WIRE_EXEC_HEAD_SIZE,
        .strings_len = len - WIRE_EXEC_HEAD_SIZE,
    };
    return 0;
}

/* Takes the next NUL-terminated string off x->strings, or NULL if none is complete. */
static inline const char *wire_exec_next(struct wire_exec *x)
{
    const char *s = x->strings;
    const char *nul = x->strings_len > 0 ? memchr(s, 0, x->strings_len) : NULL;
    if (nul == NULL)
        return NULL;
    size_t used = (size_t)(nul - s) + 1;
    x->strings += used;
    x->strings_len -= used;
    return s;
}

/* Writes a whole frame. Returns its size, or -ENOSPC. */
static inline int wire_exit_encode(const struct wire_exit *x, uint8_t *out, size_t cap)
{
    if (cap < WIRE_HEADER_SIZE + WIRE_EXIT_SIZE)
        return -ENOSPC;
    wire_header_put(out, WIRE_EXIT, WIRE_EXIT_SIZE);
    uint8_t *p = out + WIRE_HEADER_SIZE;
    wire_put32(p, x->kind);
    wire_put32(p + 4, x->value);
    wire_put32(p + 8, x->flags);
    wire_put32(p + 12, 0);
    wire_put64(p + 16, x->stdout_sent);
    wire_put64(p + 24, x->stdout_dropped);
    wire_put64(p + 32, x->stderr_sent);
    wire_put64(p + 40, x->stderr_dropped);
    return (int)(WIRE_HEADER_SIZE + WIRE_EXIT_SIZE);
}

static inline int wire_exit_decode(const uint8_t *p, size_t len, struct wire_exit *out)
{
    if (len != WIRE_EXIT_SIZE || wire_get32(p) < WIRE_EXIT_EXITED ||
        wire_get32(p) > WIRE_EXIT_TIMEOUT)
        return -EPROTO;
    *out = (struct wire_exit){
        .kind = wire_get32(p),
        .value = wire_get32(p + 4),
        .flags = wire_get32(p + 8),
        .stdout_sent = wire_get64(p + 16),
        .stdout_dropped = wire_get64(p + 24),
        .stderr_sent = wire_get64(p + 32),
        .stderr_dropped = wire_get64(p + 40),
    };
    return 0;
}
