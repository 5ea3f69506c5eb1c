"""What the native tests share: a test with its folder and processes, a machine under test, and a
client of its control socket. Every wait has a limit; none of them measures speed."""
import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
# Guest kernel code is interpreted on some hosts, and these machines are shared: generous limits.
LIMIT_S = 120


class Skip(Exception):
    """The test cannot run here; the text says why."""


class RpcError(Exception):
    def __init__(self, error):
        super().__init__(error["message"])
        self.code = error["code"]
        self.kind = error.get("data", {}).get("kind")


def wait_until(what, condition, limit_s=LIMIT_S):
    """Polls: for things that have no event to wait for. Returns what the condition gave."""
    end = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit_s} s")
        time.sleep(0.01)


def call(path, method, limit_s=LIMIT_S, **params):
    """One request on a control socket; the result, or RpcError."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(limit_s)
        s.connect(str(path))
        message = {"jsonrpc": "2.0", "id": 1, "method": method}
        if params:
            message["params"] = params
        s.sendall(json.dumps(message).encode() + b"\n")
        line = s.makefile("rb").readline()
    if not line:
        raise AssertionError(f"{method}: the connection ended without an answer")
    answer = json.loads(line)
    if "error" in answer:
        raise RpcError(answer["error"])
    return answer["result"]


class Machine:
    """A machine by its control socket; `process` only for those that the test itself started."""

    def __init__(self, test, name, process=None):
        self.test, self.name, self.process = test, name, process
        self.control = test.dir / f"{name}.sock"
        self.vsock = test.dir / f"{name}.vsock"
        self.console_file = test.dir / f"{name}.console"
        self.log = test.dir / f"{name}.log"

    def call(self, method, limit_s=LIMIT_S, **params):
        return call(self.control, method, limit_s, **params)

    def status(self):
        return self.call("status")

    def console(self):
        """The newest 64 KiB that the guest wrote."""
        return base64.b64decode(self.call("console", bytes=65536)["data"])

    def wait_console(self, text, limit_s=LIMIT_S):
        wait_until(f"{self.name}: {text!r} on the console", lambda: text in self.console(), limit_s)

    def wait_ready(self):
        return self.call("wait", **{"for": "ready", "timeout_ms": LIMIT_S * 1000})

    def fork(self, count=1, **params):
        answer = self.call("fork", count=count, **params)
        self.test.pids.extend(child["pid"] for child in answer["children"])
        return [Machine(self.test, child["id"]) for child in answer["children"]], answer

    def snapshot(self, name):
        target = self.test.dir / name
        self.call("snapshot", dir=str(target))
        return target

    def wait_exit(self, limit_s=LIMIT_S):
        return self.process.wait(limit_s)

    def quit(self):
        self.call("quit")
        if self.process:
            self.wait_exit()
        else:
            wait_until(f"{self.name} is gone", lambda: not self.control.exists())

    def log_text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def connect(self, port):
        """A stream to a guest port, and what the VMM answered to CONNECT."""
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(LIMIT_S)
        s.connect(str(self.vsock))
        s.sendall(b"CONNECT %d\n" % port)
        answer = b""
        while not answer.endswith(b"\n"):
            byte = s.recv(1)
            if not byte:
                break
            answer += byte
        return s, answer.decode()

    def run(self, *argv, stdin=b"", limit_s=LIMIT_S):
        """A command in the guest through `tine exec`: (status, stdout, stderr)."""
        done = subprocess.run(
            [self.test.tine, "exec", self.name, "--", *argv], input=stdin, capture_output=True,
            env=dict(os.environ, TINE_STATE=str(self.test.dir)), timeout=limit_s, check=False)
        return done.returncode, done.stdout, done.stderr

    def output(self, *argv, **more):
        status, out, err = self.run(*argv, **more)
        assert status == 0, f"{argv} in {self.name}: status {status}, {err.decode()}"
        return out.decode()


class Test:
    """One test: its folder (short: socket paths are bounded), its processes, its machines."""

    def __init__(self, name, args):
        self.name, self.args = name, args
        self.vmm = args.build / "vmm" / "tine-vmm"
        self.tine = args.build / "tools" / "tine" / "tine"
        self.dir = Path(tempfile.mkdtemp(prefix="tine-t-"))
        self.processes, self.pids = [], []

    def tiny(self, name):
        """A bare guest built with the project."""
        return self.args.build / "guest" / "tiny" / f"{name}.elf"

    def start(self, name, *options, expect=True, **popen):
        """tine-vmm with these options; waits for its control socket unless expect is false."""
        machine = Machine(self, name)
        command = [self.vmm, "--control", machine.control, "--vsock", machine.vsock, "--console",
                   machine.console_file, *options]
        with open(machine.log, "ab") as log:
            machine.process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL,
                                               stdout=log, stderr=log, **popen)
        self.processes.append(machine.process)
        if expect:
            def is_up():
                if machine.process.poll() is not None:
                    raise AssertionError(f"tine-vmm ended: {machine.log_text()}")
                try:
                    return machine.status()
                except (FileNotFoundError, ConnectionRefusedError):
                    return None
            wait_until(f"control socket of {name}", is_up)
        return machine

    def boot_tiny(self, name, guest, *options, cmdline="", memory=32, **more):
        return self.start(name, "--kernel", self.tiny(guest), "--memory", memory, "--cmdline",
                          cmdline, *options, **more)

    def restore(self, name, image, *options, **more):
        return self.start(name, "--restore", image, *options, **more)

    def linux_image(self):
        """An image of the default Linux guest, ready; made once for all tests of a run."""
        if self.args.no_linux:
            raise Skip("bare guests only")
        if not getattr(self.args, "linux_image", None):
            self.args.linux_image = make_linux_image(self)
        return self.args.linux_image

    def linux(self, name, *options):
        machine = self.restore(name, self.linux_image(), *options)
        machine.wait_ready()
        return machine

    def close(self, keep):
        """Ends every process that the test began; keeps the logs of one that failed."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in self.pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        if keep:
            target = self.args.logs / self.name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for log in self.dir.glob("*.log"):
                shutil.copy(log, target)
        shutil.rmtree(self.dir, ignore_errors=True)


def is_alive(pid):
    """True for a tine-vmm process of that pid: pids are used again."""
    try:
        return "tine-vmm" in Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return False


def guest_kind(vmm):
    done = subprocess.run([vmm, "--probe"], capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout)["guest"] if done.stdout else None


def make_linux_image(test):
    """Boots the guest that this KVM runs, waits for its agent and freezes it."""
    kind = guest_kind(test.vmm)
    if kind is None:
        raise Skip("no Linux guest runs on this KVM (tine doctor says why)")
    made = subprocess.run([TOP / "guest/linux/build", kind], stdout=subprocess.PIPE, text=True,
                          env=dict(os.environ, BUILD=str(test.args.build)), check=True)
    guest = Path(made.stdout.strip().splitlines()[-1])
    print(f"kvm: booting the {kind} guest once", file=sys.stderr, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="tine-image-"))
    test.args.cleanup.append(folder)
    machine = test.start("boot", "--kernel", guest / "kernel", "--initrd", guest / "initrd",
                         "--cmdline", (guest / "cmdline").read_text().strip(), "--memory", "64")
    machine.wait_ready()
    machine.call("snapshot", dir=str(folder / "linux"))
    machine.quit()
    return folder / "linux"
