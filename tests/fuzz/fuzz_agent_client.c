/*
 * Fuzz target of the host's side of an exec connection: any bytes as what a guest's agent sends,
 * through exec_client.c. An outcome must be one of the documented ones, a failure must say why, and
 * what is captured must stay within its cap. Seeds: seeds/agent_client.
 */
#include "tools/tine/exec_client.h"

#include "vmm/core/err.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define CAP_BYTES 1000u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int pair[2];
    if (size > 65536 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) < 0)
        return 0;
    if (size > 0 && write(pair[1], data, size) != (ssize_t)size)
        abort();
    (void)shutdown(pair[1], SHUT_WR);
    struct exec_capture out = {.cap_bytes = CAP_BYTES}, err = {.cap_bytes = CAP_BYTES};
    const char *const argv[] = {"true", NULL};
    struct exec_request request = {.argv = argv};
    struct exec_io io = {.stdin_fd = -1,
                         .stdout_fd = -1,
                         .stderr_fd = -1,
                         .signal_fd = -1,
                         .winsize_fd = -1,
                         .capture_stdout = &out,
                         .capture_stderr = &err};
    struct exec_result r = {.pid = 77};
    struct err e = {0};
    int rc = exec_client_run(pair[0], &request, &io, &r, &e);
    assert(out.len <= CAP_BYTES && err.len <= CAP_BYTES);
    if (rc == 0) {
        char text[512];
        assert(r.outcome >= EXEC_EXITED && r.outcome <= EXEC_REFUSED);
        int status = exec_result_status(&r);
        assert(status >= 0 && status <= 255);
        exec_result_describe(&r, text, sizeof text);
        assert((text[0] == 0) == (r.outcome == EXEC_EXITED));
    } else {
        assert(e.text[0] != 0 && r.pid == 77);
    }
    free(out.data);
    free(err.data);
    close(pair[0]);
    close(pair[1]);
    return 0;
}
