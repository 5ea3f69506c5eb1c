/*
 * phases: how long each step of a boot, restore, fork or snapshot took (docs/protocol.md, Timings).
 * Nanoseconds on the monotonic clock here, integer microseconds in JSON; 0 means it did not occur.
 */
#pragma once

#include <jansson.h>
#include <stdint.h>

struct phases {
    uint64_t pause_ns, save_ns, fork_ns, create_ns, map_ns, load_ns, entry_ns, renew_ns, stopped_ns,
        ready_ns, first_exit_ns, total_ns;
};

/* New object with the members that are not 0. */
json_t *phases_json(const struct phases *p);

/* Adds the time since *mark to *sum and moves the mark to now. */
void phase_lap(uint64_t *sum, uint64_t *mark_ns);
