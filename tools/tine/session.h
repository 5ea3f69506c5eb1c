/*
 * session: one command in a running machine, as `tine run` and `tine exec` do it: connects through
 * the machine's vsock socket to the agent and stands between it and our own standard streams.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/tine/cli.h"
#include "tools/tine/machines.h"

#define SESSION_ENV_MAX 256

struct session {
    const char *env[SESSION_ENV_MAX + 2]; /* NAME=value, NULL at the end */
    size_t env_count;
    const char *cwd; /* NULL: "/" */
    uint32_t timeout_ms;
    bool terminal;
    const char *const *argv; /* NULL-terminated */
};

int session_add_env(struct session *s, const char *text, struct err *e);
/* "0.5" and the like, in seconds. */
int session_set_timeout(struct session *s, const char *text, struct err *e);
/*
 * Runs it. With c->json output is captured and printed as one object, else passed on as it comes.
 * Returns the exit status that stands for the outcome (128+signal, 124 after the time-out), or
 * -errno.
 */
int session_run(const struct cli *c, const struct machines *m, const char *id,
                const struct session *s, struct err *e);
