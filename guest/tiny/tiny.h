/*
 * tiny: what the bare test guests share. A guest is one C file with guest_main, entered in 64-bit
 * mode, interrupts off, low memory mapped one to one, with the boot parameters of the Linux/x86
 * boot protocol. No C library; integer registers only, so that it runs where SSE is not emulated.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

void guest_main(const uint8_t *boot_params);

static inline void port_out8(uint16_t port, uint8_t v)
{
    __asm__ volatile("outb %0, %1" ::"a"(v), "Nd"(port));
}

static inline void port_out16(uint16_t port, uint16_t v)
{
    __asm__ volatile("outw %0, %1" ::"a"(v), "Nd"(port));
}

static inline uint64_t time_stamp(void)
{
    uint32_t low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (uint64_t)high << 32 | low;
}

static inline void say_byte(char c)
{
    port_out8(0x3f8, (uint8_t)c);
}

static inline void say(const char *text)
{
    for (; *text != '\0'; text++)
        say_byte(*text);
}

static inline void say_hex(uint64_t v)
{
    for (int shift = 60; shift >= 0; shift -= 4)
        say_byte("0123456789abcdef"[(v >> shift) & 15]);
}

/* The kernel command line (boot_params.hdr.cmd_line_ptr, offset 0x228). */
static inline const char *command_line(const uint8_t *boot_params)
{
    return (const char *)(uintptr_t)(*(const uint32_t *)(boot_params + 0x228));
}

static inline void power_off(void)
{
    port_out16(0x604, 0x2000);
}

static inline void stop(void)
{
    for (;;)
        __asm__ volatile("cli; hlt");
}

/* The entry: a stack, then guest_main(boot_params). One guest is one program, so it stands here. */
__asm__(".globl _start\n"
        ".section .text.start, \"ax\"\n"
        "_start:\n"
        "   cli\n"
        "   lea tiny_stack_end(%rip), %rsp\n"
        "   mov %rsi, %rdi\n"
        "   call guest_main\n"
        "1: hlt\n"
        "   jmp 1b\n"
        ".section .bss\n"
        ".align 16\n"
        ".skip 16384\n"
        "tiny_stack_end:\n"
        ".text\n");
