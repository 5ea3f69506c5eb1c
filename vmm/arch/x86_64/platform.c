/*
 * platform: the PC ports through which a guest resets, powers off or reports a panic. Loop thread.
 *
 * 0x60/0x64  i8042: reads give 0 (buffers empty, so that no driver waits); command 0xfe is reset
 * 0x604      ACPI PM1a control (ACPI 6.4, 4.8.3.2): SLP_EN, bit 13, powers off (the FADT names it)
 * 0x505      pvpanic: bit 0 written says that the kernel panicked; a read tells that it is there
 */
#include <string.h>

#include "vmm/arch/arch.h"
#include "vmm/arch/x86_64/platform.h"
#include "vmm/core/bus.h"
#include "vmm/core/num.h"

static void read_zero(void *obj, uint64_t offset, void *data, unsigned len)
{
    memset(data, 0, len);
}

static void i8042_write(void *obj, uint64_t offset, const void *data, unsigned len)
{
    const struct arch_platform *p = obj;
    if (offset == X86_I8042_COMMAND - X86_I8042_BASE && *(const uint8_t *)data == 0xfe)
        p->happened(p->arg, ARCH_RESET);
}

static void pm1a_write(void *obj, uint64_t offset, const void *data, unsigned len)
{
    const struct arch_platform *p = obj;
    if (offset == 0 && len >= 2 && (le16_get(data) & X86_PM1_SLP_EN) != 0)
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
static const struct bus_ops pm1a_ops = {.read = read_zero, .write = pm1a_write};
static const struct bus_ops pvpanic_ops = {.read = pvpanic_read, .write = pvpanic_write};

int arch_add_platform(struct bus *pio, struct arch_platform *p, struct err *e)
{
    int rc = bus_add(pio, X86_I8042_BASE, 5, &i8042_ops, p, e);
    if (rc == 0)
        rc = bus_add(pio, X86_PM1A_CONTROL, 4, &pm1a_ops, p, e);
    if (rc == 0)
        rc = bus_add(pio, X86_PVPANIC, 1, &pvpanic_ops, p, e);
    return rc;
}
