/*
 * The mmio transport: registers at any width and offset, the status machine, notifications from
 * other threads, reset at any time (B2), save and restore.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <cmocka.h>

#include "tests/unit/guest_driver.h"
#include "vmm/core/err.h"
#include "vmm/core/loop.h"
#include "vmm/core/state.h"

#define F_OFFERED                                                                                  \
    (VIRTIO_F_VERSION_1 | VIRTIO_F_RING_EVENT_IDX | VIRTIO_F_RING_INDIRECT_DESC | 0x21)

struct fake {
    struct virtio_device dev;
    unsigned activated, resets, notified[2], config_writes;
    uint32_t saved_word;
    bool fail_restore;
};

struct fixture {
    struct guest_ring g;
    struct loop loop;
    struct fake fake;
    struct virtio_mmio t;
    unsigned irqs;
    struct err e;
};

static struct fake *to_fake(struct virtio_device *dev)
{
    return CONTAINER_OF(dev, struct fake, dev);
}

static void fake_config_read(struct virtio_device *dev, uint32_t offset, void *data, unsigned len)
{
    for (unsigned i = 0; i < len; i++)
        ((uint8_t *)data)[i] = (uint8_t)(offset + i < 8 ? 0xa0 + offset + i : 0);
}

static void fake_config_write(struct virtio_device *dev, uint32_t offset, const void *data,
                              unsigned len)
{
    to_fake(dev)->config_writes++;
}

static void fake_activate(struct virtio_device *dev)
{
    to_fake(dev)->activated++;
}

static void fake_reset(struct virtio_device *dev)
{
    to_fake(dev)->resets++;
}

static void fake_notify(struct virtio_device *dev, unsigned queue)
{
    assert_true(queue < 2);
    to_fake(dev)->notified[queue]++;
}

static int fake_save(struct virtio_device *dev, struct state_writer *w, struct err *e)
{
    state_put_u32(w, "version", to_fake(dev)->saved_word);
    return 0;
}

static int fake_restore(struct virtio_device *dev, const struct state_node *n, struct err *e)
{
    if (to_fake(dev)->fail_restore)
        return err_set(e, ERR_BAD_IMAGE, 0, "fake");
    return state_get_u32(n, "version", &to_fake(dev)->saved_word, e);
}

static const struct virtio_device_ops fake_ops = {
    .config_read = fake_config_read,
    .config_write = fake_config_write,
    .activate = fake_activate,
    .reset = fake_reset,
    .notify = fake_notify,
    .save = fake_save,
    .restore = fake_restore,
};

static void make_device(struct fixture *f)
{
    f->fake = (struct fake){.dev = {.ops = &fake_ops,
                                    .name = "fake",
                                    .device_id = 42,
                                    .features = F_OFFERED,
                                    .irq = {.raise = irq_count, .ctx = &f->irqs, .gsi = 7},
                                    .queue_count = 2},
                            .saved_word = 77};
    f->fake.dev.queues[0].ram = &f->g.ram;
    f->fake.dev.queues[1].ram = &f->g.ram;
    virtio_mmio_init(&f->t, &f->fake.dev, &f->loop);
}

static int setup(void **s)
{
    struct fixture *f = calloc(1, sizeof *f);
    ring_init(&f->g, 16);
    if (loop_init(&f->loop, &f->e) != 0)
        return -1;
    make_device(f);
    *s = f;
    return 0;
}

static int teardown(void **s)
{
    struct fixture *f = *s;
    loop_close(&f->loop);
    ring_free(&f->g);
    free(f);
    return 0;
}

static void start(struct fixture *f)
{
    assert_int_equal(driver_start(&f->t, &f->g, F_OFFERED), 1 | 2 | 4 | 8);
}

static void identity_registers(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(reg_read(&f->t, 0x00), 0x74726976);
    assert_int_equal(reg_read(&f->t, 0x04), 2);
    assert_int_equal(reg_read(&f->t, 0x08), 42);
    char vendor[5] = {0};
    virtio_mmio_bus_ops.read(&f->t, 0x0c, vendor, 4);
    assert_string_equal(vendor, "TINE");
    assert_true(driver_offered(&f->t) == F_OFFERED);
    reg_write(&f->t, 0x14, 2);
    assert_int_equal(reg_read(&f->t, 0x10), 0);
    reg_write(&f->t, 0x14, UINT32_MAX);
    assert_int_equal(reg_read(&f->t, 0x10), 0);
    assert_int_equal(reg_read(&f->t, 0x34), VIRTQUEUE_SIZE_MAX);
    reg_write(&f->t, 0x30, 2);
    assert_int_equal(reg_read(&f->t, 0x34), 0);
    reg_write(&f->t, 0x30, UINT32_MAX);
    assert_int_equal(reg_read(&f->t, 0x34), 0);
    assert_int_equal(reg_read(&f->t, 0xb0), UINT32_MAX); /* no shared memory */
    assert_int_equal(reg_read(&f->t, 0xb4), UINT32_MAX);
}

static void any_width_at_any_offset_is_harmless(void **s)
{
    struct fixture *f = *s;
    uint8_t ones[8], got[8];
    memset(ones, 0xff, sizeof ones);
    for (unsigned pass = 0; pass < 2; pass++) {
        for (uint64_t at = 0; at < MMIO_WINDOW_BYTES; at++) {
            for (unsigned len = 1; len <= 8; len++) {
                virtio_mmio_bus_ops.read(&f->t, at, got, len);
                if (pass == 1 && at != 0x70)
                    virtio_mmio_bus_ops.write(&f->t, at, ones, len);
                (void)virtio_mmio_bus_ops.post(&f->t, at, ones, len);
            }
        }
    }
    virtio_mmio_run_notifications(&f->t);
    /* A register read in another width or between two registers is zero. */
    virtio_mmio_bus_ops.read(&f->t, 0x00, got, 2);
    assert_int_equal(got[0] | got[1], 0);
    virtio_mmio_bus_ops.read(&f->t, 0x02, got, 4);
    assert_int_equal(got[0] | got[1] | got[2] | got[3], 0);
    virtio_mmio_bus_ops.read(&f->t, 0x00, got, 8);
    assert_int_equal(got[0], 0);
    assert_int_equal(f->fake.notified[0] + f->fake.notified[1], 0);
    virtio_device_reset(&f->fake.dev);
    start(f);
}

static void config_space_takes_any_width(void **s)
{
    struct fixture *f = *s;
    uint8_t got[8];
    virtio_mmio_bus_ops.read(&f->t, 0x101, got, 1);
    assert_int_equal(got[0], 0xa1);
    virtio_mmio_bus_ops.read(&f->t, 0x103, got, 2);
    assert_int_equal(got[1], 0xa4);
    virtio_mmio_bus_ops.read(&f->t, 0x100, got, 8);
    assert_int_equal(got[7], 0xa7);
    memset(got, 0x55, sizeof got);
    virtio_mmio_bus_ops.read(&f->t, 0x106, got, 4);
    assert_true(got[0] == 0xa6 && got[1] == 0xa7 && got[2] == 0 && got[3] == 0);
    virtio_mmio_bus_ops.write(&f->t, 0x100, got, 1);
    assert_int_equal(f->fake.config_writes, 1);
}

static void features_that_were_not_offered_are_refused(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(driver_negotiate(&f->t, F_OFFERED | 1u << 4) & VIRTIO_STATUS_FEATURES_OK, 0);
    assert_int_equal(driver_negotiate(&f->t, F_OFFERED | 1ull << 63) & VIRTIO_STATUS_FEATURES_OK,
                     0);
    assert_int_equal(driver_negotiate(&f->t, 0x21) & VIRTIO_STATUS_FEATURES_OK, 0);
    assert_int_equal(driver_negotiate(&f->t, 0) & VIRTIO_STATUS_FEATURES_OK, 0);
    assert_true(f->fake.dev.driver_features == 0);
    /* Without FEATURES_OK neither a queue nor DRIVER_OK is to be had. */
    driver_set_queue(&f->t, 0, &f->g);
    assert_int_equal(reg_read(&f->t, 0x44), 0);
    reg_write(&f->t, 0x70, 1 | 2 | 4);
    assert_int_equal(reg_read(&f->t, 0x70), 1 | 2);
    assert_int_equal(f->fake.activated, 0);
    assert_int_equal(driver_negotiate(&f->t, VIRTIO_F_VERSION_1), 1 | 2 | 8);
    assert_false(f->fake.dev.queues[0].event_idx);
    start(f);
    assert_true(f->fake.dev.queues[0].event_idx && f->fake.dev.queues[1].indirect);
    reg_write(&f->t, 0x24, 0);
    reg_write(&f->t, 0x20, 0); /* too late */
    reg_write(&f->t, 0x70, 1 | 2 | 4 | 8);
    assert_true(f->fake.dev.driver_features == F_OFFERED);
}

static void words_past_the_second_hold_no_feature(void **s)
{
    struct fixture *f = *s;
    reg_write(&f->t, 0x70, 3);
    reg_write(&f->t, 0x24, 2);
    reg_write(&f->t, 0x20, UINT32_MAX);
    reg_write(&f->t, 0x24, 0x80000000u);
    reg_write(&f->t, 0x20, UINT32_MAX);
    reg_write(&f->t, 0x24, 1);
    reg_write(&f->t, 0x20, 1);
    reg_write(&f->t, 0x70, 11);
    assert_int_equal(reg_read(&f->t, 0x70), 11);
    assert_true(f->fake.dev.driver_features == VIRTIO_F_VERSION_1);
}

static void a_ready_queue_does_not_move(void **s)
{
    struct fixture *f = *s;
    start(f);
    assert_int_equal(f->fake.activated, 1);
    reg_write(&f->t, 0x70, 15);
    assert_int_equal(f->fake.activated, 1); /* once */
    reg_write(&f->t, 0x30, 0);
    assert_int_equal(reg_read(&f->t, 0x44), 1);
    reg_write(&f->t, 0x38, 4);
    reg_write(&f->t, 0x80, 0xdead0);
    reg_write(&f->t, 0x94, 1);
    reg_write(&f->t, 0x44, 0);
    const struct virtqueue *q = &f->fake.dev.queues[0];
    assert_true(q->ready && q->size == 16 && q->desc_gpa == RING_DESC &&
                q->avail_gpa == RING_AVAIL);
}

static void a_bad_queue_needs_a_reset(void **s)
{
    struct fixture *f = *s;
    static const struct {
        uint32_t reg, value;
    } bad[] = {{0x38, 0},          {0x38, 3},       {0x38, 512},       {0x38, 0x10010},
               {0x80, 0x10008},    {0x84, 1},       {0x94, 0xffff},    {0xa0, 0x30002},
               {0xa4, UINT32_MAX}, {0x90, 0x20001}, {0x90, UINT32_MAX}};
    for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
        assert_int_equal(driver_negotiate(&f->t, F_OFFERED), 11);
        reg_write(&f->t, 0x30, 0);
        reg_write(&f->t, 0x38, 16);
        reg_write(&f->t, 0x80, (uint32_t)RING_DESC);
        reg_write(&f->t, 0x90, (uint32_t)RING_AVAIL);
        reg_write(&f->t, 0xa0, (uint32_t)RING_USED);
        reg_write(&f->t, bad[i].reg, bad[i].value);
        reg_write(&f->t, 0x44, 1);
        assert_int_equal(reg_read(&f->t, 0x44), 0);
        assert_true((reg_read(&f->t, 0x70) & VIRTIO_STATUS_NEEDS_RESET) != 0);
        reg_write(&f->t, 0x70, 15);
        assert_int_equal(f->fake.activated, 0);
    }
    start(f);
}

static void B2_status_0_resets_from_every_state(void **s)
{
    struct fixture *f = *s;
    for (unsigned i = 0; i < 50; i++) {
        reg_write(&f->t, 0x70, i % 2 != 0 ? 1 : 3);
        reg_write(&f->t, 0x70, 0);
        assert_int_equal(reg_read(&f->t, 0x70), 0);
        start(f);
        uint32_t queue = 0;
        assert_true(virtio_mmio_bus_ops.post(&f->t, 0x50, &queue, 4));
        virtio_device_config_changed(&f->fake.dev);
        if (i % 3 == 0)
            virtio_device_fault(&f->fake.dev, &(struct err){.text = "test"});
        reg_write(&f->t, 0x70, 0);
        assert_int_equal(reg_read(&f->t, 0x70), 0);
        assert_int_equal(reg_read(&f->t, 0x60), 0);
        assert_int_equal(reg_read(&f->t, 0x44), 0);
        unsigned before = f->fake.notified[0];
        virtio_mmio_run_notifications(&f->t); /* the old life's notification */
        assert_int_equal(f->fake.notified[0], before);
        start(f);
        driver_notify(&f->t, 0);
        assert_int_equal(f->fake.notified[0], before + 1);
    }
    assert_true(f->fake.resets >= 100);
}

static void NEEDS_RESET_and_FAILED_are_kept_until_reset(void **s)
{
    struct fixture *f = *s;
    start(f);
    reg_write(&f->t, 0x70, 15 | VIRTIO_STATUS_NEEDS_RESET);
    assert_int_equal(reg_read(&f->t, 0x70), 15); /* not the driver's to set */
    reg_write(&f->t, 0x70, 1);
    assert_int_equal(reg_read(&f->t, 0x70), 15); /* nor can it take bits back */
    virtio_device_fault(&f->fake.dev, &(struct err){.text = "test"});
    assert_int_equal(reg_read(&f->t, 0x70), 15 | 64);
    assert_int_equal(reg_read(&f->t, 0x60), VIRTIO_INT_CONFIG);
    assert_int_equal(f->irqs, 1);
    assert_false(virtio_device_is_live(&f->fake.dev));
    driver_notify(&f->t, 0);
    assert_int_equal(f->fake.notified[0], 0);
    reg_write(&f->t, 0x70, 128);
    assert_int_equal(reg_read(&f->t, 0x70), 15 | 64 | 128);
    for (unsigned i = 0; i < 100; i++)
        virtio_device_fault(&f->fake.dev, &(struct err){.text = "test"});
    assert_int_equal(f->irqs, 1);
    assert_true(f->fake.dev.guest_fault_count == 101);
}

static void interrupts_are_raised_and_acknowledged(void **s)
{
    struct fixture *f = *s;
    start(f);
    uint32_t generation = reg_read(&f->t, 0xfc);
    virtio_device_config_changed(&f->fake.dev);
    assert_true(reg_read(&f->t, 0xfc) != generation);
    assert_int_equal(virtqueue_push(&f->fake.dev.queues[0], 0, 0, &f->e), 0);
    virtio_device_signal(&f->fake.dev, &f->fake.dev.queues[0]);
    assert_int_equal(reg_read(&f->t, 0x60), 3);
    assert_int_equal(f->irqs, 2);
    reg_write(&f->t, 0x64, 1);
    assert_int_equal(reg_read(&f->t, 0x60), 2);
    reg_write(&f->t, 0x64, UINT32_MAX);
    assert_int_equal(reg_read(&f->t, 0x60), 0);
    virtio_device_signal(&f->fake.dev, &f->fake.dev.queues[0]); /* nothing new */
    assert_int_equal(f->irqs, 2);
}

static void notifications_reach_only_queues_that_are_ready(void **s)
{
    struct fixture *f = *s;
    driver_notify(&f->t, 0);
    start(f);
    driver_notify(&f->t, 0);
    driver_notify(&f->t, 1); /* not enabled */
    driver_notify(&f->t, 2);
    driver_notify(&f->t, UINT32_MAX);
    for (uint32_t q = 0; q < 64; q++)
        assert_true(virtio_mmio_bus_ops.post(&f->t, 0x50, &q, 4));
    virtio_mmio_run_notifications(&f->t);
    assert_int_equal(f->fake.notified[0], 2);
    assert_int_equal(f->fake.notified[1], 0);
    uint32_t zero = 0;
    assert_false(virtio_mmio_bus_ops.post(&f->t, 0x50, &zero, 2));
    assert_false(virtio_mmio_bus_ops.post(&f->t, 0x51, &zero, 4));
    assert_false(virtio_mmio_bus_ops.post(&f->t, 0x70, &zero, 4));
}

/* ---- posts from vCPU threads ---- */

#define POSTS 20000u

static void *post_many(void *arg)
{
    struct fixture *f = arg;
    uint32_t queue = 0;
    for (unsigned i = 0; i < POSTS; i++)
        (void)virtio_mmio_bus_ops.post(&f->t, 0x50, &queue, 4);
    return NULL;
}

static void on_wake(void *arg)
{
    virtio_mmio_run_notifications(&((struct fixture *)arg)->t);
}

static void no_posted_notification_is_lost(void **s)
{
    struct fixture *f = *s;
    start(f);
    loop_set_wake(&f->loop, on_wake, f);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, post_many, f), 0);
    while (f->fake.notified[0] == 0)
        assert_int_equal(loop_round(&f->loop, 5000, &f->e), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    unsigned before = f->fake.notified[0];
    uint32_t queue = 0;
    /* After the last post at least one run follows, unless it was taken already. */
    assert_int_equal(loop_round(&f->loop, 0, &f->e), 0);
    assert_true(virtio_mmio_bus_ops.post(&f->t, 0x50, &queue, 4));
    assert_int_equal(loop_round(&f->loop, 5000, &f->e), 0);
    assert_true(f->fake.notified[0] > before);
}

/* ---- save and restore ---- */

static int save_to(struct fixture *f, struct state_writer *w, struct state_node *root)
{
    const void *blob;
    size_t len;
    assert_int_equal(state_writer_init(w, &f->e), 0);
    assert_int_equal(virtio_mmio_save(&f->t, w, &f->e), 0);
    assert_int_equal(state_finish(w, &blob, &len, &f->e), 0);
    return state_open(blob, len, root, &f->e);
}

static void save_and_restore_go_on_where_they_were(void **s)
{
    struct fixture *f = *s;
    struct state_writer w;
    struct state_node root;
    start(f);
    virtio_device_config_changed(&f->fake.dev);
    f->fake.dev.queues[0].next_avail = 0xfffe;
    f->fake.dev.queues[0].next_used = 3;
    reg_write(&f->t, 0x30, 1);
    reg_write(&f->t, 0x14, 1);
    assert_int_equal(save_to(f, &w, &root), 0);
    struct virtio_device before = f->fake.dev;
    make_device(f);
    f->fake.saved_word = 0;
    if (virtio_mmio_restore(&f->t, &root, &f->e) != 0)
        fail_msg("%s", f->e.text);
    assert_int_equal(f->fake.saved_word, 77);
    assert_int_equal(f->fake.activated, 0);
    assert_memory_equal(&f->fake.dev.queues, &before.queues, sizeof before.queues);
    assert_int_equal(reg_read(&f->t, 0x70), 15);
    assert_int_equal(reg_read(&f->t, 0x60), VIRTIO_INT_CONFIG);
    assert_int_equal(reg_read(&f->t, 0xfc), 1);
    assert_int_equal(reg_read(&f->t, 0x44), 0); /* queue 1 is still selected */
    assert_int_equal(reg_read(&f->t, 0x10), 1);
    driver_notify(&f->t, 0);
    assert_int_equal(f->fake.notified[0], 1);
    state_writer_free(&w);
}

static void what_this_build_cannot_offer_is_refused(void **s)
{
    struct fixture *f = *s;
    struct state_writer w;
    struct state_node root;
    start(f);
    assert_int_equal(save_to(f, &w, &root), 0);
    make_device(f);
    f->fake.dev.features &= ~1ull;
    assert_true(virtio_mmio_restore(&f->t, &root, &f->e) < 0);
    assert_int_equal(f->e.code, ERR_MISMATCH);
    assert_non_null(strstr(f->e.text, "fake"));
    make_device(f);
    f->fake.dev.device_id = 41;
    assert_true(virtio_mmio_restore(&f->t, &root, &f->e) < 0);
    make_device(f);
    f->fake.dev.queue_count = 1;
    assert_true(virtio_mmio_restore(&f->t, &root, &f->e) < 0);
    make_device(f);
    f->fake.fail_restore = true;
    assert_true(virtio_mmio_restore(&f->t, &root, &f->e) < 0);
    make_device(f);
    f->fake.dev.name = "other";
    assert_true(virtio_mmio_restore(&f->t, &root, &f->e) < 0);
    assert_int_equal(f->e.code, ERR_BAD_IMAGE);
    state_writer_free(&w);
}

static void E13_flipped_bits_in_the_state_do_no_harm(void **s)
{
    struct fixture *f = *s;
    struct state_writer w;
    struct state_node root;
    start(f);
    assert_int_equal(save_to(f, &w, &root), 0);
    size_t len = 0;
    const void *blob = w.buf;
    len = (size_t)__builtin_bswap32(le32_get((const uint8_t *)blob + 4)); /* totalsize */
    uint8_t *copy = malloc(len);
    for (size_t at = 0; at < len; at++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            memcpy(copy, blob, len);
            copy[at] = (uint8_t)(copy[at] ^ 1u << bit);
            make_device(f);
            if (state_open(copy, len, &root, &f->e) == 0 &&
                virtio_mmio_restore(&f->t, &root, &f->e) == 0) {
                /* Then it is a possible state: the device answers in it. */
                driver_notify(&f->t, 0);
                (void)reg_read(&f->t, 0x10);
                reg_write(&f->t, 0x70, 0);
                start(f);
            }
        }
    }
    free(copy);
    state_writer_free(&w);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(identity_registers),
        T(any_width_at_any_offset_is_harmless),
        T(config_space_takes_any_width),
        T(features_that_were_not_offered_are_refused),
        T(words_past_the_second_hold_no_feature),
        T(a_ready_queue_does_not_move),
        T(a_bad_queue_needs_a_reset),
        T(B2_status_0_resets_from_every_state),
        T(NEEDS_RESET_and_FAILED_are_kept_until_reset),
        T(interrupts_are_raised_and_acknowledged),
        T(notifications_reach_only_queues_that_are_ready),
        T(no_posted_notification_is_lost),
        T(save_and_restore_go_on_where_they_were),
        T(what_this_build_cannot_offer_is_refused),
        T(E13_flipped_bits_in_the_state_do_no_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
