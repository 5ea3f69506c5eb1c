/*
 * tick: a bare guest that says one byte after the other on the first serial port.
 *
 * A 64-bit ELF for the Linux boot protocol, linked at 2 MiB: entered in long mode with low memory
 * mapped one to one and rsi at the boot parameters. A command line that begins with a decimal
 * number says how many MiB it keeps dirty, from 16 MiB on; with none it only ticks. Its loops are
 * those of the floors.
 */
#include "tick_loop.h"

__asm__(".globl _start\n"
        ".text\n"
        "_start:\n"
        "   cli\n"
        "   mov 0x228(%rsi), %esi\n" /* boot_params.hdr.cmd_line_ptr */
        "   xor %ecx, %ecx\n"
        "   test %esi, %esi\n"
        "   jz 2f\n"
        "1: movzbl (%rsi), %eax\n"
        "   sub $0x30, %eax\n"
        "   cmp $9, %eax\n"
        "   ja 2f\n"
        "   imul $10, %ecx, %ecx\n"
        "   add %eax, %ecx\n"
        "   inc %rsi\n"
        "   jmp 1b\n"
        "2: shl $20, %rcx\n"
        "   mov $0x1000000, %edi\n"
        "   add %rdi, %rcx\n"
        "   mov %rdi, %rbx\n"
        "   mov $0x3f8, %edx\n"
        "   mov $0x74, %al\n"
        "   cmp %rdi, %rcx\n"
        "   ja 3f\n" TICK_OUT "3:\n" TICK_DIRTY);
