/*
 * machine_copy: a machine's state out to a tree and an image, and back in. A fork uses the same
 * save and load with the tree in memory (fork.c). Loop thread; the machine is paused.
 *
 * Save order:  devices -> interrupt chips and clock -> vCPUs -> memory. Devices are already quiet
 *              (machine_pause), so what they last wrote to guest memory is in the image.
 * Load order:  vCPUs -> interrupt chips and clock -> devices. A pending interrupt of the IO-APIC
 *              reaches a local APIC when it is set, so the local APICs must be there before it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "devices/blk.h"
#include "devices/disk.h"
#include "devices/virtio/device.h"
#include "snapshot/image.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/state.h"
#include "vmm/machine.h"

#define MACHINE_STATE_VERSION 1

int machine_save(struct machine *m, struct state_writer *w, struct err *e)
{
    state_put_u32(w, "version", MACHINE_STATE_VERSION);
    state_put_string(w, "tine-version", TINE_VERSION);
    state_put_string(w, "architecture", arch_name);
    state_put_string(w, "id", m->bind.id);
    state_put_string(w, "boot-id", m->boot_id);
    state_put_u32(w, "has-agent", m->guest != GUEST_SILENT);
    /* The part of a frame that the agent had sent when it was cut: the rest comes in the copy. */
    state_put_bytes(w, "control-bytes", m->renewal.buf, m->renewal.have);
    spec_save(&m->spec, w);
    int rc = serial_save(&m->serial, w, e);
    for (unsigned i = 0; rc == 0 && i < m->slot_count; i++) {
        rc = virtio_mmio_save(&m->slots[i], w, e);
        if (rc < 0)
            rc = err_wrap(e, rc, "save %s", m->slots[i].dev->name);
    }
    if (rc == 0)
        rc = arch_vm_save(&m->kvm, w, e);
    for (unsigned i = 0; rc == 0 && i < m->vcpu_count; i++)
        rc = arch_vcpu_save(&m->kvm, &m->vcpus[i], w, e);
    return rc;
}

static int load_head(struct machine *m, const struct state_node *root, struct err *e)
{
    const char *arch = NULL, *boot_id = NULL;
    const void *bytes = NULL;
    size_t len = 0;
    uint32_t has_agent = 0;
    int rc = state_check_version(root, MACHINE_STATE_VERSION, e);
    if (rc == 0)
        rc = state_get_string(root, "architecture", &arch, e);
    if (rc == 0)
        rc = state_get_string(root, "boot-id", &boot_id, e);
    if (rc == 0)
        rc = state_get_u32(root, "has-agent", &has_agent, e);
    if (rc == 0)
        rc = state_get_blob(root, "control-bytes", &bytes, &len, e);
    if (rc < 0)
        return rc;
    rc = renewal_load(&m->renewal, bytes, len, e);
    if (rc < 0)
        return rc;
    if (strcmp(arch, arch_name) != 0)
        return err_set(e, ERR_MISMATCH, 0, "state of a %.16s machine, this is %s", arch, arch_name);
    (void)snprintf(m->boot_id, sizeof m->boot_id, "%s", boot_id);
    m->guest = has_agent ? GUEST_RENEWING : GUEST_SILENT;
    m->is_copy = true;
    return 0;
}

int machine_load(struct machine *m, const struct state_node *root, struct err *e)
{
    int rc = 0;
    for (unsigned i = 0; rc == 0 && i < m->vcpu_count; i++)
        rc = arch_vcpu_restore(&m->kvm, &m->vcpus[i], root, e);
    if (rc == 0)
        rc = arch_vm_restore(&m->kvm, root, e);
    if (rc == 0)
        rc = serial_restore(&m->serial, root, e);
    for (unsigned i = 0; rc == 0 && i < m->slot_count; i++) {
        rc = virtio_mmio_restore(&m->slots[i], root, e);
        if (rc < 0)
            rc = err_wrap(e, rc, "restore %s", m->slots[i].dev->name);
    }
    if (rc == 0) {
        m->is_built = true;
        m->loaded_ns = clock_mono_ns();
    }
    return rc;
}

static struct disk *disk_of(struct machine *m, unsigned i)
{
    return blk_disk(m->slots[i + 1].dev); /* slot 0 is the vsock */
}

static int save_disks(struct machine *m, struct image_writer *out, struct state_writer *w,
                      struct err *e)
{
    for (unsigned i = 0; i < m->spec.disk_count; i++) {
        char name[16], node[16];
        (void)snprintf(name, sizeof name, "disk%u", i);
        (void)snprintf(node, sizeof node, "overlay@%u", i);
        state_begin(w, node);
        int rc = disk_save(disk_of(m, i), out->part_fd, name, w, e);
        state_end(w);
        if (rc < 0)
            return err_wrap(e, rc, "save disk %s", m->spec.disks[i].path);
    }
    return 0;
}

static int write_image(struct machine *m, struct image_writer *out, struct err *e)
{
    struct state_writer w;
    int rc = state_writer_init(&w, e);
    if (rc < 0)
        return rc;
    const void *blob = NULL;
    size_t len = 0;
    uint64_t data_bytes = 0;
    rc = machine_save(m, &w, e);
    if (rc == 0)
        rc = save_disks(m, out, &w, e);
    if (rc == 0)
        rc = state_finish(&w, &blob, &len, e);
    if (rc == 0)
        rc = image_write_state(out, blob, len, e);
    if (rc == 0)
        rc = image_write_memory(out, &m->ram, &data_bytes, e);
    if (rc == 0)
        rc = image_commit(out, e);
    state_writer_free(&w);
    return rc;
}

int machine_snapshot(struct machine *m, const char *dir, struct phases *t, struct err *e)
{
    uint64_t begin = clock_mono_ns(), mark = begin;
    bool was_running = m->is_running;
    struct image_writer out = {.part_fd = -1};
    int rc = image_begin(&out, dir, e);
    if (rc < 0)
        return err_wrap(e, rc, "snapshot %s", m->bind.id);
    uint64_t stopped = clock_mono_ns();
    mark = stopped;
    rc = machine_pause(m, e);
    phase_lap(&t->pause_ns, &mark);
    if (rc == 0)
        rc = write_image(m, &out, e);
    phase_lap(&t->save_ns, &mark);
    image_abort(&out); /* after a commit there is nothing left to abort */
    struct err resume_err = {0};
    if (was_running && m->end == END_NONE && machine_resume(m, &resume_err) < 0)
        machine_end(m, END_INTERNAL, "resume after a snapshot: %s", resume_err.text);
    uint64_t now = clock_mono_ns();
    t->stopped_ns = was_running ? now - stopped : 0;
    t->total_ns = now - begin;
    return rc < 0 ? err_wrap(e, rc, "snapshot %s", m->bind.id) : 0;
}

static int load_disks(struct machine *m, const struct image *img, const struct state_node *root,
                      bool verify, struct err *e)
{
    for (unsigned i = 0; i < m->spec.disk_count; i++) {
        char node[16];
        (void)snprintf(node, sizeof node, "overlay@%u", i);
        struct state_node n;
        int rc = state_child(root, node, &n, e);
        if (rc == 0)
            rc = disk_restore(disk_of(m, i), img->dir_fd, &n, e);
        if (rc == 0 && verify)
            rc = disk_verify(disk_of(m, i), e);
        if (rc < 0)
            return err_wrap(e, rc, "restore disk %s", m->spec.disks[i].path);
    }
    return 0;
}

static int restore_from(struct machine *m, const struct image *img, bool verify, struct err *e)
{
    uint64_t mark = clock_mono_ns();
    struct state_node root;
    int rc = state_open(img->state, img->state_bytes, &root, e);
    if (rc == 0)
        rc = load_head(m, &root, e);
    if (rc == 0)
        rc = spec_restore(&m->spec, &root, e);
    if (rc == 0 && m->spec.memory_bytes != img->memory_bytes)
        rc = err_set(
            e, ERR_BAD_IMAGE, 0, "memory of %llu bytes, the state is of a machine with %llu",
            (unsigned long long)img->memory_bytes, (unsigned long long)m->spec.memory_bytes);
    if (rc == 0)
        rc = arch_check_capabilities(&m->kvm, e);
    if (rc == 0)
        rc = ram_map(&m->ram, img->memory_fd, m->spec.memory_bytes, arch_layout.hole_start,
                     arch_layout.hole_end, e);
    if (rc == 0 && verify)
        rc = image_verify_memory(img, &m->ram, e);
    phase_lap(&m->phases.map_ns, &mark);
    if (rc == 0)
        rc = machine_build_vm(m, e);
    phase_lap(&m->phases.create_ns, &mark);
    if (rc == 0)
        rc = machine_build_devices(m, true, NULL, e);
    if (rc == 0)
        rc = load_disks(m, img, &root, verify, e);
    if (rc == 0)
        rc = machine_load(m, &root, e);
    phase_lap(&m->phases.load_ns, &mark);
    return rc;
}

int machine_restore(struct machine *m, const char *dir, bool verify, struct err *e)
{
    struct image img;
    int rc = image_open(&img, dir, e);
    if (rc < 0)
        return err_wrap(e, rc, "restore %s", m->bind.id);
    rc = restore_from(m, &img, verify, e);
    image_close(&img); /* the mapping keeps the memory file alive */
    return rc < 0 ? err_wrap(e, rc, "restore %s from %s", m->bind.id, dir) : 0;
}
