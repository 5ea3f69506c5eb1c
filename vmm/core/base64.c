/*
 * base64: see base64.h. Any thread; no state.
 */
#include "vmm/core/base64.h"

#include <errno.h>
#include <stdint.h>

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void base64_encode(const void *data, size_t len, char *out)
{
    const uint8_t *p = data;
    for (; len >= 3; len -= 3, p += 3, out += 4) {
        uint32_t v = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 8 | p[2];
        out[0] = alphabet[v >> 18];
        out[1] = alphabet[v >> 12 & 63];
        out[2] = alphabet[v >> 6 & 63];
        out[3] = alphabet[v & 63];
    }
    if (len > 0) {
        uint32_t v = (uint32_t)p[0] << 16 | (len == 2 ? (uint32_t)p[1] << 8 : 0);
        out[0] = alphabet[v >> 18];
        out[1] = alphabet[v >> 12 & 63];
        out[2] = len == 2 ? alphabet[v >> 6 & 63] : '=';
        out[3] = '=';
        out += 4;
    }
    *out = '\0';
}

static int value(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

ssize_t base64_decode(const char *text, size_t text_len, void *out)
{
    if (text_len % 4 != 0)
        return -EINVAL;
    uint8_t *o = out;
    for (size_t i = 0; i < text_len; i += 4) {
        size_t pad = 0;
        if (i + 4 == text_len)
            pad = text[i + 3] != '=' ? 0 : text[i + 2] != '=' ? 1 : 2;
        uint32_t v = 0;
        for (size_t k = 0; k < 4 - pad; k++) {
            int d = value(text[i + k]);
            if (d < 0)
                return -EINVAL;
            v |= (uint32_t)d << (18 - 6 * k);
        }
        if ((pad == 1 && (v & 0xff) != 0) || (pad == 2 && (v & 0xffff) != 0))
            return -EINVAL; /* left-over bits: not what an encoder makes */
        *o++ = (uint8_t)(v >> 16);
        if (pad < 2)
            *o++ = (uint8_t)(v >> 8);
        if (pad < 1)
            *o++ = (uint8_t)v;
    }
    return o - (uint8_t *)out;
}
