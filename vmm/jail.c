/*
 * jail: see jail.h. Main thread, before any other exists.
 */
#include "vmm/jail.h"

#include <errno.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "jail_program.h" /* made at build time by jail_filter.c */
#include "vmm/core/err.h"
#include "vmm/core/num.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define JAIL_FILTERS false /* the sanitizer's run-time makes calls of its own */
#else
#define JAIL_FILTERS true
#endif

/* Runs on the thread that made the refused call. Only async-signal-safe calls. */
static void on_refused(int sig, siginfo_t *info, void *context)
{
    int call = info->si_syscall;
    const char *name =
        call >= 0 && (size_t)call < ARRAY_SIZE(jail_call_names) ? jail_call_names[call] : NULL;
    char line[128];
    int n =
        snprintf(line, sizeof line, "tine-vmm: error: system call %s (%d) is not in the filter\n",
                 name != NULL ? name : "unknown", call);
    if (n > 0)
        (void)!write(STDERR_FILENO, line,
                     (size_t)n); /* the process ends whether it is seen or not */
    (void)tgkill(getpid(), gettid(), SIGSYS);
    _exit(128 + SIGSYS);
}

void jail_close_inherited(int keep)
{
    if (keep > 2) {
        if (keep > 3)
            (void)close_range(3, (unsigned)keep - 1, 0); /* Linux 5.9; without it they stay open */
        (void)close_range((unsigned)keep + 1, ~0u, 0);
    } else {
        (void)close_range(3, ~0u, 0);
    }
}

static int drop_capabilities(struct err *e)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};
    if (syscall(SYS_capset, &head, none) < 0)
        return err_sys(e, "drop capabilities");
    return 0;
}

int jail_enter(struct err *e)
{
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return err_sys(e, "PR_SET_NO_NEW_PRIVS");
    int rc = drop_capabilities(e);
    if (rc < 0 || !JAIL_FILTERS)
        return rc;
    /* Once, and not blocked inside its handler: raised again there, it ends the process. */
    struct sigaction sa = {.sa_sigaction = on_refused,
                           .sa_flags = SA_SIGINFO | SA_RESETHAND | SA_NODEFER};
    if (sigaction(SIGSYS, &sa, NULL) < 0)
        return err_sys(e, "sigaction of SIGSYS");
    struct sock_fprog program = {.len = (unsigned short)ARRAY_SIZE(jail_program),
                                 .filter = (struct sock_filter *)(uintptr_t)jail_program};
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0)
        return err_sys(e, "install the system call filter of %zu steps", ARRAY_SIZE(jail_program));
    return 0;
}
