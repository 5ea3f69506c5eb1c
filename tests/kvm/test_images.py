"""Images that are damaged, foreign or meant to harm (E13, E14, E22), and images of a machine's end."""
import os
import random
import shutil
import subprocess

from harness import RpcError, wait_until


def frozen(t, name="image"):
    machine = t.boot_tiny("origin", "isolation", memory=32)
    wait_until("some rounds", lambda: machine.status()["console_bytes"] > 5)
    image = machine.snapshot(name)
    machine.quit()
    return image


def copy_of(t, image, name="bad"):
    target = t.dir / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(image, target, copy_function=sparse_copy)
    return target


def sparse_copy(source, target):
    subprocess.run(["cp", "--sparse=always", source, target], check=True)


def refused(t, image, *options):
    """A restore that must fail: one line, status 1, no socket left. Returns the line."""
    log = t.dir / "bad.log"
    log.unlink(missing_ok=True)
    machine = t.start("bad", "--restore", image, "--paused", *options, expect=False)
    status = machine.wait_exit()
    text = machine.log_text()
    assert status == 1, f"status {status}: {text}"
    assert not machine.control.exists() and not machine.vsock.exists(), "sockets are left"
    return text


def refused_or_paused(t, image):
    """A restore that may be refused or may work, but must neither die of a signal nor hang."""
    machine = t.start("flip", "--restore", image, "--paused", expect=False)

    def settled():
        if machine.process.poll() is not None:
            return True
        try:
            return machine.status()["state"] in ("paused", "ended")
        except (OSError, AssertionError, ValueError):
            return False
    wait_until("refused or paused", settled)
    if machine.process.poll() is None:
        try:
            machine.call("quit")
        except (OSError, AssertionError):
            pass
    status = machine.wait_exit()
    assert status in (0, 1), f"status {status}: {machine.log_text()}"
    return status


def test_E13_a_memory_file_of_another_length_is_refused(t):
    image = frozen(t)
    size = (image / "memory").stat().st_size
    for length in (size - 4096, 0, size + 4096, size - 1):
        bad = copy_of(t, image)
        os.truncate(bad / "memory", length)
        text = refused(t, bad)
        assert f"memory is {length} bytes, expected {size}" in text, text


def test_E13_folders_links_and_pipes_in_place_of_files_are_refused(t):
    image = frozen(t)
    for name in ("manifest.json", "state.dtb", "memory"):
        for make in (lambda p: p.mkdir(), lambda p: p.symlink_to(image / p.name), os.mkfifo):
            bad = copy_of(t, image)
            (bad / name).unlink()
            make(bad / name)
            assert name in refused(t, bad)
        bad = copy_of(t, image)
        (bad / name).unlink()
        assert "No such file" in refused(t, bad)
    assert "nowhere" in refused(t, t.dir / "nowhere")
    assert "memory" in refused(t, image / "memory")


def test_E13_every_cut_of_state_and_manifest_is_refused(t):
    image = frozen(t)
    for name in ("state.dtb", "manifest.json"):
        whole = (image / name).read_bytes()
        bad = copy_of(t, image)
        for length in range(0, len(whole), 100 if name == "state.dtb" else 20):
            (bad / name).write_bytes(whole[:length])
            refused(t, bad)


def test_E13_a_flipped_byte_is_refused_or_harmless(t):
    image = frozen(t)
    dice = random.Random(13)
    outcomes = []
    for name, flips, seal in (("state.dtb", 60, False), ("manifest.json", 60, False),
                              ("state.dtb", 240, True)):
        whole = (image / name).read_bytes()
        bad = copy_of(t, image)
        for _ in range(flips):
            changed = bytearray(whole)
            changed[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
            (bad / name).write_bytes(changed)
            if seal:
                subprocess.run([t.args.build / "tests/kvm/reseal", bad], check=True)
            status = refused_or_paused(t, bad)
            assert seal or name == "manifest.json" or status == 1, "a changed state was loaded"
            outcomes.append(status)
    assert 0 in outcomes and 1 in outcomes, "the flips tested nothing"


def test_E13_verify_finds_any_flipped_byte_of_memory(t):
    image = frozen(t)
    dice = random.Random(14)
    size = (image / "memory").stat().st_size
    for _ in range(10):
        bad = copy_of(t, image)
        place = dice.randrange(size)
        with open(bad / "memory", "r+b") as memory:
            memory.seek(place)
            byte = memory.read(1)
            memory.seek(place)
            memory.write(bytes([byte[0] ^ 0x10]))
        text = refused(t, bad, "--verify")
        assert f"memory chunk {place >> 20} " in text and "xxh3" in text, text


def test_E13_the_state_of_a_machine_of_another_size_is_refused(t):
    image = frozen(t)
    other = t.boot_tiny("other", "isolation", memory=48)
    wait_until("some rounds", lambda: other.status()["console_bytes"] > 5)
    second = other.snapshot("second")
    bad = copy_of(t, image)
    shutil.copy(second / "state.dtb", bad / "state.dtb")
    subprocess.run([t.args.build / "tests/kvm/reseal", bad], check=True)
    text = refused(t, bad)
    assert str(48 << 20) in text and str(32 << 20) in text, text


def test_E22_a_snapshot_that_does_not_fit_leaves_the_old_one_and_the_machine(t):
    small = t.dir / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", small],
                      capture_output=True, check=False).returncode != 0:
        from harness import Skip
        raise Skip("no right to mount a small file system")
    try:
        machine = t.boot_tiny("a", "isolation", memory=32)
        wait_until("some rounds", lambda: machine.status()["console_bytes"] > 5)
        first = machine.snapshot("small/image")
        filler = small / "filler"
        try:
            filler.write_bytes(bytes(40 << 20))
        except OSError:
            pass
        try:
            machine.call("snapshot", dir=str(small / "image"))
        except RpcError as why:
            assert "No space left" in str(why), why
        else:
            raise AssertionError("a snapshot without room was reported as made")
        assert sorted(p.name for p in small.iterdir()) == ["filler", "image"], "a part is left"
        filler.unlink()
        began = machine.status()["console_bytes"]
        wait_until("the machine runs on", lambda: machine.status()["console_bytes"] > began)
        t.restore("again", first, "--verify").quit()
        machine.quit()
    finally:
        subprocess.run(["umount", small], check=False)


def test_E13_memory_that_cannot_be_read_later_ends_with_a_line(t):
    image = frozen(t)
    machine = t.restore("cut", image)
    wait_until("some rounds", lambda: machine.status()["console_bytes"] > 5)
    os.truncate(image / "memory", 4096)
    try:
        machine.call("snapshot", dir=str(t.dir / "second"))
    except (OSError, AssertionError, RpcError):
        pass
    status = machine.wait_exit()
    # Who meets the missing page first decides: we (internal), or the guest's own page tables.
    assert status in (1, 5), f"status {status}: {machine.log_text()}"
    assert "error: " in machine.log_text(), machine.log_text()
    assert not machine.control.exists() and not machine.vsock.exists(), "sockets are left"
