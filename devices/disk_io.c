/*
 * disk_io: see disk_io.h. Loop thread only.
 *
 * This file keeps the order of requests and drives the ring; what one request does is in
 * disk_steps.c.
 */
#include "devices/disk_io.h"

#include <errno.h>
#include <unistd.h>

#include "devices/disk_steps.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"

#define RETRY_NS 1000000u
#define DRAIN_FAILURES_MAX 1000

void disk_io_init(struct disk_io *io, struct disk *disk, struct loop *loop,
                  void (*after)(void *arg), void *after_arg)
{
    *io = (struct disk_io){
        .disk = disk, .loop = loop, .after = after, .after_arg = after_arg, .source.fd = -1};
}

bool disk_io_is_idle(const struct disk_io *io)
{
    return io->first == NULL;
}

static void link_last(struct disk_io *io, struct disk_request *r)
{
    r->next = NULL;
    r->prev = io->last;
    if (io->last != NULL)
        io->last->next = r;
    else
        io->first = r;
    io->last = r;
}

static void unlink_request(struct disk_io *io, struct disk_request *r)
{
    if (r->prev != NULL)
        r->prev->next = r->next;
    else
        io->first = r->next;
    if (r->next != NULL)
        r->next->prev = r->prev;
    else
        io->last = r->prev;
}

void disk_io_finish(struct disk_io *io, struct disk_request *r, int result)
{
    if (r->reserved)
        disk_unreserve(io->disk, r->new_blocks); /* a write that failed keeps no room */
    r->reserved = false;
    unlink_request(io, r);
    r->done(r, result);
}

/* ---- order ---- */

static bool changes_map(const struct disk_io *io, const struct disk_request *r)
{
    if (r->op == DISK_DISCARD || r->op == DISK_ZERO)
        return true;
    return r->op == DISK_WRITE &&
           disk_map_count_top(io->disk, r->first_block, r->block_count) != r->block_count;
}

static bool overlap(const struct disk_request *a, const struct disk_request *b)
{
    return a->first_block < b->first_block + b->block_count &&
           b->first_block < a->first_block + a->block_count;
}

/* A request waits for every running one, and for every earlier waiting one, that it must not meet.
 */
static bool must_wait(const struct disk_io *io, const struct disk_request *r)
{
    bool earlier = true;
    for (const struct disk_request *o = io->first; o != NULL; o = o->next) {
        if (o == r)
            earlier = false;
        else if ((o->running || earlier) && (o->exclusive || r->exclusive) && overlap(o, r))
            return true;
    }
    return false;
}

static bool try_start(struct disk_io *io, struct disk_request *r)
{
    r->exclusive = changes_map(io, r); /* what ran before may have changed the answer */
    if (must_wait(io, r))
        return false;
    r->running = true;
    disk_step_start(io, r);
    return true;
}

void disk_io_submit(struct disk_io *io, struct disk_request *r)
{
    r->start = r->sector * DISK_SECTOR_BYTES;
    r->end = r->start + r->sectors * DISK_SECTOR_BYTES;
    r->first_block = r->start / DISK_BLOCK_BYTES;
    r->block_count = r->end > r->start ? (r->end - 1) / DISK_BLOCK_BYTES - r->first_block + 1 : 0;
    r->position = 0;
    r->running = false;
    r->reserved = false;
    link_last(io, r);
    if (r->op != DISK_FLUSH && r->block_count == 0)
        disk_io_finish(io, r, 0);
    else if (!try_start(io, r))
        io->waiting++;
}

/* Again from the first after each start: a request that ends at once frees others. */
static void start_waiting(struct disk_io *io)
{
    struct disk_request *r = io->first;
    while (io->waiting > 0 && r != NULL) {
        if (!r->running && try_start(io, r)) {
            io->waiting--;
            r = io->first;
        } else {
            r = r->next;
        }
    }
}

/* ---- completions ---- */

static void complete(struct disk_io *io, struct disk_request *r, int res)
{
    if (r->step == DISK_STEP_PUNCH) {
        /* A file system that cannot punch keeps the room; the zeros are in the map all the same. */
        if (res == 0)
            disk_unreserve(io->disk, r->new_blocks);
        res = 0;
    }
    if (io->aborting)
        disk_io_finish(io, r, -ECANCELED);
    else if (res == -EINTR || res == -EAGAIN)
        disk_step_advance(io, r); /* the same piece once more */
    else if (res < 0 || r->step == DISK_STEP_PUNCH || r->step == DISK_STEP_FLUSH)
        disk_io_finish(io, r, res);
    else if (res == 0)
        disk_io_finish(io, r,
                       -EIO); /* the base became shorter than it was, or nothing can be written */
    else {
        r->position += (uint64_t)res;
        disk_step_advance(io, r);
    }
}

static void reap(struct disk_io *io)
{
    struct io_uring_cqe *cqe;
    while (io->ring_made && io_uring_peek_cqe(&io->ring, &cqe) == 0) {
        struct disk_request *r = io_uring_cqe_get_data(cqe);
        int res = cqe->res;
        io_uring_cqe_seen(&io->ring, cqe);
        complete(io, r, res);
    }
    start_waiting(io);
}

static void on_retry(void *arg)
{
    struct disk_io *io = arg;
    disk_io_on_ring_event(io, 0);
}

void disk_io_kick(struct disk_io *io)
{
    /* What completes at once (page cache) is handled here, without a trip through the loop. */
    while (io->ring_made && io_uring_sq_ready(&io->ring) > 0) {
        int rc = io_uring_submit(&io->ring);
        reap(io);
        if (rc <= 0) { /* out of memory or the like: what is queued stays queued */
            loop_timer_arm(io->loop, &io->retry, RETRY_NS, on_retry, io);
            return;
        }
    }
}

void disk_io_on_ring_event(void *arg, uint32_t events)
{
    struct disk_io *io = arg;
    reap(io);
    disk_io_kick(io);
    if (io->after != NULL)
        io->after(io->after_arg);
}

/* Requests that have not begun are given back at once. */
static void cancel_waiting(struct disk_io *io)
{
    for (struct disk_request *r = io->first, *next; r != NULL; r = next) {
        next = r->next;
        if (!r->running) {
            io->waiting--;
            disk_io_finish(io, r, -ECANCELED);
        }
    }
}

int disk_io_drain(struct disk_io *io, bool abort, struct err *e)
{
    unsigned failures = 0;
    io->aborting = abort;
    if (abort)
        cancel_waiting(io);
    while (io->first != NULL) {
        int rc = io_uring_submit_and_wait(&io->ring, 1);
        if (rc < 0 && rc != -EINTR && ++failures == DRAIN_FAILURES_MAX) {
            io->aborting = false;
            return err_set(e, ERR_HOST, -rc, "wait for the requests of disk %s", io->disk->path);
        }
        reap(io);
    }
    io->aborting = false;
    return 0;
}

void disk_io_close(struct disk_io *io)
{
    loop_timer_cancel(io->loop, &io->retry);
    disk_ring_close(io);
}

void disk_io_forget(struct disk_io *io)
{
    if (io->ring_made)
        (void)close(io->ring.ring_fd); /* its mappings were left out of the fork */
    io->ring_made = false;
    io->first = io->last = NULL; /* drained, so empty already */
}
