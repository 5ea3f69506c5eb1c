/*
 * Fuzz target of the kernel loaders: any bytes as a kernel file, the same bytes as initrd and, up
 * to the first zero, as command line. Guest memory lies between pages that nobody may touch, so
 * that a write outside it ends the program; a page below 1 MiB that is nobody's must keep its
 * content. Seeds: seeds/kernel (a small ELF, a bzImage with an LZ4 payload, one with a gzip
 * payload).
 */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "vmm/arch/x86_64/boot.h"
#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/ram.h"

#define GUEST_BYTES (4u << 20)
#define GUARD_BYTES (1u << 20)
#define NOBODYS 0x50000u
#define CMDLINE_BYTES 4096u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct ram ram;

static void setup(void)
{
    uint8_t *p =
        mmap(NULL, GUEST_BYTES + 2 * GUARD_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert(p != MAP_FAILED);
    int rc = mprotect(p + GUARD_BYTES, GUEST_BYTES, PROT_READ | PROT_WRITE);
    assert(rc == 0);
    ram = (struct ram){.region_count = 1, .bytes = GUEST_BYTES};
    ram.regions[0] = (struct ram_region){.bytes = GUEST_BYTES, .host = p + GUARD_BYTES};
    memset(ram_slice(&ram, gpa(NOBODYS), RAM_PAGE_BYTES), 0x5a, RAM_PAGE_BYTES);
}

static void check_loaded(const struct boot_entry *entry)
{
    assert(entry->rip >= BOOT_KERNEL_MIN && entry->rip < GUEST_BYTES);
    const uint8_t *params = ram_slice(&ram, gpa(entry->rsi), RAM_PAGE_BYTES);
    assert(params != NULL);
    uint32_t at, bytes;
    memcpy(&at, params + HDR_RAMDISK_IMAGE, sizeof at);
    memcpy(&bytes, params + HDR_RAMDISK_SIZE, sizeof bytes);
    assert(at > BOOT_KERNEL_MIN && at % RAM_PAGE_BYTES == 0 && at + bytes <= GUEST_BYTES);
}

static void check_cmdline(const uint8_t *data, size_t size)
{
    char user[CMDLINE_BYTES], line[CMDLINE_BYTES];
    size_t len = size < sizeof user - 1 ? size : sizeof user - 1;
    memcpy(user, data, len);
    user[len] = '\0';
    struct err e = {0};
    if (boot_cmdline_build(user, X86_VIRTIO_SLOTS, 2047, line, sizeof line, &e) < 0)
        assert(e.text[0] != '\0');
    else
        assert(strlen(line) <= 2047 && strstr(line, "virtio_mmio.device=4K@0xd0000000:5") != NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1; /* one file for all runs: making one costs more than the run */
    if (fd < 0) {
        setup();
        fd = memfd_create("kernel", MFD_CLOEXEC);
        assert(fd >= 0);
    }
    int rc = ftruncate(fd, (off_t)size);
    assert(rc == 0);
    rc = fd_pwrite_full(fd, data, size, 0, NULL);
    assert(rc == 0);
    struct boot_spec spec = {.kernel_fd = fd,
                             .kernel_path = "kernel",
                             .initrd_fd = fd,
                             .initrd_path = "initrd",
                             .cmdline = "quiet -- x",
                             .cpus = 1 + (unsigned)size % X86_CPUS_MAX,
                             .virtio_count = (unsigned)size % (X86_VIRTIO_SLOTS + 1)};
    struct boot_entry entry;
    struct err e = {0};
    if (boot_load(&ram, &spec, &entry, &e) < 0)
        assert(e.code != ERR_NONE && e.text[0] != '\0');
    else
        check_loaded(&entry);
    const uint8_t *nobodys = ram_slice(&ram, gpa(NOBODYS), RAM_PAGE_BYTES);
    for (size_t i = 0; i < RAM_PAGE_BYTES; i++)
        assert(nobodys[i] == 0x5a);
    check_cmdline(data, size);
    return 0;
}
