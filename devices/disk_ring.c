/*
 * disk_ring: makes, restricts and closes the io_uring of a disk_io (disk_io.h). Loop thread only.
 */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "devices/disk_io.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"

#define FILES_MAX (1 + DISK_OVERLAY_DEPTH_MAX)

unsigned disk_ring_base_file(void)
{
    return 0;
}

unsigned disk_ring_layer_file(unsigned slot)
{
    return 1 + slot;
}

/* Slot of each file in the table; -1 for an empty one. Returns how many slots are in use. */
static unsigned list_files(const struct disk *d, int files[FILES_MAX])
{
    unsigned used = 1;
    files[0] = d->base_fd;
    for (unsigned i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++) {
        files[1 + i] = d->layers[i].fd;
        if (d->layers[i].fd >= 0)
            used = 2 + i;
    }
    return used;
}

/*
 * From here on the ring does what virtio-blk needs and nothing else. Must come after the files are
 * registered and before the ring is enabled: restrictions can be set once, on a disabled ring.
 */
static int restrict_ring(struct io_uring *ring)
{
    static const uint8_t opcodes[] = {IORING_OP_READV, IORING_OP_WRITEV, IORING_OP_FSYNC,
                                      IORING_OP_FALLOCATE};
    struct io_uring_restriction rules[ARRAY_SIZE(opcodes) + 2];
    memset(rules, 0, sizeof rules);
    unsigned n = 0;
    for (; n < ARRAY_SIZE(opcodes); n++) {
        rules[n].opcode = IORING_RESTRICTION_SQE_OP;
        rules[n].sqe_op = opcodes[n];
    }
    rules[n].opcode = IORING_RESTRICTION_SQE_FLAGS_REQUIRED;
    rules[n++].sqe_flags = IOSQE_FIXED_FILE;
    rules[n].opcode = IORING_RESTRICTION_REGISTER_OP; /* new overlays after a fork */
    rules[n++].register_op = IORING_REGISTER_FILES_UPDATE;
    return io_uring_register_restrictions(ring, rules, n);
}

static int make(struct disk_io *io, void (*on_event)(void *arg, uint32_t events), struct err *e)
{
    int files[FILES_MAX];
    int rc = io_uring_queue_init(DISK_IO_ENTRIES, &io->ring, IORING_SETUP_R_DISABLED);
    if (rc < 0)
        return err_set(e, ERR_HOST, -rc, "io_uring_setup for disk %s", io->disk->path);
    unsigned used = list_files(io->disk, files);
    /* A fork child must not share the ring: it gets no mapping of it at all. */
    rc = io_uring_ring_dontfork(&io->ring);
    if (rc == 0)
        rc = io_uring_register_files(&io->ring, files, FILES_MAX);
    if (rc == 0)
        rc = restrict_ring(&io->ring);
    if (rc == 0)
        rc = io_uring_enable_rings(&io->ring);
    if (rc < 0) {
        io_uring_queue_exit(&io->ring);
        return err_set(e, ERR_HOST, -rc, "set up the io_uring of disk %s", io->disk->path);
    }
    rc = loop_add(io->loop, &io->source, io->ring.ring_fd, EPOLLIN, on_event, io, e);
    if (rc < 0) {
        io_uring_queue_exit(&io->ring);
        return rc;
    }
    io->ring_made = true;
    io->ring_files = used;
    io->ring_generation = io->disk->generation;
    return 0;
}

/* Files came or went since the table was registered. No operation on a gone file is in flight:
 * layers go only while the disk is drained. */
static int update_files(struct disk_io *io, struct err *e)
{
    int files[FILES_MAX];
    unsigned used = list_files(io->disk, files);
    unsigned n = used > io->ring_files ? used : io->ring_files;
    int rc = io_uring_register_files_update(&io->ring, 0, files, n);
    if (rc < 0)
        return err_set(e, ERR_HOST, -rc, "register the files of disk %s", io->disk->path);
    io->ring_files = used;
    io->ring_generation = io->disk->generation;
    return 0;
}

int disk_ring_prepare(struct disk_io *io, void (*on_event)(void *arg, uint32_t events),
                      struct err *e)
{
    if (!io->ring_made)
        return make(io, on_event, e);
    if (io->ring_generation != io->disk->generation)
        return update_files(io, e);
    return 0;
}

void disk_ring_close(struct disk_io *io)
{
    if (!io->ring_made)
        return;
    loop_remove(io->loop, &io->source);
    io_uring_queue_exit(&io->ring);
    io->ring_made = false;
}
