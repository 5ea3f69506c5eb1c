/*
 * err: one error, told once.
 *
 * The failing call records the facts (err_set), callers wrap outward with what they were doing
 * (err_wrap), and the top prints or sends one sentence: "outer: inner: what failed: strerror".
 * Library code never logs and never exits. Every function that takes a `struct err *e` (always
 * last) returns 0 or -errno and leaves its outputs untouched on failure. `e` may be NULL.
 */
#pragma once

#include <stdarg.h>

/* Documented codes: docs/protocol.md lists them with their JSON-RPC numbers. */
enum err_code {
    ERR_NONE = 0,
    ERR_HOST,        /* a host call failed: errnum says how */
    ERR_USAGE,       /* the operator asked for something that makes no sense */
    ERR_STATE,       /* right request, wrong run state */
    ERR_BAD_IMAGE,   /* an image (or kernel file) is damaged or not what it claims */
    ERR_MISMATCH,    /* an image is sound but does not fit this host or build */
    ERR_GUEST,       /* the guest did not do its part (did not answer, died) */
    ERR_LIMIT,       /* a named limit would be passed */
    ERR_UNSUPPORTED, /* this host's KVM lacks something that is needed */
};

#define ERR_TEXT_MAX 640

struct err {
    enum err_code code;
    int errnum; /* positive errno, 0 if no host call is to blame */
    char text[ERR_TEXT_MAX];
};

/* Records a failure. `errnum` > 0 appends ": strerror". Returns -errnum, or -EINVAL for 0. */
int err_set(struct err *e, enum err_code code, int errnum, const char *fmt, ...)
    __attribute__((format(printf, 4, 5), cold));
/* Shorthand for ERR_HOST with the current errno. */
int err_sys(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));
/* Puts "fmt: " in front of the recorded text. Returns `rc` unchanged, so `return err_wrap(...)`. */
int err_wrap(struct err *e, int rc, const char *fmt, ...)
    __attribute__((format(printf, 3, 4), cold));
/* Stable lower-case word of a code, e.g. "bad-image" (docs/protocol.md). */
const char *err_code_name(enum err_code code);
