/*
 * The least a process must do with /dev/kvm to have a guest run: what every floor is built from.
 *
 * Used by the floor programs only, on their single thread; tine-vmm shares nothing with it, so that
 * a mistake there cannot hide in the floor it is measured against. Every failure ends the program
 * with one line: a floor that half worked is no floor.
 */
#pragma once

#include <linux/kvm.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MINI_CPUID_MAX = 256,
    MINI_PORT = 0x3f8, /* first port of the PC's first serial line */
};

/* What is saved of a machine beside its memory; one fixed record, read with one read(2). */
struct mini_state {
    uint64_t ram_bytes;
    struct kvm_sregs sregs;
    struct kvm_regs regs;
    struct kvm_cpuid2 cpuid;
    struct kvm_cpuid_entry2 cpuid_entries[MINI_CPUID_MAX];
};

struct mini_vm {
    int kvm_fd; /* /dev/kvm; may be inherited over fork(2), the other two may not be used there */
    int vm_fd;
    int vcpu_fd;
    struct kvm_run *run;
};

/* Print `what` and errno on stderr, end with status 1. */
_Noreturn void mini_die(const char *what);

/* Microseconds of CLOCK_MONOTONIC, one clock for all processes. */
double mini_now_us(void);

/* Open /dev/kvm into vm->kvm_fd. */
void mini_vm_open(struct mini_vm *vm);

/*
 * Make the VM and its one vCPU over [ram, ram + bytes) at guest address 0 and load `state`. Needs
 * vm->kvm_fd; fills the rest of `vm`. The next mini_vm_tick() enters the guest.
 */
void mini_vm_create(struct mini_vm *vm, void *ram, size_t bytes, const struct mini_state *state);

/* Enter the guest until it has written one byte to MINI_PORT, and return that byte. */
uint8_t mini_vm_tick(struct mini_vm *vm);

/* Read registers back into `state`, after a tick: the guest continues behind its OUT. */
void mini_vm_save(struct mini_vm *vm, struct mini_state *state);

/*
 * Write page tables and a loop of guest/tick_loop.h into fresh `ram` and describe a 64-bit vCPU at
 * its first instruction: with dirty_bytes == 0 one that only ticks, else one that keeps dirty_bytes
 * of memory from 2 MiB on dirty.
 */
void mini_guest_build(const struct mini_vm *vm, void *ram, size_t bytes, size_t dirty_bytes,
                      struct mini_state *state);
