/*
 * tine: the command line. This page finds the command; cmd_*.c are the commands.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "tools/tine/cli.h"
#include "vmm/core/num.h"

static const struct cli_command *const commands[] = {
    &cmd_run,  &cmd_start,  &cmd_exec,    &cmd_snapshot, &cmd_restore, &cmd_fork, &cmd_ps,
    &cmd_tree, &cmd_status, &cmd_console, &cmd_pause,    &cmd_resume,  &cmd_kill, &cmd_doctor,
};

static void print_help(FILE *out)
{
    (void)fputs("usage: tine COMMAND [OPTION…] …\n\n"
                "Boots, freezes and forks virtual machines on /dev/kvm.\n\n",
                out);
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
        (void)fprintf(out, "  %-10s %s\n", commands[i]->name, commands[i]->summary);
    (void)fputs(
        "\nEvery command takes --json and --help. Machines are found by their sockets under\n"
        "$TINE_STATE (default: tine/ in the user's runtime folder).\n\n"
        "  tine run -- uname -a\n"
        "  tine start --name a && tine exec a -- sh -c 'echo hi >/tmp/x'\n"
        "  tine fork -n 3 a && tine tree\n",
        out);
}

int main(int argc, char **argv)
{
    struct cli c = {.name = ""};
    int at = 1;
    if (at < argc && strcmp(argv[at], "--json") == 0) {
        c.json = true;
        at++;
    }
    if (at >= argc) {
        print_help(stderr);
        return CLI_USAGE;
    }
    const char *word = argv[at];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        print_help(stdout);
        return CLI_OK;
    }
    if (strcmp(word, "--version") == 0) {
        (void)printf("tine %s\n", TINE_VERSION);
        return CLI_OK;
    }
    (void)signal(SIGPIPE, SIG_IGN); /* a peer that goes away is an error where it is written to */
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        if (strcmp(word, commands[i]->name) != 0)
            continue;
        c.name = commands[i]->name;
        c.help = commands[i]->help;
        c.passes_status = commands[i]->passes_status;
        return commands[i]->run(&c, argc - at, argv + at);
    }
    (void)fprintf(stderr, "tine: there is no command \"%s\" (tine --help lists them)\n", word);
    return CLI_USAGE;
}
