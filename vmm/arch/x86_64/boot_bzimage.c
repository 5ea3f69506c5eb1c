/*
 * boot_bzimage: loads a bzImage of boot protocol 2.12 or later. See boot_image.h.
 *
 * An LZ4 payload (legacy framing: magic, then blocks of at most 8 MiB each behind their length; the
 * kernel build appends the unpacked size) is unpacked here and loaded as the ELF it holds, which
 * saves the guest its own decompressor. Any other payload is left to the image: the protected-mode
 * part goes to its preferred address and starts 0x200 bytes into it.
 * Reference: Linux Documentation/x86/boot.rst; lz4 doc/lz4_Frame_format.md, "Legacy frame".
 */
#include <lz4.h>
#include <string.h>
#include <sys/mman.h>

#include "vmm/arch/x86_64/boot_image.h"
#include "vmm/arch/x86_64/boot_layout.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/ram.h"

#define SECTOR_BYTES 512u
#define SETUP_SECTS_DEFAULT 4u /* what 0 means */
#define VERSION_MIN 0x020cu
#define ENTRY_64_OFFSET 0x200u
#define LZ4_LEGACY_MAGIC 0x184c2102u
#define LZ4_LEGACY_BLOCK_MAX (8u << 20)
#define PAYLOAD_TAIL_BYTES 4u /* unpacked size */

typedef unsigned long long ull;

/* Memory that goes back to the host for certain, in huge pages: most of its cost is page faults. */
struct buffer {
    uint8_t *p;
    size_t bytes;
};

static int buffer_init(struct buffer *b, size_t bytes, struct err *e)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return err_sys(e, "map a buffer of %zu bytes", bytes);
    (void)madvise(p, bytes, MADV_HUGEPAGE); /* a host without THP works, only slower */
    *b = (struct buffer){.p = p, .bytes = bytes};
    return 0;
}

static void buffer_free(struct buffer *b)
{
    if (b->p != NULL)
        (void)munmap(b->p, b->bytes);
}
#define CLEANUP_BUFFER __attribute__((cleanup(buffer_free)))

/* What the header says, checked. Offsets are in the file. */
struct bzimage {
    uint64_t code_at; /* of the protected-mode part, which reaches to the end of the file */
    uint64_t code_bytes;
    uint64_t payload_at, payload_bytes;
    uint64_t load_at;   /* where the image wants to run */
    uint64_t init_size; /* linear memory it needs from there on */
};

static int header_read(const struct boot_src *src, uint8_t *hdr, struct err *e)
{
    uint8_t jump[2]; /* a short jump over the header: its distance is where the header ends */
    int rc = boot_src_read(src, HDR_JUMP, jump, sizeof jump, e);
    uint64_t end = min_u64(HDR_MAGIC + jump[1], BOOT_HDR_END);
    if (rc == 0 && end < HDR_INIT_SIZE + 4u)
        return err_set(e, ERR_BAD_IMAGE, 0, "setup header ends at 0x%llx: expected 0x%x or more",
                       (ull)end, HDR_INIT_SIZE + 4u);
    memset(hdr, 0, BOOT_HDR_BYTES);
    if (rc == 0)
        rc = boot_src_read(src, BOOT_HDR_START, hdr, end - BOOT_HDR_START, e);
    return rc < 0 ? err_wrap(e, rc, "bzImage setup header") : 0;
}

static int header_check(const uint8_t *hdr, struct err *e)
{
    uint16_t version = le16_get(hdr + HDR(HDR_VERSION));
    if (version < VERSION_MIN)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "bzImage of boot protocol %u.%02u: expected 2.12 or later", version >> 8,
                       version & 0xffu);
    if ((hdr[HDR(HDR_LOADFLAGS)] & BOOT_LOADED_HIGH) == 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "zImage that loads below 1 MiB: expected a bzImage");
    if ((le16_get(hdr + HDR(HDR_XLOADFLAGS)) & BOOT_XLF_KERNEL_64) == 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "bzImage of a 32-bit kernel: expected a 64-bit one");
    return 0;
}

static int places_parse(const struct boot_src *src, const uint8_t *hdr, struct bzimage *bz,
                        struct err *e)
{
    unsigned sects = hdr[HDR(HDR_SETUP_SECTS)];
    bz->code_at = (uint64_t)((sects != 0 ? sects : SETUP_SECTS_DEFAULT) + 1) * SECTOR_BYTES;
    if (bz->code_at + ENTRY_64_OFFSET >= src->bytes)
        return err_set(e, ERR_BAD_IMAGE, 0, "bzImage ends at 0x%llx, its code begins at 0x%llx",
                       (ull)src->bytes, (ull)bz->code_at);
    bz->code_bytes = src->bytes - bz->code_at;
    uint64_t off = le32_get(hdr + HDR(HDR_PAYLOAD_OFFSET));
    bz->payload_bytes = le32_get(hdr + HDR(HDR_PAYLOAD_LENGTH));
    if (off + bz->payload_bytes > bz->code_bytes) /* both were 32 bits: the sum cannot wrap */
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "bzImage payload of 0x%llx bytes at 0x%llx of 0x%llx bytes of code",
                       (ull)bz->payload_bytes, (ull)off, (ull)bz->code_bytes);
    bz->payload_at = bz->code_at + off;
    uint64_t align = le32_get(hdr + HDR(HDR_KERNEL_ALIGNMENT));
    bz->load_at = le64_get(hdr + HDR(HDR_PREF_ADDRESS));
    bz->init_size = le32_get(hdr + HDR(HDR_INIT_SIZE));
    if (align == 0 || (align & (align - 1)) != 0 || bz->load_at % align != 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "bzImage for address 0x%llx with alignment 0x%llx",
                       (ull)bz->load_at, (ull)align);
    return 0;
}

/* One frame after another until `end`; *out_bytes counts what was written to out[0..cap). */
static int lz4_unpack(const uint8_t *in, uint64_t end, uint8_t *out, uint64_t cap, struct err *e)
{
    uint64_t at = 4, done = 0; /* the caller saw the first magic */
    while (at < end) {
        if (end - at < 4)
            return err_set(e, ERR_BAD_IMAGE, 0, "LZ4 payload: %llu stray bytes at 0x%llx",
                           (ull)(end - at), (ull)at);
        uint32_t packed = le32_get(in + at);
        at += 4;
        if (packed == LZ4_LEGACY_MAGIC) /* another frame begins */
            continue;
        if (packed == 0 || packed > end - at ||
            packed > (uint32_t)LZ4_COMPRESSBOUND(LZ4_LEGACY_BLOCK_MAX))
            return err_set(e, ERR_BAD_IMAGE, 0,
                           "LZ4 payload: block of 0x%x bytes at 0x%llx, 0x%llx are left", packed,
                           (ull)at, (ull)(end - at));
        uint64_t room = min_u64(cap - done, LZ4_LEGACY_BLOCK_MAX);
        int n =
            LZ4_decompress_safe((const char *)in + at, (char *)out + done, (int)packed, (int)room);
        if (n < 0)
            return err_set(e, ERR_BAD_IMAGE, 0,
                           "LZ4 payload: block at 0x%llx is damaged or unfolds to more than the "
                           "0x%llx bytes announced",
                           (ull)at, (ull)cap);
        done += (uint64_t)n;
        at += packed;
    }
    if (done != cap)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "LZ4 payload unfolds to 0x%llx bytes, 0x%llx were announced", (ull)done,
                       (ull)cap);
    return 0;
}

static int lz4_load(const struct ram *ram, const struct boot_src *src, const struct bzimage *bz,
                    struct boot_image *out, struct err *e)
{
    CLEANUP_BUFFER struct buffer packed = {0}, unpacked = {0};
    int rc = buffer_init(&packed, bz->payload_bytes, e);
    if (rc == 0)
        rc = boot_src_read(src, bz->payload_at, packed.p, bz->payload_bytes, e);
    if (rc < 0)
        return err_wrap(e, rc, "bzImage payload");
    uint64_t end = bz->payload_bytes - PAYLOAD_TAIL_BYTES;
    uint64_t unpacked_bytes = le32_get(packed.p + end);
    if (unpacked_bytes == 0 || unpacked_bytes > BOOT_UNPACKED_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0, "LZ4 payload announces %llu bytes: expected 1 to %llu",
                       (ull)unpacked_bytes, BOOT_UNPACKED_MAX);
    rc = buffer_init(&unpacked, unpacked_bytes, e);
    if (rc == 0)
        rc = lz4_unpack(packed.p, end, unpacked.p, unpacked_bytes, e);
    if (rc < 0)
        return rc;
    struct boot_src elf = {.fd = -1, .mem = unpacked.p, .bytes = unpacked_bytes};
    if (unpacked_bytes < 4 || memcmp(unpacked.p, "\177ELF", 4) != 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "LZ4 payload holds no ELF");
    rc = boot_elf_load(ram, &elf, out, e);
    if (rc < 0)
        return err_wrap(e, rc, "kernel in the LZ4 payload");
    /* The ELF ends after its own bss; the image's figure, from the same start, may be higher. */
    uint64_t init_end = out->start + bz->init_size;
    if (init_end > out->end)
        out->end = init_end;
    return boot_check_fits(ram, out->start, out->end, "the kernel with its init_size", e);
}

static int self_load(const struct ram *ram, const struct boot_src *src, const struct bzimage *bz,
                     struct boot_image *out, struct err *e)
{
    uint64_t bytes = bz->init_size > bz->code_bytes ? bz->init_size : bz->code_bytes, end;
    if (!add_u64(bz->load_at, bytes, &end))
        return err_set(e, ERR_BAD_IMAGE, 0, "bzImage for address 0x%llx: the end wraps around",
                       (ull)bz->load_at);
    int rc = boot_check_fits(ram, bz->load_at, end, "the kernel with its init_size", e);
    if (rc < 0)
        return rc;
    uint8_t *to = ram_slice(ram, gpa(bz->load_at), bz->code_bytes);
    if (to == NULL) /* boot_check_fits makes this impossible; never write on a doubt */
        return err_set(e, ERR_BAD_IMAGE, 0, "no guest memory at 0x%llx", (ull)bz->load_at);
    rc = boot_src_read(src, bz->code_at, to, bz->code_bytes, e);
    if (rc < 0)
        return err_wrap(e, rc, "bzImage code");
    out->entry = bz->load_at + ENTRY_64_OFFSET;
    out->start = bz->load_at;
    out->end = end;
    return 0;
}

int boot_bzimage_load(const struct ram *ram, const struct boot_src *src, struct boot_image *out,
                      struct err *e)
{
    struct boot_image image = {0};
    struct bzimage bz = {0};
    if (src->bytes > BOOT_BZIMAGE_MAX)
        return err_set(e, ERR_LIMIT, 0, "bzImage of %llu bytes: %llu are accepted", (ull)src->bytes,
                       BOOT_BZIMAGE_MAX);
    int rc = header_read(src, image.hdr, e);
    if (rc == 0)
        rc = header_check(image.hdr, e);
    if (rc == 0)
        rc = places_parse(src, image.hdr, &bz, e);
    uint8_t magic[4] = {0};
    if (rc == 0 && bz.payload_bytes > sizeof magic + PAYLOAD_TAIL_BYTES)
        rc = boot_src_read(src, bz.payload_at, magic, sizeof magic, e);
    if (rc == 0)
        rc = le32_get(magic) == LZ4_LEGACY_MAGIC ? lz4_load(ram, src, &bz, &image, e)
                                                 : self_load(ram, src, &bz, &image, e);
    if (rc < 0)
        return rc;
    image.initrd_max = le32_get(image.hdr + HDR(HDR_INITRD_ADDR_MAX));
    image.cmdline_max = le32_get(image.hdr + HDR(HDR_CMDLINE_SIZE));
    *out = image;
    return 0;
}
