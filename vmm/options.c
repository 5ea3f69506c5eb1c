/*
 * options: see options.h.
 */
#include "vmm/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vmm/core/err.h"

static const char help[] =
    "usage: tine-vmm --control PATH [--vsock PATH] [--id NAME] [--console FILE|fd:N]\n"
    "                ( --kernel FILE [--initrd FILE] [--cmdline TEXT] [--memory MIB] [--cpus N]\n"
    "                  [--disk FILE[,ro]]... [--grant PORT]... | --restore DIR [--verify] )\n"
    "                [--paused]\n"
    "       tine-vmm --probe\n"
    "\n"
    "Runs one virtual machine on /dev/kvm until it ends. Without --kernel and --restore it waits "
    "for\n"
    "a boot request on the control socket (docs/protocol.md).\n"
    "\n"
    "  --control PATH     control socket (JSON-RPC lines, mode 0600)\n"
    "  --vsock PATH       host side of the guest's vsock (CONNECT <port>)\n"
    "  --id NAME          name of the machine; default: the control socket's file name\n"
    "  --console FILE     append the guest's console to FILE; fd:N writes to an open descriptor\n"
    "  --kernel FILE      vmlinux or bzImage, told apart by content\n"
    "  --initrd FILE      initial RAM disk\n"
    "  --cmdline TEXT     kernel command line; device tokens are added behind it\n"
    "  --memory MIB       guest memory, default 128\n"
    "  --cpus N           vCPUs, default 1\n"
    "  --disk FILE[,ro]   virtio-blk disk; writes go to an overlay that vanishes with the process\n"
    "  --grant PORT       let the guest connect to the Unix socket VSOCK_PORT on the host\n"
    "  --restore DIR      start from an image instead of a kernel\n"
    "  --verify           check every memory chunk of the image first\n"
    "  --paused           do not run the guest yet\n"
    "  --probe            say what this KVM can do, as JSON\n"
    "  --log LEVEL        error, warning, info (default) or debug\n"
    "\n"
    "Exit status: 0 powered off or stopped, 1 host failure, 2 usage, 3 reboot, 4 panic,\n"
    "5 triple fault, 6 emulation failure, 7 halted, 8 terminated, 9 not renewed.\n"
    "\n"
    "  tine-vmm --control /tmp/a.sock --kernel vmlinux --initrd init.cpio --cmdline console=ttyS0 "
    "\\\n"
    "           --console fd:1\n"
    "  tine-vmm --control /tmp/b.sock --vsock /tmp/b.vsock --restore /var/lib/images/warm\n";

void options_print_help(void)
{
    (void)fputs(help, stdout);
}

static int take_number(const char *option, const char *text, uint64_t min, uint64_t max,
                       uint64_t *out, struct err *e)
{
    char *end = NULL;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || v < min || v > max)
        return err_set(e, ERR_USAGE, 0, "%s %s: expected a number from %llu to %llu", option, text,
                       (unsigned long long)min, (unsigned long long)max);
    *out = v;
    return 0;
}

static int take_disk(struct machine_spec *s, char *text, struct err *e)
{
    char *comma = strrchr(text, ',');
    bool read_only = comma != NULL && strcmp(comma, ",ro") == 0;
    if (read_only)
        *comma = '\0';
    return spec_add_disk(s, text, read_only, 0, e);
}

enum {
    OPT_CONTROL = 256,
    OPT_VSOCK,
    OPT_ID,
    OPT_CONSOLE,
    OPT_KERNEL,
    OPT_INITRD,
    OPT_CMDLINE,
    OPT_MEMORY,
    OPT_CPUS,
    OPT_DISK,
    OPT_GRANT,
    OPT_RESTORE,
    OPT_VERIFY,
    OPT_PAUSED,
    OPT_PROBE,
    OPT_LOG,
    OPT_HELP,
    OPT_VERSION,
};

static const struct option long_options[] = {
    {"control", required_argument, NULL, OPT_CONTROL},
    {"vsock", required_argument, NULL, OPT_VSOCK},
    {"id", required_argument, NULL, OPT_ID},
    {"console", required_argument, NULL, OPT_CONSOLE},
    {"kernel", required_argument, NULL, OPT_KERNEL},
    {"initrd", required_argument, NULL, OPT_INITRD},
    {"cmdline", required_argument, NULL, OPT_CMDLINE},
    {"memory", required_argument, NULL, OPT_MEMORY},
    {"cpus", required_argument, NULL, OPT_CPUS},
    {"disk", required_argument, NULL, OPT_DISK},
    {"grant", required_argument, NULL, OPT_GRANT},
    {"restore", required_argument, NULL, OPT_RESTORE},
    {"verify", no_argument, NULL, OPT_VERIFY},
    {"paused", no_argument, NULL, OPT_PAUSED},
    {"probe", no_argument, NULL, OPT_PROBE},
    {"log", required_argument, NULL, OPT_LOG},
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0},
};

static int take_value(struct options *o, int opt, struct err *e)
{
    uint64_t n = 0;
    int rc = 0;
    switch (opt) {
    case OPT_MEMORY:
        rc = take_number("--memory", optarg, 1, 1u << 20, &n, e);
        o->spec.memory_bytes = n << 20;
        return rc;
    case OPT_CPUS:
        rc = take_number("--cpus", optarg, 1, 16, &n, e);
        o->spec.cpus = (unsigned)n;
        return rc;
    case OPT_GRANT:
        rc = take_number("--grant", optarg, 2, UINT32_MAX - 1, &n, e);
        return rc < 0 ? rc : spec_add_grant(&o->spec, (uint32_t)n, e);
    case OPT_DISK:
        return take_disk(&o->spec, optarg, e);
    default:
        return err_set(e, ERR_USAGE, 0, "unknown or incomplete option %s (--help lists them)",
                       optarg);
    }
}

static int take(struct options *o, int opt, struct err *e)
{
    struct {
        int opt;
        const char **to;
    } const strings[] = {
        {OPT_CONTROL, &o->control}, {OPT_VSOCK, &o->vsock},     {OPT_ID, &o->id},
        {OPT_CONSOLE, &o->console}, {OPT_KERNEL, &o->kernel},   {OPT_INITRD, &o->initrd},
        {OPT_CMDLINE, &o->cmdline}, {OPT_RESTORE, &o->restore}, {OPT_LOG, &o->log_level},
    };
    struct {
        int opt;
        bool *to;
    } const flags[] = {
        {OPT_VERIFY, &o->verify}, {OPT_PAUSED, &o->paused},   {OPT_PROBE, &o->probe},
        {OPT_HELP, &o->help},     {OPT_VERSION, &o->version},
    };
    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++) {
        if (strings[i].opt == opt) {
            *strings[i].to = optarg;
            return 0;
        }
    }
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        if (flags[i].opt == opt) {
            *flags[i].to = true;
            return 0;
        }
    }
    return take_value(o, opt, e);
}

static int check(const struct options *o, struct err *e)
{
    if (o->help || o->probe || o->version)
        return 0;
    if (o->control == NULL)
        return err_set(e, ERR_USAGE, 0, "--control PATH is missing (--help shows examples)");
    if (o->kernel != NULL && o->restore != NULL)
        return err_set(e, ERR_USAGE, 0, "--kernel and --restore exclude each other");
    if (o->restore != NULL && (o->initrd != NULL || o->cmdline != NULL || o->spec.disk_count > 0))
        return err_set(e, ERR_USAGE, 0,
                       "--restore takes the machine's shape from the image: no --initrd, "
                       "--cmdline or --disk beside it");
    if (o->verify && o->restore == NULL)
        return err_set(e, ERR_USAGE, 0, "--verify checks an image: it needs --restore DIR");
    if (o->id != NULL && !spec_id_is_valid(o->id))
        return err_set(e, ERR_USAGE, 0, "--id %s: expected [a-z0-9][a-z0-9_.-]*, at most %d bytes",
                       o->id, SPEC_ID_MAX);
    return 0;
}

int options_parse(struct options *o, int argc, char **argv, struct err *e)
{
    struct options out = {.cmdline = NULL,
                          .spec = {.memory_bytes = SPEC_MEMORY_DEFAULT_BYTES, .cpus = 1}};
    int rc = 0, opt;
    opterr = 0;
    while (rc == 0 && (opt = getopt_long(argc, argv, ":", long_options, NULL)) != -1) {
        if (opt == '?' || opt == ':')
            rc = err_set(e, ERR_USAGE, 0, "%s %s (--help lists the options)",
                         opt == ':' ? "a value is missing after" : "unknown option",
                         argv[optind - 1]);
        else
            rc = take(&out, opt, e);
    }
    if (rc == 0 && optind < argc)
        rc = err_set(e, ERR_USAGE, 0, "unexpected word %s", argv[optind]);
    if (rc == 0)
        rc = check(&out, e);
    if (rc < 0)
        spec_free(&out.spec);
    else
        *o = out;
    return rc;
}
