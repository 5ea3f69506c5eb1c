/*
 * agent: what the files of tine-agent share.
 *
 * One process, one thread, one epoll loop (main.c). Everything hangs off one `struct agent`, which
 * lives in zeroed memory so that untouched buffers cost nothing: on a slow guest a page fault and a
 * system call are what there is to save. All fds are O_CLOEXEC from birth, all but the standard
 * three are non-blocking, and every signal is blocked for ever (signals come by signalfd, a write
 * into a closed pipe is just EPIPE; a program that is started gets an empty mask).
 */
#pragma once

#include "guest/agent/wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXEC_MAX WIRE_EXEC_CONNECTIONS_MAX
#define EXEC_REQUEST_TIMEOUT_NS (10ull * 1000 * 1000 * 1000)
#define EXEC_LINGER_NS (60ull * 1000 * 1000 * 1000) /* for a client to take the last frame */
#define EXEC_PTY_GRACE_NS (200ull * 1000 * 1000)    /* for a terminal's output after its leader */
#define EXEC_PUMP_ROUNDS 4u                         /* buffers per connection and loop turn */
#define SWEEP_PASSES_MAX 200u
#define SWEEP_PAUSE_MIN_NS (2ull * 1000 * 1000)
#define SWEEP_PAUSE_MAX_NS (50ull * 1000 * 1000)
#define CONTROL_RETRY_MIN_MS 5u
#define CONTROL_RETRY_MAX_MS 1000u
#define CONTROL_STABLE_NS (1000ull * 1000 * 1000) /* up this long: reconnect at once */
#define NEVER_NS UINT64_MAX

#define TX_RESERVE                                                                                 \
    1024u /* room for the small frames that may wait behind a full load of output                  \
           */
#define TX_SIZE (WIRE_DATA_MAX + 2 * WIRE_HEADER_SIZE + TX_RESERVE)
#define RX_SIZE (WIRE_DATA_MAX + WIRE_HEADER_SIZE)
#define SPAWN_STACK_SIZE (64u * 1024)

/* What an epoll event is about; packed with a slot and that slot's serial into the event's u64. */
enum source {
    SOURCE_SIGNALS,
    SOURCE_LISTENER,
    SOURCE_CONTROL,
    SOURCE_CONN,
    SOURCE_STDIN,
    SOURCE_STDOUT,
    SOURCE_STDERR,
};

/* One output of a program. `ready`: a read may give something (edge-triggered). */
struct stream {
    int fd; /* -1: at its end */
    uint32_t type;
    bool ready, hangup, bounded;
    uint64_t remaining; /* if bounded: bytes that were in the pipe when the program ended */
    uint64_t sent, dropped;
};

/* Why a program is being killed. */
enum exec_end {
    END_NONE,
    END_TIMEOUT, /* EXIT still follows */
    END_REST,    /* the program ended, its descendants are swept, EXIT follows */
    END_GONE,    /* client gone or in error: nothing follows but what is in tx */
};

struct exec {
    /* A slot is in use while `used`; serial tells its uses apart in stale events. */
    bool used, started, reaped, last_queued, no_more_input;
    uint32_t serial;
    int conn;
    uint32_t conn_events; /* what epoll watches conn for */
    uint64_t deadline_ns; /* request, time-out, or linger, by state */
    uint64_t pty_deadline_ns;

    uint32_t flags;
    uint64_t output_cap_bytes;
    pid_t pid; /* leader of its session and group; valid as a target until reaped */
    int wstatus;
    enum exec_end end;

    bool sweeping, sweep_found, survivors;
    unsigned sweep_passes;
    uint64_t sweep_next_ns, sweep_pause_ns;

    struct stream out[2];
    unsigned turn;
    bool runnable;

    int in_fd;
    bool in_watched, in_blocked, in_eof, in_dead, in_midline;
    uint32_t window; /* stdin bytes the client may still send */
    uint32_t credit; /* consumed, not yet granted again */
    uint32_t in_off, in_len;

    uint8_t *big; /* an EXEC payload that does not fit rx */
    uint32_t big_size, big_len;
    uint32_t rx_len;
    uint32_t tx_off, tx_len;

    uint8_t rx[RX_SIZE];
    uint8_t in[WIRE_STDIN_WINDOW];
    uint8_t tx[TX_SIZE];
};

enum control_state { CONTROL_DOWN, CONTROL_CONNECTING, CONTROL_UP };

struct control {
    int fd;
    enum control_state state;
    uint64_t retry_ns, up_since_ns;
    uint32_t backoff_ms;
    uint32_t rx_len, tx_len;
    uint8_t rx[WIRE_HEADER_SIZE + WIRE_CONTROL_PAYLOAD_MAX];
    uint8_t tx[1024];
};

/* A small file that renewal rewrites in place. */
struct id_file {
    const char *path, *fallback;
    int fd;
};

struct renewer {
    int random_fd;
    struct id_file hostname, machine_id, generation;
};

struct agent {
    bool is_guest; /* PID 1 of a machine; false: a host process under test */
    bool quit;
    const char *listen_path, *control_path; /* host process only; control_path may be NULL */
    int epoll_fd, signal_fd, listen_fd, null_fd, proc_fd;
    uint32_t pid, uid; /* our own, read once */
    uint32_t serial;
    uint64_t used_slots; /* bit i: exec[i].used */
    uint64_t now_ns;     /* monotonic, read once per loop turn */
    struct control control;
    struct renewer renewer;
    uint8_t spawn_stack[SPAWN_STACK_SIZE] __attribute__((aligned(64)));
    const char *argv[WIRE_ARGC_MAX + 1];
    const char *envp[WIRE_ENVC_MAX + 4]; /* and PATH, HOME, GLIBC_TUNABLES, NULL */
    uint8_t scratch[WIRE_DATA_MAX];
    struct exec exec[EXEC_MAX];
};

_Static_assert(EXEC_MAX == 64, "used_slots is one full word");

/* main.c */
int loop_watch(struct agent *a, int op, int fd, uint32_t events, enum source source,
               const struct exec *x);
uint64_t clock_now_ns(void);
/* One line on stderr: "tine-agent: what: detail: errno N"; detail may be NULL, error 0. */
void say(const char *what, const char *detail, int error);

/* boot.c, guest only: mounts, modules, lo. Failures are said and lived with. */
void boot_setup(void);

/* renew.c */
void renewer_open(struct renewer *r, bool is_guest);
/* Applies one RENEW payload and fills the answer. `dry` checks only. */
void renewer_apply(struct renewer *r, const uint8_t *payload, size_t len, bool dry,
                   struct wire_renewed *answer);

/* control.c */
void control_tick(struct agent *a); /* connects again when it is time */
void control_event(struct agent *a, uint32_t events);
uint64_t control_deadline(const struct agent *a);
void agent_shutdown(struct agent *a, int reboot_command) __attribute__((cold));

/* exec.c */
void exec_accept(struct agent *a);
void exec_event(struct agent *a, struct exec *x, enum source source, uint32_t events);
void exec_reap(struct agent *a);
void exec_tick(struct agent *a, struct exec *x);    /* deadlines */
void exec_advance(struct agent *a, struct exec *x); /* moves bytes, ends what is at its end */
uint64_t exec_deadline(const struct exec *x);
/* Ends the program and what descends from it; what is in tx is still sent if conn is open. */
void exec_kill(struct agent *a, struct exec *x, enum exec_end why);
/* The client is gone: closes the connection and kills. */
void exec_gone(struct agent *a, struct exec *x);
/* Queues ERROR as the last frame and kills. */
void exec_error(struct agent *a, struct exec *x, enum wire_error_code code, const char *text);
void stream_close(struct stream *s);

/* exec_in.c: frames from the client, stdin of the program */
void exec_receive(struct agent *a, struct exec *x);
void exec_input_flush(struct agent *a, struct exec *x);
void exec_input_close(struct exec *x);

/* exec_out.c: frames to the client */
/* Appends a small frame: a u32 and up to WIRE_TEXT_MAX bytes. Dropped if there is no room. */
void exec_put_frame(struct exec *x, uint32_t type, const void *payload, size_t len);
void exec_put_text(struct exec *x, uint32_t type, const uint32_t *words, size_t nwords,
                   const char *text);
void exec_output_pump(struct agent *a, struct exec *x);
void exec_output_drain(struct agent *a, struct exec *x); /* program ended: only what is left */
void exec_queue_exit(struct exec *x);

/* spawn.c: starts the program of a decoded request. 0, or an errno with what failed. */
int exec_spawn(struct agent *a, struct exec *x, const struct wire_exec *request, const char *cwd,
               uint32_t *what);

/* sweep.c */
uint64_t sweep_mark(const struct agent *a, const struct exec *x);
void sweep_start(struct agent *a, struct exec *x);
void sweep_tick(struct agent *a); /* one pass over /proc if any sweep is due */
