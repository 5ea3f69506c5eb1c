/*
 * Which files boot_load takes for a kernel, and what it leaves in guest memory.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/unit/boot_fixture.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

static int load(const struct ram *ram, const void *file, size_t bytes, struct boot_entry *out,
                struct err *e)
{
    CLEANUP_FD int fd = fx_file(file, bytes);
    struct boot_spec spec = {.kernel_fd = fd,
                             .kernel_path = "vmlinux",
                             .initrd_fd = -1,
                             .cmdline = "quiet",
                             .cpus = 2,
                             .virtio_count = 2};
    *e = (struct err){0};
    return boot_load(ram, &spec, out, e);
}

/* Segment 0 of the default ELF is in place, byte for byte; the second one's bss is zero. */
static void assert_elf_loaded(const struct ram *ram, const uint8_t *elf)
{
    const uint8_t *text = ram_slice(ram, gpa(0x1000000), 0x2345);
    assert_memory_equal(text, elf + 0x1000, 0x2345);
    const uint8_t *data = ram_slice(ram, gpa(0x1200000), 0x5001);
    assert_memory_equal(data, elf + 0x4000, 0x111);
    for (unsigned i = 0x111; i < 0x5001; i++)
        assert_int_equal(data[i], 0);
}

static void A1_an_elf_is_loaded_by_its_physical_addresses(void **s)
{
    struct err e;
    struct boot_entry entry;
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    struct ram ram = fx_ram(64 * MIB);
    memset(ram_slice(&ram, gpa(0x1200000), 0x6000), 0xee, 0x6000);
    if (load(&ram, file, elf.bytes, &entry, &e) < 0)
        fail_msg("%s", e.text);
    assert_elf_loaded(&ram, file);
    assert_int_equal(*(uint8_t *)ram_slice(&ram, gpa(0x1205001), 1), 0xee);
    assert_true(entry.rip == 0x1000000 && entry.rsi == BOOT_ZERO_PAGE && entry.cs == 0x10);
    ram_free(&ram);
    free(file);
}

static void A1_an_lz4_bzimage_is_unpacked_into_its_elf(void **s)
{
    struct err e;
    struct boot_entry entry;
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    for (size_t block = 0x777; block <= 8 * MIB; block *= 4096) {
        size_t packed_bytes, bz_bytes;
        uint8_t *packed = fx_lz4_legacy(file, elf.bytes, block, &packed_bytes);
        struct fx_bzimage bz = fx_bzimage_default(packed, packed_bytes);
        uint8_t *image = fx_bzimage_make(&bz, &bz_bytes);
        struct ram ram = fx_ram(64 * MIB);
        if (load(&ram, image, bz_bytes, &entry, &e) < 0)
            fail_msg("%s", e.text);
        assert_elf_loaded(&ram, file);
        assert_true(entry.rip == 0x1000000);
        ram_free(&ram);
        free(image);
        free(packed);
    }
    free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(A1_an_elf_is_loaded_by_its_physical_addresses),
        cmocka_unit_test(A1_an_lz4_bzimage_is_unpacked_into_its_elf),
    };
    return cmocka_run_group_tests_name("boot", tests, NULL, NULL);
}
