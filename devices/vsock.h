/*
 * vsock: virtio-vsock (virtio 1.2, 5.10), stream sockets, host side on a Unix socket in the
 * Firecracker convention (docs/protocol.md, "vsock").
 *
 * Host -> guest: accept on `listener_fd`, read "CONNECT <port>\n" (bounded), send a REQUEST to the
 * guest; "OK <host port>\n" after its RESPONSE, or "ERR <reason>\n" and close.
 * Guest -> host: port VSOCK_CONTROL_PORT is answered by the VMM itself (`on_control`); any other
 * port only if granted, by connecting to "<listener path>_<port>".
 *
 * A connection is {guest port, host port, host fd, state, credit}. Host fds are non-blocking; a
 * short write or EAGAIN keeps the rest and the credit honest. Loop thread only; never blocks.
 * An open connection uses one fd: the process needs RLIMIT_NOFILE > VSOCK_CONNECTIONS_MAX to reach
 * that limit; below, clients are refused ("ERR busy: ...") when fds run out.
 *
 * Copies: save writes all connections. In a copy every connection but the control one has lost its
 * host fd: vsock_restore keeps an RST for the guest of each, in order; the control connection (at
 * most one) goes on. Until vsock_open_gate the copy lets nothing but the control connection
 * through: CONNECTs wait, guest requests are refused, those RSTs are held back.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;
struct loop;
struct ram;
struct virtio_device;

#define VSOCK_GUEST_CID 3u
#define VSOCK_HOST_CID 2u
#define VSOCK_CONTROL_PORT 1u
#define VSOCK_CONNECTIONS_MAX 2048
#define VSOCK_GRANTS_MAX 64
/* How long a host client may take for its CONNECT line, and the guest (or a closed gate) to let it
 * in; then it gets ERR. A paused machine or one without a driver refuses at once. */
#define VSOCK_CONNECT_TIMEOUT_NS (5ull * 1000 * 1000 * 1000)

/*
 * Callbacks of the control connection; all run on the loop thread, in the middle of the device's
 * work: they may call vsock_control_send and vsock_open_gate, but not quiesce, save, reset or free
 * the device (leave that to the next round of the loop). An agent that connects anew while the old
 * connection is open gives closed, then opened. A restored control connection gives no opened.
 */
struct vsock_control_ops {
    void (*opened)(void *arg); /* the guest connected to VSOCK_CONTROL_PORT */
    void (*data)(void *arg, const void *bytes, size_t len);
    void (*closed)(void *arg);
};

struct vsock_spec {
    int listener_fd; /* bound, listening, non-blocking; taken over in any case; -1: no host side */
    const char *socket_path; /* its path, copied; guest-initiated connections append "_<port>" */
    const uint32_t *granted_ports; /* copied */
    unsigned granted_count;
    const struct vsock_control_ops *control;
    void *control_arg;
    bool gate_closed; /* a copy starts with its gate closed; a booted machine with it open */
};

/* Refuses granted ports whose socket path would not fit an address (107 bytes), with its length. */
int vsock_create(struct virtio_device **out, const struct vsock_spec *spec, const struct ram *ram,
                 struct loop *loop, struct err *e);
/* Sends bytes on the control connection; -ENOTCONN without one, -ENOBUFS past 64 KiB queued. */
int vsock_control_send(struct virtio_device *dev, const void *bytes, size_t len, struct err *e);
bool vsock_control_is_open(const struct virtio_device *dev);
/* The copy is its own machine now (or has no agent to make it one). */
void vsock_open_gate(struct virtio_device *dev);
/*
 * While paused, a new CONNECT is answered with "ERR paused" at once. Clients that came before and
 * wait for the guest go on waiting, so the moment of a fork or snapshot ends nobody's handshake.
 * A restored device is paused until its resume.
 */
void vsock_set_paused(struct virtio_device *dev, bool paused);
/*
 * In a fork child: closes inherited fds without shutdown(2) and without touching the inherited
 * epoll set; says nothing to anybody. Both this and loop_close_inherited go before ops->free. The
 * bytes that wait for host peers are the parent's to deliver.
 */
void vsock_forget(struct virtio_device *dev);
