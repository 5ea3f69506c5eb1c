/*
 * spawn: starts the program of an EXEC request (docs/agent-protocol.md 2.1). Called by exec_in.c on
 * the loop thread.
 *
 * The child is made with CLONE_VM | CLONE_VFORK: no page tables are copied, the agent stands still
 * until the child has exec'd or failed, and a failure comes back through shared memory instead of a
 * pipe. So child_main() runs in our memory: it writes nothing but its stack and `struct launch`,
 * calls nothing that allocates or locks, and ends in execve or _exit.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#define PROGRAM_PATH_MAX 4096
#define TUNABLES "GLIBC_TUNABLES="

/* What the child needs, and where it leaves what went wrong. */
struct launch {
    const char *const *argv, *const *envp;
    const char *cwd; /* NULL: where the agent is, in a guest the root */
    const char *search_path;
    int fds[3];
    bool pty, identity;
    uint32_t uid, gid;
    uint64_t mark;
    int error; /* errno, set by the child */
    uint32_t what;
};

/* Ends of the pipes or terminal: ours and the child's. */
struct ends {
    int ours[3], theirs[3];
};

static void ends_close(int fds[3])
{
    for (int i = 0; i < 3; i++) {
        int fd = fds[i];
        for (int j = i; j < 3; j++)
            if (fds[j] == fd)
                fds[j] = -1;
        if (fd >= 0)
            close(fd);
    }
}

/* A pipe whose end `ours` (0 to read, 1 to write) alone is non-blocking. */
static int pipe_open(int ours, int *our_fd, int *their_fd)
{
    int p[2];
    if (pipe2(p, O_CLOEXEC) < 0)
        return errno;
    *our_fd = p[ours];
    *their_fd = p[!ours];
    return fcntl(p[ours], F_SETFL, O_NONBLOCK) < 0 ? errno : 0;
}

/* Without stdin, theirs[0] stays -1: the child gets /dev/null. */
static int ends_open_pipes(bool with_stdin, struct ends *e)
{
    int error = pipe_open(0, &e->ours[1], &e->theirs[1]);
    if (error == 0)
        error = pipe_open(0, &e->ours[2], &e->theirs[2]);
    if (error == 0 && with_stdin)
        error = pipe_open(1, &e->ours[0], &e->theirs[0]);
    return error;
}

static int ends_open_pty(const struct wire_exec *req, struct ends *e)
{
    int zero = 0;
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        return errno;
    e->ours[1] = master;
    struct winsize size = {.ws_row = req->rows, .ws_col = req->cols};
    if (ioctl(master, TIOCSPTLCK, &zero) < 0 || ioctl(master, TIOCSWINSZ, &size) < 0)
        return errno;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0)
        return errno;
    e->theirs[0] = e->theirs[1] = e->theirs[2] = slave;
    /* Its own number, because epoll watches input and output apart. */
    e->ours[0] = fcntl(master, F_DUPFD_CLOEXEC, 3);
    return e->ours[0] < 0 ? errno : 0;
}

__attribute__((noreturn)) static void child_fail(struct launch *l, uint32_t what, int error)
{
    l->what = what;
    l->error = error;
    _exit(127);
}

/* execve along the search path. Returns the errno that says most. */
static int child_exec(const struct launch *l)
{
    const char *name = l->argv[0];
    char *const *argv = (char *const *)(uintptr_t)l->argv;
    char *const *envp = (char *const *)(uintptr_t)l->envp;
    if (strchr(name, '/') != NULL) {
        (void)execve(name, argv, envp);
        return errno;
    }
    char path[PROGRAM_PATH_MAX];
    size_t name_len = strlen(name);
    int error = ENOENT;
    if (name_len == 0)
        return ENOENT;
    for (const char *dir = l->search_path; dir != NULL;) {
        const char *colon = strchr(dir, ':');
        size_t len = colon != NULL ? (size_t)(colon - dir) : strlen(dir);
        const char *next = colon != NULL ? colon + 1 : NULL;
        if (len + name_len + 2 > sizeof path) {
            error = error == ENOENT ? ENAMETOOLONG : error;
            dir = next;
            continue;
        }
        memcpy(path, dir, len);
        path[len] = '/';
        /* An empty entry means the working directory. */
        size_t at = len == 0 ? 0 : len + 1;
        memcpy(path + at, name, name_len + 1);
        (void)execve(path, argv, envp);
        if (errno == EACCES)
            error = EACCES; /* worth more than a later ENOENT */
        else if (errno != ENOENT && errno != ENOTDIR)
            return errno;
        dir = next;
    }
    return error;
}

__attribute__((no_sanitize("address", "undefined"))) static int child_main(void *arg)
{
    struct launch *l = arg;
    struct rlimit mark = {.rlim_cur = l->mark, .rlim_max = l->mark};
    sigset_t none;
    (void)setsid(); /* cannot fail: a new process leads no group */
    if (prlimit(0, RLIMIT_RTTIME, &mark, NULL) < 0)
        child_fail(l, WIRE_FAILED_RESOURCES, errno);
    for (int i = 0; i < 3; i++)
        if (dup2(l->fds[i], i) < 0)
            child_fail(l, WIRE_FAILED_RESOURCES, errno);
    if (l->pty && ioctl(0, TIOCSCTTY, 0) < 0)
        child_fail(l, WIRE_FAILED_PTY, errno);
    /* System calls by number: the library's forms tell other threads, there are none to tell. */
    if (l->identity && (syscall(SYS_setgroups, 0, NULL) < 0 ||
                        syscall(SYS_setresgid, l->gid, l->gid, l->gid) < 0 ||
                        syscall(SYS_setresuid, l->uid, l->uid, l->uid) < 0))
        child_fail(l, WIRE_FAILED_IDENTITY, errno);
    if (l->cwd != NULL && chdir(l->cwd) < 0)
        child_fail(l, WIRE_FAILED_CWD, errno);
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    child_fail(l, WIRE_FAILED_PROGRAM, child_exec(l));
}

static bool env_has(const char *entry, const char *name_equals)
{
    return strncmp(entry, name_equals, strlen(name_equals)) == 0;
}

/*
 * Points argv and envp at the strings of the request, and adds PATH and HOME where not given; and
 * GLIBC_TUNABLES where the kernel command line has it (docs/guests.md: no AVX in the lean guest).
 */
static void launch_fill(struct agent *a, struct wire_exec req, struct launch *l)
{
    bool has_home = false, has_tunables = false;
    for (uint32_t i = 0; i < req.argc; i++)
        a->argv[i] = wire_exec_next(&req);
    a->argv[req.argc] = NULL;
    uint32_t n = 0;
    l->search_path = NULL;
    for (uint32_t i = 0; i < req.envc; i++) {
        const char *entry = wire_exec_next(&req);
        if (env_has(entry, "PATH="))
            l->search_path = entry + 5;
        has_home = has_home || env_has(entry, "HOME=");
        has_tunables = has_tunables || env_has(entry, TUNABLES);
        a->envp[n++] = entry;
    }
    if (l->search_path == NULL) {
        a->envp[n++] = "PATH=" DEFAULT_PATH;
        l->search_path = DEFAULT_PATH;
    }
    uint32_t uid = (req.flags & WIRE_EXEC_IDENTITY) != 0 ? req.uid : a->uid;
    if (!has_home)
        a->envp[n++] = uid == 0 ? "HOME=/root" : "HOME=/";
    for (char **own = environ; !has_tunables && *own != NULL; own++) {
        if (env_has(*own, TUNABLES)) {
            a->envp[n++] = *own;
            has_tunables = true;
        }
    }
    a->envp[n] = NULL;
    l->argv = a->argv;
    l->envp = a->envp;
}

/* Takes over our ends. Output is watched edge-triggered, input only once it has blocked. */
static int ends_adopt(struct agent *a, struct exec *x, struct ends *e)
{
    static const uint32_t events = EPOLLIN | EPOLLET;
    x->in_fd = e->ours[0];
    for (int i = 0; i < 2; i++) {
        x->out[i] =
            (struct stream){.fd = e->ours[i + 1], .type = i == 0 ? WIRE_STDOUT : WIRE_STDERR};
        if (x->out[i].fd < 0)
            continue;
        int rc = loop_watch(a, EPOLL_CTL_ADD, x->out[i].fd, events,
                            i == 0 ? SOURCE_STDOUT : SOURCE_STDERR, x);
        if (rc < 0)
            return -rc;
    }
    return 0;
}

static int ends_open(const struct wire_exec *req, struct ends *e, uint32_t *what)
{
    bool pty = (req->flags & WIRE_EXEC_PTY) != 0;
    *e = (struct ends){.ours = {-1, -1, -1}, .theirs = {-1, -1, -1}};
    *what = pty ? WIRE_FAILED_PTY : WIRE_FAILED_RESOURCES;
    int error =
        pty ? ends_open_pty(req, e) : ends_open_pipes((req->flags & WIRE_EXEC_STDIN) != 0, e);
    if (error != 0) {
        ends_close(e->theirs);
        ends_close(e->ours);
    }
    return error;
}

int exec_spawn(struct agent *a, struct exec *x, const struct wire_exec *req, const char *cwd,
               uint32_t *what)
{
    struct ends e;
    int error = ends_open(req, &e, what);
    if (error != 0)
        return error;
    struct launch l = {
        .cwd = cwd[0] != 0 && strcmp(cwd, "/") != 0 ? cwd
               : a->is_guest                        ? NULL
                                                    : "/",
        .fds = {e.theirs[0] >= 0 ? e.theirs[0] : a->null_fd, e.theirs[1], e.theirs[2]},
        .pty = (req->flags & WIRE_EXEC_PTY) != 0,
        .identity = (req->flags & WIRE_EXEC_IDENTITY) != 0,
        .uid = req->uid,
        .gid = req->gid,
        .mark = sweep_mark(a, x),
    };
    launch_fill(a, *req, &l);
    pid_t pid = clone(child_main, a->spawn_stack + sizeof a->spawn_stack,
                      CLONE_VM | CLONE_VFORK | SIGCHLD, &l);
    if (pid < 0)
        l.error = errno, l.what = WIRE_FAILED_RESOURCES;
    ends_close(e.theirs);
    if (l.error != 0) {
        if (pid > 0)
            (void)waitpid(pid, NULL, 0); /* it is dead or dying: no waiting */
        ends_close(e.ours);
        *what = l.what;
        return l.error;
    }
    x->pid = pid;
    x->started = true;
    /* A watch that fails (no memory) is fatal to this program: its output would never come. */
    error = ends_adopt(a, x, &e);
    if (error != 0)
        exec_error(a, x, WIRE_ERR_NO_MEMORY, "cannot watch the program's output");
    return 0;
}
