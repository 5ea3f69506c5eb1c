/*
 * boot: see boot.h. Loop thread, before any vCPU exists.
 *
 * Order: the kernel first, because its end is the floor of the initrd; then the initrd, because
 * boot_params names its place; then tables that depend on neither.
 */
#include "vmm/arch/x86_64/boot.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

#define PTE_PRESENT_WRITE 0x3ull
#define PDE_HUGE 0x80ull
#define PTES 512u
#define HUGE_BYTES (2ull << 20)
#define GDT_CODE64 0x00af9b000000ffffull /* flat, long mode, read/execute, accessed */
#define GDT_DATA 0x00cf93000000ffffull   /* flat, read/write, accessed */
#define GDT_TSS_BUSY (0x00008b0000000000ull | 0x67u)

#define FORMATS                                                                                    \
    "expected an ELF64 x86-64 vmlinux or a 64-bit bzImage (boot protocol 2.12 or later, any "      \
    "compression)"

typedef unsigned long long ull;

int boot_src_read(const struct boot_src *src, uint64_t off, void *to, size_t len, struct err *e)
{
    if (off > src->bytes || len > src->bytes - off)
        return err_set(e, ERR_BAD_IMAGE, 0, "0x%llx bytes at 0x%llx: the file ends at 0x%llx",
                       (ull)len, (ull)off, (ull)src->bytes);
    if (len == 0)
        return 0;
    if (src->mem == NULL)
        return fd_pread_full(src->fd, to, len, off, e);
    memcpy(to, src->mem + off, len);
    return 0;
}

uint64_t boot_low_end(const struct ram *ram)
{
    return ram->regions[0].start_gpa + ram->regions[0].bytes;
}

int boot_check_fits(const struct ram *ram, uint64_t start, uint64_t end, const char *what,
                    struct err *e)
{
    uint64_t low_end = boot_low_end(ram);
    if (start < BOOT_KERNEL_MIN)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "%s would lie at 0x%llx: below 0x%x are the boot tables", what, (ull)start,
                       BOOT_KERNEL_MIN);
    if (end > low_end)
        return err_set(e, ERR_LIMIT, 0,
                       "%s needs guest memory from 0x%llx to 0x%llx (%llu MiB), and there are %llu "
                       "MiB of it below 4 GiB",
                       what, (ull)start, (ull)end, (ull)((end >> 20) + 1), (ull)(low_end >> 20));
    return 0;
}

/* Opens the file behind the fd for reading by offset: a plain file that is not empty. */
static int src_init(struct boot_src *src, int fd, struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_sys(e, "stat");
    if (!S_ISREG(st.st_mode))
        return err_set(e, ERR_BAD_IMAGE, 0, "not a regular file");
    *src = (struct boot_src){.fd = fd, .bytes = (uint64_t)st.st_size};
    return 0;
}

/* A vmlinux brings no setup header: the little that a 64-bit kernel reads of it. */
static void header_make(struct boot_image *image)
{
    uint8_t *hdr = image->hdr;
    le16_put(hdr + HDR(HDR_BOOT_FLAG), BOOT_FLAG);
    le32_put(hdr + HDR(HDR_MAGIC), BOOT_HDR_MAGIC);
    le16_put(hdr + HDR(HDR_VERSION), 0x020f);
    hdr[HDR(HDR_LOADFLAGS)] = BOOT_LOADED_HIGH;
    le16_put(hdr + HDR(HDR_XLOADFLAGS), BOOT_XLF_KERNEL_64);
    le32_put(hdr + HDR(HDR_CMDLINE_SIZE), BOOT_CMDLINE_SIZE_UNKNOWN);
    le32_put(hdr + HDR(HDR_INITRD_ADDR_MAX), BOOT_INITRD_MAX_UNKNOWN);
    image->cmdline_max = BOOT_CMDLINE_SIZE_UNKNOWN;
    image->initrd_max = BOOT_INITRD_MAX_UNKNOWN;
}

static int kernel_load(const struct ram *ram, const struct boot_spec *spec, struct boot_image *out,
                       struct err *e)
{
    struct boot_src src = {0};
    int rc = src_init(&src, spec->kernel_fd, e);
    if (rc < 0)
        return rc;
    if (src.bytes == 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "file is empty: " FORMATS);
    uint8_t head[HDR_VERSION] = {0};
    rc = boot_src_read(&src, 0, head, min_u64(src.bytes, sizeof head), e);
    if (rc < 0)
        return rc;
    if (memcmp(head, "\177ELF", 4) == 0) {
        rc = boot_elf_load(ram, &src, out, e);
        if (rc == 0)
            header_make(out);
        return rc;
    }
    if (le16_get(head + HDR_BOOT_FLAG) == BOOT_FLAG && le32_get(head + HDR_MAGIC) == BOOT_HDR_MAGIC)
        return boot_bzimage_load(ram, &src, out, e);
    return err_set(e, ERR_BAD_IMAGE, 0, "not a kernel (begins with %02x %02x %02x %02x): " FORMATS,
                   head[0], head[1], head[2], head[3]);
}

/* As high as the kernel and the low region allow, so that it is far from what the kernel grows. */
static int initrd_load(const struct ram *ram, const struct boot_spec *spec,
                       const struct boot_image *image, uint64_t *out_at, uint64_t *out_bytes,
                       struct err *e)
{
    struct boot_src src = {0};
    int rc = src_init(&src, spec->initrd_fd, e);
    if (rc < 0)
        return rc;
    if (src.bytes == 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "file is empty");
    uint64_t floor = align_up_u64(image->end, RAM_PAGE_BYTES);
    uint64_t limit = min_u64(boot_low_end(ram), image->initrd_max + 1);
    uint64_t room = limit > floor ? limit - floor : 0;
    if (align_up_u64(src.bytes, RAM_PAGE_BYTES) > (room & ~(uint64_t)(RAM_PAGE_BYTES - 1)))
        return err_set(
            e, ERR_LIMIT, 0,
            "%llu KiB between the kernel's end at 0x%llx and 0x%llx, %llu KiB are needed",
            (ull)(room >> 10), (ull)image->end, (ull)limit, (ull)((src.bytes + 1023) >> 10));
    uint64_t at = (limit - src.bytes) & ~(uint64_t)(RAM_PAGE_BYTES - 1);
    uint8_t *to = ram_slice(ram, gpa(at), src.bytes);
    if (to == NULL) /* the room was computed from the region; never write on a doubt */
        return err_set(e, ERR_LIMIT, 0, "no guest memory at 0x%llx", (ull)at);
    rc = boot_src_read(&src, 0, to, src.bytes, e);
    if (rc < 0)
        return rc;
    *out_at = at;
    *out_bytes = src.bytes;
    return 0;
}

/* Identity map of the first 4 GiB, flat segments, and the two words Linux reads of the BDA. */
static int cpu_tables_write(const struct ram *ram, struct err *e)
{
    static const uint64_t gdt[BOOT_GDT_ENTRIES] = {
        0, 0, GDT_CODE64, GDT_DATA, GDT_TSS_BUSY | (uint64_t)BOOT_TSS << 16, 0};
    uint64_t pml4[PTES] = {BOOT_PDPT | PTE_PRESENT_WRITE};
    uint64_t pdpt[PTES] = {0}, pd[PTES];
    const uint16_t ebda_segment = BOOT_EBDA >> 4, base_kib = BOOT_EBDA >> 10;
    int rc = 0;
    for (uint64_t i = 0; rc == 0 && i < BOOT_PD_COUNT; i++) {
        uint64_t at = BOOT_PD + i * RAM_PAGE_BYTES;
        pdpt[i] = at | PTE_PRESENT_WRITE;
        for (uint64_t j = 0; j < PTES; j++)
            pd[j] = (i * PTES + j) * HUGE_BYTES | PDE_HUGE | PTE_PRESENT_WRITE;
        rc = ram_write(ram, gpa(at), pd, sizeof pd);
    }
    if (rc == 0)
        rc = ram_write(ram, gpa(BOOT_PDPT), pdpt, sizeof pdpt);
    if (rc == 0)
        rc = ram_write(ram, gpa(BOOT_PML4), pml4, sizeof pml4);
    if (rc == 0)
        rc = ram_write(ram, gpa(BOOT_GDT), gdt, sizeof gdt);
    if (rc == 0)
        rc = ram_write(ram, gpa(BOOT_BDA_EBDA_SEGMENT), &ebda_segment, sizeof ebda_segment);
    if (rc == 0)
        rc = ram_write(ram, gpa(BOOT_BDA_BASE_KIB), &base_kib, sizeof base_kib);
    return rc < 0 ? err_set(e, ERR_USAGE, -rc, "boot page tables") : 0;
}

/*
 * Linux on hardware-reduced ACPI reboots through EFI, and having none, through the BIOS: it goes to
 * real mode and jumps to the reset vector. There it finds the keyboard controller's reset.
 */
static int reset_vector_write(const struct ram *ram, struct err *e)
{
    static const uint8_t code[] = {
        0xb0, X86_RESET_VALUE, /* mov al, value */
        0xe6, X86_RESET_PORT,  /* out port, al */
        0xf4,                  /* hlt */
        0xeb, 0xfd,            /* jmp to the hlt */
    };
    int rc = ram_write(ram, gpa(BOOT_RESET_VECTOR), code, sizeof code);
    return rc < 0 ? err_set(e, ERR_USAGE, -rc, "reset vector") : 0;
}

static int spec_check(const struct ram *ram, const struct boot_spec *spec, struct err *e)
{
    if (spec->cpus == 0 || spec->cpus > X86_CPUS_MAX)
        return err_set(e, ERR_LIMIT, 0, "%u CPUs: expected 1 to %u", spec->cpus, X86_CPUS_MAX);
    if (spec->virtio_count > X86_VIRTIO_SLOTS)
        return err_set(e, ERR_LIMIT, 0, "%u virtio devices: there are %u slots", spec->virtio_count,
                       X86_VIRTIO_SLOTS);
    if (boot_low_end(ram) < X86_RAM_MIN_BYTES)
        return err_set(e, ERR_LIMIT, 0, "guest memory of %llu bytes: expected %llu or more",
                       (ull)ram->bytes, X86_RAM_MIN_BYTES);
    return 0;
}

int boot_load(const struct ram *ram, const struct boot_spec *spec, struct boot_entry *out,
              struct err *e)
{
    struct boot_image image = {0};
    uint64_t initrd_at = 0, initrd_bytes = 0;
    int rc = spec_check(ram, spec, e);
    if (rc < 0)
        return rc;
    rc = kernel_load(ram, spec, &image, e);
    if (rc < 0)
        return err_wrap(e, rc, "kernel %s", spec->kernel_path);
    if (spec->initrd_fd >= 0) {
        rc = initrd_load(ram, spec, &image, &initrd_at, &initrd_bytes, e);
        if (rc < 0)
            return err_wrap(e, rc, "initrd %s", spec->initrd_path);
    }
    rc = boot_params_write(ram, &image, spec, initrd_at, initrd_bytes, e);
    if (rc == 0)
        rc = boot_acpi_write(ram, spec->cpus, spec->virtio_count, e);
    if (rc == 0)
        rc = boot_mptable_write(ram, spec->cpus, e);
    if (rc == 0)
        rc = cpu_tables_write(ram, e);
    if (rc == 0)
        rc = reset_vector_write(ram, e);
    if (rc < 0)
        return rc;
    *out = (struct boot_entry){.rip = image.entry,
                               .rsi = BOOT_ZERO_PAGE,
                               .cr3 = BOOT_PML4,
                               .gdt_base = BOOT_GDT,
                               .gdt_limit = BOOT_GDT_ENTRIES * 8u - 1u,
                               .cs = BOOT_CS,
                               .ds = BOOT_DS,
                               .tss = BOOT_TR};
    return 0;
}
