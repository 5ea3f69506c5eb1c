/*
 * vcpu: see vcpu.h. `main_` functions run on the vCPU's thread, all others on the loop thread.
 */
#include "vmm/core/vcpu.h"

#include <errno.h>
#include <linux/kvm.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "vmm/core/bus.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/kvm.h"
#include "vmm/core/loop.h"

#define VCPU_STACK_BYTES (128u << 10)

static void on_kick(int sig)
{
    (void)sig;
}

int vcpu_install_kick(struct err *e)
{
    struct sigaction sa = {.sa_handler = on_kick};
    if (sigaction(VCPU_KICK_SIGNAL, &sa, NULL) < 0)
        return err_sys(e, "sigaction for the vCPU kick");
    return 0;
}

int vcpu_create(struct vcpu *v, const struct kvm *kvm, unsigned index, struct loop *loop,
                const struct bus *mmio, const struct bus *pio, struct err *e)
{
    CLEANUP_FD int fd = ioctl(kvm->vm_fd, KVM_CREATE_VCPU, (unsigned long)index);
    if (fd < 0)
        return err_sys(e, "KVM_CREATE_VCPU %u", index);
    void *run = mmap(NULL, kvm->run_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (run == MAP_FAILED)
        return err_sys(e, "map kvm_run of vcpu %u", index);
    memset(v, 0, sizeof *v);
    v->index = index;
    v->fd = take_fd(&fd);
    v->run = run;
    v->run_bytes = kvm->run_bytes;
    v->loop = loop;
    v->mmio = mmio;
    v->pio = pio;
    v->want = VCPU_PARK;
    (void)pthread_mutex_init(&v->lock, NULL); /* cannot fail on Linux with default attributes */
    (void)pthread_cond_init(&v->wanted, NULL);
    (void)sem_init(&v->exit_answered, 0, 0);
    return 0;
}

/* Both threads write it while KVM reads it; it is a byte, and the last word is under the lock. */
static void set_immediate_exit(struct vcpu *v, uint8_t value)
{
    __atomic_store_n(&v->run->immediate_exit, value, __ATOMIC_RELAXED);
}

static void main_enter(struct vcpu *v)
{
    if (atomic_load_explicit(&v->first_entry_ns, memory_order_relaxed) == 0)
        atomic_store(&v->first_entry_ns, clock_mono_ns());
    v->run_errno = ioctl(v->fd, KVM_RUN, 0) < 0 ? errno : 0;
    if (v->run_errno == 0 && atomic_load_explicit(&v->first_exit_ns, memory_order_relaxed) == 0)
        atomic_store(&v->first_exit_ns, clock_mono_ns());
    atomic_fetch_add_explicit(&v->exits, 1, memory_order_relaxed);
}

void vcpu_access_ports(const struct bus *pio, struct kvm_run *run)
{
    uint8_t *p = (uint8_t *)run + run->io.data_offset;
    for (uint32_t i = 0; i < run->io.count; i++, p += run->io.size) {
        if (run->io.direction == KVM_EXIT_IO_OUT)
            (void)bus_write(pio, run->io.port, p, run->io.size);
        else
            (void)bus_read(pio, run->io.port, p, run->io.size);
    }
}

/* True if the exit is dealt with here: kicks, notifications that nobody waits for, and ports of
 * devices with a lock of their own. */
static bool main_exit_is_light(struct vcpu *v)
{
    struct kvm_run *run = v->run;
    if (v->run_errno == EINTR || v->run_errno == EAGAIN)
        return true;
    if (v->run_errno != 0)
        return false;
    if (run->exit_reason == KVM_EXIT_MMIO && run->mmio.is_write)
        return bus_post(v->mmio, run->mmio.phys_addr, run->mmio.data, run->mmio.len);
    if (run->exit_reason != KVM_EXIT_IO || !bus_is_any_thread(v->pio, run->io.port, run->io.size))
        return false;
    vcpu_access_ports(v->pio, run);
    return true;
}

static void main_ask_loop(struct vcpu *v)
{
    /* Release pairs with the acquire in the loop's read of exit_pending: run is visible there. */
    atomic_store_explicit(&v->exit_pending, true, memory_order_release);
    loop_wake(v->loop);
    while (sem_wait(&v->exit_answered) < 0 && errno == EINTR)
        ;
}

/* Runs the guest until somebody wants it parked. */
static void main_run_guest(struct vcpu *v)
{
    bool half_done = false;
    for (;;) {
        bool leave = atomic_load(&v->leave);
        if (leave && (!half_done || atomic_load(&v->quit)))
            return;
        if (leave) /* complete the access, execute nothing */
            set_immediate_exit(v, 1);
        main_enter(v);
        half_done = v->run_errno == 0;
        if (!main_exit_is_light(v))
            main_ask_loop(v);
    }
}

static void *main_thread(void *arg)
{
    struct vcpu *v = arg;
    (void)pthread_mutex_lock(&v->lock);
    for (;;) {
        if (v->want == VCPU_QUIT)
            break;
        if (v->want == VCPU_PARK) {
            v->parked = true;
            loop_wake(v->loop);
            (void)pthread_cond_wait(&v->wanted, &v->lock);
            continue;
        }
        v->parked = false;
        set_immediate_exit(v, 0);
        (void)pthread_mutex_unlock(&v->lock);
        main_run_guest(v);
        (void)pthread_mutex_lock(&v->lock);
    }
    v->parked = true;
    (void)pthread_mutex_unlock(&v->lock);
    return NULL;
}

int vcpu_start(struct vcpu *v, struct err *e)
{
    pthread_attr_t attr;
    (void)pthread_attr_init(&attr);
    (void)pthread_attr_setstacksize(&attr, VCPU_STACK_BYTES);
    int rc = pthread_create(&v->thread, &attr, main_thread, v);
    (void)pthread_attr_destroy(&attr);
    if (rc != 0)
        return err_set(e, ERR_HOST, rc, "thread of vcpu %u", v->index);
    v->has_thread = true;
    return 0;
}

static void set_want(struct vcpu *v, enum vcpu_want want)
{
    (void)pthread_mutex_lock(&v->lock);
    v->want = want;
    atomic_store(&v->quit, want == VCPU_QUIT);
    atomic_store(&v->leave, want != VCPU_RUN);
    if (want == VCPU_RUN)
        v->parked = false;
    else if (!v->parked)
        set_immediate_exit(v, 1); /* an entry that has not looked yet returns at once... */
    (void)pthread_cond_signal(&v->wanted);
    bool kick = want != VCPU_RUN && !v->parked && v->has_thread;
    (void)pthread_mutex_unlock(&v->lock);
    if (kick) /* ...and one that has is interrupted */
        (void)pthread_kill(v->thread, VCPU_KICK_SIGNAL);
}

void vcpu_run(struct vcpu *v)
{
    set_want(v, VCPU_RUN);
}

void vcpu_request_park(struct vcpu *v)
{
    set_want(v, VCPU_PARK);
}

bool vcpu_is_parked(struct vcpu *v)
{
    (void)pthread_mutex_lock(&v->lock);
    bool parked = v->parked || !v->has_thread;
    (void)pthread_mutex_unlock(&v->lock);
    return parked;
}

void vcpu_exit_done(struct vcpu *v)
{
    atomic_store(&v->exit_pending, false);
    (void)sem_post(&v->exit_answered);
}

static void release(struct vcpu *v)
{
    if (v->run != NULL)
        (void)munmap(v->run, v->run_bytes);
    v->run = NULL;
    fd_close(&v->fd);
}

void vcpu_free(struct vcpu *v)
{
    if (v->has_thread) {
        set_want(v, VCPU_QUIT);
        if (atomic_load(&v->exit_pending))
            vcpu_exit_done(v);
        (void)pthread_join(v->thread, NULL);
        v->has_thread = false;
    }
    release(v);
}

void vcpu_forget(struct vcpu *v)
{
    v->has_thread = false;
    release(v);
}
