/*
 * renewal: see renewal.h. Bytes on the control connection come from the guest: every frame's type
 * and length is checked before its payload is awaited, and one that does not fit ends the
 * connection's trust, not the machine: the copy then fails by its time limit.
 */
#include "vmm/renewal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "vmm/core/err.h"
#include "vmm/core/fd.h"
#include "vmm/core/log.h"
#include "vmm/machine.h"

#define NS_PER_S 1000000000ull

static void on_opened(void *arg)
{
    struct machine *m = arg;
    m->renewal.have = 0; /* a new connection begins with a new frame */
}

static void on_closed(void *arg)
{
    on_opened(arg);
}

/* Copies the value of `key=` in HELLO's lines, printable characters only. */
static void hello_value(const char *text, size_t len, const char *key, char *out, size_t out_len)
{
    size_t key_len = strlen(key);
    for (const char *p = text, *end = text + len; p < end;) {
        const char *line_end = memchr(p, '\n', (size_t)(end - p));
        size_t line = line_end != NULL ? (size_t)(line_end - p) : (size_t)(end - p);
        if (line > key_len + 1 && memcmp(p, key, key_len) == 0 && p[key_len] == '=') {
            size_t n = 0;
            for (const char *c = p + key_len + 1; c < p + line && n + 1 < out_len; c++)
                out[n++] = *c > ' ' && *c < 0x7f ? *c : '?';
            out[n] = '\0';
            return;
        }
        p += line + 1;
    }
}

static void take_hello(struct machine *m, const uint8_t *p, size_t len)
{
    const char *text;
    size_t text_len;
    if (wire_hello_decode(p, len, &text, &text_len) < 0) {
        log_line(LOG_WARN, "agent speaks another protocol than %u", WIRE_PROTOCOL);
        return;
    }
    hello_value(text, text_len, "boot_id", m->boot_id, sizeof m->boot_id);
    if (m->guest == GUEST_SILENT && !m->is_copy) {
        machine_guest_ready(m);
        return;
    }
    if (m->guest == GUEST_READY)
        return; /* it lost the connection and connected again */
    /* A copy whose agent comes up only now, or one that lost the connection before it answered. */
    m->guest = GUEST_RENEWING;
    struct err e = {0};
    if (renewal_begin(m, &e) < 0)
        machine_renewal_failed(m, &e);
}

static void take_renewed(struct machine *m, const uint8_t *p, size_t len)
{
    struct renewal *r = &m->renewal;
    struct wire_renewed got;
    struct err e = {0};
    if (!r->is_waiting || wire_renewed_decode(p, len, &got) < 0)
        return; /* answers nothing that was asked */
    if (memcmp(got.generation_id, r->generation_id, sizeof got.generation_id) != 0) {
        (void)err_set(&e, ERR_GUEST, 0, "renewal: the agent answered for another generation id");
    } else if (got.status != 0) {
        (void)err_set(&e, ERR_GUEST, got.status < 4096 ? (int)got.status : 0,
                      "renewal: the agent failed at step %u", got.step);
    } else {
        r->is_waiting = false;
        loop_timer_cancel(&m->loop, &r->timer);
        m->phases.renew_ns = clock_mono_ns() - r->sent_ns;
        machine_guest_ready(m);
        return;
    }
    machine_renewal_failed(m, &e);
}

static void take_frame(struct machine *m, uint32_t type, const uint8_t *p, size_t len)
{
    switch (type) {
    case WIRE_HELLO:
        take_hello(m, p, len);
        break;
    case WIRE_RENEWED:
        take_renewed(m, p, len);
        break;
    case WIRE_BYE: /* the agent has synced and powers off; a kernel without a switch only halts */
        machine_end(m, END_POWEROFF, "the agent shut the guest down");
        break;
    default:
        break; /* types of other directions carry nothing for us */
    }
}

static bool header_is_sound(struct wire_header h)
{
    return wire_header_check(h) == 0 && h.length <= WIRE_CONTROL_PAYLOAD_MAX;
}

static void on_data(void *arg, const void *bytes, size_t len)
{
    struct machine *m = arg;
    struct renewal *r = &m->renewal;
    const uint8_t *p = bytes;
    while (len > 0 && m->end == END_NONE) {
        size_t want = WIRE_HEADER_SIZE;
        if (r->have >= WIRE_HEADER_SIZE)
            want += wire_header_get(r->buf).length;
        size_t n = want - r->have < len ? want - r->have : len;
        memcpy(r->buf + r->have, p, n);
        r->have += n;
        p += n;
        len -= n;
        if (r->have < WIRE_HEADER_SIZE)
            continue;
        struct wire_header h = wire_header_get(r->buf);
        if (!header_is_sound(h)) {
            log_line(LOG_WARN, "control connection: frame of type %u and %u bytes dropped", h.type,
                     h.length);
            r->have = 0;
            return;
        }
        if (r->have == WIRE_HEADER_SIZE + h.length) {
            r->have = 0;
            take_frame(m, h.type, r->buf + WIRE_HEADER_SIZE, h.length);
        }
    }
}

const struct vsock_control_ops renewal_control_ops = {
    .opened = on_opened,
    .data = on_data,
    .closed = on_closed,
};

static void on_timeout(void *arg)
{
    struct machine *m = arg;
    struct err e = {0};
    (void)err_set(&e, ERR_GUEST, 0, "renewal: no answer from the agent within %llu s",
                  (unsigned long long)(RENEWAL_TIMEOUT_NS / NS_PER_S));
    machine_renewal_failed(m, &e);
}

static int fill_random(void *p, size_t len, struct err *e)
{
    ssize_t n = getrandom(p, len, 0);
    if (n != (ssize_t)len)
        return err_sys(e, "getrandom of %zu bytes", len);
    return 0;
}

int renewal_begin(struct machine *m, struct err *e)
{
    struct renewal *r = &m->renewal;
    if (!vsock_control_is_open(machine_vsock(m))) {
        /* Cut while the agent was between two connections: its next HELLO begins the renewal. */
        loop_timer_arm(&m->loop, &r->timer, RENEWAL_TIMEOUT_NS, on_timeout, m);
        return 0;
    }
    const char *name = r->host_name[0] != '\0' ? r->host_name : m->bind.id;
    struct wire_renew w = {0};
    int rc = fill_random(w.entropy, sizeof w.entropy, e);
    if (rc == 0)
        rc = fill_random(w.generation_id, sizeof w.generation_id, e);
    if (rc == 0)
        rc = fill_random(w.machine_id, sizeof w.machine_id, e);
    if (rc < 0)
        return rc;
    (void)snprintf(w.hostname, sizeof w.hostname, "%s", name);
    w.hostname_len = (uint8_t)strlen(w.hostname);
    w.wall_clock_ns = clock_real_ns();
    uint8_t frame[WIRE_HEADER_SIZE + WIRE_RENEW_SIZE];
    int len = wire_renew_encode(&w, frame, sizeof frame);
    if (len < 0)
        return err_set(e, ERR_HOST, -len, "encode renewal");
    rc = vsock_control_send(machine_vsock(m), frame, (size_t)len, e);
    explicit_bzero(&w.entropy, sizeof w.entropy);
    explicit_bzero(frame, sizeof frame);
    if (rc < 0)
        return err_wrap(e, rc, "renewal");
    memcpy(r->generation_id, w.generation_id, sizeof r->generation_id);
    r->is_waiting = true;
    r->sent_ns = clock_mono_ns();
    loop_timer_arm(&m->loop, &r->timer, RENEWAL_TIMEOUT_NS, on_timeout, m);
    return 0;
}

int renewal_load(struct renewal *r, const void *bytes, size_t len, struct err *e)
{
    if (len >= sizeof r->buf)
        return err_set(e, ERR_BAD_IMAGE, 0, "control-bytes of %zu bytes, expected less than %zu",
                       len, sizeof r->buf);
    if (len >= WIRE_HEADER_SIZE) { /* on_data relies on a header that was checked */
        struct wire_header h = wire_header_get(bytes);
        if (!header_is_sound(h) || len >= WIRE_HEADER_SIZE + h.length)
            return err_set(e, ERR_BAD_IMAGE, 0,
                           "control-bytes: %zu bytes of a frame of type %u and %u bytes", len,
                           h.type, h.length);
    }
    memcpy(r->buf, bytes, len);
    r->have = len;
    return 0;
}

int renewal_shutdown(struct machine *m, struct err *e)
{
    uint8_t frame[WIRE_HEADER_SIZE];
    wire_header_put(frame, WIRE_SHUTDOWN, 0);
    return vsock_control_send(machine_vsock(m), frame, sizeof frame, e);
}
