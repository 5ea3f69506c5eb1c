/*
 * virtio-blk through the mmio transport, against a driver that behaves and one that does not
 * (cases B2, B3, C1, C2, C3, C5), down to the files.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "devices/blk.h"
#include "devices/disk.h"
#include "devices/disk_layers.h"
#include "tests/unit/guest_driver.h"
#include "vmm/core/err.h"
#include "vmm/core/loop.h"
#include "vmm/core/state.h"

#define T_IN 0u
#define T_OUT 1u
#define T_FLUSH 4u
#define T_GET_ID 8u
#define T_DISCARD 11u
#define T_WRITE_ZEROES 13u
#define S_OK 0
#define S_IOERR 1
#define S_UNSUPP 2
#define S_NONE 0xee /* nothing was written */

#define HEADER (RING_DATA)
#define STATUS (RING_DATA + 0x800)
#define BUFFER (RING_DATA + 0x1000)

#define DISK_BYTES (1u << 20)

struct fixture {
    struct guest_ring g;
    struct loop loop;
    struct virtio_device *dev;
    struct virtio_mmio mmio;
    int base_fd; /* ours */
    unsigned irqs;
    uint8_t *model; /* what the disk should hold */
    struct err e;
};

static struct disk *open_disk(struct fixture *f, uint64_t bytes, bool read_only, uint64_t cap)
{
    f->base_fd = memfd_create("base", MFD_CLOEXEC);
    assert_true(f->base_fd >= 0);
    free(f->model);
    f->model = malloc(bytes + 1);
    for (uint64_t i = 0; i < bytes; i++)
        f->model[i] = (uint8_t)(i / 512 * 7 + i);
    assert_int_equal(pwrite(f->base_fd, f->model, bytes, 0), bytes);
    struct disk *d = NULL;
    struct disk_spec spec = {.path = "base.img",
                             .fd = dup(f->base_fd),
                             .read_only = read_only,
                             .overlay_max_bytes = cap};
    if (disk_open(&d, &spec, &f->e) != 0)
        fail_msg("%s", f->e.text);
    return d;
}

static void attach(struct fixture *f, struct disk *d)
{
    assert_int_equal(blk_create(&f->dev, 0, d, &f->g.ram, &f->loop, &f->e), 0);
    f->dev->irq = (struct irq_line){.raise = irq_count, .ctx = &f->irqs, .gsi = 5};
    virtio_mmio_init(&f->mmio, f->dev, &f->loop);
    f->dev->ops->resume(f->dev);
}

static void start(struct fixture *f)
{
    assert_true(
        (driver_start(&f->mmio, &f->g, driver_offered(&f->mmio)) & VIRTIO_STATUS_DRIVER_OK) != 0);
}

static int setup_with(void **s, uint64_t bytes, bool read_only, uint64_t cap)
{
    struct fixture *f = calloc(1, sizeof *f);
    ring_init(&f->g, 256);
    assert_int_equal(loop_init(&f->loop, &f->e), 0);
    attach(f, open_disk(f, bytes, read_only, cap));
    start(f);
    *s = f;
    return 0;
}

static int setup(void **s)
{
    return setup_with(s, DISK_BYTES, false, 0);
}

static int setup_read_only(void **s)
{
    return setup_with(s, DISK_BYTES, true, 0);
}

static int setup_small_cap(void **s)
{
    return setup_with(s, DISK_BYTES, false, 4 * DISK_BLOCK_BYTES);
}

static int teardown(void **s)
{
    struct fixture *f = *s;
    f->dev->ops->free(f->dev);
    loop_close(&f->loop);
    ring_free(&f->g);
    close(f->base_fd);
    free(f->model);
    free(f);
    return 0;
}

/* ---- requests ---- */

static void put_header(struct fixture *f, uint64_t at, uint32_t type, uint64_t sector)
{
    uint8_t h[16] = {0};
    le32_put(h, type);
    le64_put(h + 8, sector);
    ring_put(&f->g, at, h, sizeof h);
}

static uint8_t *guest_bytes(struct fixture *f, uint64_t at, uint64_t len)
{
    uint8_t *p = ram_slice(&f->g.ram, gpa(at), len);
    assert_non_null(p);
    return p;
}

/* Runs the loop until `n` requests came back; every one must come. */
static void wait_used(struct fixture *f, unsigned n)
{
    for (unsigned i = 0; i < n;) {
        uint32_t id = 0, len = 0;
        if (ring_used(&f->g, &id, &len)) {
            i++;
            continue;
        }
        assert_int_equal(loop_round(&f->loop, 5000, &f->e), 0);
    }
}

/* One request of up to three descriptors: header, data, status. Returns the status byte. */
static int request(struct fixture *f, uint32_t type, uint64_t sector, uint64_t data, uint32_t len,
                   bool device_writes)
{
    uint8_t none = S_NONE;
    put_header(f, HEADER, type, sector);
    ring_put(&f->g, STATUS, &none, 1);
    ring_desc(&f->g, 0, HEADER, 16, D_NEXT, len > 0 ? 1 : 2);
    ring_desc(&f->g, 1, data, len, D_NEXT | (device_writes ? D_WRITE : 0), 2);
    ring_desc(&f->g, 2, STATUS, 1, D_WRITE, 0);
    ring_offer(&f->g, 0);
    driver_notify(&f->mmio, 0);
    wait_used(f, 1);
    return *guest_bytes(f, STATUS, 1);
}

static int do_read(struct fixture *f, uint64_t sector, uint32_t sectors)
{
    memset(guest_bytes(f, BUFFER, sectors * 512), 0x55, sectors * 512);
    return request(f, T_IN, sector, BUFFER, sectors * 512, true);
}

static int do_write(struct fixture *f, uint64_t sector, uint32_t sectors, uint8_t seed)
{
    uint8_t *p = guest_bytes(f, BUFFER, sectors * 512);
    for (uint32_t i = 0; i < sectors * 512; i++)
        p[i] = (uint8_t)(seed + i * 3);
    int status = request(f, T_OUT, sector, BUFFER, sectors * 512, false);
    if (status == S_OK)
        memcpy(f->model + sector * 512, p, sectors * 512);
    return status;
}

static int do_range(struct fixture *f, uint32_t type, uint64_t sector, uint32_t sectors,
                    uint32_t flags)
{
    uint8_t raw[16];
    le64_put(raw, sector);
    le32_put(raw + 8, sectors);
    le32_put(raw + 12, flags);
    ring_put(&f->g, BUFFER, raw, sizeof raw);
    return request(f, type, 0, BUFFER, sizeof raw, false);
}

static void check_range(struct fixture *f, uint64_t sector, uint32_t sectors)
{
    assert_int_equal(do_read(f, sector, sectors), S_OK);
    assert_memory_equal(guest_bytes(f, BUFFER, sectors * 512), f->model + sector * 512,
                        sectors * 512);
}

static void check_all(struct fixture *f)
{
    uint64_t sectors = disk_sectors(blk_disk(f->dev));
    for (uint64_t s = 0; s < sectors; s += 256)
        check_range(f, s, (uint32_t)min_u64(256, sectors - s));
}

/* ---- tests ---- */

static void reads_the_base(void **s)
{
    struct fixture *f = *s;
    check_range(f, 0, 1);
    check_range(f, 7, 2);
    check_range(f, 2047, 1);
    check_all(f);
    assert_true(f->irqs > 0);
    assert_int_equal(reg_read(&f->mmio, 0x60), VIRTIO_INT_USED);
    reg_write(&f->mmio, 0x64, VIRTIO_INT_USED);
    assert_int_equal(reg_read(&f->mmio, 0x60), 0);
}

static void the_base_is_never_written(void **s)
{
    struct fixture *f = *s;
    uint8_t *before = malloc(DISK_BYTES), *after = malloc(DISK_BYTES);
    assert_int_equal(pread(f->base_fd, before, DISK_BYTES, 0), DISK_BYTES);
    assert_int_equal(do_write(f, 0, 16, 1), S_OK);
    assert_int_equal(do_write(f, 3, 2, 2), S_OK);
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 100, 100, 0), S_OK);
    assert_int_equal(pread(f->base_fd, after, DISK_BYTES, 0), DISK_BYTES);
    assert_memory_equal(before, after, DISK_BYTES);
    free(before);
    free(after);
}

static void random_operations_match_a_model(void **s)
{
    struct fixture *f = *s;
    srand(7);
    for (unsigned i = 0; i < 3000; i++) {
        uint32_t sectors = (uint32_t)rand() % 40 + 1;
        uint64_t sector = (uint64_t)rand() % (DISK_BYTES / 512 - sectors);
        switch (rand() % 8) {
        case 0:
            assert_int_equal(do_range(f, T_WRITE_ZEROES, sector, sectors, (uint32_t)rand() % 2),
                             S_OK);
            memset(f->model + sector * 512, 0, sectors * 512);
            break;
        case 1: { /* a discard makes zeros of whole blocks and leaves the rest */
            assert_int_equal(do_range(f, T_DISCARD, sector, sectors, 0), S_OK);
            uint64_t a = align_up_u64(sector * 512, 4096);
            uint64_t b = (sector + sectors) * 512 / 4096 * 4096;
            if (a < b)
                memset(f->model + a, 0, b - a);
            break;
        }
        case 2:
        case 3:
        case 4:
            assert_int_equal(do_write(f, sector, sectors, (uint8_t)i), S_OK);
            break;
        case 5:
            assert_int_equal(request(f, T_FLUSH, 0, 0, 0, false), S_OK);
            break;
        default:
            check_range(f, sector, sectors);
            break;
        }
        if (i % 500 == 499) { /* a fork's worth of layers */
            struct disk *d = blk_disk(f->dev);
            assert_int_equal(f->dev->ops->quiesce(f->dev, &f->e), 0);
            assert_int_equal(disk_freeze(d, &f->e), 0);
            assert_int_equal(disk_push(d, &f->e), 0);
            f->dev->ops->resume(f->dev);
        }
    }
    check_all(f);
}

/* Two writes of different sectors of one block that is not in the overlay yet, at the same time. */
static void neighbours_in_one_block_keep_each_others_bytes(void **s)
{
    struct fixture *f = *s;
    for (unsigned i = 0; i < 8; i++) {
        uint64_t base = RING_DATA + 0x2000 + i * 0x1000;
        put_header(f, base, T_OUT, 80 + i);
        memset(guest_bytes(f, base + 512, 512), (int)(0xa0 + i), 512);
        memset(f->model + (80 + i) * 512, (int)(0xa0 + i), 512);
        ring_desc(&f->g, i * 3, base, 16, D_NEXT, (uint16_t)(i * 3 + 1));
        ring_desc(&f->g, i * 3 + 1, base + 512, 512, D_NEXT, (uint16_t)(i * 3 + 2));
        ring_desc(&f->g, i * 3 + 2, base + 2048, 1, D_WRITE, 0);
        ring_offer(&f->g, (uint16_t)(i * 3));
    }
    driver_notify(&f->mmio, 0);
    wait_used(f, 8);
    for (unsigned i = 0; i < 8; i++)
        assert_int_equal(*guest_bytes(f, RING_DATA + 0x2000 + i * 0x1000 + 2048, 1), S_OK);
    check_range(f, 72, 24);
}

static void many_segments_of_odd_size_are_gathered(void **s)
{
    struct fixture *f = *s;
    put_header(f, HEADER, T_IN, 5);
    ring_desc(&f->g, 0, HEADER, 7, D_NEXT, 1); /* the header in two pieces */
    ring_desc(&f->g, 1, HEADER + 7, 9, D_NEXT, 2);
    unsigned d = 2;
    for (uint32_t done = 0; done < 1024; d++) {
        uint32_t n = min_u64(d * 3, 1024 - done) & 0xffffffff;
        ring_desc(&f->g, d, BUFFER + done, n, D_NEXT | D_WRITE, (uint16_t)(d + 1));
        done += n;
    }
    ring_desc(&f->g, d, STATUS, 1, D_WRITE, 0);
    ring_offer(&f->g, 0);
    driver_notify(&f->mmio, 0);
    wait_used(f, 1);
    assert_int_equal(*guest_bytes(f, STATUS, 1), S_OK);
    assert_memory_equal(guest_bytes(f, BUFFER, 1024), f->model + 5 * 512, 1024);
}

static void the_status_is_the_last_writable_byte(void **s)
{
    struct fixture *f = *s;
    put_header(f, HEADER, T_IN, 9);
    ring_desc(&f->g, 0, HEADER, 16, D_NEXT, 1);
    ring_desc(&f->g, 1, BUFFER, 513, D_WRITE, 0); /* data and status in one descriptor */
    *guest_bytes(f, BUFFER + 512, 1) = S_NONE;
    ring_offer(&f->g, 0);
    driver_notify(&f->mmio, 0);
    uint32_t id = 0, len = 0;
    while (!ring_used(&f->g, &id, &len))
        assert_int_equal(loop_round(&f->loop, 5000, &f->e), 0);
    assert_int_equal(len, 513);
    assert_int_equal(*guest_bytes(f, BUFFER + 512, 1), S_OK);
    assert_memory_equal(guest_bytes(f, BUFFER, 512), f->model + 9 * 512, 512);
}

static void C5_ranges_past_the_end_are_errors(void **s)
{
    struct fixture *f = *s;
    uint64_t last = DISK_BYTES / 512 - 1;
    static const uint64_t far[] = {UINT64_MAX, UINT64_MAX / 512, UINT64_MAX - 1, 1ull << 55};
    for (unsigned i = 0; i < ARRAY_SIZE(far); i++) {
        assert_int_equal(do_read(f, far[i], 1), S_IOERR);
        assert_int_equal(request(f, T_OUT, far[i], BUFFER, 512, false), S_IOERR);
        assert_int_equal(do_range(f, T_DISCARD, far[i], 8, 0), S_IOERR);
        assert_int_equal(do_range(f, T_WRITE_ZEROES, far[i], 8, 0), S_IOERR);
    }
    assert_int_equal(do_read(f, last, 2), S_IOERR);
    assert_int_equal(request(f, T_OUT, last, BUFFER, 1024, false), S_IOERR);
    assert_int_equal(do_range(f, T_DISCARD, last, 2, 0), S_IOERR);
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 0, UINT32_MAX, 0), S_IOERR);
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 1, BLK_DISCARD_SECTORS_MAX + 1, 0), S_IOERR);
    assert_int_equal(request(f, T_IN, 0, BUFFER, 511, true), S_IOERR);
    assert_int_equal(request(f, T_OUT, 0, BUFFER, 513, false), S_IOERR);
    check_all(f);
    struct stat st;
    assert_int_equal(fstat(f->base_fd, &st), 0);
    assert_int_equal(st.st_size, DISK_BYTES);
    assert_int_equal(disk_overlay_bytes(blk_disk(f->dev)), 0);
}

static void C1_zeroes_read_back_and_limits_are_not_zero(void **s)
{
    struct fixture *f = *s;
    uint32_t limits[5];
    for (unsigned i = 0; i < 5; i++)
        virtio_mmio_bus_ops.read(&f->mmio, 0x100 + 36 + 4 * i, &limits[i], 4);
    for (unsigned i = 0; i < 5; i++)
        assert_true(limits[i] > 0);
    assert_int_equal(do_write(f, 64, 64, 9), S_OK);
    uint64_t held = disk_overlay_bytes(blk_disk(f->dev));
    assert_int_equal(held, 64 * 512);
    assert_int_equal(do_range(f, T_DISCARD, 64, 64, 0), S_OK);
    memset(f->model + 64 * 512, 0, 64 * 512);
    check_all(f);
    assert_int_equal(disk_overlay_bytes(blk_disk(f->dev)), 0); /* the room was given back */
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 3, 1, 0), S_OK);
    memset(f->model + 3 * 512, 0, 512);
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 203, 17, 1), S_OK);
    memset(f->model + 203 * 512, 0, 17 * 512);
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 0, 0, 0), S_OK);
    check_all(f);
}

static void C1_unknown_requests_are_unsupported(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(request(f, 99, 0, BUFFER, 512, true), S_UNSUPP);
    assert_int_equal(request(f, 99, 0, 0, 0, false), S_UNSUPP);
    assert_int_equal(request(f, UINT32_MAX, 0, BUFFER, 512, false), S_UNSUPP);
    assert_int_equal(do_range(f, T_DISCARD, 0, 8, 1), S_UNSUPP);
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 0, 8, 2), S_UNSUPP);
    assert_int_equal(request(f, T_DISCARD, 0, BUFFER, 32, false), S_IOERR); /* two ranges */
    assert_int_equal(request(f, T_DISCARD, 0, BUFFER, 15, false), S_IOERR);
    assert_int_equal(request(f, T_DISCARD, 0, 0, 0, false), S_IOERR);
    check_all(f);
}

static void C2_a_failed_sync_is_an_error(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(request(f, T_FLUSH, 0, 0, 0, false), S_OK);
    assert_int_equal(do_write(f, 0, 8, 1), S_OK);
    assert_int_equal(request(f, T_FLUSH, 0, 0, 0, false), S_OK);
    /* A file that cannot be synced takes the overlay's place. */
    struct disk *d = blk_disk(f->dev);
    int real = d->layers[d->top].fd;
    d->layers[d->top].fd = eventfd(0, EFD_CLOEXEC);
    d->generation++;
    assert_int_equal(request(f, T_FLUSH, 0, 0, 0, false), S_IOERR);
    close(d->layers[d->top].fd);
    d->layers[d->top].fd = real;
    d->generation++;
    assert_int_equal(request(f, T_FLUSH, 0, 0, 0, false), S_OK);
    check_all(f);
}

static void read_only_is_kept_by_the_host(void **s)
{
    struct fixture *f = *s;
    uint64_t offered = driver_offered(&f->mmio);
    assert_true((offered & 1u << 5) != 0);
    assert_true((offered & (1u << 9 | 1u << 13 | 1u << 14)) == 0);
    check_all(f);
    assert_int_equal(request(f, T_OUT, 0, BUFFER, 512, false), S_IOERR);
    assert_int_equal(do_range(f, T_DISCARD, 0, 8, 0), S_IOERR);
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 0, 8, 0), S_IOERR);
    assert_int_equal(request(f, T_FLUSH, 0, 0, 0, false), S_OK);
    check_all(f);
}

static void the_cap_is_an_io_error_and_the_machine_lives(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(do_write(f, 0, 32, 1), S_OK);    /* four blocks: at the cap */
    assert_int_equal(do_write(f, 32, 1, 2), S_IOERR); /* one past it */
    assert_int_equal(do_range(f, T_WRITE_ZEROES, 33, 1, 0), S_IOERR);
    assert_int_equal(do_write(f, 3, 20, 3), S_OK); /* what is there can be written again */
    check_all(f);
    assert_int_equal(do_range(f, T_DISCARD, 8, 8, 0), S_OK);
    memset(f->model + 8 * 512, 0, 8 * 512);
    assert_int_equal(do_write(f, 33, 2, 4), S_OK); /* the room came back */
    assert_int_equal(do_write(f, 80, 1, 5), S_IOERR);
    check_all(f);
    assert_int_equal(f->dev->status & VIRTIO_STATUS_NEEDS_RESET, 0);
}

static void get_id_fits_what_there_is(void **s)
{
    struct fixture *f = *s;
    memset(guest_bytes(f, BUFFER, 64), 0x55, 64);
    assert_int_equal(request(f, T_GET_ID, 0, BUFFER, 20, true), S_OK);
    assert_string_equal((char *)guest_bytes(f, BUFFER, 20), "tine-blk0");
    assert_int_equal(request(f, T_GET_ID, 0, BUFFER, 4, true), S_OK);
    assert_int_equal(request(f, T_GET_ID, 0, BUFFER, 64, true), S_OK);
    assert_int_equal(request(f, T_GET_ID, 0, 0, 0, true), S_OK);
    assert_int_equal(*guest_bytes(f, BUFFER + 20, 1), 0x55);
}

static void B3_head_only_chains_leak_nothing(void **s)
{
    struct fixture *f = *s;
    for (unsigned i = 0; i < 300; i++) {
        put_header(f, HEADER, T_IN, 0);
        ring_desc(&f->g, 0, HEADER, i % 17, 0, 0);
        ring_offer(&f->g, 0);
        driver_notify(&f->mmio, 0);
        uint32_t id = 1, len = 1;
        assert_true(ring_used(&f->g, &id, &len));
        assert_true(id == 0 && len == 0);
    }
    assert_int_equal(f->dev->status & VIRTIO_STATUS_NEEDS_RESET, 0);
    check_all(f);
}

static void B3_a_short_header_gets_an_error_status(void **s)
{
    struct fixture *f = *s;
    ring_desc(&f->g, 0, HEADER, 15, D_NEXT, 1);
    ring_desc(&f->g, 1, STATUS, 1, D_WRITE, 0);
    *guest_bytes(f, STATUS, 1) = S_NONE;
    ring_offer(&f->g, 0);
    driver_notify(&f->mmio, 0);
    wait_used(f, 1);
    assert_int_equal(*guest_bytes(f, STATUS, 1), S_IOERR);
}

static void B3_a_broken_ring_needs_a_reset_and_a_reset_heals(void **s)
{
    struct fixture *f = *s;
    for (unsigned i = 0; i < 20; i++) {
        f->irqs = 0;
        ring_put16(&f->g, RING_AVAIL + 2, (uint16_t)(f->g.avail + 1000));
        driver_notify(&f->mmio, 0);
        assert_true((reg_read(&f->mmio, 0x70) & VIRTIO_STATUS_NEEDS_RESET) != 0);
        assert_true((reg_read(&f->mmio, 0x60) & VIRTIO_INT_CONFIG) != 0);
        assert_true(f->irqs > 0);
        driver_notify(&f->mmio, 0); /* stays silent */
        /* Stop and snapshot still answer. */
        assert_int_equal(f->dev->ops->quiesce(f->dev, &f->e), 0);
        f->dev->ops->resume(f->dev);
        start(f);
        check_range(f, 0, 64);
    }
}

static void B2_status_0_resets_with_requests_in_flight(void **s)
{
    struct fixture *f = *s;
    for (unsigned round = 0; round < 50; round++) {
        for (unsigned i = 0; i < 60; i++) {
            uint64_t base = RING_DATA + 0x2000 + i * 0x2000;
            put_header(f, base, round % 2 == 0 ? T_IN : T_OUT, i * 9);
            memset(guest_bytes(f, base + 512, 512), 1, 512);
            ring_desc(&f->g, i * 3, base, 16, D_NEXT, (uint16_t)(i * 3 + 1));
            ring_desc(&f->g, i * 3 + 1, base + 512, 512, D_NEXT | (round % 2 == 0 ? D_WRITE : 0),
                      (uint16_t)(i * 3 + 2));
            ring_desc(&f->g, i * 3 + 2, base + 2048, 1, D_WRITE, 0);
            ring_offer(&f->g, (uint16_t)(i * 3));
        }
        driver_notify(&f->mmio, 0);
        reg_write(&f->mmio, 0x70, 0);
        assert_int_equal(reg_read(&f->mmio, 0x70), 0);
        /* From here the memory is the guest's again: fill it, and nothing may change it. */
        uint8_t *all = guest_bytes(f, 0, RING_RAM_BYTES);
        memset(all, 0x77, RING_RAM_BYTES);
        unsigned irqs = f->irqs;
        for (unsigned i = 0; i < 3; i++)
            assert_int_equal(loop_round(&f->loop, 0, &f->e), 0);
        for (uint32_t i = 0; i < RING_RAM_BYTES; i += 8)
            assert_true(le64_get(all + i) == 0x7777777777777777ull);
        assert_int_equal(f->irqs, irqs);
        start(f);
        assert_int_equal(do_read(f, 1, 1), S_OK);
    }
}

/* C3: whole sectors are shown; nothing is read or grown past the end. */
static void C3_odd_sizes(void **s)
{
    static const uint64_t refused[] = {0, 1, 511};
    static const uint64_t sizes[] = {512, 513, 1023, 1024, 4096, 4097, 4608, 123457};
    struct fixture f = {0};
    ring_init(&f.g, 16);
    assert_int_equal(loop_init(&f.loop, &f.e), 0);
    for (unsigned i = 0; i < ARRAY_SIZE(refused); i++) {
        int fd = memfd_create("base", MFD_CLOEXEC);
        assert_int_equal(ftruncate(fd, (off_t)refused[i]), 0);
        struct disk *d = NULL;
        struct disk_spec spec = {.path = "tiny.img", .fd = fd};
        assert_true(disk_open(&d, &spec, &f.e) < 0);
        assert_int_equal(f.e.code, ERR_USAGE);
        assert_non_null(strstr(f.e.text, "tiny.img"));
        assert_null(d);
    }
    for (unsigned i = 0; i < ARRAY_SIZE(sizes); i++) {
        attach(&f, open_disk(&f, sizes[i], false, 0));
        start(&f);
        uint64_t sectors = sizes[i] / 512;
        assert_int_equal(disk_sectors(blk_disk(f.dev)), sectors);
        assert_int_equal(disk_hidden_bytes(blk_disk(f.dev)), sizes[i] % 512);
        check_all(&f);
        assert_int_equal(do_write(&f, sectors - 1, 1, 3), S_OK);
        assert_int_equal(do_read(&f, sectors, 1), S_IOERR);
        assert_int_equal(do_range(&f, T_WRITE_ZEROES, 0, (uint32_t)min_u64(sectors, 3), 0), S_OK);
        memset(f.model, 0, min_u64(sectors, 3) * 512);
        check_all(&f);
        struct stat st;
        assert_int_equal(fstat(f.base_fd, &st), 0);
        assert_int_equal(st.st_size, sizes[i]);
        f.dev->ops->free(f.dev);
        close(f.base_fd);
    }
    free(f.model);
    loop_close(&f.loop);
    ring_free(&f.g);
}

static void a_base_that_shrank_is_an_io_error(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(ftruncate(f->base_fd, 4096), 0);
    assert_int_equal(do_read(f, 0, 8), S_OK);
    assert_int_equal(do_read(f, 100, 8), S_IOERR);
    assert_int_equal(do_write(f, 100, 1, 1), S_IOERR); /* needs the rest of its block */
    assert_int_equal(do_write(f, 104, 8, 1), S_OK);
}

static void quiesce_finishes_all_and_save_restore_goes_on(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(do_write(f, 10, 30, 4), S_OK);
    for (unsigned i = 0; i < 60; i++) {
        uint64_t base = RING_DATA + 0x2000 + i * 0x2000;
        put_header(f, base, T_OUT, 200 + i);
        memset(guest_bytes(f, base + 512, 512), (int)i, 512);
        memset(f->model + (200 + i) * 512, (int)i, 512);
        ring_desc(&f->g, i * 3, base, 16, D_NEXT, (uint16_t)(i * 3 + 1));
        ring_desc(&f->g, i * 3 + 1, base + 512, 512, D_NEXT, (uint16_t)(i * 3 + 2));
        ring_desc(&f->g, i * 3 + 2, base + 2048, 1, D_WRITE, 0);
        ring_offer(&f->g, (uint16_t)(i * 3));
    }
    driver_notify(&f->mmio, 0);
    assert_int_equal(f->dev->ops->quiesce(f->dev, &f->e), 0);
    assert_int_equal(ring_get16(&f->g, RING_USED + 2), (uint16_t)(f->g.seen + 60));
    driver_notify(&f->mmio, 0); /* ignored while quiesced */

    struct state_writer w;
    const void *blob;
    size_t len;
    struct state_node root;
    assert_int_equal(state_writer_init(&w, &f->e), 0);
    assert_int_equal(virtio_mmio_save(&f->mmio, &w, &f->e), 0);
    assert_int_equal(state_finish(&w, &blob, &len, &f->e), 0);
    assert_int_equal(state_open(blob, len, &root, &f->e), 0);

    /* As a fork child does: the disk is taken out, everything else is made anew. */
    struct disk *d = blk_disk(f->dev);
    assert_int_equal(disk_freeze(d, &f->e), 0);
    loop_close_inherited(&f->loop);
    assert_ptr_equal(blk_forget(f->dev), d);
    f->dev->ops->free(f->dev);
    assert_int_equal(loop_init(&f->loop, &f->e), 0);
    assert_int_equal(disk_push(d, &f->e), 0);
    assert_int_equal(blk_create(&f->dev, 0, d, &f->g.ram, &f->loop, &f->e), 0);
    f->dev->irq = (struct irq_line){.raise = irq_count, .ctx = &f->irqs, .gsi = 5};
    virtio_mmio_init(&f->mmio, f->dev, &f->loop);
    if (virtio_mmio_restore(&f->mmio, &root, &f->e) != 0)
        fail_msg("%s", f->e.text);
    state_writer_free(&w);
    f->dev->ops->resume(f->dev);
    f->g.seen = ring_get16(&f->g, RING_USED + 2);
    check_all(f);
    assert_int_equal(do_write(f, 300, 8, 4), S_OK);
    check_all(f);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(reads_the_base),
        T(the_base_is_never_written),
        T(random_operations_match_a_model),
        T(neighbours_in_one_block_keep_each_others_bytes),
        T(many_segments_of_odd_size_are_gathered),
        T(the_status_is_the_last_writable_byte),
        T(C5_ranges_past_the_end_are_errors),
        T(C1_zeroes_read_back_and_limits_are_not_zero),
        T(C1_unknown_requests_are_unsupported),
        T(C2_a_failed_sync_is_an_error),
        cmocka_unit_test_setup_teardown(read_only_is_kept_by_the_host, setup_read_only, teardown),
        cmocka_unit_test_setup_teardown(the_cap_is_an_io_error_and_the_machine_lives,
                                        setup_small_cap, teardown),
        T(get_id_fits_what_there_is),
        T(B3_head_only_chains_leak_nothing),
        T(B3_a_short_header_gets_an_error_status),
        T(B3_a_broken_ring_needs_a_reset_and_a_reset_heals),
        T(B2_status_0_resets_with_requests_in_flight),
        cmocka_unit_test(C3_odd_sizes),
        T(a_base_that_shrank_is_an_io_error),
        T(quiesce_finishes_all_and_save_restore_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
