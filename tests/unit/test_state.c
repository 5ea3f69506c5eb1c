/*
 * State trees: what is written reads back; what is missing, of another length or cut is an error.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "vmm/core/err.h"
#include "vmm/core/state.h"

static void *sample(size_t *len)
{
    struct state_writer w;
    struct err e = {0};
    assert_int_equal(state_writer_init(&w, &e), 0);
    state_begin(&w, "dev");
    state_put_u32(&w, "version", 3);
    state_put_u64(&w, "big", 0x1122334455667788ull);
    uint8_t blob[200000];
    memset(blob, 0x5a, sizeof blob);
    state_put_bytes(&w, "blob", blob, sizeof blob); /* larger than the first buffer */
    state_put_string(&w, "name", "x");
    state_end(&w);
    const void *p;
    assert_int_equal(state_finish(&w, &p, len, &e), 0);
    void *copy = malloc(*len);
    memcpy(copy, p, *len);
    state_writer_free(&w);
    return copy;
}

static void reads_back(void **s)
{
    size_t len;
    void *p = sample(&len);
    struct err e = {0};
    struct state_node root, n;
    assert_int_equal(state_open(p, len, &root, &e), 0);
    assert_int_equal(state_child(&root, "dev", &n, &e), 0);
    assert_int_equal(state_check_version(&n, 3, &e), 0);
    uint64_t big;
    assert_int_equal(state_get_u64(&n, "big", &big, &e), 0);
    assert_true(big == 0x1122334455667788ull);
    const char *name;
    assert_int_equal(state_get_string(&n, "name", &name, &e), 0);
    assert_string_equal(name, "x");
    const void *blob;
    size_t blob_len;
    assert_int_equal(state_get_blob(&n, "blob", &blob, &blob_len, &e), 0);
    assert_int_equal(blob_len, 200000);
    free(p);
}

static void refuses_what_does_not_fit(void **s)
{
    size_t len;
    void *p = sample(&len);
    struct err e = {0};
    struct state_node root, n;
    assert_int_equal(state_open(p, len, &root, &e), 0);
    assert_true(state_child(&root, "nodev", &n, &e) < 0);
    assert_int_equal(state_child(&root, "dev", &n, &e), 0);
    uint32_t v = 77;
    assert_true(state_get_u32(&n, "big", &v, &e) < 0); /* 8 bytes, 4 wanted */
    assert_int_equal(v, 77);
    assert_true(state_check_version(&n, 4, &e) < 0);
    assert_non_null(strstr(e.text, "version 3"));
    const char *str;
    assert_true(state_get_string(&n, "blob", &str, &e) < 0);
    free(p);
}

static void a_property_behind_a_node_is_an_error(void **s)
{
    struct state_writer w;
    struct err e = {0};
    const void *p;
    size_t len;
    assert_int_equal(state_writer_init(&w, &e), 0);
    state_begin(&w, "a");
    state_begin(&w, "b");
    state_end(&w);
    state_put_u32(&w, "late", 1); /* a reader would not find it */
    state_end(&w);
    assert_true(state_finish(&w, &p, &len, &e) < 0);
    state_writer_free(&w);
}

static void refuses_every_cut(void **s)
{
    size_t len;
    uint8_t *p = sample(&len);
    struct err e = {0};
    struct state_node root;
    for (size_t cut = 0; cut < len; cut += 997) {
        uint8_t *q = malloc(cut + 1);
        memcpy(q, p, cut);
        assert_true(state_open(q, cut, &root, &e) < 0);
        free(q);
    }
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_back),
        cmocka_unit_test(refuses_what_does_not_fit),
        cmocka_unit_test(a_property_behind_a_node_is_an_error),
        cmocka_unit_test(refuses_every_cut),
    };
    return cmocka_run_group_tests_name("state", tests, NULL, NULL);
}
