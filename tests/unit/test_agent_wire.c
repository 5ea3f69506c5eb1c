/*
 * The frames of the agent protocol: what is encoded comes back, and no length or value beside the
 * rules of docs/agent-protocol.md is taken.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "guest/agent/wire.h"

static struct wire_renew sample_renew(void)
{
    struct wire_renew r = {.wall_clock_ns = 0x1122334455667788u, .hostname_len = 6};
    memset(r.entropy, 7, sizeof r.entropy);
    memset(r.generation_id, 8, sizeof r.generation_id);
    memset(r.machine_id, 9, sizeof r.machine_id);
    memcpy(r.hostname, "web_31", 6);
    return r;
}

static void renew_comes_back(void **state)
{
    uint8_t frame[256];
    struct wire_renew in = sample_renew(), out;
    assert_int_equal(wire_renew_encode(&in, frame, sizeof frame), 176);
    assert_int_equal(wire_renew_encode(&in, frame, 175), -ENOSPC);
    struct wire_header h = wire_header_get(frame);
    assert_int_equal(h.type, WIRE_RENEW);
    assert_int_equal(h.length, 168);
    assert_int_equal(frame[8], 0x88); /* little-endian */
    assert_int_equal(frame[8 + 104], 6);
    assert_int_equal(wire_renew_decode(frame + 8, 168, &out), 0);
    assert_true(out.wall_clock_ns == in.wall_clock_ns);
    assert_memory_equal(in.entropy, out.entropy, sizeof in.entropy);
    assert_memory_equal(in.generation_id, out.generation_id, WIRE_ID_SIZE);
    assert_memory_equal(in.machine_id, out.machine_id, WIRE_ID_SIZE);
    assert_int_equal(out.hostname_len, 6);
    assert_string_equal(out.hostname, "web_31");
}

static void renew_refuses_bad_payloads(void **state)
{
    uint8_t frame[176];
    struct wire_renew in = sample_renew(), out = {.wall_clock_ns = 5};
    (void)wire_renew_encode(&in, frame, sizeof frame);
    assert_int_equal(wire_renew_decode(frame + 8, 167, &out), -EPROTO);
    assert_int_equal(wire_renew_decode(frame + 8, 169, &out), -EPROTO);
    frame[8 + 104] = 64;
    assert_int_equal(wire_renew_decode(frame + 8, 168, &out), -EINVAL);
    frame[8 + 104] = 6;
    frame[8 + 105] = '\n';
    assert_int_equal(wire_renew_decode(frame + 8, 168, &out), -EINVAL);
    frame[8 + 105] = 'w';
    memset(frame + 8 + 88, 0, 16);
    assert_int_equal(wire_renew_decode(frame + 8, 168, &out), -EINVAL);
    assert_int_equal(out.wall_clock_ns, 5);
    in.hostname_len = 64;
    assert_int_equal(wire_renew_encode(&in, frame, sizeof frame), -EINVAL);
}

static void hostname_of_63_and_of_0(void **state)
{
    uint8_t frame[176];
    struct wire_renew in = sample_renew(), out;
    in.hostname_len = 63;
    memset(in.hostname, 'a', 63);
    assert_int_equal(wire_renew_encode(&in, frame, sizeof frame), 176);
    assert_int_equal(wire_renew_decode(frame + 8, 168, &out), 0);
    assert_int_equal(strlen(out.hostname), 63);
    in.hostname_len = 0;
    assert_int_equal(wire_renew_encode(&in, frame, sizeof frame), 176);
    assert_int_equal(wire_renew_decode(frame + 8, 168, &out), 0);
    assert_int_equal(out.hostname[0], 0);
}

static void renewed_and_exit_come_back(void **state)
{
    uint8_t frame[64];
    struct wire_renewed r = {.status = 28, .step = WIRE_STEP_HOSTNAME, .generation_id = {1, 2}}, r2;
    assert_int_equal(wire_renewed_encode(&r, frame, sizeof frame), 32);
    assert_int_equal(wire_renewed_decode(frame + 8, 24, &r2), 0);
    assert_memory_equal(&r, &r2, sizeof r);
    assert_int_equal(wire_renewed_decode(frame + 8, 23, &r2), -EPROTO);
    struct wire_exit x = {.kind = WIRE_EXIT_SIGNALED, .value = 9, .stderr_dropped = 1ull << 40}, x2;
    assert_int_equal(wire_exit_encode(&x, frame, sizeof frame), 56);
    assert_int_equal(wire_exit_decode(frame + 8, 48, &x2), 0);
    assert_int_equal(x2.kind, WIRE_EXIT_SIGNALED);
    assert_int_equal(x2.value, 9);
    assert_int_equal(x2.stdout_sent, 0);
    assert_true(x2.stderr_dropped == 1ull << 40);
    wire_put32(frame + 8, 4);
    assert_int_equal(wire_exit_decode(frame + 8, 48, &x2), -EPROTO);
}

static void hello_checks_the_protocol(void **state)
{
    uint8_t p[WIRE_HELLO_MAX] = {1, 0, 0, 0, 'x'};
    const char *text;
    size_t len;
    assert_int_equal(wire_hello_decode(p, 5, &text, &len), 0);
    assert_int_equal(len, 1);
    assert_int_equal(text[0], 'x');
    assert_int_equal(wire_hello_decode(p, 3, &text, &len), -EPROTO);
    p[0] = 2;
    assert_int_equal(wire_hello_decode(p, 5, &text, &len), -EPROTO);
}

static void header_bounds_hold_for_every_type(void **state)
{
    size_t known = 0;
    for (uint32_t type = 0; type < 300; type++) {
        uint32_t min, max;
        if (wire_length_bounds(type, &min, &max) < 0) {
            assert_int_equal(wire_header_check((struct wire_header){type, 0}), -EPROTO);
            continue;
        }
        known++;
        assert_int_equal(wire_header_check((struct wire_header){type, min}), 0);
        assert_int_equal(wire_header_check((struct wire_header){type, max}), 0);
        assert_int_equal(wire_header_check((struct wire_header){type, max + 1}), -EMSGSIZE);
        assert_int_equal(wire_header_check((struct wire_header){type, UINT32_MAX}), -EMSGSIZE);
        if (min > 0)
            assert_int_equal(wire_header_check((struct wire_header){type, min - 1}), -EPROTO);
    }
    assert_int_equal(known, 17);
}

static void exec_head_limits(void **state)
{
    uint8_t p[64] = {0};
    struct wire_exec in = {.flags = WIRE_EXEC_FLAGS_ALL,
                           .timeout_ms = 200,
                           .rows = 24,
                           .cols = 80,
                           .output_cap_bytes = 1ull << 33,
                           .uid = 1000,
                           .gid = 1001,
                           .argc = WIRE_ARGC_MAX,
                           .envc = WIRE_ENVC_MAX};
    struct wire_exec out;
    assert_int_equal(wire_exec_head_encode(&in, p, 39), -ENOSPC);
    assert_int_equal(wire_exec_head_encode(&in, p, 40), 40);
    assert_int_equal(wire_exec_head_decode(p, 40, &out), 0);
    assert_int_equal(out.timeout_ms, 200);
    assert_int_equal(out.rows, 24);
    assert_int_equal(out.cols, 80);
    assert_true(out.output_cap_bytes == 1ull << 33);
    assert_int_equal(out.uid, 1000);
    assert_int_equal(out.gid, 1001);
    assert_int_equal(out.strings_len, 0);
    assert_null(wire_exec_next(&out));
    assert_int_equal(wire_exec_head_decode(p, 39, &out), -EPROTO);
    wire_put32(p + 32, WIRE_ARGC_MAX + 1);
    assert_int_equal(wire_exec_head_decode(p, 40, &out), -E2BIG);
    wire_put32(p + 32, 0);
    assert_int_equal(wire_exec_head_decode(p, 40, &out), -EINVAL);
    wire_put32(p + 32, 1);
    wire_put32(p + 36, WIRE_ENVC_MAX + 1);
    assert_int_equal(wire_exec_head_decode(p, 40, &out), -E2BIG);
    wire_put32(p + 36, 0);
    wire_put32(p + 4, 16);
    assert_int_equal(wire_exec_head_decode(p, 40, &out), -EINVAL);
    wire_put32(p + 4, 0);
    wire_put32(p, 2);
    assert_int_equal(wire_exec_head_decode(p, 40, &out), -ENOTSUP);
}

static void strings_end_where_the_payload_ends(void **state)
{
    struct wire_exec x = {.strings = "ab\0\0cd", .strings_len = 6};
    assert_string_equal(wire_exec_next(&x), "ab");
    assert_string_equal(wire_exec_next(&x), "");
    assert_null(wire_exec_next(&x)); /* "cd" has no NUL within the payload */
    assert_int_equal(x.strings_len, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(renew_comes_back),
        cmocka_unit_test(renew_refuses_bad_payloads),
        cmocka_unit_test(hostname_of_63_and_of_0),
        cmocka_unit_test(renewed_and_exit_come_back),
        cmocka_unit_test(hello_checks_the_protocol),
        cmocka_unit_test(header_bounds_hold_for_every_type),
        cmocka_unit_test(exec_head_limits),
        cmocka_unit_test(strings_end_where_the_payload_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
