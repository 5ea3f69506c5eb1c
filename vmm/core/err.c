/*
 * err: see err.h. Any thread; each `struct err` belongs to one stack frame.
 */
#include "vmm/core/err.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static __attribute__((format(printf, 4, 0))) int set_va(struct err *e, enum err_code code,
                                                        int errnum, const char *fmt, va_list ap)
{
    int rc = errnum > 0 ? -errnum : -EINVAL;
    if (e == NULL)
        return rc;
    e->code = code;
    e->errnum = errnum > 0 ? errnum : 0;
    int n = vsnprintf(e->text, sizeof e->text, fmt, ap);
    if (errnum > 0 && n >= 0 && (size_t)n < sizeof e->text)
        (void)snprintf(e->text + n, sizeof e->text - (size_t)n, ": %s", strerror(errnum));
    return rc;
}

int err_set(struct err *e, enum err_code code, int errnum, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int rc = set_va(e, code, errnum, fmt, ap);
    va_end(ap);
    return rc;
}

int err_sys(struct err *e, const char *fmt, ...)
{
    int errnum = errno;
    va_list ap;
    va_start(ap, fmt);
    int rc = set_va(e, ERR_HOST, errnum, fmt, ap);
    va_end(ap);
    return rc;
}

int err_wrap(struct err *e, int rc, const char *fmt, ...)
{
    if (e == NULL)
        return rc;
    char inner[ERR_TEXT_MAX];
    memcpy(inner, e->text, sizeof inner);
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(e->text, sizeof e->text, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof e->text)
        (void)snprintf(e->text + n, sizeof e->text - (size_t)n, ": %s", inner);
    return rc;
}

const char *err_code_name(enum err_code code)
{
    switch (code) {
    case ERR_NONE:
        return "none";
    case ERR_HOST:
        return "host";
    case ERR_USAGE:
        return "usage";
    case ERR_STATE:
        return "state";
    case ERR_BAD_IMAGE:
        return "bad-image";
    case ERR_MISMATCH:
        return "mismatch";
    case ERR_GUEST:
        return "guest";
    case ERR_LIMIT:
        return "limit";
    case ERR_UNSUPPORTED:
        return "unsupported";
    }
    return "unknown";
}
