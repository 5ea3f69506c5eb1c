/*
 * cpu: a fresh x86 vCPU (CPUID, entry registers), and what can be said of a stopped one.
 * Loop thread, vCPU parked or waiting for its exit to be answered.
 */
#include <errno.h>
#include <linux/kvm.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "vmm/arch/arch.h"
#include "vmm/arch/x86_64/boot.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/arch/x86_64/cpu.h"
#include "vmm/core/err.h"
#include "vmm/core/kvm.h"
#include "vmm/core/vcpu.h"

#define CPUID_1_ECX_TSC_DEADLINE (1u << 24)
#define CPUID_1_ECX_HYPERVISOR (1u << 31)
#define CR0_PE (1ull << 0)
#define CR0_ET (1ull << 4)
#define CR0_NE (1ull << 5)
#define CR0_WP (1ull << 16)
#define CR0_PG (1ull << 31)
#define CR4_PAE (1ull << 5)
#define EFER_LME (1ull << 8)
#define EFER_LMA (1ull << 10)
#define RFLAGS_IF (1ull << 9)
#define MSR_MTRR_DEF_TYPE 0x2ffu
#define MTRR_ENABLED_WRITE_BACK ((1u << 11) | 6u) /* Intel SDM vol. 3, 12.11.2.1 */

struct kvm_cpuid2 *x86_cpuid_new(void)
{
    struct kvm_cpuid2 *c = calloc(1, X86_CPUID_BYTES(X86_CPUID_ENTRIES_MAX));
    if (c != NULL)
        c->nent = X86_CPUID_ENTRIES_MAX;
    return c;
}

/* What every CPU of the VM shows alike is KVM's; these fields differ per CPU or are ours to say. */
static void adapt_cpuid(struct kvm_cpuid2 *c, const struct kvm *kvm, uint32_t index, unsigned cpus)
{
    bool deadline = kvm_capability(kvm, KVM_CAP_TSC_DEADLINE_TIMER) > 0;
    for (uint32_t i = 0; i < c->nent; i++) {
        struct kvm_cpuid_entry2 *x = &c->entries[i];
        if (x->function == 1) {
            x->ecx |= CPUID_1_ECX_HYPERVISOR | (deadline ? CPUID_1_ECX_TSC_DEADLINE : 0);
            x->ebx = (x->ebx & 0x0000ffffu) | (index << 24) | (cpus << 16);
        } else if (x->function == 0xb || x->function == 0x1f) {
            x->edx = index; /* x2APIC id */
        }
    }
}

int arch_vcpu_reset(const struct kvm *kvm, struct vcpu *v, unsigned cpus, struct err *e)
{
    struct kvm_cpuid2 *c = x86_cpuid_new();
    if (c == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "CPUID table");
    int rc = 0;
    if (ioctl(kvm->dev_fd, KVM_GET_SUPPORTED_CPUID, c) < 0) {
        rc = err_sys(e, "KVM_GET_SUPPORTED_CPUID");
    } else {
        adapt_cpuid(c, kvm, v->index, cpus);
        if (ioctl(v->fd, KVM_SET_CPUID2, c) < 0)
            rc = err_sys(e, "KVM_SET_CPUID2 of vcpu %u", v->index);
    }
    free(c);
    struct {
        struct kvm_msrs head;
        struct kvm_msr_entry entry;
    } mtrr = {{.nmsrs = 1}, {.index = MSR_MTRR_DEF_TYPE, .data = MTRR_ENABLED_WRITE_BACK}};
    if (rc == 0)
        (void)ioctl(v->fd, KVM_SET_MSRS,
                    &mtrr); /* a KVM without MTRRs: memory is write-back then */
    return rc;
}

static struct kvm_segment flat_segment(uint16_t selector, uint8_t type, bool code)
{
    return (struct kvm_segment){
        .base = 0,
        .limit = 0xffffffffu,
        .selector = selector,
        .type = type,
        .present = 1,
        .s = 1,
        .l = code ? 1 : 0,
        .db = code ? 0 : 1,
        .g = 1,
    };
}

int arch_vcpu_enter(struct vcpu *v, const struct boot_entry *at, struct err *e)
{
    struct kvm_sregs s;
    if (ioctl(v->fd, KVM_GET_SREGS, &s) < 0)
        return err_sys(e, "KVM_GET_SREGS of vcpu %u", v->index);
    s.cs = flat_segment(at->cs, 0xb, true);
    s.ds = s.es = s.fs = s.gs = s.ss = flat_segment(at->ds, 0x3, false);
    s.tr = (struct kvm_segment){
        .base = BOOT_TSS, .limit = 0x67, .selector = at->tss, .type = 0xb, .present = 1};
    s.gdt.base = at->gdt_base;
    s.gdt.limit = at->gdt_limit;
    s.idt.base = 0;
    s.idt.limit = 0;
    s.cr0 = CR0_PE | CR0_ET | CR0_NE | CR0_WP | CR0_PG;
    s.cr3 = at->cr3;
    s.cr4 = CR4_PAE;
    s.efer = EFER_LME | EFER_LMA;
    if (ioctl(v->fd, KVM_SET_SREGS, &s) < 0)
        return err_sys(e, "KVM_SET_SREGS of vcpu %u", v->index);
    struct kvm_regs r = {.rip = at->rip, .rsi = at->rsi, .rsp = at->rsi, .rflags = 2};
    if (ioctl(v->fd, KVM_SET_REGS, &r) < 0)
        return err_sys(e, "KVM_SET_REGS of vcpu %u", v->index);
    return 0;
}

int arch_load_kernel(const struct ram *ram, const struct boot_spec *spec, struct boot_entry *out,
                     struct err *e)
{
    return boot_load(ram, spec, out, e);
}

void arch_describe_stop(struct vcpu *v, char *text, size_t len)
{
    struct kvm_regs r = {0};
    if (ioctl(v->fd, KVM_GET_REGS, &r) < 0) {
        (void)snprintf(text, len, "vcpu %u, registers unreadable", v->index);
        return;
    }
    int n = snprintf(text, len, "vcpu %u at rip 0x%llx", v->index, (unsigned long long)r.rip);
    const struct kvm_run *run = v->run;
    if (n < 0 || run->exit_reason != KVM_EXIT_INTERNAL_ERROR ||
        run->internal.suberror != KVM_INTERNAL_ERROR_EMULATION)
        return;
    if (run->emulation_failure.ndata < 1 ||
        !(run->emulation_failure.flags & KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES))
        return;
    unsigned size = run->emulation_failure.insn_size;
    for (unsigned i = 0; i < size && i < sizeof run->emulation_failure.insn_bytes; i++) {
        if ((size_t)n >= len)
            return;
        n += snprintf(text + n, len - (size_t)n, "%s%02x", i == 0 ? ", bytes " : " ",
                      run->emulation_failure.insn_bytes[i]);
    }
}

bool arch_vcpu_is_halted(struct vcpu *v)
{
    struct kvm_mp_state mp = {0};
    struct kvm_regs r = {0};
    if (ioctl(v->fd, KVM_GET_MP_STATE, &mp) < 0 || ioctl(v->fd, KVM_GET_REGS, &r) < 0)
        return false;
    return mp.mp_state == KVM_MP_STATE_HALTED && (r.rflags & RFLAGS_IF) == 0;
}
