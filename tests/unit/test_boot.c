/*
 * Which files boot_load takes for a kernel, what of them reaches guest memory, and that nothing a
 * file says leads anywhere else.
 */
#include <fcntl.h>
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

#define SENTINEL 0x50000u /* below 1 MiB, and nothing of ours */

static int load_fd(const struct ram *ram, int fd, struct boot_entry *out, struct err *e)
{
    struct boot_spec spec = {.kernel_fd = fd,
                             .kernel_path = "vmlinux",
                             .initrd_fd = -1,
                             .cmdline = "quiet",
                             .cpus = 2,
                             .virtio_count = 2};
    *e = (struct err){0};
    return boot_load(ram, &spec, out, e);
}

static int load(const struct ram *ram, const void *file, size_t bytes, struct boot_entry *out,
                struct err *e)
{
    CLEANUP_FD int fd = fx_file(file, bytes);
    return load_fd(ram, fd, out, e);
}

static void assert_loads(const struct ram *ram, const void *file, size_t bytes,
                         struct boot_entry *out)
{
    struct err e;
    if (load(ram, file, bytes, out, &e) < 0)
        fail_msg("%s", e.text);
}

/* Refused with this code, these words, and nothing written where a kernel would lie. */
static void assert_refused(const void *file, size_t bytes, enum err_code code, const char *words)
{
    struct err e;
    struct boot_entry entry;
    struct ram ram = fx_ram(64 * MIB);
    memset(&entry, 0x5a, sizeof entry);
    struct boot_entry before = entry;
    int rc = load(&ram, file, bytes, &entry, &e);
    if (rc >= 0 || e.code != code || strstr(e.text, words) == NULL ||
        strstr(e.text, "kernel vmlinux: ") == NULL)
        fail_msg("expected %s with '%s', got %d, %s: %s", err_code_name(code), words, rc,
                 err_code_name(e.code), e.text);
    assert_memory_equal(&entry, &before, sizeof entry);
    for (uint64_t at = 0; at < 64 * MIB; at += 0x100000) {
        uint64_t v = 1;
        assert_int_equal(ram_read(&ram, gpa(at), &v, sizeof v), 0);
        assert_true(v == 0);
    }
    ram_free(&ram);
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
    struct boot_entry entry;
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    struct ram ram = fx_ram(64 * MIB);
    memset(ram_slice(&ram, gpa(0x1200000), 0x6000), 0xee, 0x6000);
    memset(ram_slice(&ram, gpa(SENTINEL), 8), 0xee, 8);
    assert_loads(&ram, file, elf.bytes, &entry);
    assert_elf_loaded(&ram, file);
    assert_int_equal(*(uint8_t *)ram_slice(&ram, gpa(0x1205001), 1), 0xee);
    assert_int_equal(*(uint8_t *)ram_slice(&ram, gpa(SENTINEL), 1), 0xee);
    assert_true(entry.rip == 0x1000000 && entry.rsi == BOOT_ZERO_PAGE && entry.cr3 == BOOT_PML4);
    assert_true(entry.cs == 0x10 && entry.ds == 0x18 && entry.tss == 0x20);
    ram_free(&ram);
    free(file);
}

static void A1_an_lz4_bzimage_is_unpacked_into_its_elf(void **s)
{
    static const size_t block_bytes[] = {0x777, 0x5000, 8u << 20};
    struct boot_entry entry;
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    for (unsigned i = 0; i < ARRAY_SIZE(block_bytes); i++) {
        size_t packed_bytes, bz_bytes;
        uint8_t *packed = fx_lz4_legacy(file, elf.bytes, block_bytes[i], &packed_bytes);
        struct fx_bzimage bz = fx_bzimage_default(packed, packed_bytes);
        uint8_t *image = fx_bzimage_make(&bz, &bz_bytes);
        struct ram ram = fx_ram(64 * MIB);
        assert_loads(&ram, image, bz_bytes, &entry);
        assert_elf_loaded(&ram, file);
        assert_true(entry.rip == 0x1000000);
        ram_free(&ram);
        free(image);
        free(packed);
    }
    free(file);
}

static void A1_any_other_payload_is_left_to_the_image(void **s)
{
    static const uint8_t magics[][6] = {
        {0x1f, 0x8b, 0x08},               /* gzip */
        {0xfd, '7', 'z', 'X', 'Z', 0x00}, /* xz */
        {0x28, 0xb5, 0x2f, 0xfd},         /* zstd */
        {'B', 'Z', 'h'},                  /* bzip2 */
        {0x04, 0x22, 0x4d, 0x18},         /* LZ4, but of the modern framing */
        {0x7f, 'E', 'L', 'F'},            /* not compressed at all */
    };
    for (unsigned i = 0; i < ARRAY_SIZE(magics); i++) {
        struct boot_entry entry;
        size_t bytes;
        struct fx_bzimage bz = fx_bzimage_default(magics[i], sizeof magics[i]);
        uint8_t *image = fx_bzimage_make(&bz, &bytes);
        struct ram ram = fx_ram(64 * MIB);
        assert_loads(&ram, image, bytes, &entry);
        assert_true(entry.rip == 0x1000200);
        assert_memory_equal(ram_slice(&ram, gpa(0x1000000), bytes - 2048), image + 2048,
                            bytes - 2048);
        ram_free(&ram);
        free(image);
    }
}

static void A1_what_is_no_kernel_is_refused_by_naming_the_formats(void **s)
{
    static const char text[] = "#!/bin/sh\nexec qemu-system-x86_64 -kernel \"$@\"\n";
    static const char *const formats[] = {"ELF64 x86-64 vmlinux", "64-bit bzImage"};
    uint8_t *zeros = calloc(1, MIB);
    for (unsigned i = 0; i < ARRAY_SIZE(formats); i++) {
        assert_refused("", 0, ERR_BAD_IMAGE, formats[i]);
        assert_refused(zeros, MIB, ERR_BAD_IMAGE, formats[i]);
        assert_refused(text, sizeof text - 1, ERR_BAD_IMAGE, formats[i]);
        assert_refused("MZ", 2, ERR_BAD_IMAGE, formats[i]);
    }
    assert_refused("", 0, ERR_BAD_IMAGE, "file is empty");
    free(zeros);
}

static void A1_a_kernel_must_be_a_plain_file(void **s)
{
    struct err e;
    struct boot_entry entry;
    struct ram ram = fx_ram(64 * MIB);
    int pipe_fds[2];
    assert_int_equal(pipe(pipe_fds), 0);
    CLEANUP_FD int dir = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(load_fd(&ram, pipe_fds[0], &entry, &e) < 0);
    assert_non_null(strstr(e.text, "not a regular file"));
    assert_true(load_fd(&ram, dir, &entry, &e) < 0);
    assert_non_null(strstr(e.text, "not a regular file"));
    (void)close(pipe_fds[0]);
    (void)close(pipe_fds[1]);
    ram_free(&ram);
}

/* One field of a fixture set to one value, and what is said of it. */
struct bad_field {
    size_t at, bytes;
    uint64_t value;
    enum err_code code;
    const char *words;
};
#define ELF_FIELD(member) offsetof(struct fx_elf, member), sizeof(((struct fx_elf *)0)->member)
#define BZ_FIELD(member)                                                                           \
    offsetof(struct fx_bzimage, member), sizeof(((struct fx_bzimage *)0)->member)

static void a_hostile_elf_is_refused(void **s)
{
    static const struct bad_field fields[] = {
        {ELF_FIELD(class), 1, ERR_BAD_IMAGE, "class 1"},
        {ELF_FIELD(data), 2, ERR_BAD_IMAGE, "byte order 2"},
        {ELF_FIELD(machine), 183, ERR_BAD_IMAGE, "machine 183"},
        {ELF_FIELD(type), 1, ERR_BAD_IMAGE, "type 1"},
        {ELF_FIELD(phentsize), 32, ERR_BAD_IMAGE, "of 32 bytes"},
        {ELF_FIELD(phnum), 0, ERR_BAD_IMAGE, "0 program headers"},
        {ELF_FIELD(phnum), 65, ERR_BAD_IMAGE, "65 program headers"},
        {ELF_FIELD(phnum), 65535, ERR_BAD_IMAGE, "65535 program headers"},
        {ELF_FIELD(phoff), UINT64_MAX - 7, ERR_BAD_IMAGE, "program header 0"},
        {ELF_FIELD(phoff), UINT64_MAX - 55, ERR_BAD_IMAGE, "program header 0"},
        {ELF_FIELD(phoff), 0x5000 - 55, ERR_BAD_IMAGE, "program header 0"},
        {ELF_FIELD(phoff), 0x5000 - 56, ERR_BAD_IMAGE, "program header 1"},
        {ELF_FIELD(entry), 0xffffff, ERR_BAD_IMAGE, "entry 0xffffff"},
        {ELF_FIELD(entry), 0x1002345, ERR_BAD_IMAGE, "entry 0x1002345"},
        {ELF_FIELD(entry), 0xffffffff81000000, ERR_BAD_IMAGE, "entry"},
        {ELF_FIELD(segments[0].filesz), 0x2346, ERR_BAD_IMAGE, "segment 0"},
        {ELF_FIELD(segments[0].offset), UINT64_MAX - 0x2344, ERR_BAD_IMAGE, "segment 0"},
        {ELF_FIELD(segments[0].offset), 0x5000 - 0x2344, ERR_BAD_IMAGE, "segment 0"},
        {ELF_FIELD(segments[0].memsz), UINT64_MAX, ERR_BAD_IMAGE, "wrap"},
        {ELF_FIELD(segments[0].memsz), 1ull << 40, ERR_LIMIT, "there are 64 MiB"},
        {ELF_FIELD(segments[0].paddr), UINT64_MAX - 0x2344, ERR_BAD_IMAGE, "wrap"},
        {ELF_FIELD(segments[0].paddr), 0xfffff, ERR_BAD_IMAGE, "boot tables"},
        {ELF_FIELD(segments[0].paddr), 0, ERR_BAD_IMAGE, "boot tables"},
        {ELF_FIELD(segments[0].paddr), BOOT_ZERO_PAGE, ERR_BAD_IMAGE, "boot tables"},
        {ELF_FIELD(segments[0].paddr), 0xd0000000, ERR_LIMIT, "there are 64 MiB"},
        {ELF_FIELD(segments[0].paddr), 0x100000000, ERR_LIMIT, "there are 64 MiB"},
        {ELF_FIELD(segments[0].paddr), 64 * MIB - 0x2344, ERR_LIMIT, "there are 64 MiB"},
        {ELF_FIELD(segments[1].paddr), 0x1002344, ERR_BAD_IMAGE, "overlaps"},
        {ELF_FIELD(segments[1].memsz), 0x110, ERR_BAD_IMAGE, "segment 1"},
    };
    for (unsigned i = 0; i < ARRAY_SIZE(fields); i++) {
        struct fx_elf elf = fx_elf_default();
        memcpy((char *)&elf + fields[i].at, &fields[i].value, fields[i].bytes);
        uint8_t *file = fx_elf_make(&elf);
        assert_refused(file, elf.bytes, fields[i].code, fields[i].words);
        free(file);
    }
}

static void an_elf_cut_anywhere_is_refused(void **s)
{
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    for (size_t cut = 4; cut < 0x4111; cut += cut < 0xf0 ? 1 : 0x321)
        assert_refused(file, cut, ERR_BAD_IMAGE, "");
    struct boot_entry entry;
    struct ram ram = fx_ram(64 * MIB);
    assert_loads(&ram, file, 0x4111, &entry);
    ram_free(&ram);
    free(file);
}

static void an_elf_may_touch_both_ends_of_its_memory(void **s)
{
    struct boot_entry entry;
    struct fx_elf elf = fx_elf_default();
    elf.segments[0].paddr = elf.entry = BOOT_KERNEL_MIN;
    elf.segments[1].paddr = 64 * MIB - 0x5001;
    elf.phnum = 3; /* the third one is empty: nothing of it counts */
    elf.segments[2] = (struct fx_segment){UINT64_MAX, 0, UINT64_MAX, 0};
    uint8_t *file = fx_elf_make(&elf);
    struct ram ram = fx_ram(64 * MIB);
    assert_loads(&ram, file, elf.bytes, &entry);
    assert_memory_equal(ram_slice(&ram, gpa(BOOT_KERNEL_MIN), 0x2345), file + 0x1000, 0x2345);
    assert_memory_equal(ram_slice(&ram, gpa(64 * MIB - 0x5001), 0x111), file + 0x4000, 0x111);
    ram_free(&ram);
    free(file);
}

static void a_hostile_bzimage_is_refused(void **s)
{
    static const struct bad_field fields[] = {
        {BZ_FIELD(version), 0x20b, ERR_BAD_IMAGE, "protocol 2.11"},
        {BZ_FIELD(version), 0, ERR_BAD_IMAGE, "protocol 0.00"},
        {BZ_FIELD(loadflags), 0, ERR_BAD_IMAGE, "zImage"},
        {BZ_FIELD(xloadflags), 0x7e, ERR_BAD_IMAGE, "32-bit kernel"},
        {BZ_FIELD(jump), 0x61, ERR_BAD_IMAGE, "header ends at 0x263"},
        {BZ_FIELD(jump), 0, ERR_BAD_IMAGE, "header ends at 0x202"},
        {BZ_FIELD(setup_sects), 255, ERR_BAD_IMAGE, "code begins at 0x20000"},
        {BZ_FIELD(payload_offset), 0xffffffff, ERR_BAD_IMAGE, "payload of"},
        {BZ_FIELD(payload_length), 0xffffffff, ERR_BAD_IMAGE, "payload of"},
        {BZ_FIELD(payload_offset), 0x400 + 65, ERR_BAD_IMAGE, "payload of"},
        {BZ_FIELD(alignment), 0, ERR_BAD_IMAGE, "alignment 0x0"},
        {BZ_FIELD(alignment), 0x180000, ERR_BAD_IMAGE, "alignment 0x180000"},
        {BZ_FIELD(pref_address), 0x1000001, ERR_BAD_IMAGE, "address 0x1000001"},
        {BZ_FIELD(pref_address), 0, ERR_BAD_IMAGE, "boot tables"},
        {BZ_FIELD(pref_address), 0xffffffffffe00000, ERR_BAD_IMAGE, "wraps"},
        {BZ_FIELD(pref_address), 0xd0000000, ERR_LIMIT, "there are 64 MiB"},
        {BZ_FIELD(pref_address), 0x100000000, ERR_LIMIT, "there are 64 MiB"},
        {BZ_FIELD(init_size), 0xffffffff, ERR_LIMIT, "there are 64 MiB"},
        {BZ_FIELD(init_size), 0x3000001, ERR_LIMIT, "there are 64 MiB"},
    };
    static const uint8_t payload[64] = {0x1f, 0x8b, 0x08};
    for (unsigned i = 0; i < ARRAY_SIZE(fields); i++) {
        size_t bytes;
        struct fx_bzimage bz = fx_bzimage_default(payload, sizeof payload);
        memcpy((char *)&bz + fields[i].at, &fields[i].value, fields[i].bytes);
        uint8_t *file = fx_bzimage_make(&bz, &bytes);
        assert_refused(file, bytes, fields[i].code, fields[i].words);
        free(file);
    }
}

static void a_bzimage_that_states_no_size_is_as_large_as_its_code(void **s)
{
    static const uint8_t payload[8192] = {0x1f, 0x8b, 0x08};
    struct fx_bzimage bz = fx_bzimage_default(payload, sizeof payload);
    size_t bytes;
    bz.init_size = 0;
    bz.alignment = 4096;
    bz.pref_address = 64 * MIB - 8192;
    uint8_t *file = fx_bzimage_make(&bz, &bytes);
    assert_refused(file, bytes, ERR_LIMIT, "there are 64 MiB");
    free(file);
}

static void a_bzimage_beyond_the_limit_is_refused(void **s)
{
    static const uint8_t payload[64] = {0x1f, 0x8b, 0x08};
    struct fx_bzimage bz = fx_bzimage_default(payload, sizeof payload);
    struct boot_entry entry;
    struct err e;
    size_t bytes;
    uint8_t *file = fx_bzimage_make(&bz, &bytes);
    struct ram ram = fx_ram(1024 * MIB);
    CLEANUP_FD int fd = fx_file(file, bytes);
    assert_int_equal(ftruncate(fd, (off_t)(256 * MIB + 1)), 0);
    assert_true(load_fd(&ram, fd, &entry, &e) < 0);
    assert_int_equal(e.code, ERR_LIMIT);
    assert_non_null(strstr(e.text, "268435456 are accepted"));
    assert_int_equal(ftruncate(fd, (off_t)(256 * MIB)), 0);
    assert_int_equal(load_fd(&ram, fd, &entry, &e), 0);
    ram_free(&ram);
    free(file);
}

static void a_bzimage_cut_anywhere_is_refused(void **s)
{
    static const uint8_t payload[64] = {0x1f, 0x8b, 0x08};
    size_t bytes;
    struct fx_bzimage bz = fx_bzimage_default(payload, sizeof payload);
    uint8_t *file = fx_bzimage_make(&bz, &bytes);
    for (size_t cut = 0x206; cut < bytes - 64; cut += cut < 0x270 ? 1 : 0x7b)
        assert_refused(file, cut, ERR_BAD_IMAGE, "");
    free(file);
}

static void assert_payload_refused(const uint8_t *payload, size_t bytes, const char *words)
{
    size_t bz_bytes;
    struct fx_bzimage bz = fx_bzimage_default(payload, bytes);
    uint8_t *image = fx_bzimage_make(&bz, &bz_bytes);
    assert_refused(image, bz_bytes, ERR_BAD_IMAGE, words);
    free(image);
}

static void a_damaged_lz4_payload_is_refused(void **s)
{
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf), *p;
    size_t n;
    p = fx_lz4_legacy(file, elf.bytes, 0x2000, &n);
    le32_put(p + n - 4, 0x5001); /* announces one byte more */
    assert_payload_refused(p, n, "were announced");
    le32_put(p + n - 4, 0x4fff); /* and one less */
    assert_payload_refused(p, n, "damaged or unfolds to more");
    le32_put(p + n - 4, 0);
    assert_payload_refused(p, n, "announces 0 bytes");
    le32_put(p + n - 4, 0xffffffff);
    assert_payload_refused(p, n, "announces 4294967295 bytes");
    le32_put(p + n - 4, 0x5000);
    uint32_t first = le32_get(p + 4);
    le32_put(p + 4, 0);
    assert_payload_refused(p, n, "block of 0x0 bytes");
    le32_put(p + 4, 0xffffffff);
    assert_payload_refused(p, n, "block of 0xffffffff bytes");
    le32_put(p + 4, (uint32_t)n - 4 - 8 + 1); /* one byte past the blocks, into the size */
    assert_payload_refused(p, n, "are left");
    le32_put(p + 4, first - 1);
    assert_payload_refused(p, n, "LZ4 payload");
    le32_put(p + 4, first);
    memset(p + 8, 0xff, 64);
    assert_payload_refused(p, n, "damaged");
    free(p);
    p = fx_lz4_legacy(file + 1, elf.bytes - 1, 0x2000, &n);
    assert_payload_refused(p, n, "holds no ELF");
    free(p);
    elf.machine = 3;
    free(file);
    file = fx_elf_make(&elf);
    p = fx_lz4_legacy(file, elf.bytes, 0x2000, &n);
    assert_payload_refused(p, n, "kernel in the LZ4 payload: ELF for machine 3");
    free(p);
    free(file);
}

static void frames_may_follow_each_other(void **s)
{
    struct boot_entry entry;
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    size_t a, b, bytes;
    uint8_t *one = fx_lz4_legacy(file, 0x1800, 0x1000, &a);
    uint8_t *two = fx_lz4_legacy(file + 0x1800, elf.bytes - 0x1800, 0x1000, &b);
    uint8_t *both = malloc(a + b);
    memcpy(both, one, a - 4);
    memcpy(both + a - 4, two, b);
    le32_put(both + a - 4 + b - 4, (uint32_t)elf.bytes);
    struct fx_bzimage bz = fx_bzimage_default(both, a - 4 + b);
    uint8_t *image = fx_bzimage_make(&bz, &bytes);
    struct ram ram = fx_ram(64 * MIB);
    assert_loads(&ram, image, bytes, &entry);
    assert_elf_loaded(&ram, file);
    ram_free(&ram);
    free(image);
    free(both);
    free(two);
    free(one);
    free(file);
}

static void a_kernel_larger_than_memory_names_both_sizes(void **s)
{
    struct err e;
    struct boot_entry entry;
    struct fx_elf elf = fx_elf_default();
    uint8_t *file = fx_elf_make(&elf);
    struct ram ram = fx_ram(16 * MIB);
    assert_true(load(&ram, file, elf.bytes, &entry, &e) < 0);
    assert_int_equal(e.code, ERR_LIMIT);
    assert_non_null(strstr(e.text, "(17 MiB)"));
    assert_non_null(strstr(e.text, "16 MiB of it"));
    ram_free(&ram);
    ram = fx_ram(X86_RAM_MIN_BYTES - RAM_PAGE_BYTES);
    assert_true(load(&ram, file, elf.bytes, &entry, &e) < 0);
    assert_int_equal(e.code, ERR_LIMIT);
    ram_free(&ram);
    ram = fx_ram(X86_RAM_MIN_BYTES);
    elf.segments[0].paddr = elf.entry = BOOT_KERNEL_MIN;
    elf.segments[1].paddr = BOOT_KERNEL_MIN + 0x10000;
    free(file);
    file = fx_elf_make(&elf);
    assert_loads(&ram, file, elf.bytes, &entry);
    ram_free(&ram);
    free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(A1_an_elf_is_loaded_by_its_physical_addresses),
        cmocka_unit_test(A1_an_lz4_bzimage_is_unpacked_into_its_elf),
        cmocka_unit_test(A1_any_other_payload_is_left_to_the_image),
        cmocka_unit_test(A1_what_is_no_kernel_is_refused_by_naming_the_formats),
        cmocka_unit_test(A1_a_kernel_must_be_a_plain_file),
        cmocka_unit_test(a_hostile_elf_is_refused),
        cmocka_unit_test(an_elf_cut_anywhere_is_refused),
        cmocka_unit_test(an_elf_may_touch_both_ends_of_its_memory),
        cmocka_unit_test(a_hostile_bzimage_is_refused),
        cmocka_unit_test(a_bzimage_that_states_no_size_is_as_large_as_its_code),
        cmocka_unit_test(a_bzimage_beyond_the_limit_is_refused),
        cmocka_unit_test(a_bzimage_cut_anywhere_is_refused),
        cmocka_unit_test(a_damaged_lz4_payload_is_refused),
        cmocka_unit_test(frames_may_follow_each_other),
        cmocka_unit_test(a_kernel_larger_than_memory_names_both_sizes),
    };
    return cmocka_run_group_tests_name("boot", tests, NULL, NULL);
}
