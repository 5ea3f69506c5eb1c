/*
 * The jail: what is in the table works, what is not ends the process by SIGSYS after a line that
 * names the call; no capability is left. Each case runs in a process of its own, because there is
 * no way back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "vmm/core/err.h"
#include "vmm/jail.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FILTER_IS_ON false /* jail.c says why */
#else
#define FILTER_IS_ON true
#endif

/* Runs `act` jailed in a child; returns its wait status and what it wrote to stderr. */
static int run_jailed(int (*act)(void), char *text, size_t len)
{
    int pair[2];
    assert_int_equal(pipe(pair), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct err e = {0};
        (void)dup2(pair[1], STDERR_FILENO);
        _exit(jail_enter(&e) == 0 ? act() : 99);
    }
    (void)close(pair[1]);
    ssize_t n = 0;
    for (ssize_t got; (got = read(pair[0], text + n, len - 1 - (size_t)n)) > 0;)
        n += got;
    text[n] = '\0';
    (void)close(pair[0]);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static int make_a_mount(void)
{
    return (int)syscall(SYS_mount, "none", "/", "tmpfs", 0, NULL) == 0 ? 0 : 1;
}

static int ask_the_terminal(void)
{
    return ioctl(STDERR_FILENO, TIOCSTI, "x") == 0 ? 0 : 1;
}

static int allowed_calls(void)
{
    /* On the wrong descriptor: the filter lets the request through, the kernel refuses it. */
    bool passed = ioctl(STDERR_FILENO, KVM_RUN, 0) < 0;
    return passed && getpid() > 0 ? 0 : 1;
}

/* capget(2) is not in the table; what the kernel says of us in /proc is the same. */
static int has_no_capability(void)
{
    static const char *const sets[] = {"CapInh:\t", "CapPrm:\t", "CapEff:\t"};
    char text[8192];
    int fd = open("/proc/self/status", O_RDONLY);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (n <= 0)
        return 2;
    text[n] = '\0';
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        const char *at = strstr(text, sets[i]);
        if (at == NULL || strncmp(at + strlen(sets[i]), "0000000000000000\n", 17) != 0)
            return 1;
    }
    return strstr(text, "NoNewPrivs:\t1\n") != NULL ? 0 : 3;
}

static void expect_refused(int (*act)(void), const char *name)
{
    char text[1024];
    if (!FILTER_IS_ON)
        skip();
    int status = run_jailed(act, text, sizeof text);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS);
    assert_non_null(strstr(text, name));
    assert_non_null(strstr(text, "is not in the filter"));
}

static void a_call_outside_the_table_is_named_and_ends_the_process(void **s)
{
    expect_refused(make_a_mount, "system call mount");
}

static void an_ioctl_outside_the_table_ends_the_process(void **s)
{
    expect_refused(ask_the_terminal, "system call ioctl");
}

static void calls_of_the_table_go_through(void **s)
{
    char text[1024];
    int status = run_jailed(allowed_calls, text, sizeof text);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void capabilities_are_gone_for_good(void **s)
{
    char text[1024];
    int status = run_jailed(has_no_capability, text, sizeof text);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_outside_the_table_is_named_and_ends_the_process),
        cmocka_unit_test(an_ioctl_outside_the_table_ends_the_process),
        cmocka_unit_test(calls_of_the_table_go_through),
        cmocka_unit_test(capabilities_are_gone_for_good),
    };
    return cmocka_run_group_tests_name("jail", tests, NULL, NULL);
}
