/*
 * Fuzz target of the CONNECT line: the input is what a host client sends. It must be taken exactly
 * when a slow second reading of the rule takes it too. Seeds: seeds/connect.
 */
#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "devices/vsock_line.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Prints the port again: leading zeros aside, that must be the line. */
static void check_taken(const uint8_t *line, size_t len, uint32_t port)
{
    char digits[16];
    int n = snprintf(digits, sizeof digits, "%u", port);
    assert(port != UINT32_MAX);
    assert(len >= 8 + (size_t)n + 1 && memcmp(line, "CONNECT ", 8) == 0 && line[len - 1] == '\n');
    assert(memcmp(line + len - 1 - n, digits, (size_t)n) == 0);
    for (size_t i = 8; i < len - 1 - (size_t)n; i++)
        assert(line[i] == '0');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint32_t port = 4711;
    int rc = vsock_line_parse(data, size, &port);
    if (rc == 0)
        check_taken(data, size, port);
    else
        assert(rc < 0 && port == 4711);
    /* What is refused whole may still begin with a good line: then that one counts. */
    const uint8_t *newline = size > 0 ? memchr(data, '\n', size) : NULL;
    if (newline != NULL && vsock_line_parse(data, (size_t)(newline - data) + 1, &port) == 0)
        check_taken(data, (size_t)(newline - data) + 1, port);
    return 0;
}
