/*
 * machines: see machines.h.
 */
#include "tools/tine/machines.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tools/tine/rpc.h"
#include "vmm/core/err.h"
#include "vmm/core/num.h"

#define LOG_KEEP_S (24 * 3600) /* logs of machines that ended by themselves */

static bool is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Where the folder is to be; *parents: missing folders above it may be made. */
static int choose_dir(char *out, size_t size, bool *parents, struct err *e)
{
    const char *state = getenv("TINE_STATE");
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char user[64];
    int n;
    (void)snprintf(user, sizeof user, "/run/user/%u", (unsigned)geteuid());
    *parents = false;
    if (state != NULL && state[0] != '\0') {
        *parents = true;
        if (state[0] == '/') {
            n = snprintf(out, size, "%s", state);
        } else {
            char cwd[PATH_MAX];
            if (getcwd(cwd, sizeof cwd) == NULL)
                return err_sys(e, "working folder");
            n = snprintf(out, size, "%s/%s", cwd, state);
        }
    } else if (runtime != NULL && runtime[0] == '/' && is_dir(runtime)) {
        n = snprintf(out, size, "%s/tine", runtime);
    } else if (is_dir(user)) {
        n = snprintf(out, size, "%s/tine", user);
    } else {
        n = snprintf(out, size, "/tmp/tine-%u", (unsigned)geteuid());
    }
    if (n < 0 || (size_t)n >= size)
        return err_set(e, ERR_LIMIT, ENAMETOOLONG, "state folder");
    while (n > 1 && out[n - 1] == '/')
        out[--n] = '\0';
    return 0;
}

static int make_parents(const char *path, struct err *e)
{
    char buf[PATH_MAX];
    (void)snprintf(buf, sizeof buf, "%s", path);
    for (char *p = strchr(buf + 1, '/'); p != NULL; p = strchr(p + 1, '/')) {
        *p = '\0';
        if (mkdir(buf, 0700) < 0 && errno != EEXIST)
            return err_sys(e, "make folder %s", buf);
        *p = '/';
    }
    return 0;
}

static int check_dir(const char *path, struct err *e)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return err_sys(e, "state folder %s", path);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, ERR_USAGE, 0, "state folder %s is not a folder: set TINE_STATE", path);
    if (st.st_uid != geteuid())
        return err_set(e, ERR_USAGE, 0,
                       "state folder %s belongs to uid %u, expected %u: set TINE_STATE to another",
                       path, (unsigned)st.st_uid, (unsigned)geteuid());
    if ((st.st_mode & 077) != 0)
        return err_set(
            e, ERR_USAGE, 0,
            "state folder %s has mode %03o, expected 700: chmod 700 it or set TINE_STATE", path,
            (unsigned)st.st_mode & 0777u);
    return 0;
}

int machines_open(struct machines *m, struct err *e)
{
    char path[PATH_MAX];
    bool parents;
    int rc = choose_dir(path, sizeof path, &parents, e);
    if (rc < 0)
        return rc;
    if (strlen(path) > SOCK_PATH_MAX)
        return err_set(e, ERR_LIMIT, 0,
                       "state folder %s has %zu bytes, at most %d fit a socket address: set "
                       "TINE_STATE to a shorter one",
                       path, strlen(path), SOCK_PATH_MAX);
    if (parents)
        rc = make_parents(path, e);
    if (rc < 0)
        return rc;
    mode_t old = umask(077);
    int made = mkdir(path, 0700);
    int errnum = errno;
    (void)umask(old);
    if (made < 0 && errnum != EEXIST)
        return err_set(e, ERR_HOST, errnum, "make state folder %s", path);
    rc = check_dir(path, e);
    if (rc < 0)
        return rc;
    (void)snprintf(m->dir, sizeof m->dir, "%s", path);
    return 0;
}

int machines_path(const struct machines *m, const char *id, const char *suffix,
                  char out[SOCK_PATH_MAX + 1], struct err *e)
{
    char path[SOCK_PATH_MAX + CONTROL_ID_MAX + 64];
    int rc = control_id_check(id, e);
    if (rc < 0)
        return rc;
    (void)snprintf(path, sizeof path, "%s/%s%s", m->dir, id, suffix);
    rc = sock_path_check(path, e);
    if (rc < 0)
        return rc;
    (void)snprintf(out, SOCK_PATH_MAX + 1, "%s", path);
    return 0;
}

int machines_check_new(const struct machines *m, const char *id, const uint32_t *grants,
                       size_t grant_count, struct err *e)
{
    char path[SOCK_PATH_MAX + 1], suffix[32];
    for (size_t i = 0; i < grant_count; i++) {
        (void)snprintf(suffix, sizeof suffix, ".vsock_%u", grants[i]);
        int rc = machines_path(m, id, suffix, path, e);
        if (rc < 0)
            return rc;
    }
    int rc = machines_path(m, id, ".vsock", path, e);
    if (rc == 0)
        rc = machines_path(m, id, ".sock", path, e);
    if (rc < 0)
        return rc;
    struct stat st;
    if (lstat(path, &st) == 0 && S_ISSOCK(st.st_mode) && !sock_is_stale(path))
        return err_set(e, ERR_USAGE, 0,
                       "machine %s is running already (%s): choose another name or tine kill it",
                       id, path);
    return 0;
}

int machines_new_id(const struct machines *m, machine_id out, struct err *e)
{
    static const char *const words[] = {
        "amber", "ash",  "birch", "blue",  "clay", "coal",  "coral", "dawn",
        "dune",  "dusk", "elm",   "fern",  "fir",  "flint", "gold",  "hazel",
        "iris",  "jade", "lime",  "maple", "mint", "moss",  "oak",   "olive",
        "opal",  "pine", "plum",  "rose",  "ruby", "sage",  "teal",  "willow",
    };
    for (int tries = 0; tries < 100; tries++) {
        uint32_t r;
        if (getrandom(&r, sizeof r, 0) != sizeof r)
            return err_sys(e, "getrandom");
        machine_id id;
        char path[SOCK_PATH_MAX + 1];
        struct stat st;
        (void)snprintf(id, sizeof id, "%s-%04x", words[r % ARRAY_SIZE(words)], r >> 16);
        int rc = machines_path(m, id, ".sock", path, e);
        if (rc < 0)
            return rc;
        if (lstat(path, &st) < 0) {
            memcpy(out, id, sizeof id);
            return 0;
        }
    }
    return err_set(e, ERR_LIMIT, 0, "no free name found in %s", m->dir);
}

/* The id of a file name with this suffix, or false. */
static bool id_of(const char *name, const char *suffix, machine_id out)
{
    size_t len = strlen(name), tail = strlen(suffix);
    if (len <= tail || len - tail > CONTROL_ID_MAX || strcmp(name + len - tail, suffix) != 0)
        return false;
    memcpy(out, name, len - tail);
    out[len - tail] = '\0';
    return control_id_check(out, NULL) == 0;
}

static int compare_ids(const void *a, const void *b)
{
    return strverscmp(a, b); /* a-2 before a-10 */
}

int machines_list(const struct machines *m, machine_id **ids, size_t *count, struct err *e)
{
    DIR *d = opendir(m->dir);
    if (d == NULL)
        return err_sys(e, "state folder %s", m->dir);
    machine_id *list = NULL;
    size_t n = 0, cap = 0;
    const struct dirent *entry;
    while ((entry = readdir(d)) != NULL) {
        machine_id id;
        if (!id_of(entry->d_name, ".sock", id))
            continue;
        if (n == cap) {
            cap = cap == 0 ? 64 : 2 * cap;
            machine_id *more = reallocarray(list, cap, sizeof *list);
            if (more == NULL) {
                free(list);
                (void)closedir(d);
                return err_set(e, ERR_HOST, ENOMEM, "list of machines");
            }
            list = more;
        }
        memcpy(list[n++], id, sizeof id);
    }
    (void)closedir(d);
    if (n > 0)
        qsort(list, n, sizeof *list, compare_ids);
    *ids = list;
    *count = n;
    return 0;
}

/* ".start-PID-…": the log of a start that has not succeeded yet. */
static bool is_abandoned_start(const char *name)
{
    int pid;
    return sscanf(name, ".start-%d-", &pid) == 1 && pid > 0 && kill(pid, 0) < 0 && errno == ESRCH;
}

static bool is_old_log(const struct machines *m, int dir_fd, const char *name)
{
    machine_id id;
    char path[SOCK_PATH_MAX + 1];
    struct stat st;
    if (!id_of(name, ".log", id) || machines_path(m, id, ".sock", path, NULL) < 0)
        return false;
    return access(path, F_OK) < 0 && fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
           time(NULL) - st.st_mtime > LOG_KEEP_S;
}

void machines_sweep(const struct machines *m)
{
    DIR *d = opendir(m->dir);
    if (d == NULL)
        return;
    const struct dirent *entry;
    while ((entry = readdir(d)) != NULL) {
        machine_id id;
        char path[SOCK_PATH_MAX + 1];
        const char *name = entry->d_name;
        if (id_of(name, ".sock", id) && machines_path(m, id, ".sock", path, NULL) == 0)
            (void)sock_remove_stale(path);
        else if (id_of(name, ".vsock", id) && machines_path(m, id, ".vsock", path, NULL) == 0)
            (void)sock_remove_stale(path);
        else if (is_abandoned_start(name) || is_old_log(m, dirfd(d), name))
            (void)unlinkat(dirfd(d), name, 0); /* the next sweep tries again */
    }
    (void)closedir(d);
}

void machines_remove(const struct machines *m, const char *id, bool log)
{
    char path[SOCK_PATH_MAX + 1];
    if (machines_path(m, id, ".sock", path, NULL) == 0)
        (void)sock_remove_stale(path);
    if (machines_path(m, id, ".vsock", path, NULL) == 0)
        (void)sock_remove_stale(path);
    if (log && machines_path(m, id, ".log", path, NULL) == 0)
        (void)unlink(path); /* may not be there */
}

static void add_known(const struct machines *m, struct err *e)
{
    machine_id *ids = NULL;
    size_t n = 0;
    if (e == NULL || machines_list(m, &ids, &n, NULL) < 0)
        return;
    size_t len = strlen(e->text);
    for (size_t i = 0; i < n && i < 8 && len < sizeof e->text; i++)
        len += (size_t)snprintf(e->text + len, sizeof e->text - len, "%s%s",
                                i == 0 ? "; there is " : ", ", ids[i]);
    if (n > 8 && len < sizeof e->text)
        (void)snprintf(e->text + len, sizeof e->text - len, " and %zu more", n - 8);
    free(ids);
}

int machines_connect(const struct machines *m, const char *id, struct rpc *r, struct err *e)
{
    char path[SOCK_PATH_MAX + 1];
    int rc = machines_path(m, id, ".sock", path, e);
    if (rc < 0)
        return rc;
    rc = rpc_connect(r, path, e);
    if (rc == -ENOENT || rc == -ECONNREFUSED) {
        if (rc == -ECONNREFUSED)
            machines_sweep(m);
        (void)err_set(e, ERR_STATE, 0,
                      rc == -ENOENT ? "there is no machine %s in %s" : "machine %s in %s has died",
                      id, m->dir);
        add_known(m, e);
    }
    return rc;
}
