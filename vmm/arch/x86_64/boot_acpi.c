/*
 * boot_acpi: RSDP, XSDT, FADT, MADT and DSDT (ACPI 6.4) for stock kernels. See boot_image.h.
 *
 * The machine says it is hardware-reduced ACPI: there is no PIT, no CMOS clock, no VGA, no SCI and
 * no legacy interrupt controller to wait for. Linux then takes the local APIC timer and the IO-APIC
 * from the start and never tests a timer that is not there. The price is that it presumes no ISA
 * interrupt, so the serial port is a device in the DSDT like the virtio slots. No interrupt source
 * override is needed: each device states its own trigger and polarity.
 */
#include <stdio.h>
#include <string.h>

#include "vmm/arch/x86_64/boot.h"
#include "vmm/arch/x86_64/boot_aml.h"
#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

#define AREA_BYTES 4096u
#define RSDP_BYTES 36u
#define RSDP_V1_BYTES 20u
#define HEADER_BYTES 36u
#define TABLE_ALIGN 16u
#define OEM_ID "TINE  "
#define OEM_TABLE_ID "TINEVMM "
#define CREATOR_ID "TINE"

#define FADT_BYTES 276u
#define FADT_DSDT 40u
#define FADT_IAPC_BOOT_ARCH 109u
#define FADT_FLAGS 112u
#define FADT_RESET_REG 116u
#define FADT_RESET_VALUE 128u
#define FADT_MINOR 131u
#define FADT_X_DSDT 140u
#define FADT_SLEEP_CONTROL 244u
#define FADT_SLEEP_STATUS 256u
#define FADT_HYPERVISOR 268u
#define BOOT_ARCH_NO_VGA (1u << 2)
#define BOOT_ARCH_NO_MSI (1u << 3)
#define BOOT_ARCH_NO_ASPM (1u << 4)
#define BOOT_ARCH_NO_CMOS_RTC (1u << 5)
#define FLAG_WBINVD (1u << 0)
#define FLAG_PROC_C1 (1u << 2)
#define FLAG_NO_POWER_BUTTON (1u << 4)
#define FLAG_NO_SLEEP_BUTTON (1u << 5)
#define FLAG_NO_FIXED_RTC_WAKE (1u << 6)
#define FLAG_RESET_REG (1u << 10)
#define FLAG_HEADLESS (1u << 12)
#define FLAG_HW_REDUCED (1u << 20)
#define GAS_IO 1u

#define MADT_LAPIC 0u
#define MADT_IOAPIC 1u
#define MADT_LAPIC_NMI 4u

/* The tables as they are put one behind the other, and where the first byte will lie. */
struct area {
    uint8_t bytes[AREA_BYTES];
    size_t len;
};

static uint64_t address_of(const struct area *a, const uint8_t *p)
{
    return BOOT_ACPI + (uint64_t)(p - a->bytes);
}

static uint8_t sum_to_zero(const uint8_t *p, size_t len)
{
    unsigned sum = 0;
    for (size_t i = 0; i < len; i++)
        sum += p[i];
    return (uint8_t)(0u - sum);
}

/* Begins a table at the next aligned place; its body follows at the returned pointer. */
static uint8_t *table_begin(struct area *a, const char *signature, uint8_t revision)
{
    a->len = align_up_u64(a->len, TABLE_ALIGN);
    uint8_t *t = a->bytes + a->len;
    memcpy(t, signature, 4);
    t[8] = revision;
    memcpy(t + 10, OEM_ID, 6);
    memcpy(t + 16, OEM_TABLE_ID, 8);
    le32_put(t + 24, 1);
    memcpy(t + 28, CREATOR_ID, 4);
    le32_put(t + 32, 1);
    return t;
}

static void table_end(struct area *a, uint8_t *t, size_t bytes)
{
    le32_put(t + 4, (uint32_t)bytes);
    t[9] = sum_to_zero(t, bytes);
    a->len = (size_t)(t - a->bytes) + bytes;
}

static void io_register_put(uint8_t *p, uint16_t port)
{
    const uint8_t gas[4] = {GAS_IO, 8, 0, 1}; /* space, bits, offset, byte access */
    memcpy(p, gas, sizeof gas);
    le64_put(p + 4, port);
}

static void virtio_device_put(struct aml *aml, unsigned slot)
{
    char name[8]; /* VM00, VM01, ...: the slots have two digits at most */
    (void)snprintf(name, sizeof name, "VM%02u", slot % 100);
    size_t device = aml_open_device(aml, name);
    aml_name_string(aml, "_HID", "LNRO0005");
    aml_name_integer(aml, "_UID", slot);
    size_t crs = aml_open_resources(aml, "_CRS");
    aml_memory32(aml, (uint32_t)(X86_VIRTIO_BASE + slot * X86_VIRTIO_STRIDE),
                 (uint32_t)X86_VIRTIO_STRIDE);
    aml_interrupt_edge_high(aml, x86_virtio_gsi[slot]);
    aml_close_resources(aml, crs);
    aml_close(aml, device);
}

static uint8_t *dsdt_put(struct area *a, unsigned virtio_count, bool *fits)
{
    uint8_t *t = table_begin(a, "DSDT", 2);
    struct aml aml = {.buf = t + HEADER_BYTES,
                      .cap = AREA_BYTES - (size_t)(t + HEADER_BYTES - a->bytes)};
    size_t scope = aml_open_scope(&aml, "\\_SB_");
    for (unsigned slot = 0; slot < virtio_count; slot++)
        virtio_device_put(&aml, slot);
    size_t com1 = aml_open_device(&aml, "COM1");
    aml_name_eisa(&aml, "_HID", "PNP0501"); /* 16550A */
    aml_name_integer(&aml, "_UID", 1);
    size_t crs = aml_open_resources(&aml, "_CRS");
    aml_io(&aml, X86_COM1_PORT, 8);
    aml_interrupt_edge_high(&aml, X86_COM1_GSI);
    aml_close_resources(&aml, crs);
    aml_close(&aml, com1);
    aml_close(&aml, scope);
    size_t s5 = aml_open_package(&aml, "_S5_", 4); /* soft off, the one sleep state */
    for (unsigned i = 0; i < 4; i++)
        aml_integer(&aml, i == 0 ? X86_ACPI_S5 : 0);
    aml_close(&aml, s5);
    table_end(a, t, HEADER_BYTES + aml.len);
    *fits = !aml.overflowed;
    return t;
}

static uint8_t *fadt_put(struct area *a, const uint8_t *dsdt)
{
    uint8_t *t = table_begin(a, "FACP", 6);
    t[FADT_MINOR] = 4;
    le32_put(t + FADT_DSDT, (uint32_t)address_of(a, dsdt));
    le64_put(t + FADT_X_DSDT, address_of(a, dsdt));
    le16_put(t + FADT_IAPC_BOOT_ARCH,
             BOOT_ARCH_NO_VGA | BOOT_ARCH_NO_MSI | BOOT_ARCH_NO_ASPM | BOOT_ARCH_NO_CMOS_RTC);
    le32_put(t + FADT_FLAGS, FLAG_WBINVD | FLAG_PROC_C1 | FLAG_NO_POWER_BUTTON |
                                 FLAG_NO_SLEEP_BUTTON | FLAG_NO_FIXED_RTC_WAKE | FLAG_RESET_REG |
                                 FLAG_HEADLESS | FLAG_HW_REDUCED);
    io_register_put(t + FADT_RESET_REG, X86_RESET_PORT);
    t[FADT_RESET_VALUE] = X86_RESET_VALUE;
    io_register_put(t + FADT_SLEEP_CONTROL, X86_SLEEP_CONTROL_PORT);
    io_register_put(t + FADT_SLEEP_STATUS, X86_SLEEP_STATUS_PORT);
    memcpy(t + FADT_HYPERVISOR, "TINE", 4);
    table_end(a, t, FADT_BYTES);
    return t;
}

static uint8_t *madt_put(struct area *a, unsigned cpus)
{
    uint8_t *t = table_begin(a, "APIC", 5), *p = t + HEADER_BYTES;
    le32_put(p, (uint32_t)X86_LAPIC_BASE);
    p += 8; /* and flags 0: no 8259 that must be masked first */
    for (unsigned i = 0; i < cpus; i++, p += 8) {
        const uint8_t lapic[8] = {MADT_LAPIC, 8, (uint8_t)i, (uint8_t)i, 1 /* enabled */};
        memcpy(p, lapic, sizeof lapic);
    }
    const uint8_t ioapic[4] = {MADT_IOAPIC, 12, (uint8_t)cpus};
    memcpy(p, ioapic, sizeof ioapic);
    le32_put(p + 4, (uint32_t)X86_IOAPIC_BASE);
    le32_put(p + 8, 0); /* its first GSI */
    p += 12;
    const uint8_t nmi[6] = {MADT_LAPIC_NMI, 6, 0xff /* every CPU */, 0, 0, 1 /* LINT1 */};
    memcpy(p, nmi, sizeof nmi);
    p += sizeof nmi;
    table_end(a, t, (size_t)(p - t));
    return t;
}

static void xsdt_put(struct area *a, const uint8_t *fadt, const uint8_t *madt)
{
    uint8_t *t = table_begin(a, "XSDT", 1);
    le64_put(t + HEADER_BYTES, address_of(a, fadt));
    le64_put(t + HEADER_BYTES + 8, address_of(a, madt));
    table_end(a, t, HEADER_BYTES + 16);

    uint8_t *rsdp = a->bytes;
    memcpy(rsdp, "RSD PTR ", 8);
    memcpy(rsdp + 9, OEM_ID, 6);
    rsdp[15] = 2;
    le32_put(rsdp + 20, RSDP_BYTES);
    le64_put(rsdp + 24, address_of(a, t));
    rsdp[8] = sum_to_zero(rsdp, RSDP_V1_BYTES);
    rsdp[32] = sum_to_zero(rsdp, RSDP_BYTES);
}

/* The DSDT comes first and may take one half of the area; what follows is known to fit the other.
 */
_Static_assert(RSDP_BYTES + FADT_BYTES + 2 * HEADER_BYTES + 8 + X86_CPUS_MAX * 8 + 12 + 6 + 16 +
                       4 * TABLE_ALIGN <
                   AREA_BYTES / 2,
               "the fixed tables take less than half of the area");

int boot_acpi_write(const struct ram *ram, unsigned cpus, unsigned virtio_count, struct err *e)
{
    struct area a = {.len = RSDP_BYTES};
    bool fits;
    uint8_t *dsdt = dsdt_put(&a, virtio_count, &fits);
    if (!fits || a.len > AREA_BYTES / 2)
        return err_set(e, ERR_LIMIT, 0, "DSDT of %u virtio devices", virtio_count);
    uint8_t *fadt = fadt_put(&a, dsdt);
    uint8_t *madt = madt_put(&a, cpus);
    xsdt_put(&a, fadt, madt);
    int rc = ram_write(ram, gpa(BOOT_ACPI), a.bytes, a.len);
    return rc < 0 ? err_set(e, ERR_USAGE, -rc, "ACPI tables") : 0;
}
