/*
 * Guest memory: the layout around the hole, and no range that leaves a region.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>
#include <errno.h>
#include <cmocka.h>

#include "vmm/core/err.h"
#include "vmm/core/ram.h"

#define HOLE_START 0xc0000000ull
#define HOLE_END 0x100000000ull

static void splits_around_the_hole(void **s)
{
    struct err e = {0};
    struct ram r;
    uint64_t bytes = HOLE_START + 0x5000;
    assert_int_equal(ram_create(&r, bytes, HOLE_START, HOLE_END, false, &e), 0);
    assert_int_equal(r.region_count, 2);
    assert_true(r.regions[1].start_gpa == HOLE_END && r.regions[1].bytes == 0x5000);
    assert_non_null(ram_slice(&r, gpa(HOLE_START - 1), 1));
    assert_null(ram_slice(&r, gpa(HOLE_START - 1), 2));
    assert_null(ram_slice(&r, gpa(HOLE_START), 1));
    assert_null(ram_slice(&r, gpa(HOLE_END - 1), 1));
    assert_non_null(ram_slice(&r, gpa(HOLE_END), 0x5000));
    assert_null(ram_slice(&r, gpa(HOLE_END), 0x5001));
    ram_free(&r);
}

static void refuses_ranges_that_wrap(void **s)
{
    struct err e = {0};
    struct ram r;
    assert_int_equal(ram_create(&r, 0x10000, HOLE_START, HOLE_END, false, &e), 0);
    uint64_t v = 0;
    assert_int_equal(ram_read(&r, gpa(UINT64_MAX - 3), &v, 8), -EFAULT);
    assert_int_equal(ram_write(&r, gpa(0x10000 - 7), &v, 8), -EFAULT);
    assert_int_equal(ram_write(&r, gpa(0x10000 - 8), &v, 8), 0);
    assert_null(ram_slice(&r, gpa(8), UINT64_MAX - 4));
    assert_null(ram_slice(&r, gpa(8), 0));
    ram_free(&r);
    assert_true(ram_create(&r, 4097, HOLE_START, HOLE_END, false, &e) < 0);
    assert_true(ram_create(&r, 0, HOLE_START, HOLE_END, false, &e) < 0);
}

static void a_short_memory_file_is_refused(void **s)
{
    struct err e = {0};
    struct ram r;
    int fd = memfd_create("ram", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 0x4000), 0);
    assert_true(ram_map(&r, fd, 0x5000, HOLE_START, HOLE_END, &e) < 0);
    assert_int_equal(e.code, ERR_BAD_IMAGE);
    assert_int_equal(ram_map(&r, fd, 0x4000, HOLE_START, HOLE_END, &e), 0);
    ram_free(&r);
    (void)close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(splits_around_the_hole),
        cmocka_unit_test(refuses_ranges_that_wrap),
        cmocka_unit_test(a_short_memory_file_is_refused),
    };
    return cmocka_run_group_tests_name("ram", tests, NULL, NULL);
}
