/*
 * device: see device.h. Loop thread only.
 */
#include "devices/virtio/device.h"

#include <errno.h>
#include <stdio.h>

#include "vmm/core/err.h"
#include "vmm/core/state.h"

#define DEVICE_STATE_VERSION 1u
#define OWN_NODE "device" /* of ops->save; apart, because names must not clash */
#define STATUS_KNOWN                                                                               \
    (VIRTIO_STATUS_ACKNOWLEDGE | VIRTIO_STATUS_DRIVER | VIRTIO_STATUS_DRIVER_OK |                  \
     VIRTIO_STATUS_FEATURES_OK | VIRTIO_STATUS_NEEDS_RESET | VIRTIO_STATUS_FAILED)

void virtio_device_signal(struct virtio_device *dev, struct virtqueue *q)
{
    if (!virtqueue_wants_interrupt(q))
        return;
    dev->interrupt_status |= VIRTIO_INT_USED;
    irq_pulse(&dev->irq);
}

void virtio_device_config_changed(struct virtio_device *dev)
{
    dev->config_generation++;
    dev->interrupt_status |= VIRTIO_INT_CONFIG;
    irq_pulse(&dev->irq);
}

void virtio_device_fault(struct virtio_device *dev, const struct err *why)
{
    dev->guest_fault_count++;
    log_limited(&dev->guest_faults, LOG_WARN,
                "%s: guest broke the protocol, device needs reset: %s", dev->name, why->text);
    if ((dev->status & VIRTIO_STATUS_NEEDS_RESET) != 0)
        return;
    dev->status |= VIRTIO_STATUS_NEEDS_RESET;
    /* 2.1.2: a driver that is up is told by a configuration change. */
    if ((dev->status & VIRTIO_STATUS_DRIVER_OK) != 0)
        virtio_device_config_changed(dev);
}

bool virtio_device_is_live(const struct virtio_device *dev)
{
    return (dev->status & (VIRTIO_STATUS_DRIVER_OK | VIRTIO_STATUS_NEEDS_RESET)) ==
           VIRTIO_STATUS_DRIVER_OK;
}

void virtio_device_set_features(struct virtio_device *dev, uint64_t accepted)
{
    dev->driver_features = accepted;
    for (unsigned i = 0; i < dev->queue_count; i++) {
        dev->queues[i].event_idx = (accepted & VIRTIO_F_RING_EVENT_IDX) != 0;
        dev->queues[i].indirect = (accepted & VIRTIO_F_RING_INDIRECT_DESC) != 0;
    }
}

void virtio_device_reset(struct virtio_device *dev)
{
    /* First the device lets go of the rings (I/O in flight is waited for), then they are forgotten.
     */
    dev->ops->reset(dev);
    for (unsigned i = 0; i < dev->queue_count; i++)
        virtqueue_reset(&dev->queues[i]);
    dev->status = 0;
    dev->interrupt_status = 0;
    virtio_device_set_features(dev, 0);
}

static void queue_node_name(char *buf, size_t len, unsigned i)
{
    (void)snprintf(buf, len, "queue%u", i); /* VIRTIO_QUEUES_MAX is one digit */
}

int virtio_device_save(struct virtio_device *dev, struct state_writer *w, struct err *e)
{
    state_begin(w, dev->name);
    state_put_u32(w, "version", DEVICE_STATE_VERSION);
    state_put_u32(w, "device-id", dev->device_id);
    state_put_u64(w, "driver-features", dev->driver_features);
    state_put_u32(w, "status", dev->status);
    state_put_u32(w, "interrupt-status", dev->interrupt_status);
    state_put_u32(w, "config-generation", dev->config_generation);
    state_put_u32(w, "queue-count", dev->queue_count);
    for (unsigned i = 0; i < dev->queue_count; i++) {
        char name[16];
        queue_node_name(name, sizeof name, i);
        state_begin(w, name);
        virtqueue_save(&dev->queues[i], w);
        state_end(w);
    }
    int rc = 0;
    if (dev->ops->save != NULL) {
        state_begin(w, OWN_NODE);
        rc = dev->ops->save(dev, w, e);
        state_end(w);
    }
    state_end(w);
    return rc < 0 ? err_wrap(e, rc, "save %s", dev->name) : 0;
}

static int check_identity(const struct virtio_device *dev, const struct state_node *n,
                          struct err *e)
{
    uint32_t id = 0, queues = 0;
    int rc = state_check_version(n, DEVICE_STATE_VERSION, e);
    if (rc == 0)
        rc = state_get_u32(n, "device-id", &id, e);
    if (rc == 0)
        rc = state_get_u32(n, "queue-count", &queues, e);
    if (rc < 0)
        return rc;
    if (id != dev->device_id || queues != dev->queue_count)
        return err_set(e, ERR_MISMATCH, 0,
                       "device type %u with %u queues, this build has %u with %u", id, queues,
                       dev->device_id, dev->queue_count);
    return 0;
}

static int restore_queues(struct virtio_device *dev, const struct state_node *n, struct err *e)
{
    for (unsigned i = 0; i < dev->queue_count; i++) {
        char name[16];
        struct state_node child;
        queue_node_name(name, sizeof name, i);
        int rc = state_child(n, name, &child, e);
        if (rc == 0)
            rc = virtqueue_restore(&dev->queues[i], &child, e);
        if (rc < 0)
            return err_wrap(e, rc, "%s", name);
    }
    return 0;
}

static int restore_from(struct virtio_device *dev, const struct state_node *n, struct err *e)
{
    uint64_t accepted = 0;
    uint32_t status = 0, interrupt = 0, generation = 0;
    int rc = check_identity(dev, n, e);
    if (rc == 0)
        rc = state_get_u64(n, "driver-features", &accepted, e);
    if (rc == 0)
        rc = state_get_u32(n, "status", &status, e);
    if (rc == 0)
        rc = state_get_u32(n, "interrupt-status", &interrupt, e);
    if (rc == 0)
        rc = state_get_u32(n, "config-generation", &generation, e);
    if (rc < 0)
        return rc;
    if ((accepted & ~dev->features) != 0)
        return err_set(e, ERR_MISMATCH, 0, "the guest uses features %#llx, this build offers %#llx",
                       (unsigned long long)accepted, (unsigned long long)dev->features);
    if ((status & ~STATUS_KNOWN) != 0 || (interrupt & ~(VIRTIO_INT_USED | VIRTIO_INT_CONFIG)) != 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "status %#x or interrupt status %#x has unknown bits",
                       status, interrupt);
    virtio_device_set_features(dev, accepted); /* before the queues: their rings depend on it */
    rc = restore_queues(dev, n, e);
    if (rc < 0)
        return rc;
    dev->status = status;
    dev->interrupt_status = interrupt;
    dev->config_generation = generation;
    if (dev->ops->restore == NULL)
        return 0;
    struct state_node own;
    rc = state_child(n, OWN_NODE, &own, e);
    return rc < 0 ? rc : dev->ops->restore(dev, &own, e);
}

int virtio_device_restore(struct virtio_device *dev, const struct state_node *n, struct err *e)
{
    struct state_node own;
    int rc = state_child(n, dev->name, &own, e);
    if (rc < 0)
        return rc;
    rc = restore_from(dev, &own, e);
    return rc < 0 ? err_wrap(e, rc, "restore %s", dev->name) : 0;
}
