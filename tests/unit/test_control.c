/*
 * The control socket as a client meets it: limits, time-outs, clients that vanish (F1), repeated
 * and misplaced requests (F2), and what is left of it in a fork child.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/unit/control_fixture.h"
#include "vmm/control_client.h"
#include "vmm/control_parse.h"
#include "vmm/core/err.h"

#define STATUS "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\"}"

/* A well-formed request of exactly `len` bytes (padded with white space). */
static char *padded(size_t len)
{
    char *s = malloc(len + 2);
    memset(s, ' ', len);
    memcpy(s, STATUS, strlen(STATUS));
    s[len] = '\n';
    s[len + 1] = '\0';
    return s;
}

static void F1_bodies_up_to_the_limit_are_served(void **state)
{
    struct fixture *f = *state;
    static const size_t sizes[] = {
        1023, 1024, 1025, 65535, 65536, 65537, CONTROL_LINE_MAX - 1, CONTROL_LINE_MAX};
    int fd = fixture_client(f);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *s = padded(sizes[i]);
        fixture_send(f, fd, s, sizes[i] + 1);
        assert_int_equal(answer_code(fixture_answer(f, fd)), 0);
        free(s);
    }
    (void)close(fd);
}

static void F1_one_byte_past_the_limit_is_too_large(void **state)
{
    struct fixture *f = *state;
    for (int newline = 0; newline < 2; newline++) {
        int fd = fixture_client(f);
        char *s = padded(CONTROL_LINE_MAX + 1);
        fixture_send(f, fd, s, CONTROL_LINE_MAX + 1 + (size_t)newline);
        assert_int_equal(answer_code(fixture_answer(f, fd)), RPC_TOO_LARGE);
        assert_null(fixture_answer(f, fd));
        free(s);
        (void)close(fd);
    }
}

static void F1_a_gigabyte_is_refused_and_not_kept(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    static char zeros[1 << 20];
    memset(zeros, '0', sizeof zeros);
    for (int i = 0; i < 1024; i++)
        fixture_send(f, fd, zeros, sizeof zeros);
    assert_int_equal(answer_code(fixture_answer(f, fd)), RPC_TOO_LARGE);
    (void)close(fd);
}

static void F1_a_stalled_client_holds_nobody_up(void **state)
{
    struct fixture *f = *state;
    int stalled = fixture_client(f);
    fixture_send(f, stalled, STATUS, 9);
    int other = fixture_client(f);
    for (int i = 0; i < 3; i++)
        assert_int_equal(answer_code(fixture_call(f, other, STATUS)), 0);
    fixture_send(f, stalled, STATUS + 9, strlen(STATUS) - 9);
    fixture_send(f, stalled, "\n", 1);
    assert_int_equal(answer_code(fixture_answer(f, stalled)), 0);
    (void)close(stalled);
    (void)close(other);
}

/* Time passes by moving the deadline of the one armed timer. */
static void expire_first_timer(struct fixture *f)
{
    assert_non_null(f->loop.timers);
    f->loop.timers->deadline_ns = 1;
}

static void F1_a_slow_line_is_timed_out(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    assert_int_equal(answer_code(fixture_call(f, fd, STATUS)), 0);
    assert_null(f->loop.timers); /* an idle client is in nobody's way */
    fixture_send(f, fd, "{", 1);
    fixture_settle(f);
    uint64_t first = f->loop.timers->deadline_ns;
    fixture_send(f, fd, "\"", 1); /* one byte a second does not move the deadline */
    fixture_settle(f);
    assert_true(f->loop.timers->deadline_ns == first);
    expire_first_timer(f);
    assert_int_equal(answer_code(fixture_answer(f, fd)), RPC_TOO_SLOW);
    assert_null(fixture_answer(f, fd));
    (void)close(fd);
}

static void F1_a_new_line_gets_its_own_time(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    fixture_send(f, fd, "{", 1);
    fixture_settle(f);
    uint64_t first = f->loop.timers->deadline_ns;
    fixture_send(f, fd, "}\n{", 3);
    (void)answer_code(fixture_answer(f, fd));
    fixture_settle(f);
    assert_true(f->loop.timers->deadline_ns > first);
    (void)close(fd);
}

static void the_last_place_is_given_and_one_more_refused(void **state)
{
    struct fixture *f = *state;
    int fds[CONTROL_CLIENTS_MAX];
    for (int i = 0; i < CONTROL_CLIENTS_MAX; i++)
        fds[i] = fixture_client(f);
    int extra = fixture_client(f);
    assert_int_equal(answer_code(fixture_answer(f, extra)), RPC_TOO_MANY_CLIENTS);
    assert_null(fixture_answer(f, extra));
    assert_int_equal(answer_code(fixture_call(f, fds[CONTROL_CLIENTS_MAX - 1], STATUS)), 0);
    (void)close(fds[0]);
    fixture_settle(f);
    int again = fixture_client(f);
    assert_int_equal(answer_code(fixture_call(f, again, STATUS)), 0);
    (void)close(extra);
    (void)close(again);
    for (int i = 1; i < CONTROL_CLIENTS_MAX; i++)
        (void)close(fds[i]);
    fixture_settle(f);
}

static void a_reader_that_never_reads_is_dropped(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    const char *line =
        "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"console\",\"params\":{\"bytes\":65536}}\n";
    bool closed = false;
    for (int i = 0; i < 400 && !closed; i++) {
        closed = send(fd, line, strlen(line), MSG_NOSIGNAL) < 0 && errno == EPIPE;
        assert_int_equal(loop_round(&f->loop, 0, NULL), 0);
    }
    assert_true(closed);
    (void)close(fd);
}

static void a_client_that_stops_sending_still_gets_its_answers(void **state)
{
    struct fixture *f = *state;
    f->machine.hold = true;
    int fd = fixture_client(f);
    const char *line = "{\"jsonrpc\":\"2.0\",\"id\":\"a\",\"method\":\"snapshot\","
                       "\"params\":{\"dir\":\"/x\"}}\n";
    fixture_send(f, fd, line, strlen(line));
    assert_int_equal(shutdown(fd, SHUT_WR), 0);
    fixture_settle(f);
    assert_int_equal(f->machine.held_count, 1);
    control_reply(f->machine.held[0], NULL);
    assert_int_equal(answer_code(fixture_answer(f, fd)), 0);
    assert_null(fixture_answer(f, fd));
    (void)close(fd);
}

static void an_answer_to_a_vanished_client_is_dropped(void **state)
{
    struct fixture *f = *state;
    f->machine.hold = true;
    int fd = fixture_client(f);
    const char *line =
        "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"fork\",\"params\":{\"count\":2}}\n"
        "{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"wait\",\"params\":{\"for\":\"ended\"}}\n";
    fixture_send(f, fd, line, strlen(line));
    (void)close(fd);
    fixture_settle(f);
    assert_int_equal(f->machine.held_count, 1); /* what was asked for is done all the same */
    assert_null(f->loop.timers);                /* the wait is gone with its client */
    struct err e = {0};
    (void)err_set(&e, ERR_HOST, EIO, "fork");
    control_fail(f->machine.held[0], &e);
    control_state_changed(f->control);
    int other = fixture_client(f);
    assert_int_equal(answer_code(fixture_call(f, other, STATUS)), 0);
    (void)close(other);
}

static void requests_past_the_pending_limit_wait_unread(void **state)
{
    struct fixture *f = *state;
    f->machine.hold = true;
    int fd = fixture_client(f);
    char line[128];
    for (int i = 0; i < CONTROL_PENDING_MAX + 5; i++) {
        int n =
            snprintf(line, sizeof line, "{\"jsonrpc\":\"2.0\",\"id\":%d,\"method\":\"quit\"}\n", i);
        fixture_send(f, fd, line, (size_t)n);
    }
    fixture_settle(f);
    assert_int_equal(f->machine.held_count, CONTROL_PENDING_MAX);
    for (unsigned i = 0; i < CONTROL_PENDING_MAX + 5; i++) {
        while (f->machine.held_count <= i)
            assert_int_equal(loop_round(&f->loop, 1000, NULL), 0);
        control_reply(f->machine.held[i], NULL);
        json_t *a = fixture_answer(f, fd);
        assert_int_equal(json_integer_value(json_object_get(a, "id")), (int)i);
        assert_int_equal(answer_code(a), 0);
    }
    (void)close(fd);
}

static void F2_pause_and_resume_are_idempotent(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    static const char *const steps[] = {"pause", "pause", "resume", "resume"};
    static const bool changed[] = {true, false, true, false};
    char line[128];
    (void)snprintf(line, sizeof line, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"pause\"}");
    json_t *a = fixture_call(f, fd, line); /* state new */
    const json_t *data = json_object_get(json_object_get(a, "error"), "data");
    assert_string_equal(json_string_value(json_object_get(data, "kind")), "state");
    assert_string_equal(json_string_value(json_object_get(data, "state")), "new");
    assert_int_equal(answer_code(a), -32003);
    f->machine.state = "running";
    for (int i = 0; i < 4; i++) {
        (void)snprintf(line, sizeof line, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"%s\"}",
                       steps[i]);
        a = fixture_call(f, fd, line);
        assert_int_equal(json_is_true(json_object_get(json_object_get(a, "result"), "changed")),
                         changed[i]);
        assert_int_equal(answer_code(a), 0);
    }
    (void)close(fd);
}

static void wait_answers_now_later_or_never(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
#define WAIT(what, ms)                                                                             \
    "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"wait\",\"params\":{\"for\":\"" what                \
    "\",\"timeout_ms\":" ms "}}"
    assert_int_equal(answer_code(fixture_call(f, fd, WAIT("running", "0"))), RPC_TIMEOUT);
    f->machine.state = "running";
    assert_int_equal(answer_code(fixture_call(f, fd, WAIT("ready", "0"))), 0);
    fixture_send(f, fd, WAIT("paused", "60000") "\n", strlen(WAIT("paused", "60000")) + 1);
    fixture_settle(f);
    control_state_changed(f->control); /* not yet */
    f->machine.state = "paused";
    control_state_changed(f->control);
    json_t *a = fixture_answer(f, fd);
    assert_string_equal(json_string_value(json_object_get(json_object_get(a, "result"), "state")),
                        "paused");
    assert_int_equal(answer_code(a), 0);
    fixture_send(f, fd, WAIT("running", "60000") "\n", strlen(WAIT("running", "60000")) + 1);
    fixture_settle(f);
    f->machine.state = "ended";
    f->machine.ended = true;
    control_state_changed(f->control);
    assert_int_equal(answer_code(fixture_answer(f, fd)), -32003);
    (void)close(fd);
}

/* Two waiters whose peer is gone must not trip each other when both fall due at once. */
static void many_waits_fall_due_at_once(void **state)
{
    struct fixture *f = *state;
    int a = fixture_client(f), b = fixture_client(f);
    for (int i = 0; i < CONTROL_PENDING_MAX; i++) {
        fixture_send(f, a, WAIT("running", "60000") "\n", strlen(WAIT("running", "60000")) + 1);
        fixture_send(f, b, WAIT("running", "60000") "\n", strlen(WAIT("running", "60000")) + 1);
    }
    fixture_settle(f);
    (void)close(a); /* unseen as yet: the first answer finds out */
    f->machine.state = "running";
    control_state_changed(f->control);
    for (int i = 0; i < CONTROL_PENDING_MAX; i++)
        assert_int_equal(answer_code(fixture_answer(f, b)), 0);
    (void)close(b);
    fixture_settle(f);
    assert_null(f->loop.timers);
}

static void a_fork_child_says_nothing_and_the_parent_goes_on(void **state)
{
    struct fixture *f = *state;
    f->machine.hold = true;
    int fd = fixture_client(f);
    const char *line =
        "{\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"fork\",\"params\":{\"count\":1}}\n";
    fixture_send(f, fd, line, strlen(line));
    fixture_send(f, fd, "{\"half", 6);
    fixture_settle(f);
    assert_int_equal(f->machine.held_count, 1);
    pid_t pid = fork();
    if (pid == 0) {
        struct err e = {0};
        loop_close_inherited(&f->loop);
        control_forget(f->control);
        control_reply(f->machine.held[0], NULL); /* the parent's to answer: goes nowhere */
        int ok = loop_init(&f->loop, &e) == 0;
        for (int i = 0; i < 3 && ok; i++)
            ok = loop_round(&f->loop, 0, &e) == 0;
        _exit(ok ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    char c;
    assert_true(recv(fd, &c, 1, 0) < 0 && errno == EAGAIN); /* not a byte, not a close */
    control_reply(f->machine.held[0], NULL);
    json_t *a = fixture_answer(f, fd);
    assert_int_equal(json_integer_value(json_object_get(a, "id")), 7);
    assert_int_equal(answer_code(a), 0);
    fixture_send(f, fd, "\":1}\n", 5);
    assert_int_equal(answer_code(fixture_answer(f, fd)), RPC_INVALID_REQUEST);
    (void)close(fd);
}

static void drain_sends_what_is_queued(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    f->machine.hold = true;
    const char *line = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"quit\"}\n";
    fixture_send(f, fd, line, strlen(line));
    fixture_settle(f);
    control_reply(f->machine.held[0], NULL);
    control_drain(f->control, 1000);
    control_free(f->control);
    f->control = NULL;
    assert_int_equal(answer_code(fixture_answer(f, fd)), 0);
    (void)close(fd);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(F1_bodies_up_to_the_limit_are_served),
        T(F1_one_byte_past_the_limit_is_too_large),
        T(F1_a_gigabyte_is_refused_and_not_kept),
        T(F1_a_stalled_client_holds_nobody_up),
        T(F1_a_slow_line_is_timed_out),
        T(F1_a_new_line_gets_its_own_time),
        T(the_last_place_is_given_and_one_more_refused),
        T(a_reader_that_never_reads_is_dropped),
        T(a_client_that_stops_sending_still_gets_its_answers),
        T(an_answer_to_a_vanished_client_is_dropped),
        T(requests_past_the_pending_limit_wait_unread),
        T(F2_pause_and_resume_are_idempotent),
        T(wait_answers_now_later_or_never),
        T(many_waits_fall_due_at_once),
        T(a_fork_child_says_nothing_and_the_parent_goes_on),
        T(drain_sends_what_is_queued),
    };
    return cmocka_run_group_tests_name("control", tests, NULL, NULL);
}
