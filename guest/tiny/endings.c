/*
 * endings: ends in the way that the first letter of its command line names. Each must give the VMM
 * a reason and an exit status of its own (case H5).
 *   p  power off        r  reset by the keyboard controller   c  pvpanic
 *   h  halt for good    t  triple fault                       e  an instruction few emulators know
 */
#include "tiny.h"

static void triple_fault(void)
{
    struct __attribute__((packed)) {
        uint16_t limit;
        uint64_t base;
    } none = {0, 0};
    __asm__ volatile("lidt %0; ud2" ::"m"(none));
}

void guest_main(const uint8_t *boot_params)
{
    say("endings\n");
    switch (command_line(boot_params)[0]) {
    case 'p':
        power_off();
        break;
    case 'r':
        port_out8(0x64, 0xfe);
        break;
    case 'c':
        port_out8(0x505, 1);
        break;
    case 't':
        triple_fault();
        break;
    case 'e':
        __asm__ volatile("emms; popcnt %%eax, %%eax" ::: "eax");
        say("carried out\n");
        break;
    default:
        break;
    }
    stop();
}
