/*
 * vsock_internal: what the files of the vsock device share. Included by devices/vsock*.c only.
 *
 *   vsock.c          the device: queues, packets in and out, life cycle
 *   vsock_conn.c     connections: table, states, credit, what a packet does to one
 *   vsock_unix.c     the host side: listener, CONNECT lines, sockets
 *   vsock_control.c  the control connection, whose host end is this process
 *   vsock_state.c    save and restore
 *
 * Loop thread only. Every way in (a queue notification, a host event, a call of vsock.h) is wrapped
 * in vsock_enter/vsock_leave: inside, connections that end only move to the graveyard, so a pointer
 * stays good until the outermost leave, which also runs the queues once.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "devices/virtio/device.h"
#include "devices/vsock.h"
#include "devices/vsock_packet.h"
#include "devices/vsock_ring.h"
#include "vmm/core/loop.h"

#define VSOCK_RXQ 0u
#define VSOCK_TXQ 1u
#define VSOCK_EVENTQ 2u

#define VSOCK_BUF_ALLOC (256u << 10)     /* receive buffer we promise per connection */
#define VSOCK_BUFFERED_MAX (64ull << 20) /* bytes waiting for host peers, all connections */
#define VSOCK_CONTROL_BYTES_MAX (64u << 10)
#define VSOCK_PACKET_BYTES_MAX (64u << 10) /* payload of one packet to the guest */
#define VSOCK_RSTS_MAX 256u                /* resets for packets that belong to no connection */
#define VSOCK_BUCKETS 1024u
#define VSOCK_LINE_BYTES_MAX 32u /* "CONNECT 4294967294\n" is 19 */
#define VSOCK_HOST_PORT_FIRST (1u << 30)
#define VSOCK_PORT_ANY 0xffffffffu
#define VSOCK_TX_BUDGET 256u /* packets per run of the queues, then the loop gets its turn */
#define VSOCK_RX_BUDGET 256u

enum conn_state {
    CONN_LINE = 1,  /* host client whose CONNECT line is being read; not in the table */
    CONN_HELD,      /* line read, waits for the gate; not in the table */
    CONN_REQUESTED, /* REQUEST queued or sent to the guest */
    CONN_OPEN,
    CONN_RESET, /* all that is left is an RST for the guest */
    CONN_DRAIN, /* guest is done, its last bytes still go to the host; not in the table */
    CONN_GONE,  /* in the graveyard */
};

/* Packets that wait for a receive buffer: at most one of each kind per connection. */
#define PENDING_REQUEST 1u
#define PENDING_RESPONSE 2u
#define PENDING_RST 4u
#define PENDING_CREDIT_UPDATE 8u
#define PENDING_CREDIT_REQUEST 16u
/* These do not have to go before data. */
#define PENDING_ANY_TIME (PENDING_CREDIT_UPDATE | PENDING_CREDIT_REQUEST)

struct vsock_conn {
    struct vsock *owner;
    enum conn_state state;
    uint32_t guest_port, host_port;
    bool control;
    int fd; /* host peer; -1 for the control connection and when closed */
    struct loop_source source;
    uint32_t pending;    /* PENDING_* */
    uint32_t guest_shut; /* VSOCK_SHUT_* the guest has sent */
    uint32_t shut_sent;  /* VSOCK_SHUT_* we have sent */
    bool host_eof;       /* nothing more comes from the host peer */
    bool host_deaf;      /* the host peer takes nothing any more */
    bool readable;       /* the host peer has (or may have) bytes or EOF for us */
    bool wr_shut;        /* shutdown(SHUT_WR) was done */
    bool credit_asked;   /* since credit ran out */
    bool waits_for_gate; /* its RST is held back until the gate opens */
    bool queued;         /* in rx_fifo */
    bool in_table, in_handshake;
    uint32_t peer_buf_alloc, peer_fwd_cnt, tx_cnt; /* host -> guest */
    uint32_t fwd_cnt, fwd_cnt_sent;                /* guest -> host */
    struct vsock_ring to_host;                     /* guest bytes the host peer has not taken yet */
    struct vsock_ring to_guest;                    /* control connection only */
    uint64_t deadline_ns;                          /* of the handshake */
    uint8_t line[VSOCK_LINE_BYTES_MAX];
    unsigned line_len;
    TAILQ_ENTRY(vsock_conn) all, fifo, handshake;
    LIST_ENTRY(vsock_conn) bucket;
};

TAILQ_HEAD(vsock_conns, vsock_conn);
LIST_HEAD(vsock_bucket, vsock_conn);

struct vsock_rst {
    uint32_t guest_port, host_port;
    uint16_t type;
};

struct vsock {
    struct virtio_device base; /* first */
    struct loop *loop;
    int listener_fd;
    int spare_fd; /* given up for a moment to refuse a client when the process is out of fds */
    struct loop_source listener;
    char *path;
    uint32_t grants[VSOCK_GRANTS_MAX];
    unsigned grant_count;
    const struct vsock_control_ops *control_ops;
    void *control_arg;
    struct vsock_conn *control;

    bool gate_open, paused, quiesced, forgotten;
    bool tx_pending;               /* the tx queue has to be looked at */
    struct vsock_conn *event_conn; /* whose host event is being handled */
    unsigned depth;
    uint32_t next_host_port;
    unsigned conn_count; /* all but the control connection, until freed */
    uint64_t buffered_bytes;

    struct vsock_bucket table[VSOCK_BUCKETS];
    struct vsock_conns all, rx_fifo, handshakes, graveyard;
    struct vsock_rst rsts[VSOCK_RSTS_MAX]; /* ring */
    unsigned rst_first, rst_count;
    struct loop_timer handshake_timer, work_timer, listener_timer;
    struct chain tx_chain, rx_chain;
};

static inline struct vsock *vsock_of(struct virtio_device *dev)
{
    return (struct vsock *)(void *)dev; /* base is the first member */
}

/* vsock.c */
void vsock_enter(struct vsock *v);
void vsock_leave(struct vsock *v);
/* RST for a packet without a connection; one per port pair at a time. */
void vsock_queue_rst(struct vsock *v, uint32_t guest_port, uint32_t host_port, uint16_t type);
void vsock_bad_packet(struct vsock *v, const struct vsock_header *h, const char *why);

/* vsock_conn.c */
struct vsock_conn *vsock_conn_new(struct vsock *v, enum conn_state state);
struct vsock_conn *vsock_conn_find(struct vsock *v, uint32_t guest_port, uint32_t host_port);
void vsock_conn_bind(struct vsock_conn *c, uint32_t guest_port, uint32_t host_port);
/* Takes it out of everything, closes its fd, buries it. The guest hears nothing. */
void vsock_conn_bury(struct vsock_conn *c);
/* Ends it at once on the host side; the guest gets an RST. */
void vsock_conn_reset(struct vsock_conn *c);
void vsock_conn_end_handshake(struct vsock_conn *c);
/* To be called after any change: queues it for the guest if there is something to send, and
 * listens to its host socket for what can make a difference now. */
void vsock_conn_touch(struct vsock_conn *c);
void vsock_touch_all(struct vsock *v);
uint32_t vsock_conn_credit(const struct vsock_conn *c);
void vsock_conn_note_forwarded(struct vsock_conn *c, uint32_t n);
void vsock_drop_all(struct vsock *v, const char *reason);
void vsock_reap(struct vsock *v);
/* A packet from the guest; its payload is in v->tx_chain behind the header. */
void vsock_handle_packet(struct vsock *v, const struct vsock_header *h);
/* Writes the next packet of `c` into the chain. Bytes written; 0: nothing to say after all;
 * -EPROTO: the buffer is unusable. */
int vsock_conn_fill(struct vsock_conn *c, const struct chain *chain, struct err *e);
void vsock_write_header(struct vsock_conn *c, const struct chain *chain, uint16_t op, uint32_t len,
                        uint32_t flags);

/* vsock_unix.c */
int vsock_unix_listen(struct vsock *v, struct err *e);
void vsock_unix_event(void *arg, uint32_t events); /* loop callback; arg is a vsock_conn */
/* Line read and gate open: asks the guest. */
void vsock_unix_request(struct vsock_conn *c);
/* The guest answered. */
void vsock_unix_accepted(struct vsock_conn *c);
/* "ERR <text>\n" to a client in its handshake; the caller then ends the connection. */
void vsock_unix_say_error(struct vsock_conn *c, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Guest -> host connect. Returns the fd or -errno. */
int vsock_unix_connect(struct vsock *v, uint32_t port);
/* Payload of v->tx_chain to the host peer; what it does not take goes to to_host. */
void vsock_unix_receive(struct vsock_conn *c, uint32_t len);
void vsock_unix_flush(struct vsock_conn *c);
/* Reads into the chain behind the header. > 0 bytes, 0 EOF, -EAGAIN, or another -errno. */
int vsock_unix_read(struct vsock_conn *c, const struct chain *chain, uint32_t room);

/* vsock_control.c */
void vsock_control_accept(struct vsock *v, const struct vsock_header *h);
void vsock_control_receive(struct vsock_conn *c, uint32_t len);
uint32_t vsock_control_read(struct vsock_conn *c, const struct chain *chain, uint32_t room);
/* Tells the owner that the control connection `c` has ended. */
void vsock_control_ended(struct vsock_conn *c);

/* vsock_state.c */
int vsock_save(struct virtio_device *dev, struct state_writer *w, struct err *e);
int vsock_restore(struct virtio_device *dev, const struct state_node *n, struct err *e);
