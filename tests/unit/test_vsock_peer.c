/*
 * vsock: what the guest starts, and a guest that lies: connections to granted ports, the control
 * connection, credit, broken packets and queues.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/unit/vsock_guest.h"
#include "vmm/core/err.h"

static int setup(void **s)
{
    struct vsock_guest *g = malloc(sizeof *g);
    assert_non_null(g);
    guest_start(g, false, true);
    *s = g;
    return 0;
}

static int teardown(void **s)
{
    guest_stop(*s);
    free(*s);
    return 0;
}

static void send_data(struct vsock_guest *g, uint32_t guest_port, uint32_t host_port,
                      const void *bytes, uint32_t len)
{
    struct vsock_header h = guest_header(guest_port, host_port, VSOCK_OP_RW);
    h.len = len;
    guest_send(g, &h, bytes, len, 4096);
}

static void open_control(struct vsock_guest *g, uint32_t guest_port)
{
    struct packet p;
    guest_send_op(g, guest_port, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST);
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
    assert_int_equal(p.h.src_port, VSOCK_CONTROL_PORT);
    assert_int_equal(p.h.dst_port, guest_port);
}

static void use_up_receive_buffers(struct vsock_guest *g)
{
    struct packet p;
    g->hold_rx = true;
    for (uint32_t i = 0; i < GUEST_QUEUE_SIZE; i++) {
        guest_send_op(g, 9000 + i, 9000, VSOCK_OP_RW);
        guest_expect(g, &p, VSOCK_OP_RST);
    }
}

static void granted_ports_reach_the_host(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    guest_send_op(g, 40, GUEST_GRANTED_PORT, VSOCK_OP_REQUEST);
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
    assert_int_equal(p.h.buf_alloc, VSOCK_BUF_ALLOC);
    int fd = accept4(g->granted_listener, NULL, NULL, SOCK_NONBLOCK);
    assert_true(fd >= 0);
    send_data(g, 40, GUEST_GRANTED_PORT, "up", 2);
    host_expect(g, fd, "up", false);
    assert_int_equal(send(fd, "down", 4, 0), 4);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_memory_equal(p.payload, "down", 4);
    guest_send_op(g, 40, GUEST_GRANTED_PORT, VSOCK_OP_RST);
    host_expect(g, fd, "", true);
    (void)close(fd);
}

static void other_ports_are_reset(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    static const uint32_t ports[] = {0, 2, 699, GUEST_GRANTED_PORT + 1 /* nobody listens */,
                                     0xffffffffu};
    for (size_t i = 0; i < sizeof ports / sizeof ports[0]; i++) {
        guest_send_op(g, 40, ports[i], VSOCK_OP_REQUEST);
        guest_expect(g, &p, VSOCK_OP_RST);
        assert_int_equal(p.h.src_port, ports[i]);
        assert_int_equal(p.h.dst_port, 40);
    }
    assert_int_equal(g->v->conn_count, 0);
}

static void closed_gate_lets_only_control_through(void **s)
{
    struct vsock_guest g;
    struct packet p;
    guest_start(&g, true, true);
    guest_send_op(&g, 40, GUEST_GRANTED_PORT, VSOCK_OP_REQUEST);
    guest_expect(&g, &p, VSOCK_OP_RST);
    int fd = host_say(&g, "CONNECT 1024\n");
    int late = host_say(&g, "CONNECT 1024\n");
    guest_expect_nothing(&g);
    open_control(&g, 41);
    g.v->handshakes.tqh_first->deadline_ns = 1;
    g.v->handshake_timer.deadline_ns = 1;
    host_expect(&g, fd, "ERR timed out: this copy was not renewed within 5 s\n", true);
    vsock_open_gate(g.dev);
    guest_expect(&g, &p, VSOCK_OP_REQUEST);
    guest_send_op(&g, 1024, p.h.src_port, VSOCK_OP_RESPONSE);
    char ok[32];
    (void)snprintf(ok, sizeof ok, "OK %u\n", p.h.src_port);
    host_expect(&g, late, ok, false);
    guest_send_op(&g, 40, GUEST_GRANTED_PORT, VSOCK_OP_REQUEST);
    guest_expect(&g, &p, VSOCK_OP_RESPONSE);
    (void)close(fd);
    (void)close(late);
    guest_stop(&g);
}

static void control_connection_talks_and_is_replaced(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    struct err e = {0};
    static uint8_t big[VSOCK_CONTROL_BYTES_MAX];
    assert_int_equal(vsock_control_send(g->dev, "x", 1, &e), -ENOTCONN);
    open_control(g, 41);
    assert_int_equal(g->opened, 1);
    assert_true(vsock_control_is_open(g->dev));
    send_data(g, 41, VSOCK_CONTROL_PORT, "hello", 5);
    assert_int_equal(g->control_len, 5);
    assert_memory_equal(g->control, "hello", 5);
    assert_int_equal(vsock_control_send(g->dev, "renew", 5, &e), 0);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_memory_equal(p.payload, "renew", 5);
    assert_int_equal(p.h.fwd_cnt, 5);
    assert_int_equal(vsock_control_send(g->dev, big, sizeof big, &e), 0); /* many packets */
    size_t got = 0;
    while (guest_receive(g, &p))
        got += p.len;
    assert_int_equal(got, sizeof big);
    guest_send_op(g, 42, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST); /* an agent that started anew */
    guest_expect(g, &p, VSOCK_OP_RST);
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
    assert_int_equal(g->opened, 2);
    assert_int_equal(g->closed, 1);
    assert_true(vsock_control_is_open(g->dev));
    guest_send_op(g, 42, VSOCK_CONTROL_PORT, VSOCK_OP_RST);
    assert_int_equal(g->closed, 2);
    assert_false(vsock_control_is_open(g->dev));
}

static void control_bytes_are_bounded(void **s)
{
    struct vsock_guest *g = *s;
    struct err e = {0};
    static uint8_t big[VSOCK_CONTROL_BYTES_MAX + 1];
    struct vsock_header h = guest_header(41, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST);
    h.buf_alloc = 0; /* a guest that never takes anything */
    guest_send(g, &h, NULL, 0, 1);
    assert_int_equal(vsock_control_send(g->dev, big, sizeof big, &e), -ENOBUFS);
    assert_int_equal(vsock_control_send(g->dev, big, VSOCK_CONTROL_BYTES_MAX, &e), 0);
    assert_int_equal(vsock_control_send(g->dev, big, 1, &e), -ENOBUFS);
    assert_non_null(strstr(e.text, "65536 bytes wait"));
}

static void replaced_control_gets_one_reset(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    open_control(g, 41);
    guest_send_op(g, 42, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST);
    guest_expect(g, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.dst_port, 41);
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
    assert_int_equal(p.h.dst_port, 42);
    guest_send_op(g, 42, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST); /* the same ports again */
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
    guest_expect_nothing(g);
    assert_int_equal(g->v->conn_count, 1);
}

static void credit_is_kept_and_counts_wrap(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t host_port;
    int fd = host_open(g, 1024, &host_port);
    struct vsock_conn *c = vsock_conn_find(g->v, 1024, host_port);
    c->tx_cnt = 0xfffffff0u; /* as after 4 GiB */
    c->fwd_cnt = c->fwd_cnt_sent = 0xfffffff8u;
    struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_CREDIT_UPDATE);
    h.buf_alloc = 32;
    h.fwd_cnt = 0xfffffff0u;
    guest_send(g, &h, NULL, 0, 1);
    static const uint8_t data[100] = {1, 2, 3};
    assert_int_equal(send(fd, data, sizeof data, 0), sizeof data);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_int_equal(p.len, 32); /* not one byte more than its credit */
    guest_expect(g, &p, VSOCK_OP_CREDIT_REQUEST);
    guest_expect_nothing(g);
    h.fwd_cnt = 0x10u; /* wrapped: all 32 taken */
    guest_send(g, &h, NULL, 0, 1);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_int_equal(p.len, 32);
    guest_expect(g, &p, VSOCK_OP_CREDIT_REQUEST);
    h.fwd_cnt = 0x7fffffffu; /* a lie gives no more than buf_alloc */
    guest_send(g, &h, NULL, 0, 1);
    guest_expect_nothing(g);
    h.fwd_cnt = 0x30u;
    h.buf_alloc = 0xffffffffu;
    guest_send(g, &h, NULL, 0, 1);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_int_equal(p.len, 36);
    h = guest_header(1024, host_port, VSOCK_OP_RW);
    h.len = 20;
    guest_send(g, &h, data, 20, 20);
    h = guest_header(1024, host_port, VSOCK_OP_CREDIT_REQUEST);
    guest_send(g, &h, NULL, 0, 1);
    guest_expect(g, &p, VSOCK_OP_CREDIT_UPDATE);
    assert_int_equal(p.h.fwd_cnt, 12); /* 0xfffffff8 + 20 */
    (void)close(fd);
}

/* Without credit nothing is read, and the loop is not kept busy by the waiting bytes. */
static void stream_without_credit_sleeps(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t host_port;
    int fd = host_open(g, 1024, &host_port);
    struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_CREDIT_UPDATE);
    h.buf_alloc = 0;
    guest_send(g, &h, NULL, 0, 1);
    assert_int_equal(send(fd, "wait", 4, 0), 4);
    guest_run(g);
    guest_expect(g, &p, VSOCK_OP_CREDIT_REQUEST);
    struct vsock_conn *c = vsock_conn_find(g->v, 1024, host_port);
    assert_int_equal(c->source.events, 0);
    (void)close(fd); /* its end is noticed all the same */
    guest_run(g);
    guest_expect(g, &p, VSOCK_OP_SHUTDOWN);
    assert_int_equal(p.h.flags, VSOCK_SHUT_RECEIVE);
    assert_int_equal(c->source.serial, 0);
    h.buf_alloc = 100;
    guest_send(g, &h, NULL, 0, 1);
    guest_expect(g, &p, VSOCK_OP_RW);
    guest_expect(g, &p, VSOCK_OP_SHUTDOWN);
    assert_int_equal(p.h.flags, VSOCK_SHUT_BOTH);
}

static void overrun_of_credit_resets_that_connection(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t a_port, b_port;
    static uint8_t data[65536];
    int a = host_open(g, 1024, &a_port), b = host_open(g, 1025, &b_port);
    bool reset = false;
    for (unsigned i = 0; i < 32 && !reset; i++) { /* socket buffer and ours are full before */
        send_data(g, 1024, a_port, data, sizeof data);
        while (guest_receive(g, &p))
            reset = reset || (p.h.op == VSOCK_OP_RST && p.h.dst_port == 1024);
    }
    assert_true(reset);
    assert_int_equal(g->v->buffered_bytes, 0);
    assert_true(g->dev->guest_fault_count > 0);
    send_data(g, 1025, b_port, "fine", 4);
    host_expect(g, b, "fine", false);
    (void)close(a);
    (void)close(b);
}

static void round_robin_among_connections(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t ports[4];
    int fds[4];
    static uint8_t data[65536];
    for (uint32_t i = 0; i < 4; i++)
        fds[i] = host_open(g, 100 + i, &ports[i]);
    use_up_receive_buffers(g);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(send(fds[i], data, sizeof data, 0), sizeof data);
    guest_run(g);
    unsigned from[4] = {0};
    for (unsigned i = 0; i < 16; i++) {
        guest_post_rx(g, 200);
        guest_expect(g, &p, VSOCK_OP_RW);
        assert_int_equal(p.len, 200 - VSOCK_HEADER_BYTES);
        from[p.h.dst_port - 100]++;
    }
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(from[i], 4);
        (void)close(fds[i]);
    }
}

/* Resets without receive buffers: bounded, then the tx queue waits until they can go. */
static void withheld_receive_buffers_stop_the_tx_queue(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    g->hold_rx = true;
    for (uint32_t i = 0; i < GUEST_QUEUE_SIZE + 1000; i++) {
        guest_send_op(g, 9000 + i, 9000, VSOCK_OP_RW);
        if (i == GUEST_QUEUE_SIZE + VSOCK_RSTS_MAX + 50)
            break; /* the tx ring itself is not to overflow */
        if (i < GUEST_QUEUE_SIZE)
            guest_expect(g, &p, VSOCK_OP_RST);
    }
    assert_true(g->v->rst_count <= VSOCK_RSTS_MAX);
    assert_true(g->v->tx_pending);
    g->hold_rx = false;
    unsigned got = 0;
    for (unsigned i = 0; i < GUEST_QUEUE_SIZE; i++)
        guest_post_rx(g, GUEST_RX_BYTES);
    while (guest_receive(g, &p))
        got++;
    assert_int_equal(got, VSOCK_RSTS_MAX + 51);
    assert_false(g->v->tx_pending);
}

static void lying_headers_hurt_only_themselves(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t port;
    int fd = host_open(g, 1024, &port);
    struct vsock_header h = guest_header(7, 8, VSOCK_OP_RW);
    h.src_cid = 99;
    guest_send(g, &h, NULL, 0, 1);
    h = guest_header(7, 8, VSOCK_OP_RW);
    h.dst_cid = 1;
    guest_send(g, &h, NULL, 0, 1);
    guest_expect_nothing(g);
    h = guest_header(1024, port, VSOCK_OP_REQUEST);
    h.type = 2; /* seqpacket: another kind of socket */
    guest_send(g, &h, NULL, 0, 1);
    guest_expect(g, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.type, 2);
    send_data(g, 1024, port, "fine", 4);
    host_expect(g, fd, "fine", false);
    h = guest_header(7, 8, 4711);
    guest_send(g, &h, NULL, 0, 1);
    guest_expect(g, &p, VSOCK_OP_RST);
    h = guest_header(1024, port, VSOCK_OP_RW);
    h.len = 5000; /* 4 are there */
    guest_send(g, &h, "liar", 4, 4);
    guest_expect(g, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.dst_port, 1024);
    host_expect(g, fd, "", true);
    assert_true(virtio_device_is_live(g->dev));
    assert_true(g->dev->guest_fault_count >= 4);
    (void)close(fd);
}

static void late_reset_spares_a_new_connection(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    use_up_receive_buffers(g);
    guest_send_op(g, 50, GUEST_GRANTED_PORT, VSOCK_OP_RW); /* of a connection long gone */
    guest_send_op(g, 50, GUEST_GRANTED_PORT, VSOCK_OP_REQUEST);
    guest_post_rx(g, GUEST_RX_BYTES);
    guest_post_rx(g, GUEST_RX_BYTES);
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
    guest_expect_nothing(g);
}

static void broken_queue_asks_for_reset_and_frees_hosts(void **s)
{
    struct vsock_guest *g = *s;
    uint32_t port;
    int fd = host_open(g, 1024, &port);
    use_up_receive_buffers(g);
    guest_post_rx(g, 20); /* no header fits */
    guest_send_op(g, 9000, 9000, VSOCK_OP_RW);
    assert_false(virtio_device_is_live(g->dev));
    host_expect(g, fd, "", true);
    int late = host_say(g, "CONNECT 1024\n");
    host_expect(g, late, "ERR not ready: the guest has not started its vsock driver\n", true);
    (void)close(fd);
    (void)close(late);
    g->hold_rx = false;
    virtio_device_reset(g->dev); /* and it works again */
    guest_driver_ok(g);
    (void)close(host_open(g, 1024, &port));
}

/* Good for packets without payload, but not for data: that would never get through. */
static void receive_buffer_of_a_bare_header_is_a_fault_for_data(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t port;
    int fd = host_open(g, 1024, &port);
    use_up_receive_buffers(g);
    guest_post_rx(g, VSOCK_HEADER_BYTES);
    guest_send_op(g, 1024, port, VSOCK_OP_CREDIT_REQUEST);
    guest_expect(g, &p, VSOCK_OP_CREDIT_UPDATE);
    assert_int_equal(send(fd, "data", 4, 0), 4);
    guest_run(g);
    guest_post_rx(g, VSOCK_HEADER_BYTES);
    assert_false(virtio_device_is_live(g->dev));
    uint8_t byte;
    assert_int_equal(recv(fd, &byte, 1, 0), -1);
    assert_int_equal(errno, ECONNRESET); /* what it had sent was not read */
    (void)close(fd);
}

static void host_ports_wrap_and_skip_those_in_use(void **s)
{
    struct vsock_guest *g = *s;
    uint32_t first, last, next;
    int a = host_open(g, 1024, &first);
    assert_int_equal(first, VSOCK_HOST_PORT_FIRST);
    g->v->next_host_port = VSOCK_PORT_ANY - 1;
    int b = host_open(g, 1024, &last);
    assert_int_equal(last, VSOCK_PORT_ANY - 1);
    int c = host_open(g, 1024, &next);
    assert_int_equal(next, VSOCK_HOST_PORT_FIRST + 1);
    (void)close(a);
    (void)close(b);
    (void)close(c);
}

static void driver_reset_ends_everything(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t port;
    unsigned fds = count_fds();
    open_control(g, 41);
    int fd = host_open(g, 1024, &port);
    int waiting = host_say(g, "CONNECT 1025\n");
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    virtio_device_reset(g->dev);
    assert_int_equal(g->closed, 1);
    host_expect(g, fd, "", true);
    host_expect(g, waiting, "ERR reset: the guest has reset its vsock driver\n", true);
    (void)close(fd);
    (void)close(waiting);
    assert_int_equal(g->v->conn_count, 0);
    assert_int_equal(count_fds(), fds);
    for (unsigned i = 0; i < 50; i++) {
        guest_driver_ok(g);
        (void)close(host_open(g, 1024, &port));
        virtio_device_reset(g->dev);
    }
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(granted_ports_reach_the_host),
        T(other_ports_are_reset),
        cmocka_unit_test(closed_gate_lets_only_control_through),
        T(control_connection_talks_and_is_replaced),
        T(control_bytes_are_bounded),
        T(replaced_control_gets_one_reset),
        T(credit_is_kept_and_counts_wrap),
        T(stream_without_credit_sleeps),
        T(overrun_of_credit_resets_that_connection),
        T(round_robin_among_connections),
        T(withheld_receive_buffers_stop_the_tx_queue),
        T(lying_headers_hurt_only_themselves),
        T(late_reset_spares_a_new_connection),
        T(broken_queue_asks_for_reset_and_frees_hosts),
        T(receive_buffer_of_a_bare_header_is_a_fault_for_data),
        T(host_ports_wrap_and_skip_those_in_use),
        T(driver_reset_ends_everything),
    };
    return cmocka_run_group_tests_name("vsock_peer", tests, NULL, NULL);
}
