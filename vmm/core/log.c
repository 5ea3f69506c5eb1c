/*
 * log: see log.h. Any thread; the name and level are set before threads exist (and again in a fork
 * child, which is single-threaded at that moment).
 */
#include "vmm/core/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "vmm/core/fd.h"

static char log_name[64] = "tine-vmm";
static enum log_level log_level_max = LOG_INFO;

void log_set_name(const char *name)
{
    (void)snprintf(log_name, sizeof log_name, "%s", name);
}

void log_set_level(enum log_level level)
{
    log_level_max = level;
}

static __attribute__((format(printf, 2, 0))) void write_line(enum log_level level, const char *fmt,
                                                             va_list ap)
{
    static const char *const words[] = {"error", "warning", "info", "debug"};
    char line[1024];
    int n = snprintf(line, sizeof line, "%s: %s: ", log_name, words[level]);
    if (n < 0)
        return;
    int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    size_t len = strlen(line);
    if (m < 0)
        return;
    line[len++] = '\n';
    (void)!write(STDERR_FILENO, line, len); /* a log that cannot be written has nowhere to say so */
}

void log_line(enum log_level level, const char *fmt, ...)
{
    if (level > log_level_max)
        return;
    va_list ap;
    va_start(ap, fmt);
    write_line(level, fmt, ap);
    va_end(ap);
}

void log_limited(struct log_ratelimit *rl, enum log_level level, const char *fmt, ...)
{
    if (level > log_level_max)
        return;
    uint64_t now = clock_mono_ns();
    if (now - rl->window_start_ns > 1000000000u) {
        if (rl->suppressed > 0)
            log_line(level, "%llu similar lines suppressed", (unsigned long long)rl->suppressed);
        rl->window_start_ns = now;
        rl->suppressed = 0;
        rl->in_window = rl->in_window > LOG_RATELIMIT_BURST ? LOG_RATELIMIT_BURST - 1 : 0;
    }
    if (++rl->in_window > LOG_RATELIMIT_BURST) {
        rl->suppressed++;
        return;
    }
    va_list ap;
    va_start(ap, fmt);
    write_line(level, fmt, ap);
    va_end(ap);
}
