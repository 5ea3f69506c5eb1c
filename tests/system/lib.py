"""What the system tests share: programs, a place to run them in, and a control client."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

LIMIT_S = 120  # for anything that should end by itself
FIRST_LIMIT_S = 900  # the first use of the default guest may build a kernel


class Skip(Exception):
    """The test cannot be run here, and why."""


def test(function):
    """Marks a test; it gets a Place."""
    function.is_test = True
    return function


def tests_of(module):
    return [f for f in vars(module).values() if getattr(f, "is_test", False)]


def wait_until(what, condition, limit_s=10):
    """Polls, for what nobody tells us about (another process's files, say)."""
    end = time.monotonic() + limit_s * patience()
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not within {limit_s} s")


def patience():
    """How much longer than on an idle host anything may take here: more programs than CPUs want to run."""
    return max(1.0, os.getloadavg()[0] / os.cpu_count())


def is_alive(pid):
    """False once all its threads have ended: the last one closes the files. A zombie is nobody."""
    try:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            if stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                return True
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False


class Programs:
    def __init__(self, build):
        self.build = build
        self.tine = build / "tools" / "tine" / "tine"
        self.vmm = build / "vmm" / "tine-vmm"
        self.bare = build / "bench" / "tick.elf"  # writes to its console for ever; no agent
        self.guest_is_made = False
        for path in (self.tine, self.vmm, self.bare):
            if not path.exists():
                raise Skip(f"{path} is not built: meson setup build && ninja -C build")

    def make_guest(self, env):
        """Once, and with its progress shown: the first time it takes minutes."""
        if not self.guest_is_made:
            subprocess.run([str(self.tine), "run", "--", "sh", "-c", ":"], env=env, check=True,
                           stdin=subprocess.DEVNULL, timeout=FIRST_LIMIT_S)
            self.guest_is_made = True


class Control:
    """A client of a control socket. Lines are kept as they come, so that tests can look at them."""

    def __init__(self, path, limit_s=LIMIT_S):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(limit_s)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rwb")
        self.number = 0

    def send_line(self, line):
        self.file.write(line + b"\n")
        self.file.flush()

    def answer(self):
        line = self.file.readline()
        return json.loads(line) if line else None

    def raw(self, method, **params):
        """The whole answer; None if the connection ended."""
        self.number += 1
        try:
            self.send_line(json.dumps({"jsonrpc": "2.0", "id": self.number, "method": method,
                                       "params": params}).encode())
            return self.answer()
        except (BrokenPipeError, ConnectionResetError):
            return None

    def call(self, method, **params):
        answer = self.raw(method, **params)
        assert answer and "result" in answer, f"{method}: {answer}"
        return answer["result"]

    def code(self, method, **params):
        """The error's code; 0 for a result."""
        return self.raw(method, **params).get("error", {}).get("code", 0)

    def close(self):
        self.file.close()
        self.socket.close()


class Place:
    """A state folder and a work folder; knows what was started in it."""

    def __init__(self, programs):
        self.programs = programs
        self.root = Path(tempfile.mkdtemp(prefix="tine-sys-"))
        self.state = self.root / "s"
        self.work = self.root / "w"
        self.work.mkdir()
        self.env = dict(os.environ, TINE_STATE=str(self.state), TINE_VMM=str(programs.vmm))
        self.processes = []

    def tine(self, *args, check=True, stdin=b"", env=None, limit_s=LIMIT_S, **more):
        """Runs the command line; the finished process, with its outputs as bytes."""
        done = subprocess.run([str(self.programs.tine), *map(str, args)], input=stdin,
                              capture_output=True, env=dict(self.env, **(env or {})), check=False,
                              timeout=limit_s * patience(), **more)
        if check and done.returncode != 0:
            raise AssertionError(f"tine {' '.join(map(str, args))}: status {done.returncode}: "
                                 f"{done.stderr.decode(errors='replace').strip()}")
        return done

    def json(self, *args, **more):
        return json.loads(self.tine(args[0], "--json", *args[1:], **more).stdout)

    def begin(self, argv, **more):
        """Starts a program that goes on beside the test."""
        process = subprocess.Popen(list(map(str, argv)), env=self.env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
        self.processes.append(process)
        return process

    def bare(self, name, *args, **more):
        """Starts a bare guest under the command line."""
        return self.json("start", "--name", name, "--kernel", self.programs.bare, "--memory", 16,
                         "--no-wait", *args, **more)

    def linux(self, name, *args):
        self.programs.make_guest(self.env)
        return self.json("start", "--name", name, *args)

    def vmm(self, *args, **more):
        """A tine-vmm of our own on vm.sock, and a client of it."""
        process = self.begin([self.programs.vmm, "--control", self.root / "vm.sock", *args], **more)
        self.wait_for_socket(self.root / "vm.sock", process)
        return process

    def control(self, name="vm"):
        return Control(self.root / "vm.sock" if name == "vm" else self.state / f"{name}.sock")

    @staticmethod
    def wait_for_socket(path, process=None):
        def there():
            if process and process.poll() is not None:
                raise AssertionError(f"{path}: {process.stderr.read().decode()}")
            try:
                Control(path).close()
                return True
            except OSError:
                return False
        wait_until(f"socket {path}", there)

    def default_image(self):
        """Folder of an image of the default guest, as `tine start` uses it."""
        self.linux("image-finder")
        image = Path(self.json("status", "image-finder")["image"])
        self.tine("kill", "image-finder")
        return image

    def files(self):
        return sorted(p.name for p in self.state.iterdir()) if self.state.exists() else []

    def pids(self):
        """VMMs that work for this place, however they were started."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            if str(self.root).encode() + b"/" in text and b"tine-vmm" in text.split(b"\0")[0]:
                found.append(int(path.parent.name))
        return [pid for pid in found if is_alive(pid)]

    def check_clean(self):
        """Every test ends its machines; nothing may be left then but logs."""
        if self.state.exists():
            self.tine("kill", "--all")
        left = [n for n in self.files() if not n.endswith(".log")]
        assert not left, f"left in the state folder: {left}"

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)
