/*
 * fork: the live fork of a machine, by fork(2).
 *
 *   request      fork_job_create: name the children, bind their sockets (all that can be refused)
 *   next turn    machine_fork: pause, freeze disks, save state into memory, fork(2), resume
 *   child        child_become: let go of the parent's things, new VM over the copied memory, load
 *   ready        machine_fork_report: one packet to the parent, which answers the request
 *
 * fork(2) is called between two rounds of the loop: no lock is held, no callback is on the stack
 * (so that forks of forks do not nest), every vCPU thread is parked, every device is quiet. The
 * parent forks once, whatever the count: the first child forks its siblings from the same frozen
 * memory while the parent already runs again. Loop thread.
 */
#include "vmm/fork.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "devices/blk.h"
#include "devices/disk.h"
#include "devices/virtio/device.h"
#include "vmm/control.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/log.h"
#include "vmm/core/loop.h"
#include "vmm/core/state.h"
#include "vmm/fork_report.h"
#include "vmm/machine.h"
#include "vmm/requests.h"

/* Between freeze and push a disk takes no writes; both sides push right after the fork. */
static int freeze_disks(struct machine *m, struct err *e)
{
    for (unsigned i = 0; i < m->spec.disk_count; i++) {
        int rc = disk_freeze(blk_disk(m->slots[i + 1].dev), e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int push_disks(struct machine *m, struct err *e)
{
    for (unsigned i = 0; i < m->spec.disk_count; i++) {
        int rc = disk_push(blk_disk(m->slots[i + 1].dev), e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* The child's name, paths and listeners take the place of the parent's. */
static void take_bindings(struct machine *m, struct fork_job *job, unsigned index, int *control_fd)
{
    struct fork_child *c = &job->children[index];
    (void)snprintf(m->bind.parent_id, sizeof m->bind.parent_id, "%s", m->bind.id);
    (void)snprintf(m->bind.id, sizeof m->bind.id, "%s", c->id);
    free(m->bind.control_path);
    free(m->bind.vsock_path);
    m->bind.control_path = c->control_path;
    m->bind.vsock_path = c->vsock_path;
    c->control_path = c->vsock_path = NULL;
    m->bind.vsock_listener = take_fd(&c->vsock_listener);
    *control_fd = take_fd(&c->control_listener);
    (void)snprintf(m->renewal.host_name, sizeof m->renewal.host_name, "%s", c->host_name);
    log_set_name(m->bind.id);
}

static void close_parents_jobs(struct machine *m)
{
    for (struct fork_job *j = m->fork_waiting; j != NULL; j = j->next)
        fd_close(&j->report_fd);
    m->fork_waiting = NULL;
    for (struct fork_job *j = m->fork_pending, *next; j != NULL; j = next) {
        next = j->next;
        fork_job_free(j,
                      true); /* closes our copies of their listeners; the names stay the parent's */
    }
    m->fork_pending = NULL;
}

static int child_build(struct machine *m, struct disk **disks, const void *blob, size_t len,
                       struct err *e)
{
    uint64_t mark = clock_mono_ns();
    int rc = machine_build_vm(m, e);
    phase_lap(&m->phases.create_ns, &mark);
    if (rc == 0)
        rc = machine_build_devices(m, true, disks, e);
    if (rc == 0)
        rc = push_disks(m, e);
    struct state_node root;
    if (rc == 0)
        rc = state_open(blob, len, &root, e);
    if (rc == 0)
        rc = machine_load(m, &root, e);
    phase_lap(&m->phases.load_ns, &mark);
    return rc;
}

/* Runs in the child; on return the main loop goes on as the child's. */
static void child_become(struct machine *m, struct fork_job *job, unsigned index, int ready_fd,
                         bool run, const void *blob, size_t len)
{
    struct disk *disks[SPEC_DISKS_MAX] = {0};
    struct phases inherited = job->phases;
    struct err e = {0};
    int control_fd = -1;
    if (run)
        pin_begin(
            &m->pin); /* nothing to do if the parent was pinned: so are we, with its old mask */
    else
        pin_end(&m->pin, NULL, 0);
    /* The loop first: it walks the sources of everything that is freed below. */
    loop_close_inherited(&m->loop);
    control_forget(m->control);
    m->control = NULL;
    close_parents_jobs(m);
    machine_forget(m, disks);
    m->ready_pipe = ready_fd;
    m->ready_index = index;
    m->begin_ns = job->begin_ns;
    m->phases.pause_ns = inherited.pause_ns;
    m->phases.save_ns = inherited.save_ns;
    m->is_copy = true;
    m->guest = m->guest == GUEST_SILENT ? GUEST_SILENT : GUEST_RENEWING;
    take_bindings(m, job, index, &control_fd);
    fork_job_free(job, true); /* closes the siblings' listeners; their sockets are theirs */
    int rc = machine_init(m, &e);
    if (rc == 0)
        rc = child_build(m, disks, blob, len, &e);
    if (rc == 0)
        rc = requests_listen(m, take_fd(&control_fd), &e);
    if (rc == 0 && run)
        rc = machine_resume(m, &e);
    if (rc < 0) {
        machine_fork_report(m, &e);
        machine_end(m, END_INTERNAL, "%s", e.text);
        return;
    }
    m->phases.total_ns = clock_mono_ns() - m->begin_ns;
    if (m->guest == GUEST_SILENT || !run) /* nobody will renew it now */
        machine_fork_report(m, NULL);
}

/* In the first child: makes the others. Returns the index this process is to become. */
static unsigned fork_siblings(struct fork_job *job, int ready_fd)
{
    for (unsigned i = 1; i < job->count; i++) {
        pid_t pid = fork();
        if (pid == 0)
            return i;
        if (pid < 0) {
            struct err e = {0};
            (void)err_sys(&e, "fork of child %s", job->children[i].id);
            fork_report_send(ready_fd, i, NULL, &e);
        }
    }
    return 0;
}

static void answer(struct fork_job *job)
{
    struct machine *m = job->m;
    if (job->failed) {
        for (unsigned i = 0; i < job->count; i++) {
            if (job->children[i].pid > 0)
                (void)kill(job->children[i].pid, SIGKILL); /* already gone is as good */
        }
        struct err e = job->first_error;
        (void)err_wrap(&e, 0, "fork %s", m->bind.id);
        struct control_request *req = job->req;
        fork_job_free(job, false); /* before the answer: who gets it finds nothing left */
        control_fail(req, &e);
        return;
    }
    job->phases.total_ns = clock_mono_ns() - job->begin_ns;
    for (unsigned i = 0; i < job->count && m->child_count < MACHINE_CHILDREN_MAX; i++) {
        struct machine_child *c = &m->children[m->child_count++];
        (void)snprintf(c->id, sizeof c->id, "%s", job->children[i].id);
        c->pid = job->children[i].pid;
    }
    control_reply(job->req, fork_answer_json(job));
    fork_job_free(job, true);
}

static void finish(struct fork_job *job)
{
    struct machine *m = job->m;
    loop_remove(&m->loop, &job->report_source);
    for (struct fork_job **p = &m->fork_waiting; *p != NULL; p = &(*p)->next) {
        if (*p == job) {
            *p = job->next;
            break;
        }
    }
    answer(job);
}

static void fail(struct fork_job *job, const struct err *e)
{
    if (!job->failed)
        job->first_error = *e;
    job->failed = true;
}

static void on_report(void *arg, uint32_t events)
{
    struct fork_job *job = arg;
    struct fork_report r;
    ssize_t n = recv(job->report_fd, &r, sizeof r, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n != (ssize_t)sizeof r || r.index >= job->count || job->children[r.index].has_reported) {
        struct err e = {0};
        for (unsigned i = 0; i < job->count; i++) {
            if (!job->children[i].has_reported)
                (void)err_set(&e, ERR_HOST, 0, "child %s ended before it was ready",
                              job->children[i].id);
        }
        fail(job, &e);
        finish(job);
        return;
    }
    struct fork_child *c = &job->children[r.index];
    c->has_reported = true;
    c->pid = r.pid;
    c->phases = r.phases;
    if (r.has_failed) {
        (void)err_wrap(&r.error, 0, "child %s", c->id);
        fail(job, &r.error);
    }
    if (++job->reported == job->count)
        finish(job);
}

/* The parent's side after fork(2): run again first, everything else later. */
static int parent_goes_on(struct machine *m, bool was_running, struct err *e)
{
    int rc = push_disks(m, e);
    if (rc == 0 && was_running)
        rc = machine_resume(m, e);
    if (rc < 0)
        machine_end(m, END_INTERNAL, "resume after a fork: %s", e->text);
    return rc;
}

static int wait_for_children(struct machine *m, struct fork_job *job, struct err *e)
{
    for (unsigned i = 0; i < job->count; i++) { /* theirs now */
        fd_close(&job->children[i].control_listener);
        fd_close(&job->children[i].vsock_listener);
    }
    job->next = m->fork_waiting;
    m->fork_waiting = job;
    return loop_add(&m->loop, &job->report_source, job->report_fd, EPOLLIN, on_report, job, e);
}

/* Everything between the pause and the resume. Returns the pid, 0 in a child, or -errno. */
static int cut(struct machine *m, struct fork_job *job, int ready_fd, bool was_running)
{
    struct state_writer w = {0};
    const void *blob = NULL;
    size_t len = 0;
    struct err e = {0};
    uint64_t mark = clock_mono_ns(), stopped = mark;
    int rc = machine_pause(m, &e);
    phase_lap(&job->phases.pause_ns, &mark);
    bool paused = rc == 0;
    if (rc == 0)
        rc = state_writer_init(&w, &e);
    if (rc == 0)
        rc = machine_save(m, &w, &e);
    if (rc == 0)
        rc = state_finish(&w, &blob, &len, &e);
    if (rc == 0)
        rc = freeze_disks(m, &e);
    phase_lap(&job->phases.save_ns, &mark);
    pid_t pid = -1;
    if (rc == 0) {
        pid = fork();
        if (pid == 0) {
            fd_close(&job->report_fd);
            unsigned index = fork_siblings(job, ready_fd);
            child_become(m, job, index, ready_fd, was_running, blob, len);
            state_writer_free(&w);
            return 0;
        }
        if (pid < 0)
            rc = err_sys(&e, "fork");
    }
    phase_lap(&job->phases.fork_ns, &mark);
    struct err resume_err = {0};
    if (paused && m->end == END_NONE && parent_goes_on(m, was_running, &resume_err) < 0 && rc == 0)
        rc = resume_err.errnum > 0 ? -resume_err.errnum : -EIO;
    job->phases.stopped_ns = was_running ? clock_mono_ns() - stopped : 0;
    state_writer_free(&w);
    if (rc < 0)
        fail(job, e.code != ERR_NONE ? &e : &resume_err);
    return pid > 0 ? pid : rc;
}

void machine_fork(struct machine *m, struct fork_job *job)
{
    int pair[2] = {-1, -1};
    struct err e = {0};
    bool was_running = m->is_running;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
        (void)err_sys(&e, "socketpair");
        fail(job, &e);
        answer(job);
        return;
    }
    job->report_fd = pair[0];
    int rc = cut(m, job, pair[1], was_running);
    if (rc == 0) /* the child: `m` is its machine, `job` is gone */
        return;
    fd_close(&pair[1]);
    if (rc > 0)
        rc = wait_for_children(m, job, &e);
    if (rc < 0) {
        if (!job->failed)
            fail(job, &e);
        answer(job);
    }
}

void machine_fork_report(struct machine *m, const struct err *e)
{
    if (m->ready_pipe < 0)
        return;
    struct phases p = machine_phases(m);
    fork_report_send(m->ready_pipe, m->ready_index, &p, e);
    fd_close(&m->ready_pipe);
}
