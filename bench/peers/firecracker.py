"""Firecracker: saved by its API to two files, restored by one request to a fresh process."""

import http.client
import itertools
import json
import os
import socket
import subprocess
import time

from tinebench.clock import Launch
from tinebench.console import stagger, wait_for_ticks
from tinebench.errors import NotHere


class _Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def _wait_for(path, process):
    deadline = time.monotonic() + 10
    while not os.path.exists(path):
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError("firecracker made no API socket")
        time.sleep(0.01)


class Firecracker:
    name = "firecracker"

    def __init__(self, folder, program):
        if not os.access(program, os.X_OK):
            raise NotHere(f"{program} is not a program")
        self.program = program
        self.folder = os.path.join(folder, "firecracker")
        os.makedirs(self.folder, exist_ok=True)
        self.guest = None
        self.turns = None

    def _file(self, name):
        return os.path.join(self.folder, name)

    def _argv(self):
        # A binary built for glibc has no filter for it; its own log would come between the guest's bytes.
        return [self.program, "--api-sock", self._file("api"), "--no-seccomp",
                "--log-path", self._file("log"), "--level", "Error"]

    def _clear(self):
        """It refuses sockets that are there already."""
        for name in ("api", "vsock"):
            if os.path.exists(self._file(name)):
                os.unlink(self._file(name))
        with open(self._file("log"), "a", encoding="utf-8"):
            pass  # the log must exist

    def _request(self, method, path, body):
        connection = _Connection(self._file("api"))
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status >= 300:
            raise RuntimeError(f"firecracker: {method} {path}: {answer.status} {text}")

    def _configure(self):
        g = self.guest
        boot = {"kernel_image_path": g.kernel, "boot_args": g.cmdline}
        if g.initrd:
            boot["initrd_path"] = g.initrd
        self._request("PUT", "/boot-source", boot)
        self._request("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": g.memory_mib})
        self._request("PUT", "/vsock", {"guest_cid": 3, "uds_path": self._file("vsock")})

    def prepare(self, guest, copies):
        self.guest = guest
        self.turns = itertools.cycle(range(copies))
        self._clear()
        with subprocess.Popen(self._argv(), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE) as process:
            try:
                _wait_for(self._file("api"), process)
                self._configure()
                self._request("PUT", "/actions", {"action_type": "InstanceStart"})
                for i in range(copies):
                    wait_for_ticks(process.stdout.fileno(), guest.tick, process, "firecracker")
                    stagger(i, copies)
                    self._save(i)
            finally:
                process.kill()

    def _save(self, i):
        """One snapshot, and the request that will load it."""
        state, memory = self._file(f"state-{i}"), self._file(f"memory-{i}")
        self._request("PATCH", "/vm", {"state": "Paused"})
        self._request("PUT", "/snapshot/create", {
            "snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory})
        self._request("PATCH", "/vm", {"state": "Resumed"})
        body = json.dumps({"snapshot_path": state, "resume_vm": True,
                           "mem_backend": {"backend_type": "File", "backend_path": memory}})
        with open(self._file(f"request-{i}"), "w", encoding="utf-8") as f:
            f.write("PUT /snapshot/load HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}")

    def launch(self):
        self._clear()
        return Launch(self._argv(), byte=self.guest.tick,
                      poke=(self._file("api"), self._file(f"request-{next(self.turns)}")))
