/*
 * disk: see disk.h. The map is in disk_map.c, asynchronous I/O in disk_io.c, snapshots in
 * disk_save.c. Loop thread only.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "devices/disk_layers.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

#define COPY_BYTES (64u << 10)

/* Size and time of the base; files and block devices only. */
static int look_at_base(struct disk *d, struct err *e)
{
    struct stat st;
    if (fstat(d->base_fd, &st) < 0)
        return err_sys(e, "disk %s", d->path);
    if (S_ISREG(st.st_mode)) {
        d->base_bytes = (uint64_t)st.st_size;
        d->base_mtime_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec;
    } else if (S_ISBLK(st.st_mode)) {
        off_t end = lseek(d->base_fd, 0, SEEK_END);
        if (end < 0)
            return err_sys(e, "disk %s", d->path);
        d->base_bytes = (uint64_t)end;
    } else {
        return err_set(e, ERR_USAGE, 0, "disk %s is neither a file nor a block device", d->path);
    }
    if (d->base_bytes < DISK_SECTOR_BYTES)
        return err_set(e, ERR_USAGE, 0, "disk %s has %llu bytes, not one whole sector of %u",
                       d->path, (unsigned long long)d->base_bytes, DISK_SECTOR_BYTES);
    if (d->base_bytes > DISK_BYTES_MAX)
        return err_set(e, ERR_LIMIT, 0, "disk %s has %llu bytes, expected at most %llu", d->path,
                       (unsigned long long)d->base_bytes, (unsigned long long)DISK_BYTES_MAX);
    d->sectors = d->base_bytes / DISK_SECTOR_BYTES;
    d->blocks = (d->sectors + DISK_BLOCK_SECTORS - 1) / DISK_BLOCK_SECTORS;
    return 0;
}

static int open_overlay(struct disk *d, const struct disk_spec *spec, struct err *e)
{
    uint64_t cap =
        spec->overlay_max_bytes != 0 ? spec->overlay_max_bytes : DISK_OVERLAY_DEFAULT_BYTES;
    d->max_blocks = cap / DISK_BLOCK_BYTES;
    if (spec->overlay_dir != NULL) {
        d->overlay_dir_fd = open(spec->overlay_dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (d->overlay_dir_fd < 0)
            return err_sys(e, "overlay directory %s", spec->overlay_dir);
    }
    return disk_map_create(d, e);
}

int disk_open(struct disk **out, const struct disk_spec *spec, struct err *e)
{
    int fd = spec->fd;
    struct disk *d = calloc(1, sizeof *d);
    if (d == NULL) {
        fd_close(&fd);
        return err_set(e, ERR_HOST, ENOMEM, "disk %s", spec->path);
    }
    d->base_fd = fd;
    d->overlay_dir_fd = -1;
    d->top = -1;
    d->read_only = spec->read_only;
    for (unsigned i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++)
        d->layers[i].fd = -1;
    d->path = strdup(spec->path);
    int rc = d->path != NULL ? 0 : err_set(e, ERR_HOST, ENOMEM, "disk %s", spec->path);
    if (rc == 0)
        rc = look_at_base(d, e);
    if (rc == 0 && !d->read_only)
        rc = open_overlay(d, spec, e);
    if (rc < 0) {
        disk_free(d);
        return rc;
    }
    *out = d;
    return 0;
}

void disk_free(struct disk *d)
{
    if (d == NULL)
        return;
    for (unsigned i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++)
        disk_layer_close(d, i);
    disk_map_free(d);
    fd_close(&d->base_fd);
    fd_close(&d->overlay_dir_fd);
    free(d->path);
    free(d);
}

uint64_t disk_bytes(const struct disk *d)
{
    return d->sectors * DISK_SECTOR_BYTES;
}

uint64_t disk_sectors(const struct disk *d)
{
    return d->sectors;
}

bool disk_is_read_only(const struct disk *d)
{
    return d->read_only;
}

unsigned disk_hidden_bytes(const struct disk *d)
{
    return (unsigned)(d->base_bytes % DISK_SECTOR_BYTES);
}

uint64_t disk_overlay_bytes(const struct disk *d)
{
    return d->stored_blocks * DISK_BLOCK_BYTES;
}

const char *disk_path(const struct disk *d)
{
    return d->path;
}

int disk_free_slot(const struct disk *d)
{
    for (int i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++) {
        if (d->layers[i].fd < 0)
            return i;
    }
    return -1;
}

void disk_layer_close(struct disk *d, unsigned slot)
{
    struct disk_layer *l = &d->layers[slot];
    if (l->fd < 0)
        return;
    d->stored_blocks -= l->stored;
    fd_close(&l->fd);
    free(l->extents);
    *l = (struct disk_layer){.fd = -1};
    d->generation++;
}

int disk_make_top(struct disk *d, struct err *e)
{
    if (d->top >= 0)
        return 0;
    if (d->read_only || d->frozen)
        return err_set(e, ERR_STATE, EROFS, "disk %s", d->path);
    int slot = disk_free_slot(d);
    if (slot < 0)
        return err_set(e, ERR_LIMIT, 0, "disk %s has all %d overlays in use", d->path,
                       DISK_OVERLAY_DEPTH_MAX);
    int fd = d->overlay_dir_fd >= 0
                 ? openat(d->overlay_dir_fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)
                 : memfd_create("tine-overlay", MFD_CLOEXEC);
    if (fd < 0)
        return err_sys(e, "overlay of disk %s", d->path);
    d->layers[slot] = (struct disk_layer){.fd = fd};
    d->top = slot;
    d->generation++;
    return 0;
}

bool disk_reserve(struct disk *d, uint64_t blocks)
{
    if (blocks > d->max_blocks || d->stored_blocks > d->max_blocks - blocks)
        return false;
    d->stored_blocks += blocks;
    d->layers[d->top].stored += blocks;
    return true;
}

void disk_unreserve(struct disk *d, uint64_t blocks)
{
    d->stored_blocks -= blocks;
    d->layers[d->top].stored -= blocks;
}

int disk_freeze(struct disk *d, struct err *e)
{
    if (d->frozen)
        return err_set(e, ERR_STATE, 0, "disk %s is frozen already", d->path);
    d->top = -1;
    d->frozen = true;
    return 0;
}

/* Copies every block that `slot` still serves into the top, and closes it. */
static int move_into_top(struct disk *d, unsigned slot, struct err *e)
{
    uint8_t *buf = malloc(COPY_BYTES);
    if (buf == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "merge overlays of disk %s", d->path);
    int rc = 0;
    struct disk_extent x;
    for (uint64_t at = 0; rc == 0 && disk_map_next(d, &at, &x);) {
        uint64_t pos = x.first * DISK_BLOCK_BYTES;
        uint64_t end = min_u64((x.first + x.count) * DISK_BLOCK_BYTES, disk_bytes(d));
        while (rc == 0 && pos < end) {
            struct disk_source s;
            disk_map_find(d, pos, min_u64(end - pos, COPY_BYTES), &s);
            if (s.kind == DISK_FROM_LAYER && s.slot == slot) {
                rc = fd_pread_full(s.fd, buf, s.bytes, s.offset, e);
                if (rc == 0)
                    rc = fd_pwrite_full(d->layers[d->top].fd, buf, s.bytes, pos, e);
                if (rc == 0) {
                    uint64_t n = (s.bytes + DISK_BLOCK_BYTES - 1) / DISK_BLOCK_BYTES;
                    d->layers[d->top].stored += n;
                    d->stored_blocks += n;
                    disk_map_set(d, pos / DISK_BLOCK_BYTES, n, DISK_MAP_LAYER(d->top));
                }
            }
            pos += s.bytes;
        }
    }
    free(buf);
    if (rc < 0)
        return err_wrap(e, rc, "merge overlays of disk %s", d->path);
    disk_layer_close(d, slot);
    return 0;
}

int disk_push(struct disk *d, struct err *e)
{
    unsigned unused = 0;
    int smallest = -1;
    for (int i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++) {
        const struct disk_layer *l = &d->layers[i];
        if (l->fd >= 0 && l->live == 0 && i != d->top)
            disk_layer_close(d, (unsigned)i);
        if (l->fd < 0)
            unused++;
        else if (i != d->top && (smallest < 0 || l->live < d->layers[smallest].live))
            smallest = i;
    }
    d->frozen = false;
    if (unused > 1 || smallest < 0)
        return 0; /* the top is made at the first write */
    /* The last slot is about to be taken: use it now, and win one back. The loop thread pays for a
     * copy of the smallest overlay here, at each push from the 256th overlay on. */
    int rc = disk_make_top(d, e);
    return rc < 0 ? rc : move_into_top(d, (unsigned)smallest, e);
}
