/*
 * vsock_ring: a bounded byte queue that owns memory only while it holds bytes. Loop thread only.
 *
 * Bytes that a host peer does not take at once wait here; `cap` is what we promised the guest
 * (buf_alloc), so a guest that keeps to its credit never meets a full ring.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

struct vsock_ring {
    uint8_t *buf; /* NULL while empty */
    uint32_t cap, start, len;
};

/* Room for `want` more bytes as at most two spans; false when it does not fit or without memory. */
bool vsock_ring_reserve(struct vsock_ring *r, uint32_t want, struct iovec spans[2]);
/* The reserved bytes were filled in. */
void vsock_ring_commit(struct vsock_ring *r, uint32_t n);
/* The queued bytes as at most two spans; returns how many spans. */
int vsock_ring_peek(const struct vsock_ring *r, struct iovec spans[2]);
/* Drops `n` bytes (<= len) from the front; frees the memory with the last one. */
void vsock_ring_consume(struct vsock_ring *r, uint32_t n);
void vsock_ring_clear(struct vsock_ring *r);
