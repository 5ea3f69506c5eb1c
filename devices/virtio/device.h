/*
 * device: what every virtio device is (virtio 1.2, ch. 2), independent of the transport.
 *
 * `struct virtio_device` is the first member of each device (vsock, blk, ...). The transport
 * (mmio.h) owns feature negotiation, the status machine, config generation and interrupts; the
 * device owns its queues' contents and its config space. Loop thread only.
 *
 * Life of a device:
 *   init -> [restore] -> resume -> (notify, host events)* -> quiesce -> save -> resume ...
 * quiesce: stop popping queues and wait until nothing is in flight (disk I/O drained); afterwards
 * save sees a still device and the queues' used rings tell the truth. resume: go on, and look at
 * all queues once, because notifications may have been lost while nobody listened.
 * reset: the driver wrote status 0; after it returns nothing touches the old rings.
 * notify may still be called between quiesce and resume: the device ignores it then.
 * After popping a queue empty a device calls virtqueue_notifications(q, true) and looks once more:
 * with the event index the driver does not notify again otherwise.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "devices/virtio/queue.h"
#include "vmm/core/irq.h"
#include "vmm/core/log.h"

struct err;
struct state_node;
struct state_writer;
struct virtio_device;

#define VIRTIO_QUEUES_MAX 8

#define VIRTIO_F_RING_INDIRECT_DESC (1ull << 28)
#define VIRTIO_F_RING_EVENT_IDX (1ull << 29)
#define VIRTIO_F_VERSION_1 (1ull << 32)

#define VIRTIO_STATUS_ACKNOWLEDGE 1u
#define VIRTIO_STATUS_DRIVER 2u
#define VIRTIO_STATUS_DRIVER_OK 4u
#define VIRTIO_STATUS_FEATURES_OK 8u
#define VIRTIO_STATUS_NEEDS_RESET 64u
#define VIRTIO_STATUS_FAILED 128u

#define VIRTIO_INT_USED 1u
#define VIRTIO_INT_CONFIG 2u

struct virtio_device_ops {
    /* data is zeroed before; the device checks offset and len itself. May be NULL. */
    void (*config_read)(struct virtio_device *dev, uint32_t offset, void *data, unsigned len);
    void (*config_write)(struct virtio_device *dev, uint32_t offset, const void *data,
                         unsigned len);          /* may be NULL */
    void (*activate)(struct virtio_device *dev); /* DRIVER_OK was set; queues are enabled */
    void (*reset)(struct virtio_device *dev);
    void (*notify)(struct virtio_device *dev, unsigned queue);
    int (*quiesce)(struct virtio_device *dev, struct err *e);
    void (*resume)(struct virtio_device *dev);
    /* The device's own part, in a node of its own ("device"), which restore gets; save and restore
     * go together. In a flattened tree a node's properties come before its child nodes. */
    int (*save)(struct virtio_device *dev, struct state_writer *w, struct err *e);
    int (*restore)(struct virtio_device *dev, const struct state_node *n, struct err *e);
    void (*free)(struct virtio_device *dev); /* releases host resources, then the memory */
};

struct virtio_device {
    const struct virtio_device_ops *ops;
    const char *name;         /* "blk0", "vsock": node name in the state and in messages */
    uint32_t device_id;       /* virtio 1.2, ch. 5 */
    uint64_t features;        /* offered */
    uint64_t driver_features; /* accepted */
    uint32_t status;
    uint32_t interrupt_status;
    uint32_t config_generation;
    struct irq_line irq;
    unsigned queue_count;
    struct virtqueue queues[VIRTIO_QUEUES_MAX]; /* the device sets `ram` of each when it is made */
    struct log_ratelimit guest_faults;
    uint64_t guest_fault_count;
};

/* Interrupt for used buffers if the driver wants one for this queue. */
void virtio_device_signal(struct virtio_device *dev, struct virtqueue *q);
void virtio_device_config_changed(struct virtio_device *dev);
/* The guest broke the rules on this device: NEEDS_RESET, one rate-limited line, machine lives. */
void virtio_device_fault(struct virtio_device *dev, const struct err *why);
/* DRIVER_OK set and not NEEDS_RESET: queues may be popped. */
bool virtio_device_is_live(const struct virtio_device *dev);
/* Back to power-on (status 0); calls ops->reset first. */
void virtio_device_reset(struct virtio_device *dev);
/* For the transport: what the driver accepted, handed on to the queues. */
void virtio_device_set_features(struct virtio_device *dev, uint64_t accepted);

/* A child node named after the device: transport registers, queues, then the device's own. */
int virtio_device_save(struct virtio_device *dev, struct state_writer *w, struct err *e);
/* `n` is the parent of the device's node. Refuses features this build does not offer. */
int virtio_device_restore(struct virtio_device *dev, const struct state_node *n, struct err *e);
