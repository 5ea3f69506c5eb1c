/*
 * Requests: what is listed in docs/protocol.md is taken, everything else is refused by name with
 * one specific code and reaches no op.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/unit/control_fixture.h"
#include "vmm/control_parse.h"
#include "vmm/core/base64.h"
#include "vmm/core/err.h"

#define REQ(method, params)                                                                        \
    "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"" method "\",\"params\":" params "}"

static const struct refusal {
    const char *line;
    int code;
    const char *names; /* a word the message must have */
} refusals[] = {
    {"", RPC_PARSE, "JSON"},
    {"hello", RPC_PARSE, "JSON"},
    {"{", RPC_PARSE, "JSON"},
    {"\"x\"", RPC_PARSE, "JSON"},
    {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\"} x", RPC_PARSE, "JSON"},
    {"[]", RPC_INVALID_REQUEST, "object"},
    {"[{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\"}]", RPC_INVALID_REQUEST, "batch"},
    {"{}", RPC_INVALID_REQUEST, "id"},
    {"{\"jsonrpc\":\"2.0\",\"method\":\"status\"}", RPC_INVALID_REQUEST, "id"},
    {"{\"jsonrpc\":\"2.0\",\"id\":null,\"method\":\"status\"}", RPC_INVALID_REQUEST, "id"},
    {"{\"jsonrpc\":\"2.0\",\"id\":1.5,\"method\":\"status\"}", RPC_INVALID_REQUEST, "id"},
    {"{\"id\":1,\"method\":\"status\"}", RPC_INVALID_REQUEST, "jsonrpc"},
    {"{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"status\"}", RPC_INVALID_REQUEST, "jsonrpc"},
    {"{\"jsonrpc\":2.0,\"id\":1,\"method\":\"status\"}", RPC_INVALID_REQUEST, "jsonrpc"},
    {"{\"jsonrpc\":\"2.0\",\"id\":1}", RPC_INVALID_REQUEST, "method"},
    {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":7}", RPC_INVALID_REQUEST, "method"},
    {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"status\",\"meta\":0}", RPC_INVALID_REQUEST,
     "meta"},
    {"{\"jsonrpc\":\"2.0\",\"id\":1,\"id\":2,\"method\":\"status\"}", RPC_INVALID_REQUEST, "id"},
    {"{\"jsonrpc\":\"2.0\",\"id\":99999999999999999999,\"method\":\"status\"}", RPC_INVALID_REQUEST,
     ""},
    {REQ("status", "[]"), RPC_INVALID_REQUEST, "params"},
    {REQ("status", "null"), RPC_INVALID_REQUEST, "params"},
    {REQ("create", "{}"), RPC_NO_METHOD, "create"},
    {REQ("Status", "{}"), RPC_NO_METHOD, "Status"},
    {REQ("status", "{\"verbose\":true}"), RPC_BAD_PARAMS, "verbose"},
    {REQ("quit", "{\"force\":true}"), RPC_BAD_PARAMS, "force"},
    {REQ("console", "{\"bytes\":65537}"), RPC_BAD_PARAMS, "bytes"},
    {REQ("console", "{\"bytes\":-1}"), RPC_BAD_PARAMS, "bytes"},
    {REQ("boot", "{}"), RPC_BAD_PARAMS, "kernel"},
    {REQ("boot", "{\"kernel\":\"k\",\"memory_mib\":64}"), RPC_BAD_PARAMS, "absolute"},
    {REQ("boot", "{\"kernel\":\"/k\"}"), RPC_BAD_PARAMS, "memory_mib"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":0}"), RPC_BAD_PARAMS, "memory_mib"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":1048577}"), RPC_BAD_PARAMS, "memory_mib"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":\"64\"}"), RPC_BAD_PARAMS, "memory_mib"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64.0}"), RPC_BAD_PARAMS, "memory_mib"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"cpus\":17}"), RPC_BAD_PARAMS, "cpus"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"cpus\":0}"), RPC_BAD_PARAMS, "cpus"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"paused\":1}"), RPC_BAD_PARAMS, "paused"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"mem\":1}"), RPC_BAD_PARAMS, "mem"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"disks\":[1]}"), RPC_BAD_PARAMS,
     "disks[0]"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"disks\":[{}]}"), RPC_BAD_PARAMS,
     "disks[0].path"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"disks\":[{\"path\":\"/d\",\"ro\":1}]}"),
     RPC_BAD_PARAMS, "disks[0].ro"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"disks\":{}}"), RPC_BAD_PARAMS, "disks"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"grants\":[1]}"), RPC_BAD_PARAMS,
     "grants[0]"},
    {REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":64,\"grants\":[4294967295]}"), RPC_BAD_PARAMS,
     "grants[0]"},
    {REQ("snapshot", "{}"), RPC_BAD_PARAMS, "dir"},
    {REQ("snapshot", "{\"dir\":\"a/b\"}"), RPC_BAD_PARAMS, "absolute"},
    {REQ("snapshot", "{\"dir\":\"/a\\u0000b\"}"), RPC_PARSE, ""},
    {REQ("fork", "{}"), RPC_BAD_PARAMS, "count"},
    {REQ("fork", "{\"count\":0}"), RPC_BAD_PARAMS, "count"},
    {REQ("fork", "{\"count\":129}"), RPC_BAD_PARAMS, "count"},
    {REQ("fork", "{\"count\":1,\"children\":[{\"id\":\"a\",\"control\":\"/c\",\"vsock\":\"/v\"}]}"),
     RPC_BAD_PARAMS, "children"},
    {REQ("fork", "{\"children\":[]}"), RPC_BAD_PARAMS, "children"},
    {REQ("fork", "{\"children\":[{\"id\":\"a\",\"control\":\"/c\"}]}"), RPC_BAD_PARAMS, "vsock"},
    {REQ("fork", "{\"children\":[{\"id\":\"../a\",\"control\":\"/c\",\"vsock\":\"/v\"}]}"),
     RPC_BAD_PARAMS, "name"},
    {REQ("fork", "{\"children\":[{\"id\":\"a\",\"control\":\"/c\",\"vsock\":\"/v\"},"
                 "{\"id\":\"b\",\"control\":\"/c\",\"vsock\":\"/w\"}]}"),
     RPC_BAD_PARAMS, "repeats"},
    {REQ("fork", "{\"count\":1,\"host_name\":\"a b\"}"), RPC_BAD_PARAMS, "host_name"},
    {REQ("stop", "{\"grace_ms\":600001}"), RPC_BAD_PARAMS, "grace_ms"},
    {REQ("wait", "{}"), RPC_BAD_PARAMS, "for"},
    {REQ("wait", "{\"for\":\"boot\"}"), RPC_BAD_PARAMS, "for"},
    {REQ("wait", "{\"for\":\"ready\",\"timeout_ms\":3600001}"), RPC_BAD_PARAMS, "timeout_ms"},
};

static void refuses_each_by_name_and_does_nothing(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        const struct refusal *r = &refusals[i];
        json_t *a = fixture_call(f, fd, r->line);
        const char *message =
            json_string_value(json_object_get(json_object_get(a, "error"), "message"));
        if (message == NULL || strstr(message, r->names) == NULL)
            fail_msg("%s\n -> %s", r->line, message == NULL ? "no error" : message);
        int code = answer_code(a);
        if (code != r->code)
            fail_msg("%s\n -> %d, expected %d", r->line, code, r->code);
    }
    assert_int_equal(f->machine.calls, 0);
    (void)close(fd);
}

static void takes_a_full_boot(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    json_t *a = fixture_call(
        f, fd,
        REQ("boot", "{\"kernel\":\"/k\",\"initrd\":\"/i\",\"cmdline\":\"quiet x=\\\"a b\\\"\","
                    "\"memory_mib\":1048576,\"cpus\":16,\"disks\":[{\"path\":\"/d\",\"read_only\":"
                    "true,\"overlay_max_bytes\":5},{\"path\":\"/e\"}],\"grants\":[2,4294967294],"
                    "\"paused\":true}"));
    assert_int_equal(answer_code(a), 0);
    const struct fake_machine *m = &f->machine;
    assert_string_equal(m->kernel, "/k");
    assert_string_equal(m->cmdline, "quiet x=\"a b\"");
    assert_true(m->memory_mib == 1048576 && m->cpus == 16 && m->disk_count == 2);
    assert_true(m->read_only && m->overlay_max_bytes == 5 && m->grant_count == 2 && m->paused);
    assert_int_equal(
        answer_code(fixture_call(f, fd, REQ("boot", "{\"kernel\":\"/k\",\"memory_mib\":1}"))), 0);
    assert_true(m->cpus == 1 && m->disk_count == 0 && !m->paused);
    assert_string_equal(m->cmdline, "");
    (void)close(fd);
}

static void takes_fork_by_count_and_by_name(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    assert_int_equal(answer_code(fixture_call(f, fd, REQ("fork", "{\"count\":128}"))), 0);
    assert_int_equal(f->machine.fork_count, 128);
    assert_int_equal(
        answer_code(fixture_call(
            f, fd,
            REQ("fork", "{\"children\":[{\"id\":\"a\",\"control\":\"/c\",\"vsock\":\"/v\"},{\"id\":"
                        "\"b.1\",\"control\":\"/d\",\"vsock\":\"/w\"}],\"host_name\":\"h-1\"}"))),
        0);
    assert_int_equal(f->machine.fork_count, 2);
    assert_string_equal(f->machine.child_id, "b.1");
    assert_string_equal(f->machine.host_name, "h-1");
    (void)close(fd);
}

static void D13_children_paths_of_107_and_108_bytes(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    for (size_t len = 107; len <= 108; len++) {
        char path[128], line[512];
        memset(path, 'p', len);
        path[0] = '/';
        path[len] = '\0';
        (void)snprintf(line, sizeof line,
                       REQ("fork", "{\"children\":[{\"id\":\"a\",\"control\":\"%s\",\"vsock\":\"/"
                                   "v\"}]}"),
                       path);
        json_t *a = fixture_call(f, fd, line);
        if (len == 108)
            assert_non_null(strstr(
                json_string_value(json_object_get(json_object_get(a, "error"), "message")), "108"));
        assert_int_equal(answer_code(a), len == 107 ? 0 : RPC_BAD_PARAMS);
    }
    (void)close(fd);
}

static void ids_come_back_as_they_were(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    json_t *a = fixture_call(f, fd, "{\"jsonrpc\":\"2.0\",\"id\":\"\",\"method\":\"status\"}");
    assert_string_equal(json_string_value(json_object_get(a, "id")), "");
    json_decref(a);
    a = fixture_call(f, fd,
                     "{\"jsonrpc\":\"2.0\",\"id\":-9007199254740993,\"method\":\"nothing\"}");
    assert_true(json_integer_value(json_object_get(a, "id")) == -9007199254740993);
    json_decref(a);
    a = fixture_call(f, fd, "nonsense");
    assert_true(json_is_null(json_object_get(a, "id")));
    json_decref(a);
    (void)close(fd);
}

/* A name that is cut in the middle of a character must not spoil the answer. */
static void messages_are_always_utf8(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    char line[512] = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"a";
    for (int i = 0; i < 60; i++)
        (void)strcat(line, "\xc3\xa9");
    (void)strcat(line, "\"}");
    assert_int_equal(answer_code(fixture_call(f, fd, line)), RPC_NO_METHOD);
    (void)close(fd);
}

static void console_is_base64(void **state)
{
    struct fixture *f = *state;
    int fd = fixture_client(f);
    json_t *a = fixture_call(f, fd, REQ("console", "{\"bytes\":256}"));
    const json_t *r = json_object_get(a, "result");
    const char *data = json_string_value(json_object_get(r, "data"));
    uint8_t bytes[300];
    assert_int_equal(base64_decode(data, strlen(data), bytes), 256);
    for (int i = 0; i < 256; i++)
        assert_int_equal(bytes[i], i);
    assert_int_equal(json_integer_value(json_object_get(r, "total")), 100000);
    json_decref(a);
    (void)close(fd);
}

static void base64_refuses_what_no_encoder_makes(void **state)
{
    char out[16];
    static const char *const wrong[] = {"A", "AA=", "A===", "AB==", "AAB=", "AA==AAAA", "A A="};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_true(base64_decode(wrong[i], strlen(wrong[i]), out) < 0);
    assert_int_equal(base64_decode("", 0, out), 0);
    assert_int_equal(base64_decode("/+8=", 4, out), 2);
}

static void names_of_machines(void **state)
{
    char id[80];
    memset(id, 'a', sizeof id);
    id[63] = '\0';
    assert_int_equal(control_id_check(id, NULL), 0);
    id[63] = 'a';
    id[64] = '\0';
    assert_true(control_id_check(id, NULL) < 0);
    static const char *const good[] = {"a", "0", "web-1", "a.b_c-d"};
    static const char *const wrong[] = {"", "-a", ".", "..", "A", "a/b", "a b", "\xc3\xa9", "a\n"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        assert_int_equal(control_id_check(good[i], NULL), 0);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_true(control_id_check(wrong[i], NULL) < 0);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(refuses_each_by_name_and_does_nothing),
        T(takes_a_full_boot),
        T(takes_fork_by_count_and_by_name),
        T(D13_children_paths_of_107_and_108_bytes),
        T(ids_come_back_as_they_were),
        T(messages_are_always_utf8),
        T(console_is_base64),
        cmocka_unit_test(base64_refuses_what_no_encoder_makes),
        cmocka_unit_test(names_of_machines),
    };
    return cmocka_run_group_tests_name("control_parse", tests, NULL, NULL);
}
