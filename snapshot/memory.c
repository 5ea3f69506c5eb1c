/*
 * memory: see memory.h.
 */
#include "snapshot/memory.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

static bool page_is_zero(const uint8_t *p)
{
    uint64_t first;
    memcpy(&first, p, sizeof first);
    return first == 0 && memcmp(p, p + sizeof first, RAM_PAGE_BYTES - sizeof first) == 0;
}

/* Writes the runs of pages that are not zero. */
static int write_pages(int fd, const uint8_t *p, uint64_t len, uint64_t at, uint64_t *data,
                       struct err *e)
{
    for (uint64_t off = 0; off < len;) {
        if (page_is_zero(p + off)) {
            off += RAM_PAGE_BYTES;
            continue;
        }
        uint64_t end = off + RAM_PAGE_BYTES;
        while (end < len && !page_is_zero(p + end))
            end += RAM_PAGE_BYTES;
        int rc = fd_pwrite_full(fd, p + off, end - off, at + off, e);
        if (rc < 0)
            return rc;
        *data += end - off;
        off = end;
    }
    return 0;
}

/* Calls `fn` for each chunk of the file's address range; chunks do not cross regions because
 * regions are laid out in steps of a chunk. */
typedef int chunk_fn(void *arg, uint64_t index, const uint8_t *p, uint64_t len, uint64_t at,
                     struct err *e);

static int for_each_chunk(const struct ram *ram, chunk_fn *fn, void *arg, struct err *e)
{
    uint64_t index = 0;
    for (unsigned i = 0; i < ram->region_count; i++) {
        const struct ram_region *r = &ram->regions[i];
        for (uint64_t off = 0; off < r->bytes; off += MEMORY_CHUNK_BYTES) {
            uint64_t len = min_u64(MEMORY_CHUNK_BYTES, r->bytes - off);
            int rc = fn(arg, index++, r->host + off, len, r->file_offset + off, e);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

struct write_job {
    int fd;
    struct memory_sums *sums;
};

static int write_chunk(void *arg, uint64_t index, const uint8_t *p, uint64_t len, uint64_t at,
                       struct err *e)
{
    struct write_job *job = arg;
    job->sums->chunk_xxh3[index] = XXH3_64bits(p, len);
    return write_pages(job->fd, p, len, at, &job->sums->data_bytes, e);
}

static uint64_t count_chunks(const struct ram *ram)
{
    uint64_t n = 0;
    for (unsigned i = 0; i < ram->region_count; i++)
        n += (ram->regions[i].bytes + MEMORY_CHUNK_BYTES - 1) / MEMORY_CHUNK_BYTES;
    return n;
}

int memory_write(int fd, const struct ram *ram, struct memory_sums *sums, struct err *e)
{
    struct memory_sums s = {.chunks = count_chunks(ram)};
    s.chunk_xxh3 = calloc(s.chunks, sizeof s.chunk_xxh3[0]);
    if (s.chunk_xxh3 == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "%llu chunk sums", (unsigned long long)s.chunks);
    int rc = 0;
    if (ftruncate(fd, (off_t)ram->bytes) < 0)
        rc = err_sys(e, "set length of %llu bytes", (unsigned long long)ram->bytes);
    if (rc == 0)
        rc = for_each_chunk(ram, write_chunk, &(struct write_job){fd, &s}, e);
    if (rc < 0)
        memory_sums_free(&s);
    else
        *sums = s;
    return rc;
}

static int verify_chunk(void *arg, uint64_t index, const uint8_t *p, uint64_t len, uint64_t at,
                        struct err *e)
{
    const struct memory_sums *sums = arg;
    uint64_t found = XXH3_64bits(p, len);
    if (found == sums->chunk_xxh3[index])
        return 0;
    return err_set(e, ERR_BAD_IMAGE, 0,
                   "memory chunk %llu (bytes from %llu): xxh3 %016llx, expected %016llx",
                   (unsigned long long)index, (unsigned long long)at, (unsigned long long)found,
                   (unsigned long long)sums->chunk_xxh3[index]);
}

int memory_verify(const struct ram *ram, const struct memory_sums *sums, struct err *e)
{
    if (sums->chunks != count_chunks(ram))
        return err_set(e, ERR_BAD_IMAGE, 0, "%llu chunk sums, expected %llu",
                       (unsigned long long)sums->chunks, (unsigned long long)count_chunks(ram));
    return for_each_chunk(ram, verify_chunk, (void *)(uintptr_t)sums, e);
}

void memory_sums_free(struct memory_sums *sums)
{
    free(sums->chunk_xxh3);
    *sums = (struct memory_sums){0};
}
