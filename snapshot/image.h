/*
 * image: a machine frozen on disk (docs/image-format.md): a folder with
 *   manifest.json  format version, what made it, name, length and xxh3 of the other files
 *   state.dtb      flattened device tree (state.h)
 *   memory         guest memory, sparse, mapped MAP_PRIVATE by every restore
 *   memory.sums    xxh3 of each chunk of `memory`, little-endian u64
 *   disk<N>        what the disk had above its base, if anything
 *
 * An image is immutable. It is written into a folder aside ("<dir>.part-<pid>"), every file and the
 * folder fsynced, and renamed into place: an older image at that place stays whole until the new
 * one is, then it is swapped out and removed. Whatever goes wrong, the part folder is removed.
 * Loop thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;
struct ram;

#define IMAGE_FORMAT 1
#define IMAGE_MANIFEST_BYTES_MAX (64u << 10)

struct image_writer {
    char *dir;  /* final place */
    char *part; /* where it grows */
    int part_fd;
    /* what the manifest will say of the files written so far */
    uint64_t state_bytes, state_xxh3, sums_bytes, sums_xxh3, memory_bytes;
};

/* Makes the part folder. `dir` must be absent or an image (never another kind of folder). */
int image_begin(struct image_writer *w, const char *dir, struct err *e);
int image_write_state(struct image_writer *w, const void *blob, size_t len, struct err *e);
int image_write_memory(struct image_writer *w, const struct ram *ram, uint64_t *data_bytes,
                       struct err *e);
/* Manifest, fsync, rename. The writer is empty afterwards. */
int image_commit(struct image_writer *w, struct err *e);
/* Removes the part folder if there still is one; fine on a zeroed or committed writer. */
void image_abort(struct image_writer *w);

struct image {
    int dir_fd;
    int memory_fd;
    uint64_t memory_bytes;
    void *state; /* owned copy, its xxh3 checked */
    size_t state_bytes;
    uint64_t sums_xxh3;
};

/* Opens and checks everything but the contents of `memory` and of the disk files. */
int image_open(struct image *img, const char *dir, struct err *e);
/* Checks every chunk of the mapped memory. */
int image_verify_memory(const struct image *img, const struct ram *ram, struct err *e);
void image_close(struct image *img);
