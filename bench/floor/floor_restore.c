/*
 * floor-restore: the floor of "a new process restores a machine".
 *
 *   floor-restore make DIR MIB       write DIR/memory and DIR/state
 *   floor-restore run DIR [FD]       restore them; pass the guest's bytes on to FD (default 1)
 *
 * `run` is what bench/run times, from just before the process is spawned to the first byte. It does
 * only the unavoidable: read the state, map the memory privately, make VM, slot, chip and vCPU,
 * load CPUID and registers, enter. No FPU, MSRs, interrupt state, devices, control socket or
 * filter: what those cost is what the ratio shows. Linked statically, like tine-vmm.
 */
#include "mini_vm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int file_open(int dir_fd, const char *name, int flags)
{
    int fd = openat(dir_fd, name, flags | O_CLOEXEC, 0600);
    if (fd < 0)
        mini_die(name);
    return fd;
}

static void make(int dir_fd, size_t bytes)
{
    struct mini_vm vm;
    struct mini_state state;
    mini_vm_open(&vm);

    int fd = file_open(dir_fd, "memory", O_RDWR | O_CREAT | O_TRUNC);
    if (ftruncate(fd, (off_t)bytes) < 0)
        mini_die("memory");
    void *ram = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ram == MAP_FAILED)
        mini_die("mmap of memory");
    mini_guest_build(&vm, ram, bytes, 0, &state);

    /* Run it once, so that what is saved is a machine in the middle of its work. */
    mini_vm_create(&vm, ram, bytes, &state);
    (void)mini_vm_tick(&vm);
    mini_vm_save(&vm, &state);

    int state_fd = file_open(dir_fd, "state", O_WRONLY | O_CREAT | O_TRUNC);
    if (write(state_fd, &state, sizeof state) != (ssize_t)sizeof state)
        mini_die("state");
}

static void run(int dir_fd, int out_fd)
{
    static struct mini_state state;
    struct mini_vm vm;
    if (read(file_open(dir_fd, "state", O_RDONLY), &state, sizeof state) != (ssize_t)sizeof state)
        mini_die("state");
    size_t bytes = state.ram_bytes;
    void *ram = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                     file_open(dir_fd, "memory", O_RDONLY), 0);
    if (ram == MAP_FAILED)
        mini_die("mmap of memory");
    mini_vm_open(&vm);
    mini_vm_create(&vm, ram, bytes, &state);
    for (;;) {
        uint8_t byte = mini_vm_tick(&vm);
        if (write(out_fd, &byte, 1) != 1)
            return; /* the reader has gone: the sample is over */
    }
}

int main(int argc, char **argv)
{
    int dir_fd = argc < 3 ? -1 : open(argv[2], O_DIRECTORY | O_PATH | O_CLOEXEC);
    if (argc == 4 && !strcmp(argv[1], "make") && dir_fd >= 0)
        make(dir_fd, strtoul(argv[3], NULL, 10) << 20);
    else if ((argc == 3 || argc == 4) && !strcmp(argv[1], "run") && dir_fd >= 0)
        run(dir_fd, argc == 4 ? atoi(argv[3]) : STDOUT_FILENO);
    else {
        fprintf(stderr, "usage: floor-restore make DIR MIB | floor-restore run DIR [FD]\n");
        return 2;
    }
    return 0;
}
