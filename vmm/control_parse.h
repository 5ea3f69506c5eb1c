/*
 * control_parse: one line of the control protocol into a checked call. Used by control.c and its
 * fuzz target; any thread, no state. What comes in is hostile: every member is known, of the right
 * type and in range, or the call is refused with one error that names it.
 */
#pragma once

#include <jansson.h>

#include "vmm/control.h"
#include "vmm/core/err.h"

/* Codes of docs/protocol.md that are not made from an err_code (those are -32000 - code). */
#define RPC_PARSE (-32700)
#define RPC_INVALID_REQUEST (-32600)
#define RPC_NO_METHOD (-32601)
#define RPC_BAD_PARAMS (-32602)
#define RPC_TOO_LARGE (-32010)
#define RPC_TOO_SLOW (-32011)
#define RPC_TOO_MANY_CLIENTS (-32012)
#define RPC_TIMEOUT (-32013)

enum control_method {
    CONTROL_BOOT,
    CONTROL_STATUS,
    CONTROL_CONSOLE,
    CONTROL_PAUSE,
    CONTROL_RESUME,
    CONTROL_SNAPSHOT,
    CONTROL_FORK,
    CONTROL_STOP,
    CONTROL_WAIT,
    CONTROL_QUIT,
};

struct control_wait {
    enum control_wait_for what;
    uint32_t timeout_ms;
};

/* Strings point into `root`. Free with control_call_free, also after a failed control_parse. */
struct control_call {
    json_t *root;
    json_t *id; /* NULL as long as no valid id was seen */
    enum control_method method;
    union {
        struct control_boot boot;
        struct control_snapshot snapshot;
        struct control_fork fork;
        struct control_stop stop;
        struct control_wait wait;
        uint32_t console_bytes;
    } p;
    struct control_child *children; /* what p.fork.children points to */
};

/* 0, or the RPC_* code (negative); `call->id` is set if the line had a valid one. */
int control_parse(const char *line, size_t len, struct control_call *call, struct err *e);
void control_call_free(struct control_call *call);

/* The stable word of an RPC_* or err code's number. */
const char *rpc_kind(int code);
