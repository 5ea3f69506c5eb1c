/*
 * disk_io: asynchronous reads and writes of a disk through one io_uring, with copy-on-write into
 * its top overlay. blk.c is the only caller. Loop thread only.
 *
 * The ring is made at the first request that needs it, so that making or restoring a device costs
 * nothing. It is restricted (IORING_REGISTER_RESTRICTIONS) to readv, writev, fsync and fallocate on
 * registered files. The loop polls the ring's own fd. A request has at most one operation in the
 * ring at a time; one that spans layers goes piece by piece.
 *
 * Order: two requests that touch the same block, one of which changes the block map (a write to a
 * block that is not in the top yet, a discard), run one after the other, in the order they came in;
 * hence two writes of different sectors of one 4 KiB block never lose each other's bytes. All else
 * runs at the same time.
 *
 * fork(2): after disk_io_drain the parent may go on with its ring. The ring's memory is not
 * inherited (MADV_DONTFORK); the child calls disk_io_forget and starts with a new struct.
 */
#pragma once

#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "devices/disk_layers.h"
#include "vmm/core/loop.h"

struct err;

#define DISK_IO_SEGMENTS_MAX 130
#define DISK_IO_ENTRIES 256u /* also the most requests at a time */

enum disk_op { DISK_READ, DISK_WRITE, DISK_FLUSH, DISK_DISCARD, DISK_ZERO };

enum disk_io_step {
    DISK_STEP_READ,
    DISK_STEP_FILL, /* read a block that is about to be written in part */
    DISK_STEP_WRITE,
    DISK_STEP_EDGE_FILL, /* the same for the ragged ends of DISK_ZERO */
    DISK_STEP_EDGE_WRITE,
    DISK_STEP_PUNCH,
    DISK_STEP_FLUSH,
};

/* One block that a request touches in part: bytes [from, to) of it are the request's. */
struct disk_edge {
    uint64_t block;
    uint32_t from, to;
    uint32_t bytes; /* of the block: less than 4096 only at the end of the disk */
    bool fill;
};

struct disk_request {
    /* Filled by the caller; data covers exactly the range and lives until done. */
    enum disk_op op;
    uint64_t sector, sectors;
    const struct iovec *data;
    unsigned data_count;
    /* Called once, maybe from within disk_io_submit; result is 0 or -errno. */
    void (*done)(struct disk_request *r, int result);

    /* The engine's. */
    struct disk_request *next, *prev;
    bool running, exclusive, reserved;
    enum disk_io_step step;
    uint64_t start, end;               /* bytes of the disk */
    uint64_t first_block, block_count; /* all blocks it touches */
    uint64_t position;                 /* bytes done of the current step */
    uint64_t length;                   /* bytes of the current step, where it matters */
    uint64_t file_start;               /* of a write */
    uint64_t new_blocks;               /* reserved in the top, or to be given back by a punch */
    unsigned edge_index, edge_count;
    struct disk_edge edges[2];
    struct iovec
        scratch[DISK_IO_SEGMENTS_MAX + 2]; /* must live while the operation is in the ring */
    uint8_t bounce[2][DISK_BLOCK_BYTES];
};

struct disk_io {
    struct disk *disk;
    struct loop *loop;
    struct io_uring ring;
    bool ring_made;
    uint64_t ring_generation;          /* of the disk's files as they are registered */
    unsigned ring_files;               /* how many slots of the table are in use */
    unsigned waiting;                  /* requests that wait for another one */
    bool aborting;                     /* no request takes another step */
    struct disk_request *first, *last; /* all requests, in the order they came */
    struct loop_source source;
    struct loop_timer retry;
    void (*after)(void *arg); /* after completions were handled from the loop; may be NULL */
    void *after_arg;
};

void disk_io_init(struct disk_io *io, struct disk *disk, struct loop *loop,
                  void (*after)(void *arg), void *after_arg);
/* The range must be inside the disk. Queues; disk_io_kick hands to the kernel. */
void disk_io_submit(struct disk_io *io, struct disk_request *r);
void disk_io_kick(struct disk_io *io);
bool disk_io_is_idle(const struct disk_io *io);
/* Waits until no request is left: done of each has been called. abort: what can be dropped is
 * (-ECANCELED); in any case no operation is in the ring afterwards. */
int disk_io_drain(struct disk_io *io, bool abort, struct err *e);
/* Only when idle. */
void disk_io_close(struct disk_io *io);
/* In a fork child: closes the ring's fd, touches nothing else. */
void disk_io_forget(struct disk_io *io);

/* disk_ring.c: the ring itself. */
int disk_ring_prepare(struct disk_io *io, void (*on_event)(void *arg, uint32_t events),
                      struct err *e);
void disk_ring_close(struct disk_io *io);
/* Index of a file in the ring's table. */
unsigned disk_ring_base_file(void);
unsigned disk_ring_layer_file(unsigned slot);
