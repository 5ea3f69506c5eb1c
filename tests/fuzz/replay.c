/*
 * Runs a fuzz target over files (its seeds, or an input that once failed) where no fuzzer is at
 * hand; each file also cut at every length and with every bit of a byte turned, one byte at a time.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILE_MAX 65536

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* An exact-size copy each time, so that a sanitizer sees a read past the end. */
static void run(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size > 0 ? size : 1);
    if (copy == NULL)
        abort();
    memcpy(copy, data, size);
    (void)LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

int main(int argc, char **argv)
{
    static uint8_t data[FILE_MAX];
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        if (f == NULL) {
            perror(argv[i]);
            return 1;
        }
        size_t size = fread(data, 1, sizeof data, f);
        (void)fclose(f);
        for (size_t cut = 0; cut <= size; cut++)
            run(data, cut);
        for (size_t at = 0; at < size; at++) {
            for (unsigned bit = 0; bit < 8; bit++) {
                data[at] ^= (uint8_t)(1u << bit);
                run(data, size);
                data[at] ^= (uint8_t)(1u << bit);
            }
        }
    }
    return 0;
}
