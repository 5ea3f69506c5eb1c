/*
 * guest_driver: brings a device up through the mmio transport as a driver would (virtio 1.2, 3.1
 * and 4.2.3), for tests. One queue lies where guest_ring.h says.
 */
#pragma once

#include <stdint.h>

#include "devices/virtio/device.h"
#include "devices/virtio/mmio.h"
#include "tests/unit/guest_ring.h"

static inline uint32_t reg_read(struct virtio_mmio *t, uint32_t offset)
{
    uint32_t v = 0;
    virtio_mmio_bus_ops.read(t, offset, &v, sizeof v);
    return v;
}

static inline void reg_write(struct virtio_mmio *t, uint32_t offset, uint32_t v)
{
    virtio_mmio_bus_ops.write(t, offset, &v, sizeof v);
}

static inline uint64_t driver_offered(struct virtio_mmio *t)
{
    reg_write(t, 0x14, 0);
    uint64_t low = reg_read(t, 0x10);
    reg_write(t, 0x14, 1);
    return low | (uint64_t)reg_read(t, 0x10) << 32;
}

/* Reset, ACKNOWLEDGE, DRIVER, features, FEATURES_OK. Returns the status afterwards. */
static inline uint32_t driver_negotiate(struct virtio_mmio *t, uint64_t accept)
{
    reg_write(t, 0x70, 0);
    reg_write(t, 0x70, VIRTIO_STATUS_ACKNOWLEDGE);
    reg_write(t, 0x70, VIRTIO_STATUS_ACKNOWLEDGE | VIRTIO_STATUS_DRIVER);
    reg_write(t, 0x24, 0);
    reg_write(t, 0x20, (uint32_t)accept);
    reg_write(t, 0x24, 1);
    reg_write(t, 0x20, (uint32_t)(accept >> 32));
    reg_write(t, 0x70, reg_read(t, 0x70) | VIRTIO_STATUS_FEATURES_OK);
    return reg_read(t, 0x70);
}

static inline void driver_set_queue(struct virtio_mmio *t, unsigned index, struct guest_ring *g)
{
    reg_write(t, 0x30, index);
    reg_write(t, 0x38, g->size);
    reg_write(t, 0x80, (uint32_t)RING_DESC);
    reg_write(t, 0x84, 0);
    reg_write(t, 0x90, (uint32_t)RING_AVAIL);
    reg_write(t, 0x94, 0);
    reg_write(t, 0xa0, (uint32_t)RING_USED);
    reg_write(t, 0xa4, 0);
    reg_write(t, 0x44, 1);
}

/* All of it up to DRIVER_OK, with queue 0 at a cleared ring. Returns the status. */
static inline uint32_t driver_start(struct virtio_mmio *t, struct guest_ring *g, uint64_t accept)
{
    uint32_t status = driver_negotiate(t, accept);
    ring_clear(g);
    driver_set_queue(t, 0, g);
    reg_write(t, 0x70, status | VIRTIO_STATUS_DRIVER_OK);
    return reg_read(t, 0x70);
}

static inline void driver_notify(struct virtio_mmio *t, unsigned queue)
{
    reg_write(t, MMIO_QUEUE_NOTIFY, queue);
}
