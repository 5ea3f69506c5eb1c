/*
 * vsock: connections as host clients and the guest see them. Numbers in names are those of the
 * field cases each test guards against.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <cmocka.h>

#include "devices/vsock_line.h"
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

static void connect_line_is_exact(void **s)
{
    static const struct {
        const char *line;
        int rc;
        uint32_t port;
    } cases[] = {
        {"CONNECT 0\n", 0, 0},
        {"CONNECT 1024\n", 0, 1024},
        {"CONNECT 4294967294\n", 0, 4294967294u},
        {"CONNECT 4294967295\n", -EINVAL, 0},
        {"CONNECT 99999999999999999999\n", -EINVAL, 0},
        {"CONNECT \n", -EINVAL, 0},
        {"CONNECT\n", -EINVAL, 0},
        {"CONNECT 1 \n", -EINVAL, 0},
        {"CONNECT  1\n", -EINVAL, 0},
        {"CONNECT 1\r\n", -EINVAL, 0},
        {"CONNECT -1\n", -EINVAL, 0},
        {"CONNECT 0x1\n", -EINVAL, 0},
        {"connect 1\n", -EINVAL, 0},
        {"CONNECT 1", -EINVAL, 0},
        {"\n", -EINVAL, 0},
        {"", -EINVAL, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t port = 0;
        size_t len = strlen(cases[i].line);
        assert_int_equal(vsock_line_parse((const uint8_t *)cases[i].line, len, &port), cases[i].rc);
        assert_int_equal(port, cases[i].port);
    }
}

static void config_holds_the_guest_cid(void **s)
{
    struct vsock_guest *g = *s;
    uint8_t b[8];
    g->dev->ops->config_read(g->dev, 0, b, 8);
    assert_int_equal(le64_get(b), VSOCK_GUEST_CID);
    g->dev->ops->config_read(g->dev, 4, b, 8); /* half behind the end */
    assert_int_equal(le64_get(b), 0);
    g->dev->ops->config_read(g->dev, 0xfffffff0u, b, 4);
    assert_int_equal(le32_get(b), 0);
}

static void host_connects_and_both_sides_talk(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t host_port;
    int fd = host_open(g, 1024, &host_port);
    assert_true(host_port >= VSOCK_HOST_PORT_FIRST);
    assert_int_equal(send(fd, "hello", 5, 0), 5);
    guest_run(g);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_int_equal(p.len, 5);
    assert_memory_equal(p.payload, "hello", 5);
    struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_RW);
    h.len = 7;
    guest_send(g, &h, "goodbye", 7, 100);
    host_expect(g, fd, "goodbye", false);
    guest_send_op(g, 1024, host_port, VSOCK_OP_RST);
    host_expect(g, fd, "", true);
    guest_expect_nothing(g);
    assert_int_equal(g->v->conn_count, 0);
    (void)close(fd);
}

static void split_line_and_bytes_behind_it(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    static const char text[] = "CONNECT 5\nfirst bytes";
    int fd = host_connect(g);
    for (size_t i = 0; i < 10; i++) {
        assert_int_equal(send(fd, text + i, i == 9 ? sizeof text - 10 : 1, 0),
                         i == 9 ? sizeof text - 10 : 1);
        guest_run(g);
    }
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    guest_expect_nothing(g); /* the bytes wait for the answer */
    guest_send_op(g, 5, p.h.src_port, VSOCK_OP_RESPONSE);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_int_equal(p.len, 11);
    assert_memory_equal(p.payload, "first bytes", 11);
    (void)close(fd);
}

static void bad_lines_are_refused(void **s)
{
    struct vsock_guest *g = *s;
    int fd = host_say(g, "HELLO\n");
    host_expect(g, fd, "ERR bad request: expected CONNECT <port>, port 0 to 4294967294\n", true);
    (void)close(fd);
    fd = host_say(g, "CONNECT 00000000000000000000000000000000000000000001\n");
    host_expect(g, fd, "ERR bad request: line too long\n", true);
    (void)close(fd);
    fd = host_say(g, "CONN");
    (void)close(fd); /* gone in the middle of its line */
    guest_run(g);
    assert_int_equal(g->v->conn_count, 0);
    guest_expect_nothing(g);
}

static void d1_refused_at_once(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    int fd = host_say(g, "CONNECT 9999\n");
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    host_expect(g, fd, "", false); /* never OK before the guest has answered */
    guest_send_op(g, 9999, p.h.src_port, VSOCK_OP_RST);
    host_expect(g, fd, "ERR refused: nothing listens on guest port 9999\n", true);
    guest_expect_nothing(g);
    assert_int_equal(g->v->conn_count, 0);
    (void)close(fd);
}

static void d1_not_ready_without_a_driver(void **s)
{
    struct vsock_guest g;
    guest_start(&g, false, false);
    int fd = host_say(&g, "CONNECT 1024\n");
    host_expect(&g, fd, "ERR not ready: the guest has not started its vsock driver\n", true);
    (void)close(fd);
    guest_stop(&g);
}

static void d1_paused_is_said(void **s)
{
    struct vsock_guest *g = *s;
    vsock_set_paused(g->dev, true);
    int fd = host_say(g, "CONNECT 1024\n");
    host_expect(g, fd, "ERR paused: the machine is paused\n", true);
    (void)close(fd);
    vsock_set_paused(g->dev, false);
    uint32_t port;
    (void)close(host_open(g, 1024, &port));
}

static void d1_clients_from_before_a_pause_may_finish(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    int fd = host_say(g, "CONNECT 1024\n");
    int slow = host_say(g, "CONNECT 1025\n");
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    uint32_t port = p.h.src_port;
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    vsock_set_paused(g->dev, true); /* the moment of a fork */
    vsock_set_paused(g->dev, false);
    guest_send_op(g, 1024, port, VSOCK_OP_RESPONSE);
    char ok[32];
    (void)snprintf(ok, sizeof ok, "OK %u\n", port);
    host_expect(g, fd, ok, false);
    vsock_set_paused(g->dev, true); /* a long one */
    host_expect(g, slow, "", false);
    guest_expire_handshakes(g);
    host_expect(g, slow, "ERR paused: the machine is paused\n", true);
    (void)close(fd);
    (void)close(slow);
}

static void d1_silent_guest_and_silent_client_time_out(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    int silent = host_say(g, "CONN");
    int fd = host_say(g, "CONNECT 1024\n");
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    uint32_t host_port = p.h.src_port;
    guest_expire_handshakes(g);
    host_expect(g, fd, "ERR timed out: the guest did not answer within 5 s\n", true);
    host_expect(g, silent, "ERR timed out: no CONNECT line within 5 s\n", true);
    guest_expect(g, &p, VSOCK_OP_RST);
    assert_int_equal(p.h.src_port, host_port);
    guest_send_op(g, 1024, host_port, VSOCK_OP_RESPONSE); /* too late */
    guest_expect(g, &p, VSOCK_OP_RST);
    assert_int_equal(g->v->conn_count, 0);
    (void)close(fd);
    (void)close(silent);
}

static void d1_client_leaves_before_the_answer(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    int fd = host_say(g, "CONNECT 1024\n");
    guest_expect(g, &p, VSOCK_OP_REQUEST);
    (void)close(fd);
    guest_run(g);
    guest_expect(g, &p, VSOCK_OP_RST);
    assert_int_equal(g->v->conn_count, 0);
}

static void d3_peer_closes_with_data_in_flight(void **s)
{
    struct vsock_guest *g = *s;
    static uint8_t data[32768];
    for (unsigned round = 0; round < 100; round++) {
        uint32_t host_port;
        struct packet p;
        bool told = false, reset = false;
        int fd = host_open(g, 1024, &host_port);
        struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_RW);
        h.len = sizeof data;
        for (unsigned i = 0; i < 8; i++)
            guest_send(g, &h, data, sizeof data, 8192);
        uint8_t some[1024];
        assert_int_equal(recv(fd, some, sizeof some, 0), sizeof some);
        (void)close(fd);
        guest_send(g, &h, data, sizeof data, 8192); /* was under way: dropped, no signal */
        while (guest_receive(g, &p)) {
            reset = reset || p.h.op == VSOCK_OP_RST;
            told = told || (p.h.op == VSOCK_OP_SHUTDOWN && p.h.flags == VSOCK_SHUT_BOTH);
        }
        assert_true(reset || told);
        if (!reset)
            guest_send_op(g, 1024, host_port, VSOCK_OP_RST);
        assert_int_equal(g->v->conn_count, 0);
        assert_int_equal(g->v->buffered_bytes, 0);
    }
}

static void d4_host_half_close_keeps_the_way_back(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t host_port;
    int fd = host_open(g, 1024, &host_port);
    assert_int_equal(send(fd, "question", 8, 0), 8);
    assert_int_equal(shutdown(fd, SHUT_WR), 0);
    guest_run(g);
    guest_expect(g, &p, VSOCK_OP_RW);
    guest_expect(g, &p, VSOCK_OP_SHUTDOWN);
    assert_int_equal(p.h.flags, VSOCK_SHUT_SEND);
    guest_expect_nothing(g);
    struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_RW);
    h.len = 6;
    guest_send(g, &h, "answer", 6, 100);
    host_expect(g, fd, "answer", false);
    h = guest_header(1024, host_port, VSOCK_OP_SHUTDOWN);
    h.flags = VSOCK_SHUT_BOTH;
    guest_send(g, &h, NULL, 0, 1);
    guest_expect(g, &p, VSOCK_OP_RST);
    host_expect(g, fd, "", true);
    assert_int_equal(g->v->conn_count, 0);
    (void)close(fd);
}

static void d4_guest_half_close_keeps_the_way_back(void **s)
{
    struct vsock_guest *g = *s;
    struct packet p;
    uint32_t host_port;
    int fd = host_open(g, 1024, &host_port);
    struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_RW);
    h.len = 8;
    guest_send(g, &h, "question", 8, 100);
    h = guest_header(1024, host_port, VSOCK_OP_SHUTDOWN);
    h.flags = VSOCK_SHUT_SEND;
    guest_send(g, &h, NULL, 0, 1);
    host_expect(g, fd, "question", true);
    assert_int_equal(send(fd, "answer", 6, 0), 6);
    guest_run(g);
    guest_expect(g, &p, VSOCK_OP_RW);
    assert_memory_equal(p.payload, "answer", 6);
    (void)close(fd);
    guest_run(g);
    guest_expect(g, &p, VSOCK_OP_SHUTDOWN);
    assert_int_equal(p.h.flags, VSOCK_SHUT_BOTH);
    guest_send_op(g, 1024, host_port, VSOCK_OP_RST);
    assert_int_equal(g->v->conn_count, 0);
}

static void d4_last_bytes_go_before_the_end(void **s)
{
    struct vsock_guest *g = *s;
    static uint8_t data[65536], back[65536];
    struct packet p;
    uint32_t host_port;
    int fd = host_open(g, 1024, &host_port);
    struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_RW);
    h.len = sizeof data;
    for (unsigned i = 0; i < 5; i++) { /* more than the socket takes */
        memset(data, 'a' + (int)i, sizeof data);
        guest_send(g, &h, data, sizeof data, 65536);
    }
    assert_true(g->v->buffered_bytes > 0);
    h = guest_header(1024, host_port, VSOCK_OP_SHUTDOWN);
    h.flags = VSOCK_SHUT_BOTH;
    guest_send(g, &h, NULL, 0, 1);
    bool reset = false;
    while (guest_receive(g, &p))
        reset = reset || p.h.op == VSOCK_OP_RST;
    assert_true(reset); /* the guest need not wait for a slow reader */
    size_t total = 0;
    for (;;) {
        ssize_t n = recv(fd, back, sizeof back, 0);
        if (n == 0)
            break;
        if (n < 0) {
            assert_int_equal(errno, EAGAIN);
            guest_run(g);
            continue;
        }
        for (ssize_t i = 0; i < n; i++)
            assert_int_equal(back[i], 'a' + (int)((total + (size_t)i) / sizeof data));
        total += (size_t)n;
    }
    assert_int_equal(total, 5 * sizeof data);
    assert_int_equal(g->v->conn_count, 0);
    (void)close(fd);
}

/* Sends `total` bytes of a pattern as a guest that keeps to its credit; the reader is slow. */
static void d6_slow_reader_gets_every_byte(void **s)
{
    struct vsock_guest *g = *s;
    enum { TOTAL = 16 << 20, PIECE = 61440 };
    static uint8_t data[PIECE], back[65536];
    struct packet p;
    uint32_t host_port, sent = 0, got = 0, fwd = 0;
    int fd = host_open(g, 1024, &host_port);
    int small = 4608;
    struct vsock_conn *c = vsock_conn_find(g->v, 1024, host_port);
    assert_int_equal(setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
    unsigned idle = 0;
    while (got < TOTAL && idle < 1000) {
        idle++;
        while (sent < TOTAL && VSOCK_BUF_ALLOC - (sent - fwd) >= 4096) {
            uint32_t n = VSOCK_BUF_ALLOC - (sent - fwd);
            n = n > PIECE ? PIECE : n;
            n = n > TOTAL - sent ? TOTAL - sent : n;
            for (uint32_t i = 0; i < n; i++)
                data[i] = (uint8_t)((sent + i) * 2654435761u >> 24);
            struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_RW);
            h.len = n;
            guest_send(g, &h, data, n, 4096);
            sent += n;
        }
        while (guest_receive(g, &p)) {
            assert_int_equal(p.h.op, VSOCK_OP_CREDIT_UPDATE);
            fwd = p.h.fwd_cnt;
        }
        ssize_t n = recv(fd, back, sizeof back, 0);
        for (ssize_t i = 0; i < n; i++)
            assert_int_equal(back[i], (uint8_t)((got + (uint32_t)i) * 2654435761u >> 24));
        got += n > 0 ? (uint32_t)n : 0;
        idle = n > 0 ? 0 : idle;
        guest_run(g);
    }
    assert_int_equal(got, TOTAL);
    assert_int_equal(g->v->buffered_bytes, 0);
    assert_null(c->to_host.buf); /* memory only while bytes wait */
    (void)close(fd);
}

static void d8_packets_over_many_descriptors(void **s)
{
    struct vsock_guest *g = *s;
    static const uint32_t sizes[] = {1, 32767, 32768, 32769, 65536, 98305};
    static uint8_t data[98305], back[98305];
    uint32_t host_port;
    int fd = host_open(g, 1024, &host_port);
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        for (uint32_t i = 0; i < sizes[k]; i++)
            data[i] = (uint8_t)(i * 31 + k);
        struct vsock_header h = guest_header(1024, host_port, VSOCK_OP_RW);
        h.len = sizes[k];
        guest_send(g, &h, data, sizes[k], k % 2 == 0 ? 4096 : 1000000);
        uint32_t got = 0;
        while (got < sizes[k]) {
            ssize_t n = recv(fd, back + got, sizeof back - got, 0);
            assert_true(n > 0);
            got += (uint32_t)n;
            guest_run(g);
        }
        assert_memory_equal(back, data, sizes[k]);
    }
    (void)close(fd);
}

static void d10_many_connects_leave_nothing(void **s)
{
    struct vsock_guest *g = *s;
    uint32_t host_port, last = 0;
    struct packet p;
    unsigned fds = count_fds();
    for (unsigned i = 0; i < 2000; i++) {
        int fd = host_open(g, 1024, &host_port);
        assert_true(host_port != last); /* a late packet finds nobody */
        last = host_port;
        (void)close(fd);
        guest_run(g);
        guest_expect(g, &p, VSOCK_OP_SHUTDOWN);
        guest_send_op(g, 1024, host_port, VSOCK_OP_RST);
        assert_int_equal(g->v->conn_count, 0);
    }
    assert_int_equal(count_fds(), fds);
}

static void d10_without_fds_clients_are_told(void **s)
{
    struct vsock_guest *g = *s;
    struct rlimit before, few;
    static int fill[64];
    unsigned n = 0;
    uint32_t port;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    (void)snprintf(addr.sun_path, sizeof addr.sun_path, "%s", g->path);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    few.rlim_cur = (rlim_t)fd + 32;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (n < 64 && (fill[n] = dup(fd)) >= 0)
        n++;
    assert_int_equal(errno, EMFILE);
    assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof addr), 0);
    host_expect(g, fd, "ERR busy: the VMM is out of file descriptors\n", true);
    while (n > 0)
        (void)close(fill[--n]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    (void)close(fd);
    (void)close(host_open(g, 1024, &port));
}

static void d10_over_the_limit_is_refused_openly(void **s)
{
    struct vsock_guest *g = *s;
    static int fds[VSOCK_CONNECTIONS_MAX];
    static uint32_t ports[VSOCK_CONNECTIONS_MAX];
    unsigned before = count_fds(), open_now;
    struct rlimit nofile;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &nofile), 0);
    nofile.rlim_cur = nofile.rlim_max; /* both ends of each connection are in this process */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &nofile), 0);
    if (nofile.rlim_max < 2 * VSOCK_CONNECTIONS_MAX + 64) {
        print_message("skipped: only %llu file descriptors\n", (unsigned long long)nofile.rlim_max);
        skip();
    }
    for (open_now = 0; open_now < VSOCK_CONNECTIONS_MAX; open_now++)
        fds[open_now] = host_open(g, 1024, &ports[open_now]);
    for (unsigned i = 0; i < 3; i++) {
        int fd = host_say(g, "CONNECT 1024\n");
        host_expect(g, fd, "ERR busy: 2048 connections are open\n", true);
        (void)close(fd);
    }
    struct packet p;
    guest_send_op(g, 50, GUEST_GRANTED_PORT, VSOCK_OP_REQUEST);
    guest_expect(g, &p, VSOCK_OP_RST);
    guest_send_op(g, 51, VSOCK_CONTROL_PORT, VSOCK_OP_REQUEST); /* never shut out */
    guest_expect(g, &p, VSOCK_OP_RESPONSE);
    struct vsock_header h = guest_header(1024, ports[77], VSOCK_OP_RW);
    h.len = 4;
    guest_send(g, &h, "fine", 4, 4);
    host_expect(g, fds[77], "fine", false);
    for (unsigned i = 0; i < VSOCK_CONNECTIONS_MAX; i++)
        (void)close(fds[i]);
    for (unsigned i = 0; i < VSOCK_CONNECTIONS_MAX; i++)
        guest_send_op(g, 1024, ports[i], VSOCK_OP_RST);
    while (guest_receive(g, &p))
        assert_true(p.h.op == VSOCK_OP_SHUTDOWN);
    assert_int_equal(g->v->conn_count, 1);
    assert_int_equal(count_fds(), before);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(connect_line_is_exact),
        T(config_holds_the_guest_cid),
        T(host_connects_and_both_sides_talk),
        T(split_line_and_bytes_behind_it),
        T(bad_lines_are_refused),
        T(d1_refused_at_once),
        cmocka_unit_test(d1_not_ready_without_a_driver),
        T(d1_paused_is_said),
        T(d1_clients_from_before_a_pause_may_finish),
        T(d1_silent_guest_and_silent_client_time_out),
        T(d1_client_leaves_before_the_answer),
        T(d3_peer_closes_with_data_in_flight),
        T(d4_host_half_close_keeps_the_way_back),
        T(d4_guest_half_close_keeps_the_way_back),
        T(d4_last_bytes_go_before_the_end),
        T(d6_slow_reader_gets_every_byte),
        T(d8_packets_over_many_descriptors),
        T(d10_many_connects_leave_nothing),
        T(d10_without_fds_clients_are_told),
        T(d10_over_the_limit_is_refused_openly),
    };
    return cmocka_run_group_tests_name("vsock", tests, NULL, NULL);
}
