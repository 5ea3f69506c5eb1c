/*
 * machine: one virtual machine, and the only place that knows all its parts.
 *
 * main.c makes one `struct machine` per process; everything runs on its loop thread. The path of
 *   a boot is machine_boot (machine.c),
 *   a snapshot is machine_snapshot, a restore machine_restore (machine_copy.c),
 *   a fork is machine_fork (fork.c), which ends in the same load as a restore,
 *   an exit of a vCPU is exits.c,
 *   a renewal is renewal.c,
 *   a request on the control socket is requests.c.
 * Boot, restore and fork all end in a paused machine; machine_resume lets it run.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "devices/serial.h"
#include "devices/virtio/mmio.h"
#include "vmm/arch/arch.h"
#include "vmm/core/bus.h"
#include "vmm/core/kvm.h"
#include "vmm/core/loop.h"
#include "vmm/core/pin.h"
#include "vmm/core/ram.h"
#include "vmm/core/vcpu.h"
#include "vmm/exit_status.h"
#include "vmm/phases.h"
#include "vmm/renewal.h"
#include "vmm/spec.h"

struct boot_spec;
struct control;
struct disk;
struct err;
struct fork_job;
struct virtio_device;

#define MACHINE_SLOTS_MAX 8
#define MACHINE_CPUS_MAX 16
#define MACHINE_CHILDREN_MAX 1024 /* that status lists */

/* Host resources of this process; never saved. */
struct machine_bindings {
    char id[SPEC_ID_MAX + 1];
    char parent_id[SPEC_ID_MAX + 1]; /* "" when not forked */
    char *control_path;              /* owned */
    char *vsock_path;                /* owned; NULL: no host side of the vsock */
    char *image_dir;                 /* owned; NULL unless restored */
    int vsock_listener;              /* taken by the vsock device; -1 */
    int console_fd;                  /* owned; -1: only the ring */
};

enum machine_guest {
    GUEST_SILENT,   /* no agent has said hello */
    GUEST_READY,    /* hello, and renewed if it is a copy */
    GUEST_RENEWING, /* a copy that has not renewed itself yet */
};

struct machine_child {
    char id[SPEC_ID_MAX + 1];
    int pid;
};

struct machine {
    struct machine_bindings bind;
    struct machine_spec spec;
    struct kvm kvm;
    struct ram ram;
    struct loop loop;
    struct bus mmio, pio;
    struct arch_platform platform;
    struct vcpu vcpus[MACHINE_CPUS_MAX];
    unsigned vcpu_count;
    struct serial serial;
    struct virtio_mmio slots[MACHINE_SLOTS_MAX]; /* slot 0 is the vsock, disks follow */
    unsigned slot_count;
    struct control *control;
    struct renewal renewal;
    bool is_built;   /* there is a VM */
    bool is_running; /* vCPUs are let run */
    enum machine_guest guest;
    char boot_id[40];
    enum end_reason end; /* END_NONE until it ends */
    char end_text[256];
    struct phases phases;
    uint64_t begin_ns;             /* monotonic: process start, in a fork child the request */
    uint64_t loaded_ns;            /* monotonic: when a copy's state was in place */
    bool is_copy;                  /* restored or forked */
    struct fork_job *fork_pending; /* list, oldest first: run between two rounds of the loop */
    struct fork_job *fork_waiting; /* list: forked, children not all ready */
    int ready_pipe;                /* fork child: where the parent hears of us; -1 */
    unsigned ready_index;
    struct machine_child children[MACHINE_CHILDREN_MAX];
    unsigned child_count;
    unsigned forks_ever; /* for derived names */
    struct loop_timer halt_timer, stop_timer, pin_timer;
    struct pin pin;      /* of a copy, until its guest runs */
    uint64_t halt_exits; /* exits at the last look */
};

/* Loop and buses; kvm is already open. No VM yet. */
int machine_init(struct machine *m, struct err *e);
/* Loads a kernel and leaves the machine paused. Takes nothing over but reads the fds of `spec`. */
int machine_boot(struct machine *m, struct boot_spec *spec, struct err *e);

/* The same from paths; initrd may be NULL. */
int machine_boot_files(struct machine *m, const char *kernel, const char *initrd,
                       const char *cmdline, struct err *e);

/* Idempotent. After pause every vCPU stands and every device is quiet. */
int machine_pause(struct machine *m, struct err *e);
int machine_resume(struct machine *m, struct err *e);
/* Ends the process's main loop with this reason; the first reason stays. */
void machine_end(struct machine *m, enum end_reason why, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* "new", "booting", "running", "paused", "renewing", "ended" (docs/protocol.md). */
const char *machine_state_name(const struct machine *m);
struct virtio_device *machine_vsock(struct machine *m);
/* Phase timings so far, with the first entry as the vCPU noted it. */
struct phases machine_phases(const struct machine *m);
/* What became due besides fds and timers; between two rounds of the loop. */
void machine_turn(struct machine *m);
void machine_free(struct machine *m);

/* machine_parts.c: VM, vCPUs and devices around an existing RAM. Shared by boot and copies. */
int machine_build_vm(struct machine *m, struct err *e);
/* disks: those of a fork's parent, taken over (spec.disk_count of them); NULL: opened by their
 * paths. */
int machine_build_devices(struct machine *m, bool is_copy, struct disk **disks, struct err *e);
/* In a fork child: lets go of everything that belongs to the parent. RAM and spec stay. Disks are
 * handed over in `disks` (as many as spec.disk_count). */
void machine_forget(struct machine *m, struct disk **disks);

/* machine_copy.c */
struct state_node;
struct state_writer;
int machine_save(struct machine *m, struct state_writer *w, struct err *e);
int machine_load(struct machine *m, const struct state_node *root, struct err *e);
int machine_snapshot(struct machine *m, const char *dir, struct phases *t, struct err *e);
int machine_restore(struct machine *m, const char *dir, bool verify, struct err *e);

/* exits.c: handles every exit that waits, and every posted notification. */
void machine_service_exits(struct machine *m);

/* fork.c: takes the job over and answers its request, now or when the children are ready. */
void machine_fork(struct machine *m, struct fork_job *job);
/* In a child whose renewal is done (or failed with `e`): tells the parent, once. */
void machine_fork_report(struct machine *m, const struct err *e);

/* renewal.c calls these. */
void machine_guest_ready(struct machine *m);
void machine_renewal_failed(struct machine *m, const struct err *e);
