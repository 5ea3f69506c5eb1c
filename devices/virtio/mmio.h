/*
 * mmio: the one transport (virtio 1.2, 4.2, version 2) for all virtio devices.
 *
 * Registers may be read and written with any width at any offset; only aligned 32-bit accesses to
 * the register area mean something, the config area (0x100..) takes any width. read/write run on
 * the loop thread; a QueueNotify write is taken on the vCPU thread (bus post): it sets a bit in
 * `notified` and wakes the loop, which calls mmio_run_notifications.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#include "vmm/core/bus.h"

struct loop;
struct virtio_device;

#define MMIO_WINDOW_BYTES 0x1000u
#define MMIO_QUEUE_NOTIFY 0x50u

struct virtio_mmio {
    struct virtio_device *dev;
    struct loop *loop;
    uint32_t features_select, driver_features_select, queue_select;
    uint64_t driver_features_written; /* before FEATURES_OK */
    atomic_uint notified;             /* bit per queue; set by vCPU threads, taken by the loop */
};

extern const struct bus_ops virtio_mmio_bus_ops; /* obj is a struct virtio_mmio */

void virtio_mmio_init(struct virtio_mmio *t, struct virtio_device *dev, struct loop *loop);
void virtio_mmio_run_notifications(struct virtio_mmio *t);
struct err;
struct state_node;
struct state_writer;
/* Selector registers and the device (virtio_device_save) in one node. */
int virtio_mmio_save(struct virtio_mmio *t, struct state_writer *w, struct err *e);
int virtio_mmio_restore(struct virtio_mmio *t, const struct state_node *n, struct err *e);
