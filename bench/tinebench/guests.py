"""The guests that are measured: a bare one, and the lean Linux of guest/linux with a ticker as init."""

import os
import shlex
import subprocess

from . import cpio
from .errors import NotHere

MEMORY_MIB = 64
TICKER = "ticker"


class Guest:
    """What any VMM needs to boot it, and the byte that says that it runs."""

    def __init__(self, name, kernel, initrd, cmdline, tick):
        self.name = name
        self.kernel = kernel
        self.initrd = initrd
        self.cmdline = cmdline
        self.tick = tick
        self.memory_mib = MEMORY_MIB


def bare(build, dirty_mib=0):
    return Guest(f"bare-{dirty_mib}", os.path.join(build, "bench", "tick.elf"), None,
                 str(dirty_mib) if dirty_mib else "", "t")


def lean(source, build, folder):
    """
    The same kernel and initramfs (agent and all) as the default guest, with the ticker appended and
    made init: it needs no host to talk to, so every VMM can run it as it is.
    """
    recipe = os.path.join(source, "guest", "linux", "build")
    if not os.path.exists(recipe):
        raise NotHere("guest/linux/build is not there")
    built = subprocess.run([recipe, "lean"], stdout=subprocess.PIPE, text=True, check=False,
                           env={**os.environ, "BUILD": build})
    if built.returncode:
        raise NotHere(f"guest/linux/build lean failed with status {built.returncode}")
    made = built.stdout.splitlines()[-1]
    with open(os.path.join(made, "initrd"), "rb") as f:
        initrd = f.read()
    with open(os.path.join(build, "bench", TICKER), "rb") as f:
        program = f.read()
    path = os.path.join(folder, "lean-initrd")
    with open(path, "wb") as f:
        f.write(initrd + b"\0" * (-len(initrd) % 4) + cpio.with_program(TICKER, program))
    with open(os.path.join(made, "cmdline"), encoding="utf-8") as f:
        words = shlex.split(f.read())
    words = [w for w in words if not w.startswith("rdinit=")] + [f"rdinit=/bin/{TICKER}"]
    return Guest("lean", os.path.join(made, "kernel"), path, " ".join(words), "T")
