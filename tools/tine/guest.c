/*
 * guest: see guest.h.
 *
 * The fast path (the image is there) costs a few stat calls: a note in the cache, default-<memory>,
 * holds the key of everything the answer was found from (programs, recipe, this boot of the host)
 * and the answer, the folder of the image.
 */
#include "tools/tine/guest.h"

#include <errno.h>
#include <fcntl.h>
#include <dirent.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tools/tine/cli.h"
#include "tools/tine/launch.h"
#include "tools/tine/machines.h"
#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/num.h"

#define OUTPUT_MAX 65536
#define KEY_MAX 2048
#define IMAGE_KEEP_S (14 * 24 * 3600)

/* In the child: a group of its own, so that a signal to us can be passed on to all it started. */
static _Noreturn void become_program(const char *const *argv, const char *agent, int out)
{
    (void)setpgid(0, 0); /* a fresh child of ours: cannot fail */
    if (agent != NULL)
        (void)setenv("TINE_AGENT", agent,
                     1); /* no memory for it: the program says what it misses */
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null >= 0 && dup2(null, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0)
        (void)execv(argv[0], (char *const *)(uintptr_t)argv);
    (void)fprintf(stderr, "%s: %s\n", argv[0], strerror(errno));
    _exit(127);
}

/* Reads to the end and keeps what fits. */
static void read_all(int from, pid_t pid, char *out, size_t size)
{
    size_t len = 0;
    for (;;) {
        char drop[4096];
        bool full = len == size - 1;
        ssize_t n = read(from, full ? drop : out + len, full ? sizeof drop : size - 1 - len);
        if (n < 0 && errno == EINTR) {
            if (cli_signal() != 0)
                (void)kill(-pid, SIGTERM); /* it ends, and with it this loop */
            continue;
        }
        if (n <= 0)
            break;
        len += full ? 0 : (size_t)n;
    }
    out[len] = '\0';
}

/* Runs a program and keeps its standard output; its exit status, or -errno. */
static int run_program(const char *const *argv, const char *agent, char *out, size_t size,
                       struct err *e)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return err_sys(e, "pipe");
    CLEANUP_FD int from = fds[0];
    CLEANUP_FD int to = fds[1];
    pid_t pid = fork();
    if (pid < 0)
        return err_sys(e, "fork");
    if (pid == 0)
        become_program(argv, agent, to);
    fd_close(&to);
    read_all(from, pid, out, size);
    int status;
    while (waitpid(pid, &status, 0) < 0) {
        if (errno != EINTR)
            return err_sys(e, "wait for %s", argv[0]);
    }
    if (cli_signal() != 0)
        return err_set(e, ERR_HOST, EINTR, "%s: stopped by signal %d", argv[0], cli_signal());
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int guest_probe(json_t **probe, struct err *e)
{
    char vmm[PATH_MAX];
    static char out[OUTPUT_MAX];
    int rc = launch_find_vmm(vmm, sizeof vmm, e);
    if (rc < 0)
        return rc;
    const char *const argv[] = {vmm, "--probe", NULL};
    rc = run_program(argv, NULL, out, sizeof out, e);
    if (rc < 0)
        return rc;
    json_t *o = json_loads(out, JSON_REJECT_DUPLICATES, NULL);
    if (!json_is_object(o)) {
        json_decref(o);
        return err_set(e, ERR_HOST, 0, "%s --probe ended with status %d and no answer", vmm, rc);
    }
    *probe = o;
    return 0;
}

int guest_kind(const json_t *probe, const char **kind, struct err *e)
{
    const char *guest = json_string_value(json_object_get(probe, "guest"));
    const char *why = json_string_value(json_object_get(probe, "why"));
    if (guest == NULL || (strcmp(guest, "lean") != 0 && strcmp(guest, "stock") != 0))
        return err_set(e, ERR_UNSUPPORTED, 0, "%s (tine doctor says more)",
                       why != NULL ? why : "no guest kernel runs on this KVM");
    *kind = strcmp(guest, "lean") == 0 ? "lean" : "stock";
    return 0;
}

int guest_cache_dir(char out[GUEST_PATH_MAX], struct err *e)
{
    const char *given = getenv("TINE_CACHE");
    const char *home = getenv("HOME");
    char path[GUEST_PATH_MAX];
    if (given != NULL && given[0] == '/')
        (void)snprintf(path, sizeof path, "%s", given);
    else if (home != NULL && home[0] == '/')
        (void)snprintf(path, sizeof path, "%s/.cache/tine", home);
    else
        return err_set(e, ERR_USAGE, 0, "neither HOME nor TINE_CACHE names a folder");
    for (char *p = strchr(path + 1, '/');; p = strchr(p + 1, '/')) {
        if (p != NULL)
            *p = '\0';
        if (mkdir(path, 0755) < 0 && errno != EEXIST)
            return err_sys(e, "make cache folder %s", path);
        if (p == NULL)
            break;
        *p = '/';
    }
    (void)snprintf(out, GUEST_PATH_MAX, "%s", path);
    return 0;
}

/* The agent of this build, or "". */
static void find_agent(char *out, size_t size)
{
    char self[PATH_MAX];
    const char *given = getenv("TINE_AGENT");
    if (given != NULL) {
        (void)snprintf(out, size, "%s", given);
        return;
    }
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(self, '/');
    if (slash != NULL)
        *slash = '\0';
    int len = snprintf(out, size, "%s/../../guest/agent/tine-agent", self);
    if (len < 0 || (size_t)len >= size || access(out, R_OK) < 0)
        out[0] = '\0';
}

/* $TINE_GUESTS holds ready-made folders lean/ and stock/; else the recipe makes them. */
static int find_folder(const char *kind, char out[GUEST_PATH_MAX], struct err *e)
{
    static char text[OUTPUT_MAX];
    char agent[PATH_MAX];
    const char *given = getenv("TINE_GUESTS");
    if (given != NULL && given[0] != '\0') {
        (void)snprintf(out, GUEST_PATH_MAX, "%s/%s", given, kind);
        return 0;
    }
    static const char recipe[] = TINE_SOURCE_ROOT "/guest/linux/build";
    if (access(recipe, X_OK) < 0)
        return err_sys(e, "guest recipe %s (or set TINE_GUESTS to a folder with %s/)", recipe,
                       kind);
    const char *const argv[] = {recipe, kind, NULL};
    find_agent(agent, sizeof agent);
    int rc = run_program(argv, agent[0] != '\0' ? agent : NULL, text, sizeof text, e);
    if (rc < 0)
        return rc;
    size_t len = strlen(text);
    while (len > 0 && text[len - 1] == '\n')
        text[--len] = '\0';
    const char *line = strrchr(text, '\n');
    line = line != NULL ? line + 1 : text;
    if (rc != 0 || line[0] != '/')
        return err_set(e, ERR_HOST, 0, "%s %s ended with status %d: the guest was not made", recipe,
                       kind, rc);
    (void)snprintf(out, GUEST_PATH_MAX, "%s", line);
    return 0;
}

int guest_find(const char *kind, struct guest *out, struct err *e)
{
    struct guest g = {.memory_mib = strcmp(kind, "lean") == 0 ? GUEST_MEMORY_LEAN_MIB
                                                              : GUEST_MEMORY_STOCK_MIB};
    int rc = find_folder(kind, g.folder, e);
    if (rc < 0)
        return rc;
    char path[GUEST_PATH_MAX + 16];
    (void)snprintf(g.kernel, sizeof g.kernel, "%s/kernel", g.folder);
    (void)snprintf(g.initrd, sizeof g.initrd, "%s/initrd", g.folder);
    (void)snprintf(path, sizeof path, "%s/cmdline", g.folder);
    CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, "guest file %s", path);
    ssize_t n = read(fd, g.cmdline, sizeof g.cmdline - 1);
    if (n < 0)
        return err_sys(e, "guest file %s", path);
    g.cmdline[n] = '\0';
    g.cmdline[strcspn(g.cmdline, "\n")] = '\0';
    if (access(g.kernel, R_OK) < 0)
        return err_sys(e, "guest file %s", g.kernel);
    if (access(g.initrd, R_OK) < 0)
        return err_sys(e, "guest file %s", g.initrd);
    *out = g;
    return 0;
}

static size_t add_stat(char *key, size_t len, const char *path)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return len;
    int n =
        snprintf(key + len, KEY_MAX - len, "%llx.%llx.%lld.%ld ", (unsigned long long)st.st_ino,
                 (unsigned long long)st.st_size, (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
    return n > 0 && len + (size_t)n < KEY_MAX ? len + (size_t)n : len;
}

/* Everything whose change may change the answer, as one line. */
static int make_key(char key[KEY_MAX], struct err *e)
{
    static const char *const recipe[] = {
        "build", "cpio.py", "rootfs.list",      "applets",      "etc",
        "lean",  "stock",   "lean/lean.config", "lean/cmdline", "stock/cmdline"};
    char path[PATH_MAX];
    int rc = launch_find_vmm(path, sizeof path, e);
    if (rc < 0)
        return rc;
    size_t len = add_stat(key, 0, path);
    find_agent(path, sizeof path);
    len = add_stat(key, len, path);
    const char *given = getenv("TINE_GUESTS");
    for (size_t i = 0; i < ARRAY_SIZE(recipe); i++) {
        (void)snprintf(path, sizeof path, "%s/guest/linux/%s", TINE_SOURCE_ROOT, recipe[i]);
        len = add_stat(key, len, path);
    }
    /* Another boot of this host may be another KVM. */
    char boot[40] = "";
    CLEANUP_FD int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0)
        boot[read(fd, boot, 36) == 36 ? 36 : 0] = '\0';
    (void)snprintf(key + len, KEY_MAX - len, "%s %s", boot, given != NULL ? given : "");
    return 0;
}

/* Reads the note; true if it has this key and names an image that is there. */
static bool read_note(const char *note, const char *key, char out[GUEST_PATH_MAX])
{
    char text[KEY_MAX + GUEST_PATH_MAX];
    char manifest[GUEST_PATH_MAX + 16];
    CLEANUP_FD int fd = open(note, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (n <= 0)
        return false;
    text[n] = '\0';
    char *nl = strchr(text, '\n');
    if (nl == NULL || (size_t)(nl - text) != strlen(key) || memcmp(text, key, strlen(key)) != 0)
        return false;
    char *image = nl + 1;
    image[strcspn(image, "\n")] = '\0';
    (void)snprintf(manifest, sizeof manifest, "%s/manifest.json", image);
    if (image[0] != '/' || access(manifest, R_OK) < 0)
        return false;
    (void)utimensat(AT_FDCWD, image, NULL,
                    0); /* in use: prune_images leaves it; a guess is enough */
    (void)snprintf(out, GUEST_PATH_MAX, "%s", image);
    return true;
}

static int write_note(const char *note, const char *key, const char *image, struct err *e)
{
    char temp[GUEST_PATH_MAX + 32], text[KEY_MAX + GUEST_PATH_MAX];
    (void)snprintf(temp, sizeof temp, "%s.%d", note, (int)getpid());
    int len = snprintf(text, sizeof text, "%s\n%s\n", key, image);
    CLEANUP_FD int fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_sys(e, "make %s", temp);
    int rc = fd_write_full(fd, text, (size_t)len, e);
    if (rc == 0 && rename(temp, note) < 0)
        rc = err_sys(e, "rename %s", temp);
    if (rc < 0)
        (void)unlink(temp); /* half a note must not stay */
    return rc;
}

/* Boots the guest under a name of its own and snapshots it into `image`. */
static int make_image(const struct machines *m, const struct guest *g, uint64_t memory_mib,
                      const char *image, struct err *e)
{
    machine_id id;
    struct launched l;
    json_t *answer = NULL;
    (void)snprintf(id, sizeof id, "making-image-%d", (int)getpid());
    const struct launch_spec spec = {.id = id,
                                     .kernel = g->kernel,
                                     .initrd = g->initrd,
                                     .cmdline = g->cmdline,
                                     .memory_mib = memory_mib,
                                     .ends_with_us = true};
    cli_progress("making the default guest's image, once: booting %s", g->folder);
    int rc = launch(m, &spec, &l, e);
    if (rc < 0)
        return rc;
    rc = launch_wait(&l, "ready", GUEST_READY_TIMEOUT_S, "booting the default guest, once", &answer,
                     e);
    if (rc < 0)
        return rc;
    json_decref(answer);
    rc = rpc_call(&l.rpc, "snapshot", json_pack("{s:s}", "dir", image), -1, NULL, e);
    launch_end(&l);
    return rc;
}

/* Each new build of tine-vmm or of the guest leaves an image behind: those unused for long go. */
static void prune_images(const char *cache)
{
    DIR *d = opendir(cache);
    if (d == NULL)
        return;
    const struct dirent *entry;
    while ((entry = readdir(d)) != NULL) {
        static const char *const files[] = {"manifest.json", "state.dtb", "memory", "memory.sums"};
        struct stat st;
        if (strncmp(entry->d_name, "image-", 6) != 0 ||
            fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
            !S_ISDIR(st.st_mode) || time(NULL) - st.st_mtime < IMAGE_KEEP_S)
            continue;
        for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
            char path[GUEST_PATH_MAX];
            (void)snprintf(path, sizeof path, "%s/%s", entry->d_name, files[i]);
            (void)unlinkat(dirfd(d), path, 0); /* what is not there need not go */
        }
        (void)unlinkat(dirfd(d), entry->d_name, AT_REMOVEDIR); /* else the next call tries again */
    }
    (void)closedir(d);
}

/* Under the lock: somebody else may have made it meanwhile. */
static int find_or_make(const struct machines *m, uint64_t memory_mib, const char *cache,
                        char out[GUEST_PATH_MAX], struct err *e)
{
    json_t *probe = NULL;
    struct guest g;
    const char *kind;
    int rc = guest_probe(&probe, e);
    if (rc < 0)
        return rc;
    rc = guest_kind(probe, &kind, e);
    if (rc == 0)
        rc = guest_find(kind, &g, e);
    if (rc == 0) {
        const char *build = json_string_value(json_object_get(probe, "build"));
        const char *name = strrchr(g.folder, '/');
        struct stat st;
        char manifest[GUEST_PATH_MAX + 16];
        /* The folder's name is its key; its age tells ready-made folders apart. */
        if (memory_mib == 0)
            memory_mib = g.memory_mib;
        (void)snprintf(out, GUEST_PATH_MAX, "%s/image-%.80s-%llx-%.12s-%llu", cache,
                       name != NULL ? name + 1 : kind,
                       stat(g.initrd, &st) == 0 ? (unsigned long long)st.st_mtim.tv_sec : 0,
                       build != NULL ? build : "", (unsigned long long)memory_mib);
        (void)snprintf(manifest, sizeof manifest, "%s/manifest.json", out);
        if (access(manifest, R_OK) < 0) {
            prune_images(cache);
            rc = make_image(m, &g, memory_mib, out, e);
        }
    }
    json_decref(probe);
    return rc;
}

static int lock_cache(const char *cache, struct err *e)
{
    char path[GUEST_PATH_MAX + 16];
    (void)snprintf(path, sizeof path, "%s/image.lock", cache);
    CLEANUP_FD int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_sys(e, "lock %s", path);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        cli_progress("waiting for another tine that makes the default guest");
        if (flock(fd, LOCK_EX) < 0)
            return err_sys(e, "lock %s", path);
        cli_progress_end();
    }
    return take_fd(&fd);
}

int guest_image(const struct machines *m, uint64_t memory_mib, char out[GUEST_PATH_MAX],
                struct err *e)
{
    char cache[GUEST_PATH_MAX], key[KEY_MAX], note[GUEST_PATH_MAX + 32];
    int rc = guest_cache_dir(cache, e);
    if (rc == 0)
        rc = make_key(key, e);
    if (rc < 0)
        return rc;
    (void)snprintf(note, sizeof note, "%s/default-%llu", cache, (unsigned long long)memory_mib);
    if (read_note(note, key, out))
        return 0;
    CLEANUP_FD int lock = lock_cache(cache, e);
    if (lock < 0)
        return lock;
    if (read_note(note, key, out))
        return 0;
    rc = find_or_make(m, memory_mib, cache, out, e);
    if (rc < 0)
        return err_wrap(e, rc, "default guest");
    return write_note(note, key, out, e);
}
