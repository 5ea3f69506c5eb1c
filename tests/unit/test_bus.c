/*
 * The bus: who owns an address, and which accesses a vCPU thread may carry out itself.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "vmm/core/bus.h"
#include "vmm/core/err.h"

static void read_seven(void *obj, uint64_t offset, void *data, unsigned len)
{
    memset(data, 7, len);
}

static const struct bus_ops loop_only = {.read = read_seven};
static const struct bus_ops any_thread = {.read = read_seven, .any_thread = true};

static void ranges_are_claimed_once(void **s)
{
    struct bus b = {0};
    struct err e = {0};
    assert_int_equal(bus_add(&b, 0x100, 8, &loop_only, NULL, &e), 0);
    assert_true(bus_add(&b, 0x107, 1, &any_thread, NULL, &e) < 0);
    assert_true(bus_add(&b, 0xff, 2, &any_thread, NULL, &e) < 0);
    assert_int_equal(bus_add(&b, 0x108, 8, &any_thread, NULL, &e), 0);
}

static void an_unclaimed_read_gives_ones(void **s)
{
    struct bus b = {0};
    struct err e = {0};
    uint32_t v = 0;
    assert_int_equal(bus_add(&b, 0x100, 8, &loop_only, NULL, &e), 0);
    assert_false(bus_read(&b, 0x106, &v, 4)); /* it leaves the range */
    assert_int_equal(v, 0xffffffffu);
    assert_true(bus_read(&b, 0x104, &v, 4));
    assert_int_equal(v, 0x07070707u);
}

static void only_devices_with_a_lock_are_served_on_any_thread(void **s)
{
    struct bus b = {0};
    struct err e = {0};
    assert_int_equal(bus_add(&b, 0x100, 8, &loop_only, NULL, &e), 0);
    assert_int_equal(bus_add(&b, 0x108, 8, &any_thread, NULL, &e), 0);
    assert_false(bus_is_any_thread(&b, 0x107, 1));
    assert_true(bus_is_any_thread(&b, 0x108, 1));
    assert_true(bus_is_any_thread(&b, 0x200, 4)); /* nobody is there to be asked */
    assert_true(bus_is_any_thread(&b, 0x107, 2)); /* nor across two devices */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges_are_claimed_once),
        cmocka_unit_test(an_unclaimed_read_gives_ones),
        cmocka_unit_test(only_devices_with_a_lock_are_served_on_any_thread),
    };
    return cmocka_run_group_tests_name("bus", tests, NULL, NULL);
}
