/*
 * boot_params: the command line and the zero page that a 64-bit Linux kernel is started with. See
 * boot_image.h. Offsets are those of the kernel's Documentation/x86/zero-page.rst.
 */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "vmm/arch/x86_64/boot.h"
#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

#define PARAMS_BYTES 4096u
#define PARAMS_ACPI_RSDP 0x70u
#define PARAMS_EXT_RAMDISK_IMAGE 0xc0u
#define PARAMS_EXT_RAMDISK_SIZE 0xc4u
#define PARAMS_E820_ENTRIES 0x1e8u
#define PARAMS_E820_TABLE 0x2d0u
#define E820_ENTRY_BYTES 20u
#define E820_RAM 1u
#define E820_RESERVED 2u
#define E820_ACPI 3u
#define LOADER_UNDEFINED 0xffu /* type_of_loader of a loader without a number of its own */
#define VID_MODE_NORMAL 0xffffu
/* KVM's identity-map page (at its default place) and its three TSS pages. */
#define KVM_PRIVATE_START (X86_KVM_TSS_BASE - 0x1000u)
#define KVM_PRIVATE_BYTES 0x4000u

#define TOKENS_BYTES (X86_VIRTIO_SLOTS * 48u)

const uint8_t x86_virtio_gsi[X86_VIRTIO_SLOTS] = {5, 6, 7, 10, 11, 12, 14, 15};

/* What the kernel's command line parser takes for a space (its table is Latin-1). */
static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r') || c == '\xa0';
}

/*
 * Finds the "--" that ends the kernel's own options, by the kernel's rules: a double quote, at any
 * place in a word, keeps spaces; quotes around a whole word fall away. Returns its offset, or the
 * text's length if there is none. *open_quote: the text before that ends inside quotes.
 */
static size_t find_dashes(const char *text, bool *open_quote)
{
    size_t i = 0;
    *open_quote = false;
    while (text[i] != '\0') {
        if (is_space(text[i])) {
            i++;
            continue;
        }
        size_t start = i;
        bool quoted = false;
        for (; text[i] != '\0' && (quoted || !is_space(text[i])); i++)
            quoted ^= text[i] == '"';
        size_t bare = start, end = i;
        if (text[start] == '"') {
            bare++;
            if (end > bare && text[end - 1] == '"')
                end--;
        }
        if (end - bare == 2 && memcmp(text + bare, "--", 2) == 0)
            return start;
        *open_quote = quoted;
    }
    return i;
}

int boot_cmdline_build(const char *user, unsigned virtio_count, size_t max, char *buf,
                       size_t buf_bytes, struct err *e)
{
    char tokens[TOKENS_BYTES] = "";
    size_t tokens_len = 0;
    for (unsigned i = 0; i < virtio_count && i < X86_VIRTIO_SLOTS; i++)
        tokens_len += (size_t)snprintf(tokens + tokens_len, sizeof tokens - tokens_len,
                                       "%svirtio_mmio.device=%uK@0x%llx:%u", i == 0 ? "" : " ",
                                       (unsigned)(X86_VIRTIO_STRIDE >> 10),
                                       X86_VIRTIO_BASE + i * X86_VIRTIO_STRIDE, x86_virtio_gsi[i]);
    bool open_quote;
    size_t len = strlen(user), at = find_dashes(user, &open_quote);
    if (open_quote && tokens_len != 0)
        return err_set(e, ERR_USAGE, 0,
                       "kernel command line ends inside a double quote, which would swallow the "
                       "%zu bytes that name the devices",
                       tokens_len);
    const char *before = tokens_len != 0 && at > 0 && !is_space(user[at - 1]) ? " " : "";
    const char *after = tokens_len != 0 && at < len ? " " : "";
    size_t total = len + strlen(before) + tokens_len + strlen(after);
    max = min_u64(max, buf_bytes - 1);
    if (total > max)
        return err_set(e, ERR_LIMIT, 0,
                       "kernel command line of %zu bytes (%zu given, %zu for the devices): this "
                       "kernel takes %zu",
                       total, len, total - len, max);
    (void)snprintf(buf, buf_bytes, "%.*s%s%s%s%s", (int)at, user, before, tokens, after, user + at);
    return 0;
}

static void e820_add(uint8_t *params, uint64_t start, uint64_t end, uint32_t type)
{
    uint8_t n = params[PARAMS_E820_ENTRIES];
    uint8_t *p = params + PARAMS_E820_TABLE + n * E820_ENTRY_BYTES;
    le64_put(p, start);
    le64_put(p + 8, end - start);
    le32_put(p + 16, type);
    params[PARAMS_E820_ENTRIES] = (uint8_t)(n + 1);
}

/*
 * The VGA window and the device window are in no entry: nothing is there that an OS must keep off,
 * and virtio-mmio drivers ask for their addresses as free ones.
 */
static void e820_fill(const struct ram *ram, uint8_t *params)
{
    e820_add(params, 0, BOOT_EBDA, E820_RAM);
    e820_add(params, BOOT_EBDA, BOOT_VGA, E820_RESERVED);
    e820_add(params, BOOT_ACPI, BOOT_ACPI + BOOT_ACPI_BYTES, E820_ACPI);
    e820_add(params, BOOT_BIOS_ROM, BOOT_KERNEL_MIN, E820_RESERVED);
    e820_add(params, BOOT_KERNEL_MIN, boot_low_end(ram), E820_RAM);
    e820_add(params, KVM_PRIVATE_START, KVM_PRIVATE_START + KVM_PRIVATE_BYTES, E820_RESERVED);
    for (unsigned i = 1; i < ram->region_count; i++)
        e820_add(params, ram->regions[i].start_gpa,
                 ram->regions[i].start_gpa + ram->regions[i].bytes, E820_RAM);
}

int boot_params_write(const struct ram *ram, const struct boot_image *image,
                      const struct boot_spec *spec, uint64_t initrd_at, uint64_t initrd_bytes,
                      struct err *e)
{
    char cmdline[BOOT_CMDLINE_BYTES];
    size_t max = image->cmdline_max != 0 ? image->cmdline_max : BOOT_CMDLINE_SIZE_UNKNOWN;
    int rc = boot_cmdline_build(spec->cmdline, spec->virtio_count, max, cmdline, sizeof cmdline, e);
    if (rc < 0)
        return rc;
    uint8_t params[PARAMS_BYTES] = {0};
    uint8_t *hdr = params + BOOT_HDR_START;
    memcpy(hdr, image->hdr, BOOT_HDR_BYTES);
    hdr[HDR(HDR_TYPE_OF_LOADER)] = LOADER_UNDEFINED;
    le16_put(hdr + HDR(HDR_VID_MODE), VID_MODE_NORMAL);
    le32_put(hdr + HDR(HDR_CMD_LINE_PTR), BOOT_CMDLINE);
    le32_put(hdr + HDR(HDR_RAMDISK_IMAGE), (uint32_t)initrd_at);
    le32_put(hdr + HDR(HDR_RAMDISK_SIZE), (uint32_t)initrd_bytes);
    le32_put(params + PARAMS_EXT_RAMDISK_IMAGE, (uint32_t)(initrd_at >> 32));
    le32_put(params + PARAMS_EXT_RAMDISK_SIZE, (uint32_t)(initrd_bytes >> 32));
    le64_put(hdr + HDR(HDR_SETUP_DATA), 0); /* a list of ours; an image has none to give */
    le64_put(params + PARAMS_ACPI_RSDP, BOOT_ACPI);
    e820_fill(ram, params);
    rc = ram_write(ram, gpa(BOOT_ZERO_PAGE), params, sizeof params);
    if (rc == 0)
        rc = ram_write(ram, gpa(BOOT_CMDLINE), cmdline, strlen(cmdline) + 1);
    return rc < 0 ? err_set(e, ERR_USAGE, -rc, "boot parameters") : 0;
}
