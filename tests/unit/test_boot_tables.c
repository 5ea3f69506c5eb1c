/*
 * The tables a kernel finds in memory: page tables and GDT, MP table, ACPI. Read back the way a
 * kernel reads them; the DSDT is also given to iasl where that is installed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/unit/boot_fixture.h"
#include "vmm/arch/x86_64/boot_aml.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

struct machine {
    struct ram ram;
    struct boot_entry entry;
};

static struct machine machine_boot(unsigned cpus, unsigned virtio_count)
{
    struct machine m = {.ram = fx_ram(64 * MIB)};
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    CLEANUP_FD int fd = fx_file(file, elf.bytes);
    free(file);
    struct boot_spec spec = {.kernel_fd = fd,
                             .kernel_path = "k",
                             .initrd_fd = -1,
                             .cmdline = "",
                             .cpus = cpus,
                             .virtio_count = virtio_count};
    struct err e = {0};
    if (boot_load(&m.ram, &spec, &m.entry, &e) < 0)
        fail_msg("%s", e.text);
    return m;
}

static const uint8_t *bytes_at(const struct machine *m, uint64_t at, uint64_t len)
{
    const uint8_t *p = ram_slice(&m->ram, gpa(at), len);
    assert_non_null(p);
    return p;
}

static uint64_t u64_at(const struct machine *m, uint64_t at)
{
    return le64_get(bytes_at(m, at, 8));
}

static void assert_sum(const uint8_t *p, size_t len)
{
    unsigned sum = 0;
    for (size_t i = 0; i < len; i++)
        sum += p[i];
    assert_int_equal(sum & 0xff, 0);
}

static void the_first_4_gib_are_mapped_one_to_one(void **s)
{
    struct machine m = machine_boot(1, 0);
    for (uint64_t at = 0; at < 4096 * MIB; at += 2 * MIB) {
        uint64_t pml4e = u64_at(&m, m.entry.cr3 + (at >> 39) * 8);
        uint64_t pdpte = u64_at(&m, (pml4e & ~0xfffull) + (at >> 30 & 511) * 8);
        uint64_t pde = u64_at(&m, (pdpte & ~0xfffull) + (at >> 21 & 511) * 8);
        assert_true((pml4e & 3) == 3 && (pdpte & 3) == 3);
        assert_true(pde == (at | 0x83)); /* present, writable, 2 MiB */
    }
    assert_true(u64_at(&m, m.entry.cr3 + 8) == 0);
    ram_free(&m.ram);
}

static void the_gdt_holds_what_the_selectors_say(void **s)
{
    struct machine m = machine_boot(1, 0);
    uint64_t code = u64_at(&m, m.entry.gdt_base + m.entry.cs);
    uint64_t data = u64_at(&m, m.entry.gdt_base + m.entry.ds);
    uint64_t tss = u64_at(&m, m.entry.gdt_base + m.entry.tss);
    assert_true((code >> 40 & 0xff) == 0x9b && (code >> 53 & 1) == 1 && (code >> 54 & 1) == 0);
    assert_true((data >> 40 & 0xff) == 0x93);
    assert_true((tss >> 40 & 0xff) == 0x8b && (tss & 0xffff) == 0x67);
    assert_true((tss >> 16 & 0xffffff) == BOOT_TSS);
    assert_int_equal(m.entry.gdt_limit, m.entry.tss + 15);
    ram_free(&m.ram);
}

static void a_reboot_through_the_bios_finds_the_reset_port(void **s)
{
    struct machine m = machine_boot(1, 0);
    const uint8_t out_64_fe[] = {0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd};
    assert_memory_equal(bytes_at(&m, 0xffff0, 7), out_64_fe, 7);
    ram_free(&m.ram);
}

struct mp_counts {
    unsigned cpus, boot_cpus, buses, ioapics, ints, lints;
    uint8_t ioapic_id;
};

static struct mp_counts mp_walk(const uint8_t *table)
{
    struct mp_counts c = {0};
    const uint8_t *p = table + 44, *end = table + le16_get(table + 4);
    unsigned entries = 0;
    for (; p < end; entries++) {
        switch (p[0]) {
        case 0:
            assert_int_equal(p[1], c.cpus);
            assert_true((p[3] & 1) != 0);
            c.cpus++;
            c.boot_cpus += p[3] >> 1 & 1;
            p += 20;
            continue;
        case 1:
            assert_memory_equal(p + 2, "ISA   ", 6);
            c.buses++;
            break;
        case 2:
            assert_true(le32_get(p + 4) == X86_IOAPIC_BASE && p[3] == 1);
            c.ioapic_id = p[1];
            c.ioapics++;
            break;
        case 3:
            assert_true(p[1] == 0 && le16_get(p + 2) == 0 && p[5] == c.ints);
            assert_true(p[6] == c.ioapic_id && p[7] == p[5]);
            c.ints++;
            break;
        case 4:
            assert_int_equal(p[7], c.lints); /* LINT0 is ExtINT, LINT1 NMI */
            assert_int_equal(p[1], c.lints == 0 ? 3 : 1);
            c.lints++;
            break;
        default:
            fail_msg("entry of type %u", p[0]);
        }
        p += 8;
    }
    assert_ptr_equal(p, end);
    assert_int_equal(entries, le16_get(table + 34));
    return c;
}

static void the_mp_table_lists_every_cpu(void **s)
{
    for (unsigned cpus = 1; cpus <= X86_CPUS_MAX; cpus++) {
        struct machine m = machine_boot(cpus, 0);
        /* Where a kernel looks: the EBDA by the BDA's word, or the last KiB of base memory. */
        uint32_t ebda = (uint32_t)le16_get(bytes_at(&m, 0x40e, 2)) << 4;
        assert_int_equal(ebda, (uint32_t)le16_get(bytes_at(&m, 0x413, 2)) << 10);
        const uint8_t *floating = bytes_at(&m, ebda, 16);
        assert_memory_equal(floating, "_MP_", 4);
        assert_sum(floating, 16);
        uint32_t at = le32_get(floating + 4);
        const uint8_t *table = bytes_at(&m, at, 44);
        assert_memory_equal(table, "PCMP", 4);
        uint16_t bytes = le16_get(table + 4);
        assert_true(at + bytes <= ebda + 1024);
        assert_sum(table, bytes);
        assert_true(le32_get(table + 36) == X86_LAPIC_BASE);
        struct mp_counts c = mp_walk(table);
        assert_true(c.cpus == cpus && c.boot_cpus == 1 && c.buses == 1 && c.ioapics == 1);
        assert_true(c.ints == 16 && c.lints == 2 && c.ioapic_id == cpus);
        ram_free(&m.ram);
    }
}

/* Finds a table by way of RSDP and XSDT, or the DSDT by way of the FADT; checks every sum passed.
 */
static const uint8_t *acpi_table(const struct machine *m, const char *signature)
{
    const uint8_t *rsdp = bytes_at(m, 0xe0000, 36), *found = NULL;
    assert_memory_equal(rsdp, "RSD PTR ", 8);
    assert_sum(rsdp, 20);
    assert_sum(rsdp, 36);
    assert_true(rsdp[15] == 2 && le32_get(rsdp + 20) == 36);
    uint64_t at = le64_get(rsdp + 24), tables[8] = {at};
    unsigned count = 1;
    const uint8_t *xsdt = bytes_at(m, at, 36);
    uint32_t bytes = le32_get(xsdt + 4);
    for (uint32_t o = 36; o < bytes; o += 8)
        tables[count++] = le64_get(xsdt + o);
    for (unsigned i = 0; i < count; i++) {
        const uint8_t *t = bytes_at(m, tables[i], 36);
        uint32_t len = le32_get(t + 4);
        assert_true(tables[i] >= BOOT_ACPI && tables[i] + len <= BOOT_ACPI + BOOT_ACPI_BYTES);
        assert_sum(bytes_at(m, tables[i], len), len);
        if (memcmp(t, "FACP", 4) == 0) {
            assert_true(len == 276 && le32_get(t + 40) == le64_get(t + 140));
            tables[count++] = le64_get(t + 140);
        }
        if (memcmp(t, signature, 4) == 0)
            found = t;
    }
    assert_non_null(found);
    return found;
}

static void the_madt_lists_every_cpu(void **s)
{
    for (unsigned cpus = 1; cpus <= X86_CPUS_MAX; cpus++) {
        struct machine m = machine_boot(cpus, X86_VIRTIO_SLOTS);
        const uint8_t *t = acpi_table(&m, "APIC"), *p = t + 44, *end = t + le32_get(t + 4);
        unsigned seen = 0, ioapics = 0, nmis = 0;
        assert_true(le32_get(t + 36) == X86_LAPIC_BASE);
        for (; p < end; p += p[1]) {
            assert_true(p[1] >= 6);
            if (p[0] == 0) {
                assert_true(p[1] == 8 && p[3] == seen && le32_get(p + 4) == 1);
                seen++;
            } else if (p[0] == 1) {
                assert_true(p[1] == 12 && p[2] == cpus && le32_get(p + 8) == 0);
                assert_true(le32_get(p + 4) == X86_IOAPIC_BASE);
                ioapics++;
            } else {
                assert_true(p[0] == 4 && p[2] == 0xff && p[5] == 1);
                nmis++;
            }
        }
        assert_ptr_equal(p, end);
        assert_true(seen == cpus && ioapics == 1 && nmis == 1);
        ram_free(&m.ram);
    }
}

static void the_fadt_promises_only_what_is_there(void **s)
{
    struct machine m = machine_boot(1, 0);
    const uint8_t *t = acpi_table(&m, "FACP");
    assert_true(t[8] == 6 && t[131] == 4);
    uint32_t flags = le32_get(t + 112);
    assert_true((flags & 1u << 20) != 0);             /* hardware-reduced: no PIT, SCI, PM timer */
    assert_int_equal(le16_get(t + 109) & 0x24, 0x24); /* no VGA, no CMOS clock */
    assert_int_equal(le16_get(t + 109) & 0x02, 0);    /* no 8042 to probe */
    assert_true((flags & 1u << 10) != 0 && t[116] == 1 && t[128] == 0xfe);
    assert_true(le64_get(t + 120) == 0x64);
    assert_true(t[244] == 1 && le64_get(t + 248) == X86_SLEEP_CONTROL_PORT);
    assert_true(t[256] == 1 && le64_get(t + 260) == X86_SLEEP_STATUS_PORT);
    ram_free(&m.ram);
}

/* An AML block's length field (ACPI 6.4, 20.2.4) at p; *bytes is what it takes itself. */
static size_t aml_length(const uint8_t *p, size_t *bytes)
{
    unsigned follow = p[0] >> 6;
    size_t v = follow == 0 ? p[0] & 0x3f : p[0] & 0xf;
    for (unsigned i = 0; i < follow; i++)
        v |= (size_t)p[1 + i] << (4 + 8 * i);
    *bytes = 1 + follow;
    return v;
}

static void aml_lengths_are_right_at_every_size(void **s)
{
    static const size_t bodies[] = {0,    1,    56,   57,   58,   59,   60,   64,   255,
                                    4080, 4086, 4087, 4088, 4089, 4090, 4095, 70000};
    static uint8_t buf[80000];
    for (unsigned i = 0; i < ARRAY_SIZE(bodies); i++) {
        struct aml a = {.buf = buf, .cap = sizeof buf};
        size_t mark = aml_open_scope(&a, "\\_SB_"), bytes;
        for (size_t n = 0; n < bodies[i]; n++)
            aml_integer(&a, 1);
        aml_close(&a, mark);
        assert_false(a.overflowed);
        assert_int_equal(aml_length(buf + 1, &bytes), a.len - 1);
        assert_int_equal(a.len, 1 + bytes + 5 + bodies[i]);
        size_t body = 5 + bodies[i]; /* and the shortest form that holds it */
        assert_int_equal(bytes, body + 1 <= 0x3f ? 1 : body + 2 <= 0xfff ? 2 : 3);
        assert_memory_equal(buf + 1 + bytes, "\\_SB_", 5);
        /* The same with one byte less of room: said, and nothing beyond it written. */
        size_t len = a.len;
        a = (struct aml){.buf = buf, .cap = len - 1};
        buf[len - 1] = 0x77;
        mark = aml_open_scope(&a, "\\_SB_");
        for (size_t n = 0; n < bodies[i]; n++)
            aml_integer(&a, 1);
        aml_close(&a, mark);
        assert_true(a.overflowed && buf[len - 1] == 0x77);
    }
}

/* Occurrences of a byte string in the DSDT. */
static unsigned count_of(const uint8_t *dsdt, const void *what, size_t len)
{
    unsigned n = 0;
    for (uint32_t i = 36; i + len <= le32_get(dsdt + 4); i++)
        n += memcmp(dsdt + i, what, len) == 0;
    return n;
}

static void the_dsdt_has_a_device_per_slot(void **s)
{
    for (unsigned slots = 0; slots <= X86_VIRTIO_SLOTS; slots++) {
        struct machine m = machine_boot(1, slots);
        const uint8_t *t = acpi_table(&m, "DSDT");
        assert_int_equal(count_of(t, "LNRO0005", 9), slots);
        assert_int_equal(count_of(t, "COM1", 4), 1);
        for (unsigned i = 0; i < X86_VIRTIO_SLOTS; i++) {
            uint8_t memory[12] = {0x86, 9, 0, 1}, irq[9] = {0x89, 6, 0, 3, 1, x86_virtio_gsi[i]};
            le32_put(memory + 4, (uint32_t)(X86_VIRTIO_BASE + i * X86_VIRTIO_STRIDE));
            le32_put(memory + 8, (uint32_t)X86_VIRTIO_STRIDE);
            assert_int_equal(count_of(t, memory, sizeof memory), i < slots);
            assert_int_equal(count_of(t, irq, sizeof irq), i < slots);
        }
        ram_free(&m.ram);
    }
}

static void the_dsdt_is_what_iasl_reads(void **s)
{
    if (system("command -v iasl >/dev/null 2>&1") != 0) {
        print_message("SKIP: iasl is not installed (package acpica-tools)\n");
        skip();
    }
    char dir[] = "/tmp/tine-dsdt-XXXXXX", command[512];
    assert_non_null(mkdtemp(dir));
    struct machine m = machine_boot(1, X86_VIRTIO_SLOTS);
    const uint8_t *t = acpi_table(&m, "DSDT");
    (void)snprintf(command, sizeof command, "%s/dsdt.dat", dir);
    FILE *f = fopen(command, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(t, 1, le32_get(t + 4), f), le32_get(t + 4));
    assert_int_equal(fclose(f), 0);
    /* Taken apart without a complaint, and put together again to the same bytes behind the header.
     */
    (void)snprintf(command, sizeof command,
                   "cd %s && iasl -d dsdt.dat >d.log 2>&1 && ! grep -iE 'error|warning' d.log &&"
                   " [ $(grep -c 'LNRO0005' dsdt.dsl) = %u ] &&"
                   " grep -q 'EisaId (\"PNP0501\")' dsdt.dsl &&"
                   " iasl -oa -p again dsdt.dsl >c.log 2>&1 &&"
                   " grep -q ' 0 Errors, 0 Warnings' c.log",
                   dir, (unsigned)X86_VIRTIO_SLOTS);
    int rc = system(command);
    (void)snprintf(command, sizeof command, "[ %d = 0 ] || cat %s/?.log; rm -r %s", rc, dir, dir);
    assert_int_equal(system(command), 0);
    assert_int_equal(rc, 0);
    ram_free(&m.ram);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_4_gib_are_mapped_one_to_one),
        cmocka_unit_test(the_gdt_holds_what_the_selectors_say),
        cmocka_unit_test(a_reboot_through_the_bios_finds_the_reset_port),
        cmocka_unit_test(the_mp_table_lists_every_cpu),
        cmocka_unit_test(the_madt_lists_every_cpu),
        cmocka_unit_test(the_fadt_promises_only_what_is_there),
        cmocka_unit_test(aml_lengths_are_right_at_every_size),
        cmocka_unit_test(the_dsdt_has_a_device_per_slot),
        cmocka_unit_test(the_dsdt_is_what_iasl_reads),
    };
    return cmocka_run_group_tests_name("boot_tables", tests, NULL, NULL);
}
