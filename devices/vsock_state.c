/*
 * vsock_state: save and restore of the vsock device (format: docs/image-format.md). Called through
 * virtio_device_ops while the device is quiesced, loop thread only.
 *
 * Saved: every connection the guest knows of, resets that wait for a receive buffer, the bytes for
 * the guest agent, the next host port. Not saved: host fds, clients whose REQUEST has not left yet
 * (they belong to the process that accepted them), bytes for host peers (they leave through the
 * process that has the peer).
 *
 * Restored: the control connection goes on with its exact counters. Of every other connection only
 * an RST for the guest is left, which goes out when the gate opens: the guest's first work is its
 * renewal, and nothing in it reacts to lost peers before it is a machine of its own. Host ports go
 * on counting, so an RST, or a packet of the guest that was under way, never meets a new
 * connection.
 */
#include "devices/vsock_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "vmm/core/err.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define VSOCK_STATE_VERSION 1u
#define RECORD_WORDS 11u
#define RECORD_BYTES (RECORD_WORDS * 4u)
#define RST_BYTES 12u
#define FLAG_CONTROL 1u
#define FLAG_CREDIT_ASKED 2u
#define RECORDS_MAX (VSOCK_CONNECTIONS_MAX + 1u) /* the control connection is beside the limit */

static bool guest_knows(const struct vsock_conn *c)
{
    if (c->state == CONN_REQUESTED)
        return (c->pending & PENDING_REQUEST) == 0;
    return c->state == CONN_OPEN || c->state == CONN_RESET;
}

static void record_put(uint8_t *to, const struct vsock_conn *c)
{
    const uint32_t words[RECORD_WORDS] = {
        c->guest_port,
        c->host_port,
        (uint32_t)c->state,
        (c->control ? FLAG_CONTROL : 0) | (c->credit_asked ? FLAG_CREDIT_ASKED : 0),
        c->pending,
        c->guest_shut | c->shut_sent << 8,
        c->peer_buf_alloc,
        c->peer_fwd_cnt,
        c->tx_cnt,
        c->fwd_cnt,
        c->fwd_cnt_sent,
    };
    for (unsigned i = 0; i < RECORD_WORDS; i++)
        le32_put(to + i * 4, words[i]);
}

static int save_connections(struct vsock *v, struct state_writer *w, struct err *e)
{
    uint8_t *records = malloc((size_t)(v->conn_count + 1) * RECORD_BYTES);
    if (records == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "save vsock connections");
    struct vsock_conn *c;
    size_t n = 0;
    TAILQ_FOREACH (c, &v->all, all) {
        if (guest_knows(c))
            record_put(records + n++ * RECORD_BYTES, c);
    }
    state_put_bytes(w, "connections", records, n * RECORD_BYTES);
    free(records);
    return 0;
}

static void save_rsts(const struct vsock *v, struct state_writer *w)
{
    uint8_t records[VSOCK_RSTS_MAX * RST_BYTES];
    size_t len = 0;
    for (unsigned i = 0; i < v->rst_count; i++) {
        const struct vsock_rst *r = &v->rsts[(v->rst_first + i) % VSOCK_RSTS_MAX];
        if (r->type == 0)
            continue;
        le32_put(records + len, r->guest_port);
        le32_put(records + len + 4, r->host_port);
        le32_put(records + len + 8, r->type);
        len += RST_BYTES;
    }
    state_put_bytes(w, "resets", records, len);
}

static void save_control_bytes(const struct vsock *v, struct state_writer *w)
{
    uint8_t bytes[VSOCK_CONTROL_BYTES_MAX];
    struct iovec spans[2];
    size_t len = 0;
    int count = v->control == NULL ? 0 : vsock_ring_peek(&v->control->to_guest, spans);
    for (int i = 0; i < count; i++) {
        memcpy(bytes + len, spans[i].iov_base, spans[i].iov_len);
        len += spans[i].iov_len;
    }
    state_put_bytes(w, "control-bytes", bytes, len);
}

int vsock_save(struct virtio_device *dev, struct state_writer *w, struct err *e)
{
    struct vsock *v = vsock_of(dev);
    /* A child, because the transport has written queue nodes and properties go before nodes. */
    state_begin(w, "sockets");
    state_put_u32(w, "version", VSOCK_STATE_VERSION);
    state_put_u32(w, "next-host-port", v->next_host_port);
    int rc = save_connections(v, w, e);
    if (rc < 0)
        return rc;
    save_rsts(v, w);
    save_control_bytes(v, w);
    state_end(w);
    return 0;
}

static int bad(struct err *e, const char *what, uint32_t guest_port, uint32_t host_port)
{
    return err_set(e, ERR_BAD_IMAGE, 0, "vsock connection of guest port %u and host port %u: %s",
                   guest_port, host_port, what);
}

static int restore_control(struct vsock_conn *c, const uint32_t *w, struct err *e)
{
    struct vsock *v = c->owner;
    if (v->control != NULL)
        return bad(e, "a second control connection", w[0], w[1]);
    if (w[1] != VSOCK_CONTROL_PORT || w[2] != CONN_OPEN || (w[5] & VSOCK_SHUT_BOTH) != 0 ||
        (w[4] & ~(PENDING_RESPONSE | PENDING_ANY_TIME)) != 0)
        return bad(e, "not a sound control connection", w[0], w[1]);
    c->control = true;
    c->credit_asked = (w[3] & FLAG_CREDIT_ASKED) != 0;
    c->pending = w[4];
    c->peer_buf_alloc = w[6];
    c->peer_fwd_cnt = w[7];
    c->tx_cnt = w[8];
    c->fwd_cnt = w[9];
    c->fwd_cnt_sent = w[10];
    v->control = c;
    return 0;
}

static int restore_connection(struct vsock *v, const uint8_t *record, struct err *e)
{
    uint32_t w[RECORD_WORDS];
    for (unsigned i = 0; i < RECORD_WORDS; i++)
        w[i] = le32_get(record + i * 4);
    if (vsock_conn_find(v, w[0], w[1]) != NULL)
        return bad(e, "saved twice", w[0], w[1]);
    bool control = (w[3] & FLAG_CONTROL) != 0;
    struct vsock_conn *c = vsock_conn_new(v, control ? CONN_OPEN : CONN_RESET);
    if (c == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "restore vsock connections");
    vsock_conn_bind(c, w[0], w[1]);
    if (control)
        return restore_control(c, w, e);
    c->pending = PENDING_RST;
    c->waits_for_gate = true;
    return 0;
}

static int restore_connections(struct vsock *v, const struct state_node *n, struct err *e)
{
    const void *p;
    size_t len;
    int rc = state_get_blob(n, "connections", &p, &len, e);
    if (rc < 0)
        return rc;
    if (len % RECORD_BYTES != 0 || len / RECORD_BYTES > RECORDS_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "vsock connections of %zu bytes, expected n * %u, n <= %u", len,
                       RECORD_BYTES, RECORDS_MAX);
    for (size_t at = 0; at < len && rc == 0; at += RECORD_BYTES)
        rc = restore_connection(v, (const uint8_t *)p + at, e);
    return rc;
}

static int restore_rsts(struct vsock *v, const struct state_node *n, struct err *e)
{
    const void *p;
    size_t len;
    int rc = state_get_blob(n, "resets", &p, &len, e);
    if (rc < 0)
        return rc;
    if (len % RST_BYTES != 0 || len / RST_BYTES > VSOCK_RSTS_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0, "vsock resets of %zu bytes, expected n * %u, n <= %u",
                       len, RST_BYTES, VSOCK_RSTS_MAX);
    for (size_t at = 0; at < len; at += RST_BYTES) {
        const uint8_t *r = (const uint8_t *)p + at;
        vsock_queue_rst(v, le32_get(r), le32_get(r + 4), le16_get(r + 8));
    }
    return 0;
}

static int restore_control_bytes(struct vsock *v, const struct state_node *n, struct err *e)
{
    const void *p;
    size_t len;
    struct iovec spans[2];
    int rc = state_get_blob(n, "control-bytes", &p, &len, e);
    if (rc < 0 || len == 0)
        return rc;
    if (v->control == NULL || len > VSOCK_CONTROL_BYTES_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0, "%zu vsock control bytes, expected at most %u", len,
                       v->control == NULL ? 0 : VSOCK_CONTROL_BYTES_MAX);
    if (!vsock_ring_reserve(&v->control->to_guest, (uint32_t)len, spans))
        return err_set(e, ERR_HOST, ENOMEM, "restore vsock control bytes");
    memcpy(spans[0].iov_base, p, len); /* an empty ring starts at its beginning: one span */
    vsock_ring_commit(&v->control->to_guest, (uint32_t)len);
    return 0;
}

static int restore_all(struct vsock *v, const struct state_node *n, struct err *e)
{
    struct state_node own;
    uint32_t next_host_port = 0;
    int rc = state_child(n, "sockets", &own, e);
    if (rc == 0)
        rc = state_check_version(&own, VSOCK_STATE_VERSION, e);
    if (rc == 0)
        rc = state_get_u32(&own, "next-host-port", &next_host_port, e);
    if (rc == 0 && (next_host_port < VSOCK_HOST_PORT_FIRST || next_host_port == VSOCK_PORT_ANY))
        rc = err_set(e, ERR_BAD_IMAGE, 0, "vsock next host port %u, expected at least %u",
                     next_host_port, VSOCK_HOST_PORT_FIRST);
    if (rc == 0)
        rc = restore_connections(v, &own, e);
    if (rc == 0)
        rc = restore_rsts(v, &own, e);
    if (rc == 0)
        rc = restore_control_bytes(v, &own, e);
    if (rc == 0)
        v->next_host_port = next_host_port;
    return rc;
}

int vsock_restore(struct virtio_device *dev, const struct state_node *n, struct err *e)
{
    struct vsock *v = vsock_of(dev);
    const struct vsock_control_ops *owner = v->control_ops;
    v->quiesced = true; /* until resume */
    v->paused = true;   /* the same: a copy may stand for long before it runs */
    vsock_enter(v);
    int rc = restore_all(v, n, e);
    if (rc < 0) {
        v->control_ops = NULL; /* a connection it never heard of has nothing to say at its end */
        vsock_drop_all(v, "reset: the saved state was refused");
        v->control_ops = owner;
    }
    vsock_touch_all(v);
    vsock_leave(v);
    return rc;
}
