/*
 * requests: what the methods of the control protocol do to the machine (docs/protocol.md). Loop
 * thread.
 */
#pragma once

struct err;
struct machine;

/* Serves the control protocol of `m` on this listener, which is taken over. */
int requests_listen(struct machine *m, int listener_fd, struct err *e);
