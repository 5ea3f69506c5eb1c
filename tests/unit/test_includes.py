#!/usr/bin/env python3
"""Which way the folders may look (docs/ARCHITECTURE.md): fails on an include that runs up, and on a
file of the CPU's architecture included outside vmm/arch."""
import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
# A folder may include itself and these.
ALLOWED = {
    "vmm/core": [],
    "vmm/arch": ["vmm/core"],
    "devices": ["vmm/core"],
    "snapshot": ["vmm/core"],
    "guest/agent": [],
    "guest/tiny": [],
    "vmm": ["vmm/core", "vmm/arch", "devices", "snapshot", "guest/agent"],
    "tools": ["vmm/core", "vmm", "guest/agent"],
}


def folder_of(path):
    """The longest folder of the table that holds the path."""
    hits = [f for f in ALLOWED if path.startswith(f + "/")]
    return max(hits, key=len) if hits else None


def complaints():
    seen = 0
    for path in sorted(p for f in ("vmm", "devices", "snapshot", "guest", "tools")
                       for p in (TOP / f).rglob("*.[ch]")):
        name = str(path.relative_to(TOP))
        own = folder_of(name)
        for target in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M):
            seen += 1
            other = folder_of(target)
            if other is None or own is None or other == own or other in ALLOWED[own]:
                pass
            else:
                yield f"{name} includes {target}: {own} must not look at {other}"
            if "/x86_64/" in target and not name.startswith("vmm/arch/"):
                yield f"{name} includes {target}: only vmm/arch knows the architecture"
    if seen < 100:
        yield f"only {seen} includes found: the test looks in the wrong place"


if __name__ == "__main__":
    found = list(complaints())
    print("\n".join(found))
    sys.exit(1 if found else 0)
