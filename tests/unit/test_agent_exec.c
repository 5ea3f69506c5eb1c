/*
 * Running programs through the agent: bytes, arguments, exit statuses, start failures, stdin, caps
 * and malformed requests. Names of cases are those of the case list (A8, G1, G2, G3, G9, G13).
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

static struct ran run(const char *const *argv)
{
    return agent_run(&fx, (struct exec_request){.cwd = NULL}, argv, NULL, 0);
}

static void assert_text(const struct exec_capture *c, const char *want)
{
    assert_int_equal(c->len, strlen(want));
    assert_memory_equal(c->data == NULL ? "" : (const char *)c->data, want, c->len);
}

/* G13: the list stays a list, streams stay apart, the code is the code. */
static void G13_argv_and_streams(void **state)
{
    const char *const argv[] = {"printf", "%s|", "a b", "$HOME", "x'y", "", "\n", NULL};
    struct ran r = run(argv);
    assert_int_equal(r.rc, 0);
    assert_text(&r.out, "a b|$HOME|x'y||\n|");
    ran_free(&r);
    r = agent_sh(&fx, "echo o; echo e >&2; exit 3");
    assert_text(&r.out, "o\n");
    assert_text(&r.err, "e\n");
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    assert_int_equal(r.result.exit.value, 3);
    assert_int_equal(r.result.exit.stdout_sent, 2);
    assert_int_equal(r.result.exit.stderr_sent, 2);
    ran_free(&r);
}

static void environment_is_what_was_asked(void **state)
{
    const char *const argv[] = {"env", NULL};
    const char *const env[] = {"A=x loglevel=7 init=/bin/sh", "HOME=/elsewhere", "E=", NULL};
    struct ran r = agent_run(&fx, (struct exec_request){.env = env}, argv, NULL, 0);
    assert_text(&r.out, "A=x loglevel=7 init=/bin/sh\nHOME=/elsewhere\nE=\n"
                        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n");
    ran_free(&r);
    r = agent_run(&fx, (struct exec_request){.cwd = "/tmp"},
                  (const char *const[]){"/bin/pwd", NULL}, NULL, 0);
    assert_text(&r.out, "/tmp\n");
    ran_free(&r);
}

/* A8: a 100 kB argument, and a request as large as the protocol takes, and one byte more. */
static void A8_long_arguments(void **state)
{
    char *big = malloc(100001);
    memset(big, 'a', 100000);
    big[100000] = 0;
    struct ran r = run((const char *const[]){"printf", "%s", big, NULL});
    assert_int_equal(r.out.len, 100000);
    assert_memory_equal(r.out.data, big, 100000);
    ran_free(&r);
    /* 9 x 100001 bytes, printf, %s, cwd, head; the rest of 1 MiB in one more argument. */
    const char *argv[13] = {"printf", "%s", big, big, big,  big, big,
                            big,      big,  big, big, NULL, NULL};
    size_t rest = WIRE_EXEC_PAYLOAD_MAX - WIRE_EXEC_HEAD_SIZE - 1 - 7 - 3 - 9 * 100001 - 1;
    char *last = malloc(rest + 2);
    memset(last, 'b', rest + 1);
    last[rest] = 0;
    argv[11] = last;
    assert_true(rest > 131072 - 1); /* over the kernel's limit for one string */
    r = run(argv);
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.result.outcome, EXEC_NOT_STARTED);
    assert_int_equal(r.result.failed_errno, E2BIG);
    ran_free(&r);
    last[rest] = 'b';
    last[rest + 1] = 0;
    struct exec_result result;
    struct err e = {0};
    struct exec_io io = {-1, -1, -1, -1, -1, NULL, NULL};
    struct exec_request request = {.argv = argv};
    int conn = agent_connect(&fx);
    assert_int_equal(exec_client_run(conn, &request, &io, &result, &e), -E2BIG);
    close(conn);
    free(last);
    free(big);
}

static void number_of_arguments_at_the_limit(void **state)
{
    const char **argv = calloc(WIRE_ARGC_MAX + 2, sizeof *argv);
    argv[0] = "true";
    for (size_t i = 1; i < WIRE_ARGC_MAX; i++)
        argv[i] = "x";
    struct ran r = run(argv);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    ran_free(&r);
    argv[WIRE_ARGC_MAX] = "x";
    r = run(argv);
    assert_int_equal(r.rc, -E2BIG);
    ran_free(&r);
    free(argv);
}

static void environment_at_the_limit(void **state)
{
    const char **env = calloc(WIRE_ENVC_MAX + 2, sizeof *env);
    for (size_t i = 0; i < WIRE_ENVC_MAX; i++)
        env[i] = "A=1";
    const char *const argv[] = {"sh", "-c", "cat /proc/self/environ | tr '\\0' '\\n' | wc -l",
                                NULL};
    struct ran r = agent_run(&fx, (struct exec_request){.env = env}, argv, NULL, 0);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    assert_true(r.out.len >= 2);
    ran_free(&r);
    env[WIRE_ENVC_MAX] = "A=1";
    r = agent_run(&fx, (struct exec_request){.env = env}, argv, NULL, 0);
    assert_int_equal(r.rc, -E2BIG);
    ran_free(&r);
    free(env);
}

static void tunables_come_from_the_agent_unless_asked(void **state)
{
    struct fixture own;
    assert_int_equal(setenv("GLIBC_TUNABLES", "glibc.malloc.check=0", 1), 0);
    fixture_start(&own, false);
    assert_int_equal(unsetenv("GLIBC_TUNABLES"), 0);
    const char *const argv[] = {"sh", "-c", "echo $GLIBC_TUNABLES", NULL};
    const char *const env[] = {"GLIBC_TUNABLES=glibc.malloc.perturb=0", NULL};
    struct ran r = agent_run(&own, (struct exec_request){.env = NULL}, argv, NULL, 0);
    assert_text(&r.out, "glibc.malloc.check=0\n");
    ran_free(&r);
    r = agent_run(&own, (struct exec_request){.env = env}, argv, NULL, 0);
    assert_text(&r.out, "glibc.malloc.perturb=0\n");
    ran_free(&r);
    fixture_stop(&own);
}

/* G3: code and signal told apart, start failures are their own. */
static void G3_statuses(void **state)
{
    static const struct {
        const char *script;
        enum exec_outcome outcome;
        uint32_t value;
        int status;
    } cases[] = {{"kill -9 $$", EXEC_SIGNALED, 9, 137},
                 {"kill -15 $$", EXEC_SIGNALED, 15, 143},
                 {"exit 9", EXEC_EXITED, 9, 9},
                 {"exit 137", EXEC_EXITED, 137, 137},
                 {"exit 255", EXEC_EXITED, 255, 255},
                 {"kill -PIPE $$", EXEC_SIGNALED, 13, 141},
                 {"trap '' TERM; kill -TERM $$; exit 4", EXEC_EXITED, 4, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct ran r = agent_sh(&fx, cases[i].script);
        assert_int_equal(r.rc, 0);
        assert_int_equal(r.result.outcome, cases[i].outcome);
        assert_int_equal(r.result.exit.value, cases[i].value);
        assert_int_equal(exec_result_status(&r.result), cases[i].status);
        ran_free(&r);
    }
}

static void assert_not_started(struct ran r, uint32_t what, uint32_t error, int status)
{
    char text[400];
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.result.outcome, EXEC_NOT_STARTED);
    assert_int_equal(r.result.failed_what, what);
    assert_int_equal(r.result.failed_errno, error);
    assert_int_equal(exec_result_status(&r.result), status);
    exec_result_describe(&r.result, text, sizeof text);
    assert_true(strlen(text) > 10);
    ran_free(&r);
}

static void G3_start_failures(void **state)
{
    const char *const none[] = {"no-such-program-7183", NULL};
    assert_not_started(run(none), WIRE_FAILED_PROGRAM, ENOENT, 127);
    const char *const none_abs[] = {"/no/such", NULL};
    assert_not_started(run(none_abs), WIRE_FAILED_PROGRAM, ENOENT, 127);
    const char *const not_exec[] = {"/etc/passwd", NULL};
    assert_not_started(run(not_exec), WIRE_FAILED_PROGRAM, EACCES, 126);
    const char *const folder[] = {"/etc", NULL};
    assert_not_started(run(folder), WIRE_FAILED_PROGRAM, EACCES, 126);
    const char *const empty[] = {"", NULL};
    assert_not_started(run(empty), WIRE_FAILED_PROGRAM, ENOENT, 127);
    const char *const ok[] = {"true", NULL};
    assert_not_started(agent_run(&fx, (struct exec_request){.cwd = "/no/such"}, ok, NULL, 0),
                       WIRE_FAILED_CWD, ENOENT, 126);
    assert_not_started(agent_run(&fx, (struct exec_request){.cwd = "/etc/passwd"}, ok, NULL, 0),
                       WIRE_FAILED_CWD, ENOTDIR, 126);
    const char *const env[] = {"PATH=/no/such::/nor/this", NULL};
    assert_not_started(agent_run(&fx, (struct exec_request){.env = env}, ok, NULL, 0),
                       WIRE_FAILED_PROGRAM, ENOENT, 127);
    assert_int_equal(count_children(fx.pid), 0);
}

static void identity_is_taken_on(void **state)
{
    if (geteuid() != 0)
        skip();
    const char *const argv[] = {"sh", "-c", "id -u; id -g; id -G; echo $HOME", NULL};
    struct exec_request q = {.flags = WIRE_EXEC_IDENTITY, .uid = 12345, .gid = 23456};
    struct ran r = agent_run(&fx, q, argv, NULL, 0);
    assert_text(&r.out, "12345\n23456\n23456\n/\n");
    ran_free(&r);
}

static void child_gets_three_fds_and_default_signals(void **state)
{
    /* ls adds the fd of the folder itself; the sorted list is what a program finds. */
    struct ran r = agent_sh(&fx, "cd /proc/self/fd && echo *; grep -E '^Sig(Blk|Ign)' "
                                 "/proc/self/status | cut -f2; umask");
    assert_true(r.out.len > 4);
    assert_memory_equal(r.out.data, "0 1 2", 5);
    assert_non_null(
        memmem(r.out.data, r.out.len, "\n0000000000000000\n0000000000000000\n0022\n", 40));
    ran_free(&r);
    r = agent_sh(&fx, "set -- $(cat /proc/self/stat); echo $(( $5 == $6 )); ps -o sid= -p $$");
    assert_memory_equal(r.out.data, "1\n", 2);
    ran_free(&r);
}

/* G2: end-of-file, unread input, much input. */
static void G2_stdin(void **state)
{
    const char *const wc[] = {"wc", "-c", NULL};
    const struct exec_request q = {.cwd = NULL};
    struct ran r = agent_run(&fx, q, wc, "\x00\x01\x02\xff", 4);
    assert_text(&r.out, "4\n");
    ran_free(&r);
    r = agent_run(&fx, q, wc, "", 0);
    assert_text(&r.out, "0\n");
    ran_free(&r);
    r = agent_run(&fx, q, wc, NULL, 0);
    assert_text(&r.out, "0\n");
    ran_free(&r);
    size_t size = 100u << 20;
    char *big = calloc(1, size);
    r = agent_run(&fx, q, wc, big, size);
    assert_text(&r.out, "104857600\n");
    ran_free(&r);
    /* Never read: neither a running program nor one that closed its stdin blocks. */
    r = agent_run(&fx, q, (const char *const[]){"sleep", "0.1", NULL}, big, size);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    ran_free(&r);
    r = agent_run(&fx, q, (const char *const[]){"sh", "-c", "exec <&-; sleep 0.1; echo k", NULL},
                  big, size);
    assert_text(&r.out, "k\n");
    ran_free(&r);
    r = agent_run(&fx, q, (const char *const[]){"head", "-c", "3", NULL}, big, size);
    assert_int_equal(r.out.len, 3);
    ran_free(&r);
    free(big);
}

/* G9: every byte value, through cat, both ways; and a split character. */
static void G9_bytes_are_bytes(void **state)
{
    size_t size = 3 * 65536 + 17;
    uint8_t *in = malloc(size);
    for (size_t i = 0; i < size; i++)
        in[i] = (uint8_t)(i * 7 + (i >> 8));
    struct ran r = agent_run(&fx, (struct exec_request){.cwd = NULL},
                             (const char *const[]){"cat", NULL}, in, size);
    assert_int_equal(r.out.len, size);
    assert_memory_equal(r.out.data, in, size);
    ran_free(&r);
    free(in);
    r = agent_sh(&fx, "printf '\\303'; sleep 0.05; printf '\\251\\000z'");
    assert_int_equal(r.out.len, 4);
    assert_memory_equal(r.out.data, "\303\251\0z", 4);
    ran_free(&r);
}

/* G1: all bytes of both streams at once; with a cap, the cap and the rest counted. */
static void G1_much_output(void **state)
{
    const char *script = "head -c 20000000 /dev/zero | tr '\\0' A & "
                         "head -c 20000000 /dev/zero | tr '\\0' B >&2; wait";
    struct ran r = agent_sh(&fx, script);
    assert_int_equal(r.out.len, 20000000);
    assert_int_equal(r.err.len, 20000000);
    for (size_t i = 0; i < r.out.len; i++)
        if (r.out.data[i] != 'A' || r.err.data[i] != 'B')
            fail_msg("wrong byte at %zu", i);
    ran_free(&r);
    const char *const argv[] = {"sh", "-c", script, NULL};
    r = agent_run(&fx, (struct exec_request){.output_cap_bytes = 1000001}, argv, NULL, 0);
    assert_int_equal(r.out.len, 1000001);
    assert_int_equal(r.err.len, 1000001);
    assert_int_equal(r.result.exit.stdout_sent, 1000001);
    assert_int_equal(r.result.exit.stdout_dropped, 20000000 - 1000001);
    assert_int_equal(r.result.exit.stderr_dropped, 20000000 - 1000001);
    ran_free(&r);
}

/* G1: a client that reads slowly gets all, and others are served meanwhile. */
static void G1_slow_reader_holds_up_nobody(void **state)
{
    uint8_t *p = malloc(WIRE_DATA_MAX);
    size_t len = 0, total = 0;
    int slow = agent_connect(&fx);
    (void)raw_start(slow, "head -c 3000000 /dev/zero", 0);
    uint32_t type;
    for (int i = 0; (type = frame_recv(slow, p, WIRE_DATA_MAX, &len)) == WIRE_STDOUT; i++) {
        total += len;
        if (i % 8 == 0) {
            struct ran r = agent_sh(&fx, "echo quick");
            assert_text(&r.out, "quick\n");
            ran_free(&r);
        }
    }
    assert_int_equal(type, WIRE_EXIT);
    assert_int_equal(total, 3000000);
    close(slow);
    free(p);
}

static void background_process_does_not_hold_the_exit_up(void **state)
{
    uint64_t start = mono_ms();
    struct ran r = agent_sh(&fx, "sleep 3.7183 & head -c 50000 /dev/zero; exit 5");
    assert_int_equal(r.out.len, 50000);
    assert_int_equal(r.result.exit.value, 5);
    assert_true(mono_ms() - start < 2500);
    ran_free(&r);
    assert_int_equal(count_children(fx.pid), 1); /* it lives on */
    assert_true(processes_gone("3.7183"));
}

static void terminal_has_a_size_and_is_one_stream(void **state)
{
    const char *const argv[] = {"sh", "-c",
                                "tty >/dev/null && stty size; echo e >&2; read x; "
                                "echo got=$x; exit 6",
                                NULL};
    struct exec_request q = {.flags = WIRE_EXEC_PTY, .rows = 33, .cols = 101};
    struct ran r = agent_run(&fx, q, argv, "hello\n", 6);
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    assert_int_equal(r.result.exit.value, 6);
    assert_int_equal(r.err.len, 0);
    assert_non_null(memmem(r.out.data, r.out.len, "33 101\r\n", 8));
    assert_non_null(memmem(r.out.data, r.out.len, "e\r\n", 3));
    assert_non_null(memmem(r.out.data, r.out.len, "got=hello\r\n", 11));
    ran_free(&r);
    /* End of input, also behind an unfinished line, and with no input at all. */
    const char *const cat[] = {"cat", NULL};
    r = agent_run(&fx, q, cat, "half", 4);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    ran_free(&r);
    r = agent_run(&fx, q, cat, NULL, 0);
    assert_int_equal(r.result.outcome, EXEC_EXITED);
    ran_free(&r);
}

static void client_writes_to_fds_and_leaves_their_flags(void **state)
{
    char path[] = "/tmp/tine-agent-out-XXXXXX";
    int file = mkstemp(path), pipe_fds[2];
    assert_true(file >= 0);
    assert_int_equal(pipe(pipe_fds), 0);
    const char *const argv[] = {"sh", "-c", "head -c 300000 /dev/zero; echo err >&2", NULL};
    struct exec_request q = {.argv = argv};
    struct exec_io io = {.stdin_fd = -1,
                         .stdout_fd = file,
                         .stderr_fd = pipe_fds[1],
                         .signal_fd = -1,
                         .winsize_fd = -1};
    struct exec_result result;
    struct err e = {0};
    int conn = agent_connect(&fx);
    assert_int_equal(exec_client_run(conn, &q, &io, &result, &e), 0);
    assert_int_equal(lseek(file, 0, SEEK_END), 300000);
    char text[16];
    assert_int_equal(read(pipe_fds[0], text, sizeof text), 4);
    close(conn);
    /* A reader that has gone ends the command, as in any pipe. */
    close(pipe_fds[0]);
    conn = agent_connect(&fx);
    assert_int_equal(exec_client_run(conn, &q, &io, &result, &e), -EPIPE);
    close(conn);
    close(pipe_fds[1]);
    close(file);
    (void)unlink(path);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(G13_argv_and_streams),
        T(environment_is_what_was_asked),
        T(A8_long_arguments),
        T(number_of_arguments_at_the_limit),
        T(environment_at_the_limit),
        T(tunables_come_from_the_agent_unless_asked),
        T(G3_statuses),
        T(G3_start_failures),
        T(identity_is_taken_on),
        T(child_gets_three_fds_and_default_signals),
        T(G2_stdin),
        T(G9_bytes_are_bytes),
        T(G1_much_output),
        T(G1_slow_reader_holds_up_nobody),
        T(background_process_does_not_hold_the_exit_up),
        T(terminal_has_a_size_and_is_one_stream),
        T(client_writes_to_fds_and_leaves_their_flags),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
