/*
 * agent_fixture: see agent_fixture.h. Asserts instead of returning errors: a fixture that does not
 * work is a failed test. Waiting is by polling with short pauses up to a limit, never a fixed time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/agent_fixture.h"

#include "vmm/core/err.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WAIT_MS 10000u
#define RECV_MS 20000

uint64_t mono_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

static struct sockaddr_un unix_addr(const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    (void)snprintf(addr.sun_path, sizeof addr.sun_path, "%s", path);
    return addr;
}

void fixture_start(struct fixture *f, bool with_control)
{
    const char *program = getenv("TINE_AGENT");
    assert_non_null(program);
    (void)signal(SIGPIPE, SIG_IGN);
    memset(f, 0, sizeof *f);
    f->control_listen = -1;
    (void)snprintf(f->dir, sizeof f->dir, "/tmp/tine-agent-test-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    (void)snprintf(f->exec_path, sizeof f->exec_path, "%s/exec", f->dir);
    (void)snprintf(f->control_path, sizeof f->control_path, "%s/control", f->dir);
    if (with_control) {
        struct sockaddr_un addr = unix_addr(f->control_path);
        f->control_listen = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_int_equal(bind(f->control_listen, (struct sockaddr *)&addr, sizeof addr), 0);
        assert_int_equal(listen(f->control_listen, 8), 0);
    }
    f->pid = fork();
    assert_true(f->pid >= 0);
    if (f->pid == 0) {
        if (with_control)
            execl(program, program, "--listen-unix", f->exec_path, "--control-unix",
                  f->control_path, NULL);
        else
            execl(program, program, "--listen-unix", f->exec_path, NULL);
        _exit(127);
    }
    for (uint64_t end = mono_ms() + WAIT_MS; access(f->exec_path, F_OK) != 0; pause_ms(1))
        assert_true(mono_ms() < end);
}

void fixture_stop(struct fixture *f)
{
    int status = 0;
    assert_int_equal(waitpid(f->pid, &status, WNOHANG), 0); /* it must have lived until here */
    kill(f->pid, SIGTERM);
    assert_int_equal(waitpid(f->pid, &status, 0), f->pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (f->control_listen >= 0)
        close(f->control_listen);
    (void)unlink(f->exec_path);
    (void)unlink(f->control_path);
    assert_int_equal(rmdir(f->dir), 0);
}

int agent_connect(const struct fixture *f)
{
    struct sockaddr_un addr = unix_addr(f->exec_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    uint64_t end = mono_ms() + WAIT_MS;
    while (connect(fd, (struct sockaddr *)&addr, sizeof addr) != 0) {
        assert_true(mono_ms() < end);
        pause_ms(1);
    }
    return fd;
}

static int input_fd(const void *input, size_t len)
{
    int fd = memfd_create("input", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, input, len), (ssize_t)len);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    return fd;
}

struct ran agent_run(const struct fixture *f, struct exec_request request, const char *const *argv,
                     const void *input, size_t input_len)
{
    struct ran r = {.out.cap_bytes = 256u << 20, .err.cap_bytes = 256u << 20};
    struct err e = {0};
    struct exec_io io = {.stdin_fd = input != NULL ? input_fd(input, input_len) : -1,
                         .stdout_fd = -1,
                         .stderr_fd = -1,
                         .signal_fd = -1,
                         .winsize_fd = -1,
                         .capture_stdout = &r.out,
                         .capture_stderr = &r.err};
    request.argv = argv;
    int conn = agent_connect(f);
    r.rc = exec_client_run(conn, &request, &io, &r.result, &e);
    if (r.rc != 0)
        print_message("exec: %s\n", e.text);
    close(conn);
    if (io.stdin_fd >= 0)
        close(io.stdin_fd);
    return r;
}

struct ran agent_sh(const struct fixture *f, const char *script)
{
    const char *const argv[] = {"sh", "-c", script, NULL};
    return agent_run(f, (struct exec_request){.cwd = "/"}, argv, NULL, 0);
}

void ran_free(struct ran *r)
{
    free(r->out.data);
    free(r->err.data);
}

static void write_all(int fd, const void *buf, size_t len)
{
    for (const uint8_t *p = buf; len > 0;) {
        ssize_t n = send(fd, p, len, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* the agent may have refused already; what it says is what counts */
        p += n;
        len -= (size_t)n;
    }
}

void frame_send(int fd, uint32_t type, const void *payload, size_t len)
{
    uint8_t header[WIRE_HEADER_SIZE];
    wire_header_put(header, type, (uint32_t)len);
    write_all(fd, header, sizeof header);
    write_all(fd, payload, len);
}

static bool read_all(int fd, void *buf, size_t len)
{
    for (uint8_t *p = buf; len > 0;) {
        struct pollfd pfd = {.fd = fd, .events = POLLIN};
        assert_true(poll(&pfd, 1, RECV_MS) > 0);
        ssize_t n = read(fd, p, len);
        if (n <= 0)
            return false;
        p += n;
        len -= (size_t)n;
    }
    return true;
}

uint32_t frame_recv(int fd, uint8_t *payload, size_t cap, size_t *len)
{
    uint8_t header[WIRE_HEADER_SIZE];
    if (!read_all(fd, header, sizeof header))
        return 0;
    struct wire_header h = wire_header_get(header);
    assert_int_equal(wire_header_check(h), 0);
    assert_true(h.length <= cap);
    *len = h.length;
    return read_all(fd, payload, h.length) ? h.type : 0;
}

bool frame_await(int fd, uint32_t type, uint8_t *payload, size_t cap, size_t *len)
{
    uint32_t got;
    while ((got = frame_recv(fd, payload, cap, len)) != 0)
        if (got == type)
            return true;
    return false;
}

pid_t raw_start(int fd, const char *script, uint32_t flags)
{
    uint8_t payload[4096];
    struct wire_exec head = {.flags = flags, .argc = 3};
    assert_true(wire_exec_head_encode(&head, payload, sizeof payload) > 0);
    int n = snprintf((char *)payload + WIRE_EXEC_HEAD_SIZE, sizeof payload - WIRE_EXEC_HEAD_SIZE,
                     "/%csh%c-c%c%s", 0, 0, 0, script);
    assert_true(n > 0);
    frame_send(fd, WIRE_EXEC, payload, WIRE_EXEC_HEAD_SIZE + (size_t)n + 1);
    size_t len = 0;
    assert_int_equal(frame_recv(fd, payload, sizeof payload, &len), WIRE_STARTED);
    return (pid_t)wire_get32(payload);
}

static size_t count_entries(const char *path)
{
    DIR *d = opendir(path);
    assert_non_null(d);
    size_t n = 0;
    for (struct dirent *entry; (entry = readdir(d)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(d);
    return n;
}

size_t count_fds(pid_t pid)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%d/fd", pid);
    return count_entries(path);
}

size_t count_children(pid_t pid)
{
    char path[64], text[65536];
    (void)snprintf(path, sizeof path, "/proc/%d/task/%d/children", pid, pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    size_t count = 0;
    for (ssize_t i = 0; i < n; i++)
        count += text[i] == ' ';
    return count;
}

/* Whether another process than this one has `word` in its command line. */
static bool process_has(const char *word)
{
    DIR *d = opendir("/proc");
    bool found = false;
    for (struct dirent *entry; !found && (entry = readdir(d)) != NULL;) {
        char path[300], text[4096];
        (void)snprintf(path, sizeof path, "/proc/%s/cmdline", entry->d_name);
        int fd = atoi(entry->d_name) != getpid() ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        ssize_t n = fd >= 0 ? read(fd, text, sizeof text) : 0;
        found = n > 0 && memmem(text, (size_t)n, word, strlen(word)) != NULL;
        if (fd >= 0)
            close(fd);
    }
    closedir(d);
    return found;
}

bool processes_gone(const char *word)
{
    for (uint64_t end = mono_ms() + WAIT_MS; mono_ms() < end; pause_ms(5))
        if (!process_has(word))
            return true;
    return false;
}
