/*
 * image_files: what the writer and the reader of images share.
 */
#pragma once

extern const char *const image_file_names[]; /* NULL-terminated */
