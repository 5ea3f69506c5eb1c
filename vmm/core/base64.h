/*
 * base64: RFC 4648 section 4, with padding. Any thread.
 */
#pragma once

#include <stddef.h>
#include <sys/types.h>

/* Characters that `len` bytes encode to, without a terminating zero. */
#define BASE64_LEN(len) (((size_t)(len) + 2) / 3 * 4)

/* `out` holds BASE64_LEN(len) + 1 chars; it is terminated. */
void base64_encode(const void *data, size_t len, char *out);
/* Returns the bytes written to `out` (which holds text_len / 4 * 3), or -EINVAL. Strict. */
ssize_t base64_decode(const char *text, size_t text_len, void *out);
