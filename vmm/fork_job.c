/*
 * fork_job: prepares a fork (names, sockets) before anything is paused, and reports about it
 * afterwards. Loop thread.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/control.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/sock.h"
#include "vmm/fork.h"
#include "vmm/fork_report.h"
#include "vmm/machine.h"

#define NAME_TRIES_MAX 4096

/* "<folder of the parent's socket>/<id><suffix>" */
static char *beside(const char *parent_path, const char *id, const char *suffix)
{
    const char *slash = strrchr(parent_path, '/');
    int dir_len = slash != NULL ? (int)(slash - parent_path) + 1 : 0;
    char *out = NULL;
    return asprintf(&out, "%.*s%s%s", dir_len, parent_path, id, suffix) < 0 ? NULL : out;
}

static int name_child(struct fork_job *job, unsigned i, const struct control_fork *p, struct err *e)
{
    struct machine *m = job->m;
    struct fork_child *c = &job->children[i];
    int n;
    if (p->children != NULL) {
        n = snprintf(c->id, sizeof c->id, "%s", p->children[i].id);
        c->control_path = strdup(p->children[i].control);
        c->vsock_path = strdup(p->children[i].vsock);
    } else {
        n = snprintf(c->id, sizeof c->id, "%s-%u", m->bind.id, ++m->forks_ever);
        c->control_path = beside(m->bind.control_path, c->id, ".sock");
        c->vsock_path = beside(m->bind.control_path, c->id, ".vsock");
    }
    if (n < 0 || (size_t)n >= sizeof c->id)
        return err_set(e, ERR_LIMIT, 0, "child name %s-%u is longer than %d bytes", m->bind.id,
                       i + 1, SPEC_ID_MAX);
    if (c->control_path == NULL || c->vsock_path == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "paths of child %s", c->id);
    const char *base = p->host_name != NULL ? p->host_name : c->id;
    if (p->host_name != NULL && job->count > 1)
        n = snprintf(c->host_name, sizeof c->host_name, "%s-%u", base, i + 1);
    else
        n = snprintf(c->host_name, sizeof c->host_name, "%s", base);
    if (n < 0 || (size_t)n >= sizeof c->host_name)
        return err_set(e, ERR_LIMIT, 0, "host name %s is longer than %d bytes", base, SPEC_ID_MAX);
    return 0;
}

static int bind_child(struct fork_child *c, struct err *e)
{
    c->control_listener = sock_listen(c->control_path, e);
    if (c->control_listener < 0)
        return err_wrap(e, c->control_listener, "child %s", c->id);
    c->vsock_listener = sock_listen(c->vsock_path, e);
    if (c->vsock_listener < 0)
        return err_wrap(e, c->vsock_listener, "child %s", c->id);
    return 0;
}

/* A path that sock_listen refused because somebody lives there is not ours to remove. */
static void unlink_ours(const char *path, bool bound)
{
    if (path != NULL && bound)
        (void)unlink(path); /* its child may have done so itself */
}

/* A derived name may still be that of a child of an earlier machine of our name: take the next. */
static int place_child(struct fork_job *job, unsigned i, const struct control_fork *p,
                       struct err *e)
{
    struct fork_child *c = &job->children[i];
    for (unsigned tries = 0;; tries++) {
        int rc = name_child(job, i, p, e);
        if (rc == 0)
            rc = bind_child(c, e);
        if (rc != -EADDRINUSE || p->children != NULL || tries == NAME_TRIES_MAX)
            return rc;
        unlink_ours(c->control_path, c->control_listener >= 0);
        fd_close(&c->control_listener);
        free(c->control_path);
        free(c->vsock_path);
        c->control_path = c->vsock_path = NULL;
    }
}

int fork_job_create(struct fork_job **out, struct machine *m, const struct control_fork *p,
                    struct control_request *req, struct err *e)
{
    struct fork_job *job = calloc(1, sizeof *job);
    if (job != NULL)
        job->children = calloc(p->count, sizeof job->children[0]);
    if (job == NULL || job->children == NULL) {
        free(job);
        return err_set(e, ERR_HOST, ENOMEM, "fork of %u children", p->count);
    }
    job->m = m;
    job->req = req;
    job->count = p->count;
    job->report_fd = -1;
    job->report_source.fd = -1;
    job->begin_ns = clock_mono_ns();
    for (unsigned i = 0; i < p->count; i++)
        job->children[i].control_listener = job->children[i].vsock_listener = -1;
    int rc = 0;
    for (unsigned i = 0; rc == 0 && i < p->count; i++)
        rc = place_child(job, i, p, e);
    if (rc < 0) {
        fork_job_free(job, false);
        return err_wrap(e, rc, "fork %s", m->bind.id);
    }
    *out = job;
    return 0;
}

void fork_job_free(struct fork_job *job, bool up)
{
    for (unsigned i = 0; i < job->count; i++) {
        struct fork_child *c = &job->children[i];
        if (!up) {
            unlink_ours(c->control_path, c->control_listener >= 0 || job->report_fd >= 0);
            unlink_ours(c->vsock_path, c->vsock_listener >= 0 || job->report_fd >= 0);
        }
        fd_close(&c->control_listener);
        fd_close(&c->vsock_listener);
        free(c->control_path);
        free(c->vsock_path);
    }
    fd_close(&job->report_fd);
    free(job->children);
    free(job);
}

void fork_report_send(int fd, unsigned index, const struct phases *p, const struct err *e)
{
    struct fork_report r;
    memset(&r, 0, sizeof r); /* padding too: it crosses a process boundary */
    r.index = index;
    r.pid = (int32_t)getpid();
    if (p != NULL)
        r.phases = *p;
    if (e != NULL) {
        r.has_failed = true;
        r.error = *e;
    }
    (void)send(fd, &r, sizeof r, MSG_NOSIGNAL); /* a parent that is gone needs no report */
}

json_t *fork_answer_json(const struct fork_job *job)
{
    json_t *children = json_array();
    for (unsigned i = 0; i < job->count; i++) {
        const struct fork_child *c = &job->children[i];
        (void)json_array_append_new(children,
                                    json_pack("{s:s, s:i, s:s, s:s, s:o}", "id", c->id, "pid",
                                              c->pid, "control", c->control_path, "vsock",
                                              c->vsock_path, "timings", phases_json(&c->phases)));
    }
    return json_pack("{s:o, s:o}", "children", children, "timings", phases_json(&job->phases));
}
