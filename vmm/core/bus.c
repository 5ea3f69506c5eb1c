/*
 * bus: see bus.h.
 */
#include "vmm/core/bus.h"

#include <string.h>

#include "vmm/core/err.h"
#include "vmm/core/num.h"

int bus_add(struct bus *bus, uint64_t base, uint64_t bytes, const struct bus_ops *ops, void *obj,
            struct err *e)
{
    uint64_t end;
    if (bytes == 0 || !add_u64(base, bytes, &end))
        return err_set(e, ERR_USAGE, 0, "bus range at 0x%llx wraps", (unsigned long long)base);
    for (unsigned i = 0; i < bus->count; i++) {
        const struct bus_entry *o = &bus->entries[i];
        if (base < o->base + o->bytes && o->base < end)
            return err_set(e, ERR_USAGE, 0, "bus ranges at 0x%llx and 0x%llx overlap",
                           (unsigned long long)base, (unsigned long long)o->base);
    }
    if (bus->count == BUS_ENTRIES_MAX)
        return err_set(e, ERR_LIMIT, 0, "more than %d devices on a bus", BUS_ENTRIES_MAX);
    bus->entries[bus->count++] = (struct bus_entry){base, bytes, ops, obj};
    return 0;
}

static const struct bus_entry *find(const struct bus *bus, uint64_t addr, unsigned len)
{
    for (unsigned i = 0; i < bus->count; i++) {
        const struct bus_entry *o = &bus->entries[i];
        if (addr >= o->base && addr - o->base < o->bytes && len <= o->bytes - (addr - o->base))
            return o;
    }
    return NULL;
}

bool bus_read(const struct bus *bus, uint64_t addr, void *data, unsigned len)
{
    const struct bus_entry *o = find(bus, addr, len);
    if (o == NULL || o->ops->read == NULL) {
        memset(data, 0xff, len);
        return false;
    }
    o->ops->read(o->obj, addr - o->base, data, len);
    return true;
}

bool bus_write(const struct bus *bus, uint64_t addr, const void *data, unsigned len)
{
    const struct bus_entry *o = find(bus, addr, len);
    if (o == NULL || o->ops->write == NULL)
        return false;
    o->ops->write(o->obj, addr - o->base, data, len);
    return true;
}

bool bus_post(const struct bus *bus, uint64_t addr, const void *data, unsigned len)
{
    const struct bus_entry *o = find(bus, addr, len);
    return o != NULL && o->ops->post != NULL && o->ops->post(o->obj, addr - o->base, data, len);
}

bool bus_is_any_thread(const struct bus *bus, uint64_t addr, unsigned len)
{
    const struct bus_entry *o = find(bus, addr, len);
    return o == NULL || o->ops->any_thread;
}
