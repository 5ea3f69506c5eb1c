/*
 * queue: see queue.h. Loop thread only; the other side of every barrier here is the guest's driver.
 *
 * The three indices that both sides touch while running (avail idx, used idx, the two event words)
 * go through `shared16`, an atomic on a checked slice; everything else is copied once by ram_read.
 */
#include "devices/virtio/queue.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define DESC_BYTES 16u
#define DESC_F_NEXT 1u
#define DESC_F_WRITE 2u
#define DESC_F_INDIRECT 4u
#define AVAIL_F_NO_INTERRUPT 1u
#define USED_F_NO_NOTIFY 1u
#define AVAIL_IDX 2u
#define AVAIL_RING 4u
#define USED_IDX 2u
#define USED_RING 4u
#define USED_ELEM_BYTES 8u

struct desc {
    uint64_t addr;
    uint32_t len;
    uint16_t flags;
    uint16_t next;
};

/* Where descriptors are taken from: the ring's own table, or one indirect table. */
struct table {
    uint64_t base_gpa;
    uint32_t entries;
    bool nested; /* an indirect table: may not point to another */
};

static int broken(struct err *e, const char *what)
{
    return err_set(e, ERR_GUEST, EPROTO, "%s", what);
}

/* Alignment was checked by virtqueue_enable, so the access is one instruction. */
static _Atomic uint16_t *shared16(const struct virtqueue *q, uint64_t gpa_addr)
{
    return ram_slice(q->ram, gpa(gpa_addr), sizeof(uint16_t));
}

static uint64_t used_event_gpa(const struct virtqueue *q)
{
    return q->avail_gpa + AVAIL_RING + 2u * q->size;
}

static uint64_t avail_event_gpa(const struct virtqueue *q)
{
    return q->used_gpa + USED_RING + USED_ELEM_BYTES * q->size;
}

static int check(const struct virtqueue *q, struct err *e)
{
    if (q->size == 0 || q->size > VIRTQUEUE_SIZE_MAX || (q->size & (q->size - 1)) != 0)
        return err_set(e, ERR_GUEST, EPROTO, "queue size %u is not a power of two up to %u",
                       q->size, VIRTQUEUE_SIZE_MAX);
    if (q->desc_gpa % 16 != 0 || q->avail_gpa % 2 != 0 || q->used_gpa % 4 != 0)
        return broken(e, "queue areas are not aligned (virtio 1.2, 2.7)");
    if (ram_slice(q->ram, gpa(q->desc_gpa), (uint64_t)DESC_BYTES * q->size) == NULL ||
        ram_slice(q->ram, gpa(q->avail_gpa), AVAIL_RING + 2u * q->size + 2u) == NULL ||
        ram_slice(q->ram, gpa(q->used_gpa), USED_RING + USED_ELEM_BYTES * q->size + 2u) == NULL)
        return broken(e, "queue areas lie outside guest memory");
    return 0;
}

int virtqueue_enable(struct virtqueue *q, struct err *e)
{
    int rc = check(q, e);
    if (rc < 0)
        return rc;
    q->ready = true;
    q->next_avail = 0;
    q->next_used = 0;
    q->signalled_used = 0;
    q->signalled_valid = true;
    return 0;
}

void virtqueue_reset(struct virtqueue *q)
{
    *q = (struct virtqueue){.ram = q->ram};
}

static int add_segment(struct virtqueue *q, struct chain *c, const struct desc *d, struct err *e)
{
    bool device_writes = (d->flags & DESC_F_WRITE) != 0;
    if (d->len == 0)
        return 0; /* carries nothing, whatever its address; the walk has counted it */
    if (!device_writes && c->count > c->readable)
        return broken(e, "a readable descriptor follows a writable one");
    if (c->count == CHAIN_SEGMENTS_MAX)
        return broken(e, "the chain has too many descriptors");
    void *host = ram_slice(q->ram, gpa(d->addr), d->len);
    if (host == NULL)
        return broken(e, "a descriptor points outside guest memory");
    c->segments[c->count] =
        (struct chain_segment){.host = host, .len = d->len, .device_writes = device_writes};
    c->count++;
    if (device_writes) {
        c->write_bytes += d->len;
    } else {
        c->readable++;
        c->read_bytes += d->len;
    }
    return 0;
}

static int enter_indirect(const struct virtqueue *q, const struct desc *d, struct table *t,
                          struct err *e)
{
    if (!q->indirect)
        return broken(e, "an indirect descriptor, though the feature was not accepted");
    if (t->nested)
        return broken(e, "an indirect table inside an indirect table");
    if ((d->flags & DESC_F_NEXT) != 0)
        return broken(e, "an indirect descriptor that continues (2.7.5.3.1)");
    if (d->len == 0 || d->len % DESC_BYTES != 0)
        return broken(e, "an indirect table whose length is no multiple of 16");
    *t = (struct table){.base_gpa = d->addr, .entries = d->len / DESC_BYTES, .nested = true};
    return 0;
}

/* Bounded by its own counter: neither a cycle nor zero-length descriptors can hold it. */
static int walk(struct virtqueue *q, struct chain *c, struct err *e)
{
    struct table t = {.base_gpa = q->desc_gpa, .entries = q->size};
    uint32_t index = c->head;
    for (unsigned steps = 0; steps <= CHAIN_SEGMENTS_MAX; steps++) {
        struct desc d;
        if (index >= t.entries)
            return broken(e, "a descriptor index past the end of its table");
        uint64_t at;
        if (!add_u64(t.base_gpa, (uint64_t)index * DESC_BYTES, &at) ||
            ram_read(q->ram, gpa(at), &d, sizeof d) < 0)
            return broken(e, "an indirect table outside guest memory");
        if ((d.flags & DESC_F_INDIRECT) != 0) {
            int rc = enter_indirect(q, &d, &t, e);
            if (rc < 0)
                return rc;
            index = 0;
            continue;
        }
        int rc = add_segment(q, c, &d, e);
        if (rc < 0)
            return rc;
        if ((d.flags & DESC_F_NEXT) == 0)
            return 0;
        index = d.next;
    }
    return broken(e, "the chain is too long or runs in a circle");
}

int virtqueue_pop(struct virtqueue *q, struct chain *out, struct err *e)
{
    if (!q->ready)
        return 0;
    _Atomic uint16_t *idx = shared16(q, q->avail_gpa + AVAIL_IDX);
    if (idx == NULL)
        return broken(e, "the avail ring lies outside guest memory");
    /* Acquire: pairs with the driver's barrier between filling the ring slot and moving idx. */
    uint16_t avail = atomic_load_explicit(idx, memory_order_acquire);
    uint16_t pending = (uint16_t)(avail - q->next_avail);
    if (pending == 0)
        return 0;
    if (pending > q->size)
        return err_set(e, ERR_GUEST, EPROTO, "avail index jumped by %u in a queue of %u", pending,
                       q->size);
    uint16_t head;
    uint64_t slot = q->avail_gpa + AVAIL_RING + 2u * (q->next_avail % q->size);
    if (ram_read(q->ram, gpa(slot), &head, sizeof head) < 0)
        return broken(e, "the avail ring lies outside guest memory");
    if (head >= q->size)
        return err_set(e, ERR_GUEST, EPROTO, "chain head %u in a queue of %u", head, q->size);
    out->head = head;
    out->count = 0;
    out->readable = 0;
    out->read_bytes = 0;
    out->write_bytes = 0;
    int rc = walk(q, out, e);
    if (rc < 0)
        return rc;
    q->next_avail++;
    return 1;
}

void virtqueue_unpop(struct virtqueue *q)
{
    q->next_avail--;
}

int virtqueue_push(struct virtqueue *q, uint16_t head, uint32_t written, struct err *e)
{
    if (!q->ready)
        return broken(e, "a used buffer for a queue that is not ready");
    uint8_t elem[USED_ELEM_BYTES];
    le32_put(elem, head);
    le32_put(elem + 4, written);
    uint64_t slot = q->used_gpa + USED_RING + USED_ELEM_BYTES * (q->next_used % q->size);
    _Atomic uint16_t *idx = shared16(q, q->used_gpa + USED_IDX);
    if (idx == NULL || ram_write(q->ram, gpa(slot), elem, sizeof elem) < 0)
        return broken(e, "the used ring lies outside guest memory");
    q->next_used++;
    /* Release: the element (and the payload before it) is visible before the index; pairs with the
     * driver's read barrier between loading used idx and reading the element. */
    atomic_store_explicit(idx, q->next_used, memory_order_release);
    if (q->next_used == q->signalled_used)
        q->signalled_valid = false; /* a whole lap without a question: the distance is lost */
    return 0;
}

bool virtqueue_wants_interrupt(struct virtqueue *q)
{
    if (!q->ready)
        return false;
    uint16_t old = q->signalled_used;
    bool valid = q->signalled_valid;
    if (valid && old == q->next_used)
        return false;
    /* Full fence: our used idx is visible before we look whether the driver wants to hear of it;
     * pairs with the driver's fence between moving used_event (or flags) and re-reading used idx.
     */
    atomic_thread_fence(memory_order_seq_cst);
    q->signalled_used = q->next_used;
    q->signalled_valid = true;
    _Atomic uint16_t *word =
        shared16(q, q->event_idx ? used_event_gpa(q) : q->avail_gpa /* flags */);
    if (word == NULL)
        return true;
    uint16_t v = atomic_load_explicit(word, memory_order_relaxed);
    if (!q->event_idx)
        return (v & AVAIL_F_NO_INTERRUPT) == 0;
    if (!valid)
        return true;
    /* 2.7.10: has used_event been passed by old -> next_used? All modulo 2^16. */
    return (uint16_t)(q->next_used - v - 1u) < (uint16_t)(q->next_used - old);
}

void virtqueue_notifications(struct virtqueue *q, bool enable)
{
    if (!q->ready)
        return;
    uint64_t at = q->event_idx ? avail_event_gpa(q) : q->used_gpa /* flags */;
    _Atomic uint16_t *word = shared16(q, at);
    if (word == NULL)
        return;
    if (!enable) {
        /* With event index an avail_event that lags behind keeps the driver quiet by itself. */
        if (!q->event_idx)
            atomic_store_explicit(word, USED_F_NO_NOTIFY, memory_order_relaxed);
        return;
    }
    atomic_store_explicit(word, q->event_idx ? q->next_avail : 0, memory_order_relaxed);
    /* Full fence: our wish is visible before the caller looks at avail idx once more; pairs with
     * the driver's fence between moving avail idx and reading avail_event (or flags). */
    atomic_thread_fence(memory_order_seq_cst);
}

/* Copies between `buf` and the segments [first, last) at byte `offset`; short at the end. */
static size_t copy(const struct chain *c, unsigned first, unsigned last, uint64_t offset, void *to,
                   const void *from, size_t len)
{
    size_t done = 0;
    for (unsigned i = first; i < last && done < len; i++) {
        const struct chain_segment *s = &c->segments[i];
        if (offset >= s->len) {
            offset -= s->len;
            continue;
        }
        size_t n = (size_t)min_u64(s->len - offset, len - done);
        uint8_t *host = (uint8_t *)s->host + offset;
        if (to != NULL)
            memcpy((uint8_t *)to + done, host, n);
        else
            memcpy(host, (const uint8_t *)from + done, n);
        done += n;
        offset = 0;
    }
    return done;
}

size_t chain_read(const struct chain *c, uint64_t offset, void *to, size_t len)
{
    return copy(c, 0, c->readable, offset, to, NULL, len);
}

size_t chain_write(const struct chain *c, uint64_t offset, const void *from, size_t len)
{
    return copy(c, c->readable, c->count, offset, NULL, from, len);
}

void virtqueue_save(const struct virtqueue *q, struct state_writer *w)
{
    state_put_u32(w, "size", q->size);
    state_put_u32(w, "ready", q->ready);
    state_put_u64(w, "desc", q->desc_gpa);
    state_put_u64(w, "avail", q->avail_gpa);
    state_put_u64(w, "used", q->used_gpa);
    state_put_u32(w, "next-avail", q->next_avail);
    state_put_u32(w, "next-used", q->next_used);
    state_put_u32(w, "signalled-used", q->signalled_used);
    state_put_u32(w, "signalled-valid", q->signalled_valid);
}

static int get_u16(const struct state_node *n, const char *name, uint16_t *out, struct err *e)
{
    uint32_t v;
    int rc = state_get_u32(n, name, &v, e);
    if (rc < 0)
        return rc;
    if (v > UINT16_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0, "%s is %u, expected at most %u", name, v, UINT16_MAX);
    *out = (uint16_t)v;
    return 0;
}

/* event_idx and indirect follow from the accepted features: the device sets them beforehand. */
int virtqueue_restore(struct virtqueue *q, const struct state_node *n, struct err *e)
{
    struct virtqueue v = {.ram = q->ram, .event_idx = q->event_idx, .indirect = q->indirect};
    uint16_t ready = 0, valid = 0;
    int rc = get_u16(n, "size", &v.size, e);
    if (rc == 0)
        rc = get_u16(n, "ready", &ready, e);
    if (rc == 0)
        rc = state_get_u64(n, "desc", &v.desc_gpa, e);
    if (rc == 0)
        rc = state_get_u64(n, "avail", &v.avail_gpa, e);
    if (rc == 0)
        rc = state_get_u64(n, "used", &v.used_gpa, e);
    if (rc == 0)
        rc = get_u16(n, "next-avail", &v.next_avail, e);
    if (rc == 0)
        rc = get_u16(n, "next-used", &v.next_used, e);
    if (rc == 0)
        rc = get_u16(n, "signalled-used", &v.signalled_used, e);
    if (rc == 0)
        rc = get_u16(n, "signalled-valid", &valid, e);
    if (rc < 0)
        return rc;
    v.ready = ready != 0;
    v.signalled_valid = valid != 0;
    if (v.ready && (rc = check(&v, e)) < 0) {
        if (e != NULL)
            e->code = ERR_BAD_IMAGE; /* here a file is to blame, not a running guest */
        return rc;
    }
    *q = v;
    return 0;
}
