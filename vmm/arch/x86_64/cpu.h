/*
 * cpu: shared by the files that set up, save and restore x86 vCPUs.
 */
#pragma once

#include <stddef.h>

struct kvm_cpuid2;

#define X86_CPUID_ENTRIES_MAX 256u
#define X86_CPUID_BYTES(n)                                                                         \
    (sizeof(struct kvm_cpuid2) + (size_t)(n) * sizeof(struct kvm_cpuid_entry2))

/* Zeroed table with room for X86_CPUID_ENTRIES_MAX; free() it. NULL when out of memory. */
struct kvm_cpuid2 *x86_cpuid_new(void);
