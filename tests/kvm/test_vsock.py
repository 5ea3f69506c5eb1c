"""vsock against a bare guest that drives the device itself (guest/tiny/vsock.c)."""
import os
import socket
import time

from harness import LIMIT_S, wait_until

MIB = 1 << 20


def boot(t, name="v", *options, cmdline=""):
    machine = t.boot_tiny(name, "vsock", *options, cmdline=cmdline)
    machine.wait_console(b"up")
    return machine


def read_to_end(s):
    parts = []
    while part := s.recv(65536):
        parts.append(part)
    return b"".join(parts)


def echo(machine, text):
    s, answer = machine.connect(7)
    assert answer.startswith("OK "), answer
    s.sendall(text)
    s.shutdown(socket.SHUT_WR)
    return read_to_end(s)


def fds(machine):
    return len(os.listdir(f"/proc/{machine.process.pid}/fd"))


def test_D1_refused_not_ready_and_paused_are_told_at_once(t):
    machine = t.boot_tiny("v", "vsock")
    answer = machine.connect(7)[1]  # the first moments: an answer of some kind
    assert answer.startswith(("OK ", "ERR not ready: ")), answer
    machine.wait_console(b"up")
    began = time.monotonic()
    assert machine.connect(9999)[1] == "ERR refused: nothing listens on guest port 9999\n"
    machine.call("pause")
    assert machine.connect(7)[1] == "ERR paused: the machine is paused\n"
    assert time.monotonic() - began < LIMIT_S / 2
    machine.call("resume")
    assert echo(machine, b"again") == b"again"


def test_D3_guest_streams_and_the_host_walks_away(t):
    machine = boot(t)
    before = fds(machine)
    for _ in range(100):
        s, answer = machine.connect(20)
        assert answer.startswith("OK "), answer
        assert len(s.recv(1024)) > 0
        s.close()
    assert echo(machine, b"alive") == b"alive"
    wait_until("all descriptors are back", lambda: fds(machine) <= before)


def test_D4_each_direction_ends_on_its_own(t):
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(LIMIT_S)
    listener.bind(str(t.dir / "v.vsock_700"))
    listener.listen()
    machine = boot(t, "v", "--grant", "700", cmdline="g")
    guest, _ = listener.accept()
    guest.settimeout(LIMIT_S)
    assert read_to_end(guest) == b"hello"  # the guest ended its side only
    guest.sendall(b"and the answer after the end")
    guest.close()
    machine.wait_console(b"and the answer after the end")
    s, answer = machine.connect(9)
    assert answer.startswith("OK "), answer
    s.sendall(b"x" * 100000)
    s.shutdown(socket.SHUT_WR)
    assert read_to_end(s) == b"%016x" % 100000


def test_D6_D8_large_packets_to_a_slow_reader(t):
    machine = boot(t)
    s, answer = machine.connect(19)
    assert answer.startswith("OK "), answer
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    block = bytes((i * 7) & 255 for i in range(65536))
    for i in range(256):
        got = b""
        while len(got) < len(block):
            part = s.recv(len(block) - len(got))
            assert part, f"ended after {i} blocks and {len(got)} bytes"
            got += part
        assert got == block, f"block {i} differs"
        if i % 16 == 0:
            time.sleep(0.02)  # the slow reader itself, not a wait for anything
    assert s.recv(1) == b""


def test_D10_connections_come_and_go(t):
    machine = boot(t)
    assert echo(machine, b"first") == b"first"
    before = fds(machine)
    for i in range(500):
        assert echo(machine, b"%d" % i) == b"%d" % i
    streams = [machine.connect(7) for _ in range(200)]
    assert all(answer.startswith("OK ") for _, answer in streams)
    for s, _ in streams:
        s.close()
    wait_until("all descriptors are back", lambda: fds(machine) <= before)


def test_E1_old_connections_end_in_copies_and_go_on_in_the_original(t):
    machine = boot(t)
    s, answer = machine.connect(7)
    assert answer.startswith("OK "), answer
    s.sendall(b"before")
    assert s.recv(6) == b"before"
    image = machine.snapshot("image")
    s.sendall(b"after")
    assert s.recv(5) == b"after"
    copy = t.restore("r", image)
    copy.wait_console(b"R", 10)  # the guest's old connection was reset
    assert echo(copy, b"copy") == b"copy"
    (child,), _ = machine.fork(1)
    child.wait_console(b"R", 10)
    assert echo(child, b"child") == b"child"
    s.sendall(b"still")
    assert s.recv(5) == b"still"
    assert b"R" not in machine.console()
    s.shutdown(socket.SHUT_WR)
    assert read_to_end(s) == b""
