/*
 * Fuzz target of the agent's side of an exec connection: any bytes as what the client sends,
 * through exec_in.c. Starting and ending a program are replaced: the start checks that what would
 * be handed to execve lies within the request, the end just closes. Seeds: seeds/agent_exec.
 */
#include "guest/agent/agent.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct agent agent; /* only its clock is read */
static struct exec x;

int loop_watch(struct agent *a, int op, int fd, uint32_t events, enum source source,
               const struct exec *slot)
{
    return 0;
}

int exec_spawn(struct agent *a, struct exec *slot, const struct wire_exec *request, const char *cwd,
               uint32_t *what)
{
    struct wire_exec walk = *request;
    size_t bytes = strlen(cwd) + 1;
    assert(walk.argc >= 1 && walk.argc <= WIRE_ARGC_MAX && walk.envc <= WIRE_ENVC_MAX);
    for (uint32_t i = 0; i < walk.argc + walk.envc; i++) {
        const char *s = wire_exec_next(&walk);
        assert(s != NULL);
        assert(i < walk.argc || strchr(s, '=') > s);
        bytes += strlen(s) + 1;
    }
    assert(walk.strings_len == 0 && bytes + WIRE_EXEC_HEAD_SIZE <= WIRE_EXEC_PAYLOAD_MAX);
    if (request->argc % 16 == 15) {
        *what = WIRE_FAILED_PROGRAM;
        return ENOENT;
    }
    slot->started = true;
    slot->reaped = true; /* no process: signals go nowhere */
    slot->in_fd = (request->flags & WIRE_EXEC_STDIN) != 0 ? open("/dev/null", O_WRONLY) : -1;
    return 0;
}

void exec_gone(struct agent *a, struct exec *slot)
{
    close(slot->conn);
    slot->conn = -1;
    exec_input_close(slot);
}

void exec_error(struct agent *a, struct exec *slot, enum wire_error_code code, const char *text)
{
    assert(code >= WIRE_ERR_MALFORMED && code <= WIRE_ERR_NO_MEMORY && text[0] != 0);
    slot->last_queued = true;
    exec_input_close(slot);
}

void exec_put_frame(struct exec *slot, uint32_t type, const void *payload, size_t len)
{
    assert(wire_header_check((struct wire_header){type, (uint32_t)len}) == 0);
}

void exec_put_text(struct exec *slot, uint32_t type, const uint32_t *words, size_t nwords,
                   const char *text)
{
    assert(type == WIRE_FAILED && nwords == 2 && text != NULL);
    slot->last_queued = true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int pair[2];
    if (size > 65536 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) < 0)
        return 0;
    memset(&x, 0, offsetof(struct exec, rx));
    x.used = true;
    x.conn = pair[0];
    x.in_fd = x.out[0].fd = x.out[1].fd = -1;
    x.window = WIRE_STDIN_WINDOW;
    if (size > 0 && write(pair[1], data, size) != (ssize_t)size)
        abort();
    close(pair[1]);
    while (x.conn >= 0 && !x.last_queued) {
        exec_receive(&agent, &x);
        assert(x.rx_len <= sizeof x.rx && x.in_len <= sizeof x.in && x.big_len <= x.big_size);
        if (x.in_fd >= 0)
            exec_input_flush(&agent, &x);
    }
    if (x.conn >= 0)
        close(x.conn);
    exec_input_close(&x);
    return 0;
}
