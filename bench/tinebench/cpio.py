"""A cpio archive (newc) with a few entries, to be appended to a guest's initramfs."""

import stat

TRAILER = "TRAILER!!!"


def _padded(data):
    return data + b"\0" * (-len(data) % 4)


def _entry(number, name, mode, data=b"", device=(0, 0)):
    fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08X" % f for f in fields)
    return _padded(head + name.encode() + b"\0") + _padded(data)


def with_program(name, program):
    """Folders bin and dev, /dev/console, and `program` (bytes) as bin/`name`."""
    entries = [
        ("bin", stat.S_IFDIR | 0o755, b"", (0, 0)),
        ("dev", stat.S_IFDIR | 0o755, b"", (0, 0)),
        ("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)),
        (f"bin/{name}", stat.S_IFREG | 0o755, program, (0, 0)),
        (TRAILER, 0, b"", (0, 0)),
    ]
    # Inode numbers far from those of the archive before: equal ones would be taken for hard links.
    return b"".join(_entry(0x70000 + i, *e) for i, e in enumerate(entries))
