/*
 * boot_layout: where everything that boot_load writes lies in guest memory.
 *
 *   0x00000400  BIOS data area: two words only, where the EBDA is and how much base memory there is
 *   0x00001000  GDT                                   (one page)
 *   0x00002000  TSS of the boot CPU, all zero         (one page)
 *   0x00007000  boot_params, the "zero page"          (one page)
 *   0x00009000  PML4, PDPT, then four PDs             (six pages)
 *   0x00020000  command line                          (64 KiB)
 *   0x0009fc00  EBDA: MP floating pointer and table   (1 KiB, reserved in E820)
 *   0x000e0000  ACPI: RSDP first, then the tables     (64 KiB, ACPI data in E820)
 *   0x000f0000  BIOS ROM area: only a reset vector    (64 KiB, reserved in E820)
 *   0x00100000  first byte a kernel may use; the initrd lies as high as it can
 *
 * What is below the EBDA is plain RAM in E820: Linux copies what it needs out of it and then reuses
 * it. A kernel segment below 1 MiB is refused, so nothing here can be overwritten by an image.
 */
#pragma once

#define BOOT_BDA_EBDA_SEGMENT 0x40eu /* 16-bit: address of the EBDA >> 4 */
#define BOOT_BDA_BASE_KIB 0x413u     /* 16-bit: base memory in KiB */
#define BOOT_GDT 0x1000u
#define BOOT_TSS 0x2000u
#define BOOT_ZERO_PAGE 0x7000u
#define BOOT_PML4 0x9000u
#define BOOT_PDPT 0xa000u
#define BOOT_PD 0xb000u
#define BOOT_PD_COUNT 4u /* each maps 1 GiB by 2 MiB pages */
#define BOOT_CMDLINE 0x20000u
#define BOOT_CMDLINE_BYTES 0x10000u
#define BOOT_EBDA 0x9fc00u
#define BOOT_EBDA_BYTES 0x400u
#define BOOT_VGA 0xa0000u
#define BOOT_ACPI 0xe0000u
#define BOOT_ACPI_BYTES 0x10000u
#define BOOT_BIOS_ROM 0xf0000u
#define BOOT_RESET_VECTOR                                                                          \
    0xffff0u /* real-mode f000:fff0, where "reboot through the BIOS" jumps                         \
              */
#define BOOT_KERNEL_MIN 0x100000u

/* Selectors: 0x10 and 0x18 are what the Linux boot protocol asks for (__BOOT_CS, __BOOT_DS). */
#define BOOT_CS 0x10u
#define BOOT_DS 0x18u
#define BOOT_TR 0x20u
#define BOOT_GDT_ENTRIES 6u /* null, null, code, data, TSS (two slots) */

_Static_assert(BOOT_PD + BOOT_PD_COUNT * 0x1000u <= BOOT_CMDLINE, "page tables end at the text");
_Static_assert(BOOT_CMDLINE + BOOT_CMDLINE_BYTES <= 0x80000u, "all of it stays below 512 KiB");
