/*
 * bus: which device owns which guest address. One bus for MMIO, one for port I/O.
 *
 * Entries are added while the machine is built (loop thread, no vCPU runs); afterwards the table
 * never changes, so vCPU threads may look things up without a lock. read/write run on the loop
 * thread, unless the device says any_thread: then it has a lock of its own and the access is
 * carried out where it was made, which saves two changes of thread. `post` may run on a vCPU
 * thread: it takes a write that needs no answer (a queue notification), must only touch atomics and
 * wake the loop, and returns false to decline.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct err;

struct bus_ops {
    void (*read)(void *obj, uint64_t offset, void *data, unsigned len);
    void (*write)(void *obj, uint64_t offset, const void *data, unsigned len);
    bool (*post)(void *obj, uint64_t offset, const void *data, unsigned len);
    bool any_thread; /* read and write may be called on every thread */
};

struct bus_entry {
    uint64_t base, bytes;
    const struct bus_ops *ops;
    void *obj;
};

#define BUS_ENTRIES_MAX 32

struct bus {
    struct bus_entry entries[BUS_ENTRIES_MAX];
    unsigned count;
};

/* ERR_USAGE on overlap or wrap, ERR_LIMIT when full. */
int bus_add(struct bus *bus, uint64_t base, uint64_t bytes, const struct bus_ops *ops, void *obj,
            struct err *e);
/* False if nobody claims [addr, addr+len); a read then gives all ones. len is 1..8. */
bool bus_read(const struct bus *bus, uint64_t addr, void *data, unsigned len);
bool bus_write(const struct bus *bus, uint64_t addr, const void *data, unsigned len);
bool bus_post(const struct bus *bus, uint64_t addr, const void *data, unsigned len);
/* True if an access there needs no loop thread: an any_thread device, or nobody at all. */
bool bus_is_any_thread(const struct bus *bus, uint64_t addr, unsigned len);
