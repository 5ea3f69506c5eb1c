/*
 * sweep: kills all that descends from a program (docs/agent-protocol.md 2.5), on the loop thread.
 *
 * Sessions, groups, parents and environments can all be left by a process on purpose. A resource
 * limit is inherited by fork and exec alike, so each program gets a mark in one that never acts:
 * RLIMIT_RTTIME near 2^61 microseconds. Reading it back is one system call per process. A pass
 * kills what it finds; passes go on, with growing pauses, until one finds nothing (processes may
 * fork while they are looked for). One pass serves all sweeps that are under way.
 */
#include "guest/agent/agent.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#define MARK_BIT (1ull << 61)
#define DIRENTS_SIZE 8192u

/* Bits 61: ours; 38-60: the agent's pid (agents may nest in tests); 32-37: slot; 0-31: serial. */
uint64_t sweep_mark(const struct agent *a, const struct exec *x)
{
    uint64_t pid = a->pid & 0x7fffff;
    uint64_t slot = (uint64_t)(x - a->exec) & 0x3f;
    return MARK_BIT | pid << 38 | slot << 32 | x->serial;
}

static struct exec *sweep_owner(struct agent *a, uint64_t mark)
{
    if ((mark & MARK_BIT) == 0 || mark >= 2 * MARK_BIT)
        return NULL;
    struct exec *x = &a->exec[(mark >> 32) & 0x3f];
    return x->used && x->sweeping && sweep_mark(a, x) == mark ? x : NULL;
}

/* A name of /proc as a pid, 0 if it is none. */
static pid_t pid_parse(const char *name)
{
    pid_t pid = 0;
    for (; *name >= '0' && *name <= '9' && pid < 100000000; name++)
        pid = 10 * pid + (*name - '0');
    return *name == 0 ? pid : 0;
}

static void process_check(struct agent *a, pid_t pid)
{
    struct rlimit mark;
    if (pid <= 1 || prlimit(pid, RLIMIT_RTTIME, NULL, &mark) < 0)
        return;
    struct exec *x = sweep_owner(a, mark.rlim_max);
    if (x == NULL)
        x = sweep_owner(a, mark.rlim_cur);
    if (x == NULL)
        return;
    x->sweep_found = true;
    (void)kill(pid, SIGKILL); /* ESRCH: it has just ended */
}

/* False if /proc cannot be read. */
static bool sweep_pass(struct agent *a)
{
    _Alignas(struct dirent64) char buf[DIRENTS_SIZE];
    if (a->proc_fd < 0 || lseek(a->proc_fd, 0, SEEK_SET) < 0)
        return false;
    ssize_t n;
    while ((n = getdents64(a->proc_fd, buf, sizeof buf)) > 0) {
        for (ssize_t at = 0; at < n;) {
            const struct dirent64 *d = (const struct dirent64 *)(const void *)(buf + at);
            process_check(a, pid_parse(d->d_name));
            at += d->d_reclen;
        }
    }
    return n == 0;
}

void sweep_start(struct agent *a, struct exec *x)
{
    if (!x->reaped)
        (void)kill(-x->pid, SIGKILL); /* the group at once; the rest is found by passes */
    if (x->sweeping)
        return;
    x->sweeping = true;
    x->sweep_passes = 0;
    x->sweep_pause_ns = SWEEP_PAUSE_MIN_NS;
    /* Not at once: in a copy the resets come together with RENEW, which goes first. */
    x->sweep_next_ns = a->now_ns + SWEEP_PAUSE_MIN_NS;
}

/* After a pass: done, or when to look again. */
static void sweep_settle(struct agent *a, struct exec *x, bool readable)
{
    x->sweep_passes++;
    bool give_up = !readable || x->sweep_passes >= SWEEP_PASSES_MAX;
    if (!x->sweep_found || give_up) {
        x->survivors = x->sweep_found || !readable;
        x->sweeping = false;
        return;
    }
    x->sweep_next_ns = a->now_ns + x->sweep_pause_ns;
    x->sweep_pause_ns *= 2;
    if (x->sweep_pause_ns > SWEEP_PAUSE_MAX_NS)
        x->sweep_pause_ns = SWEEP_PAUSE_MAX_NS;
}

void sweep_tick(struct agent *a)
{
    bool due = false;
    uint64_t looked_for = 0; /* a sweep that begins below, in exec_reap, was not looked for */
    for (uint64_t m = a->used_slots; m != 0; m &= m - 1) {
        struct exec *x = &a->exec[__builtin_ctzll(m)];
        due = due || (x->sweeping && a->now_ns >= x->sweep_next_ns);
        looked_for |= x->sweeping ? m & -m : 0;
        x->sweep_found = false;
    }
    if (!due)
        return;
    bool readable = sweep_pass(a);
    exec_reap(a); /* so that the next pass does not find the dead */
    for (uint64_t m = looked_for; m != 0; m &= m - 1)
        sweep_settle(a, &a->exec[__builtin_ctzll(m)], readable);
}
