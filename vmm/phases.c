/*
 * phases: see phases.h.
 */
#include "vmm/phases.h"

#include <stddef.h>

#include "vmm/core/fd.h"
#include "vmm/core/num.h"

json_t *phases_json(const struct phases *p)
{
    const struct {
        const char *name;
        uint64_t ns;
    } all[] = {
        {"pause_us", p->pause_ns},
        {"save_us", p->save_ns},
        {"fork_us", p->fork_ns},
        {"create_us", p->create_ns},
        {"map_us", p->map_ns},
        {"load_us", p->load_ns},
        {"entry_us", p->entry_ns},
        {"renew_us", p->renew_ns},
        {"stopped_us", p->stopped_ns},
        {"ready_us", p->ready_ns},
        {"first_exit_us", p->first_exit_ns},
        {"total_us", p->total_ns},
    };
    json_t *j = json_object();
    for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
        if (all[i].ns != 0)
            (void)json_object_set_new(j, all[i].name, json_integer((json_int_t)(all[i].ns / 1000)));
    }
    return j;
}

void phase_lap(uint64_t *sum, uint64_t *mark_ns)
{
    uint64_t now = clock_mono_ns();
    *sum += now - *mark_ns;
    *mark_ns = now;
}
