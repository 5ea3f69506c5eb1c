/*
 * floor-fork: the floor of "a running machine is forked".
 *
 *   floor-fork [--memory MIB] [--dirty MIB] [--huge] [--samples N | --step]
 *
 * A machine whose guest keeps --dirty MiB written is forked with fork(2), over and over. For each
 * sample, in microseconds of one clock:
 *   pause    the fork call, in the parent: no guest can run while its address space is copied
 *   child    start of the fork call -> the child's own VM has left its guest for the first time
 *   create   the part of `child` that lies in the child
 *   resume   end of the fork call -> the parent's guest has left its guest again (it pays here for
 *            the second-level tables the fork write-protected)
 * Between samples the guest writes all its pages again, as a live one would. Prints one JSON object
 * at the end, or with --step one object for each line on stdin, so that the caller can take turns.
 */
#include "mini_vm.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SAMPLES_MAX = 10000 };

struct options {
    size_t memory_mib, dirty_mib;
    unsigned samples;
    int huge, step;
};

struct sample {
    double pause_us, child_us, create_us, resume_us;
};

/* What a child tells its parent: in memory that both share. */
struct report {
    double begun_us, first_exit_us;
};

static void guest_dirty_all(struct mini_vm *vm, size_t dirty_bytes)
{
    for (size_t page = 0; page <= dirty_bytes / 4096; page++)
        (void)mini_vm_tick(vm);
}

static _Noreturn void child_run(struct mini_vm *vm, void *ram, const struct mini_state *state,
                                volatile struct report *report)
{
    report->begun_us = mini_now_us();
    /* /dev/kvm itself may be used on; vm and vcpu belong to the parent's address space. */
    mini_vm_create(vm, ram, state->ram_bytes, state);
    (void)mini_vm_tick(vm);
    report->first_exit_us = mini_now_us();
    (void)pause(); /* until the parent has written its memory, and kills us */
    _exit(1);
}

static struct sample sample_take(struct mini_vm *vm, void *ram, struct mini_state *state,
                                 size_t dirty_bytes, volatile struct report *report)
{
    struct sample s;
    mini_vm_save(vm, state); /* not timed: a floor for the fork, not for reading registers */
    report->first_exit_us = 0;
    double begin = mini_now_us();
    pid_t pid = fork();
    if (pid == 0) {
        struct mini_vm copy = *vm;
        child_run(&copy, ram, state, report);
    }
    double forked = mini_now_us();
    if (pid < 0)
        mini_die("fork");
    (void)mini_vm_tick(vm);
    double resumed = mini_now_us();

    guest_dirty_all(vm, dirty_bytes);
    int status;
    while (report->first_exit_us == 0 && waitpid(pid, &status, WNOHANG) == 0)
        (void)usleep(100); /* an interrupted sleep only looks earlier */
    if (report->first_exit_us == 0) {
        errno = ECHILD;
        mini_die("the child failed");
    }
    if (kill(pid, SIGKILL) < 0 || waitpid(pid, &status, 0) != pid)
        mini_die("the child's end");
    s.pause_us = forked - begin;
    s.child_us = report->first_exit_us - begin;
    s.create_us = report->first_exit_us - report->begun_us;
    s.resume_us = resumed - forked;
    return s;
}

static void column_print(const char *name, const struct sample *s, unsigned n, size_t offset)
{
    printf(",\"%s\":[", name);
    for (unsigned i = 0; i < n; i++)
        printf("%s%.1f", i ? "," : "", *(const double *)((const char *)&s[i] + offset));
    printf("]");
}

static void samples_print(const struct options *o, const struct sample *s, unsigned n)
{
    printf("{\"dirty_mib\":%zu,\"huge\":%s,\"n\":%u", o->dirty_mib, o->huge ? "true" : "false", n);
    column_print("pause_us", s, n, offsetof(struct sample, pause_us));
    column_print("child_us", s, n, offsetof(struct sample, child_us));
    column_print("create_us", s, n, offsetof(struct sample, create_us));
    column_print("resume_us", s, n, offsetof(struct sample, resume_us));
    printf("}\n");
    fflush(stdout);
}

static struct options options_parse(int argc, char **argv)
{
    struct options o = {.memory_mib = 64, .dirty_mib = 16, .samples = 100};
    const struct option names[] = {
        {"memory", required_argument, NULL, 'm'},  {"dirty", required_argument, NULL, 'd'},
        {"samples", required_argument, NULL, 'n'}, {"huge", no_argument, &o.huge, 1},
        {"step", no_argument, &o.step, 1},         {0}};
    int c;
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (c == 'm')
            o.memory_mib = strtoul(optarg, NULL, 10);
        else if (c == 'd')
            o.dirty_mib = strtoul(optarg, NULL, 10);
        else if (c == 'n')
            o.samples = (unsigned)strtoul(optarg, NULL, 10);
        else if (c == '?')
            exit(2);
    }
    if (optind != argc || !o.dirty_mib || !o.samples || o.samples > SAMPLES_MAX) {
        fprintf(stderr,
                "usage: floor-fork [--memory MIB] [--dirty MIB] [--huge] [--samples N | --step]\n");
        exit(2);
    }
    return o;
}

int main(int argc, char **argv)
{
    static struct sample samples[SAMPLES_MAX];
    static struct mini_state state;
    struct options o = options_parse(argc, argv);
    size_t bytes = o.memory_mib << 20, dirty_bytes = o.dirty_mib << 20;

    /* Aligned to 2 MiB by hand: huge pages need it and mmap does not promise it. */
    const size_t align = 2UL << 20;
    char *area = mmap(NULL, bytes + align, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    volatile struct report *report =
        mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED || report == MAP_FAILED)
        mini_die("mmap");
    char *ram = area + (align - (uintptr_t)area % align) % align;
    if (madvise(ram, bytes, o.huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) < 0)
        mini_die("madvise");

    struct mini_vm vm;
    mini_vm_open(&vm);
    mini_guest_build(&vm, ram, bytes, dirty_bytes, &state);
    mini_vm_create(&vm, ram, bytes, &state);
    guest_dirty_all(&vm, dirty_bytes);
    if (o.step) {
        for (int c; (c = getchar()) != EOF;) {
            if (c != '\n')
                continue;
            samples[0] = sample_take(&vm, ram, &state, dirty_bytes, report);
            samples_print(&o, samples, 1);
        }
        return 0;
    }
    for (unsigned i = 0; i < o.samples; i++)
        samples[i] = sample_take(&vm, ram, &state, dirty_bytes, report);
    samples_print(&o, samples, o.samples);
    return 0;
}
