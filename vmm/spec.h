/*
 * spec: the shape of a machine: what a restore or a fork must find again. Host resources (fds,
 * socket paths) are bindings, not spec, except the paths of disks, which name their base.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;
struct state_node;
struct state_writer;

#define SPEC_ID_MAX 63
#define SPEC_PATH_MAX 4095
#define SPEC_DISKS_MAX 7 /* virtio slots less the vsock */
#define SPEC_GRANTS_MAX 64

struct spec_disk {
    char *path; /* owned */
    bool read_only;
    uint64_t overlay_max_bytes; /* 0: default */
};

struct machine_spec {
    uint64_t memory_bytes;
    unsigned cpus;
    struct spec_disk disks[SPEC_DISKS_MAX];
    unsigned disk_count;
    uint32_t grants[SPEC_GRANTS_MAX]; /* vsock ports that the guest may reach on the host */
    unsigned grant_count;
};

#define SPEC_MEMORY_DEFAULT_BYTES (128ull << 20)

/* [a-z0-9][a-z0-9_.-]*, at most SPEC_ID_MAX bytes. */
bool spec_id_is_valid(const char *id);
/* Ranges of every member; ERR_USAGE names the member, what was found and what is allowed. */
int spec_check(const struct machine_spec *s, struct err *e);
int spec_add_disk(struct machine_spec *s, const char *path, bool read_only, uint64_t overlay_max,
                  struct err *e);
int spec_add_grant(struct machine_spec *s, uint32_t port, struct err *e);
void spec_free(struct machine_spec *s);

/* Node "spec". */
void spec_save(const struct machine_spec *s, struct state_writer *w);
int spec_restore(struct machine_spec *s, const struct state_node *root, struct err *e);
