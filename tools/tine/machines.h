/*
 * machines: the state folder, in which machines are found by their sockets (docs/protocol.md 3).
 *
 * One thread. Nothing here trusts a file name: ids are checked before a path is made of them.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vmm/control.h"
#include "vmm/core/sock.h"

struct err;
struct rpc;

typedef char machine_id[CONTROL_ID_MAX + 1];

struct machines {
    char dir[SOCK_PATH_MAX + 1]; /* absolute */
};

/* Finds the folder, makes it if needed, and refuses one that others can write to or that is not
 * ours. */
int machines_open(struct machines *m, struct err *e);
/* dir/<id><suffix>; ERR_LIMIT with path and length if it is no socket address. */
int machines_path(const struct machines *m, const char *id, const char *suffix,
                  char out[SOCK_PATH_MAX + 1], struct err *e);
/* Every socket such a machine will have fits; nobody lives under that name. */
int machines_check_new(const struct machines *m, const char *id, const uint32_t *grants,
                       size_t grant_count, struct err *e);
/* A fresh name such as "teal-3f9a". */
int machines_new_id(const struct machines *m, machine_id out, struct err *e);
/* Sorted ids of all control sockets there are; free(*ids). */
int machines_list(const struct machines *m, machine_id **ids, size_t *count, struct err *e);
/* Removes what dead processes left: stale sockets, abandoned start files, old logs. */
void machines_sweep(const struct machines *m);
/* Removes the sockets of that machine if they are stale; also its log if asked. */
void machines_remove(const struct machines *m, const char *id, bool log);

/* Connects to the control socket of `id`; says which machines there are if there is none. */
int machines_connect(const struct machines *m, const char *id, struct rpc *r, struct err *e);
