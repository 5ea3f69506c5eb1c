/*
 * boot_aml: writes the little AML (ACPI 6.4, chapter 20) that our DSDT needs, front to back.
 *
 * A block (scope, device, package, buffer) is opened, filled and closed; closing it puts its length
 * in front, in the shortest form. Running out of room is remembered and asked for once at the end.
 * Pure computation, any thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct aml {
    uint8_t *buf;
    size_t cap, len;
    bool overflowed; /* nothing was written past cap; the result is useless */
};

/* Each open_ returns the mark its aml_close needs. Blocks close in the reverse order. */
size_t aml_open_scope(struct aml *a, const char path[5]); /* a root path: backslash and 4 letters */
size_t aml_open_device(struct aml *a, const char name[4]);
/* Name(name, ResourceTemplate): close it with aml_close_resources. */
size_t aml_open_resources(struct aml *a, const char name[4]);
size_t aml_open_package(struct aml *a, const char name[4], uint8_t elements);
void aml_close(struct aml *a, size_t mark);
void aml_close_resources(struct aml *a, size_t mark);

void aml_integer(struct aml *a, uint32_t value);
void aml_name_integer(struct aml *a, const char name[4], uint32_t value);
void aml_name_string(struct aml *a, const char name[4], const char *text);
/* Name(name, EisaId(id)) with an id like "PNP0501". */
void aml_name_eisa(struct aml *a, const char name[4], const char id[7]);

/* Resource descriptors (ACPI 6.4, 6.4.2 and 6.4.3). */
void aml_memory32(struct aml *a, uint32_t base, uint32_t bytes);
void aml_io(struct aml *a, uint16_t base, uint8_t bytes);
void aml_interrupt_edge_high(struct aml *a, uint32_t gsi);
