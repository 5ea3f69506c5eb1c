/*
 * agent_fixture: a tine-agent on Unix sockets in a folder of its own, for the agent's unit tests.
 * The program under test is named by the environment variable TINE_AGENT.
 */
#pragma once

#include "guest/agent/wire.h"
#include "tools/tine/exec_client.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct fixture {
    char dir[64], exec_path[96], control_path[96];
    pid_t pid;
    int control_listen; /* -1 unless with_control */
};

/* Result of one captured run; free with ran_free. */
struct ran {
    int rc;
    struct exec_result result;
    struct exec_capture out, err;
};

void fixture_start(struct fixture *f, bool with_control);
/* Stops the agent and asserts that it had ended only because of that. */
void fixture_stop(struct fixture *f);

int agent_connect(const struct fixture *f);
/* Runs argv with `input` (NULL: no stdin), capturing both outputs. */
struct ran agent_run(const struct fixture *f, struct exec_request request, const char *const *argv,
                     const void *input, size_t input_len);
struct ran agent_sh(const struct fixture *f, const char *script);
void ran_free(struct ran *r);

/* Raw frames. frame_recv returns the type, 0 at the end of the connection. */
void frame_send(int fd, uint32_t type, const void *payload, size_t len);
uint32_t frame_recv(int fd, uint8_t *payload, size_t cap, size_t *len);
/* Skips frames until one of `type`; false if the connection ends first. */
bool frame_await(int fd, uint32_t type, uint8_t *payload, size_t cap, size_t *len);
/* Sends EXEC of `sh -c script` and waits for STARTED; returns the guest pid. */
pid_t raw_start(int fd, const char *script, uint32_t flags);

/* Counts of the agent process, for "back to start". */
size_t count_fds(pid_t pid);
size_t count_children(pid_t pid);
/* Waits (at most 10 s) until no process has `word` in its command line; false if one stays. */
bool processes_gone(const char *word);
uint64_t mono_ms(void);
