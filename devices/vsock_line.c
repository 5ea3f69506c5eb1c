/*
 * vsock_line: see vsock_line.h.
 */
#include "devices/vsock_line.h"

#include <errno.h>
#include <string.h>

int vsock_line_parse(const uint8_t *line, size_t len, uint32_t *port)
{
    static const char word[] = "CONNECT ";
    size_t at = sizeof word - 1;
    if (len < at + 2 || memcmp(line, word, at) != 0 || line[len - 1] != '\n')
        return -EINVAL;
    uint64_t v = 0;
    for (; at < len - 1; at++) {
        if (line[at] < '0' || line[at] > '9')
            return -EINVAL;
        v = v * 10 + (uint64_t)(line[at] - '0');
        if (v >= UINT32_MAX) /* 2^32-1 means "any port" */
            return -EINVAL;
    }
    *port = (uint32_t)v;
    return 0;
}
