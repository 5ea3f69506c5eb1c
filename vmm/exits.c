/*
 * exits: what a vCPU came out of the guest for. Runs on the loop thread while that vCPU's thread
 * waits; its kvm_run is ours until vcpu_exit_done. An exit that ends the machine is never answered:
 * the vCPU stays where it is until the machine is freed.
 */
#include <errno.h>
#include <linux/kvm.h>
#include <string.h>

#include "vmm/arch/arch.h"
#include "vmm/core/bus.h"
#include "vmm/machine.h"

static void handle_mmio(struct machine *m, struct kvm_run *run)
{
    if (run->mmio.is_write)
        (void)bus_write(&m->mmio, run->mmio.phys_addr, run->mmio.data, run->mmio.len);
    else
        (void)bus_read(&m->mmio, run->mmio.phys_addr, run->mmio.data, run->mmio.len);
}

static void end_with_place(struct machine *m, struct vcpu *v, enum end_reason why, const char *what)
{
    char place[160];
    arch_describe_stop(v, place, sizeof place);
    machine_end(m, why, "%s, %s", what, place);
}

/* True if the vCPU may go on. */
static bool handle(struct machine *m, struct vcpu *v)
{
    struct kvm_run *run = v->run;
    if (v->run_errno != 0) {
        machine_end(m, END_INTERNAL, "KVM_RUN of vcpu %u: %s", v->index, strerror(v->run_errno));
        return false;
    }
    switch (run->exit_reason) {
    case KVM_EXIT_MMIO:
        handle_mmio(m, run);
        return m->end == END_NONE;
    case KVM_EXIT_IO:
        vcpu_access_ports(&m->pio, run);
        return m->end == END_NONE;
    case KVM_EXIT_INTR:
        return true;
    case KVM_EXIT_SHUTDOWN:
        end_with_place(m, v, END_TRIPLE_FAULT, "triple fault");
        return false;
    case KVM_EXIT_SYSTEM_EVENT:
        machine_end(m,
                    run->system_event.type == KVM_SYSTEM_EVENT_SHUTDOWN ? END_POWEROFF : END_REBOOT,
                    "system event %u", run->system_event.type);
        return false;
    case KVM_EXIT_INTERNAL_ERROR:
        if (run->internal.suberror == KVM_INTERNAL_ERROR_EMULATION) {
            end_with_place(m, v, END_EMULATION, "KVM cannot emulate an instruction");
        } else {
            machine_end(m, END_INTERNAL, "KVM internal error %u on vcpu %u", run->internal.suberror,
                        v->index);
        }
        return false;
    case KVM_EXIT_FAIL_ENTRY:
        machine_end(m, END_INTERNAL, "KVM refused to enter vcpu %u: hardware reason 0x%llx",
                    v->index, (unsigned long long)run->fail_entry.hardware_entry_failure_reason);
        return false;
    default:
        machine_end(m, END_INTERNAL, "unexpected KVM exit %u on vcpu %u", run->exit_reason,
                    v->index);
        return false;
    }
}

void machine_service_exits(struct machine *m)
{
    for (unsigned i = 0; i < m->slot_count; i++)
        virtio_mmio_run_notifications(&m->slots[i]);
    for (unsigned i = 0; i < m->vcpu_count; i++) {
        struct vcpu *v = &m->vcpus[i];
        /* Acquire pairs with the release in the vCPU thread: its kvm_run is visible. */
        if (!atomic_load_explicit(&v->exit_pending, memory_order_acquire) || m->end != END_NONE)
            continue;
        if (handle(m, v))
            vcpu_exit_done(v);
    }
}
