/*
 * main: one process, one machine. Reads the command line, makes the sockets, builds the machine
 * (boot, restore, or nothing yet), runs the loop until the machine ends, and exits with its reason.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "vmm/control.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/log.h"
#include "vmm/core/sock.h"
#include "vmm/jail.h"
#include "vmm/machine.h"
#include "vmm/options.h"
#include "vmm/probe.h"
#include "vmm/requests.h"

#define DRAIN_MS 1000
#define FD_LIMIT 4096

/* The only globals besides the log: what a signal handler can reach. */
static volatile sig_atomic_t terminated;
static struct machine machine = {
    .kvm = {.dev_fd = -1, .vm_fd = -1},
    .loop = {.epoll_fd = -1, .wake_fd = -1},
    .bind = {.vsock_listener = -1, .console_fd = -1},
    .ready_pipe = -1,
};

static void on_terminate(int sig)
{
    terminated = sig;
    loop_wake(&machine.loop); /* a write(2) to an eventfd: async-signal-safe */
}

/* Sockets are removed by whoever bound them, and only after that succeeded. */
static void unbind_sockets(struct machine *m)
{
    if (m->bind.control_path != NULL)
        (void)unlink(m->bind.control_path); /* absent is fine: somebody cleaned up */
    if (m->bind.vsock_path != NULL)
        (void)unlink(m->bind.vsock_path);
}

/* Guest memory is a file that somebody may cut or whose file system may fail. KVM reports that as
 * an exit; our own access to it ends here. unlink and write are async-signal-safe. */
static void on_bus_error(int sig)
{
    static const char line[] = "tine-vmm: error: internal: guest memory cannot be read: its image "
                               "was cut, or the file system below it failed or is full\n";
    (void)!write(STDERR_FILENO, line, sizeof line - 1);
    unbind_sockets(&machine);
    _exit(end_reason_status(END_INTERNAL));
}

static int install_signals(struct err *e)
{
    struct sigaction bus = {.sa_handler = on_bus_error};
    struct sigaction end = {.sa_handler = on_terminate};
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    /* SIGCHLD ignored: forked machines that end are reaped by the kernel. SIGPIPE: a peer that
     * goes away is an EPIPE where it is written to. */
    if (sigaction(SIGTERM, &end, NULL) < 0 || sigaction(SIGINT, &end, NULL) < 0 ||
        sigaction(SIGHUP, &end, NULL) < 0 || sigaction(SIGBUS, &bus, NULL) < 0 ||
        sigaction(SIGCHLD, &ignore, NULL) < 0 || sigaction(SIGPIPE, &ignore, NULL) < 0)
        return err_sys(e, "sigaction");
    return vcpu_install_kick(e);
}

/* "fd:N" is a descriptor that we were handed. -1: it is no such thing. */
static int console_fd_of(const char *text)
{
    if (text == NULL || strncmp(text, "fd:", 3) != 0)
        return -1;
    char *end = NULL;
    long n = strtol(text + 3, &end, 10);
    return end == text + 3 || *end != '\0' || n < 0 || n > INT_MAX ? -1 : (int)n;
}

/* Anything but fd:N is a file that is appended to. */
static int open_console(const char *text, int *out, struct err *e)
{
    if (text == NULL)
        return 0;
    if (strncmp(text, "fd:", 3) == 0) {
        int fd = fcntl(console_fd_of(text), F_DUPFD_CLOEXEC, 3);
        if (fd < 0)
            return err_set(e, ERR_USAGE, errno, "--console %s: expected an open descriptor", text);
        *out = fd;
    } else {
        int fd = open(text, O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0600);
        if (fd < 0)
            return err_sys(e, "open console file %s", text);
        *out = fd;
    }
    int flags = fcntl(*out, F_GETFL);
    if (flags < 0 || fcntl(*out, F_SETFL, flags | O_NONBLOCK) < 0)
        return err_sys(e, "console %s", text);
    return 0;
}

/* The machine's name: as given, or the socket's file name without ".sock". */
static void name_machine(struct machine *m, const struct options *o)
{
    const char *base = strrchr(o->control, '/');
    base = base != NULL ? base + 1 : o->control;
    (void)snprintf(m->bind.id, sizeof m->bind.id, "%s", o->id != NULL ? o->id : base);
    char *dot = o->id != NULL ? NULL : strstr(m->bind.id, ".sock");
    if (dot != NULL)
        *dot = '\0';
    if (!spec_id_is_valid(m->bind.id))
        (void)snprintf(m->bind.id, sizeof m->bind.id, "machine");
    log_set_name(m->bind.id);
}

static int copy_string(const char *s, char **out, struct err *e)
{
    if (s == NULL)
        return 0;
    *out = strdup(s);
    return *out == NULL ? err_set(e, ERR_HOST, ENOMEM, "copy of %s", s) : 0;
}

static int bind_sockets(struct machine *m, const struct options *o, int *control_fd, struct err *e)
{
    int rc = copy_string(o->control, &m->bind.control_path, e);
    if (rc == 0)
        rc = copy_string(o->vsock, &m->bind.vsock_path, e);
    if (rc == 0)
        rc = copy_string(o->restore, &m->bind.image_dir, e);
    if (rc < 0)
        return rc;
    *control_fd = sock_listen(o->control, e);
    if (*control_fd < 0)
        return *control_fd;
    if (o->vsock != NULL) {
        m->bind.vsock_listener = sock_listen(o->vsock, e);
        if (m->bind.vsock_listener < 0) {
            (void)unlink(o->control);
            return m->bind.vsock_listener;
        }
    }
    return 0;
}

static int build(struct machine *m, struct options *o, int control_fd, struct err *e)
{
    int rc = requests_listen(m, control_fd, e);
    if (rc == 0)
        rc = jail_enter(e);
    if (rc == 0 && o->restore != NULL)
        rc = machine_restore(m, o->restore, o->verify, e);
    if (rc == 0 && o->kernel != NULL) {
        rc = machine_boot_files(m, o->kernel, o->initrd, o->cmdline != NULL ? o->cmdline : "", e);
        if (rc < 0)
            rc = err_wrap(e, rc, "boot %s", m->bind.id);
    }
    if (rc == 0 && m->is_built && !o->paused)
        rc = machine_resume(m, e);
    return rc;
}

/* Returns the exit status. In a fork child the same loop goes on as the child's. */
static int run_loop(struct machine *m)
{
    struct err e = {0};
    while (m->end == END_NONE) {
        if (loop_round(&m->loop, -1, &e) < 0)
            machine_end(m, END_INTERNAL, "%s", e.text);
        if (terminated != 0)
            machine_end(m, END_TERMINATED, "signal %d", (int)terminated);
        machine_turn(m);
    }
    if (m->control != NULL)
        control_drain(m->control, DRAIN_MS);
    unbind_sockets(m);
    int status = end_reason_status(m->end);
    log_line(status == 0 ? LOG_INFO : LOG_ERROR, "%s: %s", end_reason_name(m->end), m->end_text);
    return status;
}

static int start(struct options *o)
{
    struct machine *m = &machine;
    struct err e = {0};
    name_machine(m, o);
    m->spec = o->spec;
    o->spec = (struct machine_spec){0};
    int control_fd = -1;
    if (o->restore != NULL && !o->paused)
        pin_begin(&m->pin);
    int rc = kvm_open(&m->kvm, KVM_DEFAULT_PATH, &e);
    if (rc == 0)
        rc = open_console(o->console, &m->bind.console_fd, &e);
    if (rc == 0)
        rc = machine_init(m, &e);
    if (rc == 0)
        rc = install_signals(&e);
    if (rc == 0)
        rc = bind_sockets(m, o, &control_fd, &e);
    if (rc < 0) {
        log_line(LOG_ERROR, "%s", e.text);
        return e.code == ERR_USAGE ? 2 : 1;
    }
    rc = build(m, o, control_fd, &e);
    if (rc < 0)
        machine_end(m, e.code == ERR_USAGE ? END_USAGE : END_INTERNAL, "%s", e.text);
    return run_loop(m);
}

/* One per vsock connection (VSOCK_CONNECTIONS_MAX): more than the usual soft limit of 1024. */
static void raise_fd_limit(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) < 0 || r.rlim_cur >= FD_LIMIT)
        return;
    r.rlim_cur = r.rlim_max < FD_LIMIT ? r.rlim_max : FD_LIMIT;
    (void)setrlimit(RLIMIT_NOFILE, &r); /* without it clients are refused openly, earlier */
}

static int log_level_of(const char *word)
{
    static const char *const words[] = {"error", "warning", "info", "debug"};
    for (int i = 0; word != NULL && i < 4; i++) {
        if (strcmp(word, words[i]) == 0)
            return i;
    }
    return word == NULL ? LOG_INFO : -1;
}

int main(int argc, char **argv)
{
    machine.begin_ns = clock_mono_ns();
    struct options o = {0};
    struct err e = {0};
    if (options_parse(&o, argc, argv, &e) < 0) {
        log_line(LOG_ERROR, "%s", e.text);
        return 2;
    }
    if (o.help) {
        options_print_help();
        return 0;
    }
    if (o.version) {
        (void)puts("tine-vmm " TINE_VERSION);
        return 0;
    }
    if (o.probe)
        return probe_print(stdout) == 0 ? 0 : 1;
    jail_close_inherited(console_fd_of(o.console));
    int level = log_level_of(o.log_level);
    if (level < 0) {
        log_line(LOG_ERROR, "--log %s: expected error, warning, info or debug", o.log_level);
        return 2;
    }
    log_set_level((enum log_level)level);
    raise_fd_limit();
    int status = start(&o);
    /* Closing a VM takes KVM 15-24 ms; the kernel does it behind the exit. */
    _exit(status);
}
