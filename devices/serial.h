/*
 * serial: 16550A UART, enough for a console (ports 0x3f8..0x3ff, IRQ 4; PC16550D data sheet).
 *
 * Output goes into a ring of SERIAL_RING_BYTES (the newest stay) and, when out_fd >= 0, to that fd
 * as far as it takes it without blocking: a full pipe loses bytes, it never stops the guest. Input
 * comes from serial_input. Any thread: vCPU threads write to it themselves (bus_ops.any_thread).
 */
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "vmm/core/bus.h"
#include "vmm/core/irq.h"

struct err;
struct state_node;
struct state_writer;

#define SERIAL_RING_BYTES (64u << 10)
#define SERIAL_INPUT_BYTES 256u
#define SERIAL_PORT_BASE 0x3f8u
#define SERIAL_GSI 4u

struct serial {
    pthread_mutex_t lock; /* over all that follows while a vCPU may run */
    uint8_t ier, lcr, mcr, scr, fcr;
    uint8_t dll, dlm;
    uint8_t interrupt_pending; /* THR-empty interrupt not yet read from IIR */
    uint8_t asserted;          /* level of the interrupt pin; the line is pulsed when it rises */
    struct irq_line irq;
    int out_fd;                     /* not owned; -1 for none; made non-blocking by the caller */
    uint64_t out_bytes, lost_bytes; /* written by the guest; not taken by out_fd */
    uint64_t first_byte_mono_ns;    /* when the first byte after create/restore came; 0 before */
    uint8_t input[SERIAL_INPUT_BYTES];
    uint32_t input_head, input_count;
    uint8_t *ring; /* owned */
};

extern const struct bus_ops serial_bus_ops; /* obj is a struct serial */

int serial_init(struct serial *s, struct irq_line irq, int out_fd, struct err *e);
void serial_free(struct serial *s);
/* Returns how many bytes were taken. */
size_t serial_input(struct serial *s, const void *bytes, size_t len);
/* Copies the newest output, oldest byte first; returns the count. */
size_t serial_tail(struct serial *s, void *to, size_t len);
/* How many bytes the guest ever wrote. */
uint64_t serial_total(struct serial *s);
/*
 * Both need every vCPU parked. Registers and unread input, in a child node "serial". The ring is
 * not saved: a copy's console starts empty. first_byte_mono_ns and the byte counts begin anew with
 * serial_restore.
 */
int serial_save(struct serial *s, struct state_writer *w, struct err *e);
int serial_restore(struct serial *s, const struct state_node *parent, struct err *e);
