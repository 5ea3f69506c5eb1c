/*
 * arch probe: the part of the probe that depends on the CPU architecture. Main thread, one call.
 *
 * Some KVMs have no hardware under them: they run a guest's user mode natively and interpret its
 * kernel mode, and their interpreter lacks instructions. Names and module lists do not tell, so a
 * tiny machine executes a few instructions in kernel mode and it shows.
 */
#pragma once

#include <stdbool.h>

struct err;
struct kvm;

#define ARCH_PROBE_NAMES_MAX 24

struct arch_probe {
    const char *missing[ARCH_PROBE_NAMES_MAX]; /* capabilities, by name; NULL-terminated */
    const char *lacks[ARCH_PROBE_NAMES_MAX];   /* instructions not carried out; NULL-terminated */
    bool kernel_mode_is_native;                /* meaningful when arch_probe returned 0 */
};

/* `kvm` is open and has no VM; the call makes and closes its own. `missing` is set also on failure.
 */
int arch_probe(struct kvm *kvm, struct arch_probe *out, struct err *e);
