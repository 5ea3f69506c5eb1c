/*
 * cmd_start: tine start, restore and run: the three ways to get a machine from the command line.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tools/tine/cli.h"
#include "tools/tine/guest.h"
#include "tools/tine/launch.h"
#include "tools/tine/machines.h"
#include "tools/tine/session.h"
#include "vmm/core/err.h"

#define READY_TIMEOUT_S 120

enum {
    OPT_NAME = 256,
    OPT_IMAGE,
    OPT_KERNEL,
    OPT_INITRD,
    OPT_CMDLINE,
    OPT_MEMORY,
    OPT_CPUS,
    OPT_DISK,
    OPT_GRANT,
    OPT_PAUSED,
    OPT_NO_WAIT,
    OPT_READY_TIMEOUT,
    OPT_TIMEOUT,
    OPT_CWD,
};

/* What the options of start, restore and run said. */
struct request {
    struct launch_spec spec;
    const char *name;
    bool no_wait;
    uint64_t ready_timeout_s;
    struct session session; /* run only */
    /* What the spec points to when it was found and not given. */
    char image[GUEST_PATH_MAX];
    struct guest guest;
    machine_id id;
};

static int add_disk(struct launch_spec *spec, const char *text, struct err *e)
{
    if (spec->disk_count == LAUNCH_DISKS_MAX)
        return err_set(e, ERR_LIMIT, 0, "more than %d disks", LAUNCH_DISKS_MAX);
    spec->disks[spec->disk_count++] = text;
    return 0;
}

static int add_grant(struct launch_spec *spec, const char *text, struct err *e)
{
    uint64_t port;
    int rc = cli_number("--grant", text, 2, UINT32_MAX - 1, &port, e);
    if (rc < 0)
        return rc;
    if (spec->grant_count == CONTROL_GRANTS_MAX)
        return err_set(e, ERR_LIMIT, 0, "more than %d granted ports", CONTROL_GRANTS_MAX);
    spec->grants[spec->grant_count++] = (uint32_t)port;
    return 0;
}

static int take_option(struct request *r, int opt, struct err *e)
{
    struct launch_spec *spec = &r->spec;
    switch (opt) {
    case OPT_NAME:
        r->name = optarg;
        return control_id_check(optarg, e);
    case OPT_IMAGE:
        spec->image = optarg;
        return 0;
    case OPT_KERNEL:
        spec->kernel = optarg;
        return 0;
    case OPT_INITRD:
        spec->initrd = optarg;
        return 0;
    case OPT_CMDLINE:
        spec->cmdline = optarg;
        return 0;
    case OPT_MEMORY:
        return cli_number("--memory", optarg, 1, CONTROL_MEMORY_MIB_MAX, &spec->memory_mib, e);
    case OPT_CPUS:
        return cli_number("--cpus", optarg, 1, CONTROL_CPUS_MAX, &spec->cpus, e);
    case OPT_DISK:
        return add_disk(spec, optarg, e);
    case OPT_GRANT:
        return add_grant(spec, optarg, e);
    case OPT_PAUSED:
        spec->paused = true;
        return 0;
    case OPT_NO_WAIT:
        r->no_wait = true;
        return 0;
    case OPT_READY_TIMEOUT:
        return cli_number("--ready-timeout", optarg, 1, 3600, &r->ready_timeout_s, e);
    case OPT_TIMEOUT:
        return session_set_timeout(&r->session, optarg, e);
    case OPT_CWD:
        r->session.cwd = optarg;
        return 0;
    case 'e':
        return session_add_env(&r->session, optarg, e);
    default: /* 't', the only one left */
        r->session.terminal = true;
        return 0;
    }
}

/* CLI_OK, or the exit status after printing what was wrong. */
static int take_options(struct cli *c, struct request *r, int argc, char **argv, const char *shorts,
                        const struct option *longs)
{
    int opt;
    r->ready_timeout_s = READY_TIMEOUT_S;
    while ((opt = cli_option(c, argc, argv, shorts, longs)) != -1) {
        struct err e = {0};
        if (opt == -2)
            return cli_usage_status(c);
        if (take_option(r, opt, &e) < 0)
            return cli_fail(c, &e);
    }
    return CLI_OK;
}

/* An image brings its own shape. */
static int check_image(struct request *r, struct err *e)
{
    struct launch_spec *s = &r->spec;
    struct stat st;
    if (s->kernel != NULL || s->initrd != NULL || s->cmdline != NULL || s->memory_mib != 0 ||
        s->cpus != 0 || s->disk_count > 0 || s->grant_count > 0)
        return err_set(
            e, ERR_USAGE, 0,
            "an image has its own kernel, memory, CPUs, disks and grants: leave out either "
            "--image or the others");
    if (stat(s->image, &st) < 0)
        return err_sys(e, "image %s", s->image);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, ERR_BAD_IMAGE, 0, "image %s is not a folder, which a snapshot is",
                       s->image);
    if (realpath(s->image, r->image) == NULL)
        return err_sys(e, "image %s", s->image);
    s->image = r->image;
    return 0;
}

/* The default guest: from its image if the shape allows, else booted anew. */
static int use_default_guest(const struct machines *m, struct request *r, struct err *e)
{
    struct launch_spec *s = &r->spec;
    json_t *probe = NULL;
    const char *kind;
    int rc;
    if (s->initrd != NULL || s->cmdline != NULL)
        return err_set(e, ERR_USAGE, 0, "%s needs --kernel",
                       s->initrd != NULL ? "--initrd" : "--cmdline");
    if (s->cpus <= 1 && s->disk_count == 0 && s->grant_count == 0) {
        rc = guest_image(m, s->memory_mib, r->image, e);
        s->image = r->image;
        s->memory_mib = s->cpus = 0;
        return rc;
    }
    rc = guest_probe(&probe, e);
    if (rc == 0)
        rc = guest_kind(probe, &kind, e);
    if (rc == 0)
        rc = guest_find(kind, &r->guest, e);
    json_decref(probe);
    s->kernel = r->guest.kernel;
    s->initrd = r->guest.initrd;
    s->cmdline = r->guest.cmdline;
    if (s->memory_mib == 0)
        s->memory_mib = r->guest.memory_mib;
    return rc;
}

/* Launches what the request says and waits for it. *status is new. */
static int start(const struct machines *m, struct request *r, struct launched *l, json_t **status,
                 struct err *e)
{
    int rc;
    cli_catch_signals();
    machines_sweep(m);
    if (r->name != NULL)
        (void)snprintf(r->id, sizeof r->id, "%s", r->name);
    rc = r->name != NULL ? machines_check_new(m, r->id, r->spec.grants, r->spec.grant_count, e)
                         : machines_new_id(m, r->id, e);
    if (rc < 0)
        return rc;
    r->spec.id = r->id;
    if (r->spec.image != NULL)
        rc = check_image(r, e);
    else if (r->spec.kernel == NULL)
        rc = use_default_guest(m, r, e);
    if (rc < 0)
        return rc;
    rc = launch(m, &r->spec, l, e);
    if (rc < 0)
        return err_wrap(e, rc, "%s", r->id);
    if (r->no_wait)
        rc = launch_check(l, status, e);
    else
        rc = launch_wait(l, r->spec.paused ? "paused" : "ready", (unsigned)r->ready_timeout_s,
                         r->spec.image != NULL ? "restoring" : "booting", status, e);
    return rc < 0 ? err_wrap(e, rc, "%s", r->id) : 0;
}

/* Shared end of start and restore. */
static int start_and_say(struct cli *c, struct request *r)
{
    struct machines m;
    struct launched l;
    struct err e = {0};
    json_t *status = NULL;
    int rc = machines_open(&m, &e);
    if (rc == 0)
        rc = start(&m, r, &l, &status, &e);
    if (rc < 0)
        return cli_fail(c, &e);
    json_int_t pid = l.pid;
    launch_keep(&l);
    if (c->json) {
        json_t *timings = json_object_get(status, "timings");
        const char *state = json_string_value(json_object_get(status, "state"));
        rc = cli_print_json(c, json_pack("{s:s, s:I, s:s?, s:O?}", "id", r->id, "pid", pid, "state",
                                         state, "timings", timings));
    } else {
        rc = puts(r->id) == EOF || fflush(stdout) == EOF ? CLI_FAILED : CLI_OK;
    }
    json_decref(status);
    return rc;
}

static const struct option start_options[] = {
    {"name", required_argument, NULL, OPT_NAME},
    {"image", required_argument, NULL, OPT_IMAGE},
    {"kernel", required_argument, NULL, OPT_KERNEL},
    {"initrd", required_argument, NULL, OPT_INITRD},
    {"cmdline", required_argument, NULL, OPT_CMDLINE},
    {"memory", required_argument, NULL, OPT_MEMORY},
    {"cpus", required_argument, NULL, OPT_CPUS},
    {"disk", required_argument, NULL, OPT_DISK},
    {"grant", required_argument, NULL, OPT_GRANT},
    {"paused", no_argument, NULL, OPT_PAUSED},
    {"no-wait", no_argument, NULL, OPT_NO_WAIT},
    {"ready-timeout", required_argument, NULL, OPT_READY_TIMEOUT},
    CLI_OPTIONS,
    {0},
};

static int run_start(struct cli *c, int argc, char **argv)
{
    struct request r = {0};
    int rc = take_options(c, &r, argc, argv, "", start_options);
    if (rc != CLI_OK)
        return rc;
    if (!cli_arguments(c, argc, 0, 0, "options only"))
        return CLI_USAGE;
    return start_and_say(c, &r);
}

const struct cli_command cmd_start = {
    .name = "start",
    .summary = "start a machine and leave it running",
    .run = run_start,
    .help = "usage: tine start [--name ID] [--image DIR] [--kernel F [--initrd F] [--cmdline S]]\n"
            "                  [--memory MIB] [--cpus N] [--disk F[,ro]]… [--grant PORT]…\n"
            "                  [--paused] [--no-wait] [--ready-timeout S] [--json]\n"
            "\n"
            "Starts a machine, waits until its agent is ready, and prints its name. Without "
            "--image and\n"
            "--kernel it is the default guest, restored from an image that the first call makes.\n"
            "\n"
            "  --name ID          its name; else one is made up\n"
            "  --image DIR        restore this snapshot\n"
            "  --kernel F         boot this kernel (vmlinux or bzImage)\n"
            "  --initrd F         with this initial RAM disk\n"
            "  --cmdline S        and this command line\n"
            "  --memory MIB       guest memory\n"
            "  --cpus N           vCPUs\n"
            "  --disk F[,ro]      a disk; what the guest writes goes to an overlay, never to F\n"
            "  --grant PORT       let the guest connect to host port PORT (socket ID.vsock_PORT)\n"
            "  --paused           do not run it yet\n"
            "  --no-wait          do not wait for the agent: a guest of your own may have none\n"
            "  --ready-timeout S  how long to wait for the agent (120)\n"
            "\n"
            "  tine start --name a\n"
            "  tine start --disk data.img --memory 256\n"
            "  tine start --kernel vmlinux --initrd my.cpio --cmdline 'console=ttyS0' --no-wait\n",
};

static const struct option restore_options[] = {
    {"name", required_argument, NULL, OPT_NAME},
    {"paused", no_argument, NULL, OPT_PAUSED},
    {"no-wait", no_argument, NULL, OPT_NO_WAIT},
    {"ready-timeout", required_argument, NULL, OPT_READY_TIMEOUT},
    CLI_OPTIONS,
    {0},
};

static int run_restore(struct cli *c, int argc, char **argv)
{
    struct request r = {0};
    int rc = take_options(c, &r, argc, argv, "", restore_options);
    if (rc != CLI_OK)
        return rc;
    if (!cli_arguments(c, argc, 1, 1, "the folder of a snapshot"))
        return CLI_USAGE;
    r.spec.image = argv[optind];
    return start_and_say(c, &r);
}

const struct cli_command cmd_restore = {
    .name = "restore",
    .summary = "start a machine from a snapshot",
    .run = run_restore,
    .help =
        "usage: tine restore DIR [--name ID] [--paused] [--no-wait] [--ready-timeout S] [--json]\n"
        "\n"
        "Starts a new machine from the snapshot in DIR, which stays as it is, and prints its "
        "name.\n"
        "It has its own random numbers, clock, host name and machine id before it runs anything.\n"
        "\n"
        "  tine snapshot a /tmp/warm && tine restore /tmp/warm --name b\n"
        "  tine restore /tmp/warm --json\n",
};

static const struct option run_options[] = {
    {"image", required_argument, NULL, OPT_IMAGE},
    {"memory", required_argument, NULL, OPT_MEMORY},
    {"cpus", required_argument, NULL, OPT_CPUS},
    {"disk", required_argument, NULL, OPT_DISK},
    {"grant", required_argument, NULL, OPT_GRANT},
    {"name", required_argument, NULL, OPT_NAME},
    {"ready-timeout", required_argument, NULL, OPT_READY_TIMEOUT},
    {"timeout", required_argument, NULL, OPT_TIMEOUT},
    {"cwd", required_argument, NULL, OPT_CWD},
    {"env", required_argument, NULL, 'e'},
    {"terminal", no_argument, NULL, 't'},
    CLI_OPTIONS,
    {0},
};

static int run_run(struct cli *c, int argc, char **argv)
{
    struct request r = {0};
    struct machines m;
    struct launched l;
    struct err e = {0};
    json_t *status = NULL;
    int rc = take_options(c, &r, argc, argv, "e:t", run_options);
    if (rc != CLI_OK)
        return rc;
    if (!cli_arguments(c, argc, 1, -1, "a command to run"))
        return cli_usage_status(c);
    r.session.argv = (const char *const *)(uintptr_t)(argv + optind);
    r.spec.ends_with_us = true;
    rc = machines_open(&m, &e);
    if (rc == 0)
        rc = start(&m, &r, &l, &status, &e);
    if (rc < 0)
        return cli_fail(c, &e);
    json_decref(status);
    rc = session_run(c, &m, r.id, &r.session, &e);
    launch_end(&l);
    return rc < 0 ? cli_fail(c, &e) : rc;
}

const struct cli_command cmd_run = {
    .name = "run",
    .summary = "run one command in a machine of its own",
    .run = run_run,
    .passes_status = true,
    .help =
        "usage: tine run [--image DIR] [--memory MIB] [--cpus N] [--disk F[,ro]]… [--grant PORT]…\n"
        "                [-e NAME=VALUE]… [--cwd DIR] [--timeout S] [-t] [--json] [--] COMMAND "
        "[ARG…]\n"
        "\n"
        "Starts a machine, runs COMMAND in it with our standard input, output and error, and ends "
        "the\n"
        "machine. Without --image it is the default guest. Exit status: the command's, 128+N if "
        "signal N\n"
        "ended it, 124 after the time-out, 125 if tine failed, 126 or 127 if the command did not "
        "start.\n"
        "\n"
        "  -e NAME=VALUE  environment of the command (nothing is inherited)\n"
        "  --cwd DIR      its working folder (/)\n"
        "  --timeout S    end it after so many seconds\n"
        "  -t             give it a terminal\n"
        "  --json         print {\"exit_code\",\"signal\",\"stdout\",\"stderr\",…} instead\n"
        "\n"
        "  tine run -- uname -a\n"
        "  tine run -e A=1 -- sh -c 'echo $A; wc -c' <file\n"
        "  tine run --image /tmp/warm --timeout 5 --json -- python3 -c 'print(1+1)'\n",
};
