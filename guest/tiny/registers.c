/*
 * registers: reads and writes the virtio-mmio windows with every width at every offset, and places
 * where nothing is. Whatever comes back, the machine must go on: says "registers ok" at the end,
 * with the magic value of the first window as a 32-bit read gives it.
 */
#include "tiny.h"

#define WINDOW 0xd0000000ull
#define WINDOW_BYTES 0x1000u

static uint64_t sum;

static void touch(uint64_t at)
{
    sum += *(volatile uint8_t *)at;
    sum += *(volatile uint16_t *)at;
    sum += *(volatile uint32_t *)at;
    sum += *(volatile uint64_t *)at;
    *(volatile uint8_t *)at = 0xff;
    *(volatile uint16_t *)at = 0xffff;
    *(volatile uint32_t *)at = 0xffffffffu;
    *(volatile uint64_t *)at = ~0ull;
}

void guest_main(const uint8_t *boot_params)
{
    say("magic ");
    say_hex(*(volatile uint32_t *)WINDOW);
    say("\n");
    for (unsigned offset = 0; offset < 0x120; offset++)
        touch(WINDOW + offset);
    touch(WINDOW + WINDOW_BYTES - 8);
    touch(WINDOW + 7 * WINDOW_BYTES);          /* a slot without a device */
    touch(0xc0000000ull);                      /* the hole below the devices */
    *(volatile uint32_t *)(WINDOW + 0x70) = 0; /* status: reset */
    say("registers ok ");
    say_hex(*(volatile uint32_t *)(WINDOW + 0x70));
    say("\n");
    power_off();
    stop();
}
