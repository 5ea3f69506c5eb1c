/*
 * vsock: save, restore and fork. In a copy (E1) old connections end with a reset, listeners and the
 * control connection go on; the original notices nothing.
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
#include <sys/wait.h>
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

static void open_control(struct vsock_guest *g)
{
    struct packet p;
    guest_send_op(g, 41, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST);
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
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

static void e1_old_connections_end_new_ones_begin(void **s)
{
    struct vsock_guest *g = *s, copy;
    struct packet p;
    uint32_t a_port, port;
    open_control(g);
    int a = host_open(g, 1024, &a_port);
    int half = host_say(g, "CONNECT 1025\n"); /* the guest has its REQUEST, no answer yet */
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    uint32_t half_port = p.h.src_port;
    guest_send_op(g, 60, GUEST_GRANTED_PORT, VSOCK_OP_REQUEST);
    guest_expect(g, &p, VSOCK_OP_RESPONSE);

    guest_copy(&copy, g);
    assert_true(vsock_control_is_open(copy.dev));
    int early = host_say(&copy, "CONNECT 1024\n");
    host_expect(&copy, early, "ERR paused: the machine is paused\n", true);
    (void)close(early);
    copy.dev->ops->resume(copy.dev);
    guest_expect_nothing(&copy); /* nothing before the copy is its own machine */
    vsock_open_gate(copy.dev);
    guest_expect(&copy, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.src_port, a_port);
    assert_int_equal(p.h.dst_port, 1024);
    guest_expect(&copy, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.src_port, half_port);
    guest_expect(&copy, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.src_port, GUEST_GRANTED_PORT);
    guest_expect_nothing(&copy);
    assert_int_equal(copy.v->conn_count, 1);
    guest_send_op(&copy, 1025, half_port, VSOCK_OP_RESPONSE); /* it was under way */
    guest_expect(&copy, &p, VSOCK_OP_RST);
    int fresh = host_open(&copy, 1024, &port); /* the listener is still there */
    assert_true(port > half_port);             /* and no old port comes back */
    send_data(&copy, 1024, port, "child", 5);
    host_expect(&copy, fresh, "child", false);

    send_data(g, 1024, a_port, "parent", 6); /* the original has noticed nothing */
    host_expect(g, a, "parent", false);
    guest_send_op(g, 1025, half_port, VSOCK_OP_RESPONSE);
    char ok[32];
    (void)snprintf(ok, sizeof ok, "OK %u\n", half_port);
    host_expect(g, half, ok, false);
    guest_expect_nothing(g);
    (void)close(a);
    (void)close(half);
    (void)close(fresh);
    guest_stop(&copy);
}

static void control_connection_goes_on_with_its_counters(void **s)
{
    struct vsock_guest *g = *s, copy, grandchild;
    struct packet p;
    struct err e = {0};
    open_control(g);
    send_data(g, 41, VSOCK_CONTROL_PORT, "hello", 5);
    assert_int_equal(vsock_control_send(g->dev, "four", 4, &e), 0);
    guest_expect(g, &p, VSOCK_OP_RW);
    use_up_receive_buffers(g);
    assert_int_equal(vsock_control_send(g->dev, "queued", 6, &e), 0);
    guest_copy(&copy, g);
    assert_int_equal(copy.v->control->tx_cnt, 4);
    assert_int_equal(copy.v->control->fwd_cnt, 5);
    assert_int_equal(vsock_control_send(copy.dev, "+renew", 6, &e), 0);
    guest_copy(&grandchild, &copy); /* before it ever ran */
    copy.dev->ops->resume(copy.dev);
    guest_expect_nothing(&copy); /* no receive buffer */
    guest_post_rx(&copy, GUEST_RX_BYTES);
    guest_expect(&copy, &p, VSOCK_OP_RW);
    assert_int_equal(p.len, 12);
    assert_memory_equal(p.payload, "queued+renew", 12);
    assert_int_equal(p.h.fwd_cnt, 5);
    assert_int_equal(copy.opened, 0);
    send_data(&copy, 41, VSOCK_CONTROL_PORT, "renewed", 7);
    assert_memory_equal(copy.control, "renewed", 7);

    grandchild.dev->ops->resume(grandchild.dev);
    guest_post_rx(&grandchild, GUEST_RX_BYTES);
    guest_expect(&grandchild, &p, VSOCK_OP_RW);
    assert_memory_equal(p.payload, "queued+renew", 12);
    guest_post_rx(g, GUEST_RX_BYTES);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_int_equal(p.len, 6); /* the original sends only its own bytes */
    guest_stop(&copy);
    guest_stop(&grandchild);
}

static void waiting_packets_go_on_in_the_copy(void **s)
{
    struct vsock_guest *g = *s, copy;
    struct packet p;
    use_up_receive_buffers(g);
    guest_send_op(g, 70, 71, VSOCK_OP_RW);                      /* its RST has to wait */
    guest_send_op(g, 41, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST); /* its RESPONSE as well */
    int fd = host_say(g, "CONNECT 1024\n"); /* never reached the guest: not the copy's affair */
    guest_copy(&copy, g);
    copy.dev->ops->resume(copy.dev);
    vsock_open_gate(copy.dev);
    guest_post_rx(&copy, GUEST_RX_BYTES);
    guest_post_rx(&copy, GUEST_RX_BYTES);
    guest_post_rx(&copy, GUEST_RX_BYTES);
    guest_expect(&copy, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.dst_port, 70);
    guest_expect(&copy, &p, VSOCK_OP_RESPONSE);
    assert_int_equal(p.h.dst_port, 41);
    guest_expect_nothing(&copy);
    host_expect(g, fd, "", false); /* still waits for the original */
    (void)close(fd);
    guest_stop(&copy);
}

static void packets_of_old_connections_meet_nobody(void **s)
{
    struct vsock_guest *g = *s, copy;
    struct packet p;
    struct err e = {0};
    uint32_t port;
    int fd = host_open(g, 1024, &port);
    assert_int_equal(g->dev->ops->quiesce(g->dev, &e), 0);
    send_data(g, 1024, port, "late", 4); /* in the ring, not taken */
    guest_copy(&copy, g);                /* resumes the original */
    host_expect(g, fd, "late", false);
    copy.dev->ops->resume(copy.dev);
    guest_expect_nothing(&copy);
    vsock_open_gate(copy.dev);
    guest_expect(&copy, &p, VSOCK_OP_RST);
    guest_expect_nothing(&copy); /* one is enough */
    (void)close(fd);
    guest_stop(&copy);
}

static void quiesced_device_leaves_the_queues_alone(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    struct err e = {0};
    uint32_t port;
    int fd = host_open(g, 1024, &port);
    assert_int_equal(g->dev->ops->quiesce(g->dev, &e), 0);
    struct virtqueue before[2] = {g->dev->queues[0], g->dev->queues[1]};
    assert_int_equal(send(fd, "wait", 4, 0), 4);
    send_data(g, 1024, port, "too", 3);
    int late = host_say(g, "CONNECT 1025\n");
    guest_expect_nothing(g);
    host_expect(g, fd, "", false);
    assert_memory_equal(before, g->dev->queues, sizeof before);
    g->dev->ops->resume(g->dev);
    guest_expect(g, &p, VSOCK_OP_RW);
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    host_expect(g, fd, "too", false);
    (void)close(fd);
    (void)close(late);
}

static void fork_child_closes_only_its_copies(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t port;
    open_control(g);
    int fd = host_open(g, 1024, &port);
    int line = host_say(g, "CONN"); /* a client in the middle of its line */
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        vsock_forget(g->dev);
        loop_close_inherited(&g->loop);
        g->dev->ops->free(g->dev);
        _exit(g->closed == 0 ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    host_expect(g, fd, "", false); /* neither closed nor shut down */
    assert_int_equal(send(fd, "hi", 2, 0), 2);
    guest_expect(g, &p, VSOCK_OP_RW); /* and the parent still hears it */
    send_data(g, 1024, port, "ho", 2);
    host_expect(g, fd, "ho", false);
    assert_int_equal(send(line, "ECT 9\n", 6, 0), 6);
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    (void)close(host_open(g, 1025, &port));
    assert_true(vsock_control_is_open(g->dev));
    (void)close(fd);
    (void)close(line);
}

static void many_connections_are_saved_and_reset(void **s)
{
    struct vsock_guest *g = *s, copy;
    struct packet p;
    enum { MANY = 500 };
    static int fds[MANY];
    uint32_t port;
    for (unsigned i = 0; i < MANY; i++)
        fds[i] = host_open(g, 1024, &port);
    guest_copy(&copy, g);
    copy.dev->ops->resume(copy.dev);
    vsock_open_gate(copy.dev);
    for (unsigned i = 0; i < MANY; i++)
        guest_expect(&copy, &p, VSOCK_OP_RST);
    assert_int_equal(copy.v->conn_count, 0);
    guest_stop(&copy);
    for (unsigned i = 0; i < MANY; i++)
        (void)close(fds[i]);
}

static void driver_reset_in_a_copy_forgets_old_connections(void **s)
{
    struct vsock_guest *g = *s, copy;
    uint32_t port;
    (void)close(host_open(g, 1024, &port));
    guest_copy(&copy, g);
    copy.dev->ops->resume(copy.dev);
    virtio_device_reset(copy.dev);
    guest_driver_ok(&copy);
    vsock_open_gate(copy.dev);
    guest_expect_nothing(&copy);
    (void)close(host_open(&copy, 1024, &port));
    guest_stop(&copy);
}

/* A record with the fields that matter; see vsock_state.c. */
static void put_record(uint8_t *to, uint32_t guest_port, uint32_t host_port, uint32_t state,
                       uint32_t flags, uint32_t pending)
{
    memset(to, 0, 44);
    le32_put(to, guest_port);
    le32_put(to + 4, host_port);
    le32_put(to + 8, state);
    le32_put(to + 12, flags);
    le32_put(to + 16, pending);
}

static int restore_crafted(const void *connections, size_t len, uint32_t next_port, size_t resets,
                           size_t control_bytes, struct err *e)
{
    struct vsock_guest g;
    struct state_writer w;
    struct state_node root, n;
    const void *blob;
    size_t blob_len;
    static const uint8_t zeros[VSOCK_CONTROL_BYTES_MAX + 1];
    assert_int_equal(state_writer_init(&w, e), 0);
    state_begin(&w, "x");
    state_begin(&w, "sockets");
    state_put_u32(&w, "version", 1);
    state_put_u32(&w, "next-host-port", next_port);
    state_put_bytes(&w, "connections", connections, len);
    state_put_bytes(&w, "resets", zeros, resets);
    state_put_bytes(&w, "control-bytes", zeros, control_bytes);
    state_end(&w);
    state_end(&w);
    assert_int_equal(state_finish(&w, &blob, &blob_len, e), 0);
    assert_int_equal(state_open(blob, blob_len, &root, e), 0);
    assert_int_equal(state_child(&root, "x", &n, e), 0);
    guest_start(&g, true, true);
    int rc = vsock_restore(g.dev, &n, e);
    if (rc < 0) {
        assert_int_equal(g.v->conn_count, 0); /* nothing half done stays */
        assert_false(vsock_control_is_open(g.dev));
        assert_int_equal(g.closed, 0);
    }
    guest_stop(&g);
    state_writer_free(&w);
    return rc;
}

static void bad_state_is_refused_by_name(void **s)
{
    struct err e = {0};
    uint8_t r[88];
    const uint32_t first = VSOCK_HOST_PORT_FIRST;
    put_record(r, 41, 1, CONN_OPEN, 1, 0);
    put_record(r + 44, 50, 700, CONN_OPEN, 0, 0);
    assert_int_equal(restore_crafted(r, 88, first, 12, 9, &e), 0);
    assert_true(restore_crafted(r, 87, first, 0, 0, &e) < 0);
    assert_non_null(strstr(e.text, "87 bytes"));
    assert_true(restore_crafted(r, 88, first - 1, 0, 0, &e) < 0);
    assert_true(restore_crafted(r, 88, VSOCK_PORT_ANY, 0, 0, &e) < 0);
    assert_true(restore_crafted(r, 88, first, 13, 0, &e) < 0);
    assert_true(restore_crafted(r, 88, first, 12 * 257, 0, &e) < 0);
    assert_true(restore_crafted(r, 88, first, 0, VSOCK_CONTROL_BYTES_MAX + 1, &e) < 0);
    assert_true(restore_crafted(r + 44, 44, first, 0, 1, &e) < 0); /* bytes for nobody */
    put_record(r + 44, 42, 1, CONN_OPEN, 1, 0);
    assert_true(restore_crafted(r, 88, first, 0, 0, &e) < 0);
    assert_non_null(strstr(e.text, "second control"));
    put_record(r + 44, 41, 1, CONN_OPEN, 0, 0);
    assert_true(restore_crafted(r, 88, first, 0, 0, &e) < 0);
    assert_non_null(strstr(e.text, "twice"));
    put_record(r, 41, 2, CONN_OPEN, 1, 0);
    assert_true(restore_crafted(r, 44, first, 0, 0, &e) < 0);
    put_record(r, 41, 1, CONN_OPEN, 1, PENDING_RST);
    assert_true(restore_crafted(r, 44, first, 0, 0, &e) < 0);
    static uint8_t many[(VSOCK_CONNECTIONS_MAX + 2) * 44];
    for (uint32_t i = 0; i < VSOCK_CONNECTIONS_MAX + 2; i++)
        put_record(many + i * 44, i, 700, CONN_OPEN, 0, 0);
    assert_int_equal(restore_crafted(many, sizeof many - 44, first, 0, 0, &e), 0);
    assert_true(restore_crafted(many, sizeof many, first, 0, 0, &e) < 0);
}

static void bent_state_never_hurts(void **s)
{
    struct vsock_guest *g = *s;
    uint32_t port, seed = 1;
    size_t len;
    open_control(g);
    (void)close(host_open(g, 1024, &port));
    assert_int_equal(vsock_control_send(g->dev, "bytes", 5, NULL), 0);
    uint8_t *blob = guest_save(g, &len);
    for (unsigned i = 0; i < 400; i++) {
        struct vsock_guest copy;
        struct err e = {0};
        seed = seed * 1103515245u + 12345u;
        size_t at = (seed >> 8) % len;
        uint8_t old = blob[at];
        blob[at] ^= (uint8_t)(1u << (seed >> 4) % 8);
        guest_start(&copy, true, false);
        if (guest_restore(&copy, blob, len, &e) == 0 && virtio_device_is_live(copy.dev))
            copy.dev->ops->resume(copy.dev);
        guest_run(&copy);
        guest_stop(&copy);
        blob[at] = old;
    }
    free(blob);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(e1_old_connections_end_new_ones_begin),
        T(control_connection_goes_on_with_its_counters),
        T(waiting_packets_go_on_in_the_copy),
        T(packets_of_old_connections_meet_nobody),
        T(quiesced_device_leaves_the_queues_alone),
        T(fork_child_closes_only_its_copies),
        T(many_connections_are_saved_and_reset),
        T(driver_reset_in_a_copy_forgets_old_connections),
        cmocka_unit_test(bad_state_is_refused_by_name),
        T(bent_state_never_hurts),
    };
    return cmocka_run_group_tests_name("vsock_state", tests, NULL, NULL);
}
