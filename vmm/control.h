/*
 * control: the server side of the control protocol (docs/protocol.md) of one machine.
 *
 * It owns the listener and its clients, reads lines, checks them strictly and hands each request,
 * parsed, to the machine through `struct control_ops`. Everything runs on the loop thread; nothing
 * blocks (but control_drain, at the very end). Memory is bounded by the CONTROL_* limits below.
 *
 * An answer may come later. A `struct control_request` stays valid until exactly one of
 * control_reply* / control_fail was called for it, also when its client has gone away (the answer
 * is then dropped) and also after control_forget. Parameters handed to an op live as long as their
 * request. An op may answer before it returns.
 *
 * Fork: in the child loop_close_inherited comes first (it forgets our sources and timers), then
 * control_forget closes every inherited fd without a byte to anybody, then loop_init and
 * control_create with the child's own listener. Requests that were pending are the parent's to
 * answer; an answer to one in the child goes nowhere and only frees it.
 *
 * System calls when running: listen (control_create), accept4, getsockopt, recvfrom, sendto,
 * epoll_ctl, close, poll (drain).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

struct control;
struct control_request;
struct err;
struct loop;

#define CONTROL_LINE_MAX (1024 * 1024) /* bytes of one request, without its newline */
#define CONTROL_CLIENTS_MAX 32
#define CONTROL_PENDING_MAX 16 /* unanswered requests of one client; then it is not read */
#define CONTROL_OUTPUT_MAX (4096 * 1024)  /* unread answers of one client; then it is dropped */
#define CONTROL_PARTIAL_NS 10000000000ull /* a line begun must end within this time */
#define CONTROL_DISKS_MAX 6
#define CONTROL_GRANTS_MAX 16
#define CONTROL_CHILDREN_MAX 128
#define CONTROL_ID_MAX 63
#define CONTROL_HOST_NAME_MAX 63
#define CONTROL_CONSOLE_MAX 65536
#define CONTROL_CMDLINE_MAX 65535
#define CONTROL_MEMORY_MIB_MAX (1u << 20)
#define CONTROL_CPUS_MAX 16
#define CONTROL_WAIT_MS_MAX 3600000u
#define CONTROL_WAIT_MS_DEFAULT 30000u
#define CONTROL_GRACE_MS_MAX 600000u

struct control_disk {
    const char *path;
    bool read_only;
    uint64_t overlay_max_bytes; /* 0: no cap of its own */
};

struct control_boot {
    const char *kernel;
    const char *initrd;  /* NULL: none */
    const char *cmdline; /* "" when not given */
    uint64_t memory_mib;
    unsigned cpus; /* 1 when not given */
    struct control_disk disks[CONTROL_DISKS_MAX];
    unsigned disk_count;
    uint32_t grants[CONTROL_GRANTS_MAX]; /* guest->host vsock ports; never 1, which is our own */
    unsigned grant_count;
    bool paused;
};

struct control_snapshot {
    const char *dir; /* absolute */
};

/* id is valid by control_id_check; paths are absolute and fit a Unix socket address. */
struct control_child {
    const char *id, *control, *vsock;
};

struct control_fork {
    unsigned count; /* >= 1 */
    /* NULL when only a count was given: the machine derives `<id>-<n>` and paths beside its own. */
    const struct control_child *children;
    const char *host_name; /* NULL: the child's id */
};

struct control_stop {
    uint32_t grace_ms; /* 0: end at once; else ask the agent to shut down first */
};

enum control_wait_for {
    CONTROL_WAIT_READY,
    CONTROL_WAIT_RUNNING,
    CONTROL_WAIT_PAUSED,
    CONTROL_WAIT_ENDED
};

/* The machine's side. Every op but the last three answers through its request. */
struct control_ops {
    void (*boot)(void *arg, struct control_request *req, const struct control_boot *p);
    void (*pause)(void *arg, struct control_request *req);
    void (*resume)(void *arg, struct control_request *req);
    void (*snapshot)(void *arg, struct control_request *req, const struct control_snapshot *p);
    void (*fork)(void *arg, struct control_request *req, const struct control_fork *p);
    void (*stop)(void *arg, struct control_request *req, const struct control_stop *p);
    void (*quit)(void *arg, struct control_request *req);

    /* New object as docs/protocol.md describes; also the answer of a successful wait. */
    json_t *(*status)(void *arg);
    /* Copies the newest bytes of the console ring, at most cap; *total is all that ever came. */
    size_t (*console)(void *arg, uint8_t *buf, size_t cap, uint64_t *total);
    /* 1: that state is reached; 0: not yet; -errno: it cannot be reached any more. */
    int (*reached)(void *arg, enum control_wait_for what, struct err *e);
};

/* Takes over listener_fd on success. `ops` and `arg` must outlive the control. */
int control_create(struct control **out, struct loop *loop, int listener_fd,
                   const struct control_ops *ops, void *arg, struct err *e);
/* Serves an already connected stream socket (a socketpair) as well; takes the fd over on success.
 */
int control_add_client(struct control *c, int fd, struct err *e);
/* Whenever the machine's state or readiness changed: answers the waits that are now due. */
void control_state_changed(struct control *c);
/* Writes what is still queued for at most timeout_ms, blocking: the last act before the exit. */
void control_drain(struct control *c, int timeout_ms);
/* Closes listener and clients; pending requests become answerable to nobody. NULL is fine. */
void control_free(struct control *c);
/* The child's side of fork(2), see above; after loop_close_inherited. NULL is fine. */
void control_forget(struct control *c);

/* Exactly one of these per request; `result` is stolen, NULL stands for {}. */
void control_reply(struct control_request *req, json_t *result);
void control_reply_changed(struct control_request *req, bool changed);
void control_fail(struct control_request *req, const struct err *e);

/* [a-z0-9][a-z0-9_.-]{0,62}, the one form of a machine's name. */
int control_id_check(const char *id, struct err *e);
