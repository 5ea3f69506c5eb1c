/*
 * disk: drives the first virtio-blk device by hand. The command line says what is done:
 *   i  for ever: writes marks of its own into sectors, syncs, reads them and untouched ones back;
 * says
 *      '.' for a round in which all was its own, 'X' for a sector that shows anything else
 *   r  resets the device 50 times, half of them with requests in flight, and uses it again each
 * time h  breaks the rules in every way of case B3, and uses the device again after each The base
 * disk holds at each 8-byte word the number of that word.
 */
#include "tiny.h"

#define DEVICE 0xd0001000ull
#define QUEUE 16u
#define SECTOR_WORDS 64u

#define RINGS 0x1000000ull /* 16 MiB */
#define DATA (RINGS + 0x10000)
#define HEADER (RINGS + 0x8000)
#define STATUS (RINGS + 0x9000)
#define TABLE (RINGS + 0xa000)

#define NEXT 1u
#define WRITE 2u
#define INDIRECT 4u
#define IN 0u
#define OUT 1u
#define FLUSH 4u

struct desc {
    uint64_t addr;
    uint32_t len;
    uint16_t flags, next;
};

static volatile struct desc *const descs = (volatile struct desc *)RINGS;
static volatile uint16_t *const avail = (volatile uint16_t *)(RINGS + 0x1000);
static volatile uint16_t *const used = (volatile uint16_t *)(RINGS + 0x2000);
static volatile uint64_t *const data = (volatile uint64_t *)DATA;
static uint16_t next_avail, next_used;

static void reg(unsigned offset, uint32_t v)
{
    *(volatile uint32_t *)(DEVICE + offset) = v;
}

static uint32_t get(unsigned offset)
{
    return *(volatile uint32_t *)(DEVICE + offset);
}

static void start(void)
{
    reg(0x70, 0);
    reg(0x70, 1);
    reg(0x70, 3);
    reg(0x24, 0);
    reg(0x20, 1u << 28); /* indirect descriptors */
    reg(0x24, 1);
    reg(0x20, 1); /* VERSION_1 */
    reg(0x70, 11);
    for (unsigned i = 0; i < 0x3000 / 8; i++)
        ((volatile uint64_t *)RINGS)[i] = 0;
    next_avail = next_used = 0;
    reg(0x30, 0);
    reg(0x38, QUEUE);
    reg(0x80, (uint32_t)RINGS);
    reg(0x90, (uint32_t)RINGS + 0x1000);
    reg(0xa0, (uint32_t)RINGS + 0x2000);
    reg(0x44, 1);
    reg(0x70, 15);
    if (get(0x70) != 15 || get(0x44) != 1)
        say("the device did not come up\n");
}

static void set(unsigned i, uint64_t addr, uint32_t len, unsigned flags, unsigned next)
{
    descs[i].addr = addr;
    descs[i].len = len;
    descs[i].flags = (uint16_t)flags;
    descs[i].next = (uint16_t)next;
}

static void offer(unsigned head)
{
    avail[2 + next_avail % QUEUE] = (uint16_t)head;
    next_avail++;
    __asm__ volatile("" ::: "memory"); /* the ring's slot before its index */
    avail[1] = next_avail;
}

static void notify(void)
{
    reg(0x50, 0);
}

static void begin(uint32_t type, uint64_t sector, uint32_t bytes)
{
    volatile uint64_t *header = (volatile uint64_t *)HEADER;
    header[0] = type;
    header[1] = sector;
    *(volatile uint8_t *)STATUS = 0xee;
    set(0, HEADER, 16, NEXT, bytes > 0 ? 1 : 2);
    set(1, DATA, bytes, NEXT | (type == IN ? WRITE : 0), 2);
    set(2, STATUS, 1, WRITE, 0);
    offer(0);
    notify();
}

static void wait_used(void)
{
    while (used[1] == next_used)
        __asm__ volatile("pause" ::: "memory");
    next_used++;
}

static unsigned request(uint32_t type, uint64_t sector, uint32_t bytes)
{
    begin(type, sector, bytes);
    wait_used();
    return *(volatile uint8_t *)STATUS;
}

/* True if the sector holds words that count up from `first`. */
static int holds(uint64_t sector, uint64_t first)
{
    for (unsigned i = 0; i < SECTOR_WORDS; i++)
        data[i] = 0;
    if (request(IN, sector, 512) != 0)
        return 0;
    for (unsigned i = 0; i < SECTOR_WORDS; i++) {
        if (data[i] != first + i)
            return 0;
    }
    return 1;
}

static int base_holds(uint64_t sector)
{
    return holds(sector, sector * SECTOR_WORDS);
}

static void write_own_marks(void)
{
    start();
    for (;;) {
        uint64_t mark = time_stamp() << 16;
        unsigned bad = 0;
        for (unsigned k = 0; k < 5; k++) {
            for (unsigned i = 0; i < SECTOR_WORDS; i++)
                data[i] = mark + k * 1000 + i;
            bad += request(OUT, 3 + k * 37, 512) != 0;
        }
        bad += request(FLUSH, 0, 0) != 0;
        for (unsigned k = 0; k < 5; k++)
            bad += !holds(3 + k * 37, mark + k * 1000);
        bad += !base_holds(4) + !base_holds(2); /* neighbours in a block that was written */
        bad += !base_holds(1000);
        say_byte(bad == 0 ? '.' : 'X');
    }
}

static void check_works(const char *after)
{
    start();
    if (!base_holds(7) || !base_holds(1001)) {
        say("no longer works after ");
        say(after);
        say("\n");
    }
}

static void reset_often(void)
{
    for (unsigned i = 0; i < 50; i++) {
        start();
        if (i % 2 == 0)
            begin(IN, i, 16 * 512);
        check_works("a reset");
    }
    say("resets ok\n");
}

static void set_table(unsigned i, uint64_t addr, uint32_t len, unsigned flags, unsigned next)
{
    volatile struct desc *d = (volatile struct desc *)TABLE + i;
    d->addr = addr;
    d->len = len;
    d->flags = (uint16_t)flags;
    d->next = (uint16_t)next;
}

static void expect_needs_reset(const char *what)
{
    notify();
    for (unsigned i = 0; i < 2000 && (get(0x70) & 64) == 0; i++)
        continue;
    if ((get(0x70) & 64) == 0) {
        say("no reset is asked for after ");
        say(what);
        say("\n");
    }
    check_works(what);
}

static void break_rules(void)
{
    static const uint32_t lengths[] = {0, 17, 8};
    start();
    set(0, DATA, 8, NEXT, 1);
    set(1, DATA, 8, NEXT, 0);
    offer(0);
    expect_needs_reset("a cycle");
    set(0, DATA, 8, NEXT, QUEUE);
    offer(0);
    expect_needs_reset("a descriptor past the table");
    avail[1] = (uint16_t)(next_avail + 1000);
    expect_needs_reset("a jumped index");
    offer(QUEUE);
    expect_needs_reset("a head past the table");
    for (unsigned i = 0; i < 3; i++) {
        set(0, TABLE, lengths[i], INDIRECT, 0);
        offer(0);
        expect_needs_reset("an indirect table of bad length");
    }
    set(0, TABLE, 16, INDIRECT, 0);
    set_table(0, TABLE, 16, INDIRECT, 0);
    offer(0);
    expect_needs_reset("a nested table");
    set(0, 0x100000000000ull, 4096, 0, 0);
    offer(0);
    expect_needs_reset("an address outside memory");
    for (unsigned i = 0; i < 300; i++) { /* a head and nothing else: given back, nothing is lost */
        set(0, HEADER, 16, 0, 0);
        offer(0);
        notify();
        wait_used();
    }
    if (!base_holds(7))
        say("no longer works after 300 heads\n");
    say("rules ok\n");
}

void guest_main(const uint8_t *boot_params)
{
    char what = command_line(boot_params)[0];
    if (what == 'i')
        write_own_marks();
    if (what == 'r')
        reset_often();
    if (what == 'h')
        break_rules();
    power_off();
    stop();
}
