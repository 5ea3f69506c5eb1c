/*
 * blk: virtio-blk (virtio 1.2, 5.2) on a `struct disk` (disk.h). I/O through liburing (disk_io.h).
 *
 * One queue. Requests run side by side; what the guest may do is decided here (capacity, read-only,
 * limits), never by what it accepted. A request that is wrong gets an error status; one that has no
 * byte for a status is handed back with length 0; only a broken ring ends in NEEDS_RESET. A host
 * error (no room, failed read or sync) is an I/O error for the guest and a rate-limited line.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct disk;
struct err;
struct loop;
struct ram;
struct virtio_device;

#define BLK_SEGMENTS_MAX 128                 /* seg_max: data segments of one request */
#define BLK_DISCARD_SECTORS_MAX (128u << 11) /* 128 MiB: bounds the work of one request */

/*
 * Takes the disk over (also on failure). index names the device ("blk0") and gives GET_ID.
 * No ring yet: it is made at the first request. After fork(2) the child takes the disk out of the
 * old device (blk_forget), pushes a new top and makes a new device.
 */
int blk_create(struct virtio_device **out, unsigned index, struct disk *disk, const struct ram *ram,
               struct loop *loop, struct err *e);
/* In a fork child, after a quiesce in the parent and after loop_close_inherited (which still walks
 * the device's source): closes the inherited ring fd without touching the ring, and hands the disk
 * back. Nothing but ops->free may follow. */
struct disk *blk_forget(struct virtio_device *dev);
struct disk *blk_disk(struct virtio_device *dev);
