/*
 * disk_map: the block map of a disk (disk_layers.h). Loop thread only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "devices/disk_layers.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"

static uint64_t chunks(const struct disk *d)
{
    return (d->blocks + DISK_MAP_CHUNK_BLOCKS - 1) / DISK_MAP_CHUNK_BLOCKS;
}

static void *map_sparse(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

int disk_map_create(struct disk *d, struct err *e)
{
    /* Zero pages mean "base": a fresh map costs nothing until something is written. */
    d->map = map_sparse(d->blocks * sizeof *d->map);
    d->chunk_used = map_sparse(chunks(d));
    if (d->map == NULL || d->chunk_used == NULL)
        return err_sys(e, "block map of %llu blocks", (unsigned long long)d->blocks);
    return 0;
}

void disk_map_free(struct disk *d)
{
    if (d->map != NULL)
        (void)munmap(d->map, d->blocks * sizeof *d->map);
    if (d->chunk_used != NULL)
        (void)munmap(d->chunk_used, chunks(d));
    d->map = NULL;
    d->chunk_used = NULL;
}

/* Index of the extent that holds `block`; the map's invariant says there is one. */
static size_t find_extent(const struct disk_layer *l, uint64_t block)
{
    size_t low = 0, high = l->extent_count;
    while (high - low > 1) {
        size_t mid = low + (high - low) / 2;
        if (l->extents[mid].first <= block)
            low = mid;
        else
            high = mid;
    }
    return low;
}

static uint16_t entry_of(const struct disk *d, uint64_t block)
{
    if (d->map == NULL || !d->chunk_used[block / DISK_MAP_CHUNK_BLOCKS])
        return DISK_MAP_BASE;
    return d->map[block];
}

/* How many blocks from `block` on (at most `max`) have the same entry. */
static uint64_t same_entry(const struct disk *d, uint64_t block, uint64_t max, uint16_t entry)
{
    if (d->map == NULL)
        return max;
    uint64_t n = 1;
    while (n < max) {
        uint64_t b = block + n;
        if (b % DISK_MAP_CHUNK_BLOCKS == 0 && entry == DISK_MAP_BASE &&
            !d->chunk_used[b / DISK_MAP_CHUNK_BLOCKS]) {
            n += min_u64(DISK_MAP_CHUNK_BLOCKS, max - n);
            continue;
        }
        if (entry_of(d, b) != entry)
            break;
        n++;
    }
    return n;
}

void disk_map_find(const struct disk *d, uint64_t at, uint64_t max, struct disk_source *out)
{
    uint64_t block = at / DISK_BLOCK_BYTES;
    uint64_t inside = at % DISK_BLOCK_BYTES;
    uint64_t blocks = (inside + max + DISK_BLOCK_BYTES - 1) / DISK_BLOCK_BYTES;
    uint16_t entry = entry_of(d, block);
    uint64_t run = same_entry(d, block, blocks, entry);
    *out = (struct disk_source){.kind = DISK_FROM_BASE, .fd = d->base_fd, .offset = at};
    if (entry == DISK_MAP_ZERO) {
        out->kind = DISK_FROM_ZERO;
        out->fd = -1;
    } else if (entry != DISK_MAP_BASE) {
        const struct disk_layer *l = &d->layers[entry - 1];
        out->kind = DISK_FROM_LAYER;
        out->slot = entry - 1u;
        out->fd = l->fd;
        if (l->extents != NULL) {
            const struct disk_extent *x = &l->extents[find_extent(l, block)];
            out->offset = x->file_offset + (block - x->first) * DISK_BLOCK_BYTES + inside;
            run = min_u64(run, x->first + x->count - block);
        }
    }
    out->bytes = min_u64(max, run * DISK_BLOCK_BYTES - inside);
}

static void count(struct disk *d, uint16_t entry, uint64_t add)
{
    if (entry != DISK_MAP_BASE && entry != DISK_MAP_ZERO)
        d->layers[entry - 1].live += add;
}

void disk_map_set(struct disk *d, uint64_t first, uint64_t n, uint16_t entry)
{
    for (uint64_t b = first; b < first + n; b++) {
        count(d, d->map[b], UINT64_MAX); /* minus one */
        d->map[b] = entry;
        d->chunk_used[b / DISK_MAP_CHUNK_BLOCKS] = 1;
    }
    count(d, entry, n);
}

uint64_t disk_map_count_top(const struct disk *d, uint64_t first, uint64_t n)
{
    if (d->top < 0)
        return 0;
    uint64_t found = 0;
    for (uint64_t b = first; b < first + n; b++)
        found += entry_of(d, b) == DISK_MAP_LAYER(d->top);
    return found;
}

bool disk_map_next(const struct disk *d, uint64_t *at, struct disk_extent *out)
{
    uint64_t b = *at;
    while (b < d->blocks && entry_of(d, b) == DISK_MAP_BASE) {
        bool whole_chunk = d->map == NULL || !d->chunk_used[b / DISK_MAP_CHUNK_BLOCKS];
        b = whole_chunk ? (b / DISK_MAP_CHUNK_BLOCKS + 1) * DISK_MAP_CHUNK_BLOCKS : b + 1;
    }
    if (b >= d->blocks)
        return false;
    bool zero = entry_of(d, b) == DISK_MAP_ZERO;
    uint64_t end = b + 1;
    while (end < d->blocks) {
        uint16_t entry = entry_of(d, end);
        if (entry == DISK_MAP_BASE || (entry == DISK_MAP_ZERO) != zero)
            break;
        end++;
    }
    *out = (struct disk_extent){.first = b, .count = end - b, .zero = zero};
    *at = end;
    return true;
}
