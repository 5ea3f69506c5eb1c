/*
 * spec: see spec.h. Loop thread.
 */
#include "vmm/spec.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vmm/arch/arch.h"
#include "vmm/core/err.h"
#include "vmm/core/state.h"

#define SPEC_VERSION 1

bool spec_id_is_valid(const char *id)
{
    size_t n = strlen(id);
    if (n == 0 || n > SPEC_ID_MAX || strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789_.-") != n)
        return false;
    return id[0] != '.' && id[0] != '-' && id[0] != '_';
}

int spec_check(const struct machine_spec *s, struct err *e)
{
    if (s->memory_bytes < arch_layout.memory_min_bytes ||
        s->memory_bytes % arch_layout.memory_step_bytes != 0 || s->memory_bytes > 1ull << 40)
        return err_set(e, ERR_USAGE, 0,
                       "memory of %llu bytes: expected %llu MiB to 1 TiB in steps of %llu MiB",
                       (unsigned long long)s->memory_bytes,
                       (unsigned long long)arch_layout.memory_min_bytes >> 20,
                       (unsigned long long)arch_layout.memory_step_bytes >> 20);
    if (s->cpus < 1 || s->cpus > arch_layout.cpus_max)
        return err_set(e, ERR_USAGE, 0, "%u cpus: expected 1 to %u", s->cpus, arch_layout.cpus_max);
    return 0;
}

int spec_add_disk(struct machine_spec *s, const char *path, bool read_only, uint64_t overlay_max,
                  struct err *e)
{
    if (s->disk_count == SPEC_DISKS_MAX)
        return err_set(e, ERR_LIMIT, 0, "more than %d disks", SPEC_DISKS_MAX);
    size_t n = strlen(path);
    if (n == 0 || n > SPEC_PATH_MAX)
        return err_set(e, ERR_USAGE, 0, "disk path of %zu bytes: expected 1 to %d", n,
                       SPEC_PATH_MAX);
    char *copy = strdup(path);
    if (copy == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "disk path");
    s->disks[s->disk_count++] = (struct spec_disk){copy, read_only, overlay_max};
    return 0;
}

int spec_add_grant(struct machine_spec *s, uint32_t port, struct err *e)
{
    if (s->grant_count == SPEC_GRANTS_MAX)
        return err_set(e, ERR_LIMIT, 0, "more than %d granted ports", SPEC_GRANTS_MAX);
    s->grants[s->grant_count++] = port;
    return 0;
}

void spec_free(struct machine_spec *s)
{
    for (unsigned i = 0; i < s->disk_count; i++)
        free(s->disks[i].path);
    *s = (struct machine_spec){0};
}

void spec_save(const struct machine_spec *s, struct state_writer *w)
{
    state_begin(w, "spec");
    state_put_u32(w, "version", SPEC_VERSION);
    state_put_u64(w, "memory-bytes", s->memory_bytes);
    state_put_u32(w, "cpus", s->cpus);
    state_put_u32(w, "disks", s->disk_count);
    state_put_u32(w, "grants", s->grant_count);
    state_put_bytes(w, "granted-ports", s->grants, s->grant_count * sizeof s->grants[0]);
    for (unsigned i = 0; i < s->disk_count; i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "disk@%u", i);
        state_begin(w, name);
        state_put_string(w, "path", s->disks[i].path);
        state_put_u32(w, "read-only", s->disks[i].read_only);
        state_put_u64(w, "overlay-max-bytes", s->disks[i].overlay_max_bytes);
        state_end(w);
    }
    state_end(w);
}

static int restore_disk(struct machine_spec *s, const struct state_node *n, unsigned i,
                        struct err *e)
{
    char name[16];
    (void)snprintf(name, sizeof name, "disk@%u", i);
    struct state_node d;
    const char *path = NULL;
    uint32_t read_only = 0;
    uint64_t overlay_max = 0;
    int rc = state_child(n, name, &d, e);
    if (rc == 0)
        rc = state_get_string(&d, "path", &path, e);
    if (rc == 0)
        rc = state_get_u32(&d, "read-only", &read_only, e);
    if (rc == 0)
        rc = state_get_u64(&d, "overlay-max-bytes", &overlay_max, e);
    if (rc == 0)
        rc = spec_add_disk(s, path, read_only != 0, overlay_max, e);
    return rc;
}

static int restore_into(struct machine_spec *s, const struct state_node *n, struct err *e)
{
    uint32_t cpus, disks, grants;
    int rc = state_check_version(n, SPEC_VERSION, e);
    if (rc == 0)
        rc = state_get_u64(n, "memory-bytes", &s->memory_bytes, e);
    if (rc == 0)
        rc = state_get_u32(n, "cpus", &cpus, e);
    if (rc == 0)
        rc = state_get_u32(n, "disks", &disks, e);
    if (rc == 0)
        rc = state_get_u32(n, "grants", &grants, e);
    if (rc < 0)
        return rc;
    if (disks > SPEC_DISKS_MAX || grants > SPEC_GRANTS_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0, "%u disks and %u grants: expected at most %d and %d",
                       disks, grants, SPEC_DISKS_MAX, SPEC_GRANTS_MAX);
    s->cpus = cpus;
    for (unsigned i = 0; rc == 0 && i < disks; i++)
        rc = restore_disk(s, n, i, e);
    if (rc == 0)
        rc = state_get_bytes(n, "granted-ports", s->grants, grants * sizeof s->grants[0], e);
    if (rc == 0) {
        s->grant_count = grants;
        rc = spec_check(s, e);
    }
    return rc;
}

int spec_restore(struct machine_spec *s, const struct state_node *root, struct err *e)
{
    struct machine_spec out = {0};
    struct state_node n;
    int rc = state_child(root, "spec", &n, e);
    if (rc == 0)
        rc = restore_into(&out, &n, e);
    if (rc < 0) {
        spec_free(&out);
        return err_wrap(e, rc, "spec");
    }
    *s = out;
    return 0;
}
