/*
 * stopwatch: time from just before a process is spawned to its first byte on a pipe.
 *
 *   stopwatch [--fd N] [--byte C] [--poke SOCKET FILE] [--timeout S] [--hold] -- PROGRAM [ARG…]
 *
 * The one clock of `bench/run` for every process-start figure, ours, floor and peers alike, so that
 * none of them pays for an interpreter in between. The program finds the pipe as fd N (default 1),
 * /dev/null as its input and our stderr as the rest.
 *   --byte  waits for that byte and skips others: some have something to say before their guest
 * does
 *   --poke  connects to the Unix socket as soon as the program has made it and sends the bytes of
 *           FILE: for a peer that restores only when asked
 *   --hold  keeps the program alive after the first byte until our own stdin ends, so that the
 *           caller can look at it
 * Prints {"pid":…,"first_byte_us":…} as soon as it is known; then kills the program, waits until it
 * is gone (closing a VM takes a while and must not fall into the next sample) and exits 0.
 * A program that ends or stays silent is one line on stderr and status 1.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { POKE_MAX = 65536, POKE_INTERVAL_NS = 20000, TIMEOUT_DEFAULT_S = 60 };

extern char **environ;

struct options {
    int fd, timeout_s;
    int byte; /* -1: any */
    bool hold;
    const char *poke_socket, *poke_file;
    char **program;
};

static pid_t child_pid; /* 0 before the spawn */

static void child_end(void)
{
    if (child_pid > 0) {
        (void)kill(child_pid, SIGKILL); /* it may have ended by itself */
        while (waitpid(child_pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
}

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "stopwatch: %s: %s\n", what, strerror(errno));
    child_end();
    exit(1);
}

static int64_t now_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t); /* cannot fail for this clock */
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static _Noreturn void usage(void)
{
    fprintf(stderr, "usage: stopwatch [--fd N] [--byte C] [--poke SOCKET FILE] [--timeout S] "
                    "[--hold] -- PROGRAM [ARG...]\n");
    exit(2);
}

static struct options options_parse(int argc, char **argv)
{
    struct options o = {.fd = STDOUT_FILENO, .timeout_s = TIMEOUT_DEFAULT_S, .byte = -1};
    int i = 1;
    for (; i < argc && strcmp(argv[i], "--"); i++) {
        if (!strcmp(argv[i], "--hold"))
            o.hold = true;
        else if (!strcmp(argv[i], "--fd") && i + 1 < argc)
            o.fd = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--byte") && i + 1 < argc)
            o.byte = (unsigned char)argv[++i][0];
        else if (!strcmp(argv[i], "--timeout") && i + 1 < argc)
            o.timeout_s = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--poke") && i + 2 < argc) {
            o.poke_socket = argv[++i];
            o.poke_file = argv[++i];
        } else
            usage();
    }
    if (i + 1 >= argc || o.fd < 1 || o.timeout_s < 1)
        usage();
    o.program = &argv[i + 1];
    return o;
}

static size_t poke_read(const char *path, char *buffer)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, buffer, POKE_MAX);
    if (n < 0)
        die(path);
    (void)close(fd);
    return (size_t)n;
}

/* Send `bytes` once someone listens; the socket stays open until the sample is over. */
static void poke(const char *path, const char *bytes, size_t n, int64_t deadline_ns)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        die(path);
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        die("socket");
    while (connect(fd, (const struct sockaddr *)&address, sizeof address) < 0) {
        if ((errno != ENOENT && errno != ECONNREFUSED) || now_ns() > deadline_ns)
            die(path);
        struct timespec pause = {.tv_nsec = POKE_INTERVAL_NS};
        (void)nanosleep(&pause, NULL); /* a short sleep is as good as a whole one */
    }
    if (send(fd, bytes, n, MSG_NOSIGNAL) != (ssize_t)n)
        die(path);
}

static pid_t program_spawn(const struct options *o, int write_fd)
{
    posix_spawn_file_actions_t actions;
    pid_t pid;
    int r = posix_spawn_file_actions_init(&actions);
    r = r ? r : posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    r = r ? r : posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    r = r ? r : posix_spawn_file_actions_adddup2(&actions, write_fd, o->fd);
    r = r ? r : posix_spawnp(&pid, o->program[0], &actions, NULL, o->program, environ);
    if (r) {
        errno = r;
        die(o->program[0]);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    return pid;
}

/* Wait until the pipe has brought `byte` (any if -1). */
static void byte_wait(int fd, int byte, int64_t deadline_ns)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int64_t left_ms = (deadline_ns - now_ns()) / 1000000;
        char got[4096];
        int ready = poll(&p, 1, left_ms > 0 ? (int)left_ms : 0);
        if (ready < 0)
            die("poll");
        if (ready == 0) {
            errno = ETIMEDOUT;
            die("no byte");
        }
        ssize_t n = read(fd, got, sizeof got);
        if (n < 0)
            die("read");
        if (n == 0) {
            errno = ECHILD;
            die("the program ended before its first byte");
        }
        if (byte < 0 || memchr(got, byte, (size_t)n))
            return;
    }
}

int main(int argc, char **argv)
{
    static char request[POKE_MAX];
    struct options o = options_parse(argc, argv);
    size_t request_bytes = o.poke_file ? poke_read(o.poke_file, request) : 0;

    /* High numbers, so that dup2 onto any fd asked for cannot hit them. */
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        die("pipe");
    int read_fd = fcntl(ends[0], F_DUPFD_CLOEXEC, 200),
        write_fd = fcntl(ends[1], F_DUPFD_CLOEXEC, 200);
    if (read_fd < 0 || write_fd < 0)
        die("fcntl");
    (void)close(ends[0]);
    (void)close(ends[1]);

    int64_t begin_ns = now_ns(), deadline_ns = begin_ns + o.timeout_s * 1000000000LL;
    child_pid = program_spawn(&o, write_fd);
    (void)close(write_fd); /* else the end of the program would not be seen */
    if (o.poke_socket)
        poke(o.poke_socket, request, request_bytes, deadline_ns);
    byte_wait(read_fd, o.byte, deadline_ns);
    int64_t end_ns = now_ns();

    printf("{\"pid\":%d,\"first_byte_us\":%.1f}\n", child_pid, (double)(end_ns - begin_ns) / 1e3);
    fflush(stdout);
    if (o.hold) {
        char drop[256];
        while (read(STDIN_FILENO, drop, sizeof drop) > 0)
            ;
    }
    child_end();
    return 0;
}
