"""What a process costs beside its guest's memory."""

import re

HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)$")


def overhead_kib(pid, guest_bytes, guest_folder):
    """
    PSS in KiB of every mapping that is not guest memory. Guest memory is what is mapped from a file
    under guest_folder, or is at least half as large as the guest: nothing else comes near.
    """
    total, counted = 0, False
    with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as f:
        for line in f:
            header = HEADER.match(line)
            if header:
                size = int(header[2], 16) - int(header[1], 16)
                counted = size < guest_bytes // 2 and not header[3].startswith(guest_folder + "/")
            elif counted and line.startswith("Pss:"):
                total += int(line.split()[1])
    return total
