/*
 * What a kernel is told: command line, memory map, initrd, the fields of boot_params.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/unit/boot_fixture.h"
#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

#define TOKEN0 "virtio_mmio.device=4K@0xd0000000:5"
#define TOKEN1 "virtio_mmio.device=4K@0xd0001000:6"
#define INITRD_BYTES 0x12345u

struct guest {
    struct ram ram;
    struct boot_spec spec;
    uint8_t *kernel;
    size_t kernel_bytes;
    struct boot_entry entry;
    struct err e;
};

static struct guest guest_new(uint64_t mib)
{
    struct fx_elf elf = fx_elf_default();
    return (struct guest){.ram = fx_ram(mib * MIB),
                          .kernel = fx_elf_make(&elf),
                          .kernel_bytes = elf.bytes,
                          .spec = {.kernel_path = "k",
                                   .initrd_fd = -1,
                                   .initrd_path = "i",
                                   .cmdline = "",
                                   .cpus = 1,
                                   .virtio_count = 2}};
}

/* A bzImage with these fields, around a payload that stays packed, in place of the ELF. */
static void guest_take_bzimage(struct guest *g, uint32_t initrd_max, uint32_t cmdline_size)
{
    static const uint8_t payload[] = {0x1f, 0x8b, 0x08};
    struct fx_bzimage bz = fx_bzimage_default(payload, sizeof payload);
    bz.initrd_max = initrd_max;
    bz.cmdline_size = cmdline_size;
    free(g->kernel);
    g->kernel = fx_bzimage_make(&bz, &g->kernel_bytes);
}

/* A bzImage whose LZ4 payload is the default ELF, and which states this init_size. */
static void guest_take_lz4(struct guest *g, uint32_t init_size)
{
    size_t bytes;
    uint8_t *packed = fx_lz4_legacy(g->kernel, g->kernel_bytes, 8u << 20, &bytes);
    struct fx_bzimage bz = fx_bzimage_default(packed, bytes);
    bz.init_size = init_size;
    free(g->kernel);
    g->kernel = fx_bzimage_make(&bz, &g->kernel_bytes);
    free(packed);
}

static int guest_load(struct guest *g)
{
    CLEANUP_FD int fd = fx_file(g->kernel, g->kernel_bytes);
    g->spec.kernel_fd = fd;
    g->e = (struct err){0};
    return boot_load(&g->ram, &g->spec, &g->entry, &g->e);
}

static void guest_free(struct guest *g)
{
    ram_free(&g->ram);
    free(g->kernel);
    fd_close(&g->spec.initrd_fd);
}

static const uint8_t *guest_params(const struct guest *g)
{
    return ram_slice(&g->ram, gpa(g->entry.rsi), 4096);
}

static const char *guest_cmdline(const struct guest *g)
{
    return ram_slice(&g->ram, gpa(le32_get(guest_params(g) + 0x228)), BOOT_CMDLINE_BYTES);
}

static char *text_of(size_t len)
{
    char *t = malloc(len + 1);
    for (size_t i = 0; i < len; i++)
        t[i] = i % 10 == 9 ? ' ' : (char)('a' + i % 26);
    t[len] = '\0';
    if (len > 0)
        t[len - 1] = 'z';
    return t;
}

static void A6_the_whole_line_fits_or_is_refused(void **s)
{
    static const struct {
        size_t total;
        bool fits;
    } lines[] = {{2046, true}, {2047, true}, {2048, false}, {4096, false}};
    static const char tokens[] = " " TOKEN0 " " TOKEN1;
    for (unsigned i = 0; i < ARRAY_SIZE(lines); i++) {
        struct guest g = guest_new(64);
        char *user = text_of(lines[i].total - strlen(tokens));
        g.spec.cmdline = user;
        assert_int_equal(guest_load(&g) == 0, lines[i].fits);
        if (lines[i].fits) {
            const char *line = guest_cmdline(&g);
            assert_int_equal(strlen(line), lines[i].total);
            assert_memory_equal(line, user, strlen(user));
            assert_string_equal(line + strlen(user), tokens);
        } else {
            char found[32];
            (void)snprintf(found, sizeof found, "of %zu bytes", lines[i].total);
            assert_int_equal(g.e.code, ERR_LIMIT);
            assert_non_null(strstr(g.e.text, found));
            assert_non_null(strstr(g.e.text, "takes 2047"));
        }
        free(user);
        guest_free(&g);
    }
}

static void A6_the_limit_is_the_kernels_own(void **s)
{
    static const struct {
        uint32_t cmdline_size;
        size_t limit;
    } kernels[] = {{255, 255}, {4095, 4095}, {0, 2047}, {0xffffffff, BOOT_CMDLINE_BYTES - 1}};
    for (unsigned i = 0; i < ARRAY_SIZE(kernels); i++) {
        for (size_t extra = 0; extra <= 1; extra++) {
            struct guest g = guest_new(64);
            guest_take_bzimage(&g, 0x7fffffff, kernels[i].cmdline_size);
            char *user = text_of(kernels[i].limit + extra);
            g.spec.cmdline = user;
            g.spec.virtio_count = 0;
            assert_int_equal(guest_load(&g) == 0, extra == 0);
            if (extra == 0)
                assert_string_equal(guest_cmdline(&g), user);
            else
                assert_int_equal(g.e.code, ERR_LIMIT);
            free(user);
            guest_free(&g);
        }
    }
}

static void A6_devices_stand_before_two_dashes(void **s)
{
    static const struct {
        const char *user, *line;
    } lines[] = {
        {"", TOKEN0},
        {" ", " " TOKEN0},
        {"quiet", "quiet " TOKEN0},
        {"quiet ", "quiet " TOKEN0},
        {"--", TOKEN0 " --"},
        {"-- a b", TOKEN0 " -- a b"},
        {"quiet -- a", "quiet " TOKEN0 " -- a"},
        {"quiet\t--\ta", "quiet\t" TOKEN0 " --\ta"},
        {"quiet \"--\" a", "quiet " TOKEN0 " \"--\" a"},
        {"a -- b -- c", "a " TOKEN0 " -- b -- c"},
        {"a -- \"b", "a " TOKEN0 " -- \"b"}, /* init's own words: its quotes are its own */
        {"--x", "--x " TOKEN0},
        {"x-- ---", "x-- --- " TOKEN0},
        {"--=1", "--=1 " TOKEN0},
        {"a=\"b -- c\" d", "a=\"b -- c\" d " TOKEN0},
        {"\"a=b -- c\" -- d", "\"a=b -- c\" " TOKEN0 " -- d"},
        {"a\xa0--\xa0"
         "b",
         "a\xa0" TOKEN0 " --\xa0"
         "b"}, /* the kernel's space, too */
        {"a\n--\vb", "a\n" TOKEN0 " --\vb"},
    };
    for (unsigned i = 0; i < ARRAY_SIZE(lines); i++) {
        char line[256];
        struct err e = {0};
        if (boot_cmdline_build(lines[i].user, 1, 255, line, sizeof line, &e) < 0)
            fail_msg("%s", e.text);
        assert_string_equal(line, lines[i].line);
        assert_int_equal(boot_cmdline_build(lines[i].user, 0, 255, line, sizeof line, &e), 0);
        assert_string_equal(line, lines[i].user);
        /* Exactly as long as it is, and one less. */
        size_t len = strlen(lines[i].line);
        assert_int_equal(boot_cmdline_build(lines[i].user, 1, len, line, sizeof line, &e), 0);
        assert_true(boot_cmdline_build(lines[i].user, 1, len - 1, line, sizeof line, &e) < 0);
    }
}

static void A6_an_open_quote_would_swallow_the_devices(void **s)
{
    struct err e = {0};
    char line[256];
    assert_true(boot_cmdline_build("a=\"b c", 1, 255, line, sizeof line, &e) < 0);
    assert_int_equal(e.code, ERR_USAGE);
    assert_int_equal(boot_cmdline_build("a=\"b c", 0, 255, line, sizeof line, &e), 0);
    assert_string_equal(line, "a=\"b c");
}

static void A6_every_slot_has_its_token(void **s)
{
    struct guest g = guest_new(64);
    g.spec.virtio_count = X86_VIRTIO_SLOTS;
    assert_int_equal(guest_load(&g), 0);
    assert_string_equal(guest_cmdline(&g), TOKEN0 " " TOKEN1 " virtio_mmio.device=4K@0xd0002000:7"
                                                  " virtio_mmio.device=4K@0xd0003000:10"
                                                  " virtio_mmio.device=4K@0xd0004000:11"
                                                  " virtio_mmio.device=4K@0xd0005000:12"
                                                  " virtio_mmio.device=4K@0xd0006000:14"
                                                  " virtio_mmio.device=4K@0xd0007000:15");
    g.spec.virtio_count = X86_VIRTIO_SLOTS + 1;
    assert_true(guest_load(&g) < 0 && g.e.code == ERR_LIMIT);
    g.spec.virtio_count = 0;
    g.spec.cpus = X86_CPUS_MAX + 1;
    assert_true(guest_load(&g) < 0 && g.e.code == ERR_LIMIT);
    g.spec.cpus = 0;
    assert_true(guest_load(&g) < 0 && g.e.code == ERR_LIMIT);
    guest_free(&g);
}

struct e820 {
    uint64_t start, end;
    uint32_t type;
};

static struct e820 e820_get(const uint8_t *params, unsigned i)
{
    const uint8_t *p = params + 0x2d0 + i * 20;
    return (struct e820){le64_get(p), le64_get(p) + le64_get(p + 8), le32_get(p + 16)};
}

static void A4_the_map_is_the_memory_without_the_hole(void **s)
{
    static const uint64_t sizes[] = {2,    64,   2047, 2048, 2049, 3071, 3072, 3073,
                                     3328, 3329, 4096, 4097, 4224, 5120, 8192};
    for (unsigned i = 0; i < ARRAY_SIZE(sizes); i++) {
        struct guest g = guest_new(sizes[i]);
        struct fx_elf elf = fx_elf_default(); /* a small kernel at 1 MiB, for the smallest guest */
        elf.entry = elf.segments[0].paddr = BOOT_KERNEL_MIN;
        elf.segments[1].paddr = BOOT_KERNEL_MIN + 0x10000;
        free(g.kernel);
        g.kernel = fx_elf_make(&elf);
        if (guest_load(&g) < 0)
            fail_msg("%s", g.e.text);
        const uint8_t *params = guest_params(&g);
        uint64_t usable = 0, above_1m = 0, last_end = 0;
        for (unsigned n = 0; n < params[0x1e8]; n++) {
            struct e820 r = e820_get(params, n);
            assert_true(r.start >= last_end && r.end > r.start);
            last_end = r.end;
            if (r.type != 1)
                continue;
            usable += r.end - r.start;
            above_1m += r.start >= MIB;
            assert_true(r.end <= X86_HOLE_START || r.start >= X86_HOLE_END);
            uint64_t pattern = 0x1122334455667788, last = (r.end - 8) & ~7ull;
            assert_int_equal(ram_write(&g.ram, gpa(last), &pattern, 8), 0);
        }
        assert_true(usable <= sizes[i] * MIB && usable >= sizes[i] * MIB - 400 * 1024);
        assert_int_equal(above_1m, sizes[i] > 3072 ? 2 : 1);
        guest_free(&g);
    }
}

/* What lies below 1 MiB and is not RAM in the map is where the tables for later readers lie. */
static void A4_the_tables_are_not_in_usable_memory(void **s)
{
    static const uint64_t tables[] = {BOOT_EBDA, BOOT_VGA - 1, BOOT_ACPI, BOOT_BIOS_ROM - 1,
                                      BOOT_RESET_VECTOR};
    struct guest g = guest_new(64);
    assert_int_equal(guest_load(&g), 0);
    const uint8_t *params = guest_params(&g);
    for (unsigned i = 0; i < ARRAY_SIZE(tables); i++) {
        unsigned type = 0;
        for (unsigned n = 0; n < params[0x1e8]; n++) {
            struct e820 r = e820_get(params, n);
            if (tables[i] >= r.start && tables[i] < r.end)
                type = r.type;
        }
        assert_int_equal(type, tables[i] >= BOOT_ACPI && tables[i] < BOOT_BIOS_ROM ? 3 : 2);
    }
    guest_free(&g);
}

static void take_initrd(struct guest *g, size_t bytes)
{
    uint8_t *data = malloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i * 11 + i / 256);
    fd_close(&g->spec.initrd_fd);
    g->spec.initrd_fd = fx_file(data, bytes);
    free(data);
}

static void assert_initrd(const struct guest *g, uint64_t limit)
{
    const uint8_t *params = guest_params(g);
    uint64_t at = le32_get(params + 0x218), bytes = le32_get(params + 0x21c);
    assert_true(le32_get(params + 0xc0) == 0 && le32_get(params + 0xc4) == 0);
    assert_int_equal(bytes, INITRD_BYTES);
    assert_int_equal(at % 4096, 0);
    assert_true(at + bytes <= limit && at + bytes + 4096 > limit);
    const uint8_t *data = ram_slice(&g->ram, gpa(at), bytes);
    assert_non_null(data);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(data[i], (uint8_t)(i * 11 + i / 256));
}

static void A3_the_initrd_stays_below_what_the_kernel_allows(void **s)
{
    static const uint64_t sizes[] = {64, 2047, 2048, 2049, 3071, 3073, 3329, 4096, 5120, 8192};
    static const uint32_t limits[] = {0, 0x7fffffff, 0x37ffffff, 0xffffffff};
    for (unsigned i = 0; i < ARRAY_SIZE(sizes); i++) {
        for (unsigned k = 0; k < ARRAY_SIZE(limits); k++) {
            struct guest g = guest_new(sizes[i]);
            uint64_t limit = limits[k] == 0 ? 0x80000000 : (uint64_t)limits[k] + 1;
            if (limits[k] != 0) /* 0: the ELF, which has no header to say it */
                guest_take_bzimage(&g, limits[k], 2047);
            take_initrd(&g, INITRD_BYTES);
            if (guest_load(&g) < 0)
                fail_msg("%s", g.e.text);
            assert_initrd(&g, min_u64(limit, min_u64(sizes[i] * MIB, X86_HOLE_START)));
            guest_free(&g);
        }
    }
}

static void A3_an_initrd_never_lies_on_the_kernel(void **s)
{
    const size_t room = 0x2000000 - 0x1206000; /* the ELF's bss ends at 0x1205001 */
    struct guest g = guest_new(32);
    take_initrd(&g, room);
    assert_int_equal(guest_load(&g), 0);
    assert_int_equal(le32_get(guest_params(&g) + 0x218), 0x1206000);
    take_initrd(&g, room + 1);
    assert_true(guest_load(&g) < 0);
    assert_int_equal(g.e.code, ERR_LIMIT);
    assert_non_null(strstr(g.e.text, "initrd i: "));
    /* A bzImage says itself how much it needs: 4 MiB from 16 MiB on. */
    guest_take_bzimage(&g, 0x7fffffff, 2047);
    take_initrd(&g, 12 * MIB);
    assert_int_equal(guest_load(&g), 0);
    take_initrd(&g, 12 * MIB + 1);
    assert_true(guest_load(&g) < 0 && g.e.code == ERR_LIMIT);
    /* And where no initrd can lie, none does. */
    take_initrd(&g, 1);
    guest_take_bzimage(&g, 0x10000, 2047);
    assert_true(guest_load(&g) < 0 && g.e.code == ERR_LIMIT);
    take_initrd(&g, 0);
    assert_true(guest_load(&g) < 0 && g.e.code == ERR_BAD_IMAGE);
    assert_non_null(strstr(g.e.text, "initrd i: file is empty"));
    guest_free(&g);
}

static void A3_an_unpacked_kernel_keeps_its_init_size(void **s)
{
    struct guest g = guest_new(32);
    guest_take_lz4(&g, 8 * MIB); /* from 16 MiB to 24, the ELF itself ends before 19 */
    take_initrd(&g, 8 * MIB);
    assert_int_equal(guest_load(&g), 0);
    assert_int_equal(le32_get(guest_params(&g) + 0x218), 24 * MIB);
    take_initrd(&g, 8 * MIB + 1);
    assert_true(guest_load(&g) < 0 && g.e.code == ERR_LIMIT);
    guest_free(&g);
}

/* Whole pages, so that the last byte of the initrd is the last that is allowed. */
static void A3_the_kernels_limit_is_a_byte_that_may_be_used(void **s)
{
    struct guest g = guest_new(64);
    guest_take_bzimage(&g, 0x2ffffff, 2047);
    take_initrd(&g, 0x12000);
    assert_int_equal(guest_load(&g), 0);
    assert_int_equal(le32_get(guest_params(&g) + 0x218), 0x3000000 - 0x12000);
    guest_take_bzimage(&g, 0x2fffffe, 2047);
    assert_int_equal(guest_load(&g), 0);
    assert_int_equal(le32_get(guest_params(&g) + 0x218), 0x3000000 - 0x13000);
    guest_free(&g);
}

static void an_elf_gets_a_header_of_its_own(void **s)
{
    struct guest g = guest_new(64);
    assert_int_equal(guest_load(&g), 0);
    const uint8_t *p = guest_params(&g);
    assert_int_equal(p[0x1ef], 0); /* the kernel's sentinel for a header copied blindly */
    assert_int_equal(le16_get(p + 0x1fe), 0xaa55);
    assert_memory_equal(p + 0x202, "HdrS", 4);
    assert_int_equal(le16_get(p + 0x206), 0x020f);
    assert_int_equal(p[0x210], 0xff);
    assert_int_equal(le32_get(p + 0x228), BOOT_CMDLINE);
    assert_int_equal(le32_get(p + 0x238), 2047);
    assert_true(le32_get(p + 0x218) == 0 && le32_get(p + 0x21c) == 0);
    assert_true(le64_get(p + 0x70) == BOOT_ACPI);
    guest_free(&g);
}

static void a_bzimage_keeps_its_header_but_not_its_pointers(void **s)
{
    struct guest g = guest_new(64);
    guest_take_bzimage(&g, 0x7fffffff, 2047);
    g.kernel[0x201] = 0xff;               /* a header said to reach far beyond boot_params' own */
    memset(g.kernel + 0x290, 0xee, 0x70); /* e.g. over the E820 table */
    assert_int_equal(guest_load(&g), 0);
    const uint8_t *p = guest_params(&g);
    assert_int_equal(p[0x1f1], 3);
    assert_int_equal(le32_get(p + 0x260), 0x400000);
    assert_int_equal(p[0x210], 0xff);
    assert_true(le64_get(p + 0x250) == 0);
    assert_true(le64_get(p + 0x290) == 0);
    assert_true(e820_get(p, 0).start == 0);
    guest_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(A6_the_whole_line_fits_or_is_refused),
        cmocka_unit_test(A6_the_limit_is_the_kernels_own),
        cmocka_unit_test(A6_devices_stand_before_two_dashes),
        cmocka_unit_test(A6_an_open_quote_would_swallow_the_devices),
        cmocka_unit_test(A6_every_slot_has_its_token),
        cmocka_unit_test(A4_the_map_is_the_memory_without_the_hole),
        cmocka_unit_test(A4_the_tables_are_not_in_usable_memory),
        cmocka_unit_test(A3_the_initrd_stays_below_what_the_kernel_allows),
        cmocka_unit_test(A3_an_initrd_never_lies_on_the_kernel),
        cmocka_unit_test(A3_an_unpacked_kernel_keeps_its_init_size),
        cmocka_unit_test(A3_the_kernels_limit_is_a_byte_that_may_be_used),
        cmocka_unit_test(an_elf_gets_a_header_of_its_own),
        cmocka_unit_test(a_bzimage_keeps_its_header_but_not_its_pointers),
    };
    return cmocka_run_group_tests_name("boot_params", tests, NULL, NULL);
}
