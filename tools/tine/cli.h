/*
 * cli: what all commands of `tine` share: how they are called, how they say yes and no.
 *
 * One process per command, one thread. A command returns its exit status; errors are printed here
 * and nowhere else, as one sentence on stderr (with --json also as an object on stdout).
 */
#pragma once

#include <getopt.h>
#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "vmm/core/err.h"

enum {
    CLI_OK = 0,
    CLI_FAILED = 1,
    CLI_USAGE = 2,
    CLI_EXEC_FAILED = 125, /* run and exec: tine itself failed, not the command */
};

struct cli {
    const char *name; /* the command, e.g. "fork" */
    const char *help; /* its --help */
    bool json;
    bool passes_status; /* run and exec: every failure of ours is CLI_EXEC_FAILED */
};

struct cli_command {
    const char *name, *summary, *help;
    int (*run)(struct cli *c, int argc, char **argv);
    bool passes_status;
};

/* cmd_*.c */
extern const struct cli_command cmd_run, cmd_start, cmd_restore, cmd_exec, cmd_snapshot, cmd_fork,
    cmd_ps, cmd_tree, cmd_status, cmd_console, cmd_pause, cmd_resume, cmd_kill, cmd_doctor;

/* Options every command takes: --json and --help; the rest is the command's own. */
#define CLI_OPTIONS                                                                                \
    {"json", no_argument, NULL, CLI_OPT_JSON},                                                     \
    {                                                                                              \
        "help", no_argument, NULL, CLI_OPT_HELP                                                    \
    }
enum { CLI_OPT_JSON = 1000, CLI_OPT_HELP };

/*
 * Next option's value, -1 at the end. Handles --json; prints help and exits for --help. An unknown
 * or incomplete option is printed and gives -2: return cli_usage_status(). Words that are no
 * options are left from argv[optind] on.
 */
int cli_option(struct cli *c, int argc, char **argv, const char *shorts,
               const struct option *longs);
/* Exactly min..max words after the options (max < 0: any number); else prints and returns false. */
bool cli_arguments(const struct cli *c, int argc, int min, int max, const char *what);
int cli_usage_status(const struct cli *c);
/* Decimal number in lo..hi; the error names `what`. */
int cli_number(const char *what, const char *text, uint64_t lo, uint64_t hi, uint64_t *out,
               struct err *e);

/* Prints the error; returns the exit status that belongs to it. */
int cli_fail(const struct cli *c, const struct err *e);
/* Replaces control characters, which a terminal might obey; returns its argument. */
const char *cli_clean(char *text);
/* Steals `o`; one line on stdout. Returns CLI_OK, or CLI_FAILED if it could not be written. */
int cli_print_json(const struct cli *c, json_t *o);

/* A progress line on stderr, if stderr is a terminal in place, else as lines of their own. */
void cli_progress(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* After the last progress line. */
void cli_progress_end(void);

/* "12.3 ms", "870 us", "1.4 s" into buf. */
const char *cli_duration(uint64_t us, char buf[32]);

/* SIGINT, SIGTERM, SIGHUP are noted instead of killing us, so that what was begun is undone. */
void cli_catch_signals(void);
/* The signal that came, or 0. */
int cli_signal(void);
