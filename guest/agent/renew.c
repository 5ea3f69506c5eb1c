/*
 * renew: makes a copy a different machine (docs/agent-protocol.md 1.1). Called by control.c on the
 * loop thread while the whole machine waits, so it spends as few system calls as it can: the random
 * device and the three files stay open from boot on.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HEX_ID_SIZE (2 * WIRE_ID_SIZE + 1) /* digits and a newline */

static int id_file_open(struct id_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    f->fd = open(f->path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (f->fd >= 0)
        return 0;
    int error = errno;
    if (f->fallback == NULL)
        return error;
    /* A read-only /etc: a file of ours over the name, if the name exists. */
    f->fd = open(f->fallback, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (f->fd < 0)
        return errno;
    if (mount(f->fallback, f->path, NULL, MS_BIND, NULL) == 0)
        return 0;
    return error;
}

/* Rewrites the file in place; opens it anew if it was deleted or replaced. Returns an errno. */
static int id_file_put(struct id_file *f, const char *text, size_t len)
{
    struct stat st = {.st_size = 0};
    if (f->fd < 0 || fstat(f->fd, &st) < 0 || st.st_nlink == 0) {
        int error = id_file_open(f);
        if (error != 0)
            return error;
        if (fstat(f->fd, &st) < 0)
            return errno;
    }
    if (st.st_size > (off_t)len && ftruncate(f->fd, (off_t)len) < 0)
        return errno;
    ssize_t n = pwrite(f->fd, text, len, 0);
    if (n < 0)
        return errno;
    return (size_t)n == len ? 0 : ENOSPC;
}

void renewer_open(struct renewer *r, bool is_guest)
{
    *r = (struct renewer){
        .random_fd = -1,
        .hostname = {.path = "/etc/hostname", .fallback = "/run/tine/hostname", .fd = -1},
        .machine_id = {.path = "/etc/machine-id", .fallback = "/run/tine/machine-id", .fd = -1},
        .generation = {.path = "/run/tine/generation", .fd = -1},
    };
    if (!is_guest)
        return;
    (void)mkdir("/etc", 0755);
    r->random_fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    if (r->random_fd < 0)
        say("open", "/dev/urandom", errno);
    struct id_file *files[] = {&r->hostname, &r->machine_id, &r->generation};
    for (size_t i = 0; i < 3; i++) {
        int error = id_file_open(files[i]);
        if (error != 0)
            say("open", files[i]->path, error);
    }
}

static void hex_id(const uint8_t id[WIRE_ID_SIZE], char out[HEX_ID_SIZE])
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < WIRE_ID_SIZE; i++) {
        out[2 * i] = digits[id[i] >> 4];
        out[2 * i + 1] = digits[id[i] & 15];
    }
    out[HEX_ID_SIZE - 1] = '\n';
}

static int entropy_add(int fd, const uint8_t bytes[WIRE_ENTROPY_SIZE])
{
    struct {
        int entropy_count, buf_size;
        uint8_t buf[WIRE_ENTROPY_SIZE];
    } pool = {.entropy_count = 8 * (int)WIRE_ENTROPY_SIZE, .buf_size = (int)WIRE_ENTROPY_SIZE};
    _Static_assert(sizeof pool == sizeof(struct rand_pool_info) + WIRE_ENTROPY_SIZE,
                   "struct rand_pool_info with its bytes");
    memcpy(pool.buf, bytes, WIRE_ENTROPY_SIZE);
    return ioctl(fd, RNDADDENTROPY, &pool) < 0 ? errno : 0;
}

static int hostname_set(struct renewer *r, const struct wire_renew *w)
{
    char line[WIRE_HOSTNAME_MAX + 1];
    if (w->hostname_len == 0)
        return 0;
    if (sethostname(w->hostname, w->hostname_len) < 0)
        return errno;
    memcpy(line, w->hostname, w->hostname_len);
    line[w->hostname_len] = '\n';
    return id_file_put(&r->hostname, line, w->hostname_len + 1u);
}

static int id_put(struct id_file *f, const uint8_t id[WIRE_ID_SIZE])
{
    char text[HEX_ID_SIZE];
    hex_id(id, text);
    return id_file_put(f, text, sizeof text);
}

static int clock_set(uint64_t wall_clock_ns)
{
    struct timespec ts = {.tv_sec = (time_t)(wall_clock_ns / 1000000000u),
                          .tv_nsec = (long)(wall_clock_ns % 1000000000u)};
    return clock_settime(CLOCK_REALTIME, &ts) < 0 ? errno : 0;
}

/* Entropy first: what follows may already draw from it. Returns the errno of the failed step. */
static int steps_do(struct renewer *r, const struct wire_renew *w, uint32_t *step)
{
    int error;
    *step = WIRE_STEP_ENTROPY;
    if ((error = entropy_add(r->random_fd, w->entropy)) != 0)
        return error;
    /* Crediting alone does not re-key a generator that is already seeded. */
    *step = WIRE_STEP_RESEED;
    if (ioctl(r->random_fd, RNDRESEEDCRNG) < 0)
        return errno;
    *step = WIRE_STEP_CLOCK;
    if ((error = clock_set(w->wall_clock_ns)) != 0)
        return error;
    *step = WIRE_STEP_HOSTNAME;
    if ((error = hostname_set(r, w)) != 0)
        return error;
    *step = WIRE_STEP_MACHINE_ID;
    if ((error = id_put(&r->machine_id, w->machine_id)) != 0)
        return error;
    *step = WIRE_STEP_GENERATION;
    return id_put(&r->generation, w->generation_id);
}

void renewer_apply(struct renewer *r, const uint8_t *payload, size_t len, bool dry,
                   struct wire_renewed *answer)
{
    struct wire_renew w;
    uint32_t step = WIRE_STEP_PAYLOAD;
    int error = -wire_renew_decode(payload, len, &w);
    if (error == 0 && !dry)
        error = steps_do(r, &w, &step);
    memset(answer, 0, sizeof *answer);
    answer->status = (uint32_t)error;
    answer->step = error != 0 ? step : WIRE_STEP_NONE;
    if (len == WIRE_RENEW_SIZE)
        memcpy(answer->generation_id, payload + 72, WIRE_ID_SIZE);
    explicit_bzero(&w, sizeof w);
}
