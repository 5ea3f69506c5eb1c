/*
 * Fuzz target of the mmio transport: accesses of any width at any offset, notifications, faults,
 * copies, in any order. The status machine never reaches a state that the specification forbids.
 * Seeds: seeds/mmio.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "devices/virtio/device.h"
#include "devices/virtio/mmio.h"
#include "tests/fuzz/script.h"
#include "tests/unit/guest_driver.h"
#include "vmm/core/err.h"
#include "vmm/core/log.h"
#include "vmm/core/loop.h"
#include "vmm/core/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STEPS_MAX 300
#define OFFERED (VIRTIO_F_VERSION_1 | VIRTIO_F_RING_EVENT_IDX | VIRTIO_F_RING_INDIRECT_DESC | 3)

static struct guest_ring ring;
static struct loop loop;
static unsigned irqs;

/* A device that hands back whatever comes. */
static void echo(struct virtio_device *dev, unsigned index)
{
    static struct chain c;
    struct err e;
    struct virtqueue *q = &dev->queues[index];
    assert(virtio_device_is_live(dev) && q->ready);
    for (unsigned i = 0; i < VIRTQUEUE_SIZE_MAX; i++) {
        int rc = virtqueue_pop(q, &c, &e);
        if (rc == 0)
            break;
        if (rc == 1)
            rc = virtqueue_push(q, c.head, 0, &e);
        if (rc < 0) {
            virtio_device_fault(dev, &e);
            break;
        }
    }
    virtqueue_notifications(q, true);
    virtio_device_signal(dev, q);
}

static void config_read(struct virtio_device *dev, uint32_t offset, void *data, unsigned len)
{
    assert(len >= 1 && len <= 8 && offset < MMIO_WINDOW_BYTES - 0x100);
}

static void activate(struct virtio_device *dev)
{
    assert((dev->status & VIRTIO_STATUS_FEATURES_OK) != 0);
}

static void reset(struct virtio_device *dev)
{
}

static const struct virtio_device_ops ops = {
    .config_read = config_read, .activate = activate, .reset = reset, .notify = echo};

static void check(const struct virtio_device *dev)
{
    const uint32_t known = 1 | 2 | 4 | 8 | 64 | 128;
    assert((dev->status & ~known) == 0 && (dev->interrupt_status & ~3u) == 0);
    assert((dev->driver_features & ~dev->features) == 0);
    if ((dev->status & VIRTIO_STATUS_FEATURES_OK) == 0)
        assert(dev->driver_features == 0 && (dev->status & VIRTIO_STATUS_DRIVER_OK) == 0);
    for (unsigned i = 0; i < dev->queue_count; i++) {
        const struct virtqueue *q = &dev->queues[i];
        if (q->ready)
            assert((dev->status & VIRTIO_STATUS_FEATURES_OK) != 0 && q->size > 0 &&
                   q->size <= VIRTQUEUE_SIZE_MAX);
    }
}

static void new_device(struct virtio_device *dev, struct virtio_mmio *t)
{
    *dev = (struct virtio_device){.ops = &ops,
                                  .name = "fuzz",
                                  .device_id = 9,
                                  .features = OFFERED,
                                  .queue_count = 3,
                                  .irq = {.raise = irq_count, .ctx = &irqs}};
    for (unsigned i = 0; i < dev->queue_count; i++)
        dev->queues[i].ram = &ring.ram;
    virtio_mmio_init(t, dev, &loop);
}

static void copy(struct virtio_device *dev, struct virtio_mmio *t)
{
    struct state_writer w;
    struct state_node root;
    const void *blob;
    size_t len;
    struct err e = {0};
    if (state_writer_init(&w, &e) < 0)
        abort();
    struct virtio_device before = *dev;
    int rc = virtio_mmio_save(t, &w, &e);
    assert(rc == 0);
    rc = state_finish(&w, &blob, &len, &e);
    assert(rc == 0 && state_open(blob, len, &root, &e) == 0);
    new_device(dev, t);
    rc = virtio_mmio_restore(t, &root, &e);
    assert(rc == 0);
    assert(memcmp(before.queues, dev->queues, sizeof before.queues) == 0);
    assert(before.status == dev->status && before.driver_features == dev->driver_features);
    state_writer_free(&w);
}

static void access(struct script *s, struct virtio_mmio *t, uint8_t op)
{
    uint8_t buf[8];
    uint32_t offset = take16(s) % MMIO_WINDOW_BYTES;
    unsigned len = op % 8 + 1u;
    for (unsigned i = 0; i < 8; i++)
        buf[i] = take8(s);
    if ((op & 0x10) != 0)
        virtio_mmio_bus_ops.read(t, offset, buf, len);
    else
        virtio_mmio_bus_ops.write(t, offset, buf, len);
    (void)virtio_mmio_bus_ops.post(t, offset, buf, len);
}

static void step(struct script *s, struct virtio_device *dev, struct virtio_mmio *t)
{
    uint8_t op = take8(s);
    switch (op >> 5) {
    case 0:
        access(s, t, op);
        break;
    case 1: /* a register as it should be accessed */
        reg_write(t, (take8(s) % 64) * 4u, take32(s));
        break;
    case 2:
        (void)driver_start(t, &ring, OFFERED & ~(uint64_t)take8(s));
        break;
    case 3:
        ring_desc(&ring, take8(s) & 15, take16(s) * 16ull, take16(s), op & 7, take8(s));
        ring_offer(&ring, take8(s));
        break;
    case 4:
        driver_notify(t, op & 7);
        break;
    case 5:
        virtio_mmio_run_notifications(t);
        break;
    case 6:
        if ((op & 1) != 0)
            virtio_device_config_changed(dev);
        else
            virtio_device_fault(dev, &(struct err){.text = "fuzz"});
        break;
    default:
        copy(dev, t);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct script s = {data, size};
    struct virtio_device dev;
    struct virtio_mmio t;
    struct err e;
    if (ring.ram.bytes == 0) {
        ring_init(&ring, 16);
        if (loop_init(&loop, &e) < 0)
            abort();
        log_set_level(LOG_ERROR);
    }
    ring_clear(&ring);
    new_device(&dev, &t);
    for (unsigned i = 0; i < STEPS_MAX && s.left > 0; i++) {
        step(&s, &dev, &t);
        check(&dev);
    }
    reg_write(&t, 0x70, 0);
    uint32_t status = driver_start(&t, &ring, OFFERED);
    assert(status == 15); /* a reset heals everything */
    (void)status;
    return 0;
}
