/* The least a process must do with /dev/kvm; see mini_vm.h. */
#include "mini_vm.h"

#include "../guest/tick_loop.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>

enum {
    GUEST_PML4 = 0x1000,
    GUEST_PDPT = 0x2000,
    GUEST_PD = 0x3000,
    GUEST_CODE = 0x10000,
    GUEST_DIRTY = 0x200000,
    PTE_PRESENT_WRITE = 0x3,
    PTE_HUGE = 0x80,
};

__asm__(".pushsection .rodata\n"
        "tick_out_begin:\n" TICK_OUT "tick_out_end:\n"
        "tick_dirty_begin:\n" TICK_DIRTY "tick_dirty_end:\n"
        ".popsection\n");
extern const char tick_out_begin[], tick_out_end[], tick_dirty_begin[], tick_dirty_end[];

void mini_die(const char *what)
{
    fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
    exit(1);
}

double mini_now_us(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t); /* cannot fail for this clock */
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int vm_ioctl(int fd, unsigned long request, const void *arg, const char *what)
{
    int r = ioctl(fd, request, arg);
    if (r < 0)
        mini_die(what);
    return r;
}

void mini_vm_open(struct mini_vm *vm)
{
    vm->kvm_fd = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (vm->kvm_fd < 0)
        mini_die("/dev/kvm");
}

void mini_vm_create(struct mini_vm *vm, void *ram, size_t bytes, const struct mini_state *state)
{
    vm->vm_fd = vm_ioctl(vm->kvm_fd, KVM_CREATE_VM, NULL, "KVM_CREATE_VM");

    /* Memory before the interrupt chip: the chip registers its I/O ranges on KVM's buses, and a
     * slot set after it waits out the SRCU grace period those leave behind: 8 ms instead of 0.1. */
    struct kvm_userspace_memory_region slot = {.memory_size = bytes,
                                               .userspace_addr = (uintptr_t)ram};
    (void)vm_ioctl(vm->vm_fd, KVM_SET_USER_MEMORY_REGION, &slot, "KVM_SET_USER_MEMORY_REGION");
    (void)vm_ioctl(vm->vm_fd, KVM_CREATE_IRQCHIP, NULL, "KVM_CREATE_IRQCHIP");

    vm->vcpu_fd = vm_ioctl(vm->vm_fd, KVM_CREATE_VCPU, NULL, "KVM_CREATE_VCPU");
    int run_bytes = vm_ioctl(vm->kvm_fd, KVM_GET_VCPU_MMAP_SIZE, NULL, "KVM_GET_VCPU_MMAP_SIZE");
    vm->run = mmap(NULL, (size_t)run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, vm->vcpu_fd, 0);
    if (vm->run == MAP_FAILED)
        mini_die("mmap of kvm_run");

    /* CPUID first: it decides which bits the control registers may have. */
    (void)vm_ioctl(vm->vcpu_fd, KVM_SET_CPUID2, &state->cpuid, "KVM_SET_CPUID2");
    (void)vm_ioctl(vm->vcpu_fd, KVM_SET_SREGS, &state->sregs, "KVM_SET_SREGS");
    (void)vm_ioctl(vm->vcpu_fd, KVM_SET_REGS, &state->regs, "KVM_SET_REGS");
}

uint8_t mini_vm_tick(struct mini_vm *vm)
{
    for (;;) {
        if (ioctl(vm->vcpu_fd, KVM_RUN, NULL) < 0) {
            if (errno == EINTR)
                continue;
            mini_die("KVM_RUN");
        }
        if (vm->run->exit_reason == KVM_EXIT_IO && vm->run->io.port == MINI_PORT)
            return *((const uint8_t *)vm->run + vm->run->io.data_offset);
        fprintf(stderr, "floor: unexpected exit %u\n", vm->run->exit_reason);
        exit(1);
    }
}

void mini_vm_save(struct mini_vm *vm, struct mini_state *state)
{
    /* The OUT is only finished by the next entry; immediate_exit makes that entry run no more. */
    vm->run->immediate_exit = 1;
    if (ioctl(vm->vcpu_fd, KVM_RUN, NULL) == 0 || errno != EINTR)
        mini_die("KVM_RUN to finish an OUT");
    vm->run->immediate_exit = 0;
    (void)vm_ioctl(vm->vcpu_fd, KVM_GET_SREGS, &state->sregs, "KVM_GET_SREGS");
    (void)vm_ioctl(vm->vcpu_fd, KVM_GET_REGS, &state->regs, "KVM_GET_REGS");
}

static void guest_page_tables(char *ram)
{
    uint64_t *pml4 = (uint64_t *)(ram + GUEST_PML4);
    uint64_t *pdpt = (uint64_t *)(ram + GUEST_PDPT);
    uint64_t *pd = (uint64_t *)(ram + GUEST_PD);
    pml4[0] = GUEST_PDPT | PTE_PRESENT_WRITE;
    pdpt[0] = GUEST_PD | PTE_PRESENT_WRITE;
    for (uint64_t i = 0; i < 512; i++) /* the first GiB, by 2 MiB pages */
        pd[i] = (i << 21) | PTE_PRESENT_WRITE | PTE_HUGE;
}

static struct kvm_sregs guest_sregs(void)
{
    struct kvm_segment code = {
        .limit = 0xffffffff, .selector = 8, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1};
    struct kvm_segment data = {
        .limit = 0xffffffff, .selector = 16, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1};
    struct kvm_segment task = {.limit = 0x67, .selector = 24, .type = 11, .present = 1};
    struct kvm_segment none = {.unusable = 1, .type = 2};
    return (struct kvm_sregs){
        .cs = code,
        .ds = data,
        .es = data,
        .fs = data,
        .gs = data,
        .ss = data,
        .tr = task,
        .ldt = none,
        .cr0 = 0x80050033, /* PG AM WP NE ET MP PE */
        .cr3 = GUEST_PML4,
        .cr4 = 0x20,             /* PAE */
        .efer = 0x500,           /* LMA LME */
        .apic_base = 0xfee00900, /* enabled, boot processor */
    };
}

void mini_guest_build(const struct mini_vm *vm, void *ram, size_t bytes, size_t dirty_bytes,
                      struct mini_state *state)
{
    if (bytes < GUEST_DIRTY + dirty_bytes || bytes > (1UL << 30)) {
        errno = EINVAL;
        mini_die("guest memory must hold what is dirtied, above 2 MiB and up to 1 GiB");
    }
    const char *code = dirty_bytes ? tick_dirty_begin : tick_out_begin;
    const char *end = dirty_bytes ? tick_dirty_end : tick_out_end;
    guest_page_tables(ram);
    memcpy((char *)ram + GUEST_CODE, code, (size_t)(end - code));

    *state = (struct mini_state){
        .ram_bytes = bytes,
        .sregs = guest_sregs(),
        .regs = {.rip = GUEST_CODE,
                 .rflags = 2,
                 .rdx = MINI_PORT,
                 .rax = 't',
                 .rdi = GUEST_DIRTY,
                 .rbx = GUEST_DIRTY,
                 .rcx = GUEST_DIRTY + dirty_bytes},
        .cpuid = {.nent = MINI_CPUID_MAX},
    };
    (void)vm_ioctl(vm->kvm_fd, KVM_GET_SUPPORTED_CPUID, &state->cpuid, "KVM_GET_SUPPORTED_CPUID");
}
