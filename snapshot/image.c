/*
 * image: see image.h. Reading is in image_read.c.
 */
#include "snapshot/image.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "snapshot/image_files.h"
#include "snapshot/memory.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/ram.h"

/* The files that an image may hold; also all that an abort has to remove. */
const char *const image_file_names[] = {"manifest.json", "state.dtb", "memory", "memory.sums",
                                        "disk0",         "disk1",     "disk2",  "disk3",
                                        "disk4",         "disk5",     "disk6",  NULL};

static int remove_folder(const char *path)
{
    CLEANUP_FD int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    for (const char *const *name = image_file_names; *name != NULL; name++)
        (void)unlinkat(fd, *name, 0); /* absent ones are fine; others show in the rmdir */
    return rmdir(path) < 0 ? -errno : 0;
}

/* The place itself if it is new, what it points at if it is a link to an image. */
static int resolve(const char *dir, char **out, struct err *e)
{
    struct stat st;
    if (lstat(dir, &st) < 0) {
        if (errno != ENOENT)
            return err_sys(e, "image folder %s", dir);
        *out = strdup(dir);
    } else {
        *out = realpath(dir, NULL);
    }
    if (*out == NULL)
        return err_sys(e, "image folder %s", dir);
    for (size_t n = strlen(*out); n > 1 && (*out)[n - 1] == '/'; n--)
        (*out)[n - 1] = '\0';
    return 0;
}

/* An existing place must already be an image, so that nobody's folder is swapped away. */
static int check_place(const char *dir, struct err *e)
{
    struct stat st;
    if (stat(dir, &st) < 0)
        return errno == ENOENT ? 0 : err_sys(e, "image folder %s", dir);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, ERR_USAGE, 0, "%s exists and is not a folder", dir);
    char manifest[PATH_MAX];
    int n = snprintf(manifest, sizeof manifest, "%s/manifest.json", dir);
    if (n < 0 || (size_t)n >= sizeof manifest)
        return err_set(e, ERR_USAGE, 0, "image folder %s: path too long", dir);
    if (access(manifest, F_OK) < 0)
        return err_set(e, ERR_USAGE, 0,
                       "%s exists and holds no manifest.json: give a new folder or an older image",
                       dir);
    return 0;
}

int image_begin(struct image_writer *w, const char *dir, struct err *e)
{
    struct image_writer out = {.part_fd = -1};
    int rc = resolve(dir, &out.dir, e);
    if (rc == 0)
        rc = check_place(out.dir, e);
    if (rc == 0 && asprintf(&out.part, "%s.part-%d", out.dir, (int)getpid()) < 0) {
        out.part = NULL;
        rc = err_set(e, ERR_HOST, ENOMEM, "image path");
    }
    if (rc == 0) {
        (void)remove_folder(out.part); /* left by a dead process of the same pid, if anything */
        if (mkdir(out.part, 0700) < 0) {
            rc = err_sys(e, "make image folder %s", out.part);
        } else {
            out.part_fd = open(out.part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (out.part_fd < 0)
                rc = err_sys(e, "open image folder %s", out.part);
        }
    }
    if (rc < 0)
        image_abort(&out);
    else
        *w = out;
    return rc;
}

static int create_file(const struct image_writer *w, const char *name, struct err *e)
{
    int fd = openat(w->part_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    return fd < 0 ? err_sys(e, "create %s/%s", w->part, name) : fd;
}

static int write_file(const struct image_writer *w, const char *name, const void *p, size_t len,
                      struct err *e)
{
    CLEANUP_FD int fd = create_file(w, name, e);
    if (fd < 0)
        return fd;
    int rc = fd_write_full(fd, p, len, e);
    if (rc == 0 && fsync(fd) < 0)
        rc = err_sys(e, "fsync");
    return rc < 0 ? err_wrap(e, rc, "write %s/%s", w->part, name) : 0;
}

int image_write_state(struct image_writer *w, const void *blob, size_t len, struct err *e)
{
    int rc = write_file(w, "state.dtb", blob, len, e);
    if (rc == 0) {
        w->state_bytes = len;
        w->state_xxh3 = XXH3_64bits(blob, len);
    }
    return rc;
}

int image_write_memory(struct image_writer *w, const struct ram *ram, uint64_t *data_bytes,
                       struct err *e)
{
    CLEANUP_FD int fd = create_file(w, "memory", e);
    if (fd < 0)
        return fd;
    struct memory_sums sums = {0};
    int rc = memory_write(fd, ram, &sums, e);
    if (rc == 0 && fsync(fd) < 0)
        rc = err_sys(e, "fsync");
    if (rc < 0)
        return err_wrap(e, rc, "write %s/memory", w->part);
    size_t bytes = sums.chunks * sizeof sums.chunk_xxh3[0];
    rc = write_file(w, "memory.sums", sums.chunk_xxh3, bytes, e);
    if (rc == 0) {
        w->memory_bytes = ram->bytes;
        w->sums_bytes = bytes;
        w->sums_xxh3 = XXH3_64bits(sums.chunk_xxh3, bytes);
        *data_bytes = sums.data_bytes;
    }
    memory_sums_free(&sums);
    return rc;
}

/* 64-bit sums do not fit a JSON number safely: sixteen hex digits. */
static json_t *sum_string(uint64_t sum)
{
    char text[17];
    (void)snprintf(text, sizeof text, "%016" PRIx64, sum);
    return json_string(text);
}

static json_t *file_entry(uint64_t bytes, uint64_t sum)
{
    return json_pack("{s:I, s:o}", "bytes", (json_int_t)bytes, "xxh3", sum_string(sum));
}

static int write_manifest(const struct image_writer *w, struct err *e)
{
    json_t *j = json_pack("{s:i, s:s, s:o, s:o, s:{s:I, s:i}}", "format", IMAGE_FORMAT, "tine",
                          TINE_VERSION, "state.dtb", file_entry(w->state_bytes, w->state_xxh3),
                          "memory.sums", file_entry(w->sums_bytes, w->sums_xxh3), "memory", "bytes",
                          (json_int_t)w->memory_bytes, "chunk_bytes", (int)MEMORY_CHUNK_BYTES);
    char *text = j != NULL ? json_dumps(j, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(j);
    if (text == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "manifest");
    int rc = write_file(w, "manifest.json", text, strlen(text), e);
    free(text);
    return rc;
}

/* Makes the rename itself last: fsync of the folder that holds it. */
static int sync_parent(const char *dir, struct err *e)
{
    char *copy = strdup(dir);
    if (copy == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "image path");
    char *slash = strrchr(copy, '/');
    const char *parent = slash == NULL ? "." : slash == copy ? "/" : copy;
    if (slash != NULL && slash != copy)
        *slash = '\0';
    CLEANUP_FD int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) < 0 ? err_sys(e, "fsync folder %s", parent) : 0;
    free(copy);
    return rc;
}

int image_commit(struct image_writer *w, struct err *e)
{
    int rc = write_manifest(w, e);
    if (rc == 0 && fsync(w->part_fd) < 0)
        rc = err_sys(e, "fsync %s", w->part);
    if (rc < 0)
        return rc;
    if (renameat2(AT_FDCWD, w->part, AT_FDCWD, w->dir, RENAME_NOREPLACE) < 0) {
        if (errno != EEXIST)
            return err_sys(e, "rename %s to %s", w->part, w->dir);
        /* An older image is there: it is swapped out whole, and only then removed. Machines that
         * map its memory keep the pages; the file lives on until they end. */
        if (renameat2(AT_FDCWD, w->part, AT_FDCWD, w->dir, RENAME_EXCHANGE) < 0)
            return err_sys(e, "exchange %s with %s", w->part, w->dir);
        (void)remove_folder(w->part); /* the new image is in place; a leftover is only untidy */
    }
    rc = sync_parent(w->dir, e);
    free(w->part);
    w->part = NULL;
    image_abort(w);
    return rc;
}

void image_abort(struct image_writer *w)
{
    if (w->part_fd > 0)
        fd_close(&w->part_fd);
    if (w->part != NULL)
        (void)remove_folder(w->part); /* nothing half-made may stay; absent is fine */
    free(w->part);
    free(w->dir);
    *w = (struct image_writer){.part_fd = -1};
}
