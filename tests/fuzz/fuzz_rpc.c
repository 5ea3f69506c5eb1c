/*
 * Fuzz target of the client's side of the control protocol: any bytes as what a VMM answered. It is
 * taken as an answer only if it is one, and an error always has a text.
 */
#include <assert.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tools/tine/rpc.h"
#include "vmm/core/err.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct rpc r = {
        .fd = -1, .last_id = 7, .in = malloc(size + 1), .in_len = size, .in_cap = size + 1};
    assert(r.in != NULL);
    memcpy(r.in, data, size);
    for (;;) {
        json_t *result = NULL;
        struct err e = {0};
        size_t before = r.in_len;
        int rc = rpc_receive(&r, 0, &result, &e);
        if (rc == -ETIMEDOUT && r.in_len == before && r.error_code == 0)
            break; /* no line is left */
        assert(rc <= 0);
        assert(rc == 0 ? json_is_object(result) : e.text[0] != '\0' && result == NULL);
        assert(r.in_len < before);
        json_decref(result);
    }
    rpc_close(&r);
    return 0;
}
