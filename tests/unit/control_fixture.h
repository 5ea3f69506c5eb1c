/*
 * control_fixture: a control server on a loop, with a machine that is a few variables, and clients
 * on socketpairs. Everything runs in the test's one thread: a step is a loop round.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include <jansson.h>

#include "vmm/control.h"
#include "vmm/core/loop.h"

struct fake_machine {
    const char *state; /* what status says */
    bool ended;
    unsigned calls;                   /* ops of all kinds */
    struct control_request *held[64]; /* what `snapshot` and `fork` leave unanswered */
    unsigned held_count;
    bool hold;
    /* Copies of what the last boot and fork said. */
    char kernel[64], cmdline[64], child_id[64], host_name[64];
    uint64_t memory_mib, overlay_max_bytes;
    unsigned cpus, disk_count, grant_count, fork_count;
    bool paused, read_only;
    uint32_t grace_ms;
};

struct fixture {
    struct loop loop;
    struct control *control;
    struct fake_machine machine;
};

int fixture_setup(void **state);
int fixture_teardown(void **state);

/* The client's end of a new connection; non-blocking. */
int fixture_client(struct fixture *f);
void fixture_send(struct fixture *f, int fd, const char *text, size_t len);
/* Runs the loop until a whole line came; returned parsed. NULL: the server closed. */
json_t *fixture_answer(struct fixture *f, int fd);
/* One request, one answer. */
json_t *fixture_call(struct fixture *f, int fd, const char *line);
/* Runs the loop until it has nothing to do. */
void fixture_settle(struct fixture *f);
/* Frees the answer; its error code, or 0 for a result. */
int answer_code(json_t *answer);
