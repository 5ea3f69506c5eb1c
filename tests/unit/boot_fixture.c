/*
 * See boot_fixture.h.
 */
#include "tests/unit/boot_fixture.h"

#include <lz4.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

struct fx_elf fx_elf_default(void)
{
    return (struct fx_elf){
        .entry = 0x1000000,
        .phoff = 64,
        .phnum = 2,
        .phentsize = 56,
        .machine = 62,
        .type = 2,
        .class = 2,
        .data = 1,
        .segments = {{0x1000, 0x1000000, 0x2345, 0x2345}, {0x4000, 0x1200000, 0x111, 0x5001}},
        .bytes = 0x5000};
}

uint8_t *fx_elf_make(const struct fx_elf *elf)
{
    uint8_t *f = malloc(elf->bytes);
    for (size_t i = 0; i < elf->bytes; i++)
        f[i] = (uint8_t)(i * 7);
    memset(f, 0, 64 + 3 * 56);
    memcpy(f, "\177ELF", 4);
    f[4] = elf->class;
    f[5] = elf->data;
    f[6] = 1;
    le16_put(f + 16, elf->type);
    le16_put(f + 18, elf->machine);
    le64_put(f + 24, elf->entry);
    le64_put(f + 32, elf->phoff);
    le16_put(f + 54, elf->phentsize);
    le16_put(f + 56, elf->phnum);
    for (unsigned i = 0; i < ARRAY_SIZE(elf->segments); i++) {
        uint8_t *p = f + 64 + i * 56;
        le32_put(p, 1);
        le64_put(p + 8, elf->segments[i].offset);
        le64_put(p + 24, elf->segments[i].paddr);
        le64_put(p + 32, elf->segments[i].filesz);
        le64_put(p + 40, elf->segments[i].memsz);
    }
    return f;
}

struct fx_bzimage fx_bzimage_default(const uint8_t *payload, size_t bytes)
{
    return (struct fx_bzimage){.version = 0x20f,
                               .xloadflags = 0x7f,
                               .loadflags = 1,
                               .setup_sects = 3,
                               .jump = 0x6a,
                               .payload_offset = 0x400,
                               .payload_length = (uint32_t)bytes,
                               .init_size = 0x400000,
                               .alignment = 0x200000,
                               .initrd_max = 0x7fffffff,
                               .cmdline_size = 2047,
                               .pref_address = 0x1000000,
                               .payload = payload,
                               .payload_bytes = bytes};
}

uint8_t *fx_bzimage_make(const struct fx_bzimage *bz, size_t *bytes)
{
    size_t code_at = 4 * 512;
    *bytes = code_at + 0x400 + bz->payload_bytes + 64;
    uint8_t *f = calloc(1, *bytes);
    f[0x1f1] = bz->setup_sects;
    le16_put(f + 0x1fe, 0xaa55);
    f[0x200] = 0xeb;
    f[0x201] = bz->jump;
    memcpy(f + 0x202, "HdrS", 4);
    le16_put(f + 0x206, bz->version);
    f[0x211] = bz->loadflags;
    le32_put(f + 0x22c, bz->initrd_max);
    le32_put(f + 0x230, bz->alignment);
    f[0x234] = 1;
    le16_put(f + 0x236, bz->xloadflags);
    le32_put(f + 0x238, bz->cmdline_size);
    le32_put(f + 0x248, bz->payload_offset);
    le32_put(f + 0x24c, bz->payload_length);
    le64_put(f + 0x250, 0xdead); /* setup_data: must not reach the guest */
    le64_put(f + 0x258, bz->pref_address);
    le32_put(f + 0x260, bz->init_size);
    memset(f + code_at, 0xf4, 0x400);
    memcpy(f + code_at + 0x400, bz->payload, bz->payload_bytes);
    return f;
}

uint8_t *fx_lz4_legacy(const uint8_t *data, size_t bytes, size_t block_bytes, size_t *out_bytes)
{
    size_t blocks = bytes / block_bytes + 1;
    uint8_t *out = malloc(8 + bytes + bytes / 128 + blocks * 64);
    le32_put(out, 0x184c2102);
    size_t n = 4;
    for (size_t at = 0; at < bytes; at += block_bytes) {
        int len = (int)min_u64(block_bytes, bytes - at);
        int packed = LZ4_compress_default((const char *)data + at, (char *)out + n + 4, len,
                                          LZ4_compressBound(len));
        assert_true(packed > 0);
        le32_put(out + n, (uint32_t)packed);
        n += 4 + (size_t)packed;
    }
    le32_put(out + n, (uint32_t)bytes);
    *out_bytes = n + 4;
    return out;
}

int fx_file(const void *data, size_t bytes)
{
    int fd = memfd_create("fixture", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fd_write_full(fd, data, bytes, NULL), 0);
    return fd;
}

struct ram fx_ram(uint64_t bytes)
{
    struct ram ram;
    struct err e = {0};
    if (ram_create(&ram, bytes, X86_HOLE_START, X86_HOLE_END, false, &e) < 0)
        fail_msg("%s", e.text);
    return ram;
}
