"""The stopwatch program, and taking samples in turns."""

import json
import subprocess
import sys
import time

TIMEOUT_S = 60


class Launch:
    """One process start to be timed: what to run and where its guest's bytes come out."""

    def __init__(self, argv, fd=1, byte=None, poke=None):
        self.argv = argv
        self.fd = fd
        self.byte = byte
        self.poke = poke  # (Unix socket, file with the bytes to send to it)


class Stopwatch:
    def __init__(self, program):
        self.program = program

    def run(self, launch, look=None):
        """Time one start. Returns (microseconds to the first byte, look(pid) of the running process)."""
        argv = [self.program, "--fd", str(launch.fd), "--timeout", str(TIMEOUT_S), "--hold"]
        if launch.byte:
            argv += ["--byte", launch.byte]
        if launch.poke:
            argv += ["--poke", *launch.poke]
        with subprocess.Popen([*argv, "--", *launch.argv], stdin=subprocess.PIPE, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{launch.argv[0]}: {process.communicate()[1].strip()}")
            result = json.loads(line)
            seen = look(result["pid"]) if look else None
            process.communicate()  # end of input: the program is killed and waited for
        return result["first_byte_us"], seen


def in_turns(samples, takers, what):
    """
    Call every taker once per round, so that a slow moment of the machine falls on all of them alike.
    `takers` maps a name to a function without arguments; returns name -> list of its results.
    """
    taken = {name: [] for name in takers}
    told = time.monotonic()
    for i in range(samples):
        for name, take in takers.items():
            taken[name].append(take())
        if time.monotonic() - told > 2:
            told = time.monotonic()
            print(f"{what}: {i + 1}/{samples}", file=sys.stderr)
    return taken
