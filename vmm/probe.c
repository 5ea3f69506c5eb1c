/*
 * probe: see probe.h.
 */
#include "vmm/probe.h"

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <string.h>

#include <jansson.h>

#include "vmm/arch/probe.h"
#include "vmm/core/err.h"
#include "vmm/core/kvm.h"

#define BUILD_ID_HEX 41

/* Finds the linker's build id note of this very program. */
static int find_build_id(struct dl_phdr_info *info, size_t size, void *arg)
{
    char *out = arg;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *ph = &info->dlpi_phdr[i];
        if (ph->p_type != PT_NOTE)
            continue;
        const char *p = (const char *)(info->dlpi_addr + ph->p_vaddr);
        const char *end = p + ph->p_memsz;
        while (p + sizeof(ElfW(Nhdr)) <= end) {
            const ElfW(Nhdr) *n = (const void *)p;
            const char *name = p + sizeof *n;
            const unsigned char *desc = (const void *)(name + ((n->n_namesz + 3) & ~3u));
            if (n->n_type == NT_GNU_BUILD_ID && n->n_namesz == 4 && memcmp(name, "GNU", 4) == 0) {
                for (unsigned k = 0; k < n->n_descsz && k < 20; k++)
                    (void)snprintf(out + 2 * k, 3, "%02x", desc[k]);
                return 1;
            }
            p = (const char *)desc + ((n->n_descsz + 3) & ~3u);
        }
    }
    return 1; /* the first object is the program itself; libraries do not matter */
}

static json_t *names(const char *const *list)
{
    json_t *a = json_array();
    for (size_t i = 0; i < ARCH_PROBE_NAMES_MAX && list[i] != NULL; i++)
        (void)json_array_append_new(a, json_string(list[i]));
    return a;
}

static const char *reason(int rc, const struct arch_probe *found, const struct err *e)
{
    if (rc < 0)
        return e->text;
    return found->kernel_mode_is_native
               ? "guest kernel code runs natively, so Debian's stock cloud kernel boots"
               : "guest kernel code is interpreted and instructions a stock kernel needs are "
                 "lacking, "
                 "so the lean kernel is used";
}

int probe_print(FILE *out)
{
    struct err e = {0};
    struct kvm kvm = {.dev_fd = -1, .vm_fd = -1};
    struct arch_probe found = {0};
    char build[BUILD_ID_HEX] = "";
    (void)dl_iterate_phdr(find_build_id, build);
    int rc = kvm_open(&kvm, KVM_DEFAULT_PATH, &e);
    bool opened = rc == 0;
    if (opened)
        rc = arch_probe(&kvm, &found, &e);
    kvm_close(&kvm);
    bool native = found.kernel_mode_is_native;
    const char *mode = rc < 0 ? "unknown" : native ? "hardware" : "interpreted";
    json_t *o = json_pack(
        "{s:b, s:s?, s:o, s:o, s:s, s:o, s:s?, s:s, s:s}", "kvm", opened, "error",
        rc < 0 ? e.text : NULL, "api_version", opened ? json_integer(12) : json_null(), "missing",
        names(found.missing), "kernel_mode", mode, "lacks", names(found.lacks), "guest",
        rc < 0   ? NULL
        : native ? "stock"
                 : "lean",
        "why", reason(rc, &found, &e), "build", build[0] != '\0' ? build : TINE_VERSION);
    if (o == NULL || json_dumpf(o, out, JSON_COMPACT) < 0 || fputc('\n', out) == EOF)
        rc = rc < 0 ? rc : -ENOMEM;
    json_decref(o);
    return rc;
}
