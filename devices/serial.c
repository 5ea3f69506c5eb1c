/*
 * serial: see serial.h. Static functions but the bus accesses run under the lock. Register names
 * are those of the PC16550D data sheet.
 */
#include "devices/serial.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define SERIAL_STATE_VERSION 1u

enum { REG_DATA, REG_IER, REG_IIR_FCR, REG_LCR, REG_MCR, REG_LSR, REG_MSR, REG_SCR };

#define IER_RX 0x01u
#define IER_THRE 0x02u
#define IER_KNOWN 0x0fu
#define IIR_NONE 0x01u
#define IIR_THRE 0x02u
#define IIR_RX 0x04u
#define IIR_FIFO 0xc0u
#define FCR_ENABLE 0x01u
#define FCR_CLEAR_RX 0x02u
#define FCR_KEPT 0xc9u /* trigger level, DMA mode, enable; the clear bits act once */
#define LCR_DLAB 0x80u
#define MCR_DTR 0x01u
#define MCR_RTS 0x02u
#define MCR_OUT1 0x04u
#define MCR_OUT2 0x08u
#define MCR_LOOP 0x10u
#define MCR_KNOWN 0x1fu
#define LSR_DATA 0x01u
#define LSR_IDLE 0x60u /* THR and shifter empty: output never waits here */
#define MSR_CTS 0x10u
#define MSR_DSR 0x20u
#define MSR_RI 0x40u
#define MSR_DCD 0x80u

/* Highest-priority reason for an interrupt, without side effect (data sheet, table IV). */
static uint8_t reason(const struct serial *s)
{
    if ((s->ier & IER_RX) != 0 && s->input_count > 0)
        return IIR_RX;
    if ((s->ier & IER_THRE) != 0 && s->interrupt_pending)
        return IIR_THRE;
    return IIR_NONE;
}

static void update(struct serial *s)
{
    uint8_t now = reason(s) != IIR_NONE;
    if (now && !s->asserted)
        irq_pulse(&s->irq);
    s->asserted = now;
}

static bool input_push(struct serial *s, uint8_t byte)
{
    if (s->input_count == SERIAL_INPUT_BYTES)
        return false;
    s->input[(s->input_head + s->input_count) % SERIAL_INPUT_BYTES] = byte;
    s->input_count++;
    return true;
}

static uint8_t input_pop(struct serial *s)
{
    if (s->input_count == 0)
        return 0;
    uint8_t byte = s->input[s->input_head];
    s->input_head = (s->input_head + 1) % SERIAL_INPUT_BYTES;
    s->input_count--;
    return byte;
}

static void transmit(struct serial *s, uint8_t byte)
{
    if ((s->mcr & MCR_LOOP) != 0) {
        (void)input_push(s, byte); /* a full receiver loses the byte, as the chip does */
        return;
    }
    if (s->first_byte_mono_ns == 0)
        s->first_byte_mono_ns = clock_mono_ns();
    s->ring[s->out_bytes % SERIAL_RING_BYTES] = byte;
    s->out_bytes++;
    if (s->out_fd >= 0 && write(s->out_fd, &byte, 1) != 1)
        s->lost_bytes++;
}

static uint8_t modem_status(const struct serial *s)
{
    if ((s->mcr & MCR_LOOP) == 0)
        return MSR_CTS | MSR_DSR | MSR_DCD;
    /* Loopback: the outputs come back as inputs; drivers tell a UART from an empty port by it. */
    return (uint8_t)(((s->mcr & MCR_RTS) != 0 ? MSR_CTS : 0) |
                     ((s->mcr & MCR_DTR) != 0 ? MSR_DSR : 0) |
                     ((s->mcr & MCR_OUT1) != 0 ? MSR_RI : 0) |
                     ((s->mcr & MCR_OUT2) != 0 ? MSR_DCD : 0));
}

static uint8_t register_read(struct serial *s, uint64_t reg)
{
    bool dlab = (s->lcr & LCR_DLAB) != 0;
    switch (reg) {
    case REG_DATA:
        return dlab ? s->dll : input_pop(s);
    case REG_IER:
        return dlab ? s->dlm : s->ier;
    case REG_IIR_FCR: {
        uint8_t why = reason(s);
        if (why == IIR_THRE)
            s->interrupt_pending = 0; /* reading the reason acknowledges this one */
        return why | ((s->fcr & FCR_ENABLE) != 0 ? IIR_FIFO : 0);
    }
    case REG_LCR:
        return s->lcr;
    case REG_MCR:
        return s->mcr;
    case REG_LSR:
        return LSR_IDLE | (s->input_count > 0 ? LSR_DATA : 0);
    case REG_MSR:
        return modem_status(s);
    case REG_SCR:
        return s->scr;
    default:
        return 0xff;
    }
}

static void register_write(struct serial *s, uint64_t reg, uint8_t v)
{
    bool dlab = (s->lcr & LCR_DLAB) != 0;
    switch (reg) {
    case REG_DATA:
        if (dlab) {
            s->dll = v;
        } else {
            transmit(s, v);
            s->interrupt_pending = 1; /* sent at once, so the register is empty again */
        }
        break;
    case REG_IER:
        if (dlab) {
            s->dlm = v;
        } else {
            /* Enabling the THR-empty interrupt while it is empty raises it. */
            if ((v & ~s->ier & IER_THRE) != 0)
                s->interrupt_pending = 1;
            s->ier = v & IER_KNOWN;
        }
        break;
    case REG_IIR_FCR:
        /* Turning the FIFOs on or off clears them, as the explicit bit does. */
        if ((v & FCR_CLEAR_RX) != 0 || ((v ^ s->fcr) & FCR_ENABLE) != 0)
            s->input_count = 0;
        s->fcr = v & FCR_KEPT;
        break;
    case REG_LCR:
        s->lcr = v;
        break;
    case REG_MCR:
        s->mcr = v & MCR_KNOWN;
        break;
    case REG_SCR:
        s->scr = v;
        break;
    default: /* LSR and MSR are read-only */
        break;
    }
}

/* A wide access means the registers one after another, as on the ISA bus. */
static void access_read(void *obj, uint64_t offset, void *data, unsigned len)
{
    struct serial *s = obj;
    (void)pthread_mutex_lock(&s->lock); /* default type: cannot fail */
    for (unsigned i = 0; i < len; i++)
        ((uint8_t *)data)[i] = register_read(s, offset + i);
    update(s);
    (void)pthread_mutex_unlock(&s->lock);
}

static void access_write(void *obj, uint64_t offset, const void *data, unsigned len)
{
    struct serial *s = obj;
    (void)pthread_mutex_lock(&s->lock);
    for (unsigned i = 0; i < len; i++)
        register_write(s, offset + i, ((const uint8_t *)data)[i]);
    update(s);
    (void)pthread_mutex_unlock(&s->lock);
}

const struct bus_ops serial_bus_ops = {
    .read = access_read, .write = access_write, .any_thread = true};

int serial_init(struct serial *s, struct irq_line irq, int out_fd, struct err *e)
{
    uint8_t *ring = calloc(1, SERIAL_RING_BYTES);
    if (ring == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "console ring");
    *s = (struct serial){.irq = irq, .out_fd = out_fd, .ring = ring};
    (void)pthread_mutex_init(&s->lock, NULL); /* cannot fail on Linux with default attributes */
    return 0;
}

void serial_free(struct serial *s)
{
    free(s->ring);
    *s = (struct serial){.out_fd = -1};
}

size_t serial_input(struct serial *s, const void *bytes, size_t len)
{
    size_t taken = 0;
    (void)pthread_mutex_lock(&s->lock);
    while (taken < len && input_push(s, ((const uint8_t *)bytes)[taken]))
        taken++;
    update(s);
    (void)pthread_mutex_unlock(&s->lock);
    return taken;
}

size_t serial_tail(struct serial *s, void *to, size_t len)
{
    (void)pthread_mutex_lock(&s->lock);
    uint64_t held = min_u64(s->out_bytes, SERIAL_RING_BYTES);
    uint64_t n = min_u64(held, len);
    uint64_t from = s->out_bytes - n;
    for (uint64_t i = 0; i < n; i++)
        ((uint8_t *)to)[i] = s->ring[(from + i) % SERIAL_RING_BYTES];
    (void)pthread_mutex_unlock(&s->lock);
    return (size_t)n;
}

uint64_t serial_total(struct serial *s)
{
    (void)pthread_mutex_lock(&s->lock);
    uint64_t total = s->out_bytes;
    (void)pthread_mutex_unlock(&s->lock);
    return total;
}

int serial_save(struct serial *s, struct state_writer *w, struct err *e)
{
    uint8_t regs[] = {
        s->ier, s->lcr, s->mcr, s->scr, s->fcr, s->dll, s->dlm, s->interrupt_pending, s->asserted};
    uint8_t input[SERIAL_INPUT_BYTES];
    for (uint32_t i = 0; i < s->input_count; i++)
        input[i] = s->input[(s->input_head + i) % SERIAL_INPUT_BYTES];
    state_begin(w, "serial");
    state_put_u32(w, "version", SERIAL_STATE_VERSION);
    state_put_bytes(w, "registers", regs, sizeof regs);
    state_put_bytes(w, "input", input, s->input_count);
    state_end(w);
    return 0;
}

int serial_restore(struct serial *s, const struct state_node *parent, struct err *e)
{
    struct state_node n;
    uint8_t r[9];
    const void *input;
    size_t input_len;
    int rc = state_child(parent, "serial", &n, e);
    if (rc == 0)
        rc = state_check_version(&n, SERIAL_STATE_VERSION, e);
    if (rc == 0)
        rc = state_get_bytes(&n, "registers", r, sizeof r, e);
    if (rc == 0)
        rc = state_get_blob(&n, "input", &input, &input_len, e);
    if (rc < 0)
        return rc;
    if (input_len > SERIAL_INPUT_BYTES)
        return err_set(e, ERR_BAD_IMAGE, 0, "serial input of %zu bytes, expected at most %u",
                       input_len, SERIAL_INPUT_BYTES);
    s->ier = r[0] & IER_KNOWN;
    s->lcr = r[1];
    s->mcr = r[2] & MCR_KNOWN;
    s->scr = r[3];
    s->fcr = r[4] & FCR_KEPT;
    s->dll = r[5];
    s->dlm = r[6];
    s->interrupt_pending = r[7] != 0;
    s->asserted = r[8] != 0;
    memcpy(s->input, input, input_len);
    s->input_head = 0;
    s->input_count = (uint32_t)input_len;
    s->out_bytes = 0;
    s->lost_bytes = 0;
    s->first_byte_mono_ns = 0;
    return 0;
}
