/*
 * exit_status: why a machine ended, its word on the control socket and tine-vmm's exit status.
 *
 * The one table of it in code; docs/protocol.md has the same table for users and tests/unit keeps
 * the two together. Used by the machine (to end), by main.c (to exit) and by the command line (to
 * say what an exit status means). Pure data, any thread.
 *
 * Not in the table: a VMM killed by its own system call filter dies of SIGSYS (signal 31, 159 in a
 * shell) after a line that names the call.
 */
#pragma once

#include <stddef.h>

/*        enumerator       word              status  what happened */
#define END_REASONS(X)                                                                             \
    X(END_NONE, "none", 0, "the machine has not ended")                                            \
    X(END_POWEROFF, "poweroff", 0, "the guest powered itself off")                                 \
    X(END_STOPPED, "stopped", 0, "a stop or quit request ended it")                                \
    X(END_INTERNAL, "internal", 1, "a host call or the VMM itself failed")                         \
    X(END_USAGE, "usage", 2, "the command line or boot request was wrong")                         \
    X(END_REBOOT, "reboot", 3, "the guest asked for a reboot")                                     \
    X(END_PANIC, "panic", 4, "the guest kernel panicked")                                          \
    X(END_TRIPLE_FAULT, "triple-fault", 5, "the guest CPU shut down (triple fault)")               \
    X(END_EMULATION, "emulation", 6, "KVM could not emulate a guest instruction")                  \
    X(END_HALTED, "halted", 7, "every vCPU halted with interrupts off")                            \
    X(END_TERMINATED, "terminated", 8, "SIGTERM or SIGINT ended it")                               \
    X(END_RENEWAL, "renewal", 9, "a copy did not renew itself in time")

enum end_reason {
#define X(name, word, status, text) name,
    END_REASONS(X)
#undef X
};

static inline const char *end_reason_name(enum end_reason r)
{
    switch (r) {
#define X(name, word, status, text)                                                                \
    case name:                                                                                     \
        return word;
        END_REASONS(X)
#undef X
    }
    return "unknown";
}

static inline int end_reason_status(enum end_reason r)
{
    switch (r) {
#define X(name, word, status, text)                                                                \
    case name:                                                                                     \
        return status;
        END_REASONS(X)
#undef X
    }
    return 1;
}

/* What an exit status other than 0 says, for messages; NULL for a number tine-vmm never exits with.
 */
static inline const char *exit_status_text(int status)
{
#define X(name, word, number, text)                                                                \
    if (status == (number) && (number) != 0)                                                       \
        return text;
    END_REASONS(X)
#undef X
    return NULL;
}
