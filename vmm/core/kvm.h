/*
 * kvm: one VM of the host's KVM, and the ioctls that do not depend on the CPU architecture
 * (Documentation/virt/kvm/api.rst).
 *
 * The device fd may be used on both sides of a fork(2); a VM and its vCPUs belong to the address
 * space that made them, so a child closes them (kvm_close_vm) and makes its own. Loop thread only,
 * except KVM_IRQ_LINE, which any thread may issue.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct err;
struct ram;

struct kvm {
    int dev_fd;       /* /dev/kvm */
    int vm_fd;        /* -1 while there is no VM */
    size_t run_bytes; /* size of the mapping of a vCPU's kvm_run */
};

#define KVM_DEFAULT_PATH "/dev/kvm"

/* Opens the device and checks that it is a KVM of API version 12. Names path and errno. */
int kvm_open(struct kvm *kvm, const char *path, struct err *e);
/* Also fine on {-1, -1}. */
void kvm_close(struct kvm *kvm);

int kvm_create_vm(struct kvm *kvm, struct err *e);
void kvm_close_vm(struct kvm *kvm);

/*
 * One memslot per region. To be called before the interrupt chip is created: changing a slot waits
 * for an SRCU grace period of the VM, which is free while nothing has used it yet and takes about
 * 8 ms afterwards (bench: floor-restore prints both).
 */
int kvm_set_memory(const struct kvm *kvm, const struct ram *ram, struct err *e);

/* KVM_CHECK_EXTENSION: 0 when missing. Asks the VM when there is one. */
int kvm_capability(const struct kvm *kvm, long capability);
/* irq_line.raise: an edge on `gsi`; ctx is a struct kvm. */
void kvm_irq_pulse(void *ctx, uint32_t gsi);
