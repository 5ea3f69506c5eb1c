/*
 * boot_spec: what a boot loads and where the first vCPU then starts. Filled by machine.c, read by
 * the architecture's boot code; fds and strings stay the caller's.
 */
#pragma once

#include <stdint.h>

struct boot_spec {
    int kernel_fd;
    const char *kernel_path; /* for messages */
    int initrd_fd;           /* -1: none */
    const char *initrd_path;
    const char *cmdline; /* user text, may be "" */
    unsigned cpus;
    unsigned virtio_count; /* devices in slots 0.. */
};

/* How vCPU 0 starts: 64-bit mode, interrupts off, rsi = boot_params. Addresses are the guest's. */
struct boot_entry {
    uint64_t rip, rsi, cr3, gdt_base;
    uint16_t gdt_limit;
    uint16_t cs, ds, tss; /* selectors */
};
