/*
 * probe: what this host's KVM can do, found by trying (docs/protocol.md, section 5).
 *
 * main.c calls it for `tine-vmm --probe`, in a process that does nothing else and is not under the
 * filter. Main thread only.
 */
#pragma once

#include <stdio.h>

/* Prints one JSON object on one line. Returns 0 if a machine can run here, else -errno. */
int probe_print(FILE *out);
