/*
 * vsock_line: the CONNECT line of a host client (docs/protocol.md, "vsock"). Any thread.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* `line` is what came up to and with the newline: exactly "CONNECT <port>\n" with a decimal port
 * of 0 to 2^32-2, nothing else around it. 0 or -EINVAL, *port untouched then. */
int vsock_line_parse(const uint8_t *line, size_t len, uint32_t *port);
