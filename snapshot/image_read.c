/*
 * image_read: opens an image and distrusts it (image.h, docs/image-format.md). Loop thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "snapshot/image.h"
#include "snapshot/memory.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/ram.h"
#include "vmm/core/state.h"

#define SUMS_BYTES_MAX (64u << 20)

/* Opens a regular file of the image, read-only, and tells its length. */
static int open_file(int dir_fd, const char *name, uint64_t *bytes, struct err *e)
{
    /* O_NONBLOCK: a FIFO in place of the file must not block the open. */
    CLEANUP_FD int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return err_set(e, ERR_BAD_IMAGE, errno, "open %s", name);
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_sys(e, "stat %s", name);
    if (!S_ISREG(st.st_mode))
        return err_set(e, ERR_BAD_IMAGE, 0, "%s is not a regular file", name);
    *bytes = (uint64_t)st.st_size;
    return take_fd(&fd);
}

static int read_file(int dir_fd, const char *name, uint64_t limit, void **out, size_t *len,
                     struct err *e)
{
    uint64_t bytes = 0;
    CLEANUP_FD int fd = open_file(dir_fd, name, &bytes, e);
    if (fd < 0)
        return fd;
    if (bytes > limit)
        return err_set(e, ERR_BAD_IMAGE, 0, "%s is %" PRIu64 " bytes, expected at most %" PRIu64,
                       name, bytes, limit);
    void *p = malloc(bytes + 1);
    if (p == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "%s of %" PRIu64 " bytes", name, bytes);
    int rc = fd_read_full(fd, p, bytes, e);
    if (rc < 0) {
        free(p);
        return err_wrap(e, rc, "%s", name);
    }
    *out = p;
    *len = bytes;
    return 0;
}

struct manifest {
    uint64_t state_bytes, state_xxh3, sums_bytes, sums_xxh3, memory_bytes;
};

static int parse_sum(const char *text, const char *name, uint64_t *out, struct err *e)
{
    char *end = NULL;
    errno = 0;
    uint64_t v = strtoull(text, &end, 16);
    if (strlen(text) != 16 || *end != '\0' || errno != 0 || strspn(text, "0123456789abcdef") != 16)
        return err_set(e, ERR_BAD_IMAGE, 0, "manifest.json: xxh3 of %s is not 16 hex digits", name);
    *out = v;
    return 0;
}

static int take_manifest(const json_t *j, struct manifest *m, struct err *e)
{
    int format = 0, chunk = 0;
    const char *version = NULL, *state_sum = NULL, *sums_sum = NULL;
    json_int_t state_bytes = 0, sums_bytes = 0, memory_bytes = 0;
    json_error_t why;
    if (json_unpack_ex((json_t *)(uintptr_t)j, &why, 0, "{s:i}", "format", &format) < 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "manifest.json: %s", why.text);
    if (format != IMAGE_FORMAT)
        return err_set(e, ERR_MISMATCH, 0, "image format %d, this build reads %d", format,
                       IMAGE_FORMAT);
    if (json_unpack_ex((json_t *)(uintptr_t)j, &why, JSON_STRICT,
                       "{s:i, s:s, s:{s:I, s:s}, s:{s:I, s:s}, s:{s:I, s:i}}", "format", &format,
                       "tine", &version, "state.dtb", "bytes", &state_bytes, "xxh3", &state_sum,
                       "memory.sums", "bytes", &sums_bytes, "xxh3", &sums_sum, "memory", "bytes",
                       &memory_bytes, "chunk_bytes", &chunk) < 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "manifest.json: %s", why.text);
    if (state_bytes <= 0 || sums_bytes <= 0 || memory_bytes <= 0 ||
        chunk != (int)MEMORY_CHUNK_BYTES)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "manifest.json: lengths must be positive, chunk_bytes %u",
                       MEMORY_CHUNK_BYTES);
    m->state_bytes = (uint64_t)state_bytes;
    m->sums_bytes = (uint64_t)sums_bytes;
    m->memory_bytes = (uint64_t)memory_bytes;
    int rc = parse_sum(state_sum, "state.dtb", &m->state_xxh3, e);
    return rc < 0 ? rc : parse_sum(sums_sum, "memory.sums", &m->sums_xxh3, e);
}

static int read_manifest(int dir_fd, struct manifest *m, struct err *e)
{
    void *text = NULL;
    size_t len = 0;
    int rc = read_file(dir_fd, "manifest.json", IMAGE_MANIFEST_BYTES_MAX, &text, &len, e);
    if (rc < 0)
        return rc;
    json_error_t why;
    json_t *j = json_loadb(text, len, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (j == NULL)
        return err_set(e, ERR_BAD_IMAGE, 0, "manifest.json, line %d: %s", why.line, why.text);
    rc = take_manifest(j, m, e);
    json_decref(j);
    return rc;
}

static int read_state(struct image *img, const struct manifest *m, struct err *e)
{
    int rc =
        read_file(img->dir_fd, "state.dtb", STATE_BYTES_MAX, &img->state, &img->state_bytes, e);
    if (rc < 0)
        return rc;
    if (img->state_bytes != m->state_bytes)
        return err_set(e, ERR_BAD_IMAGE, 0, "state.dtb is %zu bytes, expected %" PRIu64,
                       img->state_bytes, m->state_bytes);
    uint64_t found = XXH3_64bits(img->state, img->state_bytes);
    if (found != m->state_xxh3)
        return err_set(e, ERR_BAD_IMAGE, 0, "state.dtb: xxh3 %016" PRIx64 ", expected %016" PRIx64,
                       found, m->state_xxh3);
    return 0;
}

static int open_parts(struct image *img, const char *dir, struct err *e)
{
    img->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (img->dir_fd < 0)
        return err_set(e, ERR_BAD_IMAGE, errno, "open folder");
    struct manifest m = {0};
    int rc = read_manifest(img->dir_fd, &m, e);
    if (rc == 0)
        rc = read_state(img, &m, e);
    if (rc < 0)
        return rc;
    uint64_t bytes = 0;
    img->memory_fd = open_file(img->dir_fd, "memory", &bytes, e);
    if (img->memory_fd < 0)
        return -EINVAL;
    if (bytes != m.memory_bytes)
        return err_set(e, ERR_BAD_IMAGE, 0, "memory is %" PRIu64 " bytes, expected %" PRIu64, bytes,
                       m.memory_bytes);
    img->memory_bytes = bytes;
    img->sums_xxh3 = m.sums_xxh3;
    return 0;
}

int image_open(struct image *img, const char *dir, struct err *e)
{
    struct image out = {.dir_fd = -1, .memory_fd = -1};
    int rc = open_parts(&out, dir, e);
    if (rc < 0) {
        image_close(&out);
        return err_wrap(e, rc, "image %s", dir);
    }
    *img = out;
    return 0;
}

int image_verify_memory(const struct image *img, const struct ram *ram, struct err *e)
{
    void *p = NULL;
    size_t len = 0;
    int rc = read_file(img->dir_fd, "memory.sums", SUMS_BYTES_MAX, &p, &len, e);
    if (rc < 0)
        return rc;
    uint64_t found = XXH3_64bits(p, len);
    struct memory_sums sums = {.chunk_xxh3 = p, .chunks = len / sizeof(uint64_t)};
    if (found != img->sums_xxh3 || len % sizeof(uint64_t) != 0)
        rc = err_set(e, ERR_BAD_IMAGE, 0, "memory.sums: xxh3 %016" PRIx64 ", expected %016" PRIx64,
                     found, img->sums_xxh3);
    else
        rc = memory_verify(ram, &sums, e);
    free(p);
    return rc;
}

void image_close(struct image *img)
{
    fd_close(&img->dir_fd);
    fd_close(&img->memory_fd);
    free(img->state);
    *img = (struct image){.dir_fd = -1, .memory_fd = -1};
}
