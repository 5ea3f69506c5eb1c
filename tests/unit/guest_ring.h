/*
 * guest_ring: the driver's side of one split queue, for tests: a fake guest that writes its
 * descriptors by hand and may lie in every field. Any thread, one at a time.
 */
#pragma once

#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "devices/virtio/queue.h"
#include "vmm/core/irq.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

#define RING_HOLE_START 0xc0000000ull
#define RING_HOLE_END 0x100000000ull
#define RING_RAM_BYTES (4u << 20)
#define RING_DESC 0x10000ull
#define RING_AVAIL 0x20000ull
#define RING_USED 0x30000ull
#define RING_DATA 0x40000ull

#define D_NEXT 1u
#define D_WRITE 2u
#define D_INDIRECT 4u

struct guest_ring {
    struct ram ram;
    uint16_t size;
    uint16_t avail; /* the driver's copy of its index */
    uint16_t seen;  /* used entries looked at */
};

static inline void ring_put(struct guest_ring *g, uint64_t at, const void *p, size_t len)
{
    int rc = ram_write(&g->ram, gpa(at), p, len);
    assert(rc == 0);
    (void)rc;
}

static inline void ring_put16(struct guest_ring *g, uint64_t at, uint16_t v)
{
    ring_put(g, at, &v, sizeof v);
}

static inline uint16_t ring_get16(struct guest_ring *g, uint64_t at)
{
    uint16_t v = 0;
    int rc = ram_read(&g->ram, gpa(at), &v, sizeof v);
    assert(rc == 0);
    (void)rc;
    return v;
}

static inline void ring_desc_at(struct guest_ring *g, uint64_t table, unsigned i, uint64_t addr,
                                uint32_t len, uint16_t flags, uint16_t next)
{
    uint8_t d[16];
    le64_put(d, addr);
    le32_put(d + 8, len);
    le16_put(d + 12, flags);
    le16_put(d + 14, next);
    ring_put(g, table + 16ull * i, d, sizeof d);
}

static inline void ring_desc(struct guest_ring *g, unsigned i, uint64_t addr, uint32_t len,
                             uint16_t flags, uint16_t next)
{
    ring_desc_at(g, RING_DESC, i, addr, len, flags, next);
}

static inline void ring_offer(struct guest_ring *g, uint16_t head)
{
    ring_put16(g, RING_AVAIL + 4 + 2u * (g->avail % g->size), head);
    g->avail++;
    ring_put16(g, RING_AVAIL + 2, g->avail);
}

/* True if a new used entry is there; fills id and len. */
static inline int ring_used(struct guest_ring *g, uint32_t *id, uint32_t *len)
{
    if (ring_get16(g, RING_USED + 2) == g->seen)
        return 0;
    uint32_t elem[2] = {0, 0};
    int rc = ram_read(&g->ram, gpa(RING_USED + 4 + 8u * (g->seen % g->size)), elem, sizeof elem);
    assert(rc == 0);
    (void)rc;
    g->seen++;
    *id = elem[0];
    *len = elem[1];
    return 1;
}

static inline void ring_init(struct guest_ring *g, uint16_t size)
{
    *g = (struct guest_ring){.size = size};
    int rc = ram_create(&g->ram, RING_RAM_BYTES, RING_HOLE_START, RING_HOLE_END, false, NULL);
    assert(rc == 0);
    (void)rc;
}

static inline void ring_free(struct guest_ring *g)
{
    ram_free(&g->ram);
}

/* Forgets everything, as after a reset of the device. */
static inline void ring_clear(struct guest_ring *g)
{
    void *p = ram_slice(&g->ram, gpa(RING_DESC), RING_DATA - RING_DESC);
    memset(p, 0, RING_DATA - RING_DESC);
    g->avail = 0;
    g->seen = 0;
}

static inline void irq_count(void *ctx, uint32_t gsi)
{
    (*(unsigned *)ctx)++;
}
