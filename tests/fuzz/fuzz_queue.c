/*
 * Fuzz target of the split queue: the input is a script of what a driver writes into the rings and
 * of what the device does in between. Whatever happens, a popped chain lies in guest memory, is
 * bounded, and its sums are right. Seeds: seeds/queue.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "devices/virtio/queue.h"
#include "tests/fuzz/script.h"
#include "tests/unit/guest_ring.h"
#include "vmm/core/err.h"
#include "vmm/core/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STEPS_MAX 300

static void check_chain(const struct ram *ram, const struct chain *c)
{
    const uint8_t *low = ram->regions[0].host, *high = low + ram->regions[0].bytes;
    uint64_t reads = 0, writes = 0;
    assert(c->count <= CHAIN_SEGMENTS_MAX && c->readable <= c->count);
    for (unsigned i = 0; i < c->count; i++) {
        const struct chain_segment *s = &c->segments[i];
        const uint8_t *p = s->host;
        assert(s->len > 0 && p >= low && p < high && s->len <= (uint64_t)(high - p));
        assert(s->device_writes == (i >= c->readable));
        *(s->device_writes ? &writes : &reads) += s->len;
    }
    assert(reads == c->read_bytes && writes == c->write_bytes);
}

static void save_and_restore(struct virtqueue *q)
{
    struct state_writer w;
    struct state_node root;
    const void *blob;
    size_t len;
    struct err e;
    if (state_writer_init(&w, &e) < 0)
        abort();
    virtqueue_save(q, &w);
    int rc = state_finish(&w, &blob, &len, &e);
    assert(rc == 0 && state_open(blob, len, &root, &e) == 0);
    struct virtqueue back = {.ram = q->ram, .event_idx = q->event_idx, .indirect = q->indirect};
    rc = virtqueue_restore(&back, &root, &e);
    assert(rc == 0 || !q->ready);
    if (rc == 0)
        *q = back;
    state_writer_free(&w);
}

static void driver_step(struct script *s, struct guest_ring *g, uint8_t op)
{
    uint64_t at;
    switch (op) {
    case 0: /* a descriptor of the ring's own table */
        ring_desc(g, take8(s), take16(s) * 64ull, take16(s), take8(s) & 7, take16(s));
        break;
    case 1: /* one of an indirect table */
        at = RING_DATA + take8(s);
        ring_desc_at(g, at, take8(s), RING_DATA + take16(s), take16(s), take8(s) & 7, take8(s));
        break;
    case 2: /* the entry of an indirect table */
        ring_desc(g, take8(s) & 15, RING_DATA + take8(s), take8(s) * 8u, D_INDIRECT, 0);
        break;
    case 3:
        ring_offer(g, take8(s) & 31);
        break;
    case 4:
        ring_put16(g, RING_AVAIL + 2, take16(s));
        break;
    case 5: /* flags, used_event, ring slots */
        ring_put16(g, RING_AVAIL + 2u * (take8(s) % 64), take16(s));
        break;
    default: /* anything, anywhere */
        at = take32(s) % (RING_RAM_BYTES - 8);
        ring_put16(g, at, take16(s));
        break;
    }
}

static void device_step(struct script *s, struct virtqueue *q, struct chain *c, uint8_t op)
{
    struct err e;
    uint8_t buf[64] = {0};
    int rc;
    switch (op) {
    case 0:
    case 1:
        rc = virtqueue_pop(q, c, &e);
        assert(rc == 1 || rc == 0 || rc == -EPROTO);
        if (rc == 1) {
            check_chain(q->ram, c);
            assert(chain_read(c, take16(s), buf, sizeof buf) <= sizeof buf);
            assert(chain_write(c, take16(s), buf, sizeof buf) <= sizeof buf);
            if ((take8(s) & 7) == 0)
                virtqueue_unpop(q);
        }
        break;
    case 2:
        rc = virtqueue_push(q, take8(s), take16(s), &e);
        assert(rc == 0 || rc == -EPROTO);
        break;
    case 3:
        (void)virtqueue_wants_interrupt(q);
        break;
    case 4:
        virtqueue_notifications(q, (take8(s) & 1) != 0);
        break;
    case 5:
        save_and_restore(q);
        break;
    default:
        virtqueue_reset(q);
        q->size = (uint16_t)(take8(s) + 1);
        q->desc_gpa = take16(s) * 16ull;
        q->avail_gpa = RING_AVAIL + take8(s);
        q->used_gpa = RING_USED + (take8(s) & ~3u);
        q->indirect = (take8(s) & 1) != 0;
        q->event_idx = (take8(s) & 1) != 0;
        (void)virtqueue_enable(q, &e); /* a refusal leaves it not ready */
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct guest_ring g;
    static struct chain c;
    struct script s = {data, size};
    struct err e;
    if (g.ram.bytes == 0)
        ring_init(&g, 16);
    ring_clear(&g);
    memset(ram_slice(&g.ram, gpa(RING_DATA), 0x2000), 0, 0x2000);
    uint8_t flags = take8(&s);
    g.size = (uint16_t)(1u << (flags >> 4 & 7));
    struct virtqueue q = {.ram = &g.ram,
                          .size = g.size,
                          .desc_gpa = RING_DESC,
                          .avail_gpa = RING_AVAIL,
                          .used_gpa = RING_USED,
                          .indirect = (flags & 1) == 0,
                          .event_idx = (flags & 2) == 0};
    int rc = virtqueue_enable(&q, &e);
    assert(rc == 0);
    (void)rc;
    for (unsigned i = 0; i < STEPS_MAX && s.left > 0; i++) {
        uint8_t op = take8(&s);
        if (op < 0x80)
            driver_step(&s, &g, op & 7);
        else
            device_step(&s, &q, &c, op & 7);
    }
    return 0;
}
