/*
 * jail_filter: build-time program. Turns jail_table.h into a BPF program with libseccomp and prints
 * it as a C header, together with the names of all system calls (for the line that names a refused
 * one). At run time the filter then costs two system calls instead of building it in every process.
 */
#include <linux/kvm.h>
#include <seccomp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define SYSCALL_NUMBERS 470

static void check(int rc, const char *what)
{
    if (rc < 0) {
        (void)fprintf(stderr, "jail_filter: %s: error %d\n", what, -rc);
        exit(1);
    }
}

static void fill(scmp_filter_ctx ctx)
{
#define CALL(name, reason) check(seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(name), 0), #name);
#define IOCTL(request, reason)                                                                     \
    check(seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(ioctl), 1,                                \
                           SCMP_A1_32(SCMP_CMP_EQ, (uint32_t)(request))),                          \
          #request);
#include "vmm/jail_table.h"
#undef CALL
#undef IOCTL
}

static void print_program(scmp_filter_ctx ctx)
{
    char path[] = "/tmp/jail-filter-XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0) {
        perror("jail_filter: temporary file");
        exit(1);
    }
    (void)unlink(path);
    check(seccomp_export_bpf(ctx, fd), "seccomp_export_bpf");
    (void)lseek(fd, 0, SEEK_SET);
    struct {
        uint16_t code;
        uint8_t jt, jf;
        uint32_t k;
    } one;
    (void)printf("static const struct sock_filter jail_program[] = {\n");
    while (read(fd, &one, sizeof one) == (ssize_t)sizeof one)
        (void)printf("    {0x%x, %u, %u, 0x%x},\n", one.code, one.jt, one.jf, one.k);
    (void)printf("};\n");
    (void)close(fd);
}

static void print_names(void)
{
    (void)printf("static const char *const jail_call_names[%d] = {\n", SYSCALL_NUMBERS);
    for (int i = 0; i < SYSCALL_NUMBERS; i++) {
        char *name = seccomp_syscall_resolve_num_arch(SCMP_ARCH_NATIVE, i);
        if (name != NULL)
            (void)printf("    [%d] = \"%s\",\n", i, name);
        free(name);
    }
    (void)printf("};\n");
}

int main(void)
{
    /* TRAP, not KILL: the handler says which call it was, then the process ends by SIGSYS. */
    scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_TRAP);
    if (ctx == NULL)
        return 1;
    check(seccomp_attr_set(ctx, SCMP_FLTATR_CTL_OPTIMIZE, 2), "binary tree");
    fill(ctx);
    (void)printf("/* Made from vmm/jail_table.h by jail_filter; do not edit. */\n");
    print_program(ctx);
    print_names();
    seccomp_release(ctx);
    return 0;
}
