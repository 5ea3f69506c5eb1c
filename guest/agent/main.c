/*
 * main: start and the one loop of tine-agent (docs/agent-protocol.md).
 *
 * As PID 1 it sets the guest up and never returns. With --listen-unix it is an ordinary process
 * that serves the same protocol on Unix sockets, for tests. Invariant of the loop: nothing in it
 * blocks, and the control connection is served before any other, because a copy waits for it.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/vm_sockets.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define LOOP_EVENTS 64

static struct agent the_agent;

static size_t format_uint(char *end, unsigned v)
{
    size_t n = 0;
    do {
        *--end = (char)('0' + v % 10);
        n++;
    } while ((v /= 10) != 0);
    return n;
}

void say(const char *what, const char *detail, int error)
{
    char digits[16];
    struct iovec v[8];
    int n = 0;
#define PUT(s, l) (v[n++] = (struct iovec){(void *)(uintptr_t)(s), (l)})
    PUT("tine-agent: ", 12);
    PUT(what, strlen(what));
    if (detail != NULL) {
        PUT(": ", 2);
        PUT(detail, strlen(detail));
    }
    if (error != 0) {
        size_t len = format_uint(digits + sizeof digits, (unsigned)error);
        PUT(": errno ", 8);
        PUT(digits + sizeof digits - len, len);
    }
    PUT("\n", 1);
#undef PUT
    (void)!writev(2, v, n); /* nowhere to report that reporting failed */
}

uint64_t clock_now_ns(void)
{
    struct timespec ts;
    (void)clock_gettime(CLOCK_MONOTONIC, &ts); /* cannot fail with this clock */
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int loop_watch(struct agent *a, int op, int fd, uint32_t events, enum source source,
               const struct exec *x)
{
    uint64_t slot = x != NULL ? (uint64_t)(x - a->exec) : 0;
    uint64_t serial = x != NULL ? x->serial : 0;
    struct epoll_event ev = {.events = events,
                             .data.u64 = serial << 32 | slot << 8 | (uint64_t)source};
    return epoll_ctl(a->epoll_fd, op, fd, &ev) < 0 ? -errno : 0;
}

static int listen_vsock(void)
{
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    struct sockaddr_vm addr = {
        .svm_family = AF_VSOCK, .svm_port = WIRE_VSOCK_EXEC_PORT, .svm_cid = VMADDR_CID_ANY};
    if (bind(fd, (struct sockaddr *)&addr, sizeof addr) == 0 && listen(fd, EXEC_MAX) == 0)
        return fd;
    int rc = -errno;
    close(fd);
    return rc;
}

static int listen_unix(const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    size_t len = strlen(path);
    if (len >= sizeof addr.sun_path)
        return -ENAMETOOLONG;
    memcpy(addr.sun_path, path, len);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (bind(fd, (struct sockaddr *)&addr, sizeof addr) == 0 && listen(fd, EXEC_MAX) == 0)
        return fd;
    int rc = -errno;
    close(fd);
    return rc;
}

/* Blocks all signals; those we act on come by a signalfd. */
static int signals_open(struct agent *a)
{
    sigset_t all, ours;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    /* An ignored SIGCHLD or SIGPIPE would be inherited by programs; PID 1 starts with defaults. */
    if (!a->is_guest)
        for (int n = 1; n <= (int)WIRE_SIGNAL_MAX; n++)
            (void)signal(n, SIG_DFL);
    sigemptyset(&ours);
    sigaddset(&ours, SIGCHLD);
    sigaddset(&ours, SIGTERM);
    sigaddset(&ours, SIGINT);
    sigaddset(&ours, SIGUSR1);
    sigaddset(&ours, SIGUSR2);
    a->signal_fd = signalfd(-1, &ours, SFD_CLOEXEC | SFD_NONBLOCK);
    return a->signal_fd < 0 ? -errno : 0;
}

static int agent_open(struct agent *a)
{
    int rc = signals_open(a);
    if (rc < 0)
        return rc;
    a->pid = (uint32_t)getpid();
    a->uid = (uint32_t)getuid();
    (void)umask(022);
    a->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    a->null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    a->proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (a->epoll_fd < 0 || a->null_fd < 0)
        return -errno;
    if (!a->is_guest) {
        /* Without this, orphans of our programs would go to the real init unseen. */
        (void)prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        (void)syscall(SYS_close_range, 3u, ~0u, CLOSE_RANGE_CLOEXEC);
    }
    renewer_open(&a->renewer, a->is_guest);
    rc = loop_watch(a, EPOLL_CTL_ADD, a->signal_fd, EPOLLIN, SOURCE_SIGNALS, NULL);
    if (rc < 0)
        return rc;
    a->listen_fd = a->listen_path != NULL ? listen_unix(a->listen_path) : listen_vsock();
    if (a->listen_fd < 0)
        return a->listen_fd;
    return loop_watch(a, EPOLL_CTL_ADD, a->listen_fd, EPOLLIN, SOURCE_LISTENER, NULL);
}

/* The signals busybox's poweroff, halt and reboot send to PID 1. */
static void signal_act(struct agent *a, uint32_t signo)
{
    switch (signo) {
    case SIGUSR2:
        agent_shutdown(a, RB_POWER_OFF);
        break;
    case SIGUSR1:
        agent_shutdown(a, RB_HALT_SYSTEM);
        break;
    case SIGTERM:
        agent_shutdown(a, RB_AUTOBOOT);
        break;
    case SIGINT:
        if (!a->is_guest)
            agent_shutdown(a, RB_POWER_OFF);
        break;
    default:
        break;
    }
}

static void signals_read(struct agent *a)
{
    struct signalfd_siginfo info[8];
    ssize_t n = read(a->signal_fd, info, sizeof info);
    bool child = false;
    for (size_t i = 0; n > 0 && i < (size_t)n / sizeof info[0]; i++) {
        if (info[i].ssi_signo == SIGCHLD)
            child = true;
        else
            signal_act(a, info[i].ssi_signo);
    }
    if (child)
        exec_reap(a);
}

static int loop_timeout_ms(const struct agent *a)
{
    uint64_t next = control_deadline(a);
    for (uint64_t m = a->used_slots; m != 0; m &= m - 1) {
        const struct exec *x = &a->exec[__builtin_ctzll(m)];
        if (x->runnable)
            return 0;
        uint64_t d = exec_deadline(x);
        next = d < next ? d : next;
    }
    if (next == NEVER_NS)
        return -1;
    uint64_t now = clock_now_ns();
    if (next <= now)
        return 0;
    uint64_t ms = (next - now + 999999) / 1000000;
    return ms > 60000 ? 60000 : (int)ms;
}

static void dispatch(struct agent *a, uint64_t tag, uint32_t events)
{
    enum source source = (enum source)(tag & 0xff);
    size_t slot = (tag >> 8) & 0xff;
    switch (source) {
    case SOURCE_SIGNALS:
        signals_read(a);
        return;
    case SOURCE_LISTENER:
        exec_accept(a);
        return;
    case SOURCE_CONTROL:
        return; /* served before the others */
    default:
        break;
    }
    struct exec *x = &a->exec[slot];
    /* The slot may have been freed, and taken again, by an earlier event of the same batch. */
    if (x->used && x->serial == (uint32_t)(tag >> 32))
        exec_event(a, x, source, events);
}

static void loop_turn(struct agent *a)
{
    struct epoll_event ev[LOOP_EVENTS];
    int n = epoll_wait(a->epoll_fd, ev, LOOP_EVENTS, loop_timeout_ms(a));
    a->now_ns = clock_now_ns();
    for (int i = 0; i < n; i++)
        if ((ev[i].data.u64 & 0xff) == SOURCE_CONTROL)
            control_event(a, ev[i].events);
    control_tick(a);
    for (int i = 0; i < n; i++)
        dispatch(a, ev[i].data.u64, ev[i].events);
    for (uint64_t m = a->used_slots; m != 0; m &= m - 1)
        exec_tick(a, &a->exec[__builtin_ctzll(m)]);
    sweep_tick(a);
    for (uint64_t m = a->used_slots; m != 0; m &= m - 1)
        exec_advance(a, &a->exec[__builtin_ctzll(m)]);
}

static bool args_parse(struct agent *a, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--listen-unix") == 0 && i + 1 < argc)
            a->listen_path = argv[++i];
        else if (strcmp(argv[i], "--control-unix") == 0 && i + 1 < argc)
            a->control_path = argv[++i];
        else if (getpid() != 1) /* the kernel hands words it does not know to init: not ours */
            return false;
    }
    a->is_guest = getpid() == 1 && a->listen_path == NULL;
    return a->is_guest || a->listen_path != NULL;
}

int main(int argc, char **argv)
{
    struct agent *a = &the_agent;
    a->control.fd = a->listen_fd = -1;
    if (!args_parse(a, argc, argv)) {
        say("usage", "tine-agent --listen-unix PATH [--control-unix PATH]", 0);
        return 2;
    }
    if (a->is_guest)
        boot_setup();
    int rc = agent_open(a);
    if (rc < 0) {
        say("cannot start", a->listen_path, -rc);
        return 1;
    }
    if (a->is_guest)
        say("ready", NULL, 0);
    a->now_ns = clock_now_ns();
    control_tick(a);
    while (!a->quit)
        loop_turn(a);
    return 0;
}
