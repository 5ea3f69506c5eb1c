/*
 * The agent's control connection: HELLO, RENEW, SHUTDOWN, what is malformed, and coming back after
 * it was cut. The agent runs as an ordinary process, so a renewal is checked and answered only.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/agent_fixture.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static struct fixture fx;

/* Accepts the control connection and takes HELLO. */
static int control_accept(void)
{
    uint8_t p[WIRE_HELLO_MAX];
    size_t len = 0, text_len = 0;
    const char *text = NULL;
    int fd = accept(fx.control_listen, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_HELLO);
    assert_int_equal(wire_hello_decode(p, len, &text, &text_len), 0);
    assert_non_null(memmem(text, text_len, "agent=", 6));
    assert_non_null(memmem(text, text_len, "\nkernel=", 8));
    assert_non_null(memmem(text, text_len, "\nboot_id=", 9));
    return fd;
}

static int setup(void **state)
{
    fixture_start(&fx, true);
    return 0;
}

static int teardown(void **state)
{
    fixture_stop(&fx);
    return 0;
}

static void renew_is_answered_with_its_generation(void **state)
{
    int fd = control_accept();
    struct wire_renew r = {
        .wall_clock_ns = 1, .machine_id = {1}, .hostname_len = 1, .hostname = "a"};
    for (uint8_t i = 1; i <= 3; i++) { /* again is as good as once */
        uint8_t frame[WIRE_HEADER_SIZE + WIRE_RENEW_SIZE], p[64];
        size_t len = 0;
        struct wire_renewed answer;
        memset(r.generation_id, i, sizeof r.generation_id);
        (void)wire_renew_encode(&r, frame, sizeof frame);
        /* In two pieces, cut inside the header and inside the payload. */
        size_t cut = i == 1 ? 5 : 100;
        assert_int_equal(send(fd, frame, cut, 0), (ssize_t)cut);
        usleep(2000);
        assert_int_equal(send(fd, frame + cut, sizeof frame - cut, 0),
                         (ssize_t)(sizeof frame - cut));
        assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_RENEWED);
        assert_int_equal(wire_renewed_decode(p, len, &answer), 0);
        assert_int_equal(answer.status, 0);
        assert_memory_equal(answer.generation_id, r.generation_id, WIRE_ID_SIZE);
    }
    close(fd);
}

static void bad_renew_names_the_step_and_lives(void **state)
{
    int fd = control_accept();
    uint8_t p[WIRE_RENEW_SIZE] = {0};
    size_t len = 0;
    struct wire_renewed answer;
    frame_send(fd, WIRE_RENEW, p, sizeof p); /* a machine id of zeros */
    assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_RENEWED);
    assert_int_equal(wire_renewed_decode(p, len, &answer), 0);
    assert_int_equal(answer.status, EINVAL);
    assert_int_equal(answer.step, WIRE_STEP_PAYLOAD);
    struct wire_renew r = {.machine_id = {1}};
    uint8_t frame[WIRE_HEADER_SIZE + WIRE_RENEW_SIZE];
    (void)wire_renew_encode(&r, frame, sizeof frame);
    frame_send(fd, WIRE_RENEW, frame + WIRE_HEADER_SIZE, WIRE_RENEW_SIZE);
    assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_RENEWED);
    assert_int_equal(wire_get32(p), 0);
    close(fd);
}

static void malformed_frames_close_and_it_comes_back(void **state)
{
    static const struct {
        uint32_t type, length, code;
    } bad[] = {{0, 0, WIRE_ERR_MALFORMED},
               {WIRE_RENEW, 167, WIRE_ERR_MALFORMED},
               {WIRE_RENEW, 169, WIRE_ERR_TOO_LARGE},
               {WIRE_RENEW, UINT32_MAX, WIRE_ERR_TOO_LARGE},
               {WIRE_SHUTDOWN, 1, WIRE_ERR_TOO_LARGE},
               {WIRE_EXEC, 1000, WIRE_ERR_TOO_LARGE},
               {UINT32_MAX, UINT32_MAX, WIRE_ERR_MALFORMED},
               {WIRE_STDIN_EOF, 0, WIRE_ERR_MALFORMED}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int fd = control_accept();
        uint8_t header[WIRE_HEADER_SIZE], p[512];
        size_t len = 0;
        wire_header_put(header, bad[i].type, bad[i].length);
        assert_int_equal(send(fd, header, sizeof header, 0), sizeof header);
        assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_ERROR);
        assert_int_equal(wire_get32(p), bad[i].code);
        assert_int_equal(frame_recv(fd, p, sizeof p, &len), 0);
        close(fd);
    }
}

/* What happens in a copy whose VMM resets every connection. */
static void connection_that_was_cut_is_made_again(void **state)
{
    for (int i = 0; i < 5; i++) {
        int fd = control_accept();
        close(fd);
    }
    int fd = control_accept();
    struct ran r = agent_sh(&fx, "echo alive");
    assert_int_equal(r.rc, 0);
    assert_int_equal(r.out.len, 6);
    ran_free(&r);
    close(fd);
}

static void shutdown_says_bye_and_ends(void **state)
{
    struct fixture *f = &fx;
    int status = 0;
    size_t len = 0;
    uint8_t p[64];
    fixture_start(f, true);
    int fd = control_accept();
    int conn = agent_connect(f);
    (void)raw_start(conn, "exec sleep 7183.25", 0);
    frame_send(fd, WIRE_SHUTDOWN, NULL, 0);
    assert_int_equal(frame_recv(fd, p, sizeof p, &len), WIRE_BYE);
    assert_int_equal(waitpid(f->pid, &status, 0), f->pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_true(processes_gone("7183.25"));
    close(conn);
    close(fd);
    close(f->control_listen);
    (void)unlink(f->control_path);
    assert_int_equal(rmdir(f->dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(renew_is_answered_with_its_generation, setup, teardown),
        cmocka_unit_test_setup_teardown(bad_renew_names_the_step_and_lives, setup, teardown),
        cmocka_unit_test_setup_teardown(malformed_frames_close_and_it_comes_back, setup, teardown),
        cmocka_unit_test_setup_teardown(connection_that_was_cut_is_made_again, setup, teardown),
        cmocka_unit_test(shutdown_says_bye_and_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
