/*
 * state: see state.h.
 */
#include "vmm/core/state.h"

#include <errno.h>
#include <libfdt.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "vmm/core/err.h"

#define STATE_FIRST_BYTES (64u << 10)

static void note(struct state_writer *w, int rc)
{
    if (rc < 0 && w->fdt_error == 0)
        w->fdt_error = rc;
}

int state_writer_init(struct state_writer *w, struct err *e)
{
    *w = (struct state_writer){.buf = malloc(STATE_FIRST_BYTES), .bytes = STATE_FIRST_BYTES};
    if (w->buf == NULL)
        return err_set(e, ERR_HOST, ENOMEM, "state buffer");
    note(w, fdt_create(w->buf, (int)w->bytes));
    note(w, fdt_finish_reservemap(w->buf));
    state_begin(w, "");
    return 0;
}

void state_writer_free(struct state_writer *w)
{
    free(w->buf);
    *w = (struct state_writer){0};
}

/* Doubles the buffer; false (and a sticky error) at the limit. */
static bool grow(struct state_writer *w)
{
    size_t bytes = w->bytes * 2;
    void *buf = bytes <= STATE_BYTES_MAX ? realloc(w->buf, bytes) : NULL;
    if (buf == NULL) {
        note(w, -FDT_ERR_NOSPACE);
        return false;
    }
    w->buf = buf;
    w->bytes = bytes;
    int rc = fdt_resize(buf, buf, (int)bytes);
    note(w, rc);
    return rc == 0;
}

/* Runs one libfdt writing step again with a larger buffer for as long as it is out of space. */
#define STEP(w, call)                                                                              \
    do {                                                                                           \
        int rc_;                                                                                   \
        if ((w)->fdt_error != 0)                                                                   \
            break;                                                                                 \
        do                                                                                         \
            rc_ = (call);                                                                          \
        while (rc_ == -FDT_ERR_NOSPACE && grow(w));                                                \
        note(w, rc_);                                                                              \
    } while (0)

void state_begin(struct state_writer *w, const char *node)
{
    if (w->depth >= STATE_DEPTH_MAX)
        note(w, -FDT_ERR_BADSTRUCTURE);
    w->has_child |= 1u << w->depth;
    w->depth++;
    w->has_child &= ~(1u << w->depth);
    STEP(w, fdt_begin_node(w->buf, node));
}

void state_end(struct state_writer *w)
{
    w->depth--;
    STEP(w, fdt_end_node(w->buf));
}

static void check_place(struct state_writer *w)
{
    if ((w->has_child & (1u << w->depth)) != 0)
        note(w, -FDT_ERR_BADLAYOUT);
}

void state_put_u32(struct state_writer *w, const char *name, uint32_t v)
{
    check_place(w);
    STEP(w, fdt_property_u32(w->buf, name, v));
}

void state_put_u64(struct state_writer *w, const char *name, uint64_t v)
{
    check_place(w);
    STEP(w, fdt_property_u64(w->buf, name, v));
}

void state_put_bytes(struct state_writer *w, const char *name, const void *p, size_t len)
{
    if (len > STATE_BYTES_MAX) {
        note(w, -FDT_ERR_NOSPACE);
        return;
    }
    check_place(w);
    STEP(w, fdt_property(w->buf, name, p, (int)len));
}

void state_put_string(struct state_writer *w, const char *name, const char *s)
{
    state_put_bytes(w, name, s, strlen(s) + 1);
}

int state_finish(struct state_writer *w, const void **blob, size_t *len, struct err *e)
{
    state_end(w);
    STEP(w, fdt_finish(w->buf));
    if (w->fdt_error != 0)
        return err_set(e, ERR_LIMIT, 0, "write state: %s", fdt_strerror(w->fdt_error));
    *blob = w->buf;
    *len = fdt_totalsize(w->buf);
    return 0;
}

int state_open(const void *blob, size_t len, struct state_node *root, struct err *e)
{
    if (len > STATE_BYTES_MAX)
        return err_set(e, ERR_BAD_IMAGE, 0, "state of %zu bytes, expected at most %u", len,
                       STATE_BYTES_MAX);
    int rc = fdt_check_full(blob, len);
    if (rc != 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "state of %zu bytes is not a sound device tree: %s",
                       len, fdt_strerror(rc));
    *root = (struct state_node){.fdt = blob, .offset = 0};
    return 0;
}

static const char *node_name(const struct state_node *n)
{
    const char *name = fdt_get_name(n->fdt, n->offset, NULL);
    return name == NULL || name[0] == '\0' ? "/" : name;
}

int state_child(const struct state_node *parent, const char *name, struct state_node *out,
                struct err *e)
{
    int off = fdt_subnode_offset(parent->fdt, parent->offset, name);
    if (off < 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "state node %s has no child %s", node_name(parent),
                       name);
    *out = (struct state_node){.fdt = parent->fdt, .offset = off};
    return 0;
}

int state_get_blob(const struct state_node *n, const char *name, const void **out, size_t *len,
                   struct err *e)
{
    int got = 0;
    const void *p = fdt_getprop(n->fdt, n->offset, name, &got);
    if (p == NULL || got < 0)
        return err_set(e, ERR_BAD_IMAGE, 0, "state node %s has no property %s", node_name(n), name);
    *out = p;
    *len = (size_t)got;
    return 0;
}

int state_get_bytes(const struct state_node *n, const char *name, void *out, size_t len,
                    struct err *e)
{
    const void *p;
    size_t got;
    int rc = state_get_blob(n, name, &p, &got, e);
    if (rc < 0)
        return rc;
    if (got != len)
        return err_set(e, ERR_BAD_IMAGE, 0, "state %s/%s is %zu bytes, expected %zu", node_name(n),
                       name, got, len);
    memcpy(out, p, len);
    return 0;
}

int state_get_u32(const struct state_node *n, const char *name, uint32_t *out, struct err *e)
{
    fdt32_t v;
    int rc = state_get_bytes(n, name, &v, sizeof v, e);
    if (rc == 0)
        *out = fdt32_to_cpu(v);
    return rc;
}

int state_get_u64(const struct state_node *n, const char *name, uint64_t *out, struct err *e)
{
    fdt64_t v;
    int rc = state_get_bytes(n, name, &v, sizeof v, e);
    if (rc == 0)
        *out = fdt64_to_cpu(v);
    return rc;
}

int state_get_string(const struct state_node *n, const char *name, const char **out, struct err *e)
{
    const void *p;
    size_t len;
    int rc = state_get_blob(n, name, &p, &len, e);
    if (rc < 0)
        return rc;
    const char *s = p;
    if (len == 0 || memchr(s, '\0', len) != s + len - 1)
        return err_set(e, ERR_BAD_IMAGE, 0, "state %s/%s is not a string", node_name(n), name);
    *out = s;
    return 0;
}

int state_check_version(const struct state_node *n, uint32_t expected, struct err *e)
{
    uint32_t found;
    int rc = state_get_u32(n, "version", &found, e);
    if (rc < 0)
        return rc;
    if (found != expected)
        return err_set(e, ERR_MISMATCH, 0, "state node %s has version %u, this build reads %u",
                       node_name(n), found, expected);
    return 0;
}
