/*
 * boot_image: what the kernel loaders (boot_elf.c, boot_bzimage.c) get and give back. Only boot*.c
 * includes this. All of it runs on the loop thread before any vCPU exists.
 *
 * A loader checks every number of the file before it writes the first byte of guest memory, writes
 * only inside [BOOT_KERNEL_MIN, end of the low region), and never trusts a size to allocate by.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct boot_spec;
struct err;
struct ram;

/* Largest bzImage file, and largest kernel a compressed payload may unfold to. */
#define BOOT_BZIMAGE_MAX (256ull << 20)
#define BOOT_UNPACKED_MAX (512ull << 20)

/*
 * The setup header of the Linux boot protocol, kept as it lies in boot_params: byte 0 is offset
 * 0x1f1 there. HDR(off) turns an offset of the protocol's tables into an index.
 */
#define BOOT_HDR_START 0x1f1u
#define BOOT_HDR_END 0x290u /* boot_params has other fields from here on */
#define BOOT_HDR_BYTES (BOOT_HDR_END - BOOT_HDR_START)
#define HDR(off) ((off)-BOOT_HDR_START)

enum boot_hdr_offset {
    HDR_SETUP_SECTS = 0x1f1,
    HDR_VID_MODE = 0x1fa,
    HDR_BOOT_FLAG = 0x1fe,
    HDR_JUMP = 0x200,
    HDR_MAGIC = 0x202,
    HDR_VERSION = 0x206,
    HDR_TYPE_OF_LOADER = 0x210,
    HDR_LOADFLAGS = 0x211,
    HDR_RAMDISK_IMAGE = 0x218,
    HDR_RAMDISK_SIZE = 0x21c,
    HDR_CMD_LINE_PTR = 0x228,
    HDR_INITRD_ADDR_MAX = 0x22c,
    HDR_KERNEL_ALIGNMENT = 0x230,
    HDR_RELOCATABLE = 0x234,
    HDR_XLOADFLAGS = 0x236,
    HDR_CMDLINE_SIZE = 0x238,
    HDR_PAYLOAD_OFFSET = 0x248,
    HDR_PAYLOAD_LENGTH = 0x24c,
    HDR_SETUP_DATA = 0x250,
    HDR_PREF_ADDRESS = 0x258,
    HDR_INIT_SIZE = 0x260,
};
#define BOOT_HDR_MAGIC 0x53726448u /* "HdrS" */
#define BOOT_FLAG 0xaa55u
#define BOOT_LOADED_HIGH 0x01u
#define BOOT_XLF_KERNEL_64 0x01u
#define BOOT_CMDLINE_SIZE_UNKNOWN 2047u
#define BOOT_INITRD_MAX_UNKNOWN 0x7fffffffu /* what every 64-bit kernel's header says */

/* Bytes of a kernel: a file (mem NULL) or what was unpacked from one. */
struct boot_src {
    int fd;
    const uint8_t *mem;
    uint64_t bytes;
};

/* Reads [off, off+len) or fails with ERR_BAD_IMAGE when the source ends before. */
int boot_src_read(const struct boot_src *src, uint64_t off, void *to, size_t len, struct err *e);

struct boot_image {
    uint64_t entry;       /* physical address of the 64-bit entry */
    uint64_t start, end;  /* guest memory the kernel occupies before it can manage memory */
    uint64_t initrd_max;  /* highest address a byte of the initrd may have */
    uint32_t cmdline_max; /* longest command line, without its terminating zero */
    uint8_t hdr[BOOT_HDR_BYTES];
};

/* First address after the low region: no kernel or initrd goes further. */
uint64_t boot_low_end(const struct ram *ram);
/* ERR_LIMIT naming what is needed and what there is, unless [start, end) lies in usable memory. */
int boot_check_fits(const struct ram *ram, uint64_t start, uint64_t end, const char *what,
                    struct err *e);

/* Fills entry, start and end; the rest of *out is the caller's. */
int boot_elf_load(const struct ram *ram, const struct boot_src *src, struct boot_image *out,
                  struct err *e);
int boot_bzimage_load(const struct ram *ram, const struct boot_src *src, struct boot_image *out,
                      struct err *e);

/*
 * The full command line (user text, device tokens, before any "--") into buf, zero-terminated.
 * max: longest text the kernel takes. ERR_LIMIT with both lengths, ERR_USAGE for an open quote.
 */
int boot_cmdline_build(const char *user, unsigned virtio_count, size_t max, char *buf,
                       size_t buf_bytes, struct err *e);
/* boot_params with E820, and the command line. initrd_bytes 0: none. */
int boot_params_write(const struct ram *ram, const struct boot_image *image,
                      const struct boot_spec *spec, uint64_t initrd_at, uint64_t initrd_bytes,
                      struct err *e);
/* MP floating pointer and configuration table into the EBDA (MultiProcessor Specification 1.4). */
int boot_mptable_write(const struct ram *ram, unsigned cpus, struct err *e);
/* RSDP at BOOT_ACPI and the tables behind it. */
int boot_acpi_write(const struct ram *ram, unsigned cpus, unsigned virtio_count, struct err *e);
