/*
 * x86 probe: see vmm/arch/probe.h.
 *
 * The machine: one 2 MiB page of memory, mapped one to one, 64-bit mode at CPL 0, no interrupt
 * chip. Each probed instruction is followed by a report on a port; every exception reports its
 * vector. An instruction the KVM cannot carry out shows as an internal error exit (suberror 1), as
 * a wrong report, or as a guest that comes back with nothing at all, which an alarm ends.
 */
#include "vmm/arch/probe.h"

#include <errno.h>
#include <linux/kvm.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include "vmm/arch/x86_64/cpu.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/kvm.h"
#include "vmm/core/num.h"

#define MEMORY_BYTES 0x200000u
#define PML4 0x1000u
#define PDPT 0x2000u
#define PD 0x3000u
#define GDT 0x4000u
#define IDT 0x5000u
#define HANDLERS 0x6000u
#define HANDLER_BYTES 8u
#define CODE 0x8000u
#define STACK 0x10000u
#define PORT 0x10u
#define DONE 0xddu /* reported when the instruction was executed; vectors report themselves */
#define VECTORS 32u
#define ALARM_S 2
#define CPUID_ENTRIES 256u
#define CPUID_1_ECX_POPCNT (1u << 23)
#define CPUID_1_ECX_XSAVE (1u << 26)

/* Stock kernels execute all of these before they reach init. */
static const struct instruction {
    const char *name;
    uint8_t bytes[8];
    uint8_t length;
    uint8_t expected;               /* report of a CPU that has it */
    uint32_t cpuid_leaf, cpuid_ecx; /* needed bit of CPUID.leaf:ECX; leaf 0: always there */
} instructions[] = {
    {"int3", {0xcc}, 1, 3, 0, 0},
    {"popcnt", {0xf3, 0x48, 0x0f, 0xb8, 0xc0}, 5, DONE, 1, CPUID_1_ECX_POPCNT},
    {"xgetbv", {0x0f, 0x01, 0xd0}, 3, DONE, 1, CPUID_1_ECX_XSAVE},
};

struct tiny {
    int cpu_fd;
    uint8_t *memory;
    struct kvm_run *run;
    size_t run_bytes;
    struct kvm_cpuid2 *cpuid;
};

static void tiny_free(struct tiny *t)
{
    if (t->run != NULL)
        (void)munmap(t->run, t->run_bytes);
    fd_close(&t->cpu_fd);
    if (t->memory != NULL)
        (void)munmap(t->memory, MEMORY_BYTES);
    free(t->cpuid);
}

static void fill_memory(uint8_t *m)
{
    le64_put(m + PML4, PDPT | 3); /* present, writable */
    le64_put(m + PDPT, PD | 3);
    le64_put(m + PD, 0 | 0x83); /* a 2 MiB page at 0 */
    le64_put(m + GDT + 8, 0x00af9b000000ffffull);
    le64_put(m + GDT + 16, 0x00cf93000000ffffull);
    for (uint32_t v = 0; v < VECTORS; v++) {
        uint32_t at = HANDLERS + v * HANDLER_BYTES;
        le64_put(m + IDT + 16 * v, (uint64_t)at | 8u << 16 | 0x8e00ull << 32);
        const uint8_t handler[HANDLER_BYTES] = {0xb0, (uint8_t)v, 0xe6, PORT, 0xf4};
        memcpy(m + at, handler, sizeof handler);
    }
}

static int make_vcpu(struct tiny *t, const struct kvm *kvm, struct err *e)
{
    t->cpu_fd = ioctl(kvm->vm_fd, KVM_CREATE_VCPU, 0);
    if (t->cpu_fd < 0)
        return err_sys(e, "KVM_CREATE_VCPU");
    t->cpuid = calloc(1, sizeof *t->cpuid + CPUID_ENTRIES * sizeof(struct kvm_cpuid_entry2));
    if (t->cpuid == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "CPUID table");
    t->cpuid->nent = CPUID_ENTRIES;
    if (ioctl(kvm->dev_fd, KVM_GET_SUPPORTED_CPUID, t->cpuid) < 0)
        return err_sys(e, "KVM_GET_SUPPORTED_CPUID");
    if (ioctl(t->cpu_fd, KVM_SET_CPUID2, t->cpuid) < 0)
        return err_sys(e, "KVM_SET_CPUID2");
    void *run = mmap(NULL, kvm->run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, t->cpu_fd, 0);
    if (run == MAP_FAILED)
        return err_sys(e, "mmap of kvm_run");
    t->run = run;
    t->run_bytes = kvm->run_bytes;
    return 0;
}

static int make_tiny(struct tiny *t, struct kvm *kvm, struct err *e)
{
    *t = (struct tiny){.cpu_fd = -1};
    int rc = kvm_create_vm(kvm, e);
    if (rc < 0)
        return rc;
    void *memory =
        mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return err_sys(e, "mmap of guest memory");
    t->memory = memory;
    fill_memory(t->memory);
    struct kvm_userspace_memory_region slot = {.memory_size = MEMORY_BYTES,
                                               .userspace_addr = (uint64_t)(uintptr_t)memory};
    if (ioctl(kvm->vm_fd, KVM_SET_USER_MEMORY_REGION, &slot) < 0)
        return err_sys(e, "KVM_SET_USER_MEMORY_REGION");
    return make_vcpu(t, kvm, e);
}

static bool has_feature(const struct tiny *t, const struct instruction *in)
{
    if (in->cpuid_leaf == 0)
        return true;
    for (uint32_t i = 0; i < t->cpuid->nent; i++) {
        if (t->cpuid->entries[i].function == in->cpuid_leaf)
            return (t->cpuid->entries[i].ecx & in->cpuid_ecx) != 0;
    }
    return false;
}

static void segment(struct kvm_segment *s, uint16_t selector, uint8_t type, bool code)
{
    *s = (struct kvm_segment){.limit = 0xffffffff,
                              .selector = selector,
                              .type = type,
                              .present = 1,
                              .s = 1,
                              .g = 1,
                              .l = code,
                              .db = !code};
}

/* 64-bit mode, CPL 0, at the code. */
static int set_registers(struct tiny *t, bool osxsave, struct err *e)
{
    struct kvm_sregs s;
    if (ioctl(t->cpu_fd, KVM_GET_SREGS, &s) < 0)
        return err_sys(e, "KVM_GET_SREGS");
    segment(&s.cs, 0x08, 11, true);
    segment(&s.ds, 0x10, 3, false);
    s.es = s.fs = s.gs = s.ss = s.ds;
    s.gdt = (struct kvm_dtable){.base = GDT, .limit = 23};
    s.idt = (struct kvm_dtable){.base = IDT, .limit = 16 * VECTORS - 1};
    s.cr3 = PML4;
    s.cr4 = 1u << 5 | (osxsave ? 1u << 18 : 0); /* PAE, OSXSAVE */
    s.efer = 1u << 8 | 1u << 10;                /* LME, LMA */
    s.cr0 = 0x80000033;                         /* PG, NE, ET, MP, PE */
    if (ioctl(t->cpu_fd, KVM_SET_SREGS, &s) < 0)
        return err_sys(e, "KVM_SET_SREGS");
    struct kvm_regs r = {.rip = CODE, .rsp = STACK, .rflags = 2};
    if (ioctl(t->cpu_fd, KVM_SET_REGS, &r) < 0)
        return err_sys(e, "KVM_SET_REGS");
    return 0;
}

static void on_alarm(int sig)
{
    /* Being delivered is all it is for: KVM_RUN comes back with EINTR. */
}

/* In seconds of our own CPU time: on a busy host the wall clock would condemn a sound KVM. */
static void set_alarm(time_t seconds)
{
    const struct itimerval t = {.it_value.tv_sec = seconds};
    (void)setitimer(ITIMER_PROF, &t, NULL); /* a valid timer and value: cannot fail */
}

enum { REPORT_NOTHING = -1, REPORT_NOT_EMULATED = -2 };

/* What the guest reported, or one of the above. */
static int run_once(struct tiny *t)
{
    int report = REPORT_NOTHING;
    struct sigaction old, sa = {.sa_handler = on_alarm};
    (void)sigaction(SIGPROF, &sa, &old); /* a valid signal: cannot fail */
    set_alarm(ALARM_S);
    const struct kvm_run *run = t->run;
    if (ioctl(t->cpu_fd, KVM_RUN, 0) == 0) {
        if (run->exit_reason == KVM_EXIT_IO && run->io.direction == KVM_EXIT_IO_OUT &&
            run->io.port == PORT && run->io.size == 1 && run->io.data_offset < t->run_bytes)
            report = *((const uint8_t *)run + run->io.data_offset);
        else if (run->exit_reason == KVM_EXIT_INTERNAL_ERROR)
            report = REPORT_NOT_EMULATED;
    }
    set_alarm(0);
    (void)sigaction(SIGPROF, &old, NULL); /* same */
    return report;
}

static int try_instruction(struct kvm *kvm, const struct instruction *in, bool *lacks,
                           struct err *e)
{
    struct tiny t;
    int rc = make_tiny(&t, kvm, e);
    if (rc == 0) {
        bool present = has_feature(&t, in);
        /* Without XSAVE, CR4.OSXSAVE cannot be set and XGETBV is an honest #UD. */
        rc = set_registers(&t, present && in->cpuid_ecx == CPUID_1_ECX_XSAVE, e);
        memcpy(t.memory + CODE, in->bytes, in->length);
        const uint8_t done[] = {0xb0, DONE, 0xe6, PORT, 0xf4}; /* mov al; out; hlt */
        memcpy(t.memory + CODE + in->length, done, sizeof done);
        int report = rc == 0 ? run_once(&t) : REPORT_NOTHING;
        *lacks = report == REPORT_NOT_EMULATED || (present && report != in->expected);
    }
    tiny_free(&t);
    kvm_close_vm(kvm);
    return rc < 0 ? err_wrap(e, rc, "probe of %s", in->name) : 0;
}

int arch_probe(struct kvm *kvm, struct arch_probe *out, struct err *e)
{
    size_t missing = 0, lacks = 0;
    *out = (struct arch_probe){0};
    for (unsigned i = 0; i < x86_capability_count; i++) {
        if (kvm_capability(kvm, x86_capabilities[i].number) == 0)
            out->missing[missing++] = x86_capabilities[i].name;
    }
    if (missing > 0)
        return err_set(e, ERR_UNSUPPORTED, 0, "this KVM lacks %s", out->missing[0]);
    for (size_t i = 0; i < ARRAY_SIZE(instructions); i++) {
        bool lacking = 0;
        int rc = try_instruction(kvm, &instructions[i], &lacking, e);
        if (rc < 0)
            return rc;
        if (lacking)
            out->lacks[lacks++] = instructions[i].name;
    }
    out->kernel_mode_is_native = lacks == 0;
    return 0;
}
