/*
 * options: the command line of tine-vmm.
 */
#pragma once

#include <stdbool.h>

#include "vmm/spec.h"

struct err;

struct options {
    const char *control, *vsock, *id, *console;
    const char *kernel, *initrd, *cmdline;
    const char *restore;
    const char *log_level;
    bool verify, paused, probe, help, version;
    struct machine_spec spec; /* owned */
};

/* Strings point into argv. ERR_USAGE names the option, what was found and what is expected. */
int options_parse(struct options *o, int argc, char **argv, struct err *e);
void options_print_help(void);
