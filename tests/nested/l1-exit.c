/* Ends the QEMU that runs the nested tests, through its isa-debug-exit device at port 0xf4: QEMU's
 * own exit status becomes (STATUS << 1) | 1. Called by tests/nested/init inside that machine, as
 * root. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/io.h>

enum { EXIT_PORT = 0xf4 };

int main(int argc, char **argv)
{
    unsigned char status = argc > 1 ? (unsigned char)atoi(argv[1]) : 0;

    if (ioperm(EXIT_PORT, 1, 1) < 0) {
        perror("l1-exit: ioperm");
        return 1;
    }
    outb(status, EXIT_PORT);
    return 0;
}
