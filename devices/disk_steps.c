/*
 * disk_steps: see disk_steps.h. Loop thread only.
 */
#include "devices/disk_steps.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>

#include "vmm/core/err.h"
#include "vmm/core/num.h"

/* ---- one operation into the ring ---- */

static struct io_uring_sqe *next_sqe(struct disk_io *io, struct disk_request *r)
{
    struct err e;
    int rc = disk_ring_prepare(io, disk_io_on_ring_event, &e);
    if (rc < 0) {
        disk_io_finish(io, r, rc);
        return NULL;
    }
    struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring);
    if (sqe == NULL) {
        /* One operation per request and at most DISK_IO_ENTRIES requests: there is room, unless the
         * kernel refuses to take what is queued. */
        disk_io_finish(io, r, -EBUSY);
        return NULL;
    }
    return sqe;
}

static void send_sqe(struct io_uring_sqe *sqe, struct disk_request *r, enum disk_io_step step)
{
    r->step = step;
    sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, r);
}

static unsigned file_of(const struct disk_source *s)
{
    return s->kind == DISK_FROM_LAYER ? disk_ring_layer_file(s->slot) : disk_ring_base_file();
}

static void queue_read(struct disk_io *io, struct disk_request *r, const struct disk_source *s,
                       unsigned segments, enum disk_io_step step)
{
    struct io_uring_sqe *sqe = next_sqe(io, r);
    if (sqe == NULL)
        return;
    io_uring_prep_readv(sqe, (int)file_of(s), r->scratch, segments, s->offset);
    send_sqe(sqe, r, step);
}

static void queue_write(struct disk_io *io, struct disk_request *r, unsigned segments,
                        uint64_t offset, enum disk_io_step step)
{
    struct io_uring_sqe *sqe = next_sqe(io, r);
    if (sqe == NULL)
        return;
    io_uring_prep_writev(sqe, (int)disk_ring_layer_file((unsigned)io->disk->top), r->scratch,
                         segments, offset);
    send_sqe(sqe, r, step);
}

/* Appends [skip, skip+len) of `from` to r->scratch; returns the new count. */
static unsigned slice(struct disk_request *r, unsigned n, const struct iovec *from,
                      unsigned from_count, uint64_t skip, uint64_t len)
{
    for (unsigned i = 0; i < from_count && len > 0; i++) {
        if (skip >= from[i].iov_len) {
            skip -= from[i].iov_len;
            continue;
        }
        uint64_t take = min_u64(from[i].iov_len - skip, len);
        r->scratch[n++] = (struct iovec){(uint8_t *)from[i].iov_base + skip, take};
        len -= take;
        skip = 0;
    }
    return n;
}

/* ---- reads ---- */

static void advance_read(struct disk_io *io, struct disk_request *r)
{
    while (r->start + r->position < r->end) {
        struct disk_source s;
        disk_map_find(io->disk, r->start + r->position, r->end - r->start - r->position, &s);
        unsigned n = slice(r, 0, r->data, r->data_count, r->position, s.bytes);
        if (s.kind != DISK_FROM_ZERO) {
            queue_read(io, r, &s, n, DISK_STEP_READ);
            return;
        }
        for (unsigned i = 0; i < n; i++)
            memset(r->scratch[i].iov_base, 0, r->scratch[i].iov_len);
        r->position += s.bytes;
    }
    disk_io_finish(io, r, 0);
}

/* ---- blocks that are written in part ---- */

static uint32_t block_bytes(const struct disk *d, uint64_t block)
{
    return (uint32_t)min_u64(DISK_BLOCK_BYTES, disk_bytes(d) - block * DISK_BLOCK_BYTES);
}

static bool is_in_top(const struct disk *d, uint64_t block)
{
    return disk_map_count_top(d, block, 1) == 1;
}

/* Lists the first and last block of the request if they are not covered whole. */
static void find_edges(const struct disk *d, struct disk_request *r)
{
    r->edge_count = 0;
    r->edge_index = 0;
    uint64_t blocks[2] = {r->first_block, r->first_block + r->block_count - 1};
    for (unsigned i = 0; i < 2; i++) {
        if (i == 1 && blocks[1] == blocks[0])
            break;
        uint64_t at = blocks[i] * DISK_BLOCK_BYTES;
        uint32_t bytes = block_bytes(d, blocks[i]);
        uint64_t from = r->start > at ? r->start - at : 0;
        uint64_t to = min_u64(r->end - at, bytes);
        if (from == 0 && to == bytes)
            continue;
        r->edges[r->edge_count++] = (struct disk_edge){.block = blocks[i],
                                                       .from = (uint32_t)from,
                                                       .to = (uint32_t)to,
                                                       .bytes = bytes,
                                                       .fill = !is_in_top(d, blocks[i])};
    }
}

/* Reads edge `edge_index` whole into its bounce block. True: it is there already (zeros). */
static bool fill_edge(struct disk_io *io, struct disk_request *r, enum disk_io_step step)
{
    const struct disk_edge *x = &r->edges[r->edge_index];
    uint8_t *to = r->bounce[r->edge_index];
    while (r->position < x->bytes) {
        struct disk_source s;
        disk_map_find(io->disk, x->block * DISK_BLOCK_BYTES + r->position, x->bytes - r->position,
                      &s);
        if (s.kind != DISK_FROM_ZERO) {
            r->scratch[0] = (struct iovec){to + r->position, s.bytes};
            queue_read(io, r, &s, 1, step);
            return false;
        }
        memset(to + r->position, 0, s.bytes);
        r->position += s.bytes;
    }
    return true;
}

/* ---- writes ---- */

/* The bytes that go to the file: [rest of the first block] data [rest of the last block]. */
static unsigned build_write(struct disk_request *r)
{
    struct iovec head = {0}, tail = {0};
    for (unsigned i = 0; i < r->edge_count; i++) {
        const struct disk_edge *x = &r->edges[i];
        if (!x->fill)
            continue;
        if (x->from > 0)
            head = (struct iovec){r->bounce[i], x->from};
        if (x->to < x->bytes)
            tail = (struct iovec){r->bounce[i] + x->to, x->bytes - x->to};
    }
    uint64_t data = r->end - r->start;
    uint64_t skip = r->position;
    r->length = head.iov_len + data + tail.iov_len;
    r->file_start = r->start - head.iov_len;
    unsigned n = 0;
    if (skip < head.iov_len)
        n = slice(r, n, &head, 1, skip, head.iov_len);
    skip = skip > head.iov_len ? skip - head.iov_len : 0;
    if (skip < data)
        n = slice(r, n, r->data, r->data_count, skip, data - skip);
    skip = skip > data ? skip - data : 0;
    if (tail.iov_len > 0)
        n = slice(r, n, &tail, 1, skip, tail.iov_len);
    return n;
}

static void write_is_done(struct disk_io *io, struct disk_request *r)
{
    if (r->new_blocks > 0)
        disk_map_set(io->disk, r->first_block, r->block_count, DISK_MAP_LAYER(io->disk->top));
    r->reserved = false; /* the room is now the blocks' */
    disk_io_finish(io, r, 0);
}

static void advance_write(struct disk_io *io, struct disk_request *r)
{
    if (r->step == DISK_STEP_FILL) {
        while (r->edge_index < r->edge_count) {
            if (r->edges[r->edge_index].fill && !fill_edge(io, r, DISK_STEP_FILL))
                return;
            r->edge_index++;
            r->position = 0;
        }
        r->step = DISK_STEP_WRITE;
    }
    unsigned n = build_write(r);
    if (r->position == r->length)
        write_is_done(io, r);
    else
        queue_write(io, r, n, r->file_start + r->position, DISK_STEP_WRITE);
}

static void start_write(struct disk_io *io, struct disk_request *r)
{
    struct err e;
    int rc = disk_make_top(io->disk, &e);
    if (rc < 0) {
        disk_io_finish(io, r, rc);
        return;
    }
    r->new_blocks = r->block_count - disk_map_count_top(io->disk, r->first_block, r->block_count);
    if (!disk_reserve(io->disk, r->new_blocks)) {
        disk_io_finish(io, r, -ENOSPC);
        return;
    }
    r->reserved = true;
    find_edges(io->disk, r);
    r->step = DISK_STEP_FILL;
    advance_write(io, r);
}

/* ---- discard and write zeroes ---- */

static void advance_zero(struct disk_io *io, struct disk_request *r);

/* Whole blocks become holes: the map says so at once, the room in the top is given back after. */
static void zero_blocks(struct disk_io *io, struct disk_request *r)
{
    uint64_t first = r->first_block, last = r->first_block + r->block_count;
    for (unsigned i = 0; i < r->edge_count; i++) {
        if (r->edges[i].block == first)
            first++;
        else
            last--;
    }
    if (first >= last) {
        disk_io_finish(io, r, 0);
        return;
    }
    r->new_blocks = disk_map_count_top(io->disk, first, last - first);
    disk_map_set(io->disk, first, last - first, DISK_MAP_ZERO);
    if (r->new_blocks == 0) {
        disk_io_finish(io, r, 0);
        return;
    }
    struct io_uring_sqe *sqe = next_sqe(io, r);
    if (sqe == NULL)
        return;
    io_uring_prep_fallocate(sqe, (int)disk_ring_layer_file((unsigned)io->disk->top),
                            FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            (off_t)(first * DISK_BLOCK_BYTES),
                            (off_t)((last - first) * DISK_BLOCK_BYTES));
    send_sqe(sqe, r, DISK_STEP_PUNCH);
}

static void write_edge(struct disk_io *io, struct disk_request *r)
{
    const struct disk_edge *x = &r->edges[r->edge_index];
    uint8_t *block = r->bounce[r->edge_index];
    r->scratch[0] = (struct iovec){block + r->position, x->bytes - r->position};
    queue_write(io, r, 1, x->block * DISK_BLOCK_BYTES + r->position, DISK_STEP_EDGE_WRITE);
}

static void begin_edge(struct disk_io *io, struct disk_request *r)
{
    struct err e;
    int rc = disk_make_top(io->disk, &e);
    r->new_blocks = !is_in_top(io->disk, r->edges[r->edge_index].block);
    if (rc == 0 && !disk_reserve(io->disk, r->new_blocks))
        rc = -ENOSPC;
    if (rc < 0) {
        disk_io_finish(io, r, rc);
        return;
    }
    r->reserved = true;
    r->position = 0;
    r->step = DISK_STEP_EDGE_FILL;
    advance_zero(io, r);
}

static void advance_zero(struct disk_io *io, struct disk_request *r)
{
    const struct disk_edge *x = &r->edges[r->edge_index];
    if (r->step == DISK_STEP_EDGE_FILL) {
        if (!fill_edge(io, r, DISK_STEP_EDGE_FILL))
            return;
        memset(r->bounce[r->edge_index] + x->from, 0, x->to - x->from);
        r->position = 0;
        write_edge(io, r);
        return;
    }
    if (r->position < x->bytes) { /* the write was short */
        write_edge(io, r);
        return;
    }
    disk_map_set(io->disk, x->block, 1, DISK_MAP_LAYER(io->disk->top));
    r->reserved = false;
    r->edge_index++;
    if (r->edge_index < r->edge_count)
        begin_edge(io, r);
    else
        zero_blocks(io, r);
}

static void start_zero(struct disk_io *io, struct disk_request *r)
{
    if (io->disk->read_only || io->disk->frozen) {
        disk_io_finish(io, r, -EROFS);
        return;
    }
    find_edges(io->disk, r);
    /* A discard is a hint: what is left of its blocks at the ends stays. */
    if (r->op == DISK_ZERO && r->edge_count > 0)
        begin_edge(io, r);
    else
        zero_blocks(io, r);
}

/* ---- flush ---- */

static void start_flush(struct disk_io *io, struct disk_request *r)
{
    if (io->disk->top < 0) {
        disk_io_finish(io, r, 0); /* nothing was written since the last fork */
        return;
    }
    struct io_uring_sqe *sqe = next_sqe(io, r);
    if (sqe == NULL)
        return;
    io_uring_prep_fsync(sqe, (int)disk_ring_layer_file((unsigned)io->disk->top),
                        IORING_FSYNC_DATASYNC);
    send_sqe(sqe, r, DISK_STEP_FLUSH);
}

void disk_step_start(struct disk_io *io, struct disk_request *r)
{
    switch (r->op) {
    case DISK_READ:
        advance_read(io, r);
        break;
    case DISK_WRITE:
        start_write(io, r);
        break;
    case DISK_DISCARD:
    case DISK_ZERO:
        start_zero(io, r);
        break;
    case DISK_FLUSH:
        start_flush(io, r);
        break;
    }
}

void disk_step_advance(struct disk_io *io, struct disk_request *r)
{
    switch (r->step) {
    case DISK_STEP_READ:
        advance_read(io, r);
        break;
    case DISK_STEP_FILL:
    case DISK_STEP_WRITE:
        advance_write(io, r);
        break;
    case DISK_STEP_EDGE_FILL:
    case DISK_STEP_EDGE_WRITE:
        advance_zero(io, r);
        break;
    case DISK_STEP_FLUSH:
        start_flush(io, r);
        break;
    case DISK_STEP_PUNCH: /* is never done twice */
        disk_io_finish(io, r, 0);
        break;
    }
}
