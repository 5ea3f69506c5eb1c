/*
 * ticker: a Linux program that writes one byte to the console after every 0.4 ms of its own time.
 *
 * Runs as the guest's init (rdinit=/bin/ticker) in the restore figures: nearly all its time is
 * spent in user mode, so the first byte of a copy shows when the copy runs and not what the guest's
 * kernel is busy with. Static, without a C library; it says `T` for ever and never returns.
 */

enum { SYS_WRITE = 1, TICKS_PER_US = 2500, SPIN_US = 400 };

static long guest_write(int fd, const void *data, unsigned long n)
{
    long r;
    __asm__ volatile("syscall"
                     : "=a"(r)
                     : "0"(SYS_WRITE), "D"(fd), "S"(data), "d"(n)
                     : "rcx", "r11", "memory");
    return r;
}

static unsigned long long tsc(void)
{
    unsigned low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (unsigned long long)high << 32 | low;
}

_Noreturn void _start(void);

_Noreturn void _start(void)
{
    for (;;) {
        unsigned long long begin = tsc();
        while (tsc() - begin < (unsigned long long)TICKS_PER_US * SPIN_US)
            ;
        (void)guest_write(1, "T", 1); /* a full console drops the byte; the next one follows */
    }
}
