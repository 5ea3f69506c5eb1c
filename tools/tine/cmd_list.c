/*
 * cmd_list: tine ps and tine tree: what machines there are, and who was forked from whom.
 */
#include <errno.h>
#include <langinfo.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/tine/cli.h"
#include "tools/tine/machines.h"
#include "tools/tine/rpc.h"
#include "vmm/core/err.h"

#define STATUS_MS 2000

struct row {
    machine_id id;  /* from the socket's name, not from what the VMM says */
    json_t *status; /* NULL: it did not answer */
    char trouble[200];
    bool printed; /* tree */
};

struct rows {
    struct row *row;
    size_t count;
};

static void rows_free(struct rows *r)
{
    for (size_t i = 0; i < r->count; i++)
        json_decref(r->row[i].status);
    free(r->row);
}

/* True if there is (or seems to be) a machine: one that died meanwhile is no row. */
static bool ask_status(const struct machines *m, struct row *row)
{
    struct rpc r;
    struct err e = {0};
    char path[SOCK_PATH_MAX + 1];
    int rc = machines_path(m, row->id, ".sock", path, &e);
    if (rc == 0)
        rc = rpc_connect(&r, path, &e);
    if (rc == -ENOENT || rc == -ECONNREFUSED)
        return false;
    if (rc == 0) {
        rc = rpc_call(&r, "status", NULL, STATUS_MS, &row->status, &e);
        rpc_close(&r);
    }
    if (rc == -ECONNRESET)
        return false;
    if (rc < 0)
        (void)snprintf(row->trouble, sizeof row->trouble, "%s", e.text);
    return true;
}

static int collect(struct rows *out, struct err *e)
{
    struct machines m;
    machine_id *ids = NULL;
    size_t n = 0;
    int rc = machines_open(&m, e);
    if (rc < 0)
        return rc;
    machines_sweep(&m);
    rc = machines_list(&m, &ids, &n, e);
    if (rc < 0)
        return rc;
    struct rows r = {.row = calloc(n + 1, sizeof *r.row)};
    if (r.row == NULL) {
        free(ids);
        return err_set(e, ERR_HOST, ENOMEM, "list of machines");
    }
    for (size_t i = 0; i < n; i++) {
        struct row *row = &r.row[r.count];
        *row = (struct row){0};
        memcpy(row->id, ids[i], sizeof row->id);
        if (ask_status(&m, row))
            r.count++;
    }
    free(ids);
    *out = r;
    return 0;
}

/* A word from a VMM is printed only if it is one. */
static const char *word(const struct row *row, const char *member, const char *otherwise)
{
    const char *s = json_string_value(json_object_get(row->status, member));
    return s != NULL && control_id_check(s, NULL) == 0 ? s : otherwise;
}

static json_int_t number(const struct row *row, const char *member)
{
    return json_integer_value(json_object_get(row->status, member));
}

static json_t *row_json(const struct row *row)
{
    if (row->status == NULL)
        return json_pack("{s:s, s:n, s:s}", "id", row->id, "state", "error", row->trouble);
    json_t *o = json_copy(row->status);
    (void)json_object_set_new(o, "id", json_string(row->id));
    return o;
}

static const char *uptime(const struct row *row, char buf[32])
{
    json_int_t s = number(row, "uptime_us") / 1000000;
    if (s < 120)
        (void)snprintf(buf, 32, "%llds", (long long)s);
    else if (s < 7200)
        (void)snprintf(buf, 32, "%lldm", (long long)s / 60);
    else
        (void)snprintf(buf, 32, "%lldh", (long long)s / 3600);
    return buf;
}

static void print_rows(const struct rows *r)
{
    int width = 2;
    for (size_t i = 0; i < r->count; i++) {
        int len = (int)strlen(r->row[i].id);
        width = len > width ? len : width;
    }
    (void)printf("%-*s  %-8s  %-5s  %7s  %4s  %6s  %7s  %s\n", width, "ID", "STATE", "READY",
                 "MEM MIB", "CPUS", "UP", "PID", "PARENT");
    for (size_t i = 0; i < r->count; i++) {
        const struct row *row = &r->row[i];
        char up[32];
        if (row->status == NULL) {
            (void)printf("%-*s  %s\n", width, row->id, row->trouble);
            continue;
        }
        (void)printf("%-*s  %-8s  %-5s  %7lld  %4lld  %6s  %7lld  %s\n", width, row->id,
                     word(row, "state", "?"),
                     json_is_true(json_object_get(row->status, "ready")) ? "yes" : "no",
                     (long long)number(row, "memory_mib"), (long long)number(row, "cpus"),
                     uptime(row, up), (long long)number(row, "pid"), word(row, "parent", "-"));
    }
}

/* Common begin of both; CLI_OK, or the exit status. */
static int begin(struct cli *c, int argc, char **argv, struct rows *rows)
{
    static const struct option options[] = {CLI_OPTIONS, {0}};
    struct err e = {0};
    if (cli_option(c, argc, argv, "", options) == -2 || !cli_arguments(c, argc, 0, 0, "none"))
        return cli_usage_status(c);
    return collect(rows, &e) < 0 ? cli_fail(c, &e) : CLI_OK;
}

static int run_ps(struct cli *c, int argc, char **argv)
{
    struct rows rows = {0};
    int rc = begin(c, argc, argv, &rows);
    if (rc != CLI_OK)
        return rc;
    if (c->json) {
        json_t *list = json_array();
        for (size_t i = 0; i < rows.count; i++)
            (void)json_array_append_new(list, row_json(&rows.row[i]));
        rc = cli_print_json(c, json_pack("{s:o}", "machines", list));
    } else {
        print_rows(&rows);
    }
    rows_free(&rows);
    return rc;
}

const struct cli_command cmd_ps = {
    .name = "ps",
    .summary = "list the machines",
    .run = run_ps,
    .help = "usage: tine ps [--json]\n"
            "\n"
            "Lists the machines in the state folder and removes the sockets of dead ones.\n"
            "\n"
            "  tine ps\n"
            "  tine ps --json | jq -r '.machines[].id'\n",
};

struct drawing {
    const struct rows *rows;
    const char *branch, *last, *bar, *gap;
};

/*
 * Both sides must say so: a new machine may have taken the name of a dead parent. Of a parent that
 * does not answer, the child's word is enough.
 */
static bool is_child_of(const struct row *child, const struct row *parent)
{
    size_t i;
    const json_t *known;
    if (strcmp(word(child, "parent", ""), parent->id) != 0 || child == parent)
        return false;
    json_array_foreach(json_object_get(parent->status, "children"), i, known)
    {
        const char *id = json_string_value(json_object_get(known, "id"));
        if (id != NULL && strcmp(id, child->id) == 0)
            return true;
    }
    return parent->status == NULL;
}

static bool has_parent(const struct rows *r, const struct row *child)
{
    for (size_t i = 0; i < r->count; i++) {
        if (is_child_of(child, &r->row[i]))
            return true;
    }
    return false;
}

static void print_node(const struct row *row, bool parent_shown)
{
    const char *parent = word(row, "parent", NULL);
    (void)printf("%s", row->id);
    if (row->status == NULL)
        (void)printf("  (%s)", row->trouble);
    else
        (void)printf("  %s", word(row, "state", "?"));
    if (!parent_shown && parent != NULL)
        (void)printf("  (forked from %s, which is gone)", parent);
    (void)putchar('\n');
}

/* `prefix` grows by one piece a level. A row is drawn once, so a VMM that lies cannot make a loop.
 */
static void draw(const struct drawing *d, struct row *row, const char *prefix)
{
    size_t left = 0;
    for (size_t i = 0; i < d->rows->count; i++)
        left += !d->rows->row[i].printed && is_child_of(&d->rows->row[i], row);
    for (size_t i = 0; i < d->rows->count && left > 0; i++) {
        struct row *child = &d->rows->row[i];
        char deeper[1024];
        if (child->printed || !is_child_of(child, row))
            continue;
        left--;
        child->printed = true;
        (void)printf("%s%s", prefix, left > 0 ? d->branch : d->last);
        print_node(child, true);
        (void)snprintf(deeper, sizeof deeper, "%s%s", prefix, left > 0 ? d->bar : d->gap);
        draw(d, child, deeper);
    }
}

static json_t *tree_json(const struct rows *r, struct row *row)
{
    json_t *children = json_array();
    row->printed = true;
    for (size_t i = 0; i < r->count; i++) {
        struct row *child = &r->row[i];
        if (!child->printed && is_child_of(child, row))
            (void)json_array_append_new(children, tree_json(r, child));
    }
    return json_pack("{s:s, s:s?, s:s?, s:o}", "id", row->id, "state", word(row, "state", NULL),
                     "parent", word(row, "parent", NULL), "children", children);
}

static int print_tree(const struct cli *c, struct rows *rows)
{
    bool utf8 = setlocale(LC_CTYPE, "") != NULL && strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
    const struct drawing d = {.rows = rows,
                              .branch = utf8 ? "├─ " : "|- ",
                              .last = utf8 ? "└─ " : "`- ",
                              .bar = utf8 ? "│  " : "|  ",
                              .gap = "   "};
    json_t *list = json_array();
    /* Roots first; then whatever no root leads to. */
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < rows->count; i++) {
            struct row *row = &rows->row[i];
            if (row->printed || (pass == 0 && has_parent(rows, row)))
                continue;
            if (c->json) {
                (void)json_array_append_new(list, tree_json(rows, row));
                continue;
            }
            row->printed = true;
            print_node(row, false);
            draw(&d, row, "");
        }
    }
    if (c->json)
        return cli_print_json(c, json_pack("{s:o}", "machines", list));
    json_decref(list);
    return CLI_OK;
}

static int run_tree(struct cli *c, int argc, char **argv)
{
    struct rows rows = {0};
    int rc = begin(c, argc, argv, &rows);
    if (rc != CLI_OK)
        return rc;
    rc = print_tree(c, &rows);
    rows_free(&rows);
    return rc;
}

const struct cli_command cmd_tree = {
    .name = "tree",
    .summary = "draw who was forked from whom",
    .run = run_tree,
    .help = "usage: tine tree [--json]\n"
            "\n"
            "Draws the running machines as a tree of forks.\n"
            "\n"
            "  tine fork -n 3 a && tine fork a-1 && tine tree\n",
};
