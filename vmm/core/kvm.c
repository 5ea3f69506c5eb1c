/*
 * kvm: see kvm.h.
 */
#include "vmm/core/kvm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/ram.h"

int kvm_open(struct kvm *kvm, const char *path, struct err *e)
{
    CLEANUP_FD int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, "open %s", path);
    int version = ioctl(fd, KVM_GET_API_VERSION, 0);
    if (version < 0)
        return err_set(e, ERR_UNSUPPORTED, errno, "%s is not a KVM device: KVM_GET_API_VERSION",
                       path);
    if (version != KVM_API_VERSION)
        return err_set(e, ERR_UNSUPPORTED, 0, "%s speaks KVM API version %d, expected %d", path,
                       version, KVM_API_VERSION);
    int run_bytes = ioctl(fd, KVM_GET_VCPU_MMAP_SIZE, 0);
    if (run_bytes < (int)sizeof(struct kvm_run))
        return err_sys(e, "%s: KVM_GET_VCPU_MMAP_SIZE gave %d", path, run_bytes);
    *kvm = (struct kvm){.dev_fd = take_fd(&fd), .vm_fd = -1, .run_bytes = (size_t)run_bytes};
    return 0;
}

void kvm_close(struct kvm *kvm)
{
    fd_close(&kvm->vm_fd);
    fd_close(&kvm->dev_fd);
}

int kvm_create_vm(struct kvm *kvm, struct err *e)
{
    int fd;
    do /* a signal during VM creation is reported as EINTR */
        fd = ioctl(kvm->dev_fd, KVM_CREATE_VM, 0);
    while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return err_sys(e, "KVM_CREATE_VM");
    kvm->vm_fd = fd;
    return 0;
}

void kvm_close_vm(struct kvm *kvm)
{
    fd_close(&kvm->vm_fd);
}

int kvm_set_memory(const struct kvm *kvm, const struct ram *ram, struct err *e)
{
    for (unsigned i = 0; i < ram->region_count; i++) {
        const struct ram_region *r = &ram->regions[i];
        struct kvm_userspace_memory_region slot = {
            .slot = i,
            .guest_phys_addr = r->start_gpa,
            .memory_size = r->bytes,
            .userspace_addr = (uint64_t)(uintptr_t)r->host,
        };
        if (ioctl(kvm->vm_fd, KVM_SET_USER_MEMORY_REGION, &slot) < 0)
            return err_sys(e, "KVM_SET_USER_MEMORY_REGION slot %u, %llu MiB at 0x%llx", i,
                           (unsigned long long)r->bytes >> 20, (unsigned long long)r->start_gpa);
    }
    return 0;
}

int kvm_capability(const struct kvm *kvm, long capability)
{
    int rc = ioctl(kvm->vm_fd >= 0 ? kvm->vm_fd : kvm->dev_fd, KVM_CHECK_EXTENSION, capability);
    return rc < 0 ? 0 : rc;
}

void kvm_irq_pulse(void *ctx, uint32_t gsi)
{
    const struct kvm *kvm = ctx;
    /* Both levels, so that an edge-triggered pin sees a rising edge each time. The only failures of
     * this ioctl are a missing chip and a wild pin number, both fixed when the machine is built. */
    struct kvm_irq_level level = {.irq = gsi, .level = 1};
    (void)ioctl(kvm->vm_fd, KVM_IRQ_LINE, &level);
    level.level = 0;
    (void)ioctl(kvm->vm_fd, KVM_IRQ_LINE, &level);
}
