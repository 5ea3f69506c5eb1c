/*
 * machine_parts: puts a VM, its vCPUs and its devices together, and lets go of them in a fork
 * child. Boot, restore and fork share it; they differ in where memory and state come from.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "devices/blk.h"
#include "devices/disk.h"
#include "devices/virtio/device.h"
#include "devices/vsock.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/log.h"
#include "vmm/machine.h"

int machine_build_vm(struct machine *m, struct err *e)
{
    int rc = kvm_create_vm(&m->kvm, e);
    /* Memory slots before the interrupt chip: creating the chip is the VM's first use of SRCU, and
     * a slot set after that waits about 8 ms for a grace period (kvm_set_memory). */
    if (rc == 0)
        rc = kvm_set_memory(&m->kvm, &m->ram, e);
    if (rc == 0)
        rc = arch_vm_init(&m->kvm, e);
    for (unsigned i = 0; rc == 0 && i < m->spec.cpus; i++) {
        rc = vcpu_create(&m->vcpus[i], &m->kvm, i, &m->loop, &m->mmio, &m->pio, e);
        if (rc == 0) {
            m->vcpu_count = i + 1;
            rc = vcpu_start(&m->vcpus[i], e);
        }
    }
    return rc;
}

static struct irq_line line_of(struct machine *m, uint32_t gsi)
{
    return (struct irq_line){.raise = kvm_irq_pulse, .ctx = &m->kvm, .gsi = gsi};
}

/* The next free virtio-mmio slot; the device is the machine's from here on. */
static int plug(struct machine *m, struct virtio_device *dev, struct err *e)
{
    unsigned i = m->slot_count;
    virtio_mmio_init(&m->slots[i], dev, &m->loop);
    dev->irq = line_of(m, arch_layout.virtio_gsi[i]);
    m->slot_count++;
    return bus_add(&m->mmio, arch_layout.virtio_base + i * arch_layout.virtio_stride,
                   MMIO_WINDOW_BYTES, &virtio_mmio_bus_ops, &m->slots[i], e);
}

static int build_vsock(struct machine *m, bool is_copy, struct err *e)
{
    struct vsock_spec spec = {
        .listener_fd = take_fd(&m->bind.vsock_listener),
        .socket_path = m->bind.vsock_path,
        .granted_ports = m->spec.grants,
        .granted_count = m->spec.grant_count,
        .control = &renewal_control_ops,
        .control_arg = m,
        .gate_closed = is_copy && m->guest == GUEST_RENEWING,
    };
    struct virtio_device *dev;
    int rc = vsock_create(&dev, &spec, &m->ram, &m->loop, e);
    return rc < 0 ? rc : plug(m, dev, e);
}

static int open_disk(const struct spec_disk *s, struct disk **out, struct err *e)
{
    int fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_sys(e, "open disk %s", s->path);
    struct disk_spec spec = {.path = s->path,
                             .fd = fd,
                             .read_only = s->read_only,
                             .overlay_max_bytes = s->overlay_max_bytes};
    int rc = disk_open(out, &spec, e);
    if (rc == 0 && disk_hidden_bytes(*out) > 0)
        log_line(LOG_WARN, "disk %s: the guest does not see its last %u bytes, no whole sector",
                 s->path, disk_hidden_bytes(*out));
    return rc;
}

static int build_console(struct machine *m, struct err *e)
{
    int rc = serial_init(&m->serial, line_of(m, SERIAL_GSI), m->bind.console_fd, e);
    if (rc == 0)
        rc = bus_add(&m->pio, SERIAL_PORT_BASE, 8, &serial_bus_ops, &m->serial, e);
    if (rc == 0)
        rc = arch_add_platform(&m->pio, &m->platform, e);
    return rc;
}

int machine_build_devices(struct machine *m, bool is_copy, struct disk **disks, struct err *e)
{
    int rc = build_console(m, e);
    if (rc == 0)
        rc = build_vsock(m, is_copy, e);
    for (unsigned i = 0; rc == 0 && i < m->spec.disk_count; i++) {
        struct disk *disk = disks != NULL ? disks[i] : NULL;
        if (disk != NULL)
            disks[i] = NULL;
        else
            rc = open_disk(&m->spec.disks[i], &disk, e);
        struct virtio_device *dev = NULL;
        if (rc == 0)
            rc = blk_create(&dev, i, disk, &m->ram, &m->loop, e);
        if (rc == 0)
            rc = plug(m, dev, e);
    }
    return rc;
}

void machine_forget(struct machine *m, struct disk **disks)
{
    /* First the loop: afterwards no source of the parent's can be touched by mistake. */
    loop_close_inherited(&m->loop);
    for (unsigned i = 0; i < m->slot_count; i++) {
        struct virtio_device *dev = m->slots[i].dev;
        if (i == 0)
            vsock_forget(dev);
        else
            disks[i - 1] = blk_forget(dev);
        dev->ops->free(dev);
    }
    for (unsigned i = 0; i < m->vcpu_count; i++)
        vcpu_forget(&m->vcpus[i]);
    kvm_close_vm(&m->kvm);
    serial_free(&m->serial);
    fd_close(&m->bind.console_fd);
    m->slot_count = 0;
    m->vcpu_count = 0;
    m->mmio = (struct bus){0};
    m->pio = (struct bus){0};
    m->is_built = false;
    m->is_running = false;
    m->child_count = 0;
    m->renewal.is_waiting = false;
    m->renewal.host_name[0] = '\0';
    m->forks_ever = 0;
    m->phases = (struct phases){0};
}

struct virtio_device *machine_vsock(struct machine *m)
{
    return m->slots[0].dev;
}
