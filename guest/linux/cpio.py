#!/usr/bin/env python3
"""Writes an initramfs (cpio, "newc" format) from a list, without root and the same each time.

    cpio.py LIST > initrd

LIST has one entry a line, in the order in which the kernel shall make them:

    dir   /proc 0755
    nod   /dev/console 0600 c 5 1
    slink /bin/sh busybox
    file  /init build/guest/agent/tine-agent 0755

Owner is root, time stamps are zero, so equal inputs give equal bytes. guest/linux/build calls this.
"""

import os
import stat
import sys


def pad(out, size):
    """newc aligns headers and contents to four bytes."""
    out.write(b"\0" * (-size % 4))


def entry(out, number, name, mode, content=b"", device=(0, 0), links=1):
    """One header, its name and its content."""
    name = name.encode() + b"\0"
    fields = (
        number,
        mode,
        0,  # uid
        0,  # gid
        links,
        0,  # mtime
        len(content),
        0,  # device of the file system it came from
        0,
        device[0],
        device[1],
        len(name),
        0,  # checksum, unused in this format
    )
    header = b"070701" + b"".join(b"%08X" % value for value in fields)
    out.write(header + name)
    pad(out, len(header) + len(name))
    out.write(content)
    pad(out, len(content))


def add(out, number, words):
    """One line of the list."""
    kind, path = words[0], words[1].lstrip("/")
    if kind == "dir" and len(words) == 3:
        entry(out, number, path, stat.S_IFDIR | int(words[2], 8), links=2)
    elif kind == "nod" and len(words) == 6 and words[3] in ("b", "c"):
        form = stat.S_IFBLK if words[3] == "b" else stat.S_IFCHR
        entry(out, number, path, form | int(words[2], 8), device=(int(words[4]), int(words[5])))
    elif kind == "slink" and len(words) == 3:
        entry(out, number, path, stat.S_IFLNK | 0o777, words[2].encode())
    elif kind == "file" and len(words) == 4:
        with open(words[2], "rb") as source:
            entry(out, number, path, stat.S_IFREG | int(words[3], 8), source.read())
    else:
        raise ValueError("not an entry: " + " ".join(words))


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as listing, os.fdopen(1, "wb") as out:
        # Inode numbers start above 0; the kernel only compares them for hard links.
        for number, line in enumerate(listing, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                add(out, number, words)
            except (OSError, ValueError) as problem:
                sys.exit(f"cpio.py: {sys.argv[1]}:{number}: {problem}")
        entry(out, 0, "TRAILER!!!", 0)


if __name__ == "__main__":
    main()
