/*
 * memory: guest memory as a file of the same length, its regions one after the other, pages of
 * zeros as holes, and an xxh3 sum for each chunk of MEMORY_CHUNK_BYTES. Loop thread.
 */
#pragma once

#include <stdint.h>

struct err;
struct ram;

#define MEMORY_CHUNK_BYTES (1u << 20)

struct memory_sums {
    uint64_t *chunk_xxh3; /* owned; of the chunk's bytes, the last chunk may be short */
    uint64_t chunks;
    uint64_t data_bytes; /* bytes that are not holes */
};

/* Writes all of `ram` into the empty file `fd` and fills `sums` (memory_sums_free). */
int memory_write(int fd, const struct ram *ram, struct memory_sums *sums, struct err *e);
/* Compares a mapped image with its sums; the first wrong chunk is named with both sums. */
int memory_verify(const struct ram *ram, const struct memory_sums *sums, struct err *e);
void memory_sums_free(struct memory_sums *sums);
