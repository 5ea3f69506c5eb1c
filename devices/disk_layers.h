/*
 * disk_layers: the inside of a disk, for disk*.c and its tests alone.
 *
 * The guest's disk is cut into blocks of 4 KiB. `map` says for each where its bytes are: in the
 * base, in a layer, or nowhere (zeros). A block keeps its place: it lies in every overlay at the
 * same offset as on the disk, so what is contiguous for the guest is contiguous in the file; a
 * layer that was read from a snapshot is packed, its extents tell the place.
 *
 * Invariants: map[b] names a layer only if that layer holds the whole block (up to the end of the
 * disk). layers[i].live is the number of blocks that name it. Only `top` is ever written.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "devices/disk.h"

#define DISK_SECTOR_BYTES 512u
#define DISK_BLOCK_BYTES 4096u
#define DISK_BLOCK_SECTORS (DISK_BLOCK_BYTES / DISK_SECTOR_BYTES)
/* The map is touched in chunks, so that walking a large disk with a small overlay is quick. */
#define DISK_MAP_CHUNK_BLOCKS 4096u
#define DISK_BYTES_MAX (64ull << 40)

#define DISK_MAP_BASE 0u
#define DISK_MAP_ZERO 0xffffu
#define DISK_MAP_LAYER(slot) ((uint16_t)((slot) + 1))

struct disk_extent {
    uint64_t first;       /* block of the disk */
    uint64_t count;       /* blocks */
    uint64_t file_offset; /* of the first block, in a packed layer */
    bool zero;
};

struct disk_layer {
    int fd;                      /* -1: free slot */
    uint64_t live;               /* blocks of the map that point here */
    uint64_t stored;             /* blocks that take room in the file */
    struct disk_extent *extents; /* owned; sorted, data only; NULL: not packed */
    size_t extent_count;
};

struct disk {
    char *path;
    int base_fd;
    int overlay_dir_fd;
    uint64_t base_bytes;
    uint64_t base_mtime_ns; /* when it was opened; 0: a device, has no such time */
    uint64_t base_hash;     /* valid if base_hashed */
    bool base_hashed;
    uint64_t sectors;
    uint64_t blocks;
    bool read_only;
    bool frozen;
    uint64_t max_blocks;    /* cap of stored_blocks */
    uint64_t stored_blocks; /* sum over all layers */
    uint16_t *map;          /* `blocks` entries, sparse; NULL if read-only */
    uint8_t *chunk_used;    /* per chunk of the map: something else than the base */
    int top;                /* slot, -1: none yet */
    uint64_t generation;    /* moves with every change of the set of files */
    struct disk_layer layers[DISK_OVERLAY_DEPTH_MAX];
};

enum disk_source_kind { DISK_FROM_BASE, DISK_FROM_LAYER, DISK_FROM_ZERO };

/* Where `bytes` bytes from some position of the disk come from, in one piece. */
struct disk_source {
    enum disk_source_kind kind;
    unsigned slot; /* of a layer */
    int fd;        /* -1 for zeros */
    uint64_t offset;
    uint64_t bytes;
};

uint64_t disk_bytes(const struct disk *d);

/* disk_map.c */
int disk_map_create(struct disk *d, struct err *e);
void disk_map_free(struct disk *d);
/* The longest single piece at `at`, at most `max` bytes (> 0); [at, at+max) is inside the disk. */
void disk_map_find(const struct disk *d, uint64_t at, uint64_t max, struct disk_source *out);
/* Points blocks [first, first+count) at `entry` and keeps the layers' live counts. */
void disk_map_set(struct disk *d, uint64_t first, uint64_t count, uint16_t entry);
/* Blocks of the range that are in the top. */
uint64_t disk_map_count_top(const struct disk *d, uint64_t first, uint64_t count);
/* Next run of blocks at or after *at that are not the base's, all data or all zeros; false: none.
 */
bool disk_map_next(const struct disk *d, uint64_t *at, struct disk_extent *out);

/* disk.c */
/* Makes the top file if there is none; its slot is d->top. */
int disk_make_top(struct disk *d, struct err *e);
int disk_free_slot(const struct disk *d);
void disk_layer_close(struct disk *d, unsigned slot);
/* Takes room for `blocks` more in the top; false at the cap. */
bool disk_reserve(struct disk *d, uint64_t blocks);
void disk_unreserve(struct disk *d, uint64_t blocks);
