/*
 * cmd_control: the commands that are one request to one machine: snapshot, fork, status, console,
 * pause, resume.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/tine/cli.h"
#include "tools/tine/machines.h"
#include "tools/tine/rpc.h"
#include "vmm/core/base64.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"

#define QUICK_MS 10000
#define FORK_MS 120000

static const struct option plain_options[] = {CLI_OPTIONS, {0}};

/* For commands without options of their own; CLI_OK or the exit status. */
static int take_plain(struct cli *c, int argc, char **argv, int words, const char *what)
{
    int opt = cli_option(c, argc, argv, "", plain_options);
    if (opt == -2 || !cli_arguments(c, argc, words, words, what))
        return cli_usage_status(c);
    return CLI_OK;
}

/* One request to machine `id`. Errors name the machine. Steals `params`. */
static int ask(const char *id, const char *method, json_t *params, int timeout_ms, json_t **result,
               struct err *e)
{
    struct machines m;
    struct rpc r = {.fd = -1};
    int rc = machines_open(&m, e);
    if (rc == 0)
        rc = machines_connect(&m, id, &r, e);
    if (rc < 0) {
        json_decref(params);
        return rc;
    }
    rc = rpc_call(&r, method, params, timeout_ms, result, e);
    rpc_close(&r);
    return rc < 0 ? err_wrap(e, rc, "%s", id) : 0;
}

static uint64_t timing(const json_t *result, const char *name)
{
    json_int_t v = json_integer_value(json_object_get(json_object_get(result, "timings"), name));
    return v > 0 ? (uint64_t)v : 0;
}

/* DIR itself need not exist, the folder above it must: the VMM has another working folder. */
static int absolute(const char *dir, char out[PATH_MAX], struct err *e)
{
    char buf[PATH_MAX], parent[PATH_MAX];
    if (snprintf(buf, sizeof buf, "%s", dir) >= (int)sizeof buf || buf[0] == '\0')
        return err_set(e, ERR_USAGE, ENAMETOOLONG, "folder %.80s", dir);
    size_t len = strlen(buf);
    while (len > 1 && buf[len - 1] == '/')
        buf[--len] = '\0';
    char *slash = strrchr(buf, '/');
    const char *name = slash != NULL ? slash + 1 : buf;
    if (name[0] == '\0' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return err_set(e, ERR_USAGE, 0, "%s is no name for a new folder", dir);
    if (slash != NULL)
        *slash = '\0';
    const char *above = slash == NULL ? "." : slash == buf ? "/" : buf;
    if (realpath(above, parent) == NULL)
        return err_sys(e, "folder %s, in which %s is to be", above, name);
    int n = snprintf(out, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, name);
    return n < PATH_MAX ? 0 : err_set(e, ERR_USAGE, ENAMETOOLONG, "folder %.80s", dir);
}

static int run_snapshot(struct cli *c, int argc, char **argv)
{
    char dir[PATH_MAX], total[32], stopped[32];
    struct err e = {0};
    json_t *result = NULL;
    int rc = take_plain(c, argc, argv, 2, "the name of a machine and a folder");
    if (rc != CLI_OK)
        return rc;
    const char *id = argv[optind];
    rc = absolute(argv[optind + 1], dir, &e);
    if (rc == 0)
        rc = ask(id, "snapshot", json_pack("{s:s}", "dir", dir), -1, &result, &e);
    if (rc < 0)
        return cli_fail(c, &e);
    if (c->json) {
        (void)json_object_set_new(result, "dir", json_string(dir));
        return cli_print_json(c, result);
    }
    (void)printf("%s: in %s, guest stopped for %s\n", dir,
                 cli_duration(timing(result, "total_us"), total),
                 cli_duration(timing(result, "stopped_us"), stopped));
    json_decref(result);
    return CLI_OK;
}

const struct cli_command cmd_snapshot = {
    .name = "snapshot",
    .summary = "freeze a machine's present state into a folder",
    .run = run_snapshot,
    .help =
        "usage: tine snapshot ID DIR [--json]\n"
        "\n"
        "Writes the state and memory of machine ID into DIR, which does not exist yet or holds an\n"
        "earlier snapshot (then it is replaced as a whole). The machine goes on.\n"
        "\n"
        "  tine snapshot a /tmp/warm && tine restore /tmp/warm\n",
};

/* [{id, control, vsock}] of "a,b,c". */
static int named_children(const char *names, json_t **out, struct err *e)
{
    struct machines m;
    char buf[4096];
    int rc = machines_open(&m, e);
    if (rc < 0)
        return rc;
    if (snprintf(buf, sizeof buf, "%s", names) >= (int)sizeof buf)
        return err_set(e, ERR_LIMIT, ENAMETOOLONG, "--names");
    json_t *list = json_array();
    char *rest = buf;
    while (rc == 0 && rest != NULL) {
        char control[SOCK_PATH_MAX + 1], vsock[SOCK_PATH_MAX + 1];
        const char *id = strsep(&rest, ",");
        rc = machines_check_new(&m, id, NULL, 0, e);
        if (rc == 0)
            rc = machines_path(&m, id, ".sock", control, e);
        if (rc == 0)
            rc = machines_path(&m, id, ".vsock", vsock, e);
        if (rc == 0)
            (void)json_array_append_new(
                list, json_pack("{s:s, s:s, s:s}", "id", id, "control", control, "vsock", vsock));
    }
    if (rc < 0)
        json_decref(list);
    else
        *out = list;
    return rc;
}

static void print_children(const json_t *result)
{
    size_t i;
    const json_t *child;
    char total[32], stopped[32];
    const json_t *children = json_object_get(result, "children");
    json_array_foreach(children, i, child)
    {
        const char *id = json_string_value(json_object_get(child, "id"));
        (void)puts(id != NULL && control_id_check(id, NULL) == 0 ? id : "?");
    }
    (void)fprintf(stderr, "%zu forked in %s, parent stopped for %s\n", json_array_size(children),
                  cli_duration(timing(result, "total_us"), total),
                  cli_duration(timing(result, "stopped_us"), stopped));
}

enum { OPT_NAMES = 256, OPT_HOST_NAME };

static int run_fork(struct cli *c, int argc, char **argv)
{
    static const struct option options[] = {{"count", required_argument, NULL, 'n'},
                                            {"names", required_argument, NULL, OPT_NAMES},
                                            {"host-name", required_argument, NULL, OPT_HOST_NAME},
                                            CLI_OPTIONS,
                                            {0}};
    struct err e = {0};
    const char *names = NULL, *host_name = NULL;
    uint64_t count = 0;
    int opt, rc = 0;
    while ((opt = cli_option(c, argc, argv, "n:", options)) != -1) {
        if (opt == -2)
            return cli_usage_status(c);
        if (opt == OPT_NAMES)
            names = optarg;
        else if (opt == OPT_HOST_NAME)
            host_name = optarg;
        else
            rc = cli_number("-n", optarg, 1, CONTROL_CHILDREN_MAX, &count, &e);
        if (rc < 0)
            return cli_fail(c, &e);
    }
    if (!cli_arguments(c, argc, 1, 1, "the name of a machine"))
        return cli_usage_status(c);
    json_t *children = NULL, *result = NULL;
    if (names != NULL && count != 0)
        rc = err_set(&e, ERR_USAGE, 0, "-n and --names exclude each other");
    else if (names != NULL)
        rc = named_children(names, &children, &e);
    if (rc == 0) {
        json_t *p = json_pack("{s:o*, s:s*}", "children", children, "host_name", host_name);
        if (children == NULL)
            (void)json_object_set_new(p, "count", json_integer(count == 0 ? 1 : (json_int_t)count));
        rc = ask(argv[optind], "fork", p, FORK_MS, &result, &e);
    }
    if (rc < 0)
        return cli_fail(c, &e);
    if (c->json)
        return cli_print_json(c, result);
    print_children(result);
    json_decref(result);
    return CLI_OK;
}

const struct cli_command cmd_fork = {
    .name = "fork",
    .summary = "copy a running machine, once or many times, while it runs",
    .run = run_fork,
    .help = "usage: tine fork [-n N | --names A,B,…] [--host-name NAME] ID [--json]\n"
            "\n"
            "Makes N (default 1) copies of machine ID, all from one moment, and prints their "
            "names. The\n"
            "machine itself goes on after a pause of milliseconds. Each copy has its own random "
            "numbers,\n"
            "clock, host name (its name, or NAME) and disks, and can be forked again.\n"
            "\n"
            "  tine fork -n 3 a\n"
            "  tine fork --names left,right a --json\n",
};

static int run_status(struct cli *c, int argc, char **argv)
{
    struct err e = {0};
    json_t *result = NULL;
    int rc = take_plain(c, argc, argv, 1, "the name of a machine");
    if (rc != CLI_OK)
        return rc;
    if (ask(argv[optind], "status", NULL, QUICK_MS, &result, &e) < 0)
        return cli_fail(c, &e);
    if (c->json)
        return cli_print_json(c, result);
    const char *key;
    json_t *v;
    json_object_foreach(result, key, v)
    {
        char *text = json_is_string(v) ? NULL : json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
        char *value = text != NULL ? text : strdup(json_string_value(v));
        if (value != NULL)
            (void)printf("%-14.40s %s\n", key, cli_clean(value));
        free(value);
    }
    json_decref(result);
    return CLI_OK;
}

const struct cli_command cmd_status = {
    .name = "status",
    .summary = "all that is known about a machine",
    .run = run_status,
    .help = "usage: tine status ID [--json]\n"
            "\n"
            "Prints state, process, memory, timings, devices and children of machine ID\n"
            "(docs/protocol.md explains each member).\n"
            "\n"
            "  tine status a\n"
            "  tine status a --json | jq .timings\n",
};

static int run_console(struct cli *c, int argc, char **argv)
{
    static const struct option options[] = {
        {"bytes", required_argument, NULL, 'b'}, CLI_OPTIONS, {0}};
    struct err e = {0};
    uint64_t bytes = CONTROL_CONSOLE_MAX;
    json_t *result = NULL;
    int opt;
    while ((opt = cli_option(c, argc, argv, "b:", options)) != -1) {
        if (opt == -2)
            return cli_usage_status(c);
        if (cli_number("--bytes", optarg, 1, CONTROL_CONSOLE_MAX, &bytes, &e) < 0)
            return cli_fail(c, &e);
    }
    if (!cli_arguments(c, argc, 1, 1, "the name of a machine"))
        return cli_usage_status(c);
    if (ask(argv[optind], "console", json_pack("{s:I}", "bytes", (json_int_t)bytes), QUICK_MS,
            &result, &e) < 0)
        return cli_fail(c, &e);
    if (c->json)
        return cli_print_json(c, result);
    const json_t *data = json_object_get(result, "data");
    size_t len = json_string_length(data);
    uint8_t *text = malloc(len + 1);
    ssize_t n =
        text == NULL || data == NULL ? -1 : base64_decode(json_string_value(data), len, text);
    int rc = n < 0 ? err_set(&e, ERR_GUEST, EPROTO, "%s: console", argv[optind])
                   : fd_write_full(STDOUT_FILENO, text, (size_t)n, &e);
    free(text);
    json_decref(result);
    return rc < 0 ? cli_fail(c, &e) : CLI_OK;
}

const struct cli_command cmd_console = {
    .name = "console",
    .summary = "what a machine's console said last",
    .run = run_console,
    .help = "usage: tine console ID [--bytes N] [--json]\n"
            "\n"
            "Prints the newest bytes (at most 65536) of the console of machine ID. They are the "
            "guest's\n"
            "own words, terminal sequences included.\n"
            "\n"
            "  tine console a | tail -n 20\n",
};

static int pause_or_resume(struct cli *c, int argc, char **argv, const char *method)
{
    struct err e = {0};
    json_t *result = NULL;
    int rc = take_plain(c, argc, argv, 1, "the name of a machine");
    if (rc != CLI_OK)
        return rc;
    if (ask(argv[optind], method, NULL, QUICK_MS, &result, &e) < 0)
        return cli_fail(c, &e);
    if (c->json)
        return cli_print_json(c, result);
    json_decref(result);
    return CLI_OK;
}

static int run_pause(struct cli *c, int argc, char **argv)
{
    return pause_or_resume(c, argc, argv, "pause");
}

static int run_resume(struct cli *c, int argc, char **argv)
{
    return pause_or_resume(c, argc, argv, "resume");
}

const struct cli_command cmd_pause = {
    .name = "pause",
    .summary = "stop a machine's CPUs",
    .run = run_pause,
    .help =
        "usage: tine pause ID [--json]\n"
        "\n"
        "Stops the CPUs of machine ID. Fine if they stand already; --json says {\"changed\":…}.\n"
        "\n"
        "  tine pause a\n",
};

const struct cli_command cmd_resume = {
    .name = "resume",
    .summary = "let a paused machine go on",
    .run = run_resume,
    .help = "usage: tine resume ID [--json]\n"
            "\n"
            "Lets machine ID run on. Fine if it runs already; --json says {\"changed\":…}.\n"
            "\n"
            "  tine resume a\n",
};
