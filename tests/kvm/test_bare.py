"""Bare guests: boot, endings, MMIO, snapshot, restore, fork, and what copies see of each other."""
import harness
from harness import RpcError, wait_until

ENDINGS = {"p": ("poweroff", 0), "r": ("reboot", 3), "c": ("panic", 4), "t": ("triple-fault", 5),
           "h": ("halted", 7)}


def test_H5_each_ending_has_its_own_reason_and_status(t):
    for letter, (reason, status) in ENDINGS.items():
        machine = t.boot_tiny(f"end-{letter}", "endings", cmdline=letter, expect=False)
        assert machine.wait_exit() == status, f"{reason}: {machine.log_text()}"
        assert f": {reason}: " in machine.log_text(), machine.log_text()
        assert not machine.control.exists() and not machine.vsock.exists(), "sockets are left"


def test_H5_an_emulation_failure_names_the_place_and_the_bytes(t):
    machine = t.boot_tiny("emulation", "endings", cmdline="e", expect=False)
    wait_until("an end or the guest going on", lambda: machine.process.poll() is not None
               or machine.console_file.exists()
               and b"carried out" in machine.console_file.read_bytes())
    if machine.process.poll() is None:
        raise harness.Skip("this KVM carries the instruction out")
    assert machine.wait_exit() == 6, machine.log_text()
    assert "emulation" in machine.log_text() and "rip 0x20" in machine.log_text(), machine.log_text()


def test_any_access_to_device_registers_is_survived(t):
    machine = t.boot_tiny("registers", "registers", expect=False)
    assert machine.wait_exit() == 0, machine.log_text()
    text = machine.console_file.read_bytes()
    assert b"magic 0000000074726976" in text and b"registers ok 0000000000000000" in text, text


def rounds(machine, count=8):
    """Lets a machine do some more rounds; none of its pages may show another's mark."""
    began = machine.status()["console_bytes"]
    wait_until(f"rounds of {machine.name}", lambda: machine.status()["console_bytes"] > began + count)
    assert b"X" not in machine.console(), f"{machine.name} saw another machine's memory"


def test_parent_child_and_grandchild_never_see_each_others_writes(t):
    parent = t.boot_tiny("a", "isolation")
    rounds(parent)
    children, _ = parent.fork(3)
    grandchildren, _ = children[0].fork(2)
    family = [parent, *children, *grandchildren]
    for _ in range(3):
        for machine in family:
            rounds(machine)
    children[0].quit()
    for machine in [parent, *children[1:], *grandchildren]:
        rounds(machine)


def test_restored_copies_never_see_each_others_writes(t):
    parent = t.boot_tiny("a", "isolation")
    rounds(parent)
    image = parent.snapshot("image")
    before = (image / "memory").read_bytes()
    copies = [t.restore(f"r{i}", image) for i in range(3)]
    forks, _ = copies[0].fork(2)
    for machine in [parent, *copies, *forks]:
        rounds(machine)
    assert (image / "memory").read_bytes() == before, "a copy wrote into its image"


def test_a_chain_of_forks_goes_on_at_every_depth(t):
    machine = t.boot_tiny("a", "isolation")
    for _ in range(10):
        rounds(machine, 3)
        (machine,), _ = machine.fork(1)
    rounds(machine)


def test_generations_of_snapshot_and_restore_go_on(t):
    machine = t.boot_tiny("g0", "isolation")
    for generation in range(1, 5):
        rounds(machine, 3)
        image = machine.snapshot(f"image{generation}")
        machine.quit()
        machine = t.restore(f"g{generation}", image, "--verify")
    rounds(machine)


def test_E14_a_snapshot_onto_the_image_one_runs_from_harms_nobody(t):
    first = t.boot_tiny("a", "isolation")
    rounds(first, 3)
    image = first.snapshot("image")
    one, two = t.restore("one", image), t.restore("two", image)
    rounds(one, 3)
    one.snapshot("image")
    (t.dir / "link").symlink_to(image)
    two.snapshot("link")
    for machine in (one, two, t.restore("three", image, "--verify")):
        rounds(machine)
    assert sorted(p.name for p in t.dir.glob("*.part-*")) == []


def test_F2_pause_and_resume_are_idempotent_and_wrong_states_are_refused(t):
    machine = t.boot_tiny("a", "isolation")
    assert machine.call("pause") == {"changed": True}
    assert machine.call("pause") == {"changed": False}
    assert machine.status()["state"] == "paused"
    count = machine.status()["console_bytes"]
    assert machine.status()["console_bytes"] == count
    machine.snapshot("paused")
    assert machine.status()["state"] == "paused"
    assert machine.call("resume") == {"changed": True}
    assert machine.call("resume") == {"changed": False}
    rounds(machine)
    for method, params in (("boot", {"kernel": "/k", "memory_mib": 32}), ("nothing", {}),
                           ("pause", {"now": True})):
        try:
            machine.call(method, **params)
        except RpcError as why:
            assert why.kind in ("state", "no-method", "bad-params"), why.kind
        else:
            raise AssertionError(f"{method} was accepted")
    rounds(machine)


def test_E18_the_parent_runs_on_after_a_fork_that_fails(t):
    machine = t.boot_tiny("a", "isolation")
    gone = str(t.dir / "gone" / "x")
    try:
        machine.call("fork", children=[{"id": "x", "control": gone + ".sock", "vsock": gone + ".vsock"}])
    except RpcError as why:
        assert "gone" in str(why), why
    else:
        raise AssertionError("a fork into a folder that is not there was accepted")
    assert machine.status()["state"] == "booting"
    rounds(machine)
    machine.fork(2)
    rounds(machine)
    assert machine.status()["state"] == "booting"
