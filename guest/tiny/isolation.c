/*
 * isolation: writes a mark of its own into every page of a range, then checks each page, for ever.
 * A machine and its copies run the same loop on memory that was once the same; a page of one that
 * shows a mark of another is a hole in copy-on-write. Says '.' for a round in which every page was
 * its own, and 'X' with the page's number for one that was not.
 */
#include "tiny.h"

#define FIRST ((volatile uint64_t *)0x1000000) /* 16 MiB */
#define PAGES 256u
#define WORDS_PER_PAGE 512u

static void write_marks(uint64_t mark)
{
    for (uint64_t i = 0; i < PAGES; i++)
        FIRST[i * WORDS_PER_PAGE] = mark + i;
}

static uint64_t count_foreign(uint64_t mark)
{
    uint64_t foreign = 0;
    for (uint64_t i = 0; i < PAGES; i++) {
        if (FIRST[i * WORDS_PER_PAGE] != mark + i) {
            say_byte('X');
            say_hex(i);
            foreign++;
        }
    }
    return foreign;
}

void guest_main(const uint8_t *boot_params)
{
    for (;;) {
        uint64_t mark = time_stamp() << 16;
        write_marks(mark);
        if (count_foreign(mark) == 0)
            say_byte('.');
    }
}
