/*
 * Sockets by path: the owner's alone (F4), stale ones replaced and live ones left alone (D12), and
 * the longest path that fits (D13).
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
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/sock.h"

static char dir[64];

static int make_dir(void **state)
{
    (void)snprintf(dir, sizeof dir, "/tmp/tine-sock-XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    return rmdir(dir); /* fails if a test leaves anything behind */
}

static const char *path_of(const char *name)
{
    static char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void F4_mode_is_0600_under_any_umask(void **state)
{
    static const mode_t masks[] = {0, 022, 0777};
    for (size_t i = 0; i < 3; i++) {
        struct err e = {0};
        struct stat st;
        mode_t old = umask(masks[i]);
        CLEANUP_FD int fd = sock_listen(path_of("s"), &e);
        (void)umask(old);
        assert_true(fd >= 0);
        assert_int_equal(stat(path_of("s"), &st), 0);
        assert_int_equal(st.st_mode & 0777 & ~0600u, 0);
        assert_int_equal(unlink(path_of("s")), 0);
    }
}

static void D12_a_stale_socket_is_replaced(void **state)
{
    struct err e = {0};
    int fd = sock_listen(path_of("s"), &e);
    assert_true(fd >= 0);
    assert_false(sock_is_stale(path_of("s")));
    (void)close(fd); /* as after kill -9: the file stays */
    assert_true(sock_is_stale(path_of("s")));
    fd = sock_listen(path_of("s"), &e);
    assert_true(fd >= 0);
    CLEANUP_FD int peer = sock_connect(path_of("s"), &e);
    assert_true(peer >= 0);
    (void)close(fd);
    fd_close(&peer);
    assert_true(sock_remove_stale(path_of("s")));
    assert_false(sock_remove_stale(path_of("s")));
}

static void D12_a_live_socket_is_never_stolen(void **state)
{
    struct err e = {0};
    CLEANUP_FD int fd = sock_listen(path_of("s"), &e);
    assert_true(fd >= 0);
    assert_int_equal(sock_listen(path_of("s"), &e), -EADDRINUSE);
    assert_non_null(strstr(e.text, path_of("s")));
    assert_false(sock_remove_stale(path_of("s")));
    CLEANUP_FD int peer = sock_connect(path_of("s"), &e); /* still the first one's */
    assert_true(peer >= 0);
    assert_int_equal(unlink(path_of("s")), 0);
}

static void D12_a_file_that_is_no_socket_stays(void **state)
{
    struct err e = {0};
    FILE *f = fopen(path_of("s"), "w");
    assert_non_null(f);
    (void)fclose(f);
    assert_int_equal(sock_listen(path_of("s"), &e), -EEXIST);
    assert_int_equal(symlink("s", path_of("l")), 0);
    assert_int_equal(sock_listen(path_of("l"), &e), -EEXIST);
    assert_int_equal(unlink(path_of("l")), 0);
    assert_int_equal(unlink(path_of("s")), 0);
}

/* Eight processes want one stale name at once: one gets it. */
static void D12_a_stale_name_is_taken_by_one_only(void **state)
{
    struct err e = {0};
    for (int round = 0; round < 20; round++) {
        int dead = sock_listen(path_of("s"), &e);
        assert_true(dead >= 0);
        (void)close(dead);
        int go[2], done[2];
        assert_int_equal(pipe(go), 0);
        assert_int_equal(pipe(done), 0);
        pid_t pids[8];
        for (int i = 0; i < 8; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                char c;
                (void)close(go[1]);
                (void)close(done[1]);
                (void)!read(go[0], &c, 1);
                int fd = sock_listen(path_of("s"), NULL);
                if (fd >= 0)
                    (void)!read(done[0], &c, 1); /* lives until all have tried */
                _exit(fd >= 0 ? 0 : 1);
            }
        }
        (void)close(go[0]);
        (void)close(go[1]);
        int winners = 0, losers = 0;
        for (int i = 0; i < 7; i++) { /* seven end by themselves, the winner waits */
            int status;
            assert_true(wait(&status) > 0);
            losers += WIFEXITED(status) && WEXITSTATUS(status) == 1;
        }
        (void)close(done[1]);
        int status;
        assert_true(wait(&status) > 0);
        winners += WIFEXITED(status) && WEXITSTATUS(status) == 0;
        (void)close(done[0]);
        assert_int_equal(winners, 1);
        assert_int_equal(losers, 7);
        assert_int_equal(unlink(path_of("s")), 0);
    }
}

static void D13_paths_of_107_108_and_200_bytes(void **state)
{
    static const size_t lens[] = {107, 108, 200};
    for (size_t i = 0; i < 3; i++) {
        char path[256], number[16];
        struct err e = {0};
        int n = snprintf(path, sizeof path, "%s/", dir);
        memset(path + n, 'x', lens[i] - (size_t)n);
        path[lens[i]] = '\0';
        CLEANUP_FD int fd = sock_listen(path, &e);
        if (lens[i] == 107) {
            assert_true(fd >= 0);
            CLEANUP_FD int peer = sock_connect(path, &e);
            assert_true(peer >= 0);
            assert_int_equal(unlink(path), 0);
            continue;
        }
        assert_true(fd < 0);
        assert_int_equal(e.code, ERR_LIMIT);
        (void)snprintf(number, sizeof number, "%zu", lens[i]);
        assert_non_null(strstr(e.text, path));
        assert_non_null(strstr(e.text, number));
        assert_true(sock_connect(path, &e) < 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(F4_mode_is_0600_under_any_umask),
        cmocka_unit_test(D12_a_stale_socket_is_replaced),
        cmocka_unit_test(D12_a_live_socket_is_never_stolen),
        cmocka_unit_test(D12_a_file_that_is_no_socket_stays),
        cmocka_unit_test(D12_a_stale_name_is_taken_by_one_only),
        cmocka_unit_test(D13_paths_of_107_108_and_200_bytes),
    };
    return cmocka_run_group_tests_name("sock", tests, make_dir, remove_dir);
}
