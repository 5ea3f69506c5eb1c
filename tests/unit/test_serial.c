/*
 * The console UART as a Linux 8250 driver meets it: detection, interrupts, output that never
 * blocks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "devices/serial.h"
#include "tests/unit/guest_ring.h"
#include "vmm/core/err.h"
#include "vmm/core/state.h"

struct fixture {
    struct serial s;
    unsigned irqs;
    struct err e;
};

static int setup(void **s)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct irq_line irq = {.raise = irq_count, .ctx = &f->irqs, .gsi = SERIAL_GSI};
    *s = f;
    return serial_init(&f->s, irq, -1, &f->e);
}

static int teardown(void **s)
{
    struct fixture *f = *s;
    serial_free(&f->s);
    free(f);
    return 0;
}

static uint8_t in(struct fixture *f, unsigned reg)
{
    uint8_t v = 0;
    serial_bus_ops.read(&f->s, reg, &v, 1);
    return v;
}

static void out(struct fixture *f, unsigned reg, uint8_t v)
{
    serial_bus_ops.write(&f->s, reg, &v, 1);
}

/* The steps by which Linux tells what is there (registers by number: the chip's own). */
static void is_detected_as_a_16550A(void **s)
{
    struct fixture *f = *s;
    out(f, 1, 0x00);
    assert_int_equal(in(f, 1) & 0x0f, 0x00);
    out(f, 1, 0x0f);
    assert_int_equal(in(f, 1) & 0x0f, 0x0f);
    out(f, 1, 0x00);
    out(f, 4, 0x10 | 0x08 | 0x02); /* loopback with OUT2 and RTS: DCD and CTS */
    assert_int_equal(in(f, 6) & 0xf0, 0x90);
    out(f, 4, 0x00);
    out(f, 3, 0xbf);
    out(f, 2, 0x00);
    out(f, 3, 0x00);
    out(f, 2, 0x01);
    assert_int_equal(in(f, 2) >> 6, 3); /* FIFOs that work */
    out(f, 3, 0x80);
    assert_true(in(f, 2) != 0); /* no 16650: its enhanced register would read 0 */
    out(f, 3, 0xbf);
    assert_true(in(f, 2) != 0);
    out(f, 3, 0x00);
    out(f, 2, 0x01);
    uint8_t before = in(f, 2) >> 5;
    out(f, 2, 0x21);
    assert_false(before == 6 && (in(f, 2) >> 5) == 7); /* no 16750 */
    out(f, 1, 0x40);
    assert_int_equal(in(f, 1) & 0x40, 0); /* no XScale unit enable */
    assert_int_equal(in(f, 5), 0x60);
    out(f, 7, 0xa5);
    assert_int_equal(in(f, 7), 0xa5);
    assert_int_equal(in(f, 6) & 0xb0, 0xb0);
}

static void loopback_returns_what_is_sent(void **s)
{
    struct fixture *f = *s;
    out(f, 4, 0x10);
    out(f, 0, 'x');
    assert_int_equal(in(f, 5) & 1, 1);
    assert_int_equal(in(f, 0), 'x');
    assert_int_equal(in(f, 5) & 1, 0);
    assert_int_equal(f->s.out_bytes, 0);
}

static void the_divisor_hides_data_and_IER(void **s)
{
    struct fixture *f = *s;
    out(f, 1, 0x01);
    out(f, 3, 0x83);
    out(f, 0, 0x0c);
    out(f, 1, 0x02);
    assert_int_equal(in(f, 0), 0x0c);
    assert_int_equal(in(f, 1), 0x02);
    out(f, 3, 0x03);
    assert_int_equal(in(f, 1), 0x01);
    assert_int_equal(f->s.out_bytes, 0);
}

static void THRE_interrupts(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(in(f, 2) & 1, 1);
    out(f, 1, 0x02); /* enabling it while empty raises it */
    assert_int_equal(f->irqs, 1);
    assert_int_equal(in(f, 2) & 0x0f, 0x02);
    assert_int_equal(in(f, 2) & 0x0f, 0x01); /* reading it took it back */
    out(f, 0, 'a');
    assert_int_equal(f->irqs, 2);
    out(f, 0, 'b'); /* not read yet: no further edge */
    assert_int_equal(f->irqs, 2);
    assert_int_equal(in(f, 2) & 0x0f, 0x02);
    out(f, 1, 0x00);
    assert_int_equal(in(f, 2) & 0x0f, 0x01);
    out(f, 1, 0x02); /* the test of a driver for a UART that fails to raise it again */
    assert_int_equal(in(f, 2) & 0x0f, 0x02);
    out(f, 1, 0x00);
    out(f, 0, 'c'); /* polled output makes no interrupt */
    assert_int_equal(f->irqs, 3);
}

static void input_interrupts_until_it_is_read(void **s)
{
    struct fixture *f = *s;
    out(f, 2, 0x01);
    assert_int_equal(serial_input(&f->s, "hi", 2), 2);
    assert_int_equal(f->irqs, 0);
    out(f, 1, 0x01);
    assert_int_equal(f->irqs, 1);
    assert_int_equal(in(f, 2) & 0x0f, 0x04);
    assert_int_equal(in(f, 0), 'h');
    assert_int_equal(in(f, 2) & 0x0f, 0x04);
    assert_int_equal(in(f, 0), 'i');
    assert_int_equal(in(f, 2) & 0x0f, 0x01);
    assert_int_equal(in(f, 0), 0);
    assert_int_equal(serial_input(&f->s, "x", 1), 1);
    assert_int_equal(f->irqs, 2);
    out(f, 2, 0x03); /* clear the receiver */
    assert_int_equal(in(f, 5) & 1, 0);
}

static void input_is_bounded(void **s)
{
    struct fixture *f = *s;
    uint8_t many[SERIAL_INPUT_BYTES + 1];
    for (unsigned i = 0; i < sizeof many; i++)
        many[i] = (uint8_t)i;
    assert_int_equal(serial_input(&f->s, many, sizeof many), SERIAL_INPUT_BYTES);
    assert_int_equal(serial_input(&f->s, many, 1), 0);
    assert_int_equal(in(f, 0), 0);
    assert_int_equal(serial_input(&f->s, "z", 1), 1);
    for (unsigned i = 1; i < SERIAL_INPUT_BYTES; i++)
        assert_int_equal(in(f, 0), (uint8_t)i);
    assert_int_equal(in(f, 0), 'z');
}

static void the_ring_keeps_the_newest(void **s)
{
    struct fixture *f = *s;
    char tail[16];
    assert_int_equal(serial_tail(&f->s, tail, sizeof tail), 0);
    out(f, 0, 'a');
    out(f, 0, 'b');
    assert_int_equal(serial_tail(&f->s, tail, sizeof tail), 2);
    assert_memory_equal(tail, "ab", 2);
    uint8_t *all = malloc(SERIAL_RING_BYTES + 1);
    for (unsigned i = 0; i < SERIAL_RING_BYTES + 5; i++)
        out(f, 0, (uint8_t)(i % 251));
    assert_int_equal(serial_tail(&f->s, all, SERIAL_RING_BYTES + 1), SERIAL_RING_BYTES);
    for (unsigned i = 0; i < SERIAL_RING_BYTES; i++)
        assert_int_equal(all[i], (i + 5) % 251);
    assert_int_equal(serial_tail(&f->s, tail, 3), 3);
    assert_int_equal(tail[2], (char)((SERIAL_RING_BYTES + 4) % 251));
    free(all);
}

static void a_full_pipe_loses_bytes_and_stops_nobody(void **s)
{
    struct fixture *f = *s;
    int pipes[2];
    assert_int_equal(pipe2(pipes, O_CLOEXEC | O_NONBLOCK), 0);
    f->s.out_fd = pipes[1];
    for (unsigned i = 0; i < 100000; i++)
        out(f, 0, 'x');
    assert_int_equal(f->s.out_bytes, 100000);
    assert_true(f->s.lost_bytes > 0 && f->s.lost_bytes < 100000);
    assert_true(f->s.first_byte_mono_ns != 0);
    char c;
    assert_int_equal(read(pipes[0], &c, 1), 1);
    close(pipes[0]);
    (void)signal(SIGPIPE, SIG_IGN); /* as main does */
    uint64_t lost = f->s.lost_bytes;
    out(f, 0, 'y');
    assert_int_equal(f->s.lost_bytes, lost + 1);
    close(pipes[1]);
}

static void wide_accesses_are_harmless(void **s)
{
    struct fixture *f = *s;
    uint8_t b[8];
    for (unsigned at = 0; at < 8; at++) {
        for (unsigned len = 1; len <= 8; len++) {
            memset(b, 0xff, sizeof b);
            serial_bus_ops.write(&f->s, at, b, len);
            serial_bus_ops.read(&f->s, at, b, len);
        }
    }
    assert_int_equal(f->s.ier & ~0x0f, 0);
}

static void save_and_restore_keep_registers_and_input(void **s)
{
    struct fixture *f = *s;
    struct state_writer w;
    struct state_node root;
    const void *blob;
    size_t len;
    out(f, 2, 0x01);
    out(f, 3, 0x03);
    out(f, 4, 0x0b);
    out(f, 1, 0x03);
    (void)in(f, 2);
    for (unsigned i = 0; i < 200; i++) { /* so that the input wraps around its buffer */
        assert_int_equal(serial_input(&f->s, "x", 1), 1);
        (void)in(f, 0);
    }
    assert_int_equal(serial_input(&f->s,
                                  "0123456789abcdef0123456789abcdef0123456789abcdef"
                                  "0123456789abcdef",
                                  64),
                     64);
    out(f, 0, 'a');
    assert_int_equal(state_writer_init(&w, &f->e), 0);
    assert_int_equal(serial_save(&f->s, &w, &f->e), 0);
    assert_int_equal(state_finish(&w, &blob, &len, &f->e), 0);
    assert_int_equal(state_open(blob, len, &root, &f->e), 0);

    struct serial copy;
    unsigned irqs = 0;
    struct irq_line irq = {.raise = irq_count, .ctx = &irqs, .gsi = SERIAL_GSI};
    assert_int_equal(serial_init(&copy, irq, -1, &f->e), 0);
    assert_int_equal(serial_restore(&copy, &root, &f->e), 0);
    assert_int_equal(copy.first_byte_mono_ns, 0);
    assert_int_equal(copy.out_bytes, 0);
    assert_true(copy.mcr == 0x0b && copy.ier == 0x03 && copy.lcr == 0x03);
    uint8_t v;
    for (unsigned i = 0; i < 64; i++) {
        serial_bus_ops.read(&copy, 0, &v, 1);
        assert_int_equal(v, "0123456789abcdef"[i % 16]);
    }
    serial_bus_ops.read(&copy, 2, &v, 1);
    assert_int_equal(v & 0x0f, 0x02); /* the THRE reason was pending and still is */
    serial_free(&copy);
    state_writer_free(&w);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(is_detected_as_a_16550A),           T(loopback_returns_what_is_sent),
        T(the_divisor_hides_data_and_IER),    T(THRE_interrupts),
        T(input_interrupts_until_it_is_read), T(input_is_bounded),
        T(the_ring_keeps_the_newest),         T(a_full_pipe_loses_bytes_and_stops_nobody),
        T(wide_accesses_are_harmless),        T(save_and_restore_keep_registers_and_input),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
