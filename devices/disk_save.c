/*
 * disk_save: a disk's overlays into a snapshot and back (disk.h; docs/image-format.md, "Disk
 * overlay"). Loop thread, while the machine is paused and the disk drained.
 *
 * The file: a header, the extents, one checksum for each MiB of data, the data. The reader trusts
 * none of it; the checksums of the data are looked at only if asked for (disk_verify).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "devices/disk_layers.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define DISK_STATE_VERSION 1u
#define OVERLAY_VERSION 1u
#define HEADER_BYTES 64u
#define EXTENT_BYTES 16u
#define EXTENT_BLOCKS_MAX UINT32_MAX
#define KIND_DATA 1u
#define KIND_ZERO 2u
#define COPY_BYTES (256u << 10)
#define NAME_BYTES_MAX 64u
#define HASH_PIECE_BYTES (1u << 20)
#define HASH_SAMPLES 64u
#define SUM_BYTES 8u
#define SUM_CHUNK_BYTES (1u << 20)
#define MAGIC "TINEOVL1"

struct overlay_header {
    uint64_t extents, data_offset, file_bytes;
    uint64_t hash; /* of extents and checksums */
};

static uint64_t chunk_count(uint64_t data_bytes)
{
    return (data_bytes + SUM_CHUNK_BYTES - 1) / SUM_CHUNK_BYTES;
}

/* ---- identity of the base ---- */

static int hash_range(const struct disk *d, XXH3_state_t *x, uint8_t *buf, uint64_t at,
                      uint64_t bytes, struct err *e)
{
    int rc = fd_pread_full(d->base_fd, buf, bytes, at, e);
    if (rc == 0)
        (void)XXH3_64bits_update(x, buf, bytes); /* fails on NULL only */
    return rc;
}

/* All of a small base; first and last MiB and samples of a large one. */
static int hash_base(struct disk *d, struct err *e)
{
    if (d->base_hashed)
        return 0;
    XXH3_state_t *x = XXH3_createState();
    uint8_t *buf = malloc(HASH_PIECE_BYTES);
    int rc = 0;
    if (x == NULL || buf == NULL) {
        rc = err_set(e, ERR_HOST, ENOMEM, "hash of the base");
        goto out;
    }
    (void)XXH3_64bits_reset(x); /* same */
    uint64_t all = d->base_bytes;
    if (all <= DISK_HASH_WHOLE_MAX_BYTES) {
        for (uint64_t at = 0; rc == 0 && at < all; at += HASH_PIECE_BYTES)
            rc = hash_range(d, x, buf, at, min_u64(HASH_PIECE_BYTES, all - at), e);
    } else {
        rc = hash_range(d, x, buf, 0, HASH_PIECE_BYTES, e);
        for (unsigned i = 1; rc == 0 && i < HASH_SAMPLES; i++)
            rc = hash_range(d, x, buf, all / HASH_SAMPLES * i, DISK_BLOCK_BYTES, e);
        if (rc == 0)
            rc = hash_range(d, x, buf, all - HASH_PIECE_BYTES, HASH_PIECE_BYTES, e);
    }
    if (rc == 0) {
        d->base_hash = XXH3_64bits_digest(x);
        d->base_hashed = true;
    }
out:
    free(buf);
    (void)XXH3_freeState(x); /* always XXH_OK */
    return rc;
}

static int check_base(struct disk *d, const struct state_node *n, struct err *e)
{
    uint64_t bytes = 0, mtime = 0, hash = 0;
    int rc = state_get_u64(n, "base-bytes", &bytes, e);
    if (rc == 0)
        rc = state_get_u64(n, "base-mtime-ns", &mtime, e);
    if (rc == 0)
        rc = state_get_u64(n, "base-hash", &hash, e);
    if (rc < 0)
        return rc;
    if (bytes != d->base_bytes)
        return err_set(e, ERR_MISMATCH, 0,
                       "base %s has %llu bytes, the snapshot was made on one of %llu bytes",
                       d->path, (unsigned long long)d->base_bytes, (unsigned long long)bytes);
    if (mtime != 0 && mtime == d->base_mtime_ns) {
        d->base_hash = hash;
        d->base_hashed = true;
        return 0;
    }
    rc = hash_base(d, e);
    if (rc < 0)
        return rc;
    bool whole = d->base_bytes <= DISK_HASH_WHOLE_MAX_BYTES || mtime == 0;
    if (whole && d->base_hash == hash)
        return 0;
    return err_set(e, ERR_MISMATCH, 0,
                   "base %s is not the one of the snapshot: found time %llu.%09u and hash %016llx, "
                   "expected time %llu.%09u and hash %016llx",
                   d->path, (unsigned long long)(d->base_mtime_ns / 1000000000u),
                   (unsigned)(d->base_mtime_ns % 1000000000u), (unsigned long long)d->base_hash,
                   (unsigned long long)(mtime / 1000000000u), (unsigned)(mtime % 1000000000u),
                   (unsigned long long)hash);
}

/* ---- writing ---- */

/* Fills `table` (NULL: only counts). Returns how many extents there are. */
static uint64_t list_extents(const struct disk *d, uint8_t *table, uint64_t *data_bytes)
{
    uint64_t n = 0, bytes = 0;
    struct disk_extent x;
    for (uint64_t at = 0; disk_map_next(d, &at, &x);) {
        while (x.count > 0) {
            uint64_t count = min_u64(x.count, EXTENT_BLOCKS_MAX);
            if (table != NULL) {
                le64_put(table + n * EXTENT_BYTES, x.first);
                le32_put(table + n * EXTENT_BYTES + 8, (uint32_t)count);
                le32_put(table + n * EXTENT_BYTES + 12, x.zero ? KIND_ZERO : KIND_DATA);
            }
            n++;
            bytes += x.zero ? 0 : count * DISK_BLOCK_BYTES;
            x.first += count;
            x.count -= count;
        }
    }
    *data_bytes = bytes;
    return n;
}

static int write_data(const struct disk *d, int fd, uint64_t to, struct err *e)
{
    uint8_t *buf = malloc(COPY_BYTES);
    if (buf == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "copy buffer");
    int rc = 0;
    struct disk_extent x;
    for (uint64_t at = 0; rc == 0 && disk_map_next(d, &at, &x);) {
        uint64_t pos = x.first * DISK_BLOCK_BYTES;
        uint64_t end = x.zero ? pos : pos + x.count * DISK_BLOCK_BYTES;
        uint64_t readable = min_u64(end, disk_bytes(d));
        while (rc == 0 && pos < readable) {
            struct disk_source s;
            disk_map_find(d, pos, min_u64(readable - pos, COPY_BYTES), &s);
            rc = fd_pread_full(s.fd, buf, s.bytes, s.offset, e);
            if (rc == 0)
                rc = fd_pwrite_full(fd, buf, s.bytes, to, e);
            to += s.bytes;
            pos += s.bytes;
        }
        if (pos < end)
            to += end - pos; /* the last block of the disk may be a short one: room is whole */
    }
    free(buf);
    return rc;
}

/* Checksum of each chunk of the data, from the file as it is now. */
static int sum_data(int fd, uint64_t data_offset, uint64_t data_bytes, uint8_t *sums, struct err *e)
{
    uint8_t *buf = malloc(SUM_CHUNK_BYTES);
    if (buf == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "checksum buffer");
    int rc = 0;
    for (uint64_t at = 0, i = 0; rc == 0 && at < data_bytes; at += SUM_CHUNK_BYTES, i++) {
        size_t n = (size_t)min_u64(SUM_CHUNK_BYTES, data_bytes - at);
        rc = fd_pread_full(fd, buf, n, data_offset + at, e);
        if (rc == 0)
            le64_put(sums + i * SUM_BYTES, XXH3_64bits(buf, n));
    }
    free(buf);
    return rc;
}

static int write_overlay(const struct disk *d, int fd, uint64_t extents, uint64_t data_bytes,
                         struct overlay_header *out, struct err *e)
{
    size_t table_bytes = extents * EXTENT_BYTES;
    size_t head_bytes = HEADER_BYTES + table_bytes + chunk_count(data_bytes) * SUM_BYTES;
    uint8_t *head = calloc(1, head_bytes);
    if (head == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "extents of the overlay");
    uint64_t ignored;
    (void)list_extents(d, head + HEADER_BYTES, &ignored);
    struct overlay_header h = {.extents = extents};
    h.data_offset = align_up_u64(head_bytes, DISK_BLOCK_BYTES);
    h.file_bytes = h.data_offset + data_bytes;
    int rc = 0;
    if (ftruncate(fd, (off_t)h.file_bytes) < 0)
        rc = err_sys(e, "set the size of the overlay");
    if (rc == 0)
        rc = write_data(d, fd, h.data_offset, e);
    if (rc == 0)
        rc = sum_data(fd, h.data_offset, data_bytes, head + HEADER_BYTES + table_bytes, e);
    if (rc == 0) {
        h.hash = XXH3_64bits(head + HEADER_BYTES, head_bytes - HEADER_BYTES);
        memcpy(head, MAGIC, 8);
        le32_put(head + 8, OVERLAY_VERSION);
        le32_put(head + 12, DISK_BLOCK_BYTES);
        le64_put(head + 16, d->sectors);
        le64_put(head + 24, h.extents);
        le64_put(head + 32, h.data_offset);
        le64_put(head + 40, h.file_bytes);
        le64_put(head + 48, h.hash);
        rc = fd_pwrite_full(fd, head, head_bytes, 0, e);
    }
    free(head);
    if (rc == 0 && fsync(fd) < 0)
        rc = err_sys(e, "sync");
    if (rc == 0)
        *out = h;
    return rc;
}

int disk_save(struct disk *d, int dir_fd, const char *name, struct state_writer *w, struct err *e)
{
    struct overlay_header h = {0};
    uint64_t data_bytes;
    int rc = hash_base(d, e);
    if (rc < 0)
        return rc;
    uint64_t extents = list_extents(d, NULL, &data_bytes);
    if (extents > 0) {
        CLEANUP_FD int fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0)
            return err_sys(e, "create %s", name);
        rc = write_overlay(d, fd, extents, data_bytes, &h, e);
        if (rc < 0) {
            (void)unlinkat(dir_fd, name, 0); /* best effort: the first error is the one to tell */
            return err_wrap(e, rc, "write %s", name);
        }
    }
    state_put_u32(w, "version", DISK_STATE_VERSION);
    state_put_u32(w, "read-only", d->read_only);
    state_put_u64(w, "base-bytes", d->base_bytes);
    state_put_u64(w, "base-mtime-ns", d->base_mtime_ns);
    state_put_u64(w, "base-hash", d->base_hash);
    state_put_string(w, "overlay-name", extents > 0 ? name : "");
    state_put_u64(w, "overlay-bytes", h.file_bytes);
    state_put_u64(w, "overlay-hash", h.hash);
    return 0;
}

/* ---- reading ---- */

static int damaged(struct err *e, const char *what)
{
    return err_set(e, ERR_BAD_IMAGE, 0, "%s", what);
}

/* Valid once extents and data_offset are known to be within the file. */
static uint64_t head_bytes(const struct overlay_header *h)
{
    return HEADER_BYTES + h->extents * EXTENT_BYTES +
           chunk_count(h->file_bytes - h->data_offset) * SUM_BYTES;
}

static int read_header(const struct disk *d, int fd, const struct state_node *n,
                       struct overlay_header *out, struct err *e)
{
    struct stat st;
    uint8_t b[HEADER_BYTES];
    uint64_t bytes = 0, hash = 0;
    int rc = state_get_u64(n, "overlay-bytes", &bytes, e);
    if (rc == 0)
        rc = state_get_u64(n, "overlay-hash", &hash, e);
    if (rc < 0)
        return rc;
    if (fstat(fd, &st) < 0)
        return err_sys(e, "stat");
    if (!S_ISREG(st.st_mode))
        return damaged(e, "not a regular file");
    if ((uint64_t)st.st_size != bytes || bytes < HEADER_BYTES)
        return err_set(e, ERR_BAD_IMAGE, 0, "%llu bytes, expected %llu",
                       (unsigned long long)st.st_size, (unsigned long long)bytes);
    rc = fd_pread_full(fd, b, sizeof b, 0, e);
    if (rc < 0)
        return rc;
    if (memcmp(b, MAGIC, 8) != 0)
        return damaged(e, "not a disk overlay (magic)");
    if (le32_get(b + 8) != OVERLAY_VERSION || le32_get(b + 12) != DISK_BLOCK_BYTES)
        return err_set(e, ERR_MISMATCH, 0,
                       "overlay version %u with blocks of %u bytes, this build "
                       "reads version %u with %u",
                       le32_get(b + 8), le32_get(b + 12), OVERLAY_VERSION, DISK_BLOCK_BYTES);
    struct overlay_header h = {.extents = le64_get(b + 24),
                               .data_offset = le64_get(b + 32),
                               .file_bytes = le64_get(b + 40),
                               .hash = le64_get(b + 48)};
    if (le64_get(b + 16) != d->sectors || h.file_bytes != bytes || h.hash != hash)
        return damaged(e, "sectors, size or hash differ from the saved state");
    /* Every extent has at least one block, so this bounds what is allocated for them. */
    if (h.extents == 0 || h.extents > d->blocks ||
        h.extents > (h.file_bytes - HEADER_BYTES) / EXTENT_BYTES)
        return damaged(e, "more extents than there can be");
    if (h.data_offset > h.file_bytes ||
        h.data_offset != align_up_u64(head_bytes(&h), DISK_BLOCK_BYTES))
        return damaged(e, "data does not follow the extents and checksums");
    if (le64_get(b + 56) != 0)
        return damaged(e, "the header's last word is not zero");
    *out = h;
    return 0;
}

/* Checks each extent against the one before, the disk and the file; fills `all`, zeros included. */
static int parse_extents(const struct disk *d, const struct overlay_header *h, const uint8_t *table,
                         struct disk_extent *all, struct err *e)
{
    uint64_t next = 0, offset = h->data_offset;
    for (uint64_t i = 0; i < h->extents; i++) {
        const uint8_t *b = table + i * EXTENT_BYTES;
        struct disk_extent x = {.first = le64_get(b), .count = le32_get(b + 8)};
        uint32_t kind = le32_get(b + 12);
        if (kind != KIND_DATA && kind != KIND_ZERO)
            return err_set(e, ERR_BAD_IMAGE, 0, "extent %llu is of unknown kind %u",
                           (unsigned long long)i, kind);
        if (x.first < next || x.count == 0 || x.first >= d->blocks || x.count > d->blocks - x.first)
            return err_set(e, ERR_BAD_IMAGE, 0,
                           "extent %llu (block %llu, %llu blocks) is out of "
                           "order or past the disk's %llu blocks",
                           (unsigned long long)i, (unsigned long long)x.first,
                           (unsigned long long)x.count, (unsigned long long)d->blocks);
        next = x.first + x.count;
        x.zero = kind == KIND_ZERO;
        x.file_offset = x.zero ? 0 : offset;
        offset += x.zero ? 0 : x.count * DISK_BLOCK_BYTES;
        all[i] = x;
    }
    /* blocks <= 2^34, so the sum cannot have wrapped. */
    return offset == h->file_bytes ? 0 : damaged(e, "the extents do not add up to the file's size");
}

/* The file becomes a packed layer; zero extents live in the map alone. */
static int add_layer(struct disk *d, int *fd, struct disk_extent *all, uint64_t n, struct err *e)
{
    size_t data = 0;
    uint64_t blocks = 0;
    for (uint64_t i = 0; i < n; i++)
        blocks += all[i].zero ? 0 : all[i].count;
    if (blocks > d->max_blocks)
        return err_set(e, ERR_LIMIT, 0, "the overlay holds %llu bytes, the cap is %llu",
                       (unsigned long long)blocks * DISK_BLOCK_BYTES,
                       (unsigned long long)d->max_blocks * DISK_BLOCK_BYTES);
    unsigned slot = (unsigned)disk_free_slot(d); /* the disk is fresh: all are free */
    for (uint64_t i = 0; i < n; i++) {
        if (all[i].zero)
            disk_map_set(d, all[i].first, all[i].count, DISK_MAP_ZERO);
    }
    d->layers[slot].fd = take_fd(fd);
    d->layers[slot].stored = blocks;
    d->stored_blocks += blocks;
    for (uint64_t i = 0; i < n; i++) {
        if (all[i].zero)
            continue;
        disk_map_set(d, all[i].first, all[i].count, DISK_MAP_LAYER(slot));
        all[data++] = all[i];
    }
    d->layers[slot].extents = all;
    d->layers[slot].extent_count = data;
    d->generation++;
    return 0;
}

static int restore_overlay(struct disk *d, int *fd, const struct state_node *n, struct err *e)
{
    struct overlay_header h = {0};
    int rc = read_header(d, *fd, n, &h, e);
    if (rc < 0)
        return rc;
    size_t table_bytes = head_bytes(&h) - HEADER_BYTES;
    uint8_t *table = malloc(table_bytes);
    struct disk_extent *all = calloc(h.extents, sizeof *all);
    rc = table != NULL && all != NULL ? 0 : err_set(e, ERR_HOST, ENOMEM, "extents");
    if (rc == 0)
        rc = fd_pread_full(*fd, table, table_bytes, HEADER_BYTES, e);
    if (rc == 0 && XXH3_64bits(table, table_bytes) != h.hash)
        rc = damaged(e, "extents and checksums do not match their hash");
    if (rc == 0)
        rc = parse_extents(d, &h, table, all, e);
    if (rc == 0)
        rc = add_layer(d, fd, all, h.extents, e);
    if (rc < 0)
        free(all);
    free(table);
    return rc;
}

/* The layer that came from a file: until the first push after a restore there is one at most. */
static const struct disk_layer *packed_layer(const struct disk *d)
{
    for (unsigned i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++) {
        if (d->layers[i].fd >= 0 && d->layers[i].extents != NULL)
            return &d->layers[i];
    }
    return NULL;
}

int disk_verify(struct disk *d, struct err *e)
{
    uint8_t b[HEADER_BYTES];
    const struct disk_layer *l = packed_layer(d);
    if (l == NULL)
        return 0;
    int rc = fd_pread_full(l->fd, b, sizeof b, 0, e);
    if (rc < 0)
        return rc;
    /* Checked by disk_restore; checked again for what would be allocated if the file changed. */
    struct overlay_header h = {.extents = le64_get(b + 24),
                               .data_offset = le64_get(b + 32),
                               .file_bytes = le64_get(b + 40)};
    if (h.file_bytes < h.data_offset ||
        h.file_bytes - h.data_offset != l->stored * DISK_BLOCK_BYTES)
        return damaged(e, "the overlay changed while it was read");
    uint64_t data_bytes = h.file_bytes - h.data_offset, n = chunk_count(data_bytes);
    uint8_t *saved = malloc(2 * n * SUM_BYTES + 1);
    if (saved == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "checksums");
    uint8_t *found = saved + n * SUM_BYTES;
    rc = fd_pread_full(l->fd, saved, n * SUM_BYTES, HEADER_BYTES + h.extents * EXTENT_BYTES, e);
    if (rc == 0)
        rc = sum_data(l->fd, h.data_offset, data_bytes, found, e);
    for (uint64_t i = 0; rc == 0 && i < n; i++) {
        uint64_t is = le64_get(found + i * SUM_BYTES), was = le64_get(saved + i * SUM_BYTES);
        if (is != was)
            rc = err_set(e, ERR_BAD_IMAGE, 0,
                         "overlay chunk %llu has checksum %016llx, expected %016llx",
                         (unsigned long long)i, (unsigned long long)is, (unsigned long long)was);
    }
    free(saved);
    return rc;
}

static bool is_plain_name(const char *name)
{
    size_t len = strlen(name);
    return len <= NAME_BYTES_MAX && strchr(name, '/') == NULL && strcmp(name, ".") != 0 &&
           strcmp(name, "..") != 0;
}

int disk_restore(struct disk *d, int dir_fd, const struct state_node *n, struct err *e)
{
    const char *name = NULL;
    uint32_t read_only = 0;
    int rc = state_check_version(n, DISK_STATE_VERSION, e);
    if (rc == 0)
        rc = state_get_u32(n, "read-only", &read_only, e);
    if (rc == 0)
        rc = state_get_string(n, "overlay-name", &name, e);
    if (rc == 0 && (read_only != 0) != d->read_only)
        rc = err_set(e, ERR_MISMATCH, 0, "the snapshot's disk is %s, this one is %s",
                     read_only != 0 ? "read-only" : "writable",
                     d->read_only ? "read-only" : "writable");
    if (rc == 0)
        rc = check_base(d, n, e);
    if (rc < 0)
        return rc;
    if (name[0] == '\0')
        return 0;
    if (!is_plain_name(name) || d->read_only)
        return err_set(e, ERR_BAD_IMAGE, 0, "an overlay called \"%.64s\" is not possible", name);
    CLEANUP_FD int fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return err_sys(e, "open %s", name);
    rc = restore_overlay(d, &fd, n, e);
    return rc < 0 ? err_wrap(e, rc, "%s", name) : 0;
}
