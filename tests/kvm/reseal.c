/*
 * reseal: makes the manifest of an image agree with a state.dtb that a test has changed, as
 * somebody would who means harm: the checksum then guards nothing and the state itself must be
 * distrusted.
 */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static char *read_all(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return NULL;
    char *p = malloc(16u << 20);
    *len = p != NULL ? fread(p, 1, 16u << 20, f) : 0;
    (void)fclose(f);
    return p;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        (void)fprintf(stderr, "usage: reseal IMAGE\n");
        return 2;
    }
    char path[4096], sum[17];
    (void)snprintf(path, sizeof path, "%s/state.dtb", argv[1]);
    size_t len = 0;
    char *state = read_all(path, &len);
    (void)snprintf(path, sizeof path, "%s/manifest.json", argv[1]);
    json_t *manifest = json_load_file(path, 0, NULL);
    if (state == NULL || manifest == NULL) {
        (void)fprintf(stderr, "reseal: %s is no image\n", argv[1]);
        return 1;
    }
    (void)snprintf(sum, sizeof sum, "%016" PRIx64, XXH3_64bits(state, len));
    json_t *entry = json_object_get(manifest, "state.dtb");
    (void)json_object_set_new(entry, "bytes", json_integer((json_int_t)len));
    (void)json_object_set_new(entry, "xxh3", json_string(sum));
    free(state);
    int rc = json_dump_file(manifest, path, JSON_INDENT(2));
    json_decref(manifest);
    return rc == 0 ? 0 : 1;
}
