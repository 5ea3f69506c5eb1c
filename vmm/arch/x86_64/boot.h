/*
 * boot: puts a kernel, an initrd, a command line and firmware tables into guest memory.
 *
 * Formats are told apart by content, never by name:
 *   - ELF64 vmlinux (PVH note not needed: Linux/x86 boot protocol, 64-bit entry with boot_params),
 *   - bzImage (boot protocol >= 2.12): an LZ4 payload in the legacy framing is unpacked here and
 *     loaded as the ELF it is; any other payload starts at the image's own 64-bit entry (+0x200).
 * Everything else is refused with the formats that are accepted (ERR_BAD_IMAGE). Files are hostile:
 * no header field leads to a write outside guest memory.
 *
 * Also written: boot_params (E820, initrd, command line), RSDP/XSDT/FADT/MADT/DSDT with the
 * virtio-mmio devices as LNRO0005, an MP table, page tables and GDT for the 64-bit entry.
 * Command line: user text, then our tokens (virtio_mmio.device=SIZE@BASE:GSI per device), placed
 * before any "--"; the total must fit the kernel's cmdline_size (2047 when unknown), else ERR_LIMIT
 * with both lengths. Runs on the loop thread before any vCPU exists.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "vmm/arch/boot_spec.h"

struct err;
struct ram;

/* Guest-physical layout, shared by tables, buses and tests. */
#define X86_HOLE_START 0xc0000000ull /* [3 GiB, 4 GiB) is never RAM */
#define X86_HOLE_END 0x100000000ull
#define X86_VIRTIO_BASE 0xd0000000ull
#define X86_VIRTIO_STRIDE 0x1000ull
#define X86_VIRTIO_SLOTS 8
#define X86_IOAPIC_BASE 0xfec00000ull
#define X86_LAPIC_BASE 0xfee00000ull
#define X86_KVM_TSS_BASE 0xfffbd000ull
#define X86_CPUS_MAX 16
/* Ports that the firmware tables name and the VMM answers. */
#define X86_COM1_PORT 0x3f8u
#define X86_COM1_GSI 4u
#define X86_RESET_PORT 0x64u /* i8042 command port: X86_RESET_VALUE written there is a reset */
#define X86_RESET_VALUE 0xfeu
/* ACPI 6.4, 4.8.3.7: (S5 << 2 | SLP_EN) written as one byte to the control port is power-off. */
#define X86_SLEEP_CONTROL_PORT 0x604u
#define X86_SLEEP_STATUS_PORT 0x605u
#define X86_SLEEP_EN 0x20u
#define X86_ACPI_S5 5u
#define X86_RAM_MIN_BYTES (2ull << 20) /* the tables' first MiB and something to run */
/* GSI of virtio slot i: ISA pins that nothing else uses (cmdline devices are always ISA-like). */
extern const uint8_t x86_virtio_gsi[X86_VIRTIO_SLOTS]; /* 5 6 7 10 11 12 14 15 */

/*
 * On failure *out is untouched; guest memory may hold part of a kernel and must not be run.
 * Needs no VM: call it before one is made, so that a bad file is refused first.
 */
int boot_load(const struct ram *ram, const struct boot_spec *spec, struct boot_entry *out,
              struct err *e);
