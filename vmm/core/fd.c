/*
 * fd: see fd.h. Any thread.
 */
#include "vmm/core/fd.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

#include "vmm/core/err.h"

void fd_close(int *fd)
{
    if (*fd >= 0)
        (void)close(*fd); /* nothing to be done about a failed close of our own fd */
    *fd = -1;
}

int fd_read_full(int fd, void *buf, size_t len, struct err *e)
{
    uint8_t *p = buf;
    while (len > 0) {
        ssize_t n = read(fd, p, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_sys(e, "read");
        if (n == 0)
            return err_set(e, ERR_HOST, ENODATA, "read: end of file, %zu bytes missing", len);
        p += n;
        len -= (size_t)n;
    }
    return 0;
}

int fd_write_full(int fd, const void *buf, size_t len, struct err *e)
{
    const uint8_t *p = buf;
    while (len > 0) {
        ssize_t n = write(fd, p, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_sys(e, "write");
        p += n;
        len -= (size_t)n;
    }
    return 0;
}

int fd_pread_full(int fd, void *buf, size_t len, uint64_t off, struct err *e)
{
    uint8_t *p = buf;
    while (len > 0) {
        ssize_t n = pread(fd, p, len, (off_t)off);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_sys(e, "read at %llu", (unsigned long long)off);
        if (n == 0)
            return err_set(e, ERR_HOST, ENODATA, "read at %llu: end of file",
                           (unsigned long long)off);
        p += n;
        off += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

int fd_pwrite_full(int fd, const void *buf, size_t len, uint64_t off, struct err *e)
{
    const uint8_t *p = buf;
    while (len > 0) {
        ssize_t n = pwrite(fd, p, len, (off_t)off);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_sys(e, "write at %llu", (unsigned long long)off);
        p += n;
        off += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

static uint64_t clock_ns(clockid_t id)
{
    struct timespec ts;
    (void)clock_gettime(id, &ts); /* cannot fail for the two clocks below */
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t clock_mono_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t clock_real_ns(void)
{
    return clock_ns(CLOCK_REALTIME);
}
