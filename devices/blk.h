/*
 * blk: virtio-blk (virtio 1.2, 5.2) on a `struct disk` (disk.h). I/O through liburing.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct disk;
struct err;
struct loop;
struct ram;
struct virtio_device;

/*
 * Takes the disk over (also on failure). index names the device ("blk0") and gives GET_ID.
 * The ring is made here: after fork(2) the child makes a new device and frees nothing of the old
 * but its fds (blk_forget).
 */
int blk_create(struct virtio_device **out, unsigned index, struct disk *disk, const struct ram *ram,
               struct loop *loop, struct err *e);
/* In a fork child: closes the inherited ring fd without touching the ring, hands the disk back. */
struct disk *blk_forget(struct virtio_device *dev);
struct disk *blk_disk(struct virtio_device *dev);
