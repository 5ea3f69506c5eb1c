/*
 * script: a fuzz input read as a list of small numbers; zeros once it is used up.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct script {
    const uint8_t *in;
    size_t left;
};

static inline uint8_t take8(struct script *s)
{
    if (s->left == 0)
        return 0;
    s->left--;
    return *s->in++;
}

static inline uint16_t take16(struct script *s)
{
    uint16_t low = take8(s);
    return (uint16_t)(low | take8(s) << 8);
}

static inline uint32_t take32(struct script *s)
{
    uint32_t low = take16(s);
    return low | (uint32_t)take16(s) << 16;
}
