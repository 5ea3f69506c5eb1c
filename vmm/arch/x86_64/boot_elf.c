/*
 * boot_elf: loads an ELF64 vmlinux by its physical addresses. See boot_image.h.
 *
 * Two passes over the program headers: everything is checked before anything is written.
 */
#include <stdbool.h>
#include <string.h>

#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

#define EHDR_BYTES 64u
#define PHDR_BYTES 56u
#define PHDRS_MAX 64u
#define CLASS_64 2
#define DATA_LE 1
#define TYPE_EXEC 2
#define TYPE_DYN 3
#define MACHINE_X86_64 62
#define PT_LOAD 1u

typedef unsigned long long ull;

struct segment {
    uint64_t offset, paddr, filesz, memsz;
};

struct elf {
    uint64_t entry, phoff;
    unsigned phnum;
    unsigned count; /* of segments to load */
    struct segment segments[PHDRS_MAX];
};

static int ehdr_parse(const struct boot_src *src, struct elf *elf, struct err *e)
{
    uint8_t h[EHDR_BYTES];
    int rc = boot_src_read(src, 0, h, sizeof h, e);
    if (rc < 0)
        return err_wrap(e, rc, "ELF header");
    if (h[4] != CLASS_64 || h[5] != DATA_LE)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "ELF of class %u, byte order %u: expected a 64-bit little-endian vmlinux",
                       h[4], h[5]);
    uint16_t type = le16_get(h + 16), machine = le16_get(h + 18);
    if (machine != MACHINE_X86_64)
        return err_set(e, ERR_BAD_IMAGE, 0, "ELF for machine %u: expected x86-64 (%u)", machine,
                       MACHINE_X86_64);
    if (type != TYPE_EXEC && type != TYPE_DYN)
        return err_set(e, ERR_BAD_IMAGE, 0, "ELF of type %u: expected an executable vmlinux", type);
    elf->entry = le64_get(h + 24);
    elf->phoff = le64_get(h + 32);
    uint16_t phentsize = le16_get(h + 54);
    elf->phnum = le16_get(h + 56);
    if (phentsize != PHDR_BYTES || elf->phnum == 0 || elf->phnum > PHDRS_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "ELF with %u program headers of %u bytes: expected 1 to %u of %u",
                       elf->phnum, phentsize, PHDRS_MAX, PHDR_BYTES);
    return 0;
}

static int segment_check(const struct ram *ram, const struct boot_src *src, const struct elf *elf,
                         const struct segment *s, struct err *e)
{
    uint64_t file_end, mem_end;
    if (s->filesz > s->memsz)
        return err_set(e, ERR_BAD_IMAGE, 0, "0x%llx bytes in the file, only 0x%llx in memory",
                       (ull)s->filesz, (ull)s->memsz);
    if (!add_u64(s->offset, s->filesz, &file_end) || file_end > src->bytes)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "0x%llx bytes at offset 0x%llx of a file of 0x%llx bytes", (ull)s->filesz,
                       (ull)s->offset, (ull)src->bytes);
    if (!add_u64(s->paddr, s->memsz, &mem_end))
        return err_set(e, ERR_BAD_IMAGE, 0, "0x%llx bytes at address 0x%llx wrap around",
                       (ull)s->memsz, (ull)s->paddr);
    int rc = boot_check_fits(ram, s->paddr, mem_end, "it", e);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < elf->count; i++) {
        const struct segment *o = &elf->segments[i];
        if (s->paddr < o->paddr + o->memsz && o->paddr < mem_end)
            return err_set(e, ERR_BAD_IMAGE, 0, "overlaps another segment at 0x%llx",
                           (ull)o->paddr);
    }
    return 0;
}

static int segments_parse(const struct ram *ram, const struct boot_src *src, struct elf *elf,
                          struct err *e)
{
    bool entry_inside = false;
    for (unsigned i = 0; i < elf->phnum; i++) {
        uint64_t at;
        uint8_t p[PHDR_BYTES];
        if (!add_u64(elf->phoff, (uint64_t)i * PHDR_BYTES, &at))
            return err_set(e, ERR_BAD_IMAGE, 0, "program headers at 0x%llx", (ull)elf->phoff);
        int rc = boot_src_read(src, at, p, sizeof p, e);
        if (rc < 0)
            return err_wrap(e, rc, "program header %u", i);
        struct segment s = {.offset = le64_get(p + 8),
                            .paddr = le64_get(p + 24),
                            .filesz = le64_get(p + 32),
                            .memsz = le64_get(p + 40)};
        if (le32_get(p) != PT_LOAD || s.memsz == 0)
            continue;
        rc = segment_check(ram, src, elf, &s, e);
        if (rc < 0)
            return err_wrap(e, rc, "segment %u", i);
        entry_inside |= elf->entry >= s.paddr && elf->entry - s.paddr < s.memsz;
        elf->segments[elf->count++] = s;
    }
    if (!entry_inside)
        return err_set(e, ERR_BAD_IMAGE, 0, "entry 0x%llx lies in none of %u loaded segments",
                       (ull)elf->entry, elf->count);
    return 0;
}

static int segment_load(const struct ram *ram, const struct boot_src *src, const struct segment *s,
                        struct err *e)
{
    uint8_t *to = ram_slice(ram, gpa(s->paddr), s->memsz);
    if (to == NULL) /* segment_check makes this impossible; never write on a doubt */
        return err_set(e, ERR_BAD_IMAGE, 0, "no guest memory at 0x%llx", (ull)s->paddr);
    int rc = boot_src_read(src, s->offset, to, s->filesz, e);
    if (rc < 0)
        return err_wrap(e, rc, "segment at 0x%llx", (ull)s->paddr);
    memset(to + s->filesz, 0, s->memsz - s->filesz);
    return 0;
}

int boot_elf_load(const struct ram *ram, const struct boot_src *src, struct boot_image *out,
                  struct err *e)
{
    struct elf elf = {0};
    int rc = ehdr_parse(src, &elf, e);
    if (rc == 0)
        rc = segments_parse(ram, src, &elf, e);
    uint64_t start = UINT64_MAX, end = 0;
    for (unsigned i = 0; rc == 0 && i < elf.count; i++) {
        const struct segment *s = &elf.segments[i];
        rc = segment_load(ram, src, s, e);
        start = min_u64(start, s->paddr);
        if (s->paddr + s->memsz > end)
            end = s->paddr + s->memsz;
    }
    if (rc < 0)
        return rc;
    out->entry = elf.entry;
    out->start = start;
    out->end = end;
    return 0;
}
