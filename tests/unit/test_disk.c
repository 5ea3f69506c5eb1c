/*
 * Disks: overlays across fork(2), the cap of layers, snapshots and hostile snapshot files
 * (cases C7, E13, E16, E22 as far as they touch disks).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "devices/disk.h"
#include "devices/disk_io.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/loop.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"

#define BASE_BYTES (300u * 1024 + 512) /* the last block is a short one */
#define BASE_SECTORS (BASE_BYTES / 512)

struct fixture {
    char dir[64];
    int dir_fd;
    struct loop loop;
    struct disk *d;
    struct disk_io io;
    uint8_t model[BASE_BYTES];
    struct err e;
};

struct waiter {
    struct disk_request r;
    int result;
    bool done;
};

static void on_done(struct disk_request *r, int result)
{
    struct waiter *w = CONTAINER_OF(r, struct waiter, r);
    w->result = result;
    w->done = true;
}

static int run(struct fixture *f, enum disk_op op, uint64_t sector, uint64_t sectors, void *data)
{
    struct iovec iov = {data, sectors * 512};
    struct waiter *w = calloc(1, sizeof *w);
    w->r = (struct disk_request){.op = op,
                                 .sector = sector,
                                 .sectors = sectors,
                                 .data = &iov,
                                 .data_count = 1,
                                 .done = on_done};
    disk_io_submit(&f->io, &w->r);
    disk_io_kick(&f->io);
    while (!w->done)
        assert_int_equal(loop_round(&f->loop, 5000, &f->e), 0);
    int rc = w->result;
    free(w);
    return rc;
}

static int fill(struct fixture *f, uint64_t sector, uint64_t sectors, uint8_t v)
{
    uint8_t *buf = malloc(sectors * 512);
    memset(buf, v, sectors * 512);
    int rc = run(f, DISK_WRITE, sector, sectors, buf);
    free(buf);
    if (rc == 0)
        memset(f->model + sector * 512, v, sectors * 512);
    return rc;
}

static bool matches(struct fixture *f)
{
    uint8_t *buf = malloc(BASE_BYTES);
    bool same =
        run(f, DISK_READ, 0, BASE_SECTORS, buf) == 0 && memcmp(buf, f->model, BASE_BYTES) == 0;
    free(buf);
    return same;
}

static int base_file(struct fixture *f)
{
    return openat(f->dir_fd, "base.img", O_RDONLY | O_CLOEXEC);
}

static int open_with(struct fixture *f, struct disk_spec spec)
{
    spec.path = "base.img";
    spec.fd = base_file(f);
    return disk_open(&f->d, &spec, &f->e);
}

static void begin(struct fixture *f)
{
    disk_io_init(&f->io, f->d, &f->loop, NULL, NULL);
}

static void end(struct fixture *f)
{
    disk_io_close(&f->io);
    disk_free(f->d);
    f->d = NULL;
}

static void write_base(struct fixture *f)
{
    for (unsigned i = 0; i < BASE_BYTES; i++)
        f->model[i] = (uint8_t)(i / 512 + i);
    int fd = openat(f->dir_fd, "base.img", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_int_equal(fd_pwrite_full(fd, f->model, BASE_BYTES, 0, &f->e), 0);
    close(fd);
}

static int setup(void **s)
{
    struct fixture *f = calloc(1, sizeof *f);
    strcpy(f->dir, "/tmp/tine-test-disk-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    f->dir_fd = open(f->dir, O_DIRECTORY | O_RDONLY | O_CLOEXEC);
    assert_int_equal(loop_init(&f->loop, &f->e), 0);
    write_base(f);
    assert_int_equal(open_with(f, (struct disk_spec){0}), 0);
    begin(f);
    *s = f;
    return 0;
}

static int teardown(void **s)
{
    struct fixture *f = *s;
    if (f->d != NULL)
        end(f);
    loop_close(&f->loop);
    close(f->dir_fd);
    char cmd[128];
    (void)snprintf(cmd, sizeof cmd, "rm -rf %s", f->dir);
    int rc = system(cmd);
    free(f);
    return rc;
}

static void freeze_and_push(struct fixture *f)
{
    assert_int_equal(disk_io_drain(&f->io, false, &f->e), 0);
    assert_int_equal(disk_freeze(f->d, &f->e), 0);
    assert_int_equal(disk_push(f->d, &f->e), 0);
}

static unsigned layers_held(const struct fixture *f)
{
    unsigned n = 0;
    for (unsigned i = 0; i < DISK_OVERLAY_DEPTH_MAX; i++)
        n += f->d->layers[i].fd >= 0;
    return n;
}

/* ---- layers ---- */

static void a_frozen_disk_refuses_writes(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(fill(f, 0, 8, 1), 0);
    assert_int_equal(disk_freeze(f->d, &f->e), 0);
    assert_true(disk_freeze(f->d, &f->e) < 0);
    uint8_t buf[512] = {0};
    assert_int_equal(run(f, DISK_WRITE, 0, 1, buf), -EROFS);
    assert_int_equal(run(f, DISK_DISCARD, 0, 8, buf), -EROFS);
    assert_int_equal(run(f, DISK_ZERO, 0, 1, buf), -EROFS);
    assert_true(matches(f));
    assert_int_equal(disk_push(f->d, &f->e), 0);
    assert_int_equal(fill(f, 1, 1, 2), 0);
    assert_true(matches(f));
}

static void layers_that_serve_nothing_are_dropped(void **s)
{
    struct fixture *f = *s;
    for (unsigned i = 0; i < 2000; i++) {
        assert_int_equal(fill(f, 8, 16, (uint8_t)i), 0); /* always the same blocks */
        freeze_and_push(f);
        freeze_and_push(f); /* nothing written: nothing to keep */
    }
    assert_int_equal(layers_held(f), 1);
    assert_int_equal(disk_overlay_bytes(f->d), 16 * 512);
    assert_true(matches(f));
}

/* One block each from more forks than there are layers: the smallest are merged, nothing is lost.
 */
static void more_forks_than_layers(void **s)
{
    struct fixture *f = *s;
    end(f);
    int fd = openat(f->dir_fd, "base.img", O_RDWR | O_CLOEXEC);
    uint64_t bytes = 600 * 4096;
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    close(fd);
    assert_int_equal(open_with(f, (struct disk_spec){0}), 0);
    begin(f);
    uint8_t buf[4096];
    for (unsigned i = 0; i < 600; i++) {
        memset(buf, (int)(i * 5 + 1), sizeof buf);
        assert_int_equal(run(f, DISK_WRITE, i * 8, 8, buf), 0);
        freeze_and_push(f);
    }
    assert_true(layers_held(f) <= DISK_OVERLAY_DEPTH_MAX);
    assert_int_equal(disk_overlay_bytes(f->d), bytes);
    for (unsigned i = 0; i < 600; i++) {
        assert_int_equal(run(f, DISK_READ, i * 8, 8, buf), 0);
        assert_int_equal(buf[0], (uint8_t)(i * 5 + 1));
        assert_int_equal(buf[4095], (uint8_t)(i * 5 + 1));
    }
    end(f);
}

static void overlays_in_a_directory_leave_nothing_behind(void **s)
{
    struct fixture *f = *s;
    end(f);
    assert_true(open_with(f, (struct disk_spec){.overlay_dir = "/nonexistent"}) < 0);
    assert_non_null(strstr(f->e.text, "/nonexistent"));
    assert_int_equal(open_with(f, (struct disk_spec){.overlay_dir = f->dir}), 0);
    begin(f);
    assert_int_equal(fill(f, 3, 100, 8), 0);
    assert_true(matches(f));
    struct stat st;
    assert_int_equal(fstat(f->d->layers[f->d->top].fd, &st), 0);
    assert_int_equal(st.st_nlink, 0);
    assert_int_equal(st.st_mode & 0777, 0600);
}

/* ---- fork ---- */

/* What a fork child does, in a real one. Exit status 0: all is as it should be. */
static void child_begins(struct fixture *f)
{
    loop_close_inherited(&f->loop);
    disk_io_forget(&f->io);
    assert_int_equal(loop_init(&f->loop, &f->e), 0);
    assert_int_equal(disk_push(f->d, &f->e), 0);
    begin(f);
}

static void reap(pid_t pid)
{
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void parent_child_and_grandchild_never_see_each_others_writes(void **s)
{
    struct fixture *f = *s;
    assert_int_equal(fill(f, 0, 64, 1), 0);
    assert_int_equal(disk_io_drain(&f->io, false, &f->e), 0);
    assert_int_equal(disk_freeze(f->d, &f->e), 0);
    pid_t pid = fork();
    if (pid == 0) {
        child_begins(f);
        bool ok = matches(f) && fill(f, 5, 30, 0xcc) == 0 && matches(f);
        ok = ok && disk_io_drain(&f->io, false, &f->e) == 0 && disk_freeze(f->d, &f->e) == 0;
        pid_t grandchild = fork();
        if (grandchild == 0) {
            child_begins(f);
            ok = ok && matches(f) && fill(f, 7, 30, 0xdd) == 0 && matches(f);
            _exit(ok ? 0 : 1);
        }
        ok = ok && disk_push(f->d, &f->e) == 0 && fill(f, 9, 9, 0xee) == 0;
        int status = -1;
        ok = ok && waitpid(grandchild, &status, 0) == grandchild && status == 0;
        ok = ok && matches(f);
        _exit(ok ? 0 : 1);
    }
    assert_int_equal(disk_push(f->d, &f->e), 0);
    assert_int_equal(fill(f, 2, 20, 0xaa), 0);
    assert_true(matches(f));
    reap(pid);
    assert_true(matches(f));
    assert_int_equal(run(f, DISK_DISCARD, 0, 64, NULL), 0);
    memset(f->model, 0, 64 * 512);
    assert_true(matches(f));
}

/* ---- snapshots ---- */

struct saved {
    struct state_writer w;
    struct state_node root;
};

static int save(struct fixture *f, const char *name, struct saved *out)
{
    const void *blob;
    size_t len;
    assert_int_equal(state_writer_init(&out->w, &f->e), 0);
    int rc = disk_save(f->d, f->dir_fd, name, &out->w, &f->e);
    if (rc < 0) {
        state_writer_free(&out->w);
        return rc;
    }
    assert_int_equal(state_finish(&out->w, &blob, &len, &f->e), 0);
    assert_int_equal(state_open(blob, len, &out->root, &f->e), 0);
    return 0;
}

static int restore(struct fixture *f, const struct saved *s)
{
    return disk_restore(f->d, f->dir_fd, &s->root, &f->e);
}

static void scribble(struct fixture *f)
{
    assert_int_equal(fill(f, 1, 3, 0x11), 0);
    freeze_and_push(f);
    assert_int_equal(fill(f, 100, 60, 0x22), 0);
    assert_int_equal(run(f, DISK_DISCARD, 120, 24, NULL), 0);
    memset(f->model + 120 * 512, 0, 24 * 512);
    freeze_and_push(f);
    assert_int_equal(fill(f, 110, 2, 0x33), 0);
    assert_int_equal(fill(f, BASE_SECTORS - 1, 1, 0x44), 0);
}

static void reopen(struct fixture *f)
{
    end(f);
    assert_int_equal(open_with(f, (struct disk_spec){0}), 0);
    begin(f);
}

static void snapshots_merge_all_layers_over_generations(void **s)
{
    struct fixture *f = *s;
    char name[32];
    scribble(f);
    for (unsigned i = 0; i < 4; i++) {
        struct saved saved;
        (void)snprintf(name, sizeof name, "gen%u", i);
        assert_int_equal(save(f, name, &saved), 0);
        assert_true(matches(f)); /* the saved machine goes on */
        reopen(f);
        if (restore(f, &saved) != 0)
            fail_msg("%s", f->e.text);
        state_writer_free(&saved.w);
        assert_true(matches(f));
        assert_int_equal(fill(f, 40 + i * 13, 5, (uint8_t)(0x50 + i)), 0);
        assert_true(matches(f));
    }
    /* Written to by nobody after it was saved. */
    struct stat st;
    assert_int_equal(fstatat(f->dir_fd, "gen0", &st, 0), 0);
    assert_true(st.st_size < BASE_BYTES);
}

static void an_untouched_disk_saves_no_file(void **s)
{
    struct fixture *f = *s;
    struct saved saved;
    assert_int_equal(save(f, "overlay", &saved), 0);
    assert_true(faccessat(f->dir_fd, "overlay", F_OK, 0) < 0);
    reopen(f);
    assert_int_equal(restore(f, &saved), 0);
    assert_true(matches(f));
    state_writer_free(&saved.w);
}

static void an_existing_file_is_not_overwritten(void **s)
{
    struct fixture *f = *s;
    struct saved a, b;
    scribble(f);
    assert_int_equal(save(f, "overlay", &a), 0);
    assert_true(save(f, "overlay", &b) < 0);
    assert_non_null(strstr(f->e.text, "overlay"));
    reopen(f);
    assert_int_equal(restore(f, &a), 0);
    assert_true(matches(f));
    state_writer_free(&a.w);
}

static void E22_no_room_is_an_error_and_leaves_no_file(void **s)
{
    struct fixture *f = *s;
    struct saved saved;
    struct rlimit before, tight = {8192, 8192};
    scribble(f);
    (void)signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    tight.rlim_max = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    assert_true(save(f, "overlay", &saved) < 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_non_null(strstr(f->e.text, "overlay"));
    assert_true(faccessat(f->dir_fd, "overlay", F_OK, 0) < 0);
    assert_true(matches(f));
    assert_int_equal(fill(f, 0, 4, 1), 0);
}

static void E16_another_base_is_refused(void **s)
{
    struct fixture *f = *s;
    struct saved saved;
    scribble(f);
    assert_int_equal(save(f, "overlay", &saved), 0);

    int fd = openat(f->dir_fd, "base.img", O_RDWR | O_CLOEXEC);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    struct timespec times[2] = {st.st_atim, st.st_mtim};
    uint8_t byte = 0, old;
    assert_int_equal(pread(fd, &old, 1, 99 * 512), 1);
    byte = (uint8_t)(old + 1);
    assert_int_equal(pwrite(fd, &byte, 1, 99 * 512), 1);
    struct timespec later = {times[1].tv_sec + 5, 0};
    assert_int_equal(futimens(fd, (struct timespec[2]){later, later}), 0);
    reopen(f);
    assert_true(restore(f, &saved) < 0);
    assert_int_equal(f->e.code, ERR_MISMATCH);
    assert_non_null(strstr(f->e.text, "base.img"));
    assert_non_null(strstr(f->e.text, "expected time"));

    /* The same content under another time (a copy): a small base is hashed whole, so it is known.
     */
    assert_int_equal(pwrite(fd, &old, 1, 99 * 512), 1);
    assert_int_equal(futimens(fd, (struct timespec[2]){later, later}), 0);
    reopen(f);
    if (restore(f, &saved) != 0)
        fail_msg("%s", f->e.text);
    assert_true(matches(f));

    assert_int_equal(ftruncate(fd, BASE_BYTES + 512), 0);
    assert_int_equal(futimens(fd, times), 0);
    reopen(f);
    assert_true(restore(f, &saved) < 0);
    assert_int_equal(f->e.code, ERR_MISMATCH);
    assert_non_null(strstr(f->e.text, "308224"));
    close(fd);
    state_writer_free(&saved.w);
}

static void a_read_only_disk_and_a_writable_one_are_not_the_same(void **s)
{
    struct fixture *f = *s;
    struct saved saved;
    scribble(f);
    assert_int_equal(save(f, "overlay", &saved), 0);
    end(f);
    assert_int_equal(open_with(f, (struct disk_spec){.read_only = true}), 0);
    begin(f);
    assert_true(restore(f, &saved) < 0);
    assert_int_equal(f->e.code, ERR_MISMATCH);
    state_writer_free(&saved.w);
}

static void the_cap_holds_for_a_restored_overlay(void **s)
{
    struct fixture *f = *s;
    struct saved saved;
    scribble(f);
    assert_int_equal(save(f, "overlay", &saved), 0);
    end(f);
    assert_int_equal(open_with(f, (struct disk_spec){.overlay_max_bytes = 4096}), 0);
    begin(f);
    assert_true(restore(f, &saved) < 0);
    assert_int_equal(f->e.code, ERR_LIMIT);
    state_writer_free(&saved.w);
}

/* The file is put under attack; the state that names it is sound. */
static void E13_damaged_overlay_files(void **s)
{
    struct fixture *f = *s;
    struct saved saved;
    scribble(f);
    assert_int_equal(save(f, "overlay", &saved), 0);
    int fd = openat(f->dir_fd, "overlay", O_RDWR | O_CLOEXEC);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    uint64_t extents;
    assert_int_equal(pread(fd, &extents, 8, 24), 8);
    /* Every bit of the header, the extents and the one checksum. */
    for (uint64_t at = 0; at < 64 + extents * 16 + 8; at++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            uint8_t good, bad;
            assert_int_equal(pread(fd, &good, 1, (off_t)at), 1);
            bad = (uint8_t)(good ^ 1u << bit);
            assert_int_equal(pwrite(fd, &bad, 1, (off_t)at), 1);
            reopen(f);
            assert_true(restore(f, &saved) < 0);
            assert_true(f->e.code == ERR_BAD_IMAGE || f->e.code == ERR_MISMATCH);
            assert_non_null(strstr(f->e.text, "overlay"));
            assert_int_equal(layers_held(f), 0);
            assert_int_equal(pwrite(fd, &good, 1, (off_t)at), 1);
        }
    }
    for (off_t cut = 0; cut < st.st_size; cut += 777) {
        assert_int_equal(ftruncate(fd, cut), 0);
        reopen(f);
        assert_true(restore(f, &saved) < 0);
        assert_int_equal(f->e.code, ERR_BAD_IMAGE);
    }
    assert_int_equal(ftruncate(fd, st.st_size + 1), 0);
    reopen(f);
    assert_true(restore(f, &saved) < 0);
    close(fd);
    assert_int_equal(unlinkat(f->dir_fd, "overlay", 0), 0);
    assert_true(restore(f, &saved) < 0);
    assert_int_equal(mkdirat(f->dir_fd, "overlay", 0700), 0);
    assert_true(restore(f, &saved) < 0);
    assert_int_equal(unlinkat(f->dir_fd, "overlay", AT_REMOVEDIR), 0);
    assert_int_equal(symlinkat("base.img", f->dir_fd, "overlay"), 0);
    assert_true(restore(f, &saved) < 0);
    assert_int_equal(unlinkat(f->dir_fd, "overlay", 0), 0);
    assert_int_equal(mkfifoat(f->dir_fd, "overlay", 0600), 0);
    assert_true(restore(f, &saved) < 0); /* and does not hang */
    state_writer_free(&saved.w);
}

/* Data is checked when that is asked for, and the chunk is named. */
static void E13_damaged_overlay_data_is_found_by_verify(void **s)
{
    struct fixture *f = *s;
    struct saved saved;
    assert_int_equal(disk_verify(f->d, &f->e), 0);
    scribble(f);
    assert_int_equal(save(f, "overlay", &saved), 0);
    reopen(f);
    assert_int_equal(restore(f, &saved), 0);
    if (disk_verify(f->d, &f->e) != 0)
        fail_msg("%s", f->e.text);
    assert_true(matches(f));
    int fd = openat(f->dir_fd, "overlay", O_RDWR | O_CLOEXEC);
    for (off_t at = 4096; at < 4096 + 32 * 4096; at += 1111) {
        uint8_t byte;
        if (pread(fd, &byte, 1, at) != 1)
            break;
        byte ^= 4;
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        reopen(f);
        assert_int_equal(restore(f, &saved), 0);
        assert_true(disk_verify(f->d, &f->e) < 0);
        assert_int_equal(f->e.code, ERR_BAD_IMAGE);
        assert_non_null(strstr(f->e.text, "chunk 0"));
        byte ^= 4;
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
    state_writer_free(&saved.w);
}

static void names_that_leave_the_directory_are_refused(void **s)
{
    struct fixture *f = *s;
    static const char *const names[] = {"../base.img", "/etc/passwd", "..", ".", "a/b"};
    struct stat st;
    assert_int_equal(fstatat(f->dir_fd, "base.img", &st, 0), 0);
    for (unsigned i = 0; i < ARRAY_SIZE(names); i++) {
        struct state_writer w;
        struct state_node root;
        const void *blob;
        size_t len;
        assert_int_equal(state_writer_init(&w, &f->e), 0);
        state_put_u32(&w, "version", 1);
        state_put_u32(&w, "read-only", 0);
        state_put_u64(&w, "base-bytes", BASE_BYTES);
        state_put_u64(&w, "base-mtime-ns",
                      (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec);
        state_put_u64(&w, "base-hash", 0);
        state_put_string(&w, "overlay-name", names[i]);
        state_put_u64(&w, "overlay-bytes", 64);
        state_put_u64(&w, "overlay-hash", 0);
        assert_int_equal(state_finish(&w, &blob, &len, &f->e), 0);
        assert_int_equal(state_open(blob, len, &root, &f->e), 0);
        assert_true(disk_restore(f->d, f->dir_fd, &root, &f->e) < 0);
        assert_non_null(strstr(f->e.text, "not possible"));
        state_writer_free(&w);
    }
}

static void C7_machines_share_a_base(void **s)
{
    struct fixture *f = *s;
    struct disk *others[12];
    for (unsigned i = 0; i < 12; i++) {
        struct disk_spec spec = {.path = "base.img", .fd = base_file(f), .read_only = i >= 2};
        assert_int_equal(disk_open(&others[i], &spec, &f->e), 0);
    }
    assert_int_equal(fill(f, 0, 64, 0x77), 0);
    struct fixture *g = calloc(1, sizeof *g);
    for (unsigned i = 0; i < BASE_BYTES; i++)
        g->model[i] = (uint8_t)(i / 512 + i);
    assert_int_equal(loop_init(&g->loop, &g->e), 0);
    g->d = others[0];
    begin(g);
    assert_true(matches(g)); /* sees nothing of the first one's writes */
    disk_io_close(&g->io);
    loop_close(&g->loop);
    free(g);
    for (unsigned i = 0; i < 12; i++)
        disk_free(others[i]);
}

static void bases_that_are_no_disk_are_refused(void **s)
{
    struct fixture *f = *s;
    struct disk *d = NULL;
    int pipes[2];
    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    struct disk_spec spec = {.path = "pipe", .fd = pipes[0]};
    assert_true(disk_open(&d, &spec, &f->e) < 0);
    close(pipes[1]);
    spec = (struct disk_spec){.path = "dir", .fd = open(f->dir, O_RDONLY | O_CLOEXEC)};
    assert_true(disk_open(&d, &spec, &f->e) < 0);
    int fd = memfd_create("huge", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, (off_t)(DISK_BYTES_MAX + 512)), 0);
    spec = (struct disk_spec){.path = "huge", .fd = fd};
    assert_true(disk_open(&d, &spec, &f->e) < 0);
    assert_int_equal(f->e.code, ERR_LIMIT);
    fd = memfd_create("large", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, (off_t)DISK_BYTES_MAX), 0);
    spec = (struct disk_spec){.path = "large", .fd = fd};
    assert_int_equal(disk_open(&d, &spec, &f->e), 0);
    disk_free(d);
    disk_free(NULL);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_frozen_disk_refuses_writes),
        T(layers_that_serve_nothing_are_dropped),
        T(more_forks_than_layers),
        T(overlays_in_a_directory_leave_nothing_behind),
        T(parent_child_and_grandchild_never_see_each_others_writes),
        T(snapshots_merge_all_layers_over_generations),
        T(an_untouched_disk_saves_no_file),
        T(an_existing_file_is_not_overwritten),
        T(E22_no_room_is_an_error_and_leaves_no_file),
        T(E16_another_base_is_refused),
        T(a_read_only_disk_and_a_writable_one_are_not_the_same),
        T(the_cap_holds_for_a_restored_overlay),
        T(E13_damaged_overlay_files),
        T(E13_damaged_overlay_data_is_found_by_verify),
        T(names_that_leave_the_directory_are_refused),
        T(C7_machines_share_a_base),
        T(bases_that_are_no_disk_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
