/*
 * arch: all that the rest of the VMM knows about the CPU architecture. One implementation per
 * folder beside this file. Loop thread; vCPUs parked.
 *
 * Order of a boot:    arch_load_kernel, kvm_create_vm, kvm_set_memory, arch_vm_init, vcpu_create,
 *                     arch_vcpu_reset, arch_vcpu_enter, run.
 * Order of a restore: kvm_create_vm, kvm_set_memory, arch_vm_init, vcpu_create, arch_vcpu_restore
 *                     for each vCPU, arch_vm_restore, devices, run.
 * Order of a save:    vCPUs parked, devices quiet, devices, arch_vm_save, arch_vcpu_save, memory.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct boot_entry;
struct boot_spec;
struct err;
struct kvm;
struct ram;
struct state_node;
struct state_writer;
struct vcpu;

/* Where things lie in guest-physical space. */
struct arch_layout {
    uint64_t hole_start, hole_end; /* RAM is split around it */
    uint64_t virtio_base, virtio_stride;
    unsigned virtio_slots;
    const uint8_t *virtio_gsi; /* per slot */
    unsigned cpus_max;
    uint64_t memory_min_bytes, memory_step_bytes;
};
extern const struct arch_layout arch_layout;
extern const char arch_name[]; /* "x86_64" */

/* Capabilities this build cannot do without; ERR_UNSUPPORTED names the first missing one. */
int arch_check_capabilities(const struct kvm *kvm, struct err *e);
/* Interrupt chip and what else a VM has once. After kvm_set_memory, before vCPUs. */
int arch_vm_init(const struct kvm *kvm, struct err *e);
int arch_vm_save(const struct kvm *kvm, struct state_writer *w, struct err *e);
int arch_vm_restore(const struct kvm *kvm, const struct state_node *n, struct err *e);

/* CPUID and the like for a fresh vCPU of `cpus`. */
int arch_vcpu_reset(const struct kvm *kvm, struct vcpu *v, unsigned cpus, struct err *e);
/* A node "cpu@N" in the parent that is open in `w` / given as `parent`. */
int arch_vcpu_save(const struct kvm *kvm, struct vcpu *v, struct state_writer *w, struct err *e);
int arch_vcpu_restore(const struct kvm *kvm, struct vcpu *v, const struct state_node *parent,
                      struct err *e);

/* Loads kernel and tables (boot.h of the architecture). Needs no VM: what is no kernel is refused
 * before there is one. */
int arch_load_kernel(const struct ram *ram, const struct boot_spec *spec, struct boot_entry *out,
                     struct err *e);
/* Points vCPU 0 at the entry. */
int arch_vcpu_enter(struct vcpu *v, const struct boot_entry *at, struct err *e);

/*
 * The few ports of a PC that end a machine: keyboard controller reset (0x64), ACPI PM1a control
 * (0x604), pvpanic (0x505). `happened` runs on the loop thread. `p` outlives the bus.
 */
enum arch_platform_event { ARCH_RESET, ARCH_POWEROFF, ARCH_PANIC };
struct arch_platform {
    void (*happened)(void *arg, enum arch_platform_event what);
    void *arg;
};
struct bus;
int arch_add_platform(struct bus *pio, struct arch_platform *p, struct err *e);

/* One line for a person about why and where the guest stopped (instruction pointer, bytes). */
void arch_describe_stop(struct vcpu *v, char *text, size_t len);
/* True if the CPU waits for an interrupt with interrupts off: it will never run again. */
bool arch_vcpu_is_halted(struct vcpu *v);
