/*
 * rpc: see rpc.h.
 */
#include "tools/tine/rpc.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "vmm/control_parse.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/sock.h"

int rpc_connect(struct rpc *r, const char *path, struct err *e)
{
    int fd = sock_connect(path, e);
    if (fd < 0)
        return fd;
    *r = (struct rpc){.fd = fd};
    return 0;
}

void rpc_close(struct rpc *r)
{
    fd_close(&r->fd);
    free(r->in);
    *r = (struct rpc){.fd = -1};
}

int rpc_send(struct rpc *r, const char *method, json_t *params, struct err *e)
{
    json_t *m = json_pack("{s:s, s:I, s:s, s:o*}", "jsonrpc", "2.0", "id", ++r->last_id, "method",
                          method, "params", params);
    char *text = m == NULL ? NULL : json_dumps(m, JSON_COMPACT);
    json_decref(m);
    if (text == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "%s: request", method);
    size_t len = strlen(text);
    text[len] = '\n';
    int rc = fd_write_full(r->fd, text, len + 1, e);
    free(text);
    if (rc == -EPIPE)
        return err_set(e, ERR_GUEST, ECONNRESET, "%s: its VMM has ended", method);
    return rc < 0 ? err_wrap(e, rc, "%s", method) : 0;
}

/* Waits for bytes and appends them; -ETIMEDOUT, -EINTR, -ECONNRESET or another -errno. */
static int receive_some(struct rpc *r, int timeout_ms, struct err *e)
{
    struct pollfd p = {.fd = r->fd, .events = POLLIN};
    int n = poll(&p, 1, timeout_ms);
    if (n < 0)
        return err_sys(e, "poll");
    if (n == 0)
        return err_set(e, ERR_GUEST, ETIMEDOUT, "no answer on the control socket");
    if (r->in_len + 65536 > r->in_cap) {
        size_t cap = r->in_cap == 0 ? 65536 : 2 * r->in_cap;
        char *in = cap > 2 * RPC_LINE_MAX ? NULL : realloc(r->in, cap);
        if (in == NULL)
            return err_set(e, ERR_LIMIT, EMSGSIZE, "answer on the control socket");
        r->in = in;
        r->in_cap = cap;
    }
    ssize_t got = recv(r->fd, r->in + r->in_len, r->in_cap - r->in_len, 0);
    if (got == 0 || (got < 0 && errno == ECONNRESET))
        return err_set(e, ERR_GUEST, ECONNRESET, "its VMM ended before it answered");
    if (got < 0)
        return err_sys(e, "control socket");
    r->in_len += (size_t)got;
    return 0;
}

static int take_error(struct rpc *r, const json_t *error, struct err *e)
{
    json_int_t code = json_integer_value(json_object_get(error, "code"));
    const char *message = json_string_value(json_object_get(error, "message"));
    json_int_t number =
        json_integer_value(json_object_get(json_object_get(error, "data"), "errno"));
    r->error_code = code >= INT32_MIN && code < 0 ? (int)code : -1;
    enum err_code kind = ERR_HOST;
    if (code <= -32000 - ERR_HOST && code >= -32000 - ERR_UNSUPPORTED)
        kind = (enum err_code)(-32000 - code);
    else if (code == RPC_BAD_PARAMS)
        kind = ERR_USAGE;
    (void)err_set(e, kind, 0, "%s", message != NULL ? message : "an error without a message");
    if (e != NULL)
        e->errnum = number > 0 && number < 4096 ? (int)number : 0; /* the text has it already */
    return number > 0 && number < 4096 ? -(int)number : -EINVAL;
}

/* 0 and *answer NULL: it answers another request. */
static int take_line(struct rpc *r, size_t len, json_t **answer, struct err *e)
{
    json_t *m = json_loadb(r->in, len, JSON_REJECT_DUPLICATES, NULL);
    memmove(r->in, r->in + len + 1, r->in_len - len - 1);
    r->in_len -= len + 1;
    const json_t *id = json_object_get(m, "id");
    const json_t *error = json_object_get(m, "error");
    json_t *result = json_object_get(m, "result");
    int rc = 0;
    /* An error with id null is about the connection itself, so it is ours too. */
    if (json_is_object(error) && (json_is_null(id) || json_integer_value(id) == r->last_id))
        rc = take_error(r, error, e);
    else if (!json_is_object(result) || !json_is_integer(id))
        rc = err_set(e, ERR_GUEST, EPROTO, "the VMM answered nonsense");
    else if (json_integer_value(id) == r->last_id)
        *answer = json_incref(result);
    json_decref(m);
    return rc;
}

int rpc_receive(struct rpc *r, int timeout_ms, json_t **result, struct err *e)
{
    uint64_t end = clock_mono_ns() + (uint64_t)(timeout_ms < 0 ? 0 : timeout_ms) * 1000000u;
    json_t *answer = NULL;
    r->error_code = 0;
    while (answer == NULL) {
        char *nl = r->in_len == 0 ? NULL : memchr(r->in, '\n', r->in_len);
        int rc;
        if (nl != NULL) {
            rc = take_line(r, (size_t)(nl - r->in), &answer, e);
        } else {
            uint64_t now = clock_mono_ns();
            int left = timeout_ms < 0 ? -1 : now >= end ? 0 : (int)((end - now) / 1000000u) + 1;
            rc = receive_some(r, left, e);
        }
        if (rc < 0)
            return rc;
    }
    *result = answer;
    return 0;
}

int rpc_call(struct rpc *r, const char *method, json_t *params, int timeout_ms, json_t **result,
             struct err *e)
{
    json_t *answer = NULL;
    int rc = rpc_send(r, method, params, e);
    if (rc < 0)
        return rc;
    do {
        rc = rpc_receive(r, timeout_ms, &answer, e);
    } while (rc == -EINTR);
    if (rc < 0)
        return rc;
    if (result != NULL)
        *result = answer;
    else
        json_decref(answer);
    return 0;
}

pid_t rpc_peer_pid(const struct rpc *r)
{
    struct ucred peer;
    socklen_t len = sizeof peer;
    return getsockopt(r->fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0 ? -1 : peer.pid;
}
