/*
 * control_parse: see control_parse.h.
 */
#include "vmm/control_parse.h"

#include <stdlib.h>
#include <string.h>

#include "vmm/core/num.h"
#include "vmm/core/sock.h"

#define ID_BYTES_MAX 128
#define PATH_BYTES_MAX 4095
#define PORT_MIN 2u
#define PORT_MAX 4294967294u

const char *rpc_kind(int code)
{
    switch (code) {
    case RPC_PARSE:
        return "parse";
    case RPC_INVALID_REQUEST:
        return "invalid-request";
    case RPC_NO_METHOD:
        return "no-method";
    case RPC_BAD_PARAMS:
        return "bad-params";
    case RPC_TOO_LARGE:
        return "too-large";
    case RPC_TOO_SLOW:
        return "too-slow";
    case RPC_TOO_MANY_CLIENTS:
        return "too-many-clients";
    case RPC_TIMEOUT:
        return "timeout";
    default:
        return err_code_name((enum err_code)(-32000 - code));
    }
}

int control_id_check(const char *id, struct err *e)
{
    static const char first[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    static const char rest[] = "abcdefghijklmnopqrstuvwxyz0123456789_.-";
    size_t len = strlen(id);
    if (len >= 1 && len <= CONTROL_ID_MAX && strchr(first, id[0]) != NULL &&
        strspn(id, rest) == len)
        return 0;
    return err_set(
        e, ERR_USAGE, 0,
        "name \"%.80s\" is not 1 to %d of a-z 0-9 _ . - beginning with a letter or digit", id,
        CONTROL_ID_MAX);
}

/* All that follows returns 0 or RPC_BAD_PARAMS; `where` is "" or like "disks[1]." for messages. */
static int bad(struct err *e, const char *where, const char *name, const char *what)
{
    (void)err_set(e, ERR_USAGE, 0, "parameter %s%s %s", where, name, what);
    return RPC_BAD_PARAMS;
}

static int check_members(const json_t *obj, const char *where, const char *const *names,
                         size_t count, struct err *e)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)obj, key, value)
    {
        size_t i = 0;
        while (i < count && strcmp(key, names[i]) != 0)
            i++;
        if (i == count) {
            (void)err_set(e, ERR_USAGE, 0, "parameter %s%.80s is unknown", where, key);
            return RPC_BAD_PARAMS;
        }
    }
    return 0;
}
#define CHECK_MEMBERS(obj, where, e, ...)                                                          \
    check_members(obj, where, (const char *const[]){__VA_ARGS__},                                  \
                  sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *), e)

/* Integer lo..hi; leaves *out alone when the member is missing and not required. */
static int get_uint(const json_t *obj, const char *where, const char *name, bool required,
                    uint64_t lo, uint64_t hi, uint64_t *out, struct err *e)
{
    const json_t *v = json_object_get(obj, name);
    if (v == NULL)
        return required ? bad(e, where, name, "is missing") : 0;
    if (!json_is_integer(v))
        return bad(e, where, name, "is not an integer");
    json_int_t n = json_integer_value(v);
    if (n < 0 || (uint64_t)n < lo || (uint64_t)n > hi) {
        (void)err_set(e, ERR_USAGE, 0, "parameter %s%s is %lld, not %llu to %llu", where, name,
                      (long long)n, (unsigned long long)lo, (unsigned long long)hi);
        return RPC_BAD_PARAMS;
    }
    *out = (uint64_t)n;
    return 0;
}

static int get_bool(const json_t *obj, const char *where, const char *name, bool *out,
                    struct err *e)
{
    const json_t *v = json_object_get(obj, name);
    if (v == NULL)
        return 0;
    if (!json_is_boolean(v))
        return bad(e, where, name, "is not true or false");
    *out = json_is_true(v);
    return 0;
}

static int get_string(const json_t *obj, const char *where, const char *name, bool required,
                      size_t max, const char **out, struct err *e)
{
    const json_t *v = json_object_get(obj, name);
    if (v == NULL)
        return required ? bad(e, where, name, "is missing") : 0;
    if (!json_is_string(v))
        return bad(e, where, name, "is not a string");
    size_t len = json_string_length(v);
    if (len > max) {
        (void)err_set(e, ERR_USAGE, 0, "parameter %s%s has %zu bytes, at most %zu are taken", where,
                      name, len, max);
        return RPC_BAD_PARAMS;
    }
    *out = json_string_value(v);
    return 0;
}

static int get_path(const json_t *obj, const char *where, const char *name, bool required,
                    const char **out, struct err *e)
{
    const char *s = NULL;
    int rc = get_string(obj, where, name, required, PATH_BYTES_MAX, &s, e);
    if (rc < 0 || s == NULL)
        return rc;
    if (s[0] != '/')
        return bad(e, where, name, "is not an absolute path");
    *out = s;
    return 0;
}

/* *out stays NULL when the member is missing. */
static int get_array(const json_t *obj, const char *name, size_t min, size_t max,
                     const json_t **out, struct err *e)
{
    const json_t *v = json_object_get(obj, name);
    if (v == NULL)
        return 0;
    if (!json_is_array(v))
        return bad(e, "", name, "is not an array");
    size_t n = json_array_size(v);
    if (n < min || n > max) {
        (void)err_set(e, ERR_USAGE, 0, "parameter %s has %zu members, not %zu to %zu", name, n, min,
                      max);
        return RPC_BAD_PARAMS;
    }
    *out = v;
    return 0;
}

static int parse_disk(const json_t *v, size_t index, struct control_disk *out, struct err *e)
{
    char where[32];
    (void)snprintf(where, sizeof where, "disks[%zu]", index);
    if (!json_is_object(v))
        return bad(e, where, "", "is not an object");
    (void)snprintf(where, sizeof where, "disks[%zu].", index);
    int rc = CHECK_MEMBERS(v, where, e, "path", "read_only", "overlay_max_bytes");
    if (rc == 0)
        rc = get_path(v, where, "path", true, &out->path, e);
    if (rc == 0)
        rc = get_bool(v, where, "read_only", &out->read_only, e);
    if (rc == 0)
        rc = get_uint(v, where, "overlay_max_bytes", false, 0, INT64_MAX, &out->overlay_max_bytes,
                      e);
    return rc;
}

static int parse_grants(const json_t *list, struct control_boot *p, struct err *e)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t n = json_is_integer(v) ? json_integer_value(v) : -1;
        if (n < (json_int_t)PORT_MIN || n > (json_int_t)PORT_MAX) {
            (void)err_set(e, ERR_USAGE, 0, "parameter grants[%zu] is not a port from %u to %u", i,
                          PORT_MIN, PORT_MAX);
            return RPC_BAD_PARAMS;
        }
        p->grants[p->grant_count++] = (uint32_t)n;
    }
    return 0;
}

static int parse_boot(const json_t *o, struct control_call *call, struct err *e)
{
    struct control_boot *p = &call->p.boot;
    *p = (struct control_boot){.cmdline = "", .cpus = 1};
    uint64_t cpus = 1;
    const json_t *disks = NULL, *grants = NULL;
    int rc = CHECK_MEMBERS(o, "", e, "kernel", "initrd", "cmdline", "memory_mib", "cpus", "disks",
                           "grants", "paused");
    if (rc == 0)
        rc = get_path(o, "", "kernel", true, &p->kernel, e);
    if (rc == 0)
        rc = get_path(o, "", "initrd", false, &p->initrd, e);
    if (rc == 0)
        rc = get_string(o, "", "cmdline", false, CONTROL_CMDLINE_MAX, &p->cmdline, e);
    if (rc == 0)
        rc = get_uint(o, "", "memory_mib", true, 1, CONTROL_MEMORY_MIB_MAX, &p->memory_mib, e);
    if (rc == 0)
        rc = get_uint(o, "", "cpus", false, 1, CONTROL_CPUS_MAX, &cpus, e);
    if (rc == 0)
        rc = get_bool(o, "", "paused", &p->paused, e);
    if (rc == 0)
        rc = get_array(o, "disks", 0, CONTROL_DISKS_MAX, &disks, e);
    if (rc == 0)
        rc = get_array(o, "grants", 0, CONTROL_GRANTS_MAX, &grants, e);
    p->cpus = (unsigned)cpus;
    for (size_t i = 0; rc == 0 && i < json_array_size(disks); i++)
        rc = parse_disk(json_array_get(disks, i), i, &p->disks[p->disk_count++], e);
    if (rc == 0)
        rc = parse_grants(grants, p, e);
    return rc;
}

static int parse_child(const json_t *v, size_t index, struct control_child *out, struct err *e)
{
    char where[32];
    struct err why = {0};
    (void)snprintf(where, sizeof where, "children[%zu]", index);
    if (!json_is_object(v))
        return bad(e, where, "", "is not an object");
    (void)snprintf(where, sizeof where, "children[%zu].", index);
    int rc = CHECK_MEMBERS(v, where, e, "id", "control", "vsock");
    if (rc == 0)
        rc = get_string(v, where, "id", true, CONTROL_ID_MAX, &out->id, e);
    if (rc == 0)
        rc = get_path(v, where, "control", true, &out->control, e);
    if (rc == 0)
        rc = get_path(v, where, "vsock", true, &out->vsock, e);
    if (rc == 0 &&
        (control_id_check(out->id, &why) < 0 || sock_path_check(out->control, &why) < 0 ||
         sock_path_check(out->vsock, &why) < 0)) {
        (void)err_set(e, ERR_USAGE, 0, "parameter children[%zu]: %s", index, why.text);
        return RPC_BAD_PARAMS;
    }
    return rc;
}

/* Two children of one name would fight for one socket. */
static int check_distinct(const struct control_child *c, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < i; k++) {
            if (strcmp(c[i].id, c[k].id) == 0 || strcmp(c[i].control, c[k].control) == 0 ||
                strcmp(c[i].vsock, c[k].vsock) == 0) {
                (void)err_set(e, ERR_USAGE, 0, "parameter children[%zu] repeats children[%zu]", i,
                              k);
                return RPC_BAD_PARAMS;
            }
        }
        if (strcmp(c[i].control, c[i].vsock) == 0)
            return bad(e, "", "children", "has one path for both sockets");
    }
    return 0;
}

static int parse_children(const json_t *list, struct control_call *call, struct err *e)
{
    size_t n = json_array_size(list);
    call->children = calloc(n, sizeof *call->children);
    if (call->children == NULL)
        return bad(e, "", "children", "does not fit into memory");
    for (size_t i = 0; i < n; i++) {
        int rc = parse_child(json_array_get(list, i), i, &call->children[i], e);
        if (rc < 0)
            return rc;
    }
    call->p.fork.children = call->children;
    call->p.fork.count = (unsigned)n;
    return check_distinct(call->children, n, e);
}

/* A host name as the kernel and DNS take it: letters, digits, '-', '.'. */
static int check_host_name(const char *s, struct err *e)
{
    static const char set[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.";
    if (s == NULL || (s[0] != '\0' && s[0] != '-' && strspn(s, set) == strlen(s)))
        return 0;
    return bad(e, "", "host_name", "is not a host name (letters, digits, - and .)");
}

static int parse_fork(const json_t *o, struct control_call *call, struct err *e)
{
    struct control_fork *p = &call->p.fork;
    *p = (struct control_fork){0};
    uint64_t count = 0;
    const json_t *children = NULL;
    int rc = CHECK_MEMBERS(o, "", e, "count", "children", "host_name");
    if (rc == 0)
        rc = get_uint(o, "", "count", false, 1, CONTROL_CHILDREN_MAX, &count, e);
    if (rc == 0)
        rc = get_array(o, "children", 1, CONTROL_CHILDREN_MAX, &children, e);
    if (rc == 0)
        rc = get_string(o, "", "host_name", false, CONTROL_HOST_NAME_MAX, &p->host_name, e);
    if (rc == 0)
        rc = check_host_name(p->host_name, e);
    if (rc < 0)
        return rc;
    if ((count == 0) == (children == NULL))
        return bad(e, "", "count", count == 0 ? "or children is missing" : "excludes children");
    p->count = (unsigned)count;
    return children != NULL ? parse_children(children, call, e) : 0;
}

static int parse_snapshot(const json_t *o, struct control_call *call, struct err *e)
{
    call->p.snapshot = (struct control_snapshot){0};
    int rc = CHECK_MEMBERS(o, "", e, "dir");
    return rc < 0 ? rc : get_path(o, "", "dir", true, &call->p.snapshot.dir, e);
}

static int parse_stop(const json_t *o, struct control_call *call, struct err *e)
{
    uint64_t grace = 0;
    int rc = CHECK_MEMBERS(o, "", e, "grace_ms");
    if (rc == 0)
        rc = get_uint(o, "", "grace_ms", false, 0, CONTROL_GRACE_MS_MAX, &grace, e);
    call->p.stop = (struct control_stop){.grace_ms = (uint32_t)grace};
    return rc;
}

static int parse_console(const json_t *o, struct control_call *call, struct err *e)
{
    uint64_t bytes = 4096;
    int rc = CHECK_MEMBERS(o, "", e, "bytes");
    if (rc == 0)
        rc = get_uint(o, "", "bytes", false, 0, CONTROL_CONSOLE_MAX, &bytes, e);
    call->p.console_bytes = (uint32_t)bytes;
    return rc;
}

static int parse_wait(const json_t *o, struct control_call *call, struct err *e)
{
    static const char *const words[] = {[CONTROL_WAIT_READY] = "ready",
                                        [CONTROL_WAIT_RUNNING] = "running",
                                        [CONTROL_WAIT_PAUSED] = "paused",
                                        [CONTROL_WAIT_ENDED] = "ended"};
    uint64_t timeout = CONTROL_WAIT_MS_DEFAULT;
    const char *what = NULL;
    int rc = CHECK_MEMBERS(o, "", e, "for", "timeout_ms");
    if (rc == 0)
        rc = get_string(o, "", "for", true, 16, &what, e);
    if (rc == 0)
        rc = get_uint(o, "", "timeout_ms", false, 0, CONTROL_WAIT_MS_MAX, &timeout, e);
    if (rc < 0)
        return rc;
    call->p.wait.timeout_ms = (uint32_t)timeout;
    for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
        if (strcmp(what, words[i]) == 0) {
            call->p.wait.what = (enum control_wait_for)i;
            return 0;
        }
    }
    return bad(e, "", "for", "is not ready, running, paused or ended");
}

static int parse_nothing(const json_t *o, struct control_call *call, struct err *e)
{
    return check_members(o, "", NULL, 0, e);
}

static const struct method {
    const char *name;
    int (*parse)(const json_t *o, struct control_call *call, struct err *e);
} methods[] = {
    [CONTROL_BOOT] = {"boot", parse_boot},
    [CONTROL_STATUS] = {"status", parse_nothing},
    [CONTROL_CONSOLE] = {"console", parse_console},
    [CONTROL_PAUSE] = {"pause", parse_nothing},
    [CONTROL_RESUME] = {"resume", parse_nothing},
    [CONTROL_SNAPSHOT] = {"snapshot", parse_snapshot},
    [CONTROL_FORK] = {"fork", parse_fork},
    [CONTROL_STOP] = {"stop", parse_stop},
    [CONTROL_WAIT] = {"wait", parse_wait},
    [CONTROL_QUIT] = {"quit", parse_nothing},
};

static int invalid(struct err *e, const char *what)
{
    (void)err_set(e, ERR_USAGE, 0, "request %s", what);
    return RPC_INVALID_REQUEST;
}

static int load(const char *line, size_t len, struct control_call *call, struct err *e)
{
    json_error_t je;
    call->root = json_loadb(line, len, JSON_REJECT_DUPLICATES, &je);
    if (call->root != NULL)
        return 0;
    enum json_error_code code = json_error_code(&je);
    if (code == json_error_duplicate_key || code == json_error_numeric_overflow) {
        (void)err_set(e, ERR_USAGE, 0, "request: %s", je.text);
        return RPC_INVALID_REQUEST;
    }
    (void)err_set(e, ERR_USAGE, 0, "the line is not JSON: %s", je.text);
    return RPC_PARSE;
}

static int parse_envelope(struct control_call *call, const char **method, json_t **params,
                          struct err *e)
{
    if (!json_is_object(call->root))
        return invalid(e, "is not an object (batches are not served)");
    json_t *id = json_object_get(call->root, "id");
    if (id == NULL)
        return invalid(e, "has no id");
    if (!json_is_integer(id) && !(json_is_string(id) && json_string_length(id) <= ID_BYTES_MAX))
        return invalid(e, "id is not an integer or a string of at most 128 bytes");
    call->id = json_incref(id);
    const char *key;
    json_t *v;
    json_object_foreach(call->root, key, v)
    {
        if (strcmp(key, "jsonrpc") != 0 && strcmp(key, "id") != 0 && strcmp(key, "method") != 0 &&
            strcmp(key, "params") != 0) {
            (void)err_set(e, ERR_USAGE, 0, "request member %.80s is unknown", key);
            return RPC_INVALID_REQUEST;
        }
    }
    const char *version = json_string_value(json_object_get(call->root, "jsonrpc"));
    if (version == NULL || strcmp(version, "2.0") != 0)
        return invalid(e, "member jsonrpc is not \"2.0\"");
    *method = json_string_value(json_object_get(call->root, "method"));
    if (*method == NULL)
        return invalid(e, "member method is missing or not a string");
    *params = json_object_get(call->root, "params");
    if (*params != NULL && !json_is_object(*params))
        return invalid(e, "member params is not an object");
    return 0;
}

int control_parse(const char *line, size_t len, struct control_call *call, struct err *e)
{
    *call = (struct control_call){0};
    const char *name = NULL;
    json_t *params = NULL;
    int rc = load(line, len, call, e);
    if (rc == 0)
        rc = parse_envelope(call, &name, &params, e);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < ARRAY_SIZE(methods); i++) {
        if (strcmp(name, methods[i].name) != 0)
            continue;
        call->method = (enum control_method)i;
        /* A NULL params reads as an object without members everywhere above. */
        rc = methods[i].parse(params, call, e);
        return rc < 0 ? err_wrap(e, rc, "%s", name) : 0;
    }
    (void)err_set(e, ERR_USAGE, 0, "there is no method \"%.80s\"", name);
    return RPC_NO_METHOD;
}

void control_call_free(struct control_call *call)
{
    free(call->children);
    json_decref(call->id);
    json_decref(call->root);
    *call = (struct control_call){0};
}
