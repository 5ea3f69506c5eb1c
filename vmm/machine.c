/*
 * machine: life cycle of the one machine of this process. See machine.h for the map. Loop thread.
 */
#include "vmm/machine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "devices/disk.h"
#include "devices/virtio/device.h"
#include "devices/vsock.h"
#include "vmm/arch/boot_spec.h"
#include "vmm/control.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/log.h"
#include "vmm/core/num.h"
#include "vmm/fork.h"

/* How often a silent machine is looked at for a halt that nothing can end. */
#define HALT_LOOK_NS (1000ull * 1000 * 1000)
#define PANIC_MARK "Kernel panic - not syncing"
#define PANIC_LAST_LINE "---[ end Kernel panic - not syncing"

static void on_wake(void *arg)
{
    machine_service_exits(arg);
}

/* A guest that resets after a panic (panic=N) says so on its console before it does. */
static bool console_shows_panic(struct machine *m)
{
    static char tail[SERIAL_RING_BYTES];
    size_t n = serial_tail(&m->serial, tail, sizeof tail);
    return memmem(tail, n, PANIC_MARK, sizeof PANIC_MARK - 1) != NULL;
}

/* A kernel told to stay where it panicked (panic=0) spins for ever: this is the last it says. */
static bool console_ends_in_panic(struct machine *m)
{
    char tail[1024];
    size_t n = serial_tail(&m->serial, tail, sizeof tail);
    while (n > 0 && (tail[n - 1] == '\n' || tail[n - 1] == '\r'))
        n--;
    const char *line = memrchr(tail, '\n', n);
    return line != NULL && memmem(line, n - (size_t)(line - tail), PANIC_LAST_LINE,
                                  sizeof PANIC_LAST_LINE - 1) != NULL;
}

static void on_platform(void *arg, enum arch_platform_event what)
{
    struct machine *m = arg;
    if (what == ARCH_POWEROFF)
        machine_end(m, END_POWEROFF, "the guest powered off");
    else if (what == ARCH_PANIC || console_shows_panic(m))
        machine_end(m, END_PANIC, "the guest kernel panicked");
    else
        machine_end(m, END_REBOOT, "the guest asked for a reset");
}

int machine_init(struct machine *m, struct err *e)
{
    m->platform = (struct arch_platform){.happened = on_platform, .arg = m};
    int rc = loop_init(&m->loop, e);
    if (rc == 0)
        loop_set_wake(&m->loop, on_wake, m);
    return rc;
}

int machine_boot(struct machine *m, struct boot_spec *spec, struct err *e)
{
    int rc = spec_check(&m->spec, e);
    if (rc == 0)
        rc = arch_check_capabilities(&m->kvm, e);
    if (rc == 0)
        rc = ram_create(&m->ram, m->spec.memory_bytes, arch_layout.hole_start, arch_layout.hole_end,
                        true, e);
    struct boot_entry at = {0};
    if (rc == 0) {
        spec->cpus = m->spec.cpus;
        spec->virtio_count = 1 + m->spec.disk_count; /* slot 0 is the vsock */
        rc = arch_load_kernel(&m->ram, spec, &at, e);
    }
    if (rc == 0)
        rc = machine_build_vm(m, e);
    if (rc == 0)
        rc = machine_build_devices(m, false, NULL, e);
    for (unsigned i = 0; rc == 0 && i < m->vcpu_count; i++)
        rc = arch_vcpu_reset(&m->kvm, &m->vcpus[i], m->spec.cpus, e);
    if (rc == 0)
        rc = arch_vcpu_enter(&m->vcpus[0], &at, e);
    if (rc == 0)
        m->is_built = true;
    return rc;
}

int machine_boot_files(struct machine *m, const char *kernel, const char *initrd,
                       const char *cmdline, struct err *e)
{
    CLEANUP_FD int kernel_fd = open(kernel, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (kernel_fd < 0)
        return err_sys(e, "open kernel %s", kernel);
    CLEANUP_FD int initrd_fd = -1;
    if (initrd != NULL) {
        initrd_fd = open(initrd, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (initrd_fd < 0)
            return err_sys(e, "open initrd %s", initrd);
    }
    struct boot_spec spec = {
        .kernel_fd = kernel_fd,
        .kernel_path = kernel,
        .initrd_fd = initrd_fd,
        .initrd_path = initrd,
        .cmdline = cmdline,
    };
    return machine_boot(m, &spec, e);
}

/*
 * A guest that halts with interrupts off never exits from KVM again, nor does one that spins after
 * a panic. Once a second without any exit, its console is looked at, and its vCPUs are parked for a
 * moment and looked at.
 */
static void on_halt_look(void *arg)
{
    struct machine *m = arg;
    uint64_t exits = 0;
    for (unsigned i = 0; i < m->vcpu_count; i++)
        exits += atomic_load_explicit(&m->vcpus[i].exits, memory_order_relaxed);
    bool silent = exits == m->halt_exits;
    m->halt_exits = exits;
    struct err e = {0};
    if (silent && console_ends_in_panic(m)) {
        machine_end(m, END_PANIC, "the guest kernel panicked and stays there");
        return;
    }
    if (silent && machine_pause(m, &e) == 0 && m->end == END_NONE) {
        bool halted = true;
        for (unsigned i = 0; i < m->vcpu_count; i++)
            halted = halted && arch_vcpu_is_halted(&m->vcpus[i]);
        if (halted && console_shows_panic(m))
            machine_end(m, END_PANIC, "the guest kernel panicked and halted");
        else if (halted)
            machine_end(m, END_HALTED, "every vCPU halted with interrupts off");
        else if (machine_resume(m, &e) < 0)
            machine_end(m, END_INTERNAL, "%s", e.text);
        m->halt_exits += m->vcpu_count; /* the kick itself counted as one */
        return;
    }
    loop_timer_arm(&m->loop, &m->halt_timer, HALT_LOOK_NS, on_halt_look, m);
}

static bool all_parked(struct machine *m)
{
    for (unsigned i = 0; i < m->vcpu_count; i++) {
        if (!vcpu_is_parked(&m->vcpus[i]))
            return false;
    }
    return true;
}

static int park_all(struct machine *m, struct err *e)
{
    for (unsigned i = 0; i < m->vcpu_count; i++)
        vcpu_request_park(&m->vcpus[i]);
    for (;;) {
        machine_service_exits(m); /* a vCPU on its way may still need an answer */
        if (m->end != END_NONE)
            return err_set(e, ERR_STATE, 0, "the machine ended: %s", m->end_text);
        if (all_parked(m))
            return 0;
        loop_wait_wake(&m->loop);
    }
}

int machine_pause(struct machine *m, struct err *e)
{
    if (!m->is_running)
        return 0;
    int rc = park_all(m, e);
    if (rc < 0)
        return rc;
    m->is_running = false;
    loop_timer_cancel(&m->loop, &m->halt_timer);
    vsock_set_paused(machine_vsock(m), true);
    for (unsigned i = 0; rc == 0 && i < m->slot_count; i++) {
        struct virtio_device *dev = m->slots[i].dev;
        rc = dev->ops->quiesce(dev, e);
    }
    if (rc < 0) {
        struct err ignored = {0};
        m->is_running = false;
        if (machine_resume(m, &ignored) < 0)
            machine_end(m, END_INTERNAL, "%s", ignored.text);
    }
    return rc;
}

static void on_pin_timer(void *arg)
{
    struct machine *m = arg;
    pin_end(&m->pin, m->vcpus, m->vcpu_count);
}

int machine_resume(struct machine *m, struct err *e)
{
    if (m->is_running)
        return 0;
    if (m->end != END_NONE)
        return err_set(e, ERR_STATE, 0, "the machine ended: %s", m->end_text);
    vsock_set_paused(machine_vsock(m), false);
    for (unsigned i = 0; i < m->slot_count; i++)
        m->slots[i].dev->ops->resume(m->slots[i].dev);
    m->is_running = true;
    /* vCPUs first, the renewal frame after them: it needs no vCPU to be queued, only to be read. */
    for (unsigned i = 0; i < m->vcpu_count; i++)
        vcpu_run(&m->vcpus[i]);
    loop_timer_arm(&m->loop, &m->halt_timer, HALT_LOOK_NS, on_halt_look, m);
    if (m->pin.is_pinned)
        loop_timer_arm(&m->loop, &m->pin_timer, PIN_RELEASE_NS, on_pin_timer, m);
    if (m->guest == GUEST_RENEWING && !m->renewal.is_waiting)
        return renewal_begin(m, e);
    return 0;
}

void machine_end(struct machine *m, enum end_reason why, const char *fmt, ...)
{
    if (m->end != END_NONE)
        return;
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(m->end_text, sizeof m->end_text, fmt, ap);
    va_end(ap);
    m->end = why;
    if (m->ready_pipe >= 0) {
        struct err e = {0};
        (void)err_set(&e, ERR_GUEST, 0, "it ended before it was ready (%s): %s",
                      end_reason_name(why), m->end_text);
        machine_fork_report(m, &e);
    }
    if (m->control != NULL)
        control_state_changed(m->control);
}

const char *machine_state_name(const struct machine *m)
{
    if (m->end != END_NONE)
        return "ended";
    if (!m->is_built)
        return "new";
    if (!m->is_running)
        return "paused";
    switch (m->guest) {
    case GUEST_READY:
        return "running";
    case GUEST_RENEWING:
        return "renewing";
    case GUEST_SILENT:
        break;
    }
    return "booting";
}

struct phases machine_phases(const struct machine *m)
{
    struct phases p = m->phases;
    uint64_t entered = m->vcpu_count > 0 ? atomic_load(&m->vcpus[0].first_entry_ns) : 0;
    if (m->loaded_ns != 0 && entered > m->loaded_ns)
        p.entry_ns = entered - m->loaded_ns;
    uint64_t left = m->vcpu_count > 0 ? atomic_load(&m->vcpus[0].first_exit_ns) : 0;
    if (left > m->begin_ns)
        p.first_exit_ns = left - m->begin_ns;
    return p;
}

void machine_guest_ready(struct machine *m)
{
    uint64_t now = clock_mono_ns();
    if (m->guest == GUEST_SILENT)
        m->phases.ready_ns = now - m->begin_ns;
    m->guest = GUEST_READY;
    m->phases.total_ns = now - m->begin_ns;
    vsock_open_gate(machine_vsock(m));
    if (m->ready_pipe >= 0)
        machine_fork_report(m, NULL);
    if (m->control != NULL)
        control_state_changed(m->control);
}

void machine_renewal_failed(struct machine *m, const struct err *e)
{
    machine_end(m, END_RENEWAL, "%s", e->text);
}

/* Its children's sockets are bound already: they go. */
static void refuse_fork(const struct machine *m, struct fork_job *job)
{
    struct err e = {0};
    (void)err_set(&e, ERR_STATE, 0, "fork %s: the machine has ended", m->bind.id);
    control_fail(job->req, &e);
    fork_job_free(job, false);
}

void machine_turn(struct machine *m)
{
    /* In a child the list is empty when machine_fork returns: the other jobs are the parent's. */
    while (m->fork_pending != NULL) {
        struct fork_job *job = m->fork_pending;
        m->fork_pending = job->next;
        job->next = NULL;
        if (m->end == END_NONE)
            machine_fork(m, job);
        else
            refuse_fork(m, job);
    }
}

void machine_free(struct machine *m)
{
    for (unsigned i = 0; i < m->vcpu_count; i++)
        vcpu_free(&m->vcpus[i]);
    for (unsigned i = 0; i < m->slot_count; i++)
        m->slots[i].dev->ops->free(m->slots[i].dev);
    serial_free(&m->serial);
    ram_free(&m->ram);
    kvm_close(&m->kvm);
    loop_close(&m->loop);
    fd_close(&m->bind.vsock_listener);
    fd_close(&m->bind.console_fd);
    free(m->bind.control_path);
    free(m->bind.vsock_path);
    free(m->bind.image_dir);
    spec_free(&m->spec);
}
