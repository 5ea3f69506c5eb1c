/*
 * requests: see requests.h. Each function here is one row of the protocol's method table: it checks
 * the run state, does the work through machine.h and answers once.
 */
#include "vmm/requests.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "devices/virtio/device.h"
#include "vmm/control.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/fork.h"
#include "vmm/machine.h"

static void on_boot(void *arg, struct control_request *req, const struct control_boot *p);

/* Fails the request unless the machine is in one of the space-separated states. */
static bool in_state(struct machine *m, struct control_request *req, const char *what,
                     const char *states)
{
    const char *now = machine_state_name(m);
    size_t n = strlen(now);
    for (const char *s = states; (s = strstr(s, now)) != NULL; s += n) {
        if ((s == states || s[-1] == ' ') && (s[n] == ' ' || s[n] == '\0'))
            return true;
    }
    struct err e = {0};
    (void)err_set(&e, ERR_STATE, 0, "%s: the machine is %s, expected one of: %s", what, now,
                  states);
    control_fail(req, &e);
    return false;
}

static void on_pause(void *arg, struct control_request *req)
{
    struct machine *m = arg;
    if (!in_state(m, req, "pause", "booting running paused"))
        return;
    bool was_running = m->is_running;
    struct err e = {0};
    if (machine_pause(m, &e) < 0)
        control_fail(req, &e);
    else
        control_reply_changed(req, was_running);
    control_state_changed(m->control);
}

static void on_resume(void *arg, struct control_request *req)
{
    struct machine *m = arg;
    if (!in_state(m, req, "resume", "booting running paused renewing"))
        return;
    bool was_running = m->is_running;
    struct err e = {0};
    if (machine_resume(m, &e) < 0)
        control_fail(req, &e);
    else
        control_reply_changed(req, !was_running);
    control_state_changed(m->control);
}

static void on_snapshot(void *arg, struct control_request *req, const struct control_snapshot *p)
{
    struct machine *m = arg;
    if (!in_state(m, req, "snapshot", "booting running paused"))
        return;
    struct phases t = {0};
    struct err e = {0};
    if (machine_snapshot(m, p->dir, &t, &e) < 0)
        control_fail(req, &e);
    else
        control_reply(req, json_pack("{s:o}", "timings", phases_json(&t)));
}

static void on_fork(void *arg, struct control_request *req, const struct control_fork *p)
{
    struct machine *m = arg;
    if (!in_state(m, req, "fork", "booting running paused"))
        return;
    struct err e = {0};
    struct fork_job *job = NULL;
    if (fork_job_create(&job, m, p, req, &e) < 0) {
        control_fail(req, &e);
        return;
    }
    struct fork_job **end = &m->fork_pending; /* for machine_turn */
    while (*end != NULL)
        end = &(*end)->next;
    *end = job;
}

static void on_stop_timeout(void *arg)
{
    machine_end(arg, END_STOPPED, "stopped after its grace");
}

static void on_stop(void *arg, struct control_request *req, const struct control_stop *p)
{
    struct machine *m = arg;
    bool ended = m->end != END_NONE;
    control_reply_changed(req, !ended);
    if (ended)
        return;
    struct err e = {0};
    if (p->grace_ms > 0 && m->is_running && m->guest == GUEST_READY && renewal_shutdown(m, &e) == 0)
        loop_timer_arm(&m->loop, &m->stop_timer, (uint64_t)p->grace_ms * 1000000, on_stop_timeout,
                       m);
    else
        machine_end(m, END_STOPPED, "stopped by request");
}

static void on_quit(void *arg, struct control_request *req)
{
    control_reply(req, NULL);
    machine_end(arg, END_STOPPED, "quit by request");
}

static json_t *string_or_null(const char *s)
{
    return s != NULL && s[0] != '\0' ? json_string(s) : json_null();
}

static json_t *devices_json(const struct machine *m)
{
    json_t *a = json_array();
    for (unsigned i = 0; i < m->slot_count; i++) {
        const struct virtio_device *d = m->slots[i].dev;
        (void)json_array_append_new(a, json_pack("{s:s, s:I}", "name", d->name, "faults",
                                                 (json_int_t)d->guest_fault_count));
    }
    return a;
}

static json_t *children_json(struct machine *m)
{
    json_t *a = json_array();
    unsigned kept = 0;
    for (unsigned i = 0; i < m->child_count; i++) {
        if (kill(m->children[i].pid, 0) < 0 && errno == ESRCH)
            continue;
        m->children[kept++] = m->children[i];
        (void)json_array_append_new(
            a, json_pack("{s:s, s:i}", "id", m->children[i].id, "pid", m->children[i].pid));
    }
    m->child_count = kept;
    return a;
}

static json_t *on_status(void *arg)
{
    struct machine *m = arg;
    struct phases p = machine_phases(m);
    json_t *reason = m->end != END_NONE ? json_string(end_reason_name(m->end)) : json_null();
    json_t *j = json_pack("{s:s, s:o, s:o, s:o}", "state", machine_state_name(m), "reason", reason,
                          "timings", phases_json(&p), "devices", devices_json(m));
    const struct {
        const char *name;
        json_t *value;
    } more[] = {
        {"id", json_string(m->bind.id)},
        {"pid", json_integer((json_int_t)getpid())},
        {"parent", string_or_null(m->bind.parent_id)},
        {"image", string_or_null(m->bind.image_dir)},
        {"control", string_or_null(m->bind.control_path)},
        {"vsock", string_or_null(m->bind.vsock_path)},
        {"memory_mib", json_integer((json_int_t)(m->is_built ? m->spec.memory_bytes >> 20 : 0))},
        {"cpus", json_integer((json_int_t)(m->is_built ? m->spec.cpus : 0))},
        {"ready", json_boolean(m->guest == GUEST_READY && m->end == END_NONE)},
        {"boot_id", string_or_null(m->boot_id)},
        {"uptime_us", json_integer((json_int_t)((clock_mono_ns() - m->begin_ns) / 1000))},
        {"children", children_json(m)},
        {"console_bytes", json_integer((json_int_t)serial_total(&m->serial))},
    };
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++)
        (void)json_object_set_new(j, more[i].name, more[i].value);
    return j;
}

static size_t on_console(void *arg, uint8_t *buf, size_t cap, uint64_t *total)
{
    struct machine *m = arg;
    *total = serial_total(&m->serial);
    return m->serial.ring != NULL ? serial_tail(&m->serial, buf, cap) : 0;
}

static int on_reached(void *arg, enum control_wait_for what, struct err *e)
{
    struct machine *m = arg;
    bool ended = m->end != END_NONE;
    if (what == CONTROL_WAIT_ENDED)
        return ended;
    if (ended)
        return err_set(e, ERR_STATE, 0, "the machine ended (%s): %s", end_reason_name(m->end),
                       m->end_text);
    if (what == CONTROL_WAIT_READY)
        return m->guest == GUEST_READY;
    if (what == CONTROL_WAIT_PAUSED)
        return m->is_built && !m->is_running;
    return strcmp(machine_state_name(m), "running") == 0;
}

static const struct control_ops ops = {
    .boot = on_boot,
    .pause = on_pause,
    .resume = on_resume,
    .snapshot = on_snapshot,
    .fork = on_fork,
    .stop = on_stop,
    .quit = on_quit,
    .status = on_status,
    .console = on_console,
    .reached = on_reached,
};

int requests_listen(struct machine *m, int listener_fd, struct err *e)
{
    CLEANUP_FD int fd = listener_fd;
    int rc = control_create(&m->control, &m->loop, fd, &ops, m, e);
    if (rc == 0)
        (void)take_fd(&fd);
    return rc;
}

static int fill_spec(struct machine_spec *s, const struct control_boot *p, struct err *e)
{
    s->memory_bytes = p->memory_mib << 20;
    s->cpus = p->cpus;
    int rc = 0;
    for (unsigned i = 0; rc == 0 && i < p->disk_count; i++)
        rc = spec_add_disk(s, p->disks[i].path, p->disks[i].read_only,
                           p->disks[i].overlay_max_bytes, e);
    for (unsigned i = 0; rc == 0 && i < p->grant_count; i++)
        rc = spec_add_grant(s, p->grants[i], e);
    return rc;
}

static int boot(struct machine *m, const struct control_boot *p, struct err *e)
{
    int rc = fill_spec(&m->spec, p, e);
    if (rc == 0)
        rc = machine_boot_files(m, p->kernel, p->initrd, p->cmdline, e);
    if (rc == 0 && !p->paused)
        rc = machine_resume(m, e);
    return rc < 0 ? err_wrap(e, rc, "boot %s", m->bind.id) : 0;
}

/* A boot that failed half-way leaves a process without a use: it ends, the answer says why. */
static void on_boot(void *arg, struct control_request *req, const struct control_boot *p)
{
    struct machine *m = arg;
    if (!in_state(m, req, "boot", "new"))
        return;
    struct err e = {0};
    if (boot(m, p, &e) == 0) {
        control_reply(req, NULL);
        control_state_changed(m->control);
        return;
    }
    control_fail(req, &e);
    machine_end(m, e.code == ERR_USAGE ? END_USAGE : END_INTERNAL, "%s", e.text);
}
