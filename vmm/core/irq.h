/*
 * irq: an edge a device can raise, without knowing what carries it.
 *
 * The machine binds `raise` to the VM's interrupt chip (KVM_IRQ_LINE); tests bind a counter. Called
 * on the loop thread only.
 */
#pragma once

#include <stdint.h>

struct irq_line {
    void (*raise)(void *ctx, uint32_t gsi);
    void *ctx;
    uint32_t gsi; /* global system interrupt: IO-APIC pin on x86, SPI on arm64 */
};

static inline void irq_pulse(const struct irq_line *line)
{
    if (line->raise != 0)
        line->raise(line->ctx, line->gsi);
}
