"""QEMU's microvm under KVM: saved by migration to a file, restored by `-incoming exec:cat`."""

import itertools
import json
import os
import shlex
import shutil
import socket
import subprocess
import time

from tinebench.clock import Launch
from tinebench.console import stagger, wait_for_ticks
from tinebench.errors import NotHere

PROGRAM = "qemu-system-x86_64"


class Qmp:
    """Its control socket: one JSON object a line, events in between."""

    def __init__(self, path, process):
        deadline = time.monotonic() + 10
        self.socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self.socket.connect(path)
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.01)
        self.lines = self.socket.makefile("rw")
        self.lines.readline()  # its greeting
        self.call("qmp_capabilities")

    def call(self, command, **arguments):
        self.lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self.lines.flush()
        while True:
            answer = json.loads(self.lines.readline())
            if "error" in answer:
                raise RuntimeError(f"qemu: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]


class Qemu:
    name = "qemu-microvm"

    def __init__(self, folder, program=None):
        self.program = program or shutil.which(PROGRAM)
        if not self.program:
            raise NotHere(f"{PROGRAM} is not installed")
        self.folder = os.path.join(folder, "qemu")
        os.makedirs(self.folder, exist_ok=True)
        self.guest = None
        self.turns = None

    def _saved(self, i):
        return os.path.join(self.folder, f"saved-{i}")

    def _argv(self):
        g = self.guest
        # Some KVMs list MSR 0x10a, which this QEMU then fails to set: leave out what it is for.
        cpu = "host,-arch-capabilities"
        argv = [self.program, "-M", "microvm,accel=kvm,acpi=off", "-cpu", cpu, "-smp", "1",
                "-m", str(g.memory_mib), "-nodefaults", "-no-user-config", "-display", "none",
                "-no-reboot", "-serial", "stdio", "-kernel", g.kernel, "-append", g.cmdline]
        return argv + (["-initrd", g.initrd] if g.initrd else [])

    def prepare(self, guest, copies):
        self.guest = guest
        self.turns = itertools.cycle(range(copies))
        path = os.path.join(self.folder, "qmp")
        with subprocess.Popen([*self._argv(), "-qmp", f"unix:{path},server=on,wait=off"],
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            try:
                qmp = Qmp(path, process)
                for i in range(copies):
                    wait_for_ticks(process.stdout.fileno(), guest.tick, process, "qemu")
                    stagger(i, copies)
                    # Not stopped first: a copy of a stopped guest would stay stopped.
                    self._save(qmp, self._saved(i))
                    qmp.call("cont")
            finally:
                process.kill()

    @staticmethod
    def _save(qmp, path):
        qmp.call("migrate", uri=f"exec:cat >{shlex.quote(path)}")
        while (state := qmp.call("query-migrate")["status"]) != "completed":
            if state in ("failed", "cancelled"):
                raise RuntimeError(f"qemu: migration {state}")
            time.sleep(0.02)

    def launch(self):
        saved = shlex.quote(self._saved(next(self.turns)))
        return Launch([*self._argv(), "-incoming", f"exec:cat {saved}"],
                      byte=self.guest.tick)
