/*
 * loop: the one event loop of a VMM process (epoll). It owns all devices.
 *
 * Everything here is called on the loop thread, except loop_wake, which any thread (and a signal
 * handler) may call. Nothing that runs in the loop may block.
 *
 * After fork(2) the child must not touch the inherited epoll set (an epoll_ctl there would edit the
 * parent's): it calls loop_close_inherited, which only closes fds, then loop_init, and every owner
 * registers its new fds again.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;
struct loop;

/* events is an EPOLL* mask. The callback may remove its own and other sources. */
typedef void loop_fd_fn(void *arg, uint32_t events);
typedef void loop_timer_fn(void *arg);

/* Embedded in its owner; owner keeps it alive until loop_remove. Starts zeroed with fd = -1. */
struct loop_source {
    int fd;
    uint32_t events;
    loop_fd_fn *fn;
    void *arg;
    uint64_t serial; /* 0 when not in a loop; guards against events for a removed source */
    struct loop_source *next, *prev;
};

/* Embedded one-shot timer on CLOCK_MONOTONIC. */
struct loop_timer {
    uint64_t deadline_ns; /* 0 when not armed */
    loop_timer_fn *fn;
    void *arg;
    struct loop_timer *next;
};

struct loop {
    int epoll_fd;
    int wake_fd; /* eventfd */
    struct loop_source wake_source;
    loop_timer_fn *wake_fn; /* runs on the loop thread after loop_wake; may be NULL */
    void *wake_arg;
    struct loop_source *sources;
    struct loop_timer *timers; /* sorted by deadline */
    bool stop;
};

int loop_init(struct loop *loop, struct err *e);
void loop_close(struct loop *loop);
void loop_close_inherited(struct loop *loop);

int loop_add(struct loop *loop, struct loop_source *s, int fd, uint32_t events, loop_fd_fn *fn,
             void *arg, struct err *e);
/* Changes the event mask; 0 keeps the source but silences it (errors still show). */
void loop_set_events(struct loop *loop, struct loop_source *s, uint32_t events);
/* Fine on a source that is not in the loop. Does not close the fd. */
void loop_remove(struct loop *loop, struct loop_source *s);

void loop_timer_arm(struct loop *loop, struct loop_timer *t, uint64_t delay_ns, loop_timer_fn *fn,
                    void *arg);
void loop_timer_cancel(struct loop *loop, struct loop_timer *t);

/* Async-signal-safe and thread-safe. */
void loop_wake(struct loop *loop);
/* Blocks until somebody woke the loop; runs nothing. Only for the short wait of a pause. */
void loop_wait_wake(struct loop *loop);
void loop_set_wake(struct loop *loop, loop_timer_fn *fn, void *arg);

/* One round: waits at most timeout_ms (-1: until something happens), runs what is due. */
int loop_round(struct loop *loop, int timeout_ms, struct err *e);
