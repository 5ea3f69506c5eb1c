/*
 * fork: a request to fork, with everything the children need that must exist before the pause.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "vmm/core/err.h"
#include "vmm/core/loop.h"
#include "vmm/phases.h"
#include "vmm/spec.h"

struct control_fork;
struct control_request;
struct machine;

#define FORK_CHILDREN_MAX 128

struct fork_child {
    char id[SPEC_ID_MAX + 1];
    char host_name[SPEC_ID_MAX + 1];
    char *control_path, *vsock_path;      /* owned */
    int control_listener, vsock_listener; /* bound by the parent, inherited by the child; owned */
    /* from its report */
    bool has_reported;
    int pid;
    struct phases phases;
};

struct fork_job {
    struct machine *m;
    struct control_request *req;
    unsigned count, reported;
    struct fork_child *children;
    int report_fd; /* parent's end; a packet per child */
    struct loop_source report_source;
    struct phases phases;
    uint64_t begin_ns;
    bool failed;
    struct err first_error;
    struct fork_job *next;
};

/* Names the children and binds their sockets; on failure nothing is left. */
int fork_job_create(struct fork_job **out, struct machine *m, const struct control_fork *p,
                    struct control_request *req, struct err *e);
/* Closes and frees; unlinks the sockets of children that are not `up`. */
void fork_job_free(struct fork_job *job, bool up);
