/*
 * pin: keeps a copy on one CPU until its guest has begun to run.
 *
 * Handing the first entry from the loop thread to a vCPU thread on another, idle CPU costs the
 * wake-up of that CPU: 0.3 to 1 ms on hosts that are virtual machines themselves, as much as all
 * the rest of a restore. On the same CPU it costs a change of thread, 30 us (bench/run restore,
 * `entry_us`). So the process pins itself before it makes threads, which inherit it, and lets go
 * soon afterwards. Loop thread.
 */
#pragma once

#include <sched.h>
#include <stdbool.h>

struct vcpu;

struct pin {
    cpu_set_t before;
    bool is_pinned;
};

#define PIN_RELEASE_NS (2ull * 1000 * 1000) /* after the guest was let run */

/* To the CPU this thread is on. Does nothing where that is refused: it is only about speed. */
void pin_begin(struct pin *p);
/* The loop thread and these vCPUs may run where the process could before. */
void pin_end(struct pin *p, struct vcpu *vcpus, unsigned count);
