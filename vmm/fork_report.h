/*
 * fork_report: what a child tells its parent, and what the parent tells the caller
 * (docs/protocol.md, fork). One SOCK_SEQPACKET packet per child over a socketpair that only these
 * processes hold.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "vmm/core/err.h"
#include "vmm/phases.h"

struct fork_job;

struct fork_report {
    uint32_t index;
    int32_t pid;
    bool has_failed;
    struct err error;
    struct phases phases;
};

/* p and e may be NULL; e non-NULL says that the child failed. */
void fork_report_send(int fd, unsigned index, const struct phases *p, const struct err *e);
/* New object. */
json_t *fork_answer_json(const struct fork_job *job);
