/*
 * log: lines on stderr, with the machine's name in front. Any thread.
 *
 * Only main.c, machine.c and rate-limited guest faults write here; library code returns errors.
 * One write(2) per line, so lines of several processes never mix.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

void log_set_name(const char *name); /* copied, at most 63 bytes */
void log_set_level(enum log_level level);
void log_line(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A guest must not be able to fill the host's disk: `burst` lines, then one a second. */
struct log_ratelimit {
    uint64_t window_start_ns;
    uint32_t in_window;
    uint64_t suppressed;
};
#define LOG_RATELIMIT_BURST 10
void log_limited(struct log_ratelimit *rl, enum log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
