/*
 * sock: see sock.h. Any thread; no state.
 */
#include "vmm/core/sock.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"

#define SOCK_BACKLOG 128

int sock_path_check(const char *path, struct err *e)
{
    size_t len = strlen(path);
    if (len == 0)
        return err_set(e, ERR_USAGE, 0, "socket path is empty");
    if (len > SOCK_PATH_MAX)
        return err_set(
            e, ERR_LIMIT, 0,
            "socket path %s has %zu bytes, at most %d fit: choose a shorter folder or name", path,
            len, SOCK_PATH_MAX);
    return 0;
}

static void address(struct sockaddr_un *sa, const char *path)
{
    *sa = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(sa->sun_path, path, strlen(path) + 1); /* checked by sock_path_check */
}

/* Returns an fd that holds the exclusive flock of the path's folder, or -errno. */
static int lock_folder(const char *path, struct err *e)
{
    char dir[SOCK_PATH_MAX + 1] = ".";
    const char *slash = strrchr(path, '/');
    if (slash != NULL)
        (void)snprintf(dir, sizeof dir, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    CLEANUP_FD int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, "open folder %s", dir);
    int rc;
    do {
        rc = flock(fd, LOCK_EX);
    } while (rc < 0 && errno == EINTR);
    if (rc < 0)
        return err_sys(e, "lock folder %s", dir);
    return take_fd(&fd);
}

/* Non-blocking, so that a full backlog (a live but busy owner) is an answer and not a wait. */
static int probe(const char *path)
{
    CLEANUP_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    struct sockaddr_un sa;
    address(&sa, path);
    return connect(fd, (struct sockaddr *)&sa, sizeof sa) < 0 ? -errno : 0;
}

bool sock_is_stale(const char *path)
{
    struct stat st;
    return sock_path_check(path, NULL) == 0 && lstat(path, &st) == 0 && S_ISSOCK(st.st_mode) &&
           probe(path) == -ECONNREFUSED;
}

bool sock_remove_stale(const char *path)
{
    if (!sock_is_stale(path)) /* the common case takes no lock */
        return false;
    CLEANUP_FD int lock = lock_folder(path, NULL);
    return lock >= 0 && sock_is_stale(path) && unlink(path) == 0;
}

/* Called with the folder locked. */
static int clear_place(const char *path, struct err *e)
{
    struct stat st;
    if (lstat(path, &st) < 0) {
        if (errno == ENOENT)
            return 0;
        return err_sys(e, "socket %s", path);
    }
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, ERR_USAGE, EEXIST, "socket %s: something else is there, not a socket",
                       path);
    if (!sock_is_stale(path))
        return err_set(e, ERR_USAGE, EADDRINUSE, "socket %s: a live process listens there", path);
    if (unlink(path) < 0)
        return err_sys(e, "remove stale socket %s", path);
    return 0;
}

int sock_listen(const char *path, struct err *e)
{
    int rc = sock_path_check(path, e);
    if (rc < 0)
        return rc;
    CLEANUP_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, "socket");
    /* The mode of the socket itself becomes that of the file at bind: never wider, not for a
     * moment. */
    if (fchmod(fd, 0600) < 0)
        return err_sys(e, "fchmod of a socket");
    CLEANUP_FD int lock = lock_folder(path, e);
    if (lock < 0)
        return lock;
    rc = clear_place(path, e);
    if (rc < 0)
        return rc;
    struct sockaddr_un sa;
    address(&sa, path);
    if (bind(fd, (struct sockaddr *)&sa, sizeof sa) < 0)
        return err_sys(e, "bind %s", path);
    /* Still under the lock: a socket that is bound and not yet listening looks stale. */
    if (listen(fd, SOCK_BACKLOG) < 0) {
        rc = err_sys(e, "listen on %s", path);
        (void)unlink(path); /* ours, just made */
        return rc;
    }
    return take_fd(&fd);
}

int sock_connect(const char *path, struct err *e)
{
    int rc = sock_path_check(path, e);
    if (rc < 0)
        return rc;
    CLEANUP_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return err_sys(e, "socket");
    struct sockaddr_un sa;
    address(&sa, path);
    do {
        rc = connect(fd, (struct sockaddr *)&sa, sizeof sa);
    } while (rc < 0 && errno == EINTR);
    if (rc < 0)
        return err_sys(e, "connect to %s", path);
    return take_fd(&fd);
}
