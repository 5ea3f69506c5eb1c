/*
 * vcpu: a virtual CPU and its thread.
 *
 * The thread owns the vCPU fd: KVM_RUN is only called there. It has one park point; everything that
 * reads or writes vCPU state (arch.h) runs on the loop thread while the vCPU is parked. Before it
 * parks, the thread lets a half-done MMIO or port access complete (KVM_RUN with immediate_exit),
 * because KVM keeps that half outside of any state one can save.
 *
 * An exit that needs a device is handed to the loop thread: `exit_pending` is set, the loop woken,
 * and the thread sleeps until vcpu_exit_done. Queue notifications (bus_post) do not wait, and ports
 * of devices that have their own lock (bus_ops.any_thread) are served here: a console byte costs a
 * dozen port accesses, and two changes of thread for each would be nearly all of its price.
 *
 * After fork(2) none of the threads exists in the child: vcpu_forget unmaps and closes what the
 * parent's vCPUs left in it.
 */
#pragma once

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bus;
struct err;
struct kvm;
struct kvm_run;
struct loop;

enum vcpu_want { VCPU_PARK, VCPU_RUN, VCPU_QUIT };

struct vcpu {
    unsigned index;
    int fd;
    struct kvm_run *run;
    size_t run_bytes;
    struct loop *loop;
    const struct bus *mmio, *pio;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t wanted;    /* `want` changed */
    enum vcpu_want want;      /* under lock */
    atomic_bool leave;        /* want != RUN, readable without the lock */
    atomic_bool quit;         /* want == QUIT: even a half-done access is given up */
    bool parked;              /* under lock */
    atomic_bool exit_pending; /* run holds an exit for the loop */
    sem_t exit_answered;
    int run_errno; /* with exit_pending: KVM_RUN itself failed with this, or 0 */
    atomic_uint_fast64_t first_entry_ns; /* monotonic time of the first KVM_RUN, 0 before */
    atomic_uint_fast64_t first_exit_ns;  /* of the first exit that was not a kick */
    atomic_uint_fast64_t exits;
};

#define VCPU_KICK_SIGNAL SIGUSR1

/* Once per process: the kick signal interrupts KVM_RUN and does nothing else. */
int vcpu_install_kick(struct err *e);

/* The vCPU fd and its kvm_run; no thread yet. */
int vcpu_create(struct vcpu *v, const struct kvm *kvm, unsigned index, struct loop *loop,
                const struct bus *mmio, const struct bus *pio, struct err *e);
/* The thread, parked. */
int vcpu_start(struct vcpu *v, struct err *e);
void vcpu_run(struct vcpu *v);
/* Asks for the park point; returns at once. vcpu_is_parked tells, and the loop is woken then. */
void vcpu_request_park(struct vcpu *v);
bool vcpu_is_parked(struct vcpu *v);
/* Carries out the port access of a KVM_EXIT_IO; on the loop thread, or as bus_is_any_thread says.
 */
void vcpu_access_ports(const struct bus *pio, struct kvm_run *run);
/* The loop has handled the exit; the thread goes on. */
void vcpu_exit_done(struct vcpu *v);
/* Ends and joins the thread, closes everything. Also from an unanswered exit. */
void vcpu_free(struct vcpu *v);
void vcpu_forget(struct vcpu *v);
