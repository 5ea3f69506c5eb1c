/*
 * blk: see blk.h. Loop thread only.
 */
#include "devices/blk.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "devices/disk.h"
#include "devices/disk_io.h"
#include "devices/virtio/device.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define BLK_STATE_VERSION 1u
#define BLK_DEVICE_ID 2u
#define SECTOR_BYTES 512u
#define PHYSICAL_BLOCK_EXP 3u /* 4 KiB: what a write costs least in */
#define POLL_BUDGET VIRTQUEUE_SIZE_MAX

#define BLK_F_SEG_MAX (1ull << 2)
#define BLK_F_RO (1ull << 5)
#define BLK_F_BLK_SIZE (1ull << 6)
#define BLK_F_FLUSH (1ull << 9)
#define BLK_F_TOPOLOGY (1ull << 10)
#define BLK_F_DISCARD (1ull << 13)
#define BLK_F_WRITE_ZEROES (1ull << 14)

#define BLK_T_IN 0u
#define BLK_T_OUT 1u
#define BLK_T_FLUSH 4u
#define BLK_T_GET_ID 8u
#define BLK_T_DISCARD 11u
#define BLK_T_WRITE_ZEROES 13u

#define BLK_S_OK 0
#define BLK_S_IOERR 1
#define BLK_S_UNSUPP 2

#define HEADER_BYTES 16u
#define ID_BYTES 20u
#define RANGE_BYTES 16u
#define RANGE_F_UNMAP 1u
#define CONFIG_BYTES 60u

_Static_assert(BLK_SEGMENTS_MAX + 2 == CHAIN_SEGMENTS_MAX, "a header and a status byte beside");
_Static_assert(CHAIN_SEGMENTS_MAX == DISK_IO_SEGMENTS_MAX, "every chain fits into a disk request");
_Static_assert(VIRTQUEUE_SIZE_MAX == DISK_IO_ENTRIES, "every request fits into the ring");

struct blk_request {
    struct disk_request io;
    struct blk *blk;
    struct blk_request *next_free;
    uint32_t type;
    struct chain chain;
    struct iovec data[CHAIN_SEGMENTS_MAX];
};

struct blk {
    struct virtio_device dev;
    char name[8]; /* "blk0" */
    struct disk *disk;
    struct disk_io io;
    struct loop *loop;
    struct loop_timer more;   /* the budget of a round was used up */
    bool quiesced;            /* from the start, until resume */
    bool dropping;            /* reset: what ends now is not reported */
    bool popping;             /* in process(): completions are signalled at its end */
    struct blk_request *pool; /* sparse mapping, one per possible request */
    unsigned pool_used;
    struct blk_request *free_list;
    struct log_ratelimit host_errors;
};

static struct blk *to_blk(struct virtio_device *dev)
{
    return CONTAINER_OF(dev, struct blk, dev);
}

static struct virtqueue *queue(struct blk *b)
{
    return &b->dev.queues[0];
}

static void process(struct blk *b);

/* ---- ending a request ---- */

/* Memory of a request is touched first when it is first needed: making a device stays cheap. */
static struct blk_request *take_request(struct blk *b)
{
    struct blk_request *r = b->free_list;
    if (r != NULL) {
        b->free_list = r->next_free;
    } else if (b->pool_used < VIRTQUEUE_SIZE_MAX) {
        r = &b->pool[b->pool_used++];
        r->blk = b;
    }
    return r;
}

static void release(struct blk *b, struct blk_request *r)
{
    r->next_free = b->free_list;
    b->free_list = r;
}

/* Status byte last of all that is writable (5.2.6), then the used ring. `written` counts data. */
static void end_request(struct blk *b, struct blk_request *r, uint8_t status, uint64_t written)
{
    struct chain *c = &r->chain;
    struct err e;
    if (!b->dropping && virtio_device_is_live(&b->dev)) {
        uint32_t len = 0;
        if (c->write_bytes > 0) {
            (void)chain_write(c, c->write_bytes - 1, &status, 1); /* inside: cannot be short */
            len = (uint32_t)min_u64(written + 1, UINT32_MAX);
        }
        if (virtqueue_push(queue(b), c->head, len, &e) < 0)
            virtio_device_fault(&b->dev, &e);
    }
    release(b, r);
}

static void on_done(struct disk_request *io, int result)
{
    struct blk_request *r = CONTAINER_OF(io, struct blk_request, io);
    struct blk *b = r->blk;
    if (result < 0 && !b->dropping)
        log_limited(&b->host_errors, LOG_WARN, "%s: request type %u at sector %llu failed: %s",
                    b->name, r->type, (unsigned long long)io->sector, strerror(-result));
    bool read = r->type == BLK_T_IN && result == 0;
    uint8_t status = result == 0 ? BLK_S_OK : BLK_S_IOERR;
    end_request(b, r, status, read ? io->sectors * SECTOR_BYTES : 0);
}

/* ---- beginning one ---- */

static bool range_is_inside(const struct blk *b, uint64_t sector, uint64_t sectors)
{
    uint64_t end;
    return add_u64(sector, sectors, &end) && end <= disk_sectors(b->disk);
}

/* Data segments: readable ones after the header, or writable ones before the status byte. */
static void slice_data(struct blk_request *r, bool device_writes, uint64_t skip, uint64_t bytes)
{
    const struct chain *c = &r->chain;
    unsigned first = device_writes ? c->readable : 0;
    unsigned last = device_writes ? c->count : c->readable;
    r->io.data_count = 0;
    for (unsigned i = first; i < last && bytes > 0; i++) {
        const struct chain_segment *s = &c->segments[i];
        if (skip >= s->len) {
            skip -= s->len;
            continue;
        }
        uint64_t take = min_u64(s->len - skip, bytes);
        r->data[r->io.data_count++] = (struct iovec){(uint8_t *)s->host + skip, take};
        bytes -= take;
        skip = 0;
    }
    r->io.data = r->data;
}

static void submit(struct blk *b, struct blk_request *r, enum disk_op op, uint64_t sector,
                   uint64_t sectors)
{
    r->io.op = op;
    r->io.sector = sector;
    r->io.sectors = sectors;
    r->io.done = on_done;
    disk_io_submit(&b->io, &r->io);
}

static void begin_transfer(struct blk *b, struct blk_request *r, uint64_t sector)
{
    bool in = r->type == BLK_T_IN;
    uint64_t bytes = in ? r->chain.write_bytes - 1 : r->chain.read_bytes - HEADER_BYTES;
    if (bytes % SECTOR_BYTES != 0 || !range_is_inside(b, sector, bytes / SECTOR_BYTES) ||
        (!in && disk_is_read_only(b->disk))) {
        end_request(b, r, BLK_S_IOERR, 0);
        return;
    }
    slice_data(r, in, in ? 0 : HEADER_BYTES, bytes);
    submit(b, r, in ? DISK_READ : DISK_WRITE, sector, bytes / SECTOR_BYTES);
}

static void begin_range(struct blk *b, struct blk_request *r)
{
    uint8_t raw[RANGE_BYTES];
    bool discard = r->type == BLK_T_DISCARD;
    /* Exactly one range: max_discard_seg and max_write_zeroes_seg are 1. */
    if (r->chain.read_bytes != HEADER_BYTES + RANGE_BYTES ||
        chain_read(&r->chain, HEADER_BYTES, raw, sizeof raw) != sizeof raw ||
        disk_is_read_only(b->disk)) {
        end_request(b, r, BLK_S_IOERR, 0);
        return;
    }
    uint64_t sector = le64_get(raw);
    uint32_t sectors = le32_get(raw + 8);
    uint32_t flags = le32_get(raw + 12);
    if ((flags & ~RANGE_F_UNMAP) != 0 || (discard && flags != 0)) {
        end_request(b, r, BLK_S_UNSUPP, 0); /* 5.2.6.2 */
        return;
    }
    if (sectors > BLK_DISCARD_SECTORS_MAX || !range_is_inside(b, sector, sectors)) {
        end_request(b, r, BLK_S_IOERR, 0);
        return;
    }
    submit(b, r, discard ? DISK_DISCARD : DISK_ZERO, sector, sectors);
}

static void begin_get_id(struct blk *b, struct blk_request *r)
{
    char id[ID_BYTES] = {0};
    (void)snprintf(id, sizeof id, "tine-%s", b->name); /* device names are short */
    size_t room = (size_t)min_u64(r->chain.write_bytes - 1, sizeof id);
    size_t n = chain_write(&r->chain, 0, id, room);
    end_request(b, r, BLK_S_OK, n);
}

static void begin(struct blk *b, struct blk_request *r)
{
    uint8_t header[HEADER_BYTES];
    r->type = UINT32_MAX;
    if (r->chain.write_bytes == 0 ||
        chain_read(&r->chain, 0, header, sizeof header) != sizeof header) {
        b->dev.guest_fault_count++;
        end_request(b, r, BLK_S_IOERR, 0);
        return;
    }
    r->type = le32_get(header);
    switch (r->type) {
    case BLK_T_IN:
    case BLK_T_OUT:
        begin_transfer(b, r, le64_get(header + 8));
        break;
    case BLK_T_FLUSH:
        submit(b, r, DISK_FLUSH, 0, 0);
        break;
    case BLK_T_GET_ID:
        begin_get_id(b, r);
        break;
    case BLK_T_DISCARD:
    case BLK_T_WRITE_ZEROES:
        begin_range(b, r);
        break;
    default:
        end_request(b, r, BLK_S_UNSUPP, 0);
        break;
    }
}

/* ---- the queue ---- */

static bool may_pop(const struct blk *b)
{
    return !b->quiesced && virtio_device_is_live(&b->dev);
}

enum pop_result { POP_ONE, POP_NONE, POP_NO_REQUEST, POP_FAULT };

static enum pop_result pop_one(struct blk *b)
{
    struct err e;
    struct blk_request *r = take_request(b);
    if (r == NULL)
        return POP_NO_REQUEST;
    int rc = virtqueue_pop(queue(b), &r->chain, &e);
    if (rc == 1) {
        begin(b, r);
        return POP_ONE;
    }
    release(b, r);
    if (rc < 0)
        virtio_device_fault(&b->dev, &e);
    return rc < 0 ? POP_FAULT : POP_NONE;
}

static void on_more(void *arg)
{
    process(arg);
}

/* Pops until there is nothing, no free request, or the budget is spent. */
static enum pop_result pop_many(struct blk *b, unsigned *budget)
{
    bool asked = false;
    enum pop_result last = POP_NONE;
    while (may_pop(b) && *budget > 0) {
        last = pop_one(b);
        if (last == POP_ONE) {
            (*budget)--;
            asked = false;
        } else if (last == POP_NONE && !asked) {
            virtqueue_notifications(queue(b), true);
            asked = true; /* look once more: it may have come before the driver saw our wish */
        } else {
            break;
        }
    }
    return last;
}

static void process(struct blk *b)
{
    unsigned budget = POLL_BUDGET;
    enum pop_result last;
    do {
        last = pop_many(b, &budget);
        disk_io_kick(&b->io);
        /* Out of requests, but some ended within the kick: no event would bring us back for them.
         */
    } while (last == POP_NO_REQUEST && b->free_list != NULL && budget > 0 && may_pop(b));
    /* A guest that never stops must not keep the loop from the others. */
    if (budget == 0 && may_pop(b))
        loop_timer_arm(b->loop, &b->more, 0, on_more, b);
    virtio_device_signal(&b->dev, queue(b));
}

/* Completions came in from the loop: requests are free again, the queue may hold more. */
static void after_io(void *arg)
{
    process(arg);
}

/* ---- virtio_device_ops ---- */

static void config_read(struct virtio_device *dev, uint32_t offset, void *data, unsigned len)
{
    struct blk *b = to_blk(dev);
    uint8_t c[CONFIG_BYTES] = {0};
    le64_put(c, disk_sectors(b->disk));
    le32_put(c + 12, BLK_SEGMENTS_MAX);
    le32_put(c + 20, SECTOR_BYTES);
    c[24] = PHYSICAL_BLOCK_EXP;
    le16_put(c + 26, 1u << PHYSICAL_BLOCK_EXP); /* smallest I/O without a detour, in sectors */
    le16_put(c + 34, 1);                        /* queues */
    if (!disk_is_read_only(b->disk)) {
        le32_put(c + 36, BLK_DISCARD_SECTORS_MAX);
        le32_put(c + 40, 1);
        le32_put(c + 44, 1u << PHYSICAL_BLOCK_EXP); /* discard alignment */
        le32_put(c + 48, BLK_DISCARD_SECTORS_MAX);
        le32_put(c + 52, 1);
        c[56] = 1; /* write zeroes may unmap */
    }
    for (unsigned i = 0; i < len; i++) {
        if (offset + i < CONFIG_BYTES)
            ((uint8_t *)data)[i] = c[offset + i];
    }
}

static void notify(struct virtio_device *dev, unsigned index)
{
    process(to_blk(dev));
}

static void activate(struct virtio_device *dev)
{
    process(to_blk(dev)); /* buffers may have been queued before DRIVER_OK */
}

/* Nothing touches the old rings or buffers afterwards: what the kernel has is waited for. */
static void reset(struct virtio_device *dev)
{
    struct blk *b = to_blk(dev);
    struct err e;
    b->dropping = true;
    if (disk_io_drain(&b->io, true, &e) < 0)
        log_limited(&b->host_errors, LOG_ERROR, "%s: reset: %s", b->name, e.text);
    b->dropping = false;
    loop_timer_cancel(b->loop, &b->more);
}

static int quiesce(struct virtio_device *dev, struct err *e)
{
    struct blk *b = to_blk(dev);
    b->quiesced = true;
    loop_timer_cancel(b->loop, &b->more);
    int rc = disk_io_drain(&b->io, false, e);
    virtio_device_signal(dev, queue(b));
    return rc;
}

static void resume(struct virtio_device *dev)
{
    struct blk *b = to_blk(dev);
    b->quiesced = false;
    if (virtio_device_is_live(dev))
        process(b);
}

static int save(struct virtio_device *dev, struct state_writer *w, struct err *e)
{
    struct blk *b = to_blk(dev);
    if (!b->quiesced || !disk_io_is_idle(&b->io))
        return err_set(e, ERR_STATE, EBUSY, "%s is not quiesced", b->name);
    state_put_u32(w, "version", BLK_STATE_VERSION);
    state_put_u64(w, "sectors", disk_sectors(b->disk));
    return 0;
}

static int restore(struct virtio_device *dev, const struct state_node *n, struct err *e)
{
    struct blk *b = to_blk(dev);
    uint64_t sectors = 0;
    int rc = state_check_version(n, BLK_STATE_VERSION, e);
    if (rc == 0)
        rc = state_get_u64(n, "sectors", &sectors, e);
    if (rc < 0)
        return rc;
    if (sectors != disk_sectors(b->disk))
        return err_set(e, ERR_MISMATCH, 0, "the guest knows a disk of %llu sectors, %s has %llu",
                       (unsigned long long)sectors, disk_path(b->disk),
                       (unsigned long long)disk_sectors(b->disk));
    return 0;
}

static void free_device(struct virtio_device *dev)
{
    struct blk *b = to_blk(dev);
    reset(dev);
    disk_io_close(&b->io);
    disk_free(b->disk); /* NULL after blk_forget */
    (void)munmap(b->pool, VIRTQUEUE_SIZE_MAX * sizeof *b->pool);
    free(b);
}

static const struct virtio_device_ops blk_ops = {
    .config_read = config_read,
    .activate = activate,
    .reset = reset,
    .notify = notify,
    .quiesce = quiesce,
    .resume = resume,
    .save = save,
    .restore = restore,
    .free = free_device,
};

static uint64_t offered(const struct disk *disk)
{
    uint64_t f = VIRTIO_F_VERSION_1 | VIRTIO_F_RING_INDIRECT_DESC | VIRTIO_F_RING_EVENT_IDX |
                 BLK_F_SEG_MAX | BLK_F_BLK_SIZE | BLK_F_TOPOLOGY;
    return f |
           (disk_is_read_only(disk) ? BLK_F_RO : BLK_F_FLUSH | BLK_F_DISCARD | BLK_F_WRITE_ZEROES);
}

int blk_create(struct virtio_device **out, unsigned index, struct disk *disk, const struct ram *ram,
               struct loop *loop, struct err *e)
{
    struct blk *b = calloc(1, sizeof *b);
    /* Sparse: a request's pages come with its first use. */
    void *pool = mmap(NULL, VIRTQUEUE_SIZE_MAX * sizeof *b->pool, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b == NULL || pool == MAP_FAILED) {
        free(b);
        if (pool != MAP_FAILED)
            (void)munmap(pool, VIRTQUEUE_SIZE_MAX * sizeof *b->pool);
        disk_free(disk);
        return err_set(e, ERR_HOST, ENOMEM, "blk%u", index);
    }
    b->pool = pool;
    b->disk = disk;
    b->loop = loop;
    b->quiesced = true;
    (void)snprintf(b->name, sizeof b->name, "blk%u", index % 1000);
    b->dev = (struct virtio_device){.ops = &blk_ops,
                                    .name = b->name,
                                    .device_id = BLK_DEVICE_ID,
                                    .features = offered(disk),
                                    .queue_count = 1};
    b->dev.queues[0].ram = ram;
    disk_io_init(&b->io, disk, loop, after_io, b);
    *out = &b->dev;
    return 0;
}

struct disk *blk_forget(struct virtio_device *dev)
{
    struct blk *b = to_blk(dev);
    struct disk *disk = b->disk;
    disk_io_forget(&b->io);
    b->disk = NULL;
    return disk;
}

struct disk *blk_disk(struct virtio_device *dev)
{
    return to_blk(dev)->disk;
}
