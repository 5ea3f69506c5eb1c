/*
 * disk: what stands behind a virtio-blk device: a read-only base file, or a base below a stack of
 * copy-on-write overlays, each an unlinked (O_TMPFILE or memfd) sparse file with a block map in
 * memory. Nothing of an overlay is left when the last process that has it ends.
 *
 * Rules: a base of any size is shown in whole 512-byte sectors, the tail is hidden with one warning;
 * an empty base is refused. A writable disk always has an overlay: the base file itself is never
 * written. Loop thread only.
 *
 * Fork: the parent calls disk_freeze before fork(2): the top overlay becomes read-only for both
 * sides; after it, each side calls disk_push to get a new top (O(1)). A frozen disk refuses writes.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;
struct state_node;
struct state_writer;

struct disk_spec {
    const char *path; /* for messages; NULL-terminated, copied */
    int fd;           /* open base, O_RDONLY|O_CLOEXEC, taken over */
    bool read_only;   /* no overlay: the guest sees VIRTIO_BLK_F_RO */
    uint64_t overlay_max_bytes; /* cap of written data; 0: DISK_OVERLAY_DEFAULT_BYTES */
};

#define DISK_OVERLAY_DEFAULT_BYTES (1ull << 30)
#define DISK_OVERLAY_DEPTH_MAX 256

struct disk;

int disk_open(struct disk **out, const struct disk_spec *spec, struct err *e);
void disk_free(struct disk *d);
uint64_t disk_sectors(const struct disk *d);
bool disk_is_read_only(const struct disk *d);

int disk_freeze(struct disk *d, struct err *e);
int disk_push(struct disk *d, struct err *e);

/*
 * A snapshot writes everything above the base (all overlays merged, block map first) into one new
 * file at `dir_fd`/`name`; a restore gives it back to a disk that was opened on the same base
 * (size and content id are compared) and pushes a new top, so the file is never written.
 */
int disk_save(struct disk *d, int dir_fd, const char *name, struct state_writer *w, struct err *e);
int disk_restore(struct disk *d, int dir_fd, const struct state_node *n, struct err *e);
