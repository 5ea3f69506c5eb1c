/* The smallest proof that a KVM runs guest code: makes a machine of one page, runs a few real-mode
 * instructions and checks what they computed. The nested tests run it first, so that a broken
 * machine around them is told apart from a broken tine. It shares no code with tine on purpose. */
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CODE_GPA = 0x1000, PAGE_BYTES = 0x1000, RESULT_PORT = 0x10 };

/* mov dx,RESULT_PORT; add ax,bx; out dx,al; mov [CODE_GPA + 0x800],al; hlt */
static const uint8_t code[] = {0xba, RESULT_PORT, 0x00, 0x01, 0xd8, 0xee, 0xa2, 0x00, 0x18, 0xf4};

static int die(const char *what)
{
    printf("probe: %s: %s\n", what, strerror(errno));
    return 1;
}

static int vcpu_prepare(int vcpu)
{
    struct kvm_sregs sregs;
    struct kvm_regs regs = {.rip = CODE_GPA, .rax = 2, .rbx = 40, .rflags = 2};

    if (ioctl(vcpu, KVM_GET_SREGS, &sregs) < 0)
        return die("KVM_GET_SREGS");
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    if (ioctl(vcpu, KVM_SET_SREGS, &sregs) < 0)
        return die("KVM_SET_SREGS");
    if (ioctl(vcpu, KVM_SET_REGS, &regs) < 0)
        return die("KVM_SET_REGS");
    return 0;
}

/* Runs until the halt; returns 0 if the guest sent and stored 42. */
static int vcpu_check(int vcpu, struct kvm_run *run, const uint8_t *page)
{
    int sent = -1;

    for (;;) {
        if (ioctl(vcpu, KVM_RUN, 0) < 0)
            return die("KVM_RUN");
        if (run->exit_reason == KVM_EXIT_HLT)
            break;
        if (run->exit_reason != KVM_EXIT_IO || run->io.port != RESULT_PORT) {
            printf("probe: exit reason %u is not expected\n", run->exit_reason);
            return 1;
        }
        sent = *((const uint8_t *)run + run->io.data_offset);
    }
    if (sent != 42 || page[0x800] != 42) {
        printf("probe: the guest sent %d and stored %d, expected 42\n", sent, page[0x800]);
        return 1;
    }
    return 0;
}

int main(void)
{
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);

    if (kvm < 0)
        return die("/dev/kvm");
    int vm = ioctl(kvm, KVM_CREATE_VM, 0);
    if (vm < 0)
        return die("KVM_CREATE_VM");
    uint8_t *page =
        mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return die("mmap");
    memcpy(page, code, sizeof(code));
    struct kvm_userspace_memory_region slot = {
        .guest_phys_addr = CODE_GPA, .memory_size = PAGE_BYTES, .userspace_addr = (uintptr_t)page};
    if (ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot) < 0)
        return die("KVM_SET_USER_MEMORY_REGION");
    int vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    if (vcpu < 0)
        return die("KVM_CREATE_VCPU");
    int run_bytes = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    if (run_bytes < (int)sizeof(struct kvm_run))
        return die("KVM_GET_VCPU_MMAP_SIZE");
    struct kvm_run *run =
        mmap(NULL, (size_t)run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    if (run == MAP_FAILED)
        return die("mmap of kvm_run");
    if (vcpu_prepare(vcpu) || vcpu_check(vcpu, run, page))
        return 1;
    printf("probe: the guest computed 42\n");
    return 0;
}
