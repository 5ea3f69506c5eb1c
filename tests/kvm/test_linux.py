"""A real Linux in the machine: its copies know that they are copies, and go on."""
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from harness import RpcError, Skip, call, wait_until

PROOF = ("read h </proc/sys/kernel/hostname; read u </proc/sys/kernel/random/uuid; "
         "read m </etc/machine-id; echo $h >/tmp/mine; read f </tmp/mine; "
         "r=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '); echo $h $u $m $f $r")


def all_at_once(function, items):
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))


def prove_different(machines):
    answers = all_at_once(lambda m: m.output("sh", "-c", PROOF, limit_s=300).split(), machines)
    for machine, answer in zip(machines, answers):
        assert len(answer) == 5 and answer[0] == machine.name == answer[3], answer
    for column in (1, 2, 4):
        values = {answer[column] for answer in answers}
        assert len(values) == len(machines), f"two copies share {values}"


def test_commands_run_with_exact_streams_and_statuses(t):
    machine = t.linux("a")
    assert machine.run("sh", "-c", "echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")
    assert machine.run("sh", "-c", "kill -9 $$")[0] == 128 + 9
    assert machine.run("wc", "-c", stdin=bytes([0, 1, 2, 255]))[1].strip() == b"4"
    assert machine.run("cat")[1] == b""
    odd = ["printf", "%s|", "a b", "$HOME", "x'y", "", "\n", "--", "init=/x loglevel=7"]
    assert machine.run(*odd)[1] == b"a b|$HOME|x'y||\n|--|init=/x loglevel=7|"
    every = bytes(range(256)) * 300
    assert machine.run("cat", stdin=every)[1] == every
    status, _, err = machine.run("/no/such/program")
    assert status == 127 and b"/no/such/program" in err, (status, err)


def test_E10_forks_draw_different_random_bytes_as_their_first_act(t):
    machine = t.linux("parent")
    children, answer = machine.fork(8)
    assert all("renew_us" in child["timings"] for child in answer["children"])
    prove_different(children)
    generations = all_at_once(lambda m: m.output("cat", "/run/tine/generation"), children)
    assert len(set(generations)) == len(children), generations


def test_E10_restored_copies_draw_different_random_bytes(t):
    image = t.linux_image()
    machines = [t.restore(f"r{i}", image) for i in range(4)]
    for machine in machines:
        machine.wait_ready()
    prove_different(machines)


def test_E9_the_clock_of_a_copy_is_right_before_its_first_command(t):
    first = t.linux("a")
    image = first.snapshot("image")
    first.quit()
    time.sleep(3)  # the time that the copy would be behind
    copy = t.restore("b", image)
    copy.wait_ready()
    before = time.time()
    said = int(copy.output("date", "+%s"))
    after = time.time()
    assert before - 1.5 <= said <= after + 0.5, f"{said} is not between {before} and {after}"
    (child,), _ = copy.fork(1)
    before = time.time()
    said = int(child.output("date", "+%s"))
    assert before - 1.5 <= said <= time.time() + 0.5


def test_E1_old_connections_of_a_copy_end_and_new_ones_work(t):
    machine = t.linux("a")
    sleeper = ["sh", "-c", "echo begun; exec sleep 1000"]
    kept, _ = machine.connect(1024)
    talk = subprocess.Popen([t.tine, "exec", "a", "--", *sleeper], stdout=subprocess.PIPE,
                            env=dict(os.environ, TINE_STATE=str(t.dir)))
    t.processes.append(talk)
    assert talk.stdout.readline() == b"begun\n"
    (child,), _ = machine.fork(1)
    # The child's copy of the command lost its connection, so the agent ends it there; not here.
    wait_until("the command is gone in the child",
               lambda: "sleep 1000" not in child.output("ps"))
    assert "sleep 1000" in machine.output("ps"), "the parent lost its command"
    assert talk.poll() is None, "the parent's connection ended"
    kept.close()


def test_E18_parent_and_copies_run_after_each_fork_and_each_failure(t):
    machine = t.linux("a")
    for attempt in range(3):
        try:
            machine.call("fork", children=[{"id": "x", "control": "/no/where/x.sock",
                                            "vsock": "/no/where/x.vsock"}])
        except RpcError as why:
            assert "/no/where" in str(why), why
        else:
            raise AssertionError("a fork into no folder was accepted")
        assert machine.output("echo", "on") == "on\n"
        assert machine.status()["state"] == "running"
        (child,), _ = machine.fork(1)
        assert child.output("echo", "on") == machine.output("echo", "on") == "on\n"
        child.quit()


def test_E21_twenty_restores_and_twenty_forks_at_once(t):
    image = t.linux_image()
    copies = all_at_once(lambda i: t.restore(f"r{i}", image), range(20))
    all_at_once(lambda m: m.wait_ready(), copies)
    prove_different(copies)
    for machine in copies[1:]:
        machine.quit()
    forks, _ = copies[0].fork(20)
    prove_different(forks)
    for machine in [*forks, copies[0]]:
        machine.quit()
    assert not list(t.dir.glob("*.sock")) and not list(t.dir.glob("*.vsock")), "sockets are left"


def test_E20_files_written_before_a_snapshot_are_in_every_generation(t):
    machine = t.linux("g0")
    names = []
    for generation in range(1, 5):
        machine.output("sh", "-c", f"echo {generation} >/tmp/f{generation}")
        names.append(f"/tmp/f{generation}")
        image = machine.snapshot(f"i{generation}")
        machine.quit()
        machine = t.restore(f"g{generation}", image, "--verify")
        machine.wait_ready()
        assert machine.output("cat", *names).split() == [str(n + 1) for n in range(generation)]


def test_a_tree_of_forks_keeps_its_branches_apart(t):
    dice = random.Random(1)
    machine = t.linux("root")
    members = {"root": (machine, ["root"])}
    machine.output("sh", "-c", "echo root >/tmp/path")
    for _ in range(6):
        name = dice.choice(sorted(members))
        parent, path = members[name]
        (child,), _ = parent.fork(1)
        child.output("sh", "-c", f"echo {child.name} >>/tmp/path")
        members[child.name] = (child, [*path, child.name])
    for machine, path in members.values():
        assert machine.output("cat", "/tmp/path").split() == path


def test_D1_connect_answers_promptly_when_nobody_listens(t):
    machine = t.linux("a")
    s, answer = machine.connect(9999)
    assert answer.startswith("ERR ") and "9999" in answer, answer
    s.close()
    machine.call("pause")
    s, answer = machine.connect(1024)
    assert answer.startswith("ERR ") and "paused" in answer, answer
    s.close()
    machine.call("resume")
    assert machine.output("echo", "on") == "on\n"


def test_H5_linux_powers_off_reboots_and_panics_with_their_own_statuses(t):
    for command, status in ((["poweroff", "-f"], 0), (["reboot", "-f"], 3),
                            (["sh", "-c", "echo c >/proc/sysrq-trigger"], 4),
                            (["halt", "-f"], 7)):
        machine = t.linux(f"end{status}")
        if command[0] == "sh" and machine.run("test", "-e", "/proc/sysrq-trigger")[0] != 0:
            machine.quit()
            continue
        machine.run(*command, limit_s=300)
        assert machine.wait_exit(300) == status, f"{command}: {machine.log_text()}"


def test_a_fork_of_which_one_child_dies_is_undone_as_a_whole(t):
    machine = t.linux("a")
    victims = []

    def kill_one():
        child = wait_until("the second child", lambda: next(iter(t.dir.glob("a-2.sock")), None))
        pid = wait_until("its process", lambda: renewing_pid(child))
        victims.append(pid)
        os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill_one)
        try:
            machine.fork(3)
        except RpcError as why:
            assert "a-2" in str(why), why
        else:
            killer.result()
            raise Skip("the children were ready before one of them could be killed")
        killer.result()
    wait_until("sockets of the children are gone", lambda: len(list(t.dir.glob("a-*.*sock"))) == 0, 10)
    assert machine.output("echo", "on") == "on\n"
    children, _ = machine.fork(2)
    assert [child.output("echo", "on") for child in children] == ["on\n", "on\n"]


def renewing_pid(control):
    try:
        return call(control, "status")["pid"]
    except (OSError, AssertionError):
        return None
