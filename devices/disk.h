/*
 * disk: what stands behind a virtio-blk device: a read-only base file, or a base below a stack of
 * copy-on-write overlays, each an unlinked (O_TMPFILE or memfd) sparse file with a block map in
 * memory. Nothing of an overlay is left when the last process that has it ends.
 *
 * Rules: a base of any size is shown in whole 512-byte sectors, the tail is hidden (the machine
 * warns once, see disk_hidden_bytes); a base without one whole sector is refused. A writable disk
 * always has an overlay: the base file itself is never written, so any number of machines may share
 * it. Loop thread only.
 *
 * Fork: the parent calls disk_freeze before fork(2): the top overlay becomes read-only for both
 * sides; after it, each side calls disk_push and so gets a new top of its own. Both are O(1): the
 * new file is made at its first write, a top that holds nothing is dropped, and so are overlays
 * whose every block was written again since. A frozen disk refuses writes.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;
struct state_node;
struct state_writer;

struct disk_spec {
    const char *path;           /* for messages; NUL-terminated, copied */
    int fd;                     /* open base, O_RDONLY|O_CLOEXEC, taken over (also on failure) */
    bool read_only;             /* no overlay: the guest sees VIRTIO_BLK_F_RO */
    uint64_t overlay_max_bytes; /* cap of written data; 0: DISK_OVERLAY_DEFAULT_BYTES */
    /* Directory for O_TMPFILE overlays, opened here. NULL: memfd, which counts as memory. */
    const char *overlay_dir;
};

#define DISK_OVERLAY_DEFAULT_BYTES (1ull << 30)
#define DISK_OVERLAY_DEPTH_MAX 256

struct disk;

int disk_open(struct disk **out, const struct disk_spec *spec, struct err *e);
void disk_free(struct disk *d);
uint64_t disk_sectors(const struct disk *d);
bool disk_is_read_only(const struct disk *d);
/* Bytes after the last whole sector that the guest does not see: 0..511. */
unsigned disk_hidden_bytes(const struct disk *d);
/* Bytes that the overlays of this machine hold, shared ones included; at most the cap. */
uint64_t disk_overlay_bytes(const struct disk *d);
const char *disk_path(const struct disk *d);

int disk_freeze(struct disk *d, struct err *e);
/* With all DISK_OVERLAY_DEPTH_MAX overlays in use, the smallest is copied into the new top first.
 */
int disk_push(struct disk *d, struct err *e);

/*
 * A snapshot writes everything above the base (all overlays merged) into one new file at
 * `dir_fd`/`name` (docs/image-format.md, "Disk overlay"), synced, or no file if there is nothing;
 * properties go into the writer's current node. A restore takes that node and gives the data back
 * to a disk that was opened on the same base and not written yet: the file becomes a read-only
 * layer below a new top, so it is never written.
 *
 * Same base means: equal size, and equal modification time; or, where only the time differs, an
 * equal hash if the hash covers the whole base (DISK_HASH_WHOLE_MAX_BYTES). ERR_MISMATCH otherwise.
 * The caller wraps errors with the disk's path.
 */
#define DISK_HASH_WHOLE_MAX_BYTES (8ull << 20)
int disk_save(struct disk *d, int dir_fd, const char *name, struct state_writer *w, struct err *e);
int disk_restore(struct disk *d, int dir_fd, const struct state_node *n, struct err *e);
/* After a restore, before anything else: checks the data of the restored file as well; reads it
 * all. */
int disk_verify(struct disk *d, struct err *e);
