/*
 * vsock_control: the control connection (docs/agent-protocol.md): the guest connects to
 * VSOCK_CONTROL_PORT and this process is its peer. Called by the other vsock files and by the
 * machine (vsock.h), loop thread only.
 *
 * Invariant: at most one; v->control points to it exactly while it is OPEN. What the guest sends is
 * handed on while its packet is handled, so nothing of it is ever kept here; what we send waits in
 * to_guest for credit and receive buffers, and is saved with the device.
 */
#include "devices/vsock_internal.h"

#include <errno.h>
#include <string.h>

#include "vmm/core/err.h"
#include "vmm/core/num.h"

#define DELIVER_BYTES 4096u

void vsock_control_accept(struct vsock *v, const struct vsock_header *h)
{
    struct vsock_conn *c = vsock_conn_new(v, CONN_OPEN);
    if (c == NULL) {
        vsock_queue_rst(v, h->src_port, h->dst_port, VSOCK_TYPE_STREAM);
        return;
    }
    struct vsock_conn *old = v->control; /* an agent that started anew */
    if (old != NULL) {
        vsock_queue_rst(v, old->guest_port, old->host_port, VSOCK_TYPE_STREAM);
        vsock_conn_bury(old);
    }
    c->control = true;
    c->peer_buf_alloc = h->buf_alloc;
    c->peer_fwd_cnt = h->fwd_cnt;
    vsock_conn_bind(c, h->src_port, h->dst_port);
    c->pending = PENDING_RESPONSE;
    v->control = c;
    vsock_conn_touch(c);
    if (v->control_ops != NULL)
        v->control_ops->opened(v->control_arg);
}

void vsock_control_receive(struct vsock_conn *c, uint32_t len)
{
    struct vsock *v = c->owner;
    uint8_t bytes[DELIVER_BYTES];
    for (uint32_t at = 0; at < len;) {
        uint32_t n = (uint32_t)min_u64(len - at, sizeof bytes);
        (void)chain_read(&v->tx_chain, VSOCK_HEADER_BYTES + (uint64_t)at, bytes, n);
        vsock_conn_note_forwarded(c, n);
        at += n;
        if (v->control_ops != NULL)
            v->control_ops->data(v->control_arg, bytes, n);
    }
}

uint32_t vsock_control_read(struct vsock_conn *c, const struct chain *chain, uint32_t room)
{
    struct iovec spans[2];
    uint32_t done = 0;
    int count = vsock_ring_peek(&c->to_guest, spans);
    for (int i = 0; i < count && done < room; i++) {
        size_t n = (size_t)min_u64(spans[i].iov_len, room - done);
        done +=
            (uint32_t)chain_write(chain, VSOCK_HEADER_BYTES + (uint64_t)done, spans[i].iov_base, n);
    }
    vsock_ring_consume(&c->to_guest, done);
    return done;
}

void vsock_control_ended(struct vsock_conn *c)
{
    struct vsock *v = c->owner;
    c->control = false;
    if (v->control != c)
        return;
    v->control = NULL;
    if (v->control_ops != NULL && !v->forgotten)
        v->control_ops->closed(v->control_arg);
}

int vsock_control_send(struct virtio_device *dev, const void *bytes, size_t len, struct err *e)
{
    struct vsock *v = vsock_of(dev);
    struct vsock_conn *c = v->control;
    struct iovec spans[2];
    if (c == NULL)
        return err_set(e, ERR_GUEST, ENOTCONN, "control connection of the guest agent");
    if (len > VSOCK_CONTROL_BYTES_MAX - c->to_guest.len)
        return err_set(e, ERR_LIMIT, ENOBUFS, "%u bytes wait for the guest agent", c->to_guest.len);
    if (len == 0)
        return 0;
    if (!vsock_ring_reserve(&c->to_guest, (uint32_t)len, spans))
        return err_set(e, ERR_HOST, ENOMEM, "send to the guest agent");
    vsock_enter(v);
    memcpy(spans[0].iov_base, bytes, spans[0].iov_len);
    if (spans[1].iov_len > 0)
        memcpy(spans[1].iov_base, (const uint8_t *)bytes + spans[0].iov_len, spans[1].iov_len);
    vsock_ring_commit(&c->to_guest, (uint32_t)len);
    vsock_conn_touch(c);
    vsock_leave(v);
    return 0;
}

bool vsock_control_is_open(const struct virtio_device *dev)
{
    return ((const struct vsock *)(const void *)dev)->control != NULL;
}
