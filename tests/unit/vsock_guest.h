/*
 * vsock_guest: a fake guest for tests of the vsock device: RAM, three hand-made queues, a driver
 * that may lie in every field, and host clients on Unix sockets in a folder of their own. All in
 * one thread: guest_run lets the device's loop work until it has nothing left to do.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "devices/virtio/device.h"
#include "devices/vsock.h"
#include "devices/vsock_internal.h"
#include "devices/vsock_packet.h"
#include "vmm/core/loop.h"
#include "vmm/core/ram.h"
#include "vmm/core/state.h"

#define GUEST_QUEUE_SIZE 128u
#define GUEST_RX_BYTES 4096u
#define GUEST_GRANTED_PORT 700u
#define GUEST_CONTROL_BYTES 4096u

struct guest_ring_state {
    uint16_t avail, seen;
};

struct vsock_guest {
    struct ram ram;
    struct loop loop;
    struct virtio_device *dev;
    struct vsock *v; /* the same, seen from inside */
    struct guest_ring_state rings[3];
    bool hold_rx; /* receive buffers that were used are not given back */
    unsigned held;
    unsigned interrupts;
    char dir[64], path[80];
    int granted_listener; /* at "<path>_700" */
    /* what the control callbacks saw */
    unsigned opened, closed;
    uint8_t control[GUEST_CONTROL_BYTES];
    size_t control_len;
};

struct packet {
    struct vsock_header h;
    uint8_t payload[GUEST_RX_BYTES];
    uint32_t len; /* of the payload, from the used ring */
};

/* gate_closed: as in a copy. with_driver: DRIVER_OK and all receive buffers posted. */
void guest_start(struct vsock_guest *g, bool gate_closed, bool with_driver);
/* A copy of `from` (RAM and saved state), with its own device, loop and sockets; not resumed. */
void guest_copy(struct vsock_guest *g, struct vsock_guest *from);
void guest_stop(struct vsock_guest *g);
void guest_driver_ok(struct vsock_guest *g);
void guest_run(struct vsock_guest *g);

/* Saves the device into a malloc'd blob. */
void *guest_save(struct vsock_guest *g, size_t *len);
int guest_restore(struct vsock_guest *g, const void *blob, size_t len, struct err *e);

/* A header of this guest for its connection; the test changes what it likes. */
struct vsock_header guest_header(uint32_t guest_port, uint32_t host_port, uint16_t op);
/* Sends header and payload as one chain: the header alone, then pieces of at most `piece` bytes. */
void guest_send(struct vsock_guest *g, const struct vsock_header *h, const void *payload,
                uint32_t bytes, uint32_t piece);
void guest_send_op(struct vsock_guest *g, uint32_t guest_port, uint32_t host_port, uint16_t op);
/* Takes the next received packet; false when there is none (after the loop has run). */
bool guest_receive(struct vsock_guest *g, struct packet *p);
/* The next packet must be this one. */
void guest_expect(struct vsock_guest *g, struct packet *p, uint16_t op);
void guest_expect_nothing(struct vsock_guest *g);
void guest_post_rx(struct vsock_guest *g, uint32_t bytes);
/* Time passes for clients in their handshake. */
void guest_expire_handshakes(struct vsock_guest *g);

/* Host side. All fds are non-blocking. */
int host_connect(struct vsock_guest *g);
int host_say(struct vsock_guest *g, const char *line); /* connect, then send the line */
/* Everything that comes until EOF or nothing comes; NUL-terminated. Returns the length; *eof. */
size_t host_read(struct vsock_guest *g, int fd, char *buf, size_t room, bool *eof);
void host_expect(struct vsock_guest *g, int fd, const char *text, bool eof);
/* CONNECT, REQUEST, RESPONSE, OK: an open connection to a guest port. */
int host_open(struct vsock_guest *g, uint32_t guest_port, uint32_t *host_port);
unsigned count_fds(void);
