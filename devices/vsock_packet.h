/*
 * vsock_packet: the 44-byte header of virtio-vsock packets (virtio 1.2, 5.10.6). Any thread.
 *
 * The header is copied out of guest memory once, decoded, and only the decoded form is looked at.
 */
#pragma once

#include <stdint.h>

#include "vmm/core/num.h"

#define VSOCK_HEADER_BYTES 44u

#define VSOCK_TYPE_STREAM 1u

enum vsock_op {
    VSOCK_OP_INVALID = 0,
    VSOCK_OP_REQUEST = 1,
    VSOCK_OP_RESPONSE = 2,
    VSOCK_OP_RST = 3,
    VSOCK_OP_SHUTDOWN = 4,
    VSOCK_OP_RW = 5,
    VSOCK_OP_CREDIT_UPDATE = 6,
    VSOCK_OP_CREDIT_REQUEST = 7,
};

/* Flags of SHUTDOWN: what its sender will not do any more. */
#define VSOCK_SHUT_RECEIVE 1u
#define VSOCK_SHUT_SEND 2u
#define VSOCK_SHUT_BOTH 3u

struct vsock_header {
    uint64_t src_cid, dst_cid;
    uint32_t src_port, dst_port;
    uint32_t len; /* of the payload that follows */
    uint16_t type, op;
    uint32_t flags;
    uint32_t buf_alloc; /* sender's whole receive buffer for this connection, bytes */
    uint32_t fwd_cnt;   /* bytes the sender has taken out of that buffer so far, modulo 2^32 */
};

static inline void vsock_header_encode(uint8_t out[VSOCK_HEADER_BYTES],
                                       const struct vsock_header *h)
{
    le64_put(out, h->src_cid);
    le64_put(out + 8, h->dst_cid);
    le32_put(out + 16, h->src_port);
    le32_put(out + 20, h->dst_port);
    le32_put(out + 24, h->len);
    le16_put(out + 28, h->type);
    le16_put(out + 30, h->op);
    le32_put(out + 32, h->flags);
    le32_put(out + 36, h->buf_alloc);
    le32_put(out + 40, h->fwd_cnt);
}

static inline void vsock_header_decode(struct vsock_header *h, const uint8_t in[VSOCK_HEADER_BYTES])
{
    *h = (struct vsock_header){
        .src_cid = le64_get(in),
        .dst_cid = le64_get(in + 8),
        .src_port = le32_get(in + 16),
        .dst_port = le32_get(in + 20),
        .len = le32_get(in + 24),
        .type = le16_get(in + 28),
        .op = le16_get(in + 30),
        .flags = le32_get(in + 32),
        .buf_alloc = le32_get(in + 36),
        .fwd_cnt = le32_get(in + 40),
    };
}
