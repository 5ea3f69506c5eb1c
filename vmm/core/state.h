/*
 * state: saved state as a flattened device tree (Devicetree Specification 0.4, ch. 5; libfdt).
 *
 * A node per component, properties named and versioned; numbers are stored big-endian as the format
 * demands, byte arrays as they are. The writer keeps the first error (sticky) so that save code
 * reads as a list; state_finish reports it. A node's properties come before its child nodes (the
 * format's rule; libfdt does not see others), nodes nest STATE_DEPTH_MAX deep at most. The reader
 * treats the blob as hostile: state_open runs the full structural check, every getter checks
 * presence and exact length and names the node. Loop thread, or any one thread at a time.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct err;

struct state_writer {
    void *buf;
    size_t bytes;
    int fdt_error; /* first libfdt error, 0 if none */
    unsigned depth;
    uint32_t has_child; /* bit per depth: a property there would be hidden behind a node */
};

#define STATE_DEPTH_MAX 16
#define STATE_BYTES_MAX (16u << 20) /* a larger state is refused by writer and reader */

int state_writer_init(struct state_writer *w, struct err *e);
void state_writer_free(struct state_writer *w);
void state_begin(struct state_writer *w, const char *node);
void state_end(struct state_writer *w);
void state_put_u32(struct state_writer *w, const char *name, uint32_t v);
void state_put_u64(struct state_writer *w, const char *name, uint64_t v);
void state_put_bytes(struct state_writer *w, const char *name, const void *p, size_t len);
void state_put_string(struct state_writer *w, const char *name, const char *s);
/* Closes the tree: *blob points into the writer and lives as long as it. */
int state_finish(struct state_writer *w, const void **blob, size_t *len, struct err *e);

struct state_node {
    const void *fdt;
    int offset;
};

int state_open(const void *blob, size_t len, struct state_node *root, struct err *e);
int state_child(const struct state_node *parent, const char *name, struct state_node *out,
                struct err *e);
int state_get_u32(const struct state_node *n, const char *name, uint32_t *out, struct err *e);
int state_get_u64(const struct state_node *n, const char *name, uint64_t *out, struct err *e);
/* Exactly `len` bytes. */
int state_get_bytes(const struct state_node *n, const char *name, void *out, size_t len,
                    struct err *e);
/* Pointer into the blob and its length, whatever that is (unaligned). */
int state_get_blob(const struct state_node *n, const char *name, const void **out, size_t *len,
                   struct err *e);
/* NUL-terminated, pointer into the blob. */
int state_get_string(const struct state_node *n, const char *name, const char **out, struct err *e);
/* Checks the node's "version" property (written with state_put_u32). */
int state_check_version(const struct state_node *n, uint32_t expected, struct err *e);
