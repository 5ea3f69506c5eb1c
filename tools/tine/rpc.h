/*
 * rpc: the client's end of a control socket (docs/protocol.md). One thread, one request at a time.
 *
 * A machine's VMM is not trusted: what it answers is bounded, checked for shape, and never made a
 * path or a process to act on.
 */
#pragma once

#include <stddef.h>
#include <sys/types.h>

#include <jansson.h>

struct err;

#define RPC_LINE_MAX (8u << 20)

struct rpc {
    int fd;
    json_int_t last_id;
    int error_code; /* of the last answer that was an error; 0 otherwise */
    char *in;
    size_t in_len, in_cap;
};

/* -ECONNREFUSED and -ENOENT: nobody listens there. */
int rpc_connect(struct rpc *r, const char *path, struct err *e);
void rpc_close(struct rpc *r);
/* Steals `params` (NULL: none). */
int rpc_send(struct rpc *r, const char *method, json_t *params, struct err *e);
/*
 * The answer to the last request: *result is new. -ETIMEDOUT: none came yet (timeout_ms < 0: no
 * limit), ask again; -EINTR: a signal came; -ECONNRESET: the VMM closed. An error answer keeps its
 * kind and message.
 */
int rpc_receive(struct rpc *r, int timeout_ms, json_t **result, struct err *e);
/* Both; `result` may be NULL. A signal does not interrupt it. */
int rpc_call(struct rpc *r, const char *method, json_t *params, int timeout_ms, json_t **result,
             struct err *e);
/* The process that listens there, as the kernel knows it. */
pid_t rpc_peer_pid(const struct rpc *r);
