/*
 * Fuzz target of virtio-blk with its disk: requests of every kind, sound and broken, several at a
 * time, between pauses, forks, copies and resets. The base is never written, the disk's books
 * balance, and after a reset the device reads again. Seeds: seeds/blk.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "devices/blk.h"
#include "devices/disk_layers.h"
#include "tests/fuzz/script.h"
#include "tests/unit/guest_driver.h"
#include "vmm/core/err.h"
#include "vmm/core/log.h"
#include "vmm/core/loop.h"
#include "vmm/core/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STEPS_MAX 120
#define BASE_BYTES (64u * 4096 + 1024)
#define CAP_BLOCKS 24u
#define REQUESTS 12u

static struct guest_ring ring;
static struct loop loop;
static int base_fd = -1;
static uint8_t base[BASE_BYTES];
static unsigned irqs;

struct world {
    struct virtio_device *dev;
    struct virtio_mmio t;
    bool paused;
};

static void make_world(void)
{
    struct err e;
    if (base_fd >= 0)
        return;
    ring_init(&ring, 64);
    base_fd = memfd_create("base", MFD_CLOEXEC);
    for (unsigned i = 0; i < BASE_BYTES; i++)
        base[i] = (uint8_t)(i / 512 + i * 3);
    if (base_fd < 0 || loop_init(&loop, &e) < 0 ||
        pwrite(base_fd, base, BASE_BYTES, 0) != BASE_BYTES)
        abort();
    log_set_level(LOG_ERROR);
}

static void attach(struct world *w, struct disk *d)
{
    struct err e;
    if (blk_create(&w->dev, 0, d, &ring.ram, &loop, &e) < 0)
        abort();
    w->dev->irq = (struct irq_line){.raise = irq_count, .ctx = &irqs};
    virtio_mmio_init(&w->t, w->dev, &loop);
}

/* map, live and stored agree (disk_layers.h). */
static void check_disk(const struct disk *d)
{
    uint64_t live[DISK_OVERLAY_DEPTH_MAX] = {0}, stored = 0;
    for (uint64_t b = 0; d->map != NULL && b < d->blocks; b++) {
        uint16_t entry = d->map[b];
        if (entry == DISK_MAP_BASE || entry == DISK_MAP_ZERO)
            continue;
        assert(entry <= DISK_OVERLAY_DEPTH_MAX && d->layers[entry - 1].fd >= 0);
        live[entry - 1]++;
    }
    for (unsigned i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++) {
        assert(live[i] == d->layers[i].live);
        stored += d->layers[i].fd >= 0 ? d->layers[i].stored : 0;
    }
    assert(stored == d->stored_blocks && stored <= d->max_blocks);
    (void)stored;
}

static void check_base(void)
{
    static uint8_t now[BASE_BYTES];
    ssize_t n = pread(base_fd, now, sizeof now, 0);
    assert(n == BASE_BYTES && memcmp(now, base, sizeof now) == 0);
    (void)n;
}

static void put_request(struct script *s)
{
    static const uint32_t types[] = {0, 1, 4, 8, 11, 13, 1, 99};
    unsigned i = take8(s) % REQUESTS;
    uint64_t at = RING_DATA + i * 0x8000ull;
    uint32_t type = types[take8(s) % 8];
    uint32_t sectors = take8(s) % 40;
    bool in = type == 0 || type == 8;
    uint8_t h[32] = {0};
    le32_put(h, type);
    le64_put(h + 8, take16(s) % 600);
    ring_put(&ring, at, h, 16);
    uint32_t len = sectors * 512;
    if (type == 11 || type == 13) { /* the range lies in the data */
        le64_put(h, take16(s) % 600);
        le32_put(h + 8, take8(s));
        le32_put(h + 12, take8(s) & 1);
        ring_put(&ring, at + 512, h, 16);
        len = 16;
    }
    len += (take8(s) & 0xf0) == 0xf0; /* now and then a length that is wrong */
    unsigned d = i * 4;
    ring_desc(&ring, d, at, 16, D_NEXT, (uint16_t)(d + 1));
    ring_desc(&ring, d + 1, at + 512, len / 2, D_NEXT | (in ? D_WRITE : 0), (uint16_t)(d + 2));
    ring_desc(&ring, d + 2, at + 512 + len / 2, len - len / 2, D_NEXT | (in ? D_WRITE : 0),
              (uint16_t)(d + 3));
    ring_desc(&ring, d + 3, at + 256, 1, D_WRITE, 0);
    ring_offer(&ring, (uint16_t)d);
}

static void pause_device(struct world *w)
{
    struct err e;
    int rc = w->dev->ops->quiesce(w->dev, &e);
    assert(rc == 0);
    (void)rc;
    w->paused = true;
}

static void resume_device(struct world *w)
{
    w->paused = false;
    w->dev->ops->resume(w->dev);
}

static void layer(struct world *w)
{
    struct err e;
    struct disk *d = blk_disk(w->dev);
    pause_device(w);
    int rc = disk_freeze(d, &e);
    assert(rc == 0);
    rc = disk_push(d, &e);
    assert(rc == 0);
    (void)rc;
    resume_device(w);
}

static void copy(struct world *w)
{
    struct state_writer sw;
    struct state_node root;
    const void *blob;
    size_t len;
    struct err e = {0};
    pause_device(w);
    if (state_writer_init(&sw, &e) < 0)
        abort();
    int rc = virtio_mmio_save(&w->t, &sw, &e);
    assert(rc == 0);
    rc = state_finish(&sw, &blob, &len, &e);
    assert(rc == 0 && state_open(blob, len, &root, &e) == 0);
    loop_close_inherited(&loop);
    struct disk *d = blk_forget(w->dev);
    w->dev->ops->free(w->dev);
    if (loop_init(&loop, &e) < 0)
        abort();
    attach(w, d);
    rc = virtio_mmio_restore(&w->t, &root, &e);
    assert(rc == 0);
    (void)rc;
    state_writer_free(&sw);
    resume_device(w);
}

static void step(struct script *s, struct world *w)
{
    struct err e;
    uint8_t op = take8(s);
    switch (op & 15) {
    case 0: /* a raw descriptor */
        ring_desc(&ring, take8(s) & 63, RING_DATA + take16(s), take16(s), op >> 5, take8(s) & 63);
        break;
    case 1:
        ring_offer(&ring, take8(s) & 63);
        break;
    case 2:
        driver_notify(&w->t, op >> 7);
        break;
    case 3:
        (void)loop_round(&loop, 0, &e);
        break;
    case 4:
        reg_write(&w->t, 0x70, 0);
        break;
    case 5:
        (void)driver_start(&w->t, &ring, driver_offered(&w->t) & ~((uint64_t)(op >> 4) << 28));
        break;
    case 6:
        pause_device(w);
        break;
    case 7:
        resume_device(w);
        break;
    case 8:
        layer(w);
        break;
    case 9:
        copy(w);
        break;
    case 10:
        reg_write(&w->t, (take8(s) % 64) * 4u, take16(s));
        break;
    default:
        put_request(s);
        break;
    }
}

/* Whatever was done before, a driver that starts anew reads sector 0. */
static void read_again(struct world *w)
{
    struct err e;
    uint8_t h[16] = {0}, status = 0xee;
    reg_write(&w->t, 0x70, 0);
    resume_device(w);
    uint32_t up = driver_start(&w->t, &ring, driver_offered(&w->t));
    assert(up == 15);
    (void)up;
    ring_put(&ring, RING_DATA, h, sizeof h);
    ring_put(&ring, RING_DATA + 256, &status, 1);
    ring_desc(&ring, 0, RING_DATA, 16, D_NEXT, 1);
    ring_desc(&ring, 1, RING_DATA + 512, 512, D_NEXT | D_WRITE, 2);
    ring_desc(&ring, 2, RING_DATA + 256, 1, D_WRITE, 0);
    ring_offer(&ring, 0);
    driver_notify(&w->t, 0);
    uint32_t id = 0, len = 0;
    while (!ring_used(&ring, &id, &len)) {
        if (loop_round(&loop, 5000, &e) < 0)
            abort();
    }
    assert(len == 513 && *(uint8_t *)ram_slice(&ring.ram, gpa(RING_DATA + 256), 1) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct script s = {data, size};
    struct world w = {0};
    struct disk *d;
    struct err e;
    make_world();
    struct disk_spec spec = {.path = "base",
                             .fd = dup(base_fd),
                             .read_only = (take8(&s) & 7) == 7,
                             .overlay_max_bytes = CAP_BLOCKS * DISK_BLOCK_BYTES};
    if (disk_open(&d, &spec, &e) < 0)
        abort();
    ring_clear(&ring);
    attach(&w, d);
    resume_device(&w);
    (void)driver_start(&w.t, &ring, driver_offered(&w.t));
    for (unsigned i = 0; i < STEPS_MAX && s.left > 0; i++)
        step(&s, &w);
    pause_device(&w);
    check_disk(d);
    check_base();
    read_again(&w);
    w.dev->ops->free(w.dev);
    return 0;
}
