/*
 * cpu: shared by the files that set up, save and restore x86 vCPUs.
 */
#pragma once

#include <stddef.h>

struct kvm_cpuid2;

/* What this build needs of KVM; the probe reports the same list (vm.c). */
struct x86_capability {
    long number;
    const char *name;
};
extern const struct x86_capability x86_capabilities[];
extern const unsigned x86_capability_count;

#define X86_CPUID_ENTRIES_MAX 256u
#define X86_CPUID_BYTES(n)                                                                         \
    (sizeof(struct kvm_cpuid2) + (size_t)(n) * sizeof(struct kvm_cpuid_entry2))

/* Zeroed table with room for X86_CPUID_ENTRIES_MAX; free() it. NULL when out of memory. */
struct kvm_cpuid2 *x86_cpuid_new(void);
