"""virtio-blk on the native KVM, with a bare guest: overlays across fork and snapshot, resets, broken
rings. The guest checks every sector that it reads."""
import os
import struct
import time

from harness import wait_until

SECTORS = 4096


def base(t, name="base.img"):
    """A disk whose every word holds its own number, as guest/tiny/disk.c expects."""
    path = t.dir / name
    words = SECTORS * 64
    path.write_bytes(struct.pack(f"<{words}Q", *range(words)))
    return path


def rounds(machine, count=3):
    began = machine.status()["console_bytes"]
    wait_until(f"rounds of {machine.name}", lambda: machine.status()["console_bytes"] > began + count)
    console = machine.console()
    assert b"X" not in console, f"{machine.name} read a sector that is not its own"
    assert set(console) <= set(b"."), console[-200:]


def test_B2_a_disk_works_again_after_each_of_50_resets(t):
    machine = t.boot_tiny("resets", "disk", "--disk", base(t), cmdline="r", expect=False)
    assert machine.wait_exit() == 0, machine.log_text()
    assert machine.console_file.read_bytes() == b"resets ok\n", machine.console_file.read_bytes()


def test_B3_broken_rings_cost_the_guest_its_device_and_nothing_else(t):
    machine = t.boot_tiny("rules", "disk", "--disk", base(t), cmdline="h", expect=False)
    assert machine.wait_exit() == 0, machine.log_text()
    assert machine.console_file.read_bytes() == b"rules ok\n", machine.console_file.read_bytes()
    lines = machine.log_text().count("needs reset")
    assert 0 < lines <= 12, machine.log_text()


def test_forks_of_forks_have_disks_of_their_own(t):
    disk = base(t)
    before = disk.read_bytes()
    parent = t.boot_tiny("a", "disk", "--disk", disk, cmdline="i")
    rounds(parent)
    children, _ = parent.fork(3)
    grandchildren, _ = children[0].fork(2)
    family = [parent, *children, *grandchildren]
    for _ in range(2):
        for machine in family:
            rounds(machine)
    children[0].quit()
    for machine in [parent, *children[1:], *grandchildren]:
        rounds(machine)
    assert disk.read_bytes() == before, "a machine wrote into its base"


def test_E3_snapshots_during_writes_restore_with_their_disk(t):
    disk = base(t)
    machine = t.boot_tiny("g0", "disk", "--disk", disk, cmdline="i")
    for generation in range(1, 5):
        rounds(machine)
        image = machine.snapshot(f"image{generation}")
        overlay = (image / "disk0").read_bytes()
        copies = [t.restore(f"g{generation}", image), t.restore(f"h{generation}", image)]
        for copy in [machine, *copies]:
            rounds(copy)
        (fork,), _ = copies[1].fork(1)
        rounds(fork)
        machine.quit()
        fork.quit()
        copies[1].quit()
        machine = copies[0]
        assert (image / "disk0").read_bytes() == overlay, "a copy wrote into its image"


def test_many_forks_of_one_parent_keep_its_disk_small(t):
    parent = t.boot_tiny("a", "disk", "--disk", base(t), cmdline="i")
    for _ in range(40):
        rounds(parent, 1)
        (child,), _ = parent.fork(1)
        child.quit()
    files = os.listdir(f"/proc/{parent.process.pid}/fd")
    overlays = [f for f in files
                if "tine-overlay" in os.readlink(f"/proc/{parent.process.pid}/fd/{f}")]
    assert len(overlays) <= 3, overlays
    rounds(parent)


def test_C7_machines_share_a_base(t):
    disk = base(t)
    machines = [t.boot_tiny(f"w{i}", "disk", "--disk", disk, cmdline="i") for i in range(3)]
    for machine in machines:
        rounds(machine)


def test_E16_a_changed_base_is_refused(t):
    disk = base(t)
    machine = t.boot_tiny("a", "disk", "--disk", disk, cmdline="i")
    rounds(machine)
    image = machine.snapshot("image")
    with open(disk, "r+b") as f:
        f.seek(512)
        f.write(b"changed")
    later = time.time() + 10
    os.utime(disk, (later, later))
    copy = t.restore("copy", image, expect=False)
    assert copy.wait_exit() != 0
    assert "base.img" in copy.log_text() and "expected time" in copy.log_text(), copy.log_text()
    rounds(machine)


def test_E13_damage_in_an_overlay_is_found_by_verify(t):
    machine = t.boot_tiny("a", "disk", "--disk", base(t), cmdline="i")
    rounds(machine)
    image = machine.snapshot("image")
    rounds(t.restore("sound", image, "--verify"))
    overlay = bytearray((image / "disk0").read_bytes())
    overlay[-100] ^= 1
    (image / "disk0").write_bytes(overlay)
    copy = t.restore("copy", image, "--verify", expect=False)
    assert copy.wait_exit() != 0
    assert "chunk 0" in copy.log_text() and "expected" in copy.log_text(), copy.log_text()


def test_C3_a_disk_without_a_whole_sector_is_refused_by_name(t):
    (t.dir / "tiny.img").write_bytes(b"x" * 511)
    machine = t.boot_tiny("a", "disk", "--disk", t.dir / "tiny.img", cmdline="i", expect=False)
    assert machine.wait_exit() != 0
    assert "tiny.img" in machine.log_text(), machine.log_text()
    assert not machine.control.exists()
