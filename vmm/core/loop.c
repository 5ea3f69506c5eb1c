/*
 * loop: see loop.h.
 */
#include "vmm/core/loop.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"

#define LOOP_EVENTS_PER_ROUND 32

static void on_wake(void *arg, uint32_t events)
{
    struct loop *loop = arg;
    uint64_t n;
    (void)!read(loop->wake_fd, &n, sizeof n); /* non-blocking: an empty counter is fine */
    if (loop->wake_fn != NULL)
        loop->wake_fn(loop->wake_arg);
}

int loop_init(struct loop *loop, struct err *e)
{
    *loop = (struct loop){.epoll_fd = -1, .wake_fd = -1};
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (loop->epoll_fd < 0)
        return err_sys(e, "epoll_create1");
    loop->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop->wake_fd < 0) {
        int rc = err_sys(e, "eventfd");
        fd_close(&loop->epoll_fd);
        return rc;
    }
    int rc = loop_add(loop, &loop->wake_source, loop->wake_fd, EPOLLIN, on_wake, loop, e);
    if (rc < 0)
        loop_close(loop);
    return rc;
}

static void forget_all(struct loop *loop)
{
    for (struct loop_source *s = loop->sources, *next; s != NULL; s = next) {
        next = s->next;
        *s = (struct loop_source){.fd = -1};
    }
    for (struct loop_timer *t = loop->timers, *next; t != NULL; t = next) {
        next = t->next;
        *t = (struct loop_timer){0};
    }
    loop->sources = NULL;
    loop->timers = NULL;
}

void loop_close(struct loop *loop)
{
    forget_all(loop);
    fd_close(&loop->epoll_fd);
    fd_close(&loop->wake_fd);
}

void loop_close_inherited(struct loop *loop)
{
    loop_close(
        loop); /* close alone never edits the shared epoll set: the parent keeps its own fd */
}

int loop_add(struct loop *loop, struct loop_source *s, int fd, uint32_t events, loop_fd_fn *fn,
             void *arg, struct err *e)
{
    struct epoll_event ev = {.events = events, .data.ptr = s};
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &ev) < 0)
        return err_sys(e, "epoll_ctl add fd %d", fd);
    *s = (struct loop_source){
        .fd = fd, .events = events, .fn = fn, .arg = arg, .serial = 1, .next = loop->sources};
    if (loop->sources != NULL)
        loop->sources->prev = s;
    loop->sources = s;
    return 0;
}

void loop_set_events(struct loop *loop, struct loop_source *s, uint32_t events)
{
    if (s->serial == 0 || s->events == events)
        return;
    struct epoll_event ev = {.events = events, .data.ptr = s};
    (void)epoll_ctl(loop->epoll_fd, EPOLL_CTL_MOD, s->fd, &ev); /* fd is in the set: cannot fail */
    s->events = events;
}

void loop_remove(struct loop *loop, struct loop_source *s)
{
    if (s->serial == 0)
        return;
    (void)epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, s->fd, NULL); /* same */
    if (s->prev != NULL)
        s->prev->next = s->next;
    else
        loop->sources = s->next;
    if (s->next != NULL)
        s->next->prev = s->prev;
    *s = (struct loop_source){.fd = -1};
}

void loop_timer_cancel(struct loop *loop, struct loop_timer *t)
{
    for (struct loop_timer **p = &loop->timers; *p != NULL; p = &(*p)->next) {
        if (*p == t) {
            *p = t->next;
            break;
        }
    }
    t->deadline_ns = 0;
    t->next = NULL;
}

void loop_timer_arm(struct loop *loop, struct loop_timer *t, uint64_t delay_ns, loop_timer_fn *fn,
                    void *arg)
{
    loop_timer_cancel(loop, t);
    t->deadline_ns = clock_mono_ns() + delay_ns;
    t->fn = fn;
    t->arg = arg;
    struct loop_timer **p = &loop->timers;
    while (*p != NULL && (*p)->deadline_ns <= t->deadline_ns)
        p = &(*p)->next;
    t->next = *p;
    *p = t;
}

void loop_wake(struct loop *loop)
{
    uint64_t one = 1;
    (void)!write(loop->wake_fd, &one, sizeof one); /* a full counter wakes the loop as well */
}

void loop_wait_wake(struct loop *loop)
{
    struct pollfd p = {.fd = loop->wake_fd, .events = POLLIN};
    while (poll(&p, 1, -1) < 0 && errno == EINTR)
        ;
    uint64_t n;
    (void)!read(loop->wake_fd, &n, sizeof n); /* readable, and nobody else reads it */
}

void loop_set_wake(struct loop *loop, loop_timer_fn *fn, void *arg)
{
    loop->wake_fn = fn;
    loop->wake_arg = arg;
}

static void run_timers(struct loop *loop)
{
    uint64_t now = clock_mono_ns();
    while (loop->timers != NULL && loop->timers->deadline_ns <= now) {
        struct loop_timer *t = loop->timers;
        loop_timer_cancel(loop, t);
        t->fn(t->arg);
    }
}

/* A callback may have removed (and its owner freed) a source that is later in `events`. */
static bool still_there(const struct loop *loop, const struct loop_source *s)
{
    for (const struct loop_source *o = loop->sources; o != NULL; o = o->next) {
        if (o == s)
            return true;
    }
    return false;
}

int loop_round(struct loop *loop, int timeout_ms, struct err *e)
{
    if (loop->timers != NULL) {
        uint64_t now = clock_mono_ns();
        uint64_t due = loop->timers->deadline_ns;
        uint64_t wait_ms = due <= now ? 0 : (due - now + 999999) / 1000000;
        if (timeout_ms < 0 || wait_ms < (uint64_t)timeout_ms)
            timeout_ms = wait_ms > 60000 ? 60000 : (int)wait_ms;
    }
    struct epoll_event events[LOOP_EVENTS_PER_ROUND];
    int n = epoll_wait(loop->epoll_fd, events, LOOP_EVENTS_PER_ROUND, timeout_ms);
    if (n < 0 && errno != EINTR)
        return err_sys(e, "epoll_wait");
    for (int i = 0; i < n; i++) {
        struct loop_source *s = events[i].data.ptr;
        if (i == 0 || still_there(loop, s))
            s->fn(s->arg, events[i].events);
    }
    run_timers(loop);
    return 0;
}
