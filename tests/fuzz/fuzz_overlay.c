/*
 * Fuzz target of the reader of saved disk overlays: the input is the file, its checksum made right
 * so that what is behind it is reached. What is accepted keeps the map's promises: every block lies
 * inside the file. Seeds: seeds/overlay.
 */
#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "devices/disk_layers.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BASE_BYTES (40u * 4096 + 512)
#define FILE_MAX (64u << 10)

static int base_fd = -1, dir_fd = -1;
static char dir[] = "/tmp/tine-fuzz-XXXXXX";

static void remove_dir(void)
{
    (void)unlinkat(dir_fd, "overlay", 0);
    (void)rmdir(dir);
}

static void make_files(void)
{
    if (base_fd >= 0)
        return;
    base_fd = memfd_create("base", MFD_CLOEXEC);
    if (base_fd < 0 || ftruncate(base_fd, BASE_BYTES) < 0 || mkdtemp(dir) == NULL)
        abort();
    dir_fd = open(dir, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
    if (dir_fd < 0)
        abort();
    (void)atexit(remove_dir);
}

/* Returns the file's length. */
static size_t extend(uint8_t *file, const uint8_t *data, size_t size)
{
    size = size < FILE_MAX ? size : FILE_MAX;
    memcpy(file, data, size);
    memset(file + size, 0, FILE_MAX - size);
    uint64_t claimed = size >= 64 ? le64_get(file + 40) : 0;
    return claimed > size && claimed <= FILE_MAX ? (size_t)claimed : size;
}

/* Puts the checksum over all up to the data right, if there is one. Returns it. */
static uint64_t set_hash(uint8_t *file, size_t size)
{
    uint64_t extents = le64_get(file + 24), data_offset = le64_get(file + 32);
    uint64_t sums = data_offset <= size ? (size - data_offset + 1048575) / 1048576 : 0;
    if (size < 64 || extents > size / 16 || 64 + extents * 16 + sums * 8 > size)
        return 0;
    uint64_t hash = XXH3_64bits(file + 64, extents * 16 + sums * 8);
    le64_put(file + 48, hash);
    return hash;
}

static void write_file(const uint8_t *file, size_t size)
{
    /* A new file each time: cutting an old one to 0 makes some file systems write it out. */
    (void)unlinkat(dir_fd, "overlay", 0);
    int fd = openat(dir_fd, "overlay", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, file, size) != (ssize_t)size)
        abort();
    close(fd);
}

static void check(const struct disk *d, size_t size)
{
    uint64_t bytes = d->sectors * DISK_SECTOR_BYTES;
    for (uint64_t at = 0; at < bytes;) {
        struct disk_source s;
        disk_map_find(d, at, bytes - at, &s);
        assert(s.bytes > 0 && s.bytes <= bytes - at);
        if (s.kind == DISK_FROM_LAYER)
            assert(s.fd >= 0 && s.offset >= 64 && s.offset + s.bytes <= size);
        at += s.bytes;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t file[FILE_MAX];
    struct disk *d;
    struct err e = {0};
    struct state_writer w;
    struct state_node root;
    const void *blob;
    size_t len;
    make_files();
    struct disk_spec spec = {.path = "base", .fd = dup(base_fd)};
    if (disk_open(&d, &spec, &e) < 0 || state_writer_init(&w, &e) < 0)
        abort();
    size = extend(file, data, size);
    uint64_t hash = set_hash(file, size);
    write_file(file, size);
    state_put_u32(&w, "version", 1);
    state_put_u32(&w, "read-only", 0);
    state_put_u64(&w, "base-bytes", BASE_BYTES);
    state_put_u64(&w, "base-mtime-ns", d->base_mtime_ns);
    state_put_u64(&w, "base-hash", 0);
    state_put_string(&w, "overlay-name", "overlay");
    state_put_u64(&w, "overlay-bytes", size);
    state_put_u64(&w, "overlay-hash", hash);
    if (state_finish(&w, &blob, &len, &e) < 0 || state_open(blob, len, &root, &e) < 0)
        abort();
    if (disk_restore(d, dir_fd, &root, &e) == 0) {
        check(d, size);
        (void)disk_verify(d, &e); /* data may well be damaged */
    } else {
        assert(e.text[0] != '\0' && d->stored_blocks == 0);
    }
    state_writer_free(&w);
    disk_free(d);
    return 0;
}
