/*
 * queue: the device side of a virtio 1.2 split virtqueue (virtio 1.2, 2.7), with indirect
 * descriptors (2.7.5.3) and event index (2.7.10).
 *
 * The guest writes every byte this file reads, at any moment. Each descriptor is fetched once into
 * a `struct chain`, validated there, and never looked at in guest memory again. Walks are bounded
 * by CHAIN_SEGMENTS_MAX. A fault is -EPROTO: the device then asks for NEEDS_RESET (device.h). Loop
 * thread only.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "vmm/core/ram.h"

struct err;
struct state_node;
struct state_writer;

#define VIRTQUEUE_SIZE_MAX 256
#define CHAIN_SEGMENTS_MAX 130 /* 128 data segments, a header and a status byte */

struct virtqueue {
    const struct ram *ram;
    uint16_t size; /* chosen by the driver: power of two, <= VIRTQUEUE_SIZE_MAX */
    bool ready;
    bool event_idx; /* VIRTIO_F_EVENT_IDX was accepted */
    bool indirect;  /* VIRTIO_F_INDIRECT_DESC was accepted */
    uint64_t desc_gpa, avail_gpa, used_gpa;
    uint16_t next_avail;     /* next slot of the avail ring to look at */
    uint16_t next_used;      /* our used index */
    uint16_t signalled_used; /* used index at the last interrupt */
    bool signalled_valid;
};

struct chain_segment {
    void *host; /* checked slice of guest memory */
    uint32_t len;
    bool device_writes; /* VIRTQ_DESC_F_WRITE */
};

/* One request: readable segments first, then writable ones (2.7.4.2). */
struct chain {
    uint16_t head;
    uint16_t count;
    uint16_t readable; /* how many of the segments the device reads; the rest it writes */
    uint64_t read_bytes, write_bytes;
    struct chain_segment segments[CHAIN_SEGMENTS_MAX];
};

/* Checks the addresses, alignment and size the driver gave; -EPROTO with the reason in `e`. */
int virtqueue_enable(struct virtqueue *q, struct err *e);
void virtqueue_reset(struct virtqueue *q);

/* 1: *out filled. 0: nothing there. -EPROTO: the ring or chain is broken, reason in `e`. */
int virtqueue_pop(struct virtqueue *q, struct chain *out, struct err *e);
/* Puts the last popped chain back: it will be popped again. */
void virtqueue_unpop(struct virtqueue *q);
/* Returns a chain with the number of bytes the device wrote; -EPROTO if the ring is unreachable. */
int virtqueue_push(struct virtqueue *q, uint16_t head, uint32_t written, struct err *e);
/* True if the driver wants an interrupt for what was pushed since the last call (2.7.7, 2.7.10). */
bool virtqueue_wants_interrupt(struct virtqueue *q);
/* Asks the driver for / spares it notifications. With disable, a hint only. After enable, the
 * caller looks at the queue once more: entries may have come in between (barrier inside). */
void virtqueue_notifications(struct virtqueue *q, bool enable);

/* Copies out of / into a chain at a byte offset of its readable / writable part. Short at the end:
 * returns the bytes copied. */
size_t chain_read(const struct chain *c, uint64_t offset, void *to, size_t len);
size_t chain_write(const struct chain *c, uint64_t offset, const void *from, size_t len);

void virtqueue_save(const struct virtqueue *q, struct state_writer *w);
int virtqueue_restore(struct virtqueue *q, const struct state_node *n, struct err *e);
