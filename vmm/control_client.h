/*
 * control_client: one connection to the control socket: bytes in, lines out, answers back. Internal
 * to control.c, which gives each line a meaning. Loop thread; never blocks; memory bounded by the
 * CONTROL_* limits.
 *
 * A client may vanish in the middle of anything, also while its own line is being handled. It is
 * then `dead`: its fd is closed, its owner is told once (`gone`), and the memory goes when nobody
 * stands on it any more (`busy` is 0).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vmm/core/loop.h"

struct client;
struct err;

struct client_ops {
    /* A complete line, without its newline; it may be written over. */
    void (*line)(void *arg, struct client *c, char *line, size_t len);
    /* The stream cannot go on; code is RPC_TOO_LARGE or RPC_TOO_SLOW. Answer; the client closes. */
    void (*broken)(void *arg, struct client *c, int code);
    /* The connection is closed; forget the pointer. Called once. */
    void (*gone)(void *arg, struct client *c);
};

struct client {
    struct loop *loop;
    int fd; /* beside source.fd, which loop_close_inherited forgets */
    struct loop_source source;
    const struct client_ops *ops;
    void *arg;
    struct client *next; /* the owner's list */

    char *in;
    size_t in_len, in_cap;
    size_t in_scanned; /* no newline before this */
    char *out;
    size_t out_len, out_off, out_cap;

    unsigned pending; /* requests begun and not answered; kept by the owner by client_begin/end */
    unsigned busy;    /* stack frames that stand on it */
    bool eof;         /* the peer sends no more; it may still read */
    bool closing;     /* close once the output is out */
    bool dead;
    struct loop_timer partial_timer; /* armed while a begun line is incomplete */
    struct loop_timer resume_timer;  /* due at once: go on with lines held back by `pending` */
};

/* Takes the fd over on success. */
int client_create(struct client **out, struct loop *loop, int fd, const struct client_ops *ops,
                  void *arg, struct err *e);
/* Queues and tries to send; a reader too slow for CONTROL_OUTPUT_MAX is closed. */
void client_send(struct client *c, const char *bytes, size_t len);
/* No more is read; closes when all is sent. */
void client_finish(struct client *c);
void client_begin_request(struct client *c);
void client_end_request(struct client *c);
/* Closes at once and tells the owner. */
void client_drop(struct client *c);
/* Blocks up to timeout_ms until the queued output is sent. */
void client_drain(struct client *c, int timeout_ms);
/* The child's side of a fork, after loop_close_inherited: closes and frees; nothing is sent. */
void client_forget(struct client *c);
