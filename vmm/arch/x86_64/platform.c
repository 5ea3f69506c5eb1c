/*
 * platform: the PC ports through which a guest resets, powers off or reports a panic. Loop thread.
 *
 * 0x60/0x64  i8042: reads give 0 (buffers empty, so that no driver waits); command 0xfe is reset
 * 0x604      ACPI sleep control register (ACPI 6.4, 4.8.3.7; the FADT names it): SLP_EN powers off.
 *            A 16-bit write is taken as PM1a control (4.8.3.2), whose SLP_EN is bit 13.
 * 0x505      pvpanic: bit 0 written says that the kernel panicked; a read tells that it is there
 */
#include <stdbool.h>
#include <string.h>

#include "vmm/arch/arch.h"
#include "vmm/arch/x86_64/boot.h"
#include "vmm/core/bus.h"
#include "vmm/core/num.h"

#define X86_I8042_BASE 0x60u
#define X86_PM1_SLP_EN (1u << 13)
#define X86_PVPANIC 0x505u
#define X86_PVPANIC_PANICKED 1u

static void read_zero(void *obj, uint64_t offset, void *data, unsigned len)
{
    memset(data, 0, len);
}

static void i8042_write(void *obj, uint64_t offset, const void *data, unsigned len)
{
    const struct arch_platform *p = obj;
    if (offset == X86_RESET_PORT - X86_I8042_BASE && *(const uint8_t *)data == X86_RESET_VALUE)
        p->happened(p->arg, ARCH_RESET);
}

static void sleep_write(void *obj, uint64_t offset, const void *data, unsigned len)
{
    const struct arch_platform *p = obj;
    if (offset != 0)
        return;
    bool sleep = len >= 2 ? (le16_get(data) & X86_PM1_SLP_EN) != 0
                          : (*(const uint8_t *)data & X86_SLEEP_EN) != 0;
    if (sleep)
        p->happened(p->arg, ARCH_POWEROFF);
}

static void pvpanic_read(void *obj, uint64_t offset, void *data, unsigned len)
{
    memset(data, 0, len);
    *(uint8_t *)data = X86_PVPANIC_PANICKED;
}

static void pvpanic_write(void *obj, uint64_t offset, const void *data, unsigned len)
{
    const struct arch_platform *p = obj;
    if ((*(const uint8_t *)data & X86_PVPANIC_PANICKED) != 0)
        p->happened(p->arg, ARCH_PANIC);
}

static const struct bus_ops i8042_ops = {.read = read_zero, .write = i8042_write};
static const struct bus_ops sleep_ops = {.read = read_zero, .write = sleep_write};
static const struct bus_ops pvpanic_ops = {.read = pvpanic_read, .write = pvpanic_write};

int arch_add_platform(struct bus *pio, struct arch_platform *p, struct err *e)
{
    int rc = bus_add(pio, X86_I8042_BASE, 5, &i8042_ops, p, e);
    if (rc == 0)
        rc = bus_add(pio, X86_SLEEP_CONTROL_PORT, 4, &sleep_ops, p, e);
    if (rc == 0)
        rc = bus_add(pio, X86_PVPANIC, 1, &pvpanic_ops, p, e);
    return rc;
}
