/*
 * cpu_state: saves and restores all that KVM holds of an x86 vCPU. Loop thread, vCPU parked.
 *
 * Save order: MP state first, because KVM_GET_MP_STATE lets pending INIT/SIPI take effect, which
 * changes registers; events last, because other reads may still queue or clear them.
 * Restore order: CPUID (decides what registers exist) -> sregs (mode, APIC base) -> regs -> xcrs
 * (which XSAVE components are on) -> xsave -> debugregs -> LAPIC -> MSRs (the TSC first, the
 * deadline timer last: it is compared with the TSC and fires in the LAPIC) -> MP state -> events.
 */
#include <errno.h>
#include <linux/kvm.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "vmm/arch/arch.h"
#include "vmm/arch/x86_64/cpu.h"
#include "vmm/core/err.h"
#include "vmm/core/kvm.h"
#include "vmm/core/num.h"
#include "vmm/core/state.h"
#include "vmm/core/vcpu.h"

#define CPU_STATE_VERSION 1
#define MSRS_MAX 512u
#define MSR_TSC 0x10u
#define MSR_TSC_DEADLINE 0x6e0u
#define MSR_MTRR_DEF_TYPE 0x2ffu
#define XSAVE_BYTES_MAX (64u << 10)

struct msr_list {
    struct kvm_msrs *msrs;
    uint32_t count;
};

static int read_xsave(const struct kvm *kvm, struct vcpu *v, struct state_writer *w, struct err *e)
{
    int bytes = kvm_capability(kvm, KVM_CAP_XSAVE2);
    bool two = bytes > (int)sizeof(struct kvm_xsave);
    if (!two)
        bytes = (int)sizeof(struct kvm_xsave);
    void *buf = calloc(1, (size_t)bytes);
    if (buf == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "XSAVE buffer of %d bytes", bytes);
    int rc = 0;
    if (ioctl(v->fd, two ? KVM_GET_XSAVE2 : KVM_GET_XSAVE, buf) < 0)
        rc = err_sys(e, "%s", two ? "KVM_GET_XSAVE2" : "KVM_GET_XSAVE");
    else
        state_put_bytes(w, "xsave", buf, (size_t)bytes);
    free(buf);
    return rc;
}

static void swap_entries(struct kvm_msr_entry *a, struct kvm_msr_entry *b)
{
    struct kvm_msr_entry t = *a;
    *a = *b;
    *b = t;
}

/* The TSC goes to the front, the deadline timer to the back. */
static void order_msrs(struct msr_list *l)
{
    struct kvm_msr_entry *x = l->msrs->entries;
    for (uint32_t i = 0; i < l->count; i++) {
        if (x[i].index == MSR_TSC && i != 0)
            swap_entries(&x[i], &x[0]);
    }
    for (uint32_t i = 0; i + 1 < l->count; i++) {
        if (x[i].index == MSR_TSC_DEADLINE)
            swap_entries(&x[i], &x[l->count - 1]);
    }
}

static int list_msrs(const struct kvm *kvm, struct msr_list *l, struct err *e)
{
    struct kvm_msr_list *ids = calloc(1, sizeof *ids + MSRS_MAX * sizeof(uint32_t));
    l->msrs = calloc(1, sizeof *l->msrs + (MSRS_MAX + 1) * sizeof(struct kvm_msr_entry));
    int rc = 0;
    if (ids == NULL || l->msrs == NULL) {
        rc = err_set(e, ERR_HOST, ENOMEM, "MSR list");
        goto out;
    }
    ids->nmsrs = MSRS_MAX;
    if (ioctl(kvm->dev_fd, KVM_GET_MSR_INDEX_LIST, ids) < 0) {
        rc = err_sys(e, "KVM_GET_MSR_INDEX_LIST (%u MSRs, room for %u)", ids->nmsrs, MSRS_MAX);
        goto out;
    }
    l->count = 0;
    for (uint32_t i = 0; i < ids->nmsrs; i++)
        l->msrs->entries[l->count++].index = ids->indices[i];
    l->msrs->entries[l->count++].index = MSR_MTRR_DEF_TYPE; /* state that KVM does not list */
out:
    free(ids);
    return rc;
}

/*
 * Reads all of them. KVM stops at the first it cannot read (listed, yet not there for this CPUID):
 * such a one holds no state, so it is taken out and the reading goes on.
 */
static int read_msrs(struct vcpu *v, struct msr_list *l, struct err *e)
{
    while (l->count > 0) {
        l->msrs->nmsrs = l->count;
        int got = ioctl(v->fd, KVM_GET_MSRS, l->msrs);
        if (got < 0)
            return err_sys(e, "KVM_GET_MSRS");
        if ((uint32_t)got >= l->count)
            return 0;
        struct kvm_msr_entry *x = l->msrs->entries;
        memmove(&x[got], &x[got + 1], (l->count - (uint32_t)got - 1) * sizeof x[0]);
        l->count--;
    }
    return 0;
}

static int save_msrs(const struct kvm *kvm, struct vcpu *v, struct state_writer *w, struct err *e)
{
    struct msr_list l = {0};
    int rc = list_msrs(kvm, &l, e);
    if (rc == 0)
        rc = read_msrs(v, &l, e);
    if (rc == 0) {
        order_msrs(&l);
        state_put_bytes(w, "msrs", l.msrs->entries, l.count * sizeof l.msrs->entries[0]);
    }
    free(l.msrs);
    return rc;
}

static int save_cpuid(struct vcpu *v, struct state_writer *w, struct err *e)
{
    struct kvm_cpuid2 *c = x86_cpuid_new();
    if (c == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "CPUID table");
    int rc = 0;
    if (ioctl(v->fd, KVM_GET_CPUID2, c) < 0)
        rc = err_sys(e, "KVM_GET_CPUID2");
    else
        state_put_bytes(w, "cpuid", c->entries, c->nent * sizeof c->entries[0]);
    free(c);
    return rc;
}

/* The fixed-size register files: name in the state, ioctl pair, size, in restore order. */
struct part {
    const char *name;
    unsigned long get, set;
    size_t bytes;
};
#define PART(n, g, s, t)                                                                           \
    {                                                                                              \
        n, g, s, sizeof(struct t)                                                                  \
    }
static const struct part part_mp =
    PART("mp-state", KVM_GET_MP_STATE, KVM_SET_MP_STATE, kvm_mp_state);
static const struct part part_events =
    PART("events", KVM_GET_VCPU_EVENTS, KVM_SET_VCPU_EVENTS, kvm_vcpu_events);
static const struct part part_sregs = PART("sregs", KVM_GET_SREGS, KVM_SET_SREGS, kvm_sregs);
static const struct part part_regs = PART("regs", KVM_GET_REGS, KVM_SET_REGS, kvm_regs);
static const struct part part_xcrs = PART("xcrs", KVM_GET_XCRS, KVM_SET_XCRS, kvm_xcrs);
static const struct part part_debug =
    PART("debugregs", KVM_GET_DEBUGREGS, KVM_SET_DEBUGREGS, kvm_debugregs);
static const struct part part_lapic = PART("lapic", KVM_GET_LAPIC, KVM_SET_LAPIC, kvm_lapic_state);

#define PART_BYTES_MAX 2048u

static int save_part(const struct part *p, struct vcpu *v, struct state_writer *w, struct err *e)
{
    uint64_t buf[PART_BYTES_MAX / 8] = {0};
    if (ioctl(v->fd, p->get, buf) < 0)
        return err_sys(e, "get %s", p->name);
    state_put_bytes(w, p->name, buf, p->bytes);
    return 0;
}

static int restore_part(const struct part *p, struct vcpu *v, const struct state_node *n,
                        struct err *e)
{
    uint64_t buf[PART_BYTES_MAX / 8] = {0};
    int rc = state_get_bytes(n, p->name, buf, p->bytes, e);
    if (rc == 0 && ioctl(v->fd, p->set, buf) < 0)
        rc = err_sys(e, "set %s", p->name);
    return rc;
}

static int save_all(const struct kvm *kvm, struct vcpu *v, struct state_writer *w, struct err *e)
{
    int rc = save_part(&part_mp, v, w, e); /* first: see the file comment */
    if (rc == 0)
        rc = save_cpuid(v, w, e);
    static const struct part *const middle[] = {&part_sregs, &part_regs, &part_debug, &part_lapic};
    for (size_t i = 0; rc == 0 && i < ARRAY_SIZE(middle); i++)
        rc = save_part(middle[i], v, w, e);
    if (rc == 0 && kvm_capability(kvm, KVM_CAP_XCRS) > 0)
        rc = save_part(&part_xcrs, v, w, e);
    if (rc == 0)
        rc = read_xsave(kvm, v, w, e);
    if (rc == 0)
        rc = save_msrs(kvm, v, w, e);
    int khz = ioctl(v->fd, KVM_GET_TSC_KHZ, 0);
    state_put_u32(w, "tsc-khz", khz > 0 ? (uint32_t)khz : 0);
    if (rc == 0)
        rc = save_part(&part_events, v, w, e); /* last: see the file comment */
    return rc;
}

int arch_vcpu_save(const struct kvm *kvm, struct vcpu *v, struct state_writer *w, struct err *e)
{
    char name[16];
    (void)snprintf(name, sizeof name, "cpu@%u", v->index);
    state_begin(w, name);
    state_put_u32(w, "version", CPU_STATE_VERSION);
    int rc = save_all(kvm, v, w, e);
    state_end(w);
    return rc < 0 ? err_wrap(e, rc, "save vcpu %u", v->index) : 0;
}

static int restore_cpuid(struct vcpu *v, const struct state_node *n, struct err *e)
{
    const void *p;
    size_t len;
    int rc = state_get_blob(n, "cpuid", &p, &len, e);
    if (rc < 0)
        return rc;
    size_t one = sizeof(struct kvm_cpuid_entry2);
    if (len % one != 0 || len / one > X86_CPUID_ENTRIES_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0,
                       "cpuid of %zu bytes, expected a multiple of %zu, at most %zu", len, one,
                       one * X86_CPUID_ENTRIES_MAX);
    struct kvm_cpuid2 *c = x86_cpuid_new();
    if (c == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "CPUID table");
    c->nent = (uint32_t)(len / one);
    memcpy(c->entries, p, len);
    if (ioctl(v->fd, KVM_SET_CPUID2, c) < 0)
        rc = err_sys(e, "KVM_SET_CPUID2");
    free(c);
    return rc;
}

static int restore_xsave(const struct kvm *kvm, struct vcpu *v, const struct state_node *n,
                         struct err *e)
{
    const void *p;
    size_t len;
    int rc = state_get_blob(n, "xsave", &p, &len, e);
    if (rc < 0)
        return rc;
    int need = kvm_capability(kvm, KVM_CAP_XSAVE2);
    size_t bytes = need > (int)sizeof(struct kvm_xsave) ? (size_t)need : sizeof(struct kvm_xsave);
    if (len != bytes || len > XSAVE_BYTES_MAX)
        return err_set(e, ERR_MISMATCH, 0, "XSAVE area of %zu bytes, this host's is %zu", len,
                       bytes);
    void *buf = malloc(bytes); /* the blob is unaligned */
    if (buf == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "XSAVE buffer");
    memcpy(buf, p, bytes);
    if (ioctl(v->fd, KVM_SET_XSAVE, buf) < 0) /* takes the XSAVE2 size as well */
        rc = err_sys(e, "KVM_SET_XSAVE");
    free(buf);
    return rc;
}

static int restore_tsc_khz(struct vcpu *v, const struct state_node *n, struct err *e)
{
    uint32_t khz;
    int rc = state_get_u32(n, "tsc-khz", &khz, e);
    if (rc < 0)
        return rc;
    int host = ioctl(v->fd, KVM_GET_TSC_KHZ, 0);
    if (khz == 0 || host <= 0 || (uint32_t)host == khz)
        return 0;
    if (ioctl(v->fd, KVM_SET_TSC_KHZ, (unsigned long)khz) < 0)
        return err_set(e, ERR_MISMATCH, errno,
                       "TSC of %u kHz, this host runs at %d kHz and cannot scale", khz, host);
    return 0;
}

static int set_msrs(struct vcpu *v, struct kvm_msrs *m, struct err *e)
{
    int done = ioctl(v->fd, KVM_SET_MSRS, m);
    if (done < 0)
        return err_sys(e, "KVM_SET_MSRS");
    if ((uint32_t)done < m->nmsrs) /* a partly applied list is no success */
        return err_set(e, ERR_MISMATCH, 0, "KVM_SET_MSRS stopped at MSR 0x%x, value 0x%llx",
                       m->entries[done].index, (unsigned long long)m->entries[done].data);
    return 0;
}

/*
 * A deadline is a distance from now. Where the TSC took the saved value the two are the same; a KVM
 * whose guests see the host's TSC ignores it, and the saved deadline would lie in the past of every
 * restored machine: it would begin with a timer interrupt (on a KVM that interprets the kernel, 7
 * ms before anything else runs), or after a reboot of the host so far ahead that none ever came.
 */
static int restore_deadline(struct vcpu *v, uint64_t saved_tsc, uint64_t deadline, struct err *e)
{
    struct {
        struct kvm_msrs head;
        struct kvm_msr_entry entry;
    } m = {.head.nmsrs = 1, .entry.index = MSR_TSC};
    if (deadline != 0 && ioctl(v->fd, KVM_GET_MSRS, &m) != 1)
        return err_sys(e, "KVM_GET_MSRS of the TSC");
    m.entry.index = MSR_TSC_DEADLINE;
    m.entry.data = deadline != 0 ? deadline + (m.entry.data - saved_tsc) : 0;
    return set_msrs(v, &m.head, e);
}

static int restore_msrs(struct vcpu *v, const struct state_node *n, struct err *e)
{
    const void *p;
    size_t len;
    int rc = state_get_blob(n, "msrs", &p, &len, e);
    if (rc < 0)
        return rc;
    size_t one = sizeof(struct kvm_msr_entry);
    if (len % one != 0 || len / one > MSRS_MAX + 1)
        return err_set(e, ERR_BAD_IMAGE, 0, "msrs of %zu bytes, expected a multiple of %zu", len,
                       one);
    struct kvm_msrs *m = calloc(1, sizeof *m + len);
    if (m == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "MSR list");
    m->nmsrs = (uint32_t)(len / one);
    memcpy(m->entries, p, len);
    /* order_msrs put the two at the ends; one without the other is restored as it is. */
    bool split = m->nmsrs >= 2 && m->entries[0].index == MSR_TSC &&
                 m->entries[m->nmsrs - 1].index == MSR_TSC_DEADLINE;
    if (split)
        m->nmsrs--;
    rc = set_msrs(v, m, e);
    if (rc == 0 && split)
        rc = restore_deadline(v, m->entries[0].data, m->entries[m->nmsrs].data, e);
    free(m);
    return rc;
}

static int restore_all(const struct kvm *kvm, struct vcpu *v, const struct state_node *n,
                       struct err *e)
{
    int rc = state_check_version(n, CPU_STATE_VERSION, e);
    if (rc == 0)
        rc = restore_cpuid(v, n, e);
    if (rc == 0)
        rc = restore_tsc_khz(v, n, e);
    if (rc == 0)
        rc = restore_part(&part_sregs, v, n, e);
    if (rc == 0)
        rc = restore_part(&part_regs, v, n, e);
    if (rc == 0 && kvm_capability(kvm, KVM_CAP_XCRS) > 0)
        rc = restore_part(&part_xcrs, v, n, e);
    if (rc == 0)
        rc = restore_xsave(kvm, v, n, e);
    if (rc == 0)
        rc = restore_part(&part_debug, v, n, e);
    if (rc == 0)
        rc = restore_part(&part_lapic, v, n, e);
    if (rc == 0)
        rc = restore_msrs(v, n, e);
    if (rc == 0)
        rc = restore_part(&part_mp, v, n, e);
    if (rc == 0)
        rc = restore_part(&part_events, v, n, e);
    return rc;
}

int arch_vcpu_restore(const struct kvm *kvm, struct vcpu *v, const struct state_node *parent,
                      struct err *e)
{
    char name[16];
    (void)snprintf(name, sizeof name, "cpu@%u", v->index);
    struct state_node n;
    int rc = state_child(parent, name, &n, e);
    if (rc == 0)
        rc = restore_all(kvm, v, &n, e);
    return rc < 0 ? err_wrap(e, rc, "restore vcpu %u", v->index) : 0;
}
