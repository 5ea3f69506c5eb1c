/*
 * guest: the default guest, for whoever names none. One thread.
 *
 * Which Linux runs here is found by probing (tine-vmm --probe), its kernel and initrd are made by
 * guest/linux/build, and it is booted once: from then on machines start from an image of it, in the
 * cache ($TINE_CACHE, else ~/.cache/tine), keyed by all that it was made from. Everything slow is
 * under a lock, so two first calls make it once.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

struct err;
struct machines;

#define GUEST_MEMORY_LEAN_MIB 64
#define GUEST_MEMORY_STOCK_MIB 128
#define GUEST_READY_TIMEOUT_S 300
#define GUEST_PATH_MAX 4096

struct guest {
    char folder[GUEST_PATH_MAX]; /* holds kernel, initrd, cmdline */
    char kernel[GUEST_PATH_MAX + 16], initrd[GUEST_PATH_MAX + 16];
    char cmdline[4096];
    uint64_t memory_mib; /* what it needs */
};

/* What tine-vmm --probe printed; new. An answer that says KVM cannot be used is no failure here. */
int guest_probe(json_t **probe, struct err *e);
/* "lean" or "stock" by that probe; ERR_UNSUPPORTED with its reason if neither runs. */
int guest_kind(const json_t *probe, const char **kind, struct err *e);
/* Folder of that guest, made if needed (minutes, the first time). */
int guest_find(const char *kind, struct guest *out, struct err *e);
/* Folder of an image of the default guest with that much memory (0: what it needs), made if needed.
 */
int guest_image(const struct machines *m, uint64_t memory_mib, char out[GUEST_PATH_MAX],
                struct err *e);
/* The cache folder, made if needed. */
int guest_cache_dir(char out[GUEST_PATH_MAX], struct err *e);
