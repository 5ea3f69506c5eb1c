/*
 * How commands end when they do not end by themselves: signals, time-outs, clients that vanish,
 * orphans, limits and malformed frames. Case names: G4, G5, G7.
 *
 * Each script carries a number of its own (sleep N) so that what is left of it can be found.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/agent_fixture.h"

#include "vmm/core/err.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

static struct fixture fx;

static int setup(void **state)
{
    fixture_start(&fx, false);
    return 0;
}

static int teardown(void **state)
{
    fixture_stop(&fx);
    return 0;
}

static struct ran run_limited(const char *script, uint32_t timeout_ms, uint32_t flags)
{
    const char *const argv[] = {"sh", "-c", script, NULL};
    return agent_run(&fx, (struct exec_request){.timeout_ms = timeout_ms, .flags = flags}, argv,
                     NULL, 0);
}

/* G4: loops, an ignored SIGTERM, an own session, a double fork, a scrubbed environment. */
static void G4_timeout_kills_all_descendants(void **state)
{
    static const char *const scripts[] = {
        "echo first; sleep 7183.01 & sleep 7183.01",
        "echo first; trap '' TERM INT HUP; sleep 7183.01; sleep 7183.01",
        "echo first; setsid sleep 7183.01 & sleep 7183.01",
        "echo first; (setsid sh -c 'sleep 7183.01 & exit' &) ; sleep 7183.01",
        "echo first; env -i setsid sh -c '(env -i setsid sleep 7183.01 &)'; sleep 7183.01",
        "echo first; while :; do sleep 7183.01 & [ -e /no ] || sleep 0.01; done",
    };
    for (size_t i = 0; i < sizeof scripts / sizeof scripts[0]; i++) {
        uint64_t start = mono_ms();
        struct ran r = run_limited(scripts[i], 200, 0);
        uint64_t took = mono_ms() - start;
        assert_int_equal(r.rc, 0);
        assert_int_equal(r.result.outcome, EXEC_TIMED_OUT);
        assert_int_equal(r.result.exit.flags & WIRE_EXIT_SURVIVORS, 0);
        assert_int_equal(r.out.len, 6);
        assert_true(took >= 200 && took < 2000);
        ran_free(&r);
        assert_true(processes_gone("7183.01"));
    }
    assert_int_equal(count_children(fx.pid), 0);
    struct ran r = run_limited("echo next", 5000, 0);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    ran_free(&r);
}

static void kill_rest_leaves_no_background(void **state)
{
    struct ran r =
        run_limited("(setsid sleep 7183.02 &); echo out; exit 7", 0, WIRE_EXEC_KILL_REST);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    assert_int_equal(r.result.exit.value, 7);
    assert_int_equal(r.out.len, 4);
    ran_free(&r);
    assert_true(processes_gone("7183.02"));
    assert_int_equal(count_children(fx.pid), 0);
}

/* G5: orphans are reaped, and no status is taken by the reaper. */
static void G5_orphans_and_statuses(void **state)
{
    for (int i = 0; i < 250; i++) {
        struct ran r = agent_sh(&fx, i % 2 == 0 ? "sleep 0.1 & exit 7" : "exit 7");
        assert_int_equal(r.result.outcome, EXEC_EXITED);
        assert_int_equal(r.result.exit.value, 7);
        ran_free(&r);
    }
    for (uint64_t end = mono_ms() + 5000; count_children(fx.pid) > 0; usleep(2000))
        assert_true(mono_ms() < end);
}

/* G7: the client vanishes, in several ways. */
static void G7_vanished_client(void **state)
{
    size_t fds = count_fds(fx.pid);
    for (int i = 0; i < 200; i++) {
        int fd = agent_connect(&fx);
        (void)raw_start(
            fd, i % 4 == 3 ? "setsid sleep 7183.03 & exec sleep 7183.03" : "exec sleep 7183.03", 0);
        if (i % 4 == 1)
            assert_int_equal(shutdown(fd, SHUT_WR), 0);
        if (i % 4 == 2) /* output nobody takes */
            close(agent_connect(&fx));
        close(fd);
    }
    assert_true(processes_gone("7183.03"));
    for (uint64_t end = mono_ms() + 5000; count_fds(fx.pid) != fds || count_children(fx.pid) > 0;
         usleep(2000))
        assert_true(mono_ms() < end);
}

static void vanished_while_output_waits(void **state)
{
    int fd = agent_connect(&fx);
    (void)raw_start(fd, "exec yes 7183.04", 0);
    usleep(50000); /* let the buffers fill; the outcome does not depend on it */
    close(fd);
    assert_true(processes_gone("7183.04"));
}

static void half_sent_requests_and_silence_hold_nothing(void **state)
{
    size_t fds = count_fds(fx.pid);
    for (int i = 0; i < 100; i++) {
        int fd = agent_connect(&fx);
        uint8_t header[WIRE_HEADER_SIZE];
        wire_header_put(header, WIRE_EXEC, 1000 + 10000u * (uint32_t)i);
        assert_true(send(fd, header, i % 9, MSG_NOSIGNAL) >= 0);
        if (i % 9 == 8)
            assert_true(send(fd, header, 8, MSG_NOSIGNAL) == 8);
        close(fd);
    }
    for (uint64_t end = mono_ms() + 5000; count_fds(fx.pid) != fds; usleep(2000))
        assert_true(mono_ms() < end);
}

static void signals_reach_the_group(void **state)
{
    uint8_t p[WIRE_DATA_MAX];
    size_t len = 0;
    int fd = agent_connect(&fx);
    (void)raw_start(fd, "trap 'echo int; exit 8' INT; echo up; sleep 7183.05 & wait", 0);
    assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_STDOUT);
    wire_put32(p, SIGINT);
    frame_send(fd, WIRE_SIGNAL, p, 4);
    assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_STDOUT);
    assert_memory_equal(p, "int\n", 4);
    struct wire_exit x;
    assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_EXIT);
    assert_int_equal(wire_exit_decode(p, len, &x), 0);
    assert_int_equal(x.value, 8);
    close(fd);
    (void)agent_sh(&fx, "pkill -f 'sleep 7183[.]05'"); /* sh had it ignore SIGINT */
    assert_true(processes_gone("7183.05"));
}

/* The way of the command line: a signalfd, and stdin that the program never reads. */
static void client_passes_signals_on_behind_unread_stdin(void **state)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    assert_int_equal(sigprocmask(SIG_BLOCK, &set, NULL), 0);
    int pipe_fds[2], sfd = signalfd(-1, &set, SFD_CLOEXEC);
    assert_int_equal(pipe(pipe_fds), 0);
    pid_t writer = fork();
    if (writer == 0) { /* fills our stdin for ever, and signals us once */
        static char zeros[65536];
        close(pipe_fds[0]);
        for (int i = 0; write(pipe_fds[1], zeros, sizeof zeros) > 0; i++)
            if (i == 1)
                kill(getppid(), SIGUSR1);
        _exit(0);
    }
    close(pipe_fds[1]);
    const char *const argv[] = {"sleep", "7183.06", NULL};
    struct exec_request q = {.argv = argv};
    struct exec_io io = {.stdin_fd = pipe_fds[0],
                         .stdout_fd = -1,
                         .stderr_fd = -1,
                         .signal_fd = sfd,
                         .winsize_fd = -1};
    struct exec_result result;
    struct err e = {0};
    int conn = agent_connect(&fx);
    assert_int_equal(exec_client_run(conn, &q, &io, &result, &e), 0);
    assert_int_equal(result.outcome, EXEC_SIGNALED);
    assert_int_equal(exec_result_status(&result), 128 + SIGUSR1);
    kill(writer, SIGKILL);
    close(conn);
    close(sfd);
    close(pipe_fds[0]);
}

static void one_past_the_limit_is_refused(void **state)
{
    int fds[WIRE_EXEC_CONNECTIONS_MAX];
    uint8_t p[512];
    size_t len = 0;
    for (size_t i = 0; i < WIRE_EXEC_CONNECTIONS_MAX; i++) {
        fds[i] = agent_connect(&fx);
        (void)raw_start(fds[i], "exec cat", WIRE_EXEC_STDIN);
    }
    struct ran r = agent_sh(&fx, "echo no");
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.result.outcome, EXEC_REFUSED);
    assert_int_equal(r.result.refused_code, WIRE_ERR_BUSY);
    assert_int_equal(exec_result_status(&r.result), 125);
    ran_free(&r);
    for (size_t i = 0; i < WIRE_EXEC_CONNECTIONS_MAX; i++) { /* all others are unharmed */
        frame_send(fds[i], WIRE_STDIN, "ping", 4);
        assert_int_equal(frame_recv(fds[i], p, sizeof p, &len), WIRE_STDOUT);
        assert_int_equal(len, 4);
        frame_send(fds[i], WIRE_STDIN_EOF, NULL, 0);
        assert_true(frame_await(fds[i], WIRE_EXIT, p, sizeof p, &len));
        close(fds[i]);
    }
    r = agent_sh(&fx, "echo yes");
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    ran_free(&r);
}

static void assert_error(int fd, uint32_t code)
{
    uint8_t *p = malloc(WIRE_DATA_MAX);
    size_t len = 0;
    assert_true(frame_await(fd, WIRE_ERROR, p, WIRE_DATA_MAX, &len));
    assert_int_equal(wire_get32(p), code);
    assert_int_equal(frame_recv(fd, p, WIRE_DATA_MAX, &len), 0);
    close(fd);
    free(p);
}

static void malformed_first_frames(void **state)
{
    uint8_t p[256] = {0};
    struct wire_exec head = {.argc = 2, .envc = 1};
    static const struct {
        const char *strings;
        size_t len;
    } bad[] = {{"/\0a\0b\0E=1", 8},
               {"/\0a\0b\0E=1\0x", 11},
               {"/\0a\0b\0E\0", 8},
               {"/\0a\0b\0=E\0", 9},
               {"", 0},
               {"/\0a\0b\0E=1\0\0", 11},
               {"no end anywhere", 15}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int fd = agent_connect(&fx);
        (void)wire_exec_head_encode(&head, p, sizeof p);
        memcpy(p + WIRE_EXEC_HEAD_SIZE, bad[i].strings, bad[i].len);
        frame_send(fd, WIRE_EXEC, p, WIRE_EXEC_HEAD_SIZE + bad[i].len);
        assert_error(fd, WIRE_ERR_MALFORMED);
    }
    static const struct {
        uint32_t type, length, code;
    } headers[] = {{WIRE_EXEC, WIRE_EXEC_HEAD_SIZE - 1, WIRE_ERR_MALFORMED},
                   {WIRE_EXEC, WIRE_EXEC_PAYLOAD_MAX + 1, WIRE_ERR_TOO_LARGE},
                   {WIRE_EXEC, UINT32_MAX, WIRE_ERR_TOO_LARGE},
                   {99, 0, WIRE_ERR_MALFORMED},
                   {0x20544547, 0x5448202f, WIRE_ERR_MALFORMED}, /* "GET / HT" */
                   {WIRE_STDIN_EOF, 0, WIRE_ERR_STATE}};
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        int fd = agent_connect(&fx);
        wire_header_put(p, headers[i].type, headers[i].length);
        assert_int_equal(send(fd, p, WIRE_HEADER_SIZE, MSG_NOSIGNAL), (int)WIRE_HEADER_SIZE);
        assert_error(fd, headers[i].code);
    }
    int fd = agent_connect(&fx);
    (void)wire_exec_head_encode(&head, p, sizeof p);
    wire_put32(p, 2);
    frame_send(fd, WIRE_EXEC, p, WIRE_EXEC_HEAD_SIZE);
    assert_error(fd, WIRE_ERR_VERSION);
    assert_int_equal(count_children(fx.pid), 0);
}

static void malformed_later_frames_kill(void **state)
{
    static uint8_t data[WIRE_DATA_MAX];
    static const struct {
        uint32_t type;
        size_t length;
        uint32_t flags, code;
    } bad[] = {{WIRE_SIGNAL, 4, 0, WIRE_ERR_MALFORMED}, /* signal 0 */
               {WIRE_STDIN, 1, 0, WIRE_ERR_STATE},
               {WIRE_STDIN_EOF, 0, 0, WIRE_ERR_STATE},
               {WIRE_WINSIZE, 4, 0, WIRE_ERR_STATE},
               {WIRE_STDOUT, 1, 0, WIRE_ERR_MALFORMED},
               {WIRE_EXEC, 40, 0, WIRE_ERR_STATE},
               {WIRE_STDIN, 0, WIRE_EXEC_STDIN, WIRE_ERR_MALFORMED},
               {77, 3, WIRE_EXEC_STDIN, WIRE_ERR_MALFORMED}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int fd = agent_connect(&fx);
        (void)raw_start(fd, "exec sleep 7183.07", bad[i].flags);
        frame_send(fd, bad[i].type, data, bad[i].length);
        assert_error(fd, bad[i].code);
    }
    /* A second EXEC too long for the ordinary buffer, and stdin beyond the window. */
    int fd = agent_connect(&fx);
    (void)raw_start(fd, "exec sleep 7183.07", 0);
    wire_header_put(data, WIRE_EXEC, WIRE_EXEC_PAYLOAD_MAX);
    assert_int_equal(send(fd, data, WIRE_HEADER_SIZE, MSG_NOSIGNAL), (int)WIRE_HEADER_SIZE);
    assert_error(fd, WIRE_ERR_STATE);
    fd = agent_connect(&fx);
    (void)raw_start(fd, "exec sleep 7183.07", WIRE_EXEC_STDIN);
    for (int i = 0; i < 4; i++) /* a pipe takes one, the window one more, credit is not awaited */
        frame_send(fd, WIRE_STDIN, data, sizeof data);
    assert_error(fd, WIRE_ERR_WINDOW);
    assert_true(processes_gone("7183.07"));
}

/* Random bytes as first and later input: the agent lives and serves. */
static void noise_does_no_harm(void **state)
{
    unsigned seed = 7183;
    for (int i = 0; i < 300; i++) {
        uint8_t noise[600];
        int fd = agent_connect(&fx);
        if (i % 2 == 1)
            (void)raw_start(fd, "exec cat", WIRE_EXEC_STDIN);
        for (size_t j = 0; j < sizeof noise; j++)
            noise[j] = (uint8_t)rand_r(&seed);
        if (i % 3 == 0)
            wire_header_put(noise, (uint32_t)rand_r(&seed) % 70, (uint32_t)rand_r(&seed) % 500);
        (void)!send(fd, noise, sizeof noise, MSG_NOSIGNAL);
        close(fd);
    }
    struct ran r = agent_sh(&fx, "echo yes");
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    ran_free(&r);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(G4_timeout_kills_all_descendants), T(kill_rest_leaves_no_background),
        T(G5_orphans_and_statuses),          T(G7_vanished_client),
        T(vanished_while_output_waits),      T(half_sent_requests_and_silence_hold_nothing),
        T(signals_reach_the_group),          T(client_passes_signals_on_behind_unread_stdin),
        T(one_past_the_limit_is_refused),    T(malformed_first_frames),
        T(malformed_later_frames_kill),      T(noise_does_no_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
