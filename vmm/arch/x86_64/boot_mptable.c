/*
 * boot_mptable: the Intel MultiProcessor Specification 1.4 tables, for kernels without ACPI. See
 * boot_image.h. Written into the EBDA, one of the three places where a kernel looks.
 *
 * ISA interrupts 0 to 15 are wired to the same pins of the IO-APIC (this is also KVM's default
 * routing); trigger and polarity follow the ISA bus: edge, active high.
 */
#include <string.h>

#include "vmm/arch/x86_64/boot.h"
#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

#define FLOATING_BYTES 16u
#define HEADER_BYTES 44u
#define CPU_BYTES 20u
#define ENTRY_BYTES 8u /* every entry but a CPU's */
#define ISA_IRQS 16u
#define TABLE_BYTES_MAX                                                                            \
    (HEADER_BYTES + X86_CPUS_MAX * CPU_BYTES + (2u + ISA_IRQS + 2u) * ENTRY_BYTES)

enum entry_type { MP_CPU = 0, MP_BUS = 1, MP_IOAPIC = 2, MP_INTSRC = 3, MP_LINTSRC = 4 };
enum int_type { MP_INT = 0, MP_NMI = 1, MP_EXTINT = 3 };

#define APIC_VERSION 0x14u   /* local APIC */
#define IOAPIC_VERSION 0x11u /* 82093AA */
#define CPU_ENABLED 0x01u
#define CPU_BOOT 0x02u
#define CPU_SIGNATURE 0x600u /* family 6: Linux reads the true one from CPUID */
#define CPU_FEATURES 0x201u  /* FPU, on-chip APIC */
#define ALL_CPUS 0xffu
#define BUS_ISA 0u

_Static_assert(FLOATING_BYTES + TABLE_BYTES_MAX <= BOOT_EBDA_BYTES, "the tables fit the EBDA");

static uint8_t sum_to_zero(const uint8_t *p, size_t len)
{
    unsigned sum = 0;
    for (size_t i = 0; i < len; i++)
        sum += p[i];
    return (uint8_t)(0u - sum);
}

/* I/O and local interrupt entries have one shape (flags 0: as the bus does it). */
static uint8_t *int_put(uint8_t *p, enum entry_type type, enum int_type how, uint8_t irq,
                        uint8_t apic, uint8_t pin)
{
    const uint8_t entry[ENTRY_BYTES] = {(uint8_t)type, (uint8_t)how, 0, 0, BUS_ISA, irq, apic, pin};
    memcpy(p, entry, sizeof entry);
    return p + sizeof entry;
}

static uint8_t *cpus_put(uint8_t *p, unsigned cpus)
{
    for (unsigned i = 0; i < cpus; i++, p += CPU_BYTES) {
        p[0] = MP_CPU;
        p[1] = (uint8_t)i; /* APIC id */
        p[2] = APIC_VERSION;
        p[3] = CPU_ENABLED | (i == 0 ? CPU_BOOT : 0);
        le32_put(p + 4, CPU_SIGNATURE);
        le32_put(p + 8, CPU_FEATURES);
    }
    return p;
}

int boot_mptable_write(const struct ram *ram, unsigned cpus, struct err *e)
{
    uint8_t area[BOOT_EBDA_BYTES] = {0};
    uint8_t *table = area + FLOATING_BYTES;
    uint8_t ioapic_id = (uint8_t)cpus;

    uint8_t *p = cpus_put(table + HEADER_BYTES, cpus);
    p[0] = MP_BUS;
    p[1] = BUS_ISA;
    memcpy(p + 2, "ISA   ", 6);
    p += ENTRY_BYTES;
    p[0] = MP_IOAPIC;
    p[1] = ioapic_id;
    p[2] = IOAPIC_VERSION;
    p[3] = 1; /* usable */
    le32_put(p + 4, (uint32_t)X86_IOAPIC_BASE);
    p += ENTRY_BYTES;
    for (uint8_t irq = 0; irq < ISA_IRQS; irq++)
        p = int_put(p, MP_INTSRC, MP_INT, irq, ioapic_id, irq);
    p = int_put(p, MP_LINTSRC, MP_EXTINT, 0, 0, 0);
    p = int_put(p, MP_LINTSRC, MP_NMI, 0, ALL_CPUS, 1);

    size_t bytes = (size_t)(p - table);
    memcpy(table, "PCMP", 4);
    le16_put(table + 4, (uint16_t)bytes);
    table[6] = 4; /* revision 1.4 */
    memcpy(table + 8, "TINE    TINE        ", 20);
    le16_put(table + 34, (uint16_t)(cpus + 2 + ISA_IRQS + 2));
    le32_put(table + 36, (uint32_t)X86_LAPIC_BASE);
    table[7] = sum_to_zero(table, bytes);

    memcpy(area, "_MP_", 4);
    le32_put(area + 4, BOOT_EBDA + FLOATING_BYTES);
    area[8] = 1; /* length in 16-byte units */
    area[9] = 4;
    area[10] = sum_to_zero(area, FLOATING_BYTES);

    int rc = ram_write(ram, gpa(BOOT_EBDA), area, sizeof area);
    return rc < 0 ? err_set(e, ERR_USAGE, -rc, "MP table") : 0;
}
