/*
 * renewal: the VMM's end of the agent's control connection (docs/agent-protocol.md): hello after a
 * boot, renewal of a copy before it may speak, shutdown on request.
 *
 * A copy gets fresh entropy, a new generation id and machine-id, the wall clock and its host name
 * as one RENEW frame; it is ready when RENEWED with status 0 and the same generation id came back.
 * Anything else, or nothing in RENEWAL_TIMEOUT_NS, ends the copy: never half renewed. Loop thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "devices/vsock.h"
#include "guest/agent/wire.h"
#include "vmm/core/loop.h"

struct err;
struct machine;

/* Generous: a guest kernel that is interpreted takes 0.2 s for what hardware does in 1 ms. */
#define RENEWAL_TIMEOUT_NS (60ull * 1000 * 1000 * 1000)

struct renewal {
    uint8_t buf[WIRE_HEADER_SIZE + WIRE_CONTROL_PAYLOAD_MAX];
    size_t have;
    bool is_waiting; /* RENEW was sent, RENEWED not yet seen */
    uint8_t generation_id[WIRE_ID_SIZE];
    char host_name[WIRE_HOSTNAME_MAX + 1];
    uint64_t sent_ns;
    struct loop_timer timer;
};

extern const struct vsock_control_ops renewal_control_ops; /* arg is the struct machine */

/* Sends RENEW: fresh randomness from the kernel, the machine's id as host name unless one is set.
 */
int renewal_begin(struct machine *m, struct err *e);
/* Takes the saved beginning of a frame back; it is as hostile as the frame itself. */
int renewal_load(struct renewal *r, const void *bytes, size_t len, struct err *e);
int renewal_shutdown(struct machine *m, struct err *e);
