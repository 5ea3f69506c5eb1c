/*
 * fd: ownership of file descriptors and mapped scopes. Any thread.
 *
 * An fd variable starts at -1 and every fd is O_CLOEXEC from birth. A move is visible: take_fd().
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct err;

/* Closes *fd if it is >= 0 and sets it to -1. Scope attribute: CLEANUP_FD int fd = -1; */
void fd_close(int *fd);
#define CLEANUP_FD __attribute__((cleanup(fd_close)))

/* Hands the fd over: returns it and leaves -1 behind. */
static inline int take_fd(int *fd)
{
    int v = *fd;
    *fd = -1;
    return v;
}

/* Full reads and writes: retry EINTR and short counts. fd_read_full returns -ENODATA at EOF. */
int fd_read_full(int fd, void *buf, size_t len, struct err *e);
int fd_write_full(int fd, const void *buf, size_t len, struct err *e);
int fd_pread_full(int fd, void *buf, size_t len, uint64_t off, struct err *e);
int fd_pwrite_full(int fd, const void *buf, size_t len, uint64_t off, struct err *e);

/* Monotonic clock in nanoseconds; the one clock of phase timings. */
uint64_t clock_mono_ns(void);
uint64_t clock_real_ns(void);
