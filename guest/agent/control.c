/*
 * control: the connection to the VMM (docs/agent-protocol.md 1), on the loop thread.
 *
 * It is always either up, being made, or due to be tried again. It breaks in a copy whose VMM
 * resets all connections, and then must be back fast: a connection that had been up is made anew at
 * once.
 */
#include "guest/agent/agent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define BOOT_ID_PATH "/proc/sys/kernel/random/boot_id"
#define BOOT_ID_LEN 36
#define BYE_PAUSE_NS 20000000

/* Closes and plans the next try. */
static void control_drop(struct agent *a)
{
    struct control *c = &a->control;
    bool was_stable = c->state == CONTROL_UP && a->now_ns - c->up_since_ns >= CONTROL_STABLE_NS;
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
    c->state = CONTROL_DOWN;
    c->rx_len = c->tx_len = 0;
    if (was_stable)
        c->backoff_ms = 0;
    c->retry_ns = a->now_ns + (uint64_t)c->backoff_ms * 1000000u;
    c->backoff_ms = c->backoff_ms == 0 ? CONTROL_RETRY_MIN_MS : 2 * c->backoff_ms;
    if (c->backoff_ms > CONTROL_RETRY_MAX_MS)
        c->backoff_ms = CONTROL_RETRY_MAX_MS;
}

static void control_watch(struct agent *a, int op)
{
    struct control *c = &a->control;
    bool out = c->state == CONTROL_CONNECTING || c->tx_len > 0;
    uint32_t events = EPOLLIN | EPOLLRDHUP | (out ? EPOLLOUT : 0u);
    if (loop_watch(a, op, c->fd, events, SOURCE_CONTROL, NULL) < 0)
        control_drop(a);
}

/* Sends what waits. False: the connection was dropped. */
static bool control_flush(struct agent *a)
{
    struct control *c = &a->control;
    if (c->tx_len == 0)
        return true;
    ssize_t n = send(c->fd, c->tx, c->tx_len, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN) {
        control_drop(a);
        return false;
    }
    if (n > 0) {
        c->tx_len -= (uint32_t)n;
        memmove(c->tx, c->tx + n, c->tx_len);
    }
    if (c->tx_len > 0)
        control_watch(a, EPOLL_CTL_MOD);
    return c->fd >= 0;
}

/* Queues and sends. A peer that makes us queue more than the buffer holds is dropped. */
static void control_send(struct agent *a, uint32_t type, const void *payload, size_t len)
{
    struct control *c = &a->control;
    if (c->state != CONTROL_UP)
        return;
    if (c->tx_len + WIRE_HEADER_SIZE + len > sizeof c->tx) {
        control_drop(a);
        return;
    }
    wire_header_put(c->tx + c->tx_len, type, (uint32_t)len);
    if (len > 0)
        memcpy(c->tx + c->tx_len + WIRE_HEADER_SIZE, payload, len);
    c->tx_len += WIRE_HEADER_SIZE + (uint32_t)len;
    (void)control_flush(a);
}

static size_t line_put(uint8_t *out, size_t at, const char *key, const char *value, size_t len)
{
    size_t klen = strlen(key);
    if (at + klen + len + 2 > WIRE_HELLO_MAX)
        return at;
    memcpy(out + at, key, klen);
    out[at + klen] = '=';
    memcpy(out + at + klen + 1, value, len);
    out[at + klen + 1 + len] = '\n';
    return at + klen + len + 2;
}

static void hello_send(struct agent *a)
{
    uint8_t hello[WIRE_HELLO_MAX];
    char boot_id[BOOT_ID_LEN + 1];
    struct utsname name;
    wire_put32(hello, WIRE_PROTOCOL);
    size_t len = line_put(hello, 4, "agent", TINE_VERSION, strlen(TINE_VERSION));
    if (uname(&name) == 0)
        len = line_put(hello, len, "kernel", name.release, strlen(name.release));
    int fd = open(BOOT_ID_PATH, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, boot_id, BOOT_ID_LEN) : 0;
    if (fd >= 0)
        close(fd);
    if (n > 0)
        len = line_put(hello, len, "boot_id", boot_id, (size_t)n);
    control_send(a, WIRE_HELLO, hello, len);
}

static void control_established(struct agent *a)
{
    a->control.state = CONTROL_UP;
    a->control.up_since_ns = a->now_ns;
    hello_send(a);
}

static int control_connect(struct agent *a)
{
    struct control *c = &a->control;
    struct sockaddr_vm vm = {.svm_family = AF_VSOCK,
                             .svm_port = WIRE_VSOCK_CONTROL_PORT,
                             .svm_cid = WIRE_VSOCK_HOST_CID};
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    const struct sockaddr *addr = (const struct sockaddr *)&vm;
    socklen_t addr_len = sizeof vm;
    if (a->control_path != NULL) {
        size_t len = strlen(a->control_path);
        memcpy(un.sun_path, a->control_path, len < sizeof un.sun_path ? len : 0);
        addr = (const struct sockaddr *)&un;
        addr_len = sizeof un;
    }
    c->fd = socket(addr->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0)
        return -errno;
    return connect(c->fd, addr, addr_len) < 0 ? -errno : 0;
}

void control_tick(struct agent *a)
{
    struct control *c = &a->control;
    if (c->state != CONTROL_DOWN || a->now_ns < c->retry_ns)
        return;
    if (!a->is_guest && a->control_path == NULL)
        return;
    int rc = control_connect(a);
    if (rc < 0 && rc != -EINPROGRESS) {
        control_drop(a);
        return;
    }
    c->state = CONTROL_CONNECTING;
    control_watch(a, EPOLL_CTL_ADD);
    if (rc == 0 && c->fd >= 0) {
        c->state = CONTROL_UP;
        control_watch(a, EPOLL_CTL_MOD);
        if (c->fd >= 0)
            control_established(a);
    }
}

uint64_t control_deadline(const struct agent *a)
{
    if (a->control.state != CONTROL_DOWN || (!a->is_guest && a->control_path == NULL))
        return NEVER_NS;
    return a->control.retry_ns;
}

void agent_shutdown(struct agent *a, int reboot_command)
{
    if (a->is_guest) {
        sync();
        control_send(a, WIRE_BYE, NULL, 0);
        /* The socket hands its data to a worker of the kernel: let that run before all stops. */
        if (a->control.state == CONTROL_UP)
            (void)nanosleep(&(struct timespec){.tv_nsec = BYE_PAUSE_NS}, NULL);
        (void)reboot(reboot_command);
        say("reboot", NULL, errno); /* only reached if the kernel refused */
        return;
    }
    control_send(a, WIRE_BYE, NULL, 0);
    for (size_t i = 0; i < EXEC_MAX; i++)
        if (a->exec[i].used && a->exec[i].started && !a->exec[i].reaped)
            (void)kill(-a->exec[i].pid, SIGKILL);
    (void)unlink(a->listen_path);
    a->quit = true;
}

static void control_refuse(struct agent *a, enum wire_error_code code)
{
    uint8_t payload[4];
    wire_put32(payload, code);
    control_send(a, WIRE_ERROR, payload, sizeof payload);
    control_drop(a);
}

static void frame_act(struct agent *a, struct wire_header h, const uint8_t *payload)
{
    if (h.type == WIRE_RENEW) {
        struct wire_renewed answer;
        uint8_t frame[WIRE_HEADER_SIZE + WIRE_RENEWED_SIZE];
        renewer_apply(&a->renewer, payload, h.length, !a->is_guest, &answer);
        (void)wire_renewed_encode(&answer, frame, sizeof frame); /* the buffer fits exactly */
        control_send(a, WIRE_RENEWED, frame + WIRE_HEADER_SIZE, WIRE_RENEWED_SIZE);
        a->control.backoff_ms = 0;
    } else if (h.type == WIRE_SHUTDOWN) {
        agent_shutdown(a, RB_POWER_OFF);
    } else {
        control_refuse(a, WIRE_ERR_MALFORMED);
    }
}

static void control_receive(struct agent *a)
{
    struct control *c = &a->control;
    ssize_t n = recv(c->fd, c->rx + c->rx_len, sizeof c->rx - c->rx_len, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) {
        control_drop(a);
        return;
    }
    c->rx_len += (uint32_t)n;
    uint32_t used = 0;
    while (c->fd >= 0 && c->rx_len - used >= WIRE_HEADER_SIZE) {
        struct wire_header h = wire_header_get(c->rx + used);
        int rc = wire_header_check(h);
        if (rc < 0 || h.length > WIRE_CONTROL_PAYLOAD_MAX) {
            control_refuse(a, rc == -EPROTO ? WIRE_ERR_MALFORMED : WIRE_ERR_TOO_LARGE);
            return;
        }
        if (c->rx_len - used < WIRE_HEADER_SIZE + h.length)
            break;
        frame_act(a, h, c->rx + used + WIRE_HEADER_SIZE);
        used += WIRE_HEADER_SIZE + h.length;
    }
    if (c->fd < 0)
        return;
    c->rx_len -= used;
    memmove(c->rx, c->rx + used, c->rx_len);
}

void control_event(struct agent *a, uint32_t events)
{
    struct control *c = &a->control;
    if (c->fd < 0)
        return;
    if (c->state == CONTROL_CONNECTING) {
        int error = 0;
        socklen_t len = sizeof error;
        if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0 || error != 0) {
            control_drop(a);
            return;
        }
        if ((events & EPOLLOUT) == 0)
            return;
        c->state = CONTROL_UP;
        control_watch(a, EPOLL_CTL_MOD);
        if (c->fd >= 0)
            control_established(a);
        return;
    }
    if ((events & EPOLLOUT) != 0) {
        if (!control_flush(a))
            return;
        if (c->tx_len == 0)
            control_watch(a, EPOLL_CTL_MOD);
    }
    if (c->fd >= 0 && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0)
        control_receive(a);
}
