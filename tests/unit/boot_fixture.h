/*
 * Kernels made by hand for the boot tests: a small ELF64, a bzImage around any payload, and files
 * in memory. Everything a test changes is a field; the defaults make a kernel that loads.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vmm/arch/x86_64/boot.h"
#include "vmm/core/ram.h"

#define MIB (1ull << 20)

struct fx_segment {
    uint64_t offset, paddr, filesz, memsz;
};

struct fx_elf {
    uint64_t entry, phoff;
    uint16_t phnum, phentsize, machine, type;
    uint8_t class, data;
    struct fx_segment segments[3];
    size_t bytes; /* of the file */
};
struct fx_elf fx_elf_default(void);
/* A malloc'd file. Byte i of it, beyond the headers, is i * 7 mod 256. */
uint8_t *fx_elf_make(const struct fx_elf *elf);

struct fx_bzimage {
    uint16_t version, xloadflags;
    uint8_t loadflags, setup_sects, jump;
    uint32_t payload_offset, payload_length, init_size, alignment, initrd_max, cmdline_size;
    uint64_t pref_address;
    const uint8_t *payload;
    size_t payload_bytes;
};
struct fx_bzimage fx_bzimage_default(const uint8_t *payload, size_t bytes);
uint8_t *fx_bzimage_make(const struct fx_bzimage *bz, size_t *bytes);
/* LZ4 legacy frame of blocks of block_bytes each, with the unpacked size behind it. */
uint8_t *fx_lz4_legacy(const uint8_t *data, size_t bytes, size_t block_bytes, size_t *out_bytes);

/* A file in memory with this content; the caller closes it. */
int fx_file(const void *data, size_t bytes);
/* Guest memory around the 32-bit hole. Not reserved: any size works. */
struct ram fx_ram(uint64_t bytes);
