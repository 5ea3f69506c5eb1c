/*
 * mmio: see mmio.h; register layout and rules are those of virtio 1.2, 4.2.2.
 *
 * All of it runs on the loop thread but `post`, which runs on vCPU threads and touches nothing but
 * `notified` and the loop's wake fd.
 */
#include "devices/virtio/mmio.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "devices/virtio/device.h"
#include "vmm/core/err.h"
#include "vmm/core/loop.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define MMIO_STATE_VERSION 1u
#define MMIO_MAGIC 0x74726976u  /* "virt" */
#define MMIO_VENDOR 0x454e4954u /* "TINE" */
#define MMIO_CONFIG 0x100u

enum reg {
    REG_MAGIC = 0x00,
    REG_VERSION = 0x04,
    REG_DEVICE_ID = 0x08,
    REG_VENDOR_ID = 0x0c,
    REG_DEVICE_FEATURES = 0x10,
    REG_DEVICE_FEATURES_SEL = 0x14,
    REG_DRIVER_FEATURES = 0x20,
    REG_DRIVER_FEATURES_SEL = 0x24,
    REG_QUEUE_SEL = 0x30,
    REG_QUEUE_NUM_MAX = 0x34,
    REG_QUEUE_NUM = 0x38,
    REG_QUEUE_READY = 0x44,
    REG_QUEUE_NOTIFY = MMIO_QUEUE_NOTIFY,
    REG_INTERRUPT_STATUS = 0x60,
    REG_INTERRUPT_ACK = 0x64,
    REG_STATUS = 0x70,
    REG_QUEUE_DESC_LOW = 0x80,
    REG_QUEUE_DESC_HIGH = 0x84,
    REG_QUEUE_DRIVER_LOW = 0x90,
    REG_QUEUE_DRIVER_HIGH = 0x94,
    REG_QUEUE_DEVICE_LOW = 0xa0,
    REG_QUEUE_DEVICE_HIGH = 0xa4,
    REG_SHM_LEN_LOW = 0xb0,
    REG_SHM_LEN_HIGH = 0xb4,
    REG_SHM_BASE_LOW = 0xb8,
    REG_SHM_BASE_HIGH = 0xbc,
    REG_CONFIG_GENERATION = 0xfc,
};

void virtio_mmio_init(struct virtio_mmio *t, struct virtio_device *dev, struct loop *loop)
{
    *t = (struct virtio_mmio){.dev = dev, .loop = loop};
}

static struct virtqueue *selected(struct virtio_mmio *t)
{
    return t->queue_select < t->dev->queue_count ? &t->dev->queues[t->queue_select] : NULL;
}

static uint32_t feature_word(uint64_t features, uint32_t select)
{
    if (select > 1)
        return 0;
    return (uint32_t)(features >> (32 * select));
}

static uint32_t register_read(struct virtio_mmio *t, uint64_t offset)
{
    const struct virtio_device *dev = t->dev;
    const struct virtqueue *q = selected(t);
    switch (offset) {
    case REG_MAGIC:
        return MMIO_MAGIC;
    case REG_VERSION:
        return 2;
    case REG_DEVICE_ID:
        return dev->device_id;
    case REG_VENDOR_ID:
        return MMIO_VENDOR;
    case REG_DEVICE_FEATURES:
        return feature_word(dev->features, t->features_select);
    case REG_QUEUE_NUM_MAX:
        return q != NULL ? VIRTQUEUE_SIZE_MAX : 0;
    case REG_QUEUE_READY:
        return q != NULL && q->ready;
    case REG_INTERRUPT_STATUS:
        return dev->interrupt_status;
    case REG_STATUS:
        return dev->status;
    case REG_SHM_LEN_LOW:
    case REG_SHM_LEN_HIGH:
    case REG_SHM_BASE_LOW:
    case REG_SHM_BASE_HIGH:
        return UINT32_MAX; /* no shared memory regions: their length reads as all ones */
    case REG_CONFIG_GENERATION:
        return dev->config_generation;
    default:
        return 0;
    }
}

static void access_read(void *obj, uint64_t offset, void *data, unsigned len)
{
    struct virtio_mmio *t = obj;
    memset(data, 0, len);
    if (offset >= MMIO_CONFIG) {
        if (offset < MMIO_WINDOW_BYTES && t->dev->ops->config_read != NULL)
            t->dev->ops->config_read(t->dev, (uint32_t)offset - MMIO_CONFIG, data, len);
        return;
    }
    if (len == 4 && offset % 4 == 0)
        le32_put(data, register_read(t, offset));
}

static void reset(struct virtio_mmio *t)
{
    virtio_device_reset(t->dev);
    t->features_select = 0;
    t->driver_features_select = 0;
    t->queue_select = 0;
    t->driver_features_written = 0;
    /* Notifications of the past life are dropped; one that races with the reset finds no queue. */
    atomic_store_explicit(&t->notified, 0, memory_order_relaxed);
}

static void status_write(struct virtio_mmio *t, uint32_t v)
{
    struct virtio_device *dev = t->dev;
    if (v == 0) {
        reset(t);
        return;
    }
    /* 2.1.1: the driver only ever adds bits; NEEDS_RESET is ours. */
    uint32_t added = v & ~dev->status;
    dev->status |=
        added & (VIRTIO_STATUS_ACKNOWLEDGE | VIRTIO_STATUS_DRIVER | VIRTIO_STATUS_FAILED);
    if ((added & VIRTIO_STATUS_FEATURES_OK) != 0) {
        uint64_t wanted = t->driver_features_written;
        if ((wanted & ~dev->features) == 0 && (wanted & VIRTIO_F_VERSION_1) != 0) {
            virtio_device_set_features(dev, wanted);
            dev->status |= VIRTIO_STATUS_FEATURES_OK;
        }
        /* else the bit stays clear: that is how the driver learns of the refusal (2.2.2) */
    }
    if ((added & VIRTIO_STATUS_DRIVER_OK) != 0 &&
        (dev->status & (VIRTIO_STATUS_FEATURES_OK | VIRTIO_STATUS_NEEDS_RESET)) ==
            VIRTIO_STATUS_FEATURES_OK) {
        dev->status |= VIRTIO_STATUS_DRIVER_OK;
        dev->ops->activate(dev);
    }
}

static void driver_features_write(struct virtio_mmio *t, uint32_t v)
{
    if ((t->dev->status & VIRTIO_STATUS_FEATURES_OK) != 0 || t->driver_features_select > 1)
        return; /* settled; words past the second hold no feature we offer */
    unsigned shift = 32 * t->driver_features_select;
    t->driver_features_written &= ~(0xffffffffull << shift);
    t->driver_features_written |= (uint64_t)v << shift;
}

static void queue_ready_write(struct virtio_mmio *t, struct virtqueue *q, uint32_t v)
{
    /* Ready 0 would stop a queue with requests in flight: only a reset does that. */
    if (v != 1 || q->ready || (t->dev->status & VIRTIO_STATUS_FEATURES_OK) == 0)
        return;
    struct err why;
    if (virtqueue_enable(q, &why) < 0)
        virtio_device_fault(t->dev, &why);
}

static void set_low(uint64_t *addr, uint32_t v)
{
    *addr = (*addr & ~0xffffffffull) | v;
}

static void set_high(uint64_t *addr, uint32_t v)
{
    *addr = (*addr & 0xffffffffull) | (uint64_t)v << 32;
}

static void queue_write(struct virtio_mmio *t, uint64_t offset, uint32_t v)
{
    struct virtqueue *q = selected(t);
    if (q == NULL || q->ready)
        return; /* a running queue does not change its place (4.2.2.2) */
    switch (offset) {
    case REG_QUEUE_NUM:
        q->size = v <= UINT16_MAX ? (uint16_t)v : 0; /* 0 is refused when the queue is enabled */
        break;
    case REG_QUEUE_READY:
        queue_ready_write(t, q, v);
        break;
    case REG_QUEUE_DESC_LOW:
        set_low(&q->desc_gpa, v);
        break;
    case REG_QUEUE_DESC_HIGH:
        set_high(&q->desc_gpa, v);
        break;
    case REG_QUEUE_DRIVER_LOW:
        set_low(&q->avail_gpa, v);
        break;
    case REG_QUEUE_DRIVER_HIGH:
        set_high(&q->avail_gpa, v);
        break;
    case REG_QUEUE_DEVICE_LOW:
        set_low(&q->used_gpa, v);
        break;
    case REG_QUEUE_DEVICE_HIGH:
        set_high(&q->used_gpa, v);
        break;
    default:
        break;
    }
}

static void notify(struct virtio_mmio *t, uint32_t index)
{
    struct virtio_device *dev = t->dev;
    if (index < dev->queue_count && dev->queues[index].ready && virtio_device_is_live(dev))
        dev->ops->notify(dev, index);
}

static void register_write(struct virtio_mmio *t, uint64_t offset, uint32_t v)
{
    switch (offset) {
    case REG_DEVICE_FEATURES_SEL:
        t->features_select = v;
        break;
    case REG_DRIVER_FEATURES:
        driver_features_write(t, v);
        break;
    case REG_DRIVER_FEATURES_SEL:
        t->driver_features_select = v;
        break;
    case REG_QUEUE_SEL:
        t->queue_select = v;
        break;
    case REG_QUEUE_NOTIFY:
        notify(t, v);
        break;
    case REG_INTERRUPT_ACK:
        t->dev->interrupt_status &= ~v;
        break;
    case REG_STATUS:
        status_write(t, v);
        break;
    default:
        queue_write(t, offset, v);
        break;
    }
}

static void access_write(void *obj, uint64_t offset, const void *data, unsigned len)
{
    struct virtio_mmio *t = obj;
    if (offset >= MMIO_CONFIG) {
        if (offset < MMIO_WINDOW_BYTES && t->dev->ops->config_write != NULL)
            t->dev->ops->config_write(t->dev, (uint32_t)offset - MMIO_CONFIG, data, len);
        return;
    }
    if (len == 4 && offset % 4 == 0)
        register_write(t, offset, le32_get(data));
}

static bool access_post(void *obj, uint64_t offset, const void *data, unsigned len)
{
    struct virtio_mmio *t = obj;
    if (offset != REG_QUEUE_NOTIFY || len != 4)
        return false;
    uint32_t index = le32_get(data);
    if (index >= VIRTIO_QUEUES_MAX)
        return true; /* no such queue on any device: nothing to do anywhere */
    /* Release: what the guest put into the ring goes before the bit; pairs with the acquire in
     * virtio_mmio_run_notifications. A bit that was set already has its wake-up under way. */
    unsigned before = atomic_fetch_or_explicit(&t->notified, 1u << index, memory_order_release);
    if ((before & 1u << index) == 0)
        loop_wake(t->loop);
    return true;
}

const struct bus_ops virtio_mmio_bus_ops = {
    .read = access_read,
    .write = access_write,
    .post = access_post,
};

void virtio_mmio_run_notifications(struct virtio_mmio *t)
{
    /* Acquire: pairs with the release in post. */
    unsigned bits = atomic_exchange_explicit(&t->notified, 0, memory_order_acquire);
    for (unsigned i = 0; bits != 0; i++, bits >>= 1) {
        if ((bits & 1) != 0)
            notify(t, i);
    }
}

static void node_name(const struct virtio_mmio *t, char *buf, size_t len)
{
    (void)snprintf(buf, len, "virtio-mmio-%s", t->dev->name); /* device names are short */
}

int virtio_mmio_save(struct virtio_mmio *t, struct state_writer *w, struct err *e)
{
    char name[48];
    node_name(t, name, sizeof name);
    state_begin(w, name);
    state_put_u32(w, "version", MMIO_STATE_VERSION);
    state_put_u32(w, "features-select", t->features_select);
    state_put_u32(w, "driver-features-select", t->driver_features_select);
    state_put_u32(w, "queue-select", t->queue_select);
    state_put_u64(w, "driver-features-written", t->driver_features_written);
    /* `notified` is not saved: resume looks at every queue anyway. */
    int rc = virtio_device_save(t->dev, w, e);
    state_end(w);
    return rc;
}

int virtio_mmio_restore(struct virtio_mmio *t, const struct state_node *n, struct err *e)
{
    char name[48];
    struct state_node own;
    uint32_t features_select = 0, driver_features_select = 0, queue_select = 0;
    uint64_t written = 0;
    node_name(t, name, sizeof name);
    int rc = state_child(n, name, &own, e);
    if (rc == 0)
        rc = state_check_version(&own, MMIO_STATE_VERSION, e);
    if (rc == 0)
        rc = state_get_u32(&own, "features-select", &features_select, e);
    if (rc == 0)
        rc = state_get_u32(&own, "driver-features-select", &driver_features_select, e);
    if (rc == 0)
        rc = state_get_u32(&own, "queue-select", &queue_select, e);
    if (rc == 0)
        rc = state_get_u64(&own, "driver-features-written", &written, e);
    if (rc == 0)
        rc = virtio_device_restore(t->dev, &own, e);
    if (rc < 0)
        return rc;
    t->features_select = features_select;
    t->driver_features_select = driver_features_select;
    t->queue_select = queue_select;
    t->driver_features_written = written;
    return 0;
}
