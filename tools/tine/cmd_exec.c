/*
 * cmd_exec: tine exec.
 */
#include <stddef.h>

#include "tools/tine/cli.h"
#include "tools/tine/machines.h"
#include "tools/tine/session.h"
#include "vmm/core/err.h"

enum { OPT_TIMEOUT = 256, OPT_CWD };

static const struct option options[] = {
    {"timeout", required_argument, NULL, OPT_TIMEOUT},
    {"cwd", required_argument, NULL, OPT_CWD},
    {"env", required_argument, NULL, 'e'},
    {"terminal", no_argument, NULL, 't'},
    CLI_OPTIONS,
    {0},
};

static int take_option(struct session *s, int opt, struct err *e)
{
    switch (opt) {
    case OPT_TIMEOUT:
        return session_set_timeout(s, optarg, e);
    case OPT_CWD:
        s->cwd = optarg;
        return 0;
    case 'e':
        return session_add_env(s, optarg, e);
    default: /* 't', the only one left */
        s->terminal = true;
        return 0;
    }
}

static int take_options(struct cli *c, struct session *s, int argc, char **argv)
{
    int opt;
    while ((opt = cli_option(c, argc, argv, "e:t", options)) != -1) {
        struct err e = {0};
        if (opt == -2)
            return cli_usage_status(c);
        if (take_option(s, opt, &e) < 0)
            return cli_fail(c, &e);
    }
    return CLI_OK;
}

static int run(struct cli *c, int argc, char **argv)
{
    struct session s = {0};
    struct machines m;
    struct err e = {0};
    int rc = take_options(c, &s, argc, argv);
    if (rc != CLI_OK)
        return rc;
    if (!cli_arguments(c, argc, 1, -1, "the name of a machine and a command"))
        return cli_usage_status(c);
    const char *id = argv[optind];
    /* Options may stand behind the name as well; the command begins at the first word that is none.
     */
    argc -= optind;
    argv += optind;
    optind = 0;
    rc = take_options(c, &s, argc, argv);
    if (rc != CLI_OK)
        return rc;
    if (!cli_arguments(c, argc, 1, -1, "a command to run"))
        return cli_usage_status(c);
    s.argv = (const char *const *)(uintptr_t)(argv + optind);
    rc = machines_open(&m, &e);
    if (rc == 0)
        rc = session_run(c, &m, id, &s, &e);
    if (rc < 0)
        (void)err_wrap(&e, rc, "%s", id);
    return rc < 0 ? cli_fail(c, &e) : rc;
}

const struct cli_command cmd_exec = {
    .name = "exec",
    .summary = "run a command in a machine",
    .run = run,
    .passes_status = true,
    .help =
        "usage: tine exec ID [-e NAME=VALUE]… [--cwd DIR] [--timeout S] [-t] [--json] [--] COMMAND "
        "[ARG…]\n"
        "\n"
        "Runs COMMAND in machine ID with our standard input, output and error. Exit status: the\n"
        "command's, 128+N if signal N ended it, 124 after the time-out, 125 if tine failed, 126 or "
        "127\n"
        "if the command did not start. Signals that reach tine are passed on.\n"
        "\n"
        "  -e NAME=VALUE  environment of the command (nothing is inherited)\n"
        "  --cwd DIR      its working folder (/)\n"
        "  --timeout S    end it, and all it started, after so many seconds\n"
        "  -t             give it a terminal\n"
        "  --json         print {\"exit_code\",\"signal\",\"stdout\",\"stderr\",…} instead; output "
        "that is\n"
        "                 not UTF-8 is base64, and …_encoding says so\n"
        "\n"
        "  tine exec a -- sh -c 'echo hi >/tmp/x'\n"
        "  tar c . | tine exec a --cwd /tmp -- tar x\n"
        "  tine exec -t a sh\n",
};
