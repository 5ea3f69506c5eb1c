/*
 * boot: what PID 1 does before the loop, in a guest only. Called once by main.
 *
 * Order: mounts first (modules and devices need /proc, /sys and /dev), then the standard fds, then
 * modules (vsock may be one), then the loopback interface. A failure is said on the console and the
 * start goes on: a guest with less is more use than none.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MODULES_LIST "/lib/modules/load"
#define MODULES_LIST_MAX (64u * 1024)

struct mount_point {
    const char *type, *path, *options;
    unsigned long flags;
    mode_t mode;
    bool optional; /* not every kernel has it */
};

static const struct mount_point mount_points[] = {
    {"proc", "/proc", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, 0555, false},
    {"sysfs", "/sys", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, 0555, false},
    {"devtmpfs", "/dev", "mode=0755", MS_NOSUID, 0755, false},
    {"devpts", "/dev/pts", "mode=0620,ptmxmode=0666", MS_NOSUID | MS_NOEXEC, 0755, true},
    {"tmpfs", "/dev/shm", "mode=1777", MS_NOSUID | MS_NODEV, 01777, false},
    {"tmpfs", "/tmp", "mode=1777", MS_NOSUID | MS_NODEV, 01777, false},
    {"tmpfs", "/run", "mode=0755", MS_NOSUID | MS_NODEV, 0755, false},
    {"cgroup2", "/sys/fs/cgroup", NULL, MS_NOSUID | MS_NODEV | MS_NOEXEC, 0555, true},
};

/* Whether something is mounted at `path` already: its device differs from its parent's. */
static bool is_mounted(const char *path)
{
    char parent[64];
    const char *slash = strrchr(path, '/');
    size_t len = slash == path ? 1 : (size_t)(slash - path);
    if (len >= sizeof parent)
        return false;
    memcpy(parent, path, len);
    parent[len] = 0;
    struct stat here, above;
    return stat(path, &here) == 0 && stat(parent, &above) == 0 && here.st_dev != above.st_dev;
}

static void mounts_make(void)
{
    for (size_t i = 0; i < sizeof mount_points / sizeof mount_points[0]; i++) {
        const struct mount_point *m = &mount_points[i];
        (void)mkdir(m->path, m->mode); /* mount says whether the folder is there */
        if (is_mounted(m->path) || mount(m->type, m->path, m->type, m->flags, m->options) == 0)
            continue;
        if (!m->optional && errno != EBUSY)
            say("mount", m->path, errno);
    }
    static const char *const links[][2] = {{"/proc/self/fd", "/dev/fd"},
                                           {"/proc/self/fd/0", "/dev/stdin"},
                                           {"/proc/self/fd/1", "/dev/stdout"},
                                           {"/proc/self/fd/2", "/dev/stderr"},
                                           {"pts/ptmx", "/dev/ptmx"}};
    for (size_t i = 0; i < sizeof links / sizeof links[0]; i++)
        (void)!symlink(links[i][0], links[i][1]); /* EEXIST is fine */
}

/* The kernel gives init its console only if /dev/console was in the archive. */
static void console_open(void)
{
    if (fcntl(2, F_GETFD) >= 0)
        return;
    int fd = open("/dev/console", O_RDWR | O_NOCTTY);
    if (fd < 0)
        fd = open("/dev/null", O_RDWR | O_NOCTTY);
    for (int i = 0; fd >= 0 && i <= 2; i++)
        if (fd != i)
            (void)dup2(fd, i);
    if (fd > 2)
        close(fd);
}

static void module_load(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST))
        say("module", path, errno);
    if (fd >= 0)
        close(fd);
}

/* One full path a line, in the order they need each other. */
static void modules_load(void)
{
    int fd = open(MODULES_LIST, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    struct stat st;
    if (fstat(fd, &st) < 0 || st.st_size <= 0 || st.st_size > MODULES_LIST_MAX) {
        close(fd);
        return;
    }
    size_t size = (size_t)st.st_size;
    /* A page more than needed, so that the text always ends in a NUL. */
    char *text = mmap(NULL, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ssize_t n = text != MAP_FAILED ? read(fd, text, size) : -1;
    close(fd);
    for (char *line = text; n > 0 && line < text + n;) {
        char *end = strchr(line, '\n');
        end = end != NULL ? end : text + n;
        *end = 0;
        if (line[0] == '/')
            module_load(line);
        line = end + 1;
    }
    if (text != MAP_FAILED)
        munmap(text, size + 1);
}

/* Until a copy is given one of its own, the name that the archive gives. */
static void hostname_load(void)
{
    char name[HOST_NAME_MAX + 1];
    int fd = open("/etc/hostname", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, name, sizeof name) : 0;
    if (fd >= 0)
        close(fd);
    size_t len = 0;
    while (n > 0 && len < (size_t)n && name[len] != '\n')
        len++;
    if (len > 0 && len <= HOST_NAME_MAX && sethostname(name, len) < 0)
        say("host name", NULL, errno);
}

static void loopback_up(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return; /* a kernel without IP has no lo either */
    struct ifreq req = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (ioctl(fd, SIOCSIFFLAGS, &req) < 0)
        say("lo", NULL, errno);
    close(fd);
}

void boot_setup(void)
{
    mounts_make();
    console_open();
    (void)setsid();
    (void)!chdir("/");
    (void)mkdir("/root", 0700); /* HOME of what is started (spawn.c) */
    (void)mkdir("/run/tine", 0755);
    hostname_load();
    modules_load();
    loopback_up();
}
