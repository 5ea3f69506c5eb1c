/*
 * disk_steps: what one disk request does: a small state machine. disk_io.c starts it once and calls
 * disk_step_advance after each of its operations, with r->position moved on; either call queues the
 * next operation or ends in disk_io_finish. Loop thread only.
 */
#pragma once

#include "devices/disk_io.h"

void disk_step_start(struct disk_io *io, struct disk_request *r);
void disk_step_advance(struct disk_io *io, struct disk_request *r);

/* disk_io.c */
void disk_io_finish(struct disk_io *io, struct disk_request *r, int result);
void disk_io_on_ring_event(void *arg, uint32_t events);
