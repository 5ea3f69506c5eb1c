/*
 * The split queue against a driver that lies (case B3), and the index arithmetic around 2^16.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <errno.h>
#include <cmocka.h>

#include "tests/unit/guest_ring.h"
#include "vmm/core/err.h"
#include "vmm/core/state.h"

struct fixture {
    struct guest_ring g;
    struct virtqueue q;
    struct chain c;
    struct err e;
};

static int setup_size(void **s, uint16_t size)
{
    struct fixture *f = calloc(1, sizeof *f);
    if (f == NULL)
        return -1;
    ring_init(&f->g, size);
    f->q = (struct virtqueue){.ram = &f->g.ram,
                              .size = size,
                              .desc_gpa = RING_DESC,
                              .avail_gpa = RING_AVAIL,
                              .used_gpa = RING_USED,
                              .indirect = true};
    if (virtqueue_enable(&f->q, &f->e) != 0)
        return -1;
    *s = f;
    return 0;
}

static int setup(void **s)
{
    return setup_size(s, 16);
}

static int setup_large(void **s)
{
    return setup_size(s, 256);
}

static int teardown(void **s)
{
    struct fixture *f = *s;
    ring_free(&f->g);
    free(f);
    return 0;
}

static void expect_broken(struct fixture *f, const char *word)
{
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), -EPROTO);
    if (strstr(f->e.text, word) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", word, f->e.text);
}

static void pops_readable_then_writable(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 3, RING_DATA, 16, D_NEXT, 9);
    ring_desc(&f->g, 9, RING_DATA + 0x1000, 512, D_NEXT | D_WRITE, 2);
    ring_desc(&f->g, 2, RING_DATA + 0x2000, 1, D_WRITE, 0);
    ring_offer(&f->g, 3);
    ring_put(&f->g, RING_DATA, "0123456789abcdef", 16);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    assert_int_equal(f->c.head, 3);
    assert_int_equal(f->c.count, 3);
    assert_int_equal(f->c.readable, 1);
    assert_true(f->c.read_bytes == 16 && f->c.write_bytes == 513);
    char buf[32];
    assert_int_equal(chain_read(&f->c, 4, buf, sizeof buf), 12);
    assert_memory_equal(buf, "456789abcdef", 12);
    assert_int_equal(chain_write(&f->c, 511, "xyz", 3), 2);
    assert_memory_equal(ram_slice(&f->g.ram, gpa(RING_DATA + 0x1000 + 511), 1), "x", 1);
    assert_memory_equal(ram_slice(&f->g.ram, gpa(RING_DATA + 0x2000), 1), "y", 1);
    assert_int_equal(chain_write(&f->c, 513, "z", 1), 0);
    assert_int_equal(chain_read(&f->c, UINT64_MAX, buf, 1), 0);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 0);
    assert_int_equal(virtqueue_push(&f->q, 3, 513, &f->e), 0);
    uint32_t id = 0, len = 0;
    assert_true(ring_used(&f->g, &id, &len));
    assert_true(id == 3 && len == 513);
}

static void B3_a_cycle_is_broken(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, RING_DATA, 8, D_NEXT, 1);
    ring_desc(&f->g, 1, RING_DATA, 8, D_NEXT, 0);
    ring_offer(&f->g, 0);
    expect_broken(f, "too many");
}

static void B3_a_cycle_of_empty_descriptors_is_broken(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, 0, 0, D_NEXT, 1);
    ring_desc(&f->g, 1, UINT64_MAX, 0, D_NEXT, 0);
    ring_offer(&f->g, 0);
    expect_broken(f, "circle");
}

static void B3_next_past_the_table_is_broken(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, RING_DATA, 8, D_NEXT, 16);
    ring_offer(&f->g, 0);
    expect_broken(f, "past the end");
}

static void B3_a_head_past_the_table_is_broken(void **s)
{
    struct fixture *f = *s;
    ring_offer(&f->g, 16);
    expect_broken(f, "chain head 16");
}

static void B3_a_jumped_avail_index_is_broken(void **s)
{
    struct fixture *f = *s;
    ring_put16(&f->g, RING_AVAIL + 2, 1000);
    expect_broken(f, "jumped by 1000");
    ring_put16(&f->g, RING_AVAIL + 2, 17);
    expect_broken(f, "jumped by 17");
    ring_put16(&f->g, RING_AVAIL + 2, 16); /* a full ring is legal; slot 0 holds head 0 */
    ring_desc(&f->g, 0, RING_DATA, 8, 0, 0);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
}

static void B3_head_only_chains_leak_no_slots(void **s)
{
    struct fixture *f = *s;
    uint32_t id = 0, len = 0;
    for (unsigned i = 0; i < 300; i++) {
        ring_desc(&f->g, i % 16, RING_DATA, 16, 0, 0);
        ring_offer(&f->g, (uint16_t)(i % 16));
        assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
        assert_int_equal(f->c.count, 1);
        assert_true(f->c.write_bytes == 0);
        assert_int_equal(virtqueue_push(&f->q, f->c.head, 0, &f->e), 0);
        assert_true(ring_used(&f->g, &id, &len) && id == i % 16 && len == 0);
    }
    pops_readable_then_writable(s);
}

static void B3_indirect_tables_of_bad_length(void **s)
{
    struct fixture *f = *s;
    static const uint32_t bad[] = {0, 1, 8, 15, 17, 31, UINT32_MAX};
    for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
        ring_desc(&f->g, 0, RING_DATA, bad[i], D_INDIRECT, 0);
        f->g.avail = 0;
        ring_offer(&f->g, 0);
        expect_broken(f, "no multiple of 16");
    }
}

static void B3_a_nested_indirect_table_is_broken(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, RING_DATA, 16, D_INDIRECT, 0);
    ring_desc_at(&f->g, RING_DATA, 0, RING_DATA + 0x100, 16, D_INDIRECT, 0);
    ring_offer(&f->g, 0);
    expect_broken(f, "inside an indirect");
}

static void B3_an_indirect_table_of_65536_entries(void **s)
{
    struct fixture *f = *s;
    for (unsigned i = 0; i < 65536; i++)
        ring_desc_at(&f->g, RING_DATA, i, RING_DATA, 1, D_NEXT, (uint16_t)(i + 1));
    ring_desc(&f->g, 0, RING_DATA, 65536 * 16, D_INDIRECT, 0);
    ring_offer(&f->g, 0);
    expect_broken(f, "circle");
    /* The size of the table alone is no sin: a short chain in it works. */
    ring_desc_at(&f->g, RING_DATA, 0, RING_DATA, 8, D_NEXT, 65535);
    ring_desc_at(&f->g, RING_DATA, 65535, RING_DATA, 8, D_WRITE, 0);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    assert_int_equal(f->c.count, 2);
}

static void B3_an_indirect_table_at_an_odd_address_works(void **s)
{
    struct fixture *f = *s;
    ring_desc_at(&f->g, RING_DATA + 1, 0, RING_DATA + 0x101, 3, D_NEXT, 1);
    ring_desc_at(&f->g, RING_DATA + 1, 1, RING_DATA + 0x201, 5, D_WRITE, 0);
    ring_desc(&f->g, 5, RING_DATA + 1, 32, D_INDIRECT | D_WRITE, 0); /* WRITE is ignored here */
    ring_offer(&f->g, 5);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    assert_true(f->c.head == 5 && f->c.read_bytes == 3 && f->c.write_bytes == 5);
}

static void a_direct_chain_may_end_in_an_indirect_table(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, RING_DATA, 16, D_NEXT, 1);
    ring_desc(&f->g, 1, RING_DATA + 0x100, 16, D_INDIRECT, 0);
    ring_desc_at(&f->g, RING_DATA + 0x100, 0, RING_DATA, 7, D_WRITE, 0);
    ring_offer(&f->g, 0);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    assert_true(f->c.read_bytes == 16 && f->c.write_bytes == 7);
}

static void indirect_rules_are_kept(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, RING_DATA, 16, D_INDIRECT | D_NEXT, 1);
    ring_offer(&f->g, 0);
    expect_broken(f, "continues");
    ring_desc(&f->g, 0, RING_RAM_BYTES - 8, 16, D_INDIRECT, 0);
    expect_broken(f, "outside guest memory");
    ring_desc(&f->g, 0, UINT64_MAX - 7, 32, D_INDIRECT, 0);
    expect_broken(f, "outside guest memory");
    ring_desc_at(&f->g, RING_DATA, 0, RING_DATA, 1, D_NEXT, 2);
    ring_desc(&f->g, 0, RING_DATA, 32, D_INDIRECT, 0);
    expect_broken(f, "past the end");
    f->q.indirect = false;
    expect_broken(f, "not accepted");
}

static void bad_addresses_are_refused(void **s)
{
    struct fixture *f = *s;
    static const struct {
        uint64_t addr;
        uint32_t len;
    } bad[] = {
        {RING_RAM_BYTES, 1},  {RING_RAM_BYTES - 1, 2},    {UINT64_MAX, 1},
        {UINT64_MAX, 2},      {UINT64_MAX - 0xfff, 8192}, {0, UINT32_MAX},
        {RING_HOLE_START, 4}, {RING_HOLE_END - 1, 1},
    };
    ring_offer(&f->g, 0);
    for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
        ring_desc(&f->g, 0, bad[i].addr, bad[i].len, 0, 0);
        expect_broken(f, "outside guest memory");
        ring_desc(&f->g, 0, bad[i].addr, bad[i].len, D_WRITE, 0);
        expect_broken(f, "outside guest memory");
    }
}

static void empty_descriptors_carry_nothing(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, UINT64_MAX, 0, D_NEXT, 1);
    ring_desc(&f->g, 1, RING_DATA, 4, D_NEXT, 2);
    ring_desc(&f->g, 2, 0, 0, D_WRITE, 0);
    ring_offer(&f->g, 0);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    assert_int_equal(f->c.count, 1);
    assert_true(f->c.read_bytes == 4 && f->c.write_bytes == 0);
}

static void readable_after_writable_is_broken(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, RING_DATA, 4, D_WRITE | D_NEXT, 1);
    ring_desc(&f->g, 1, RING_DATA, 4, 0, 0);
    ring_offer(&f->g, 0);
    expect_broken(f, "follows a writable");
}

static void the_longest_chain_is_CHAIN_SEGMENTS_MAX(void **s)
{
    struct fixture *f = *s;
    for (unsigned i = 0; i < CHAIN_SEGMENTS_MAX; i++)
        ring_desc(&f->g, i, RING_DATA, 1, i + 1 < CHAIN_SEGMENTS_MAX ? D_NEXT : 0,
                  (uint16_t)(i + 1));
    ring_offer(&f->g, 0);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    assert_int_equal(f->c.count, CHAIN_SEGMENTS_MAX);
    ring_desc(&f->g, CHAIN_SEGMENTS_MAX - 1, RING_DATA, 1, D_NEXT, CHAIN_SEGMENTS_MAX);
    ring_desc(&f->g, CHAIN_SEGMENTS_MAX, RING_DATA, 1, 0, 0);
    ring_offer(&f->g, 0);
    expect_broken(f, "too many");
}

static void enable_checks_size_alignment_and_place(void **s)
{
    struct fixture *f = *s;
    struct virtqueue good = f->q;
    good.ready = false;
    static const uint16_t sizes[] = {0, 3, 255, 257, 512, 0xffff};
    for (unsigned i = 0; i < ARRAY_SIZE(sizes); i++) {
        struct virtqueue q = good;
        q.size = sizes[i];
        assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
        assert_false(q.ready);
    }
    for (unsigned i = 1; i < 16; i++) {
        struct virtqueue q = good;
        q.desc_gpa += i;
        assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
    }
    struct virtqueue q = good;
    q.avail_gpa++;
    assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
    q = good;
    q.used_gpa += 2;
    assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
    /* Sizes as 2.7 has them: the last byte of each area must be inside. */
    q = good;
    q.desc_gpa = RING_RAM_BYTES - 16 * 16;
    assert_int_equal(virtqueue_enable(&q, &f->e), 0);
    q = good;
    q.desc_gpa = RING_RAM_BYTES - 16 * 15;
    assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
    q = good;
    q.avail_gpa = RING_RAM_BYTES - (6 + 2 * 16) + 2;
    assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
    q = good;
    q.used_gpa = RING_RAM_BYTES - (8 + 8 * 16) + 4;
    assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
    q = good;
    q.used_gpa = UINT64_MAX - 3;
    assert_int_equal(virtqueue_enable(&q, &f->e), -EPROTO);
}

static void a_queue_that_is_not_ready_is_left_alone(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, RING_DATA, 4, 0, 0);
    ring_offer(&f->g, 0);
    virtqueue_reset(&f->q);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 0);
    assert_int_equal(virtqueue_push(&f->q, 0, 0, &f->e), -EPROTO);
    assert_false(virtqueue_wants_interrupt(&f->q));
    virtqueue_notifications(&f->q, true);
    assert_int_equal(ring_get16(&f->g, RING_USED + 2), 0);
}

static void unpop_gives_the_chain_again(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 4, RING_DATA, 4, 0, 0);
    ring_offer(&f->g, 4);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    virtqueue_unpop(&f->q);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
    assert_int_equal(f->c.head, 4);
    assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 0);
}

static void indices_wrap_at_65536(void **s)
{
    struct fixture *f = *s;
    f->q.event_idx = true;
    uint64_t used_event = RING_AVAIL + 4 + 2 * 16;
    uint32_t id = 0, len = 0;
    for (uint32_t i = 0; i < 70000; i++) {
        ring_desc(&f->g, i % 16, RING_DATA, 4, 0, 0);
        ring_offer(&f->g, (uint16_t)(i % 16));
        assert_int_equal(virtqueue_pop(&f->q, &f->c, &f->e), 1);
        assert_int_equal(f->c.head, i % 16);
        /* Every second completion is asked for. */
        ring_put16(&f->g, used_event, (uint16_t)(i | 1));
        assert_int_equal(virtqueue_push(&f->q, f->c.head, i, &f->e), 0);
        assert_int_equal(virtqueue_wants_interrupt(&f->q), i % 2);
        assert_true(ring_used(&f->g, &id, &len) && id == i % 16 && len == i);
    }
}

static void interrupts_follow_the_flag_without_event_index(void **s)
{
    struct fixture *f = *s;
    assert_false(virtqueue_wants_interrupt(&f->q)); /* nothing pushed yet */
    assert_int_equal(virtqueue_push(&f->q, 0, 0, &f->e), 0);
    assert_true(virtqueue_wants_interrupt(&f->q));
    assert_false(virtqueue_wants_interrupt(&f->q));
    ring_put16(&f->g, RING_AVAIL, 1);
    assert_int_equal(virtqueue_push(&f->q, 0, 0, &f->e), 0);
    assert_false(virtqueue_wants_interrupt(&f->q));
}

static void event_index_sees_a_batch_that_passes_it(void **s)
{
    struct fixture *f = *s;
    f->q.event_idx = true;
    uint64_t used_event = RING_AVAIL + 4 + 2 * 16;
    ring_put16(&f->g, used_event, 5);
    for (int i = 0; i < 5; i++)
        assert_int_equal(virtqueue_push(&f->q, 0, 0, &f->e), 0);
    assert_false(virtqueue_wants_interrupt(&f->q)); /* entries 0..4 */
    for (int i = 0; i < 3; i++)
        assert_int_equal(virtqueue_push(&f->q, 0, 0, &f->e), 0);
    assert_true(virtqueue_wants_interrupt(&f->q)); /* 5..7 */
    assert_int_equal(virtqueue_push(&f->q, 0, 0, &f->e), 0);
    assert_false(virtqueue_wants_interrupt(&f->q));
}

static void a_whole_lap_without_a_question_asks_for_an_interrupt(void **s)
{
    struct fixture *f = *s;
    f->q.event_idx = true;
    ring_put16(&f->g, RING_AVAIL + 4 + 2 * 16, 40000);
    for (int i = 0; i < 65536; i++)
        assert_int_equal(virtqueue_push(&f->q, 0, 0, &f->e), 0);
    assert_true(virtqueue_wants_interrupt(&f->q));
}

static void notifications_are_asked_for_where_the_driver_looks(void **s)
{
    struct fixture *f = *s;
    virtqueue_notifications(&f->q, false);
    assert_int_equal(ring_get16(&f->g, RING_USED), 1);
    virtqueue_notifications(&f->q, true);
    assert_int_equal(ring_get16(&f->g, RING_USED), 0);
    f->q.event_idx = true;
    f->q.next_avail = 77;
    virtqueue_notifications(&f->q, false);
    assert_int_equal(ring_get16(&f->g, RING_USED), 0);
    virtqueue_notifications(&f->q, true);
    assert_int_equal(ring_get16(&f->g, RING_USED + 4 + 8 * 16), 77);
}

static void save_and_restore_keep_the_place(void **s)
{
    struct fixture *f = *s;
    f->q.next_avail = 65535;
    f->q.next_used = 65530;
    f->q.signalled_used = 65529;
    struct state_writer w;
    struct state_node root;
    const void *blob;
    size_t len;
    assert_int_equal(state_writer_init(&w, &f->e), 0);
    virtqueue_save(&f->q, &w);
    assert_int_equal(state_finish(&w, &blob, &len, &f->e), 0);
    assert_int_equal(state_open(blob, len, &root, &f->e), 0);
    struct virtqueue back = {.ram = &f->g.ram, .indirect = true};
    assert_int_equal(virtqueue_restore(&back, &root, &f->e), 0);
    assert_memory_equal(&back, &f->q, sizeof back);
    /* A ring outside this machine's memory is refused, and nothing is taken over. */
    struct ram small;
    assert_int_equal(ram_create(&small, 0x1000, RING_HOLE_START, RING_HOLE_END, false, &f->e), 0);
    struct virtqueue other = {.ram = &small};
    assert_true(virtqueue_restore(&other, &root, &f->e) < 0);
    assert_int_equal(f->e.code, ERR_BAD_IMAGE);
    assert_false(other.ready);
    ram_free(&small);
    state_writer_free(&w);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(pops_readable_then_writable),
        T(B3_a_cycle_is_broken),
        T(B3_a_cycle_of_empty_descriptors_is_broken),
        T(B3_next_past_the_table_is_broken),
        T(B3_a_head_past_the_table_is_broken),
        T(B3_a_jumped_avail_index_is_broken),
        T(B3_head_only_chains_leak_no_slots),
        T(B3_indirect_tables_of_bad_length),
        T(B3_a_nested_indirect_table_is_broken),
        T(B3_an_indirect_table_of_65536_entries),
        T(B3_an_indirect_table_at_an_odd_address_works),
        T(a_direct_chain_may_end_in_an_indirect_table),
        T(indirect_rules_are_kept),
        T(bad_addresses_are_refused),
        T(empty_descriptors_carry_nothing),
        T(readable_after_writable_is_broken),
        cmocka_unit_test_setup_teardown(the_longest_chain_is_CHAIN_SEGMENTS_MAX, setup_large,
                                        teardown),
        T(enable_checks_size_alignment_and_place),
        T(a_queue_that_is_not_ready_is_left_alone),
        T(unpop_gives_the_chain_again),
        T(indices_wrap_at_65536),
        T(interrupts_follow_the_flag_without_event_index),
        T(event_index_sees_a_batch_that_passes_it),
        T(a_whole_lap_without_a_question_asks_for_an_interrupt),
        T(notifications_are_asked_for_where_the_driver_looks),
        T(save_and_restore_keep_the_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
