/*
 * num: little-endian access and checked arithmetic for numbers that come from outside. Any thread.
 *
 * Rule for every number a guest, file or peer chose: read it once into a local with these helpers,
 * add and multiply with the checked forms before any compare, and index only after `< size`.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint16_t le16_get(const void *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint32_t le32_get(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint64_t le64_get(const void *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void le16_put(void *p, uint16_t v)
{
    memcpy(p, &v, sizeof v);
}

static inline void le32_put(void *p, uint32_t v)
{
    memcpy(p, &v, sizeof v);
}

static inline void le64_put(void *p, uint64_t v)
{
    memcpy(p, &v, sizeof v);
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "both architectures are little-endian");

/* True on success; on overflow false, *out untouched. */
static inline bool add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t v;
    if (__builtin_add_overflow(a, b, &v))
        return false;
    *out = v;
    return true;
}

static inline bool mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t v;
    if (__builtin_mul_overflow(a, b, &v))
        return false;
    *out = v;
    return true;
}

static inline uint64_t align_up_u64(uint64_t v, uint64_t pow2)
{
    return (v + pow2 - 1) & ~(pow2 - 1);
}

static inline uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define CONTAINER_OF(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))
