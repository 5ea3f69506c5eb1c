/*
 * sock: Unix stream sockets by path, as machines and the command line use them. Any thread.
 *
 * A listener is its owner's alone from birth (mode 0600 whatever the umask), takes the place of a
 * socket file nobody listens on, and never that of a live one. All binds of one folder are done
 * under an exclusive flock of the folder, so two starters cannot both replace a stale name.
 */
#pragma once

#include <stdbool.h>

struct err;

#define SOCK_PATH_MAX 107 /* sun_path without its terminating zero */

/* ERR_LIMIT with path and length when it does not fit a socket address. */
int sock_path_check(const char *path, struct err *e);
/* Returns a non-blocking listening fd (O_CLOEXEC) or -errno; -EADDRINUSE: somebody lives there. */
int sock_listen(const char *path, struct err *e);
/* Returns a connected blocking fd (O_CLOEXEC) or -errno. */
int sock_connect(const char *path, struct err *e);
/* True if the file is a socket that nobody listens on (its owner died). */
bool sock_is_stale(const char *path);
/* Removes the file if it is a stale socket; true if it did. Takes the folder's lock. */
bool sock_remove_stale(const char *path);
