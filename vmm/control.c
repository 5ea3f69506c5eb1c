/*
 * control: see control.h. Loop thread.
 *
 * Requests hang in one list of the control until they are answered; one whose client has gone has
 * `client` NULL, one whose control has gone (or was forgotten after a fork) `control` NULL.
 */
#include "vmm/control.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vmm/control_client.h"
#include "vmm/control_parse.h"
#include "vmm/core/base64.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/loop.h"

#define CONTROL_BACKLOG 128
#define ACCEPT_PAUSE_NS 100000000u

struct control_request {
    struct control *control;
    struct client *client;
    struct control_call call;
    struct loop_timer wait_timer; /* of a `wait` only */
    struct control_request *next;
};

struct control {
    struct loop *loop;
    int listener_fd;
    struct loop_source listener;
    struct loop_timer accept_timer; /* armed while accept(2) is out of fds */
    const struct control_ops *ops;
    void *arg;
    struct client *clients;
    unsigned client_count;
    struct control_request *requests;
};

/* Text that came from a peer or was cut may not be UTF-8; JSON must be. */
static json_t *clean_string(const char *text)
{
    json_t *s = json_string(text);
    if (s != NULL)
        return s;
    char buf[ERR_TEXT_MAX];
    (void)snprintf(buf, sizeof buf, "%s", text);
    for (char *p = buf; *p != '\0'; p++) {
        if ((unsigned char)*p >= 0x80)
            *p = '?';
    }
    return json_string(buf);
}

/* Steals `message`. A NULL message or a failed dump is out of memory: the client is closed. */
static void send_message(struct client *client, json_t *message)
{
    char *text = message == NULL ? NULL : json_dumps(message, JSON_COMPACT);
    json_decref(message);
    if (text == NULL) {
        client_drop(client);
        return;
    }
    size_t len = strlen(text);
    text[len] = '\n'; /* the terminating zero is ours to use: the length goes along */
    client_send(client, text, len + 1);
    free(text);
}

static json_t *error_message(json_t *id, int code, const struct err *e, const char *state)
{
    json_t *data = json_pack("{s:s}", "kind", rpc_kind(code));
    if (e->errnum > 0)
        (void)json_object_set_new(data, "errno", json_integer(e->errnum));
    if (state != NULL)
        (void)json_object_set_new(data, "state", json_string(state));
    return json_pack("{s:s, s:o, s:{s:i, s:o, s:o}}", "jsonrpc", "2.0", "id",
                     id != NULL ? json_incref(id) : json_null(), "error", "code", code, "message",
                     clean_string(e->text), "data", data);
}

/* Unlinks, frees; tells the client that one of its places is free. */
static void request_end(struct control_request *req)
{
    if (req->control != NULL) {
        struct control_request **p = &req->control->requests;
        while (*p != req)
            p = &(*p)->next;
        *p = req->next;
        loop_timer_cancel(req->control->loop, &req->wait_timer); /* on_gone ends open waits */
    }
    if (req->client != NULL)
        client_end_request(req->client);
    control_call_free(&req->call);
    free(req);
}

/* From here on it is no open wait that on_gone would end by itself. */
static void begin_answer(struct control_request *req)
{
    if (req->control != NULL)
        loop_timer_cancel(req->control->loop, &req->wait_timer);
}

void control_reply(struct control_request *req, json_t *result)
{
    begin_answer(req);
    if (result == NULL)
        result = json_object();
    if (req->client != NULL)
        send_message(req->client, json_pack("{s:s, s:O, s:o}", "jsonrpc", "2.0", "id", req->call.id,
                                            "result", result));
    else
        json_decref(result);
    request_end(req);
}

void control_reply_changed(struct control_request *req, bool changed)
{
    control_reply(req, json_pack("{s:b}", "changed", changed));
}

static void fail_code(struct control_request *req, int code, const struct err *e)
{
    begin_answer(req);
    if (req->client != NULL && req->control != NULL) {
        struct control *c = req->control;
        json_t *status = code == -32000 - ERR_STATE ? c->ops->status(c->arg) : NULL;
        const char *state = json_string_value(json_object_get(status, "state"));
        send_message(req->client, error_message(req->call.id, code, e, state));
        json_decref(status);
    }
    request_end(req);
}

void control_fail(struct control_request *req, const struct err *e)
{
    fail_code(req, -32000 - (int)(e->code == ERR_NONE ? ERR_HOST : e->code), e);
}

/* True if the wait was answered. */
static bool try_wait(struct control_request *req)
{
    struct control *c = req->control;
    struct err e = {0};
    int rc = c->ops->reached(c->arg, req->call.p.wait.what, &e);
    if (rc == 0)
        return false;
    if (rc > 0)
        control_reply(req, c->ops->status(c->arg));
    else
        control_fail(req, &e);
    return true;
}

static void on_wait_timeout(void *arg)
{
    struct control_request *req = arg;
    if (try_wait(req))
        return;
    struct err e = {0};
    (void)err_set(&e, ERR_GUEST, 0, "wait: not reached within %u ms", req->call.p.wait.timeout_ms);
    fail_code(req, RPC_TIMEOUT, &e);
}

static void begin_wait(struct control_request *req)
{
    if (!try_wait(req))
        loop_timer_arm(req->control->loop, &req->wait_timer,
                       (uint64_t)req->call.p.wait.timeout_ms * 1000000u, on_wait_timeout, req);
}

void control_state_changed(struct control *c)
{
    struct control_request *req = c->requests;
    while (req != NULL) {
        /* An answer can close its client and free other waits: begin again after each. */
        if (req->call.method == CONTROL_WAIT && try_wait(req))
            req = c->requests;
        else
            req = req->next;
    }
}

static void answer_console(struct control *c, struct control_request *req)
{
    size_t cap = req->call.p.console_bytes;
    uint8_t *bytes = malloc(cap + 1);
    char *text = malloc(BASE64_LEN(cap) + 1);
    json_t *result = NULL;
    if (bytes != NULL && text != NULL) {
        uint64_t total = 0;
        size_t n = c->ops->console(c->arg, bytes, cap, &total);
        base64_encode(bytes, n, text);
        result = json_pack("{s:s, s:I}", "data", text, "total", (json_int_t)total);
    }
    free(bytes);
    free(text);
    if (result != NULL) {
        control_reply(req, result);
    } else {
        struct err e = {0};
        (void)err_set(&e, ERR_HOST, ENOMEM, "console");
        control_fail(req, &e);
    }
}

static void dispatch(struct control *c, struct control_request *req)
{
    const struct control_ops *ops = c->ops;
    switch (req->call.method) {
    case CONTROL_BOOT:
        ops->boot(c->arg, req, &req->call.p.boot);
        return;
    case CONTROL_STATUS:
        control_reply(req, ops->status(c->arg));
        return;
    case CONTROL_CONSOLE:
        answer_console(c, req);
        return;
    case CONTROL_PAUSE:
        ops->pause(c->arg, req);
        return;
    case CONTROL_RESUME:
        ops->resume(c->arg, req);
        return;
    case CONTROL_SNAPSHOT:
        ops->snapshot(c->arg, req, &req->call.p.snapshot);
        return;
    case CONTROL_FORK:
        ops->fork(c->arg, req, &req->call.p.fork);
        return;
    case CONTROL_STOP:
        ops->stop(c->arg, req, &req->call.p.stop);
        return;
    case CONTROL_WAIT:
        begin_wait(req);
        return;
    case CONTROL_QUIT:
        ops->quit(c->arg, req);
        return;
    }
}

static void on_line(void *arg, struct client *client, char *line, size_t len)
{
    struct control *c = arg;
    struct control_request *req = calloc(1, sizeof *req);
    if (req == NULL) {
        client_drop(client);
        return;
    }
    struct err e = {0};
    int rc = control_parse(line, len, &req->call, &e);
    if (rc < 0) {
        send_message(client, error_message(req->call.id, rc, &e, NULL));
        control_call_free(&req->call);
        free(req);
        return;
    }
    req->control = c;
    req->client = client;
    /* At the end: waits are answered in the order they came. */
    struct control_request **p = &c->requests;
    while (*p != NULL)
        p = &(*p)->next;
    *p = req;
    client_begin_request(client);
    dispatch(c, req);
}

static void on_broken(void *arg, struct client *client, int code)
{
    struct err e = {0};
    if (code == RPC_TOO_LARGE)
        (void)err_set(&e, ERR_LIMIT, 0, "the line is longer than %d bytes", CONTROL_LINE_MAX);
    else
        (void)err_set(&e, ERR_LIMIT, 0, "the line was not completed within %llu s",
                      CONTROL_PARTIAL_NS / 1000000000u);
    send_message(client, error_message(NULL, code, &e, NULL));
}

/* Its unanswered requests go on without it, but nobody waits any more. */
static void on_gone(void *arg, struct client *client)
{
    struct control *c = arg;
    struct client **p = &c->clients;
    while (*p != NULL && *p != client)
        p = &(*p)->next;
    if (*p != NULL) {
        *p = client->next;
        c->client_count--;
    }
    for (struct control_request *req = c->requests, *next; req != NULL; req = next) {
        next = req->next;
        if (req->client != client)
            continue;
        req->client = NULL;
        if (req->call.method == CONTROL_WAIT && req->wait_timer.deadline_ns != 0)
            request_end(req);
    }
}

static const struct client_ops client_ops = {.line = on_line, .broken = on_broken, .gone = on_gone};

int control_add_client(struct control *c, int fd, struct err *e)
{
    struct client *client = NULL;
    int rc = client_create(&client, c->loop, fd, &client_ops, c, e);
    if (rc < 0)
        return rc;
    client->next = c->clients;
    c->clients = client;
    c->client_count++;
    if (c->client_count > CONTROL_CLIENTS_MAX) {
        struct err full = {0};
        (void)err_set(&full, ERR_LIMIT, 0, "%d clients are connected already", CONTROL_CLIENTS_MAX);
        client->closing = true; /* before the send: it may be gone afterwards */
        send_message(client, error_message(NULL, RPC_TOO_MANY_CLIENTS, &full, NULL));
    }
    return 0;
}

static bool peer_is_owner(int fd)
{
    struct ucred peer;
    socklen_t len = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0)
        return false;
    return peer.uid == 0 || peer.uid == geteuid();
}

static void on_accept_pause(void *arg)
{
    struct control *c = arg;
    loop_set_events(c->loop, &c->listener, EPOLLIN);
}

static void on_connection(void *arg, uint32_t events)
{
    struct control *c = arg;
    CLEANUP_FD int fd = accept4(c->listener_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        /* Out of fds: the listener stays readable, so look away for a moment instead of spinning.
         */
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            loop_set_events(c->loop, &c->listener, 0);
            loop_timer_arm(c->loop, &c->accept_timer, ACCEPT_PAUSE_NS, on_accept_pause, c);
        }
        return;
    }
    if (peer_is_owner(fd) && control_add_client(c, fd, NULL) == 0)
        (void)take_fd(&fd); /* the client's now */
}

int control_create(struct control **out, struct loop *loop, int listener_fd,
                   const struct control_ops *ops, void *arg, struct err *e)
{
    /* jansson seeds its hash tables from /dev/urandom at first use; the filter forbids that open.
     */
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof seed, 0) != sizeof seed)
        return err_sys(e, "getrandom");
    json_object_seed(seed | 1);
    struct control *c = calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "control");
    c->loop = loop;
    c->ops = ops;
    c->arg = arg;
    c->listener_fd = listener_fd;
    if (listener_fd >= 0) {
        /* Once more, also if it listens: SO_PEERCRED of a client then names this process, not the
         * parent that bound the socket before a fork. */
        int rc = listen(listener_fd, CONTROL_BACKLOG) < 0 ? err_sys(e, "listen") : 0;
        if (rc == 0)
            rc = loop_add(loop, &c->listener, listener_fd, EPOLLIN, on_connection, c, e);
        if (rc < 0) {
            free(c);
            return rc;
        }
    }
    *out = c;
    return 0;
}

static void orphan_requests(struct control *c)
{
    for (struct control_request *req = c->requests, *next; req != NULL; req = next) {
        next = req->next;
        req->control = NULL;
        req->client = NULL;
        req->next = NULL;
        if (req->call.method == CONTROL_WAIT) /* ours alone: no op holds it */
            request_end(req);
    }
    c->requests = NULL;
}

void control_drain(struct control *c, int timeout_ms)
{
    uint64_t end = clock_mono_ns() + (uint64_t)timeout_ms * 1000000u;
    for (struct client *client = c->clients, *next; client != NULL; client = next) {
        next = client->next;
        uint64_t now = clock_mono_ns();
        client_drain(client, now < end ? (int)((end - now) / 1000000u) : 0);
    }
}

void control_free(struct control *c)
{
    if (c == NULL)
        return;
    for (struct control_request *req = c->requests; req != NULL; req = req->next)
        loop_timer_cancel(c->loop, &req->wait_timer);
    orphan_requests(c);
    while (c->clients != NULL)
        client_drop(c->clients);
    loop_timer_cancel(c->loop, &c->accept_timer);
    loop_remove(c->loop, &c->listener);
    fd_close(&c->listener_fd);
    free(c);
}

void control_forget(struct control *c)
{
    if (c == NULL)
        return;
    orphan_requests(c);
    for (struct client *client = c->clients, *next; client != NULL; client = next) {
        next = client->next;
        client_forget(client);
    }
    fd_close(&c->listener_fd);
    free(c);
}
