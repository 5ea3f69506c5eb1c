/*
 * boot_aml: see boot_aml.h.
 */
#include "vmm/arch/x86_64/boot_aml.h"

#include <string.h>

#include "vmm/core/num.h"

enum aml_op {
    OP_ZERO = 0x00,
    OP_ONE = 0x01,
    OP_NAME = 0x08,
    OP_BYTE = 0x0a,
    OP_WORD = 0x0b,
    OP_DWORD = 0x0c,
    OP_STRING = 0x0d,
    OP_SCOPE = 0x10,
    OP_BUFFER = 0x11,
    OP_PACKAGE = 0x12,
    OP_EXT = 0x5b,
    OP_EXT_DEVICE = 0x82,
};
#define NAME_BYTES 4u
#define LENGTH_BYTES_MAX 3u /* 20 bits: more than any table of ours */
#define BUFFER_SIZE_BYTES                                                                          \
    3u /* a buffer's own size, always as a word so that its place is known                         \
        */

static void put(struct aml *a, const void *p, size_t len)
{
    if (len > a->cap - a->len) {
        a->overflowed = true;
        return;
    }
    memcpy(a->buf + a->len, p, len);
    a->len += len;
}

static void put_u8(struct aml *a, uint8_t v)
{
    put(a, &v, sizeof v);
}

static void put_u16(struct aml *a, uint16_t v)
{
    put(a, &v, sizeof v);
}

static void put_u32(struct aml *a, uint32_t v)
{
    put(a, &v, sizeof v);
}

static void put_name(struct aml *a, const char name[4])
{
    put_u8(a, OP_NAME);
    put(a, name, NAME_BYTES);
}

/* PkgLength (20.2.4) counts its own bytes: the first says how many follow. */
static size_t length_encode(size_t body, uint8_t out[LENGTH_BYTES_MAX])
{
    if (body + 1 <= 0x3f) {
        out[0] = (uint8_t)(body + 1);
        return 1;
    }
    size_t bytes = body + 2 <= 0xfff ? 2 : 3, total = body + bytes;
    out[0] = (uint8_t)((bytes - 1) << 6 | (total & 0xf));
    out[1] = (uint8_t)(total >> 4);
    out[2] = (uint8_t)(total >> 12);
    return bytes;
}

void aml_close(struct aml *a, size_t mark)
{
    uint8_t length[LENGTH_BYTES_MAX];
    size_t n = length_encode(a->len - mark, length);
    if (n > a->cap - a->len) {
        a->overflowed = true;
        return;
    }
    memmove(a->buf + mark + n, a->buf + mark, a->len - mark);
    memcpy(a->buf + mark, length, n);
    a->len += n;
}

size_t aml_open_scope(struct aml *a, const char path[5])
{
    put_u8(a, OP_SCOPE);
    size_t mark = a->len;
    put(a, path, 1 + NAME_BYTES);
    return mark;
}

size_t aml_open_device(struct aml *a, const char name[4])
{
    put_u8(a, OP_EXT);
    put_u8(a, OP_EXT_DEVICE);
    size_t mark = a->len;
    put(a, name, NAME_BYTES);
    return mark;
}

size_t aml_open_package(struct aml *a, const char name[4], uint8_t elements)
{
    put_name(a, name);
    put_u8(a, OP_PACKAGE);
    size_t mark = a->len;
    put_u8(a, elements);
    return mark;
}

size_t aml_open_resources(struct aml *a, const char name[4])
{
    put_name(a, name);
    put_u8(a, OP_BUFFER);
    size_t mark = a->len;
    put_u8(a, OP_WORD);
    put_u16(a, 0); /* known when it is closed */
    return mark;
}

void aml_close_resources(struct aml *a, size_t mark)
{
    put_u8(a, 0x79); /* end tag; a checksum of 0 stands for "not computed" */
    put_u8(a, 0);
    if (a->overflowed)
        return;
    le16_put(a->buf + mark + 1, (uint16_t)(a->len - mark - BUFFER_SIZE_BYTES));
    aml_close(a, mark);
}

void aml_integer(struct aml *a, uint32_t value)
{
    if (value <= 1) {
        put_u8(a, value == 0 ? OP_ZERO : OP_ONE);
    } else if (value <= 0xff) {
        put_u8(a, OP_BYTE);
        put_u8(a, (uint8_t)value);
    } else if (value <= 0xffff) {
        put_u8(a, OP_WORD);
        put_u16(a, (uint16_t)value);
    } else {
        put_u8(a, OP_DWORD);
        put_u32(a, value);
    }
}

void aml_name_integer(struct aml *a, const char name[4], uint32_t value)
{
    put_name(a, name);
    aml_integer(a, value);
}

void aml_name_string(struct aml *a, const char name[4], const char *text)
{
    put_name(a, name);
    put_u8(a, OP_STRING);
    put(a, text, strlen(text) + 1);
}

static uint32_t hex_digit(char c)
{
    return (uint32_t)(c <= '9' ? c - '0' : c - 'A' + 10);
}

/* Three letters of 5 bits, four hexadecimal digits, most significant byte first (19.3.4). */
void aml_name_eisa(struct aml *a, const char name[4], const char id[7])
{
    uint32_t v = 0;
    for (unsigned i = 0; i < 3; i++)
        v = v << 5 | ((uint32_t)id[i] & 0x1f);
    for (unsigned i = 3; i < 7; i++)
        v = v << 4 | hex_digit(id[i]);
    put_name(a, name);
    put_u8(a, OP_DWORD);
    put_u32(a, __builtin_bswap32(v));
}

void aml_memory32(struct aml *a, uint32_t base, uint32_t bytes)
{
    put_u8(a, 0x86); /* Memory32Fixed */
    put_u16(a, 9);
    put_u8(a, 1); /* read and write */
    put_u32(a, base);
    put_u32(a, bytes);
}

void aml_io(struct aml *a, uint16_t base, uint8_t bytes)
{
    put_u8(a, 0x47); /* I/O port descriptor, 7 bytes */
    put_u8(a, 1);    /* decodes 16 bits */
    put_u16(a, base);
    put_u16(a, base);
    put_u8(a, 1); /* alignment */
    put_u8(a, bytes);
}

void aml_interrupt_edge_high(struct aml *a, uint32_t gsi)
{
    put_u8(a, 0x89); /* extended interrupt descriptor */
    put_u16(a, 6);
    put_u8(a, 0x03); /* consumer, edge, active high, exclusive */
    put_u8(a, 1);    /* one interrupt */
    put_u32(a, gsi);
}
