/*
 * cmd_doctor: tine doctor: what this host can run, why, and what is missing.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/tine/cli.h"
#include "tools/tine/guest.h"
#include "tools/tine/launch.h"
#include "tools/tine/machines.h"
#include "vmm/core/err.h"

/* A thing to have: found, or the one sentence on what to do. */
static void check(json_t *checks, bool *ok, const char *name, int rc, const char *found,
                  const struct err *e)
{
    *ok = *ok && rc >= 0;
    (void)json_array_append_new(checks, json_pack("{s:s, s:b, s:s}", "name", name, "ok", rc >= 0,
                                                  "text", rc >= 0 ? found : e->text));
}

/* What to do about a /dev/kvm that cannot be opened. */
static const char *advice(void)
{
    struct stat st;
    if (stat("/dev/kvm", &st) < 0)
        return "load the kvm module of this CPU (kvm-intel, kvm-amd), or, in a virtual machine, "
               "switch nested virtualisation on";
    if (!S_ISCHR(st.st_mode))
        return "/dev/kvm is not a device: remove it and load the kvm module";
    if (access("/dev/kvm", R_OK | W_OK) < 0)
        return "add yourself to the group that owns /dev/kvm, or set its mode";
    return "use a host with another KVM";
}

static int check_probe(json_t *checks, bool *ok, json_t **probe)
{
    char vmm[PATH_MAX], text[1024];
    struct err e = {0};
    int rc = launch_find_vmm(vmm, sizeof vmm, &e);
    check(checks, ok, "tine-vmm", rc, vmm, &e);
    if (rc == 0)
        rc = guest_probe(probe, &e);
    if (rc < 0) {
        check(checks, ok, "kvm", rc, "", &e);
        return rc;
    }
    const char *error = json_string_value(json_object_get(*probe, "error"));
    const char *mode = json_string_value(json_object_get(*probe, "kernel_mode"));
    if (error != NULL)
        rc = err_set(&e, ERR_UNSUPPORTED, 0, "%s: %s", error, advice());
    (void)snprintf(text, sizeof text, "/dev/kvm works; guest kernel code is %s",
                   mode != NULL && strcmp(mode, "hardware") == 0 ? "run by the CPU itself"
                                                                 : "interpreted");
    check(checks, ok, "kvm", rc, text, &e);
    return rc;
}

static void check_guest(json_t *checks, bool *ok, const json_t *probe, const char **kind)
{
    char text[1024];
    struct err e = {0};
    const char *why = json_string_value(json_object_get(probe, "why"));
    int rc = guest_kind(probe, kind, &e);
    if (rc == 0)
        (void)snprintf(text, sizeof text, "%s: %s", *kind, why != NULL ? why : "");
    check(checks, ok, "guest", rc, text, &e);
    const char *given = getenv("TINE_GUESTS");
    static const char recipe[] = TINE_SOURCE_ROOT "/guest/linux/build";
    if (given != NULL && given[0] != '\0') {
        (void)snprintf(text, sizeof text, "ready-made under %s", given);
        rc = access(given, R_OK) < 0 ? err_sys(&e, "TINE_GUESTS %s", given) : 0;
    } else {
        (void)snprintf(text, sizeof text, "made by %s", recipe);
        rc = access(recipe, X_OK) < 0 ? err_sys(&e, "guest recipe %s", recipe) : 0;
    }
    check(checks, ok, "recipe", rc, text, &e);
}

static void check_folders(json_t *checks, bool *ok)
{
    struct machines m = {.dir = ""};
    char cache[GUEST_PATH_MAX] = "";
    struct err e = {0};
    int rc = machines_open(&m, &e);
    check(checks, ok, "state", rc, m.dir, &e);
    rc = guest_cache_dir(cache, &e);
    if (rc == 0 && access(cache, W_OK) < 0)
        rc = err_sys(&e, "cache folder %s", cache);
    check(checks, ok, "cache", rc, cache, &e);
}

static int run_doctor(struct cli *c, int argc, char **argv)
{
    static const struct option options[] = {CLI_OPTIONS, {0}};
    if (cli_option(c, argc, argv, "", options) == -2 || !cli_arguments(c, argc, 0, 0, "none"))
        return cli_usage_status(c);
    json_t *checks = json_array(), *probe = NULL;
    const char *kind = NULL;
    bool ok = true;
    if (check_probe(checks, &ok, &probe) == 0)
        check_guest(checks, &ok, probe, &kind);
    check_folders(checks, &ok);
    if (c->json) {
        int rc = cli_print_json(c, json_pack("{s:b, s:s?, s:o, s:O?}", "ok", ok, "guest", kind,
                                             "checks", checks, "probe", probe));
        json_decref(probe);
        return rc == CLI_OK && !ok ? CLI_FAILED : rc;
    }
    size_t i;
    const json_t *v;
    json_array_foreach(checks, i, v)
    {
        (void)printf("%-4s %-9s %s\n", json_is_true(json_object_get(v, "ok")) ? "ok" : "FAIL",
                     json_string_value(json_object_get(v, "name")),
                     json_string_value(json_object_get(v, "text")));
    }
    const json_t *lacks = json_object_get(probe, "lacks");
    if (json_array_size(lacks) > 0) {
        char *text = json_dumps(lacks, JSON_COMPACT);
        (void)printf("     not carried out in guest kernel mode: %s\n", text != NULL ? text : "");
        free(text);
    }
    json_decref(checks);
    json_decref(probe);
    return ok ? CLI_OK : CLI_FAILED;
}

const struct cli_command cmd_doctor = {
    .name = "doctor",
    .summary = "what this host can run, why, and what is missing",
    .run = run_doctor,
    .help = "usage: tine doctor [--json]\n"
            "\n"
            "Tries out what this host's KVM can do, says which guest kernel runs on it and why, "
            "and names\n"
            "what is missing. Exit status 0 if machines can run here.\n"
            "\n"
            "  tine doctor\n",
};
