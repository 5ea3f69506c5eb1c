/*
 * vm: the parts of an x86 VM that exist once: interrupt chips and clock. See arch.h for the order.
 */
#include <errno.h>
#include <linux/kvm.h>
#include <string.h>
#include <sys/ioctl.h>

#include "vmm/arch/arch.h"
#include "vmm/arch/x86_64/boot.h"
#include "vmm/arch/x86_64/cpu.h"
#include "vmm/core/err.h"
#include "vmm/core/kvm.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define VM_STATE_VERSION 1

const char arch_name[] = "x86_64";

const struct arch_layout arch_layout = {
    .hole_start = X86_HOLE_START,
    .hole_end = X86_HOLE_END,
    .virtio_base = X86_VIRTIO_BASE,
    .virtio_stride = X86_VIRTIO_STRIDE,
    .virtio_slots = X86_VIRTIO_SLOTS,
    .virtio_gsi = x86_virtio_gsi,
    .cpus_max = X86_CPUS_MAX,
    .memory_min_bytes = 4ull << 20,
    .memory_step_bytes = 1ull << 20,
};

const struct x86_capability x86_capabilities[] = {
    {KVM_CAP_IRQCHIP, "KVM_CAP_IRQCHIP"},
    {KVM_CAP_USER_MEMORY, "KVM_CAP_USER_MEMORY"},
    {KVM_CAP_SET_TSS_ADDR, "KVM_CAP_SET_TSS_ADDR"},
    {KVM_CAP_EXT_CPUID, "KVM_CAP_EXT_CPUID"},
    {KVM_CAP_MP_STATE, "KVM_CAP_MP_STATE"},
    {KVM_CAP_ADJUST_CLOCK, "KVM_CAP_ADJUST_CLOCK"},
    {KVM_CAP_VCPU_EVENTS, "KVM_CAP_VCPU_EVENTS"},
    {KVM_CAP_DEBUGREGS, "KVM_CAP_DEBUGREGS"},
    {KVM_CAP_XSAVE, "KVM_CAP_XSAVE"},
    {KVM_CAP_IMMEDIATE_EXIT, "KVM_CAP_IMMEDIATE_EXIT"},
    {KVM_CAP_GET_TSC_KHZ, "KVM_CAP_GET_TSC_KHZ"},
};
const unsigned x86_capability_count = ARRAY_SIZE(x86_capabilities);

int arch_check_capabilities(const struct kvm *kvm, struct err *e)
{
    for (unsigned i = 0; i < x86_capability_count; i++) {
        if (kvm_capability(kvm, x86_capabilities[i].number) <= 0)
            return err_set(e, ERR_UNSUPPORTED, 0, "this KVM lacks %s", x86_capabilities[i].name);
    }
    return 0;
}

int arch_vm_init(const struct kvm *kvm, struct err *e)
{
    /* Needed by VMX without unrestricted guest mode; must lie in the hole, clear of any slot. */
    if (ioctl(kvm->vm_fd, KVM_SET_TSS_ADDR, (unsigned long)X86_KVM_TSS_BASE) < 0)
        return err_sys(e, "KVM_SET_TSS_ADDR");
    /* Before any vCPU: KVM gives a vCPU its local APIC when it is created under a chip. */
    if (ioctl(kvm->vm_fd, KVM_CREATE_IRQCHIP, 0) < 0)
        return err_sys(e, "KVM_CREATE_IRQCHIP");
    return 0;
}

static const char *const chip_names[] = {"pic-master", "pic-slave", "ioapic"};

int arch_vm_save(const struct kvm *kvm, struct state_writer *w, struct err *e)
{
    state_begin(w, "vm");
    state_put_u32(w, "version", VM_STATE_VERSION);
    for (uint32_t i = 0; i < ARRAY_SIZE(chip_names); i++) {
        struct kvm_irqchip chip = {.chip_id = i};
        if (ioctl(kvm->vm_fd, KVM_GET_IRQCHIP, &chip) < 0)
            return err_sys(e, "KVM_GET_IRQCHIP %s", chip_names[i]);
        state_put_bytes(w, chip_names[i], &chip.chip, sizeof chip.chip);
    }
    struct kvm_clock_data clock = {0};
    if (ioctl(kvm->vm_fd, KVM_GET_CLOCK, &clock) < 0)
        return err_sys(e, "KVM_GET_CLOCK");
    state_put_u64(w, "clock-ns", clock.clock);
    state_end(w);
    return 0;
}

int arch_vm_restore(const struct kvm *kvm, const struct state_node *parent, struct err *e)
{
    struct state_node n;
    int rc = state_child(parent, "vm", &n, e);
    if (rc == 0)
        rc = state_check_version(&n, VM_STATE_VERSION, e);
    for (uint32_t i = 0; rc == 0 && i < ARRAY_SIZE(chip_names); i++) {
        struct kvm_irqchip chip = {.chip_id = i};
        rc = state_get_bytes(&n, chip_names[i], &chip.chip, sizeof chip.chip, e);
        if (rc == 0 && ioctl(kvm->vm_fd, KVM_SET_IRQCHIP, &chip) < 0)
            rc = err_sys(e, "KVM_SET_IRQCHIP %s", chip_names[i]);
    }
    struct kvm_clock_data clock = {0};
    if (rc == 0)
        rc = state_get_u64(&n, "clock-ns", (uint64_t *)&clock.clock, e);
    if (rc == 0 && ioctl(kvm->vm_fd, KVM_SET_CLOCK, &clock) < 0)
        rc = err_sys(e, "KVM_SET_CLOCK");
    return rc;
}
