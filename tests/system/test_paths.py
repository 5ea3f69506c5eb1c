"""Sockets and folders by name: D12, D13, F4."""

import os
import signal
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib import Control, Skip, is_alive, test, wait_until


@test
def D12_restart_after_kill_9_takes_the_stale_name(place):
    pid = place.bare("a")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until("the VMM is gone", lambda: not is_alive(pid))
    assert "a.sock" in place.files()  # nobody was there to remove it
    second = place.bare("a")
    assert second["pid"] != pid
    assert place.json("status", "a")["pid"] == second["pid"]


@test
def D12_a_live_name_is_refused_and_lives_on(place):
    pid = place.bare("a")["pid"]
    done = place.tine("start", "--name", "a", "--kernel", place.programs.bare, "--no-wait",
                      check=False)
    text = done.stderr.decode()
    assert done.returncode != 0 and text.count("\n") == 1, text
    assert "a.sock" in text or "machine a" in text, text
    assert place.json("status", "a")["pid"] == pid
    assert place.files() == ["a.log", "a.sock", "a.vsock"]


@test
def D12_tine_vmm_itself_refuses_a_live_socket(place):
    place.vmm("--id", "first")
    second = place.begin([place.programs.vmm, "--control", place.root / "vm.sock", "--id", "second"])
    _, err = second.communicate(timeout=10)
    assert second.returncode not in (0, None) and b"vm.sock" in err, err
    assert place.control().call("status")["id"] == "first"


@test
def D12_ps_removes_what_dead_machines_left(place):
    pids = [place.bare(name)["pid"] for name in ("a", "b", "c")]
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
        wait_until("the VMM is gone", lambda pid=pid: not is_alive(pid))
    machines = place.json("ps")["machines"]
    assert [m["id"] for m in machines] == ["c"], machines
    assert [n for n in place.files() if not n.endswith(".log")] == ["c.sock", "c.vsock"]


@test
def D12_of_eight_starts_of_one_name_one_wins(place):
    place.state.mkdir(mode=0o700)
    def start(_):
        return place.tine("start", "--name", "a", "--kernel", place.programs.bare, "--memory", 16,
                          "--no-wait", check=False)
    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            codes = [done.returncode for done in pool.map(start, range(8))]
        assert codes.count(0) == 1, codes
        assert place.json("status", "a")["id"] == "a"
        assert place.files() == ["a.log", "a.sock", "a.vsock"], place.files()
        place.tine("kill", "a")
        assert place.files() == []


@test
def D13_paths_of_107_108_and_200_bytes(place):
    for length in (107, 108, 200):
        # <root>/ddd…/m.vsock is the longest socket of a machine called m.
        folder = place.root / ("d" * (length - len(str(place.root)) - len("//m.vsock")))
        env = {"TINE_STATE": str(folder)}
        assert len(str(folder / "m.vsock")) == length
        done = place.tine("start", "--name", "m", "--kernel", place.programs.bare, "--no-wait",
                          env=env, check=False)
        text = done.stderr.decode()
        if length == 107:
            assert done.returncode == 0, text
            assert place.json("status", "m", env=env)["state"] == "booting"
            place.tine("kill", "m", env=env)
            continue
        assert done.returncode != 0 and str(folder) in text, text
        assert str(length) in text or str(len(str(folder))) in text, text
        assert not folder.exists() or not list(folder.iterdir())


@test
def D13_tine_vmm_names_path_and_length(place):
    for option in ("--control", "--vsock"):
        path = str(place.root / ("x" * (108 - len(str(place.root)) - 1)))
        other = ["--control", place.root / "vm.sock"] if option == "--vsock" else []
        vmm = place.begin([place.programs.vmm, *other, option, path])
        _, err = vmm.communicate(timeout=10)
        assert vmm.returncode not in (0, None), option
        assert path.encode() in err and b"108" in err, err
        assert not (place.root / "vm.sock").exists()


@test
def F4_all_files_are_the_owners_alone(place):
    for mask in (0o000, 0o022):
        name = f"m{mask}"
        old = os.umask(mask)
        try:
            place.bare(name)
            place.tine("snapshot", name, place.work / name)
        finally:
            os.umask(old)
        image = place.work / name
        paths = [place.state, image, *place.state.iterdir(), *image.iterdir()]
        for path in paths:
            mode = path.lstat().st_mode & 0o777
            assert mode & 0o077 == 0, f"{path}: mode {mode:o} under umask {mask:o}"


def ask_as_a_stranger(path):
    """0 if the connection was closed without a byte."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(10)
        try:
            s.connect(str(path))
            s.sendall(b'{"jsonrpc":"2.0","id":1,"method":"status"}\n')
            return 0 if s.recv(100) == b"" else 1
        except (BrokenPipeError, ConnectionResetError):
            return 0
        except OSError:
            return 2


@test
def F4_another_uid_is_not_served(place):
    if os.geteuid() != 0:
        raise Skip("needs root, to become another user")
    os.chmod(place.root, 0o755)
    place.vmm()
    path = place.root / "vm.sock"
    os.chmod(path, 0o777)  # so that only the check of the peer stands between
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        os._exit(ask_as_a_stranger(path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "another uid got an answer"
    assert Control(path).call("status")["state"] == "new"


@test
def F4_a_state_folder_of_others_is_refused(place):
    cases = {"open": 0o755, "link": None}
    for name, mode in cases.items():
        folder = place.work / name
        if mode is None:
            folder.symlink_to("/tmp")
        else:
            folder.mkdir()
            folder.chmod(mode)
        done = place.tine("ps", env={"TINE_STATE": str(folder)}, check=False)
        assert done.returncode != 0 and str(folder).encode() in done.stderr, done.stderr


@test
def a_relative_state_folder_is_made_and_used(place):
    with tempfile.TemporaryDirectory(prefix="tine-sys-") as cwd:
        env = {"TINE_STATE": "deep/er"}
        place.tine("start", "--name", "a", "--kernel", place.programs.bare, "--no-wait", env=env,
                   cwd=cwd)
        assert (Path(cwd) / "deep/er/a.sock").is_socket()
        place.tine("kill", "a", env=env, cwd=cwd)


@test
def a_grants_socket_path_must_fit_too(place):
    folder = place.root / ("d" * (107 - len(str(place.root)) - len("//m.vsock")))
    done = place.tine("start", "--name", "m", "--grant", "5000", "--kernel", place.programs.bare,
                      "--no-wait", env={"TINE_STATE": str(folder)}, check=False)
    assert done.returncode != 0 and b"m.vsock_5000" in done.stderr, done.stderr
    assert not list(folder.iterdir())
