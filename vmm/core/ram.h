/*
 * ram: guest memory, reached only through checked calls.
 *
 * `gpa_t` is a guest-physical address that the host cannot dereference. Everything outside this
 * file uses ram_read/ram_write for control data (one copy into a local, then look at the local) and
 * ram_slice for payload. A range never crosses from one region into another.
 *
 * Host memory comes from ram_create (anonymous, MADV_HUGEPAGE) or ram_map (MAP_PRIVATE of an
 * image's memory file). After fork(2) a child uses the parent's mappings as they are: the pages are
 * copy-on-write, the struct needs no change. Any thread may read and write; the guest does so too,
 * therefore a value must never be fetched twice.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;

typedef struct {
    uint64_t addr;
} gpa_t;

static inline gpa_t gpa(uint64_t addr)
{
    return (gpa_t){addr};
}

#define RAM_REGIONS_MAX 2 /* below and above the 32-bit hole */
#define RAM_PAGE_BYTES 4096u

struct ram_region {
    uint64_t start_gpa;
    uint64_t bytes;
    uint8_t *host;
    uint64_t file_offset; /* of this region in a memory file: regions follow each other there */
};

struct ram {
    struct ram_region regions[RAM_REGIONS_MAX];
    unsigned region_count;
    uint64_t bytes; /* sum of all regions */
};

/*
 * Lays `bytes` (a multiple of 4096, > 0) out around the hole [hole_start, hole_end) and maps
 * anonymous memory for it. huge: advise transparent huge pages.
 */
int ram_create(struct ram *ram, uint64_t bytes, uint64_t hole_start, uint64_t hole_end, bool huge,
               struct err *e);
/* Same layout, but private copy-on-write pages of `fd`, whose size must be exactly `bytes`. */
int ram_map(struct ram *ram, int fd, uint64_t bytes, uint64_t hole_start, uint64_t hole_end,
            struct err *e);
/* Unmaps. Fine on a zeroed struct. */
void ram_free(struct ram *ram);

/* 0, or -EFAULT when any byte of the range lies outside guest memory (nothing is copied then). */
int ram_read(const struct ram *ram, gpa_t from, void *to, size_t len);
int ram_write(const struct ram *ram, gpa_t to, const void *from, size_t len);
/* Host pointer to [at, at+len) or NULL. len 0 gives NULL. Payload only, never control fields. */
void *ram_slice(const struct ram *ram, gpa_t at, uint64_t len);
