/*
 * docs/protocol.md and the code say the same: error codes, end reasons, limits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "vmm/control_parse.h"
#include "vmm/core/err.h"
#include "vmm/exit_status.h"

static char doc[65536];

static int read_doc(void **state)
{
    FILE *f = fopen(PROTOCOL_DOC, "r");
    if (f == NULL)
        return -1;
    size_t n = fread(doc, 1, sizeof doc - 1, f);
    (void)fclose(f);
    return n > 0 && n < sizeof doc - 1 ? 0 : -1;
}

static void assert_in_doc(const char *text)
{
    if (strstr(doc, text) == NULL)
        fail_msg("docs/protocol.md lacks: %s", text);
}

static void error_codes_are_documented(void **state)
{
    static const int codes[] = {
        RPC_PARSE,     RPC_INVALID_REQUEST, RPC_NO_METHOD,        RPC_BAD_PARAMS,
        RPC_TOO_LARGE, RPC_TOO_SLOW,        RPC_TOO_MANY_CLIENTS, RPC_TIMEOUT};
    char row[80];
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        (void)snprintf(row, sizeof row, "| %d | `%s` |", codes[i], rpc_kind(codes[i]));
        assert_in_doc(row);
    }
    for (int code = ERR_HOST; code <= ERR_UNSUPPORTED; code++) {
        (void)snprintf(row, sizeof row, "| %d | `%s` |", -32000 - code,
                       err_code_name((enum err_code)code));
        assert_in_doc(row);
    }
}

static void end_reasons_are_documented(void **state)
{
    char row[160];
#define X(name, word, status, text)                                                                \
    (void)snprintf(row, sizeof row, "| `%s` | %d | %s |", word, status, text);                     \
    if (name != END_NONE)                                                                          \
        assert_in_doc(row);
    END_REASONS(X)
#undef X
}

static void statuses_tell_ends_apart(void **state)
{
    assert_int_equal(end_reason_status(END_POWEROFF), 0);
    static const enum end_reason bad[] = {END_INTERNAL, END_USAGE,        END_REBOOT,
                                          END_PANIC,    END_TRIPLE_FAULT, END_EMULATION,
                                          END_HALTED,   END_TERMINATED,   END_RENEWAL};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_true(end_reason_status(bad[i]) > 0);
        assert_non_null(exit_status_text(end_reason_status(bad[i])));
        for (size_t k = 0; k < i; k++)
            assert_int_not_equal(end_reason_status(bad[i]), end_reason_status(bad[k]));
    }
    assert_null(exit_status_text(0));
    assert_null(exit_status_text(159));
}

static void limits_are_documented(void **state)
{
    assert_int_equal(CONTROL_LINE_MAX, 1048576);
    assert_in_doc("| one line | 1,048,576 bytes without its newline |");
    assert_int_equal(CONTROL_CLIENTS_MAX, 32);
    assert_in_doc("| clients at once | 32 |");
    assert_true(CONTROL_PARTIAL_NS == 10000000000ull);
    assert_in_doc("| a line that has begun | must be complete within 10 s |");
    assert_int_equal(CONTROL_PENDING_MAX, 16);
    assert_in_doc("| unanswered requests of a client | 16 |");
    assert_int_equal(CONTROL_OUTPUT_MAX, 4 << 20);
    assert_in_doc("| answers a client does not read | 4 MiB |");
    assert_int_equal(CONTROL_CHILDREN_MAX, 128);
    assert_in_doc("1 … 128 children");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_codes_are_documented),
        cmocka_unit_test(end_reasons_are_documented),
        cmocka_unit_test(statuses_tell_ends_apart),
        cmocka_unit_test(limits_are_documented),
    };
    return cmocka_run_group_tests_name("protocol_doc", tests, read_doc, NULL);
}
