/*
 * vsock_ring: see vsock_ring.h.
 */
#include "devices/vsock_ring.h"

#include <stdlib.h>

#include "vmm/core/num.h"

/* Spans of `len` bytes from position `at`, wrapped at the end of the buffer. */
static int spans_of(const struct vsock_ring *r, uint32_t at, uint32_t len, struct iovec spans[2])
{
    uint32_t first = (uint32_t)min_u64(len, r->cap - at);
    spans[0] = (struct iovec){.iov_base = r->buf + at, .iov_len = first};
    spans[1] = (struct iovec){.iov_base = r->buf, .iov_len = len - first};
    return len > first ? 2 : 1;
}

bool vsock_ring_reserve(struct vsock_ring *r, uint32_t want, struct iovec spans[2])
{
    if (want == 0 || want > r->cap - r->len)
        return false;
    if (r->buf == NULL) {
        r->buf = malloc(r->cap);
        if (r->buf == NULL)
            return false;
        r->start = 0;
    }
    (void)spans_of(r, (r->start + r->len) % r->cap, want, spans);
    return true;
}

void vsock_ring_commit(struct vsock_ring *r, uint32_t n)
{
    r->len += n;
}

int vsock_ring_peek(const struct vsock_ring *r, struct iovec spans[2])
{
    return r->len == 0 ? 0 : spans_of(r, r->start, r->len, spans);
}

void vsock_ring_consume(struct vsock_ring *r, uint32_t n)
{
    r->start = (r->start + n) % r->cap;
    r->len -= n;
    if (r->len == 0)
        vsock_ring_clear(r);
}

void vsock_ring_clear(struct vsock_ring *r)
{
    free(r->buf);
    *r = (struct vsock_ring){.cap = r->cap};
}
