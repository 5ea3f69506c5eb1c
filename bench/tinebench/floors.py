"""The floor programs as contenders."""

import json
import os
import subprocess

from .clock import Launch


class FloorRestore:
    """A process that only does what no restore can leave out."""

    name = "floor"

    def __init__(self, build, folder):
        self.program = os.path.join(build, "bench", "floor-restore")
        self.folder = os.path.join(folder, "floor")
        os.makedirs(self.folder, exist_ok=True)

    def prepare(self, guest, copies):  # all copies would be equal
        subprocess.run([self.program, "make", self.folder, str(guest.memory_mib)], check=True)

    def launch(self):
        return Launch([self.program, "run", self.folder, "3"], fd=3)


class FloorFork:
    """A process that only has a VM and forks it; one sample for each line we send."""

    def __init__(self, build, memory_mib, dirty_mib):
        argv = [os.path.join(build, "bench", "floor-fork"), "--step", "--huge",
                "--memory", str(memory_mib), "--dirty", str(dirty_mib)]
        self.process = subprocess.Popen(argv, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def fork(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("floor-fork ended")
        sample = json.loads(line)
        return {key: sample[key][0] for key in ("pause_us", "child_us", "create_us", "resume_us")}

    def close(self):
        self.process.communicate()
