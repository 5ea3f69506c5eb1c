/*
 * ram: see ram.h.
 */
#include "vmm/core/ram.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "vmm/core/err.h"
#include "vmm/core/num.h"

static int layout(struct ram *ram, uint64_t bytes, uint64_t hole_start, uint64_t hole_end,
                  struct err *e)
{
    if (bytes == 0 || bytes % RAM_PAGE_BYTES != 0)
        return err_set(e, ERR_USAGE, 0,
                       "guest memory of %llu bytes: expected a positive multiple of %u",
                       (unsigned long long)bytes, RAM_PAGE_BYTES);
    *ram = (struct ram){.bytes = bytes};
    uint64_t low = min_u64(bytes, hole_start);
    ram->regions[0] = (struct ram_region){.start_gpa = 0, .bytes = low};
    ram->region_count = 1;
    if (bytes > low) {
        ram->regions[1] =
            (struct ram_region){.start_gpa = hole_end, .bytes = bytes - low, .file_offset = low};
        ram->region_count = 2;
    }
    return 0;
}

static int map_regions(struct ram *ram, int fd, bool huge, struct err *e)
{
    for (unsigned i = 0; i < ram->region_count; i++) {
        struct ram_region *r = &ram->regions[i];
        int flags = MAP_PRIVATE | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
        void *p = mmap(NULL, r->bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)r->file_offset);
        if (p == MAP_FAILED) {
            int rc = err_sys(e, "map %llu MiB of guest memory", (unsigned long long)r->bytes >> 20);
            ram_free(ram);
            return rc;
        }
        r->host = p;
        if (huge)
            (void)madvise(p, r->bytes, MADV_HUGEPAGE); /* a host without THP works, only slower */
    }
    return 0;
}

int ram_create(struct ram *ram, uint64_t bytes, uint64_t hole_start, uint64_t hole_end, bool huge,
               struct err *e)
{
    struct ram r;
    int rc = layout(&r, bytes, hole_start, hole_end, e);
    if (rc == 0)
        rc = map_regions(&r, -1, huge, e);
    if (rc == 0)
        *ram = r;
    return rc;
}

int ram_map(struct ram *ram, int fd, uint64_t bytes, uint64_t hole_start, uint64_t hole_end,
            struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_sys(e, "stat memory file");
    /* A shorter file would be a SIGBUS at first touch, so the size is checked before the map. */
    if ((uint64_t)st.st_size != bytes)
        return err_set(e, ERR_BAD_IMAGE, 0, "memory file is %llu bytes, expected %llu",
                       (unsigned long long)st.st_size, (unsigned long long)bytes);
    struct ram r;
    int rc = layout(&r, bytes, hole_start, hole_end, e);
    if (rc == 0)
        rc = map_regions(&r, fd, false, e);
    if (rc == 0)
        *ram = r;
    return rc;
}

void ram_free(struct ram *ram)
{
    for (unsigned i = 0; i < ram->region_count; i++) {
        if (ram->regions[i].host != NULL)
            (void)munmap(ram->regions[i].host, ram->regions[i].bytes);
    }
    *ram = (struct ram){0};
}

void *ram_slice(const struct ram *ram, gpa_t at, uint64_t len)
{
    if (len == 0)
        return NULL;
    for (unsigned i = 0; i < ram->region_count; i++) {
        const struct ram_region *r = &ram->regions[i];
        if (at.addr < r->start_gpa)
            continue;
        uint64_t off = at.addr - r->start_gpa;
        if (off < r->bytes && len <= r->bytes - off)
            return r->host + off;
    }
    return NULL;
}

int ram_read(const struct ram *ram, gpa_t from, void *to, size_t len)
{
    if (len == 0)
        return 0;
    const void *p = ram_slice(ram, from, len);
    if (p == NULL)
        return -EFAULT;
    memcpy(to, p, len);
    return 0;
}

int ram_write(const struct ram *ram, gpa_t to, const void *from, size_t len)
{
    if (len == 0)
        return 0;
    void *p = ram_slice(ram, to, len);
    if (p == NULL)
        return -EFAULT;
    memcpy(p, from, len);
    return 0;
}
