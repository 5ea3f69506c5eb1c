/*
 * control_fixture: see control_fixture.h.
 */
#include "tests/unit/control_fixture.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>

#include "vmm/core/err.h"

static void op_boot(void *arg, struct control_request *req, const struct control_boot *p)
{
    struct fake_machine *m = arg;
    m->calls++;
    (void)snprintf(m->kernel, sizeof m->kernel, "%s", p->kernel);
    (void)snprintf(m->cmdline, sizeof m->cmdline, "%s", p->cmdline);
    m->memory_mib = p->memory_mib;
    m->cpus = p->cpus;
    m->disk_count = p->disk_count;
    m->grant_count = p->grant_count;
    m->paused = p->paused;
    m->read_only = p->disk_count > 0 && p->disks[0].read_only;
    m->overlay_max_bytes = p->disk_count > 0 ? p->disks[0].overlay_max_bytes : 0;
    control_reply(req, NULL);
}

static void set_state(struct fake_machine *m, struct control_request *req, const char *to)
{
    m->calls++;
    struct err e = {0};
    if (strcmp(m->state, "new") == 0) {
        (void)err_set(&e, ERR_STATE, 0, "%s: there is no machine yet", to);
        control_fail(req, &e);
        return;
    }
    bool changed = strcmp(m->state, to) != 0;
    m->state = to;
    control_reply_changed(req, changed);
}

static void op_pause(void *arg, struct control_request *req)
{
    set_state(arg, req, "paused");
}

static void op_resume(void *arg, struct control_request *req)
{
    set_state(arg, req, "running");
}

static void hold_or_reply(struct fake_machine *m, struct control_request *req)
{
    m->calls++;
    if (m->hold)
        m->held[m->held_count++ % 64] = req;
    else
        control_reply(req, NULL);
}

static void op_snapshot(void *arg, struct control_request *req, const struct control_snapshot *p)
{
    hold_or_reply(arg, req);
}

static void op_fork(void *arg, struct control_request *req, const struct control_fork *p)
{
    struct fake_machine *m = arg;
    m->fork_count = p->count;
    (void)snprintf(m->child_id, sizeof m->child_id, "%s",
                   p->children != NULL ? p->children[p->count - 1].id : "");
    (void)snprintf(m->host_name, sizeof m->host_name, "%s",
                   p->host_name != NULL ? p->host_name : "");
    hold_or_reply(m, req);
}

static void op_stop(void *arg, struct control_request *req, const struct control_stop *p)
{
    struct fake_machine *m = arg;
    m->calls++;
    m->grace_ms = p->grace_ms;
    control_reply_changed(req, true);
}

static void op_quit(void *arg, struct control_request *req)
{
    hold_or_reply(arg, req);
}

static json_t *op_status(void *arg)
{
    struct fake_machine *m = arg;
    return json_pack("{s:s}", "state", m->state);
}

static size_t op_console(void *arg, uint8_t *buf, size_t cap, uint64_t *total)
{
    for (size_t i = 0; i < cap; i++)
        buf[i] = (uint8_t)i;
    *total = 100000;
    return cap;
}

static int op_reached(void *arg, enum control_wait_for what, struct err *e)
{
    struct fake_machine *m = arg;
    static const char *const words[] = {"running", "running", "paused", "ended"};
    if (strcmp(m->state, words[what]) == 0)
        return 1;
    if (m->ended)
        return err_set(e, ERR_STATE, 0, "wait: the machine has ended");
    return 0;
}

static const struct control_ops fake_ops = {
    .boot = op_boot,
    .pause = op_pause,
    .resume = op_resume,
    .snapshot = op_snapshot,
    .fork = op_fork,
    .stop = op_stop,
    .quit = op_quit,
    .status = op_status,
    .console = op_console,
    .reached = op_reached,
};

int fixture_setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct err e = {0};
    f->machine.state = "new";
    assert_int_equal(loop_init(&f->loop, &e), 0);
    assert_int_equal(control_create(&f->control, &f->loop, -1, &fake_ops, &f->machine, &e), 0);
    *state = f;
    return 0;
}

int fixture_teardown(void **state)
{
    struct fixture *f = *state;
    control_free(f->control);
    loop_close(&f->loop);
    free(f);
    return 0;
}

int fixture_client(struct fixture *f)
{
    int pair[2];
    struct err e = {0};
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    assert_int_equal(control_add_client(f->control, pair[1], &e), 0);
    return pair[0];
}

void fixture_send(struct fixture *f, int fd, const char *text, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, text, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EPIPE)
            return; /* the server closed; the answer says why */
        if (n < 0) {
            assert_int_equal(errno, EAGAIN);
            assert_int_equal(loop_round(&f->loop, 1000, NULL), 0);
            continue;
        }
        text += n;
        len -= (size_t)n;
    }
}

json_t *fixture_answer(struct fixture *f, int fd)
{
    static char line[8 << 20];
    size_t len = 0;
    for (;;) {
        ssize_t n = recv(fd, line + len, 1, 0);
        if (n == 0)
            return NULL;
        if (n < 0) {
            if (errno != EAGAIN)
                return NULL;
            assert_int_equal(loop_round(&f->loop, 5000, NULL), 0);
            continue;
        }
        assert_true(len < sizeof line - 1);
        if (line[len++] == '\n')
            break;
    }
    json_t *v = json_loadb(line, len, 0, NULL);
    assert_non_null(v);
    return v;
}

json_t *fixture_call(struct fixture *f, int fd, const char *line)
{
    fixture_send(f, fd, line, strlen(line));
    fixture_send(f, fd, "\n", 1);
    return fixture_answer(f, fd);
}

void fixture_settle(struct fixture *f)
{
    for (int i = 0; i < 40; i++)
        assert_int_equal(loop_round(&f->loop, 0, NULL), 0);
}

int answer_code(json_t *answer)
{
    assert_non_null(answer);
    const json_t *error = json_object_get(answer, "error");
    int code = error == NULL ? 0 : (int)json_integer_value(json_object_get(error, "code"));
    if (error != NULL) {
        assert_true(code != 0);
        assert_non_null(json_object_get(json_object_get(error, "data"), "kind"));
        assert_non_null(json_string_value(json_object_get(error, "message")));
    } else {
        assert_non_null(json_object_get(answer, "result"));
    }
    json_decref(answer);
    return code;
}
