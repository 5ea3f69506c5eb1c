/*
 * The two endless loops of the bench guests, as assembler text.
 *
 * They are included by the ELF guest (guest/tick.S) that tine boots and by the floors, which copy
 * them into their guest's memory: both sides of a ratio run the same instructions.
 *
 * Registers at entry: dx = port, al = byte to say, rdi = first page to dirty, rcx = end of the
 * last, rbx = next page. TICK_OUT only speaks; TICK_DIRTY writes one page before each byte and goes
 * round for ever, so that a fork at any time finds all of [rdi, rcx) recently written.
 */
#pragma once

#define TICK_OUT                                                                                   \
    "1: out %al, (%dx)\n"                                                                          \
    "   jmp 1b\n"

#define TICK_DIRTY                                                                                 \
    "1: out %al, (%dx)\n"                                                                          \
    "   mov %rbx, (%rbx)\n"                                                                        \
    "   add $4096, %rbx\n"                                                                         \
    "   cmp %rcx, %rbx\n"                                                                          \
    "   jb 1b\n"                                                                                   \
    "   mov %rdi, %rbx\n"                                                                          \
    "   jmp 1b\n"
