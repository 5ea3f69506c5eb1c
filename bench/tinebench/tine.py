"""Driving tine-vmm as a contender: boot, snapshot, restore, fork."""

import itertools
import json
import os
import socket
import subprocess
import time

from .clock import Launch
from .console import stagger, wait_for_ticks
from .errors import NotHere

CONSOLE_FD = 3
START_TIMEOUT_S = 10
END_TIMEOUT_S = 60  # a busy host is slow at closing a VM
ANSWER_TIMEOUT_S = 120


class Control:
    """One connection to a control socket (docs/protocol.md): JSON-RPC 2.0, one message a line."""

    def __init__(self, path, process=None):
        deadline = time.monotonic() + START_TIMEOUT_S
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_TIMEOUT_S)
        while True:
            try:
                self.socket.connect(path)
                break
            except OSError as e:
                if process and process.poll() is not None:
                    raise RuntimeError(f"tine-vmm ended with status {process.returncode}") from e
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{path}: {e}") from e
                time.sleep(0.005)
        self.lines = self.socket.makefile("rw")
        self.number = 0

    def call(self, method, **params):
        self.number += 1
        request = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}
        self.lines.write(json.dumps(request) + "\n")
        self.lines.flush()
        while True:
            line = self.lines.readline()
            if not line:
                raise RuntimeError(f"tine-vmm: {method}: the connection ended")
            answer = json.loads(line)
            if answer.get("id") == self.number:
                break
        if "error" in answer:
            raise RuntimeError(f"tine-vmm: {method}: {answer['error'].get('message')}")
        return answer["result"]

    def close(self):
        self.lines.close()
        self.socket.close()


def vmm_path(build):
    path = os.path.join(build, "vmm", "tine-vmm")
    if not os.path.exists(path):
        raise NotHere(f"{path} is not built: meson setup build && ninja -C build")
    return path


class Machine:
    """A booted machine. Its console goes to a pipe that is read while waiting for ticks only."""

    def __init__(self, vmm, guest, folder):
        self.guest = guest
        self.control_path = os.path.join(folder, "machine.sock")
        argv = [vmm, "--control", self.control_path, "--kernel", guest.kernel,
                "--memory", str(guest.memory_mib), "--cmdline", guest.cmdline]
        if guest.initrd:
            argv += ["--initrd", guest.initrd]
        self.console, write_fd = os.pipe()
        self.log = os.path.join(folder, "log")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*argv, "--console", f"fd:{write_fd}"], pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
        os.close(write_fd)
        try:
            self.control = Control(self.control_path, self.process)
            self.wait_for_ticks()
        except RuntimeError as e:
            self.__exit__()
            with open(self.log, encoding="utf-8", errors="replace") as log:
                raise RuntimeError(f"{e}; it said: {log.read()[-500:].strip()}") from e

    def wait_for_ticks(self):
        wait_for_ticks(self.console, self.guest.tick, self.process, "tine-vmm")

    def wait_for_bytes(self, count):
        """
        Until the guest has written `count` more bytes. Counted by tine-vmm: a reader of the console
        would be woken for every byte and take a core away from what is measured.
        """
        def written():
            return self.control.call("status")["console_bytes"]

        deadline, wanted = time.monotonic() + ANSWER_TIMEOUT_S, written() + count
        while written() < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"tine-vmm: {count} bytes did not come")
            time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        os.close(self.console)


class Tine:
    """tine-vmm restoring an image in a new process."""

    name = "tine"

    def __init__(self, vmm, folder):
        self.vmm = vmm
        self.folder = os.path.join(folder, "tine")
        self.guest = None
        self.turns = None

    def _image(self, i):
        return os.path.join(self.folder, f"image-{i}")

    def prepare(self, guest, copies):
        self.guest = guest
        self.turns = itertools.cycle(range(copies))
        self.folder = f"{self.folder}-{guest.name}"
        os.makedirs(self.folder, exist_ok=True)
        with Machine(self.vmm, guest, self.folder) as machine:
            for i in range(copies):
                machine.wait_for_ticks()
                stagger(i, copies)
                machine.control.call("snapshot", dir=self._image(i))

    def launch(self):
        control = os.path.join(self.folder, "restored.sock")
        if os.path.exists(control):
            os.unlink(control)
        return Launch([self.vmm, "--control", control, "--restore", self._image(next(self.turns)),
                       "--console", f"fd:{CONSOLE_FD}"], fd=CONSOLE_FD, byte=self.guest.tick)


class ForkParent:
    """A running machine that keeps `dirty_mib` written, to be forked again and again."""

    name = "tine"

    def __init__(self, vmm, guest, folder, dirty_mib):
        self.folder = os.path.join(folder, f"fork-{dirty_mib}")
        os.makedirs(self.folder, exist_ok=True)
        self.pages = (dirty_mib << 20) // 4096
        self.machine = Machine(vmm, guest, self.folder)
        self.machine.wait_for_bytes(self.pages)
        self.machine.control.call("pause")

    def fork(self):
        """One fork of the live machine; how long it stood, and when its child ran, in microseconds."""
        control = self.machine.control
        control.call("resume")
        answer = control.call("fork", count=1)
        child = answer["children"][0]
        self.machine.wait_for_bytes(self.pages)  # the child lives while the parent writes on
        first_exit_us = self._observe_and_end(child)
        control.call("pause")  # while others are measured
        return {"pause_us": answer["timings"]["stopped_us"], "child_us": first_exit_us}

    @staticmethod
    def _observe_and_end(child):
        """When the child's guest first left its VM; returns when the child's process is gone."""
        deadline = time.monotonic() + END_TIMEOUT_S
        connection = Control(child["control"])
        while (us := connection.call("status")["timings"].get("first_exit_us")) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"tine-vmm: child {child['pid']} does not run")
            time.sleep(0.001)
        connection.call("quit")
        connection.close()
        while os.path.exists(f"/proc/{child['pid']}"):  # closing a VM takes a while
            if time.monotonic() > deadline:
                raise RuntimeError(f"tine-vmm: child {child['pid']} does not end")
            time.sleep(0.002)
        return us

    def close(self):
        self.machine.__exit__()
