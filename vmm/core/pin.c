/*
 * pin: see pin.h.
 */
#include "vmm/core/pin.h"

#include <pthread.h>

#include "vmm/core/vcpu.h"

void pin_begin(struct pin *p)
{
    int cpu = sched_getcpu();
    if (p->is_pinned || cpu < 0 || cpu >= CPU_SETSIZE ||
        sched_getaffinity(0, sizeof p->before, &p->before) < 0)
        return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((unsigned)cpu, &one);
    p->is_pinned = sched_setaffinity(0, sizeof one, &one) == 0;
}

void pin_end(struct pin *p, struct vcpu *vcpus, unsigned count)
{
    if (!p->is_pinned)
        return;
    p->is_pinned = false;
    /* Cannot fail for a set this thread had before; if CPUs were taken away since, the kernel has
     * moved us already. */
    (void)sched_setaffinity(0, sizeof p->before, &p->before);
    for (unsigned i = 0; i < count; i++) {
        if (vcpus[i].has_thread)
            (void)pthread_setaffinity_np(vcpus[i].thread, sizeof p->before, &p->before);
    }
}
