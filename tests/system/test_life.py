"""How machines begin and end: A10, H1, H3, H4, H5."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from lib import Skip, is_alive, patience, test, wait_until

END_LIMIT_S = 2


def only_root():
    if os.geteuid() != 0:
        raise Skip("needs root, to change /dev/kvm in a mount namespace of its own")


def without_kvm(place, prepare, user=None):
    """tine start in a mount namespace whose /dev is ours; the finished process."""
    drop = f"setpriv --reuid {user} --regid {user} --clear-groups " if user else ""
    script = (f"mount -t tmpfs -o mode=755 dev /dev && mknod -m 666 /dev/null c 1 3 && "
              f"mknod -m 666 /dev/urandom c 1 9 && {prepare} && ulimit -c unlimited && cd {place.work} && "
              f"exec {drop}{place.programs.tine} start --name m --kernel {place.programs.bare} --no-wait")
    return subprocess.run(["unshare", "-m", "sh", "-c", script], env=place.env, capture_output=True,
                          check=False, timeout=30)


@test
def A10_no_access_to_kvm_is_one_line(place):
    only_root()
    cases = {"no /dev/kvm": ("true", None, b"No such file"),
             "mode 000": ("mknod -m 000 /dev/kvm c 10 232", 65534, b"Permission denied"),
             "an ordinary file": ("echo text >/dev/kvm", None, b"Inappropriate ioctl")}
    for name, (prepare, user, reason) in cases.items():
        if user:
            os.chmod(place.root, 0o755)
            if subprocess.run(["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups",
                               "test", "-x", place.programs.vmm], check=False).returncode != 0:
                continue  # the build is where only root may look; the nested job A10 covers it
            place.state.mkdir(mode=0o700, exist_ok=True)
            os.chown(place.state, user, user)
        done = without_kvm(place, prepare, user)
        text = done.stderr
        assert 0 < done.returncode < 128, f"{name}: status {done.returncode}"
        assert text.count(b"\n") == 1 and b"/dev/kvm" in text and reason in text, f"{name}: {text}"
        left = [*place.files(), *(p.name for p in place.work.iterdir())]
        assert not left, f"{name}: left {left}"
        if user:
            os.chown(place.state, 0, 0)


@test
def A10_doctor_says_what_to_do(place):
    only_root()
    script = (f"mount -t tmpfs -o mode=755 dev /dev && mknod -m 666 /dev/null c 1 3 && "
              f"mknod -m 666 /dev/urandom c 1 9 && exec {place.programs.tine} doctor")
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], env=place.env, capture_output=True,
                          check=False, timeout=30)
    assert done.returncode == 1, done
    assert b"FAIL kvm" in done.stdout and b"/dev/kvm" in done.stdout, done.stdout
    report = place.json("doctor", check=False)
    assert report["guest"] in ("lean", "stock"), report


def snapshot_of_host(place):
    """Everything a failed start could leave behind."""
    return place.files(), place.pids(), sorted(os.listdir(place.work))


def names_in_shared_folders():
    """Other programs use these as well: a few names more or less say nothing, a hundred do."""
    return sum(len(os.listdir(f)) for f in (tempfile.gettempdir(), "/dev/shm") if os.path.isdir(f))


@test
def H3_failed_starts_leave_nothing(place):
    place.bare("holder")
    (place.work / "text").write_text("no kernel\n" * 500)
    bare = ["--kernel", place.programs.bare]
    cases = {"bad kernel": ["--name", "m", "--kernel", place.work / "text"],
             "no kernel": ["--name", "m", "--kernel", place.work / "none"],
             "missing disk": ["--name", "m", *bare, "--disk", place.work / "none.img"],
             "too little memory": ["--name", "m", *bare, "--memory", "1"],
             "used name": ["--name", "holder", *bare],
             "not an image": ["--name", "m", "--image", place.work]}
    before = snapshot_of_host(place)
    for name, args in cases.items():
        shared = names_in_shared_folders()
        for _ in range(100):
            done = place.tine("start", *args, "--no-wait", check=False)
            if done.returncode == 0 and name == "too little memory":
                # The bare guest is small: that little is enough, or it ends at once.
                place.tine("kill", "m", check=False)
                continue
            assert done.returncode in (1, 2), f"{name}: {done}"
            text = done.stderr.decode()
            assert text.startswith("tine start: ") and text.count("\n") == 1, f"{name}: {text}"
        more = names_in_shared_folders() - shared
        assert more < 50, f"{name}: {more} more names in /tmp and /dev/shm"
        try:
            wait_until("all is gone", lambda: snapshot_of_host(place) == before, 5)
        except AssertionError:
            raise AssertionError(f"{name}: left {snapshot_of_host(place)}, before {before}") from None


@test
def H1_machines_outlive_the_command_that_started_them(place):
    script = f"for i in 1 2 3 4 5; do {place.programs.tine} start --name m$i --kernel " \
             f"{place.programs.bare} --memory 16 --no-wait; done; sleep 100"
    manager = place.begin(["sh", "-c", script], start_new_session=True)
    wait_until("five machines", lambda: len(place.json("ps")["machines"]) == 5)
    os.killpg(manager.pid, signal.SIGKILL)
    manager.wait()
    machines = place.json("ps")["machines"]
    assert [m["id"] for m in machines] == ["m1", "m2", "m3", "m4", "m5"], machines
    assert all(m["state"] == "booting" for m in machines)
    for m in machines:
        assert place.json("pause", m["id"]) == {"changed": True}
    place.tine("kill", "--all")
    place.tine("ps")  # sweeps the log of a start that was killed half-way
    assert place.files() == [], place.files()


@test
def H1_the_machine_of_a_killed_run_is_gone(place):
    place.default_image()
    run = place.begin([place.programs.tine, "run", "--", "sleep", "1000"])
    wait_until("its machine", lambda: any(m["ready"] for m in place.json("ps")["machines"]), 30)
    pids = [m["pid"] for m in place.json("ps")["machines"]]
    run.kill()
    run.wait()
    wait_until("its machine is gone", lambda: not any(map(is_alive, pids)), END_LIMIT_S)
    place.tine("ps")
    assert place.files() == [], place.files()


def ends_in_time(place, process, what, signals=1, number=signal.SIGTERM):
    begin = time.monotonic()
    for _ in range(signals):
        process.send_signal(number)
    process.wait(timeout=30)
    took = time.monotonic() - begin
    assert took < END_LIMIT_S * patience(), f"{what}: took {took:.1f} s"
    left = [p.name for p in place.root.iterdir() if p.name.startswith("vm.")]
    assert not left, f"{what}: left {left}"


@test
def H4_signals_end_a_vmm_in_any_state(place):
    bare = ["--kernel", place.programs.bare, "--memory", "16", "--vsock", place.root / "vm.vsock"]
    for number in (signal.SIGTERM, signal.SIGINT):
        for signals in (1, 2):
            vmm = place.vmm("--vsock", place.root / "vm.vsock")
            ends_in_time(place, vmm, "before boot", signals, number)
            assert vmm.returncode == 8, vmm.returncode
            vmm = place.vmm(*bare)
            ends_in_time(place, vmm, "running", signals, number)
            assert vmm.returncode == 8, vmm.returncode
            vmm = place.vmm(*bare, "--paused")
            ends_in_time(place, vmm, "paused", signals, number)


@test
def H4_a_signal_during_a_snapshot_leaves_no_half_one(place):
    for delay_ms in (0, 1, 5, 20, 50):
        vmm = place.vmm("--kernel", place.programs.bare, "--memory", "256")
        c = place.control()
        target = place.work / "image"
        c.send_line(f'{{"jsonrpc":"2.0","id":1,"method":"snapshot","params":{{"dir":"{target}"}}}}'
                    .encode())
        time.sleep(delay_ms / 1000)
        ends_in_time(place, vmm, f"snapshot after {delay_ms} ms")
        left = list(place.work.iterdir())
        if left == [target]:
            place.tine("restore", target, "--no-wait", "--name", "r")  # then it is a whole one
            place.tine("kill", "r")
            subprocess.run(["rm", "-rf", target], check=True)
        else:
            assert left == [], f"after {delay_ms} ms: {left}"


@test
def H4_a_start_that_is_interrupted_leaves_nothing(place):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        start = place.begin([place.programs.tine, "start", "--name", "m", "--kernel",
                             place.programs.bare, "--memory", "16"])  # waits for an agent: never comes
        wait_until("its machine", lambda: "m.sock" in place.files())
        pids = place.pids()
        start.send_signal(number)
        start.wait(timeout=10)
        assert start.returncode not in (0, None)
        wait_until("its machine is gone", lambda pids=pids: not any(map(is_alive, pids)), END_LIMIT_S)
        assert place.files() == [], place.files()


@test
def H4_a_signal_while_a_command_runs_in_it(place):
    image = place.default_image()
    vmm = place.vmm("--restore", image, "--vsock", place.root / "vm.vsock")
    place.control().call("wait", **{"for": "ready", "timeout_ms": 30000})
    place.state.mkdir(mode=0o700, exist_ok=True)
    for name in ("sock", "vsock"):
        (place.state / f"m.{name}").symlink_to(place.root / f"vm.{name}")
    run = place.begin([place.programs.tine, "exec", "m", "--", "sleep", "1000"])
    time.sleep(0.5)  # the command is being started, or runs: both must do
    ends_in_time(place, vmm, "in exec")
    run.wait(timeout=10)
    assert run.returncode == 125, run.returncode
    for name in ("sock", "vsock"):
        (place.state / f"m.{name}").unlink()


def end_from_inside(place, image, command):
    """The exit status of a VMM whose guest runs `command`."""
    vmm = place.vmm("--restore", image, "--vsock", place.root / "vm.vsock")
    place.control().call("wait", **{"for": "ready", "timeout_ms": 30000})
    place.state.mkdir(mode=0o700, exist_ok=True)
    for name in ("sock", "vsock"):
        (place.state / f"m.{name}").symlink_to(place.root / f"vm.{name}")
    try:
        place.tine("exec", "m", "--timeout", "20", "--", "sh", "-c", command, check=False)
        vmm.wait(timeout=30 * patience())
        return vmm.returncode
    finally:
        for name in ("sock", "vsock"):
            (place.state / f"m.{name}").unlink()


@test
def H5_each_end_has_its_own_status(place):
    image = place.default_image()
    for command, status in {"poweroff -f": 0, "reboot -f": 3, "halt -f": 7}.items():
        found = end_from_inside(place, image, command)
        assert found == status, f"{command}: status {found}, expected {status}"


@test
def H5_a_panic_has_its_own_status(place):
    image = place.default_image()
    guests = [g for g in image.parent.glob("guest-*") if image.name.startswith(f"image-{g.name}-")]
    if not guests:
        raise Skip(f"the guest that {image} was made from is elsewhere")
    cmdline = (guests[0] / "cmdline").read_text(encoding="utf-8").strip()
    vmm = place.vmm("--kernel", guests[0] / "kernel", "--initrd", guests[0] / "initrd", "--memory", "64",
                    "--cmdline", f"{cmdline} rdinit=/none")
    vmm.wait(timeout=120 * patience())
    assert vmm.returncode == 4, f"status {vmm.returncode}: {vmm.stderr.read().decode()}"


@test
def H5_stop_with_and_without_grace_is_status_0(place):
    image = place.default_image()
    for grace in (0, 20000):
        vmm = place.vmm("--restore", image, "--vsock", place.root / "vm.vsock")
        c = place.control()
        c.call("wait", **{"for": "ready", "timeout_ms": 30000})
        assert c.call("stop", grace_ms=grace)["changed"] is True
        vmm.wait(timeout=30)
        assert vmm.returncode == 0, f"grace {grace}: {vmm.returncode}"
        assert not Path(place.root / "vm.sock").exists()


@test
def kill_ends_a_vmm_that_hangs(place):
    pid = place.bare("a")["pid"]
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert place.json("kill", "a") == {"killed": ["a"], "failed": []}
    assert time.monotonic() - begin < 6 * patience()
    assert not is_alive(pid) and place.files() == []
    done = place.tine("kill", "a", check=False)
    assert done.returncode == 1 and b"no machine a" in done.stderr, done


@test
def kill_of_a_copy_that_hangs_spares_its_parent(place):
    parent = place.bare("a")["pid"]
    child = place.json("fork", "a")["children"][0]["pid"]
    os.kill(child, signal.SIGSTOP)
    assert place.json("kill", "a-1") == {"killed": ["a-1"], "failed": []}
    assert not is_alive(child) and is_alive(parent)
    assert place.json("status", "a")["children"] == []


@test
def an_ordinary_user_needs_only_access_to_kvm(place):
    only_root()
    user = 65534
    os.chmod(place.root, 0o755)
    home = place.root / "home"
    home.mkdir()
    os.chown(home, user, user)
    for program in (place.programs.tine, place.programs.vmm, place.programs.bare):
        shutil.copy(program, place.root)  # the build may be where only root may look
    steps = ["start --name a --kernel ../tick.elf --memory 16 --no-wait", "fork -n 2 a", "pause a",
             "snapshot a img", "resume a", "restore img --name b --no-wait", "ps", "kill --all"]
    script = ("mount -t tmpfs -o mode=755 dev /dev && mknod -m 666 /dev/null c 1 3 && "
              "mknod -m 666 /dev/urandom c 1 9 && mknod -m 666 /dev/kvm c 10 232 && "
              f"cd {home} && exec setpriv --reuid {user} --regid {user} --clear-groups sh -ec '"
              + "\n".join(f"../tine {step}" for step in steps) + "'")
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TINE_STATE": str(home / "s"),
           "TINE_VMM": str(place.root / "tine-vmm")}
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], env=env, capture_output=True,
                          check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert not list((home / "s").iterdir()), done
