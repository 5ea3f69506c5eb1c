"""The control socket of a real tine-vmm: F1, F2 and who may ask for what when."""

import json
import time

from lib import Control, test, wait_until

STATE = -32003


@test
def F2_requests_in_the_wrong_state_change_nothing(place):
    place.vmm("--id", "m")
    c = place.control()
    bare = {"kernel": str(place.programs.bare), "memory_mib": 16}
    for method, params in (("pause", {}), ("resume", {}), ("snapshot", {"dir": "/tmp/never"}),
                           ("fork", {"count": 1})):
        assert c.code(method, **params) == STATE, method
        assert c.call("status")["state"] == "new"
    assert c.code("boot", **bare) == 0
    pid = c.call("status")["pid"]
    assert c.code("boot", **bare) == STATE
    assert c.call("status")["pid"] == pid
    for method, changed in (("pause", True), ("pause", False), ("resume", True), ("resume", False)):
        assert c.call(method) == {"changed": changed}, method
    assert c.code("wait", **{"for": "ready", "timeout_ms": 0}) == -32013
    assert c.call("stop")["changed"] is True
    # Afterwards there is nobody to ask, or one specific error.
    after = c.raw("pause")
    assert after is None or after["error"]["code"] == STATE, after


@test
def F2_a_pending_wait_is_told_of_the_end(place):
    place.vmm("--kernel", place.programs.bare, "--memory", "16")
    waiter, ended, c = place.control(), place.control(), place.control()
    for client, what in ((waiter, b"ready"), (ended, b"ended")):
        client.call("status")
        client.send_line(b'{"jsonrpc":"2.0","id":9,"method":"wait","params":{"for":"%s"}}' % what)
    c.call("status")  # begun after both waits
    c.call("quit")
    assert waiter.answer()["error"]["code"] == STATE
    answer = ended.answer()["result"]
    assert (answer["state"], answer["reason"]) == ("ended", "stopped"), answer


@test
def F1_a_stalled_client_holds_up_neither_clients_nor_guest(place):
    place.vmm("--kernel", place.programs.bare, "--memory", "16")
    stalled = [place.control() for _ in range(8)]
    for s in stalled:
        s.socket.sendall(b'{"jsonrpc":')
    c = place.control()
    begin = time.monotonic()
    first = c.call("status")["console_bytes"]
    for _ in range(100):
        c.call("status")
    assert time.monotonic() - begin < 2
    wait_until("the guest goes on", lambda: c.call("status")["console_bytes"] > first)


@test
def F1_too_large_is_answered_and_memory_stays_bounded(place):
    vmm = place.vmm("--kernel", place.programs.bare, "--memory", "16")

    def rss_kib():
        with open(f"/proc/{vmm.pid}/status", encoding="ascii") as status:
            return int(next(l for l in status if l.startswith("VmRSS")).split()[1])

    before = rss_kib()
    for size in (1023, 1024, 1025, 65536, (1 << 20) - 1, 1 << 20):
        line = b'{"jsonrpc":"2.0","id":1,"method":"status"}'
        c = place.control()
        c.send_line(line + b" " * (size - len(line)))
        assert "result" in c.answer(), size
    c = place.control()
    try:
        for _ in range(1024):
            c.socket.sendall(b"x" * (1 << 20))
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert json.loads(c.socket.makefile("rb").readline())["error"]["code"] == -32010
    assert rss_kib() - before < 16 << 10, f"{before} KiB before, {rss_kib()} KiB after"
    assert place.control().call("status")["state"] == "booting"


@test
def malformed_input_gets_one_specific_error_each(place):
    place.vmm()
    c = place.control()
    for line, code in ((b"hello", -32700), (b"[]", -32600), (b"{}", -32600),
                       (b'{"jsonrpc":"2.0","id":1,"method":"x"}', -32601),
                       (b'{"jsonrpc":"2.0","id":1,"method":"status","params":{"y":1}}', -32602),
                       (b"\xff\xfe\x00", -32700)):
        c.send_line(line)
        assert c.answer()["error"]["code"] == code, line
    assert c.call("status")["state"] == "new"


@test
def a_refused_boot_is_answered_and_ends_the_process(place):
    text = place.work / "text"
    text.write_text("not a kernel\n" * 100)
    for params, status in (({"kernel": str(text), "memory_mib": 16}, 1),
                           ({"kernel": str(place.work / "none"), "memory_mib": 16}, 1),
                           ({"kernel": str(place.programs.bare), "memory_mib": 16,
                             "disks": [{"path": str(place.work / "none")}]}, 1)):
        vmm = place.vmm()
        answer = place.control().raw("boot", **params)
        assert "error" in answer and "\n" not in answer["error"]["message"], answer
        vmm.wait(timeout=10)
        assert vmm.returncode == status, vmm.returncode
        assert not (place.root / "vm.sock").exists()


@test
def forks_that_are_asked_for_at_once_are_all_made(place):
    place.vmm("--id", "m", "--kernel", place.programs.bare, "--memory", "16")
    c = place.control()
    c.call("status")
    lines = [b'{"jsonrpc":"2.0","id":%d,"method":"fork","params":{"count":2}}\n' % i for i in range(8)]
    c.socket.sendall(b"".join(lines))
    ids = set()
    for _ in lines:
        answer = c.answer()
        assert "result" in answer, answer
        ids |= {child["id"] for child in answer["result"]["children"]}
    assert len(ids) == 16, ids
    for name in ids:
        client = Control(place.root / f"{name}.sock")
        assert client.call("status")["parent"] == "m"
        client.call("quit")
        # Only the copy held it: nobody listens there any more.
        wait_until("its socket is gone", lambda n=name: not (place.root / f"{n}.sock").exists())
    assert c.call("status")["state"] == "booting"


@test
def a_fork_asked_for_together_with_the_end_leaves_no_socket(place):
    for _ in range(10):
        vmm = place.vmm("--id", "m", "--kernel", place.programs.bare, "--memory", "16")
        c = place.control()
        c.call("status")
        c.socket.sendall(b'{"jsonrpc":"2.0","id":1,"method":"fork","params":{"count":2}}\n'
                         b'{"jsonrpc":"2.0","id":2,"method":"quit"}\n')
        answers = [c.answer(), c.answer()]
        assert {a["id"] for a in answers} == {1, 2}, answers
        vmm.wait(timeout=10)
        for name in [p.name for p in place.root.glob("m-*.sock")]:
            Control(place.root / name).call("quit")  # it was made in time: a machine of its own
        wait_until("all sockets are gone",
                   lambda: not [*place.root.glob("*.sock"), *place.root.glob("*.vsock")])
