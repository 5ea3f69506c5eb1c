/*
 * launch: see launch.h.
 */
#include "tools/tine/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/tine/cli.h"
#include "vmm/control_parse.h"
#include "vmm/core/base64.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"
#include "vmm/exit_status.h"

#define CONNECT_NS 20000000000ull /* for a VMM to open its socket: a big image may be verified */
#define CONNECT_STEP_NS 200000    /* between two looks */
#define PROGRESS_NS 2000000000ull
#define END_MS 2000
#define ARGV_MAX 96

int launch_find_vmm(char *out, size_t size, struct err *e)
{
    static const char *const places[] = {"../../vmm/tine-vmm", "tine-vmm",
                                         "../libexec/tine/tine-vmm"};
    const char *given = getenv("TINE_VMM");
    if (given != NULL && given[0] != '\0') {
        if (access(given, X_OK) < 0)
            return err_sys(e, "TINE_VMM %s", given);
        (void)snprintf(out, size, "%s", given);
        return 0;
    }
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0)
        return err_sys(e, "/proc/self/exe");
    self[n] = '\0';
    char *slash = strrchr(self, '/');
    *slash = '\0';
    for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
        int len = snprintf(out, size, "%s/%s", self, places[i]);
        if (len > 0 && (size_t)len < size && access(out, X_OK) == 0)
            return 0;
    }
    return err_set(
        e, ERR_USAGE, 0,
        "no tine-vmm at %s/%s, beside it or in ../libexec/tine: build it or set TINE_VMM", self,
        places[0]);
}

struct arguments {
    const char *argv[ARGV_MAX];
    char text[CONTROL_GRANTS_MAX + 2][24]; /* numbers */
    size_t argc, texts;
};

static void add(struct arguments *a, const char *option, const char *value)
{
    if (value == NULL || a->argc + 3 > ARGV_MAX)
        return;
    a->argv[a->argc++] = option;
    a->argv[a->argc++] = value;
}

static void add_number(struct arguments *a, const char *option, uint64_t value)
{
    if (value == 0)
        return;
    char *text = a->text[a->texts++];
    (void)snprintf(text, sizeof a->text[0], "%llu", (unsigned long long)value);
    add(a, option, text);
}

static void make_arguments(struct arguments *a, const struct launch_spec *spec, const char *vmm,
                           const char *control, const char *vsock)
{
    *a = (struct arguments){.argv = {vmm}, .argc = 1};
    add(a, "--id", spec->id);
    add(a, "--control", control);
    add(a, "--vsock", vsock);
    add(a, "--restore", spec->image);
    add(a, "--kernel", spec->kernel);
    add(a, "--initrd", spec->initrd);
    add(a, "--cmdline", spec->cmdline);
    add_number(a, "--memory", spec->memory_mib);
    add_number(a, "--cpus", spec->cpus);
    for (size_t i = 0; i < spec->disk_count; i++)
        add(a, "--disk", spec->disks[i]);
    for (size_t i = 0; i < spec->grant_count; i++)
        add_number(a, "--grant", spec->grants[i]);
    if (spec->paused)
        a->argv[a->argc++] = "--paused";
}

/* The VMM gets no environment of ours but what a sanitizer build is steered by. */
static void make_environment(const char *env[8])
{
    static const char *const kept[] = {"ASAN_OPTIONS=", "UBSAN_OPTIONS=", "LSAN_OPTIONS="};
    size_t n = 0;
    for (char **p = environ; *p != NULL; p++) {
        for (size_t i = 0; i < ARRAY_SIZE(kept) && n < 7; i++) {
            if (strncmp(*p, kept[i], strlen(kept[i])) == 0)
                env[n++] = *p;
        }
    }
    env[n] = NULL;
}

/* In the child of the fork; `report` gets the errno if the program cannot be run. */
static _Noreturn void become_vmm(const struct arguments *a, const struct launch_spec *spec,
                                 int log_fd, int report, pid_t parent)
{
    const char *env[8];
    sigset_t none;
    make_environment(env);
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)setsid(); /* a fresh child is no group leader: cannot fail */
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    bool ok = null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(null, STDOUT_FILENO) >= 0 &&
              dup2(log_fd, STDERR_FILENO) >= 0;
    /* Whatever our caller left open is not the VMM's business; `report` closes itself at exec. */
    ok = ok && syscall(SYS_close_range, 3u, ~0u, 4u /* CLOSE_RANGE_CLOEXEC */) == 0;
    if (ok && spec->ends_with_us) {
        ok = prctl(PR_SET_PDEATHSIG, SIGTERM) == 0;
        if (getppid() != parent)
            _exit(1); /* we were too late: the parent is gone */
    }
    if (ok)
        (void)execve(a->argv[0], (char *const *)(uintptr_t)a->argv, (char *const *)(uintptr_t)env);
    int errnum = errno;
    (void)!write(report, &errnum, sizeof errnum);
    _exit(127);
}

static int spawn(const struct arguments *a, const struct launch_spec *spec, struct launched *l,
                 struct err *e)
{
    CLEANUP_FD int from = -1;
    CLEANUP_FD int to = -1;
    int pipe_fds[2];
    if (pipe2(pipe_fds, O_CLOEXEC) < 0)
        return err_sys(e, "pipe");
    from = pipe_fds[0];
    to = pipe_fds[1];
    pid_t parent = getpid();
    l->pid = fork();
    if (l->pid < 0)
        return err_sys(e, "fork");
    if (l->pid == 0)
        become_vmm(a, spec, l->log_fd, to, parent);
    fd_close(&to);
    int errnum;
    if (read(from, &errnum, sizeof errnum) == sizeof errnum) {
        (void)waitpid(l->pid, NULL, 0); /* it exits at once */
        l->pid = -1;
        return err_set(e, ERR_HOST, errnum, "run %s", a->argv[0]);
    }
    l->pid_fd = (int)syscall(SYS_pidfd_open, l->pid, 0);
    return l->pid_fd < 0 ? err_sys(e, "pidfd_open") : 0;
}

static int open_log(struct launched *l, struct err *e)
{
    uint32_t r;
    if (getrandom(&r, sizeof r, 0) != sizeof r)
        return err_sys(e, "getrandom");
    (void)snprintf(l->log, sizeof l->log, "%s/.start-%d-%08x", l->machines->dir, (int)getpid(), r);
    l->log_fd = open(l->log, O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0600);
    return l->log_fd < 0 ? err_sys(e, "make %s", l->log) : 0;
}

/* The last line the VMM wrote, without its name and level; "" if it wrote none. */
static void last_line(const struct launched *l, char out[512])
{
    char buf[2048];
    struct stat st;
    out[0] = '\0';
    if (fstat(l->log_fd, &st) < 0)
        return;
    off_t at = st.st_size > (off_t)sizeof buf - 1 ? st.st_size - (off_t)sizeof buf + 1 : 0;
    ssize_t n = pread(l->log_fd, buf, sizeof buf - 1, at);
    while (n > 0 && buf[n - 1] == '\n')
        n--;
    if (n <= 0)
        return;
    buf[n] = '\0';
    const char *line = strrchr(buf, '\n');
    line = line != NULL ? line + 1 : buf;
    const char *level = strstr(line, ": error: ");
    if (level != NULL && level - line <= CONTROL_ID_MAX)
        line = level + strlen(": error: ");
    (void)snprintf(out, 512, "%s", line);
}

/* Without what the one who prints it says anyway: "internal: boot ID: …" */
static const char *without_prefixes(const struct launched *l, const char *line, int code)
{
    static const char *const doing[] = {"boot ", "restore "};
    const char *word = code == 2 ? end_reason_name(END_USAGE) : end_reason_name(END_INTERNAL);
    size_t len = strlen(word);
    if (strncmp(line, word, len) == 0 && strncmp(line + len, ": ", 2) == 0)
        line += len + 2;
    for (size_t i = 0; i < ARRAY_SIZE(doing); i++) {
        len = strlen(doing[i]);
        size_t id_len = strlen(l->id);
        if (strncmp(line, doing[i], len) == 0 && strncmp(line + len, l->id, id_len) == 0 &&
            strncmp(line + len + id_len, ": ", 2) == 0)
            return line + len + id_len + 2;
    }
    return line;
}

/* The VMM is gone: says why. */
static int dead(struct launched *l, struct err *e)
{
    char line[512];
    int status = 0;
    (void)waitpid(l->pid, &status, 0); /* its pidfd was readable: returns at once */
    l->pid = -1;
    last_line(l, line);
    const char *sep = line[0] != '\0' ? ": " : "";
    if (WIFSIGNALED(status))
        return err_set(e, ERR_HOST, 0, "tine-vmm was killed by signal %d (%s)%s%s",
                       WTERMSIG(status), strsignal(WTERMSIG(status)), sep, line);
    int code = WEXITSTATUS(status);
    const char *text = exit_status_text(code);
    if (code <= 2 && line[0] != '\0')
        return err_set(e, code == 2 ? ERR_USAGE : ERR_HOST, 0, "%s",
                       without_prefixes(l, line, code));
    return err_set(e, ERR_GUEST, 0, "the machine ended (status %d, %s)%s%s", code,
                   text != NULL ? text : "powered off or stopped", sep, line);
}

static bool is_dead(const struct launched *l, long timeout_ns)
{
    struct pollfd p = {.fd = l->pid_fd, .events = POLLIN};
    struct timespec ts = {.tv_sec = 0, .tv_nsec = timeout_ns};
    return ppoll(&p, 1, &ts, NULL) > 0;
}

static int interrupted(struct err *e)
{
    return err_set(e, ERR_HOST, EINTR, "stopped by signal %d", cli_signal());
}

/* Until the VMM we started (and no other) answers on its socket. */
static int connect_to(struct launched *l, const char *control, struct err *e)
{
    uint64_t end = clock_mono_ns() + CONNECT_NS;
    while (cli_signal() == 0) {
        if (rpc_connect(&l->rpc, control, NULL) == 0) {
            if (rpc_peer_pid(&l->rpc) == l->pid)
                return 0;
            rpc_close(&l->rpc); /* another one has that name; ours will say so */
        }
        if (is_dead(l, CONNECT_STEP_NS))
            return dead(l, e);
        if (clock_mono_ns() > end)
            return err_set(e, ERR_HOST, ETIMEDOUT, "tine-vmm did not open %s within %llu s",
                           control, CONNECT_NS / 1000000000u);
    }
    return interrupted(e);
}

int launch(const struct machines *m, const struct launch_spec *spec, struct launched *out,
           struct err *e)
{
    char vmm[PATH_MAX], control[SOCK_PATH_MAX + 1], vsock[SOCK_PATH_MAX + 1];
    struct arguments a;
    struct launched l = {.machines = m, .pid = -1, .pid_fd = -1, .log_fd = -1, .rpc = {.fd = -1}};
    int rc = machines_check_new(m, spec->id, spec->grants, spec->grant_count, e);
    if (rc == 0)
        rc = machines_path(m, spec->id, ".sock", control, e);
    if (rc == 0)
        rc = machines_path(m, spec->id, ".vsock", vsock, e);
    if (rc == 0)
        rc = launch_find_vmm(vmm, sizeof vmm, e);
    if (rc == 0)
        rc = open_log(&l, e);
    if (rc < 0)
        return rc;
    (void)snprintf(l.id, sizeof l.id, "%s", spec->id);
    make_arguments(&a, spec, vmm, control, vsock);
    rc = spawn(&a, spec, &l, e);
    if (rc == 0)
        rc = connect_to(&l, control, e);
    if (rc < 0) {
        launch_end(&l);
        return rc;
    }
    *out = l;
    return 0;
}

/* One look: 1 with *status when it answered, 0 not yet, -errno. */
static int look(struct launched *l, json_t **status, struct err *e)
{
    int rc = rpc_receive(&l->rpc, 250, status, e);
    if (rc == 0)
        return 1;
    if (cli_signal() != 0)
        return interrupted(e);
    if (rc == -EINTR || (rc == -ETIMEDOUT && l->rpc.error_code == 0))
        return 0;
    /* A machine that ends tells its waiters so and exits: what it exits with says more. */
    if ((rc == -ECONNRESET || e->code == ERR_STATE) && is_dead(l, 999999999))
        return dead(l, e);
    return rc;
}

/* Until the request that was sent is answered. On failure the machine is ended. */
static int await(struct launched *l, const char *doing, json_t **status, struct err *e)
{
    uint64_t begin = clock_mono_ns(), told = begin;
    int rc = 0;
    while (rc == 0) {
        rc = look(l, status, e);
        uint64_t now = clock_mono_ns();
        if (rc == 0 && now - told >= PROGRESS_NS) {
            cli_progress("%s (%llu s)", doing, (unsigned long long)(now - begin) / 1000000000u);
            told = now;
        }
    }
    cli_progress_end();
    return rc > 0 ? 0 : rc;
}

/* The last thing its console said is what there is to go by. */
static int too_late(struct launched *l, const char *what, unsigned timeout_s, struct err *e)
{
    json_t *result = NULL;
    char tail[513] = "";
    ssize_t n = -1;
    if (rpc_call(&l->rpc, "console", json_pack("{s:i}", "bytes", 300), 1000, &result, NULL) == 0) {
        const json_t *data = json_object_get(result, "data");
        size_t len = json_string_length(data);
        if (len > 0 && len <= 600)
            n = base64_decode(json_string_value(data), len, tail);
    }
    json_decref(result);
    while (n > 0 && (tail[n - 1] == '\n' || tail[n - 1] == '\r'))
        n--;
    tail[n > 0 ? n : 0] = '\0';
    const char *line = strrchr(tail, '\n');
    line = line != NULL ? line + 1 : tail;
    return err_set(e, ERR_GUEST, 0, "not %s within %u s; its console %s%s%s", what, timeout_s,
                   line[0] != '\0' ? "ends with \"" : "is empty", line,
                   line[0] != '\0' ? "\"" : "");
}

int launch_wait(struct launched *l, const char *what, unsigned timeout_s, const char *doing,
                json_t **status, struct err *e)
{
    json_t *p = json_pack("{s:s, s:I}", "for", what, "timeout_ms", (json_int_t)timeout_s * 1000);
    int rc = rpc_send(&l->rpc, "wait", p, e);
    if (rc == 0)
        rc = await(l, doing, status, e);
    if (rc == 0)
        return 0;
    if (l->rpc.error_code == RPC_TIMEOUT)
        rc = too_late(l, what, timeout_s, e);
    launch_end(l);
    return rc;
}

int launch_check(struct launched *l, json_t **status, struct err *e)
{
    int rc = rpc_send(&l->rpc, "status", NULL, e);
    if (rc == 0)
        rc = await(l, "making the machine", status, e);
    if (rc < 0)
        launch_end(l);
    return rc;
}

static void release(struct launched *l)
{
    rpc_close(&l->rpc);
    fd_close(&l->pid_fd);
    fd_close(&l->log_fd);
}

void launch_keep(struct launched *l)
{
    char path[SOCK_PATH_MAX + 1];
    if (machines_path(l->machines, l->id, ".log", path, NULL) == 0)
        (void)rename(l->log, path); /* else it keeps the other name until it is swept */
    release(l);
}

void launch_end(struct launched *l)
{
    if (l->pid > 0) {
        (void)kill(l->pid, SIGTERM);
        struct pollfd p = {.fd = l->pid_fd, .events = POLLIN};
        uint64_t end = clock_mono_ns() + END_MS * 1000000ull;
        int n = 0;
        while (n <= 0 && clock_mono_ns() < end)
            n = poll(&p, 1, END_MS);
        if (n <= 0)
            (void)kill(l->pid, SIGKILL);
        (void)waitpid(l->pid, NULL, 0);
        l->pid = -1;
    }
    if (l->log[0] != '\0')
        (void)unlink(l->log);
    /* Not <id>.log: if we lost a race for the name, that one is the winner's. */
    machines_remove(l->machines, l->id, false);
    release(l);
}
