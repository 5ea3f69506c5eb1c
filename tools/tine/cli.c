/*
 * cli: see cli.h.
 */
#include "tools/tine/cli.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t signal_seen;
static bool progress_open;

int cli_usage_status(const struct cli *c)
{
    return c->passes_status ? CLI_EXEC_FAILED : CLI_USAGE;
}

const char *cli_clean(char *text)
{
    for (char *p = text; *p != '\0'; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    }
    return text;
}

/* The same members an outcome has, so that a caller looks in one place. */
static json_t *failure_json(const struct cli *c, const struct err *e, const char *text)
{
    const char *kind = err_code_name(e->code);
    if (c->passes_status)
        return json_pack("{s:n, s:n, s:b, s:s, s:s}", "exit_code", "signal", "timed_out", false,
                         "error", text, "kind", kind);
    return json_pack("{s:{s:s, s:s}}", "error", "kind", kind, "message", text);
}

int cli_fail(const struct cli *c, const struct err *e)
{
    char text[ERR_TEXT_MAX];
    (void)snprintf(text, sizeof text, "%s", e->text);
    (void)cli_clean(text); /* part of it may be a VMM's or a guest's words */
    cli_progress_end();
    (void)fprintf(stderr, "tine %s: %s\n", c->name, text);
    if (c->json) {
        json_t *o = failure_json(c, e, text);
        if (o != NULL && json_dumpf(o, stdout, JSON_COMPACT) == 0)
            (void)fputc('\n', stdout);
        json_decref(o);
    }
    if (c->passes_status)
        return CLI_EXEC_FAILED;
    return e->code == ERR_USAGE ? CLI_USAGE : CLI_FAILED;
}

int cli_print_json(const struct cli *c, json_t *o)
{
    int rc = o == NULL ? -1 : json_dumpf(o, stdout, JSON_COMPACT);
    json_decref(o);
    if (rc < 0 || fputc('\n', stdout) == EOF || fflush(stdout) == EOF) {
        struct err e = {0};
        (void)err_set(&e, ERR_HOST, errno, "write to standard output");
        return cli_fail(c, &e);
    }
    return CLI_OK;
}

static int usage(const struct cli *c, const char *what, const char *word)
{
    struct err e = {0};
    (void)err_set(&e, ERR_USAGE, 0, "%s %s (tine %s --help shows how)", what, word, c->name);
    (void)cli_fail(c, &e);
    return -2;
}

int cli_option(struct cli *c, int argc, char **argv, const char *shorts, const struct option *longs)
{
    char spec[64];
    /* What follows the command of run and exec is the command's; elsewhere order does not matter.
     */
    (void)snprintf(spec, sizeof spec, "%s:%s", c->passes_status ? "+" : "", shorts);
    opterr = 0;
    for (;;) {
        int opt = getopt_long(argc, argv, spec, longs, NULL);
        switch (opt) {
        case CLI_OPT_JSON:
            c->json = true;
            continue;
        case CLI_OPT_HELP:
            (void)fputs(c->help, stdout);
            exit(fflush(stdout) == 0 ? CLI_OK : CLI_FAILED);
        case '?':
            return usage(c, "unknown option", argv[optind - 1]);
        case ':':
            return usage(c, "a value is missing after", argv[optind - 1]);
        default:
            return opt;
        }
    }
}

bool cli_arguments(const struct cli *c, int argc, int min, int max, const char *what)
{
    int n = argc - optind;
    if (n >= min && (max < 0 || n <= max))
        return true;
    (void)usage(c, n < min ? "missing" : "too many words, expected", what);
    return false;
}

int cli_number(const char *what, const char *text, uint64_t lo, uint64_t hi, uint64_t *out,
               struct err *e)
{
    char *end = NULL;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || v < lo || v > hi)
        return err_set(e, ERR_USAGE, 0, "%s \"%s\" is not a number from %llu to %llu", what, text,
                       (unsigned long long)lo, (unsigned long long)hi);
    *out = v;
    return 0;
}

void cli_progress(const char *fmt, ...)
{
    bool in_place = isatty(STDERR_FILENO) == 1;
    va_list ap;
    va_start(ap, fmt);
    (void)fputs(in_place ? "\r\033[Ktine: " : "tine: ", stderr);
    (void)vfprintf(stderr, fmt, ap);
    va_end(ap);
    if (!in_place)
        (void)fputc('\n', stderr);
    (void)fflush(stderr);
    progress_open = in_place;
}

void cli_progress_end(void)
{
    if (progress_open)
        (void)fputs("\r\033[K", stderr);
    progress_open = false;
}

const char *cli_duration(uint64_t us, char buf[32])
{
    if (us < 1000)
        (void)snprintf(buf, 32, "%llu us", (unsigned long long)us);
    else if (us < 1000000)
        (void)snprintf(buf, 32, "%.1f ms", (double)us / 1e3);
    else
        (void)snprintf(buf, 32, "%.1f s", (double)us / 1e6);
    return buf;
}

static void on_signal(int sig)
{
    signal_seen = sig;
}

void cli_catch_signals(void)
{
    struct sigaction sa = {.sa_handler =
                               on_signal}; /* no SA_RESTART: waits are to be interrupted */
    (void)sigaction(SIGINT, &sa, NULL);    /* valid signals: cannot fail */
    (void)sigaction(SIGTERM, &sa, NULL);
    (void)sigaction(SIGHUP, &sa, NULL);
}

int cli_signal(void)
{
    return signal_seen;
}
