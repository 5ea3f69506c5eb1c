/*
 * cmd_kill: tine kill. First all machines are asked, then all are waited for, so that many end in
 * the time of one.
 *
 * Who is killed by force is found by the kernel, not by what a VMM says of itself: the process that
 * listens on the machine's socket, held by a pidfd from before the first request.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tools/tine/cli.h"
#include "tools/tine/machines.h"
#include "tools/tine/rpc.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"

#define END_MS 2000 /* for a VMM that was asked to end, beyond the grace its guest has */

struct victim {
    machine_id id;
    struct rpc rpc;
    int pid_fd;
    pid_t pid;
    bool failed;
    struct err err;
};

static void ask_to_stop(const struct machines *m, struct victim *v, uint64_t grace_ms)
{
    int rc = machines_connect(m, v->id, &v->rpc, &v->err);
    if (rc == 0) {
        v->pid = rpc_peer_pid(&v->rpc);
        v->pid_fd = v->pid > 1 ? (int)syscall(SYS_pidfd_open, v->pid, 0) : -1;
        if (v->pid_fd < 0)
            rc = err_set(&v->err, ERR_HOST, errno, "process %d of its VMM", (int)v->pid);
    }
    if (rc == 0)
        rc = rpc_send(&v->rpc, "stop", json_pack("{s:I}", "grace_ms", (json_int_t)grace_ms),
                      &v->err);
    /* A VMM without a machine has nothing to stop; it takes a quit in any state. */
    if (rc == 0 && grace_ms == 0)
        rc = rpc_send(&v->rpc, "quit", NULL, NULL) < 0 ? 0 : rc; /* gone already is as good */
    v->failed = rc < 0;
}

static bool has_ended(const struct victim *v, uint64_t deadline_ns)
{
    struct pollfd p = {.fd = v->pid_fd, .events = POLLIN};
    for (;;) {
        uint64_t now = clock_mono_ns();
        int left = now >= deadline_ns ? 0 : (int)((deadline_ns - now) / 1000000u) + 1;
        int n = poll(&p, 1, left);
        if (n > 0)
            return true;
        if (n == 0)
            return false;
    }
}

static void finish(const struct machines *m, struct victim *v, uint64_t deadline_ns)
{
    if (!v->failed && !has_ended(v, deadline_ns)) {
        if (syscall(SYS_pidfd_send_signal, v->pid_fd, SIGKILL, NULL, 0) < 0 && errno != ESRCH)
            v->failed = err_sys(&v->err, "kill process %d", (int)v->pid) < 0;
        else if (!has_ended(v, clock_mono_ns() + END_MS * 1000000ull))
            v->failed =
                err_set(&v->err, ERR_HOST, ETIMEDOUT, "process %d does not end", (int)v->pid) < 0;
    }
    rpc_close(&v->rpc);
    fd_close(&v->pid_fd);
    if (!v->failed)
        machines_remove(m, v->id, true);
}

static int report(const struct cli *c, const struct victim *v, size_t count)
{
    int rc = CLI_OK;
    json_t *killed = json_array(), *failed = json_array();
    for (size_t i = 0; i < count; i++) {
        if (!v[i].failed) {
            (void)json_array_append_new(killed, json_string(v[i].id));
            continue;
        }
        rc = CLI_FAILED;
        (void)fprintf(stderr, "tine kill: %s: %s\n", v[i].id, v[i].err.text);
        (void)json_array_append_new(
            failed, json_pack("{s:s, s:s}", "id", v[i].id, "message", v[i].err.text));
    }
    if (c->json) {
        int printed =
            cli_print_json(c, json_pack("{s:o, s:o}", "killed", killed, "failed", failed));
        return rc == CLI_OK ? printed : rc;
    }
    json_decref(killed);
    json_decref(failed);
    return rc;
}

static int kill_all(const struct cli *c, const struct machines *m, const machine_id *ids,
                    size_t count, uint64_t grace_ms)
{
    struct err e = {0};
    struct victim *v = calloc(count + 1, sizeof *v);
    if (v == NULL) {
        (void)err_set(&e, ERR_HOST, ENOMEM, "list of machines");
        return cli_fail(c, &e);
    }
    for (size_t i = 0; i < count; i++) {
        v[i] = (struct victim){.rpc = {.fd = -1}, .pid_fd = -1};
        memcpy(v[i].id, ids[i], sizeof v[i].id);
        ask_to_stop(m, &v[i], grace_ms);
    }
    uint64_t deadline = clock_mono_ns() + (grace_ms + END_MS) * 1000000u;
    for (size_t i = 0; i < count; i++)
        finish(m, &v[i], deadline);
    int rc = report(c, v, count);
    free(v);
    return rc;
}

/* The names on the command line, each checked, or all machines there are. */
static int choose(const struct machines *m, bool all, int argc, char **argv, machine_id **ids,
                  size_t *count, struct err *e)
{
    if (all)
        return machines_list(m, ids, count, e);
    machine_id *list = calloc((size_t)argc + 1, sizeof *list);
    if (list == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "list of machines");
    for (int i = 0; i < argc; i++) {
        int rc = control_id_check(argv[i], e);
        if (rc < 0) {
            free(list);
            return rc;
        }
        (void)snprintf(list[i], sizeof list[i], "%s", argv[i]);
    }
    *ids = list;
    *count = (size_t)argc;
    return 0;
}

enum { OPT_ALL = 256, OPT_GRACE };

static int run_kill(struct cli *c, int argc, char **argv)
{
    static const struct option options[] = {{"all", no_argument, NULL, OPT_ALL},
                                            {"grace", required_argument, NULL, OPT_GRACE},
                                            CLI_OPTIONS,
                                            {0}};
    struct err e = {0};
    struct machines m;
    uint64_t grace_s = 0;
    bool all = false;
    int opt;
    while ((opt = cli_option(c, argc, argv, "", options)) != -1) {
        if (opt == -2)
            return cli_usage_status(c);
        if (opt == OPT_ALL)
            all = true;
        else if (cli_number("--grace", optarg, 0, CONTROL_GRACE_MS_MAX / 1000, &grace_s, &e) < 0)
            return cli_fail(c, &e);
    }
    if (!cli_arguments(c, argc, all ? 0 : 1, all ? 0 : -1,
                       all ? "none with --all" : "names of machines"))
        return cli_usage_status(c);
    machine_id *ids = NULL;
    size_t count = 0;
    int rc = machines_open(&m, &e);
    if (rc == 0 && all)
        machines_sweep(&m);
    if (rc == 0)
        rc = choose(&m, all, argc - optind, argv + optind, &ids, &count, &e);
    if (rc < 0)
        return cli_fail(c, &e);
    rc = kill_all(c, &m, ids, count, grace_s * 1000);
    free(ids);
    return rc;
}

const struct cli_command cmd_kill = {
    .name = "kill",
    .summary = "end machines",
    .run = run_kill,
    .help = "usage: tine kill [--grace S] ID… [--json]\n"
            "       tine kill --all\n"
            "\n"
            "Ends machines, at once or, with --grace, after their agents had S seconds to shut the "
            "guest\n"
            "down. A VMM that does not end within 2 s more is killed. Their sockets and logs are "
            "removed;\n"
            "machines forked from them live on.\n"
            "\n"
            "  tine kill a a-1 a-2\n"
            "  tine kill --grace 5 web\n",
};
