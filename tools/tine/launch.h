/*
 * launch: starts a tine-vmm for one machine and waits until it is what was asked for. One thread.
 *
 * The VMM is its own session with its stderr in a log file, nothing of our environment and no
 * inherited fds. Until the start has succeeded the log lies under a name of its own, so a start
 * that loses a race for a machine's name takes nothing away from the winner, and a failed start
 * leaves no file behind.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <jansson.h>

#include "tools/tine/machines.h"
#include "tools/tine/rpc.h"

#define LAUNCH_DISKS_MAX CONTROL_DISKS_MAX

struct launch_spec {
    const char *id;
    const char *image; /* folder to restore, or NULL */
    const char *kernel, *initrd, *cmdline;
    uint64_t memory_mib;                 /* 0: the VMM's default */
    uint64_t cpus;                       /* 0: the VMM's default */
    const char *disks[LAUNCH_DISKS_MAX]; /* "FILE" or "FILE,ro" */
    size_t disk_count;
    uint32_t grants[CONTROL_GRANTS_MAX];
    size_t grant_count;
    bool paused;
    bool ends_with_us; /* the VMM is told to end when this process does, however it does */
};

struct launched {
    const struct machines *machines;
    machine_id id;
    pid_t pid;
    int pid_fd;
    int log_fd;
    char log[SOCK_PATH_MAX + 64]; /* its present name */
    struct rpc rpc;
};

/* Path of the tine-vmm that belongs to this binary ($TINE_VMM first). ERR_USAGE says where it
 * looked. */
int launch_find_vmm(char *out, size_t size, struct err *e);

/* Starts it; returns once its control socket answers. On failure nothing is left. */
int launch(const struct machines *m, const struct launch_spec *spec, struct launched *out,
           struct err *e);
/*
 * Waits until the machine is `what` ("ready", "paused", "running"), with a progress line that says
 * `doing` when it takes more than 2 s. *status is new. On failure (it died, took longer than
 * timeout_s, or we were told to stop) the machine is ended and nothing is left.
 */
int launch_wait(struct launched *l, const char *what, unsigned timeout_s, const char *doing,
                json_t **status, struct err *e);
/* Waits only until the machine is made: its VMM answers a status request. Else like launch_wait. */
int launch_check(struct launched *l, json_t **status, struct err *e);
/* The start has succeeded: the log gets its name. Frees what `l` holds; the machine lives on. */
void launch_keep(struct launched *l);
/* Ends the machine (asks, then kills), removes its sockets and log. Frees what `l` holds. */
void launch_end(struct launched *l);
