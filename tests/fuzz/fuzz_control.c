/*
 * Fuzz target of the control protocol: any bytes as one line. What is taken must be within every
 * limit that control.h names; what is refused must carry a message. Seeds: seeds/control.
 */
#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "vmm/control_parse.h"
#include "vmm/core/sock.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_boot(const struct control_boot *p)
{
    assert(p->kernel[0] == '/' && (p->initrd == NULL || p->initrd[0] == '/'));
    assert(strlen(p->cmdline) <= CONTROL_CMDLINE_MAX);
    assert(p->memory_mib >= 1 && p->memory_mib <= CONTROL_MEMORY_MIB_MAX);
    assert(p->cpus >= 1 && p->cpus <= CONTROL_CPUS_MAX);
    assert(p->disk_count <= CONTROL_DISKS_MAX && p->grant_count <= CONTROL_GRANTS_MAX);
    for (unsigned i = 0; i < p->disk_count; i++)
        assert(p->disks[i].path[0] == '/');
    for (unsigned i = 0; i < p->grant_count; i++)
        assert(p->grants[i] > 1);
}

static void check_fork(const struct control_fork *p)
{
    assert(p->count >= 1 && p->count <= CONTROL_CHILDREN_MAX);
    for (unsigned i = 0; p->children != NULL && i < p->count; i++) {
        assert(control_id_check(p->children[i].id, NULL) == 0);
        assert(sock_path_check(p->children[i].control, NULL) == 0);
        assert(sock_path_check(p->children[i].vsock, NULL) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct control_call call;
    struct err e = {0};
    int rc = control_parse((const char *)data, size, &call, &e);
    if (rc < 0) {
        assert(e.text[0] != '\0');
        assert(strcmp(rpc_kind(rc), "unknown") != 0);
    } else if (call.method == CONTROL_BOOT) {
        check_boot(&call.p.boot);
    } else if (call.method == CONTROL_FORK) {
        check_fork(&call.p.fork);
    } else if (call.method == CONTROL_SNAPSHOT) {
        assert(call.p.snapshot.dir[0] == '/');
    } else if (call.method == CONTROL_CONSOLE) {
        assert(call.p.console_bytes <= CONTROL_CONSOLE_MAX);
    } else if (call.method == CONTROL_WAIT) {
        assert(call.p.wait.timeout_ms <= CONTROL_WAIT_MS_MAX);
    }
    control_call_free(&call);
    return 0;
}
