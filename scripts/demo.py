#!/usr/bin/env python3
"""The show behind ./demo: one Linux, booted once, then copied in two ways, with proof that every copy
is a machine of its own. Uses only what a user has: the `tine` command, and the floors of bench/."""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "bench"))
from tinebench.clock import Stopwatch  # noqa: E402
from tinebench.floors import FloorFork, FloorRestore  # noqa: E402
from tinebench.stats import percentile  # noqa: E402

BUILD = TOP / "build"
TINE = BUILD / "tools" / "tine" / "tine"
FLOOR_SAMPLES = 20
MEMORY_MIB = 128  # the stock kernel needs 68
# One process, only shell builtins: who am I, what is random here, and what stands in a file whose
# name all copies share.
PROOF = ("read h </proc/sys/kernel/hostname; read u </proc/sys/kernel/random/uuid; "
         "echo $h >/tmp/mine; read m </tmp/mine; echo $h $u $m")
BEGAN = time.monotonic()


def say(text):
    print(f"[{time.monotonic() - BEGAN:5.1f}s] {text}", file=sys.stderr, flush=True)


def tine(*words, check=True):
    done = subprocess.run([str(TINE), *words], stdout=subprocess.PIPE, text=True, check=False)
    if check and done.returncode != 0:
        sys.exit(f"demo: tine {' '.join(words)}: status {done.returncode}")
    return done.stdout


def tine_json(*words):
    return json.loads(tine(*words, "--json"))


def guest_folder():
    kind = json.loads(subprocess.run([BUILD / "vmm" / "tine-vmm", "--probe"], text=True,
                                     stdout=subprocess.PIPE, check=False).stdout)["guest"]
    made = subprocess.run([TOP / "guest" / "linux" / "build", kind], stdout=subprocess.PIPE, text=True,
                          check=False)
    if made.returncode != 0:
        sys.exit(f"demo: the {kind} guest could not be made")
    return kind, Path(made.stdout.strip().splitlines()[-1])


def boot(name):
    kind, guest = guest_folder()
    say(f"booting the {kind} Linux guest ({MEMORY_MIB} MiB, one vCPU)")
    tine("start", "--name", name, "--kernel", str(guest / "kernel"), "--initrd", str(guest / "initrd"),
         "--cmdline", (guest / "cmdline").read_text().strip(), "--memory", str(MEMORY_MIB))
    status = tine_json("status", name)
    uname = tine("exec", name, "--", "uname", "-a").strip()
    say(f"booted in {status['timings']['ready_us'] / 1e6:.1f} s: {uname}")
    return status["timings"]["ready_us"]


class Talk:
    """A command in the parent that answers over one connection: the fork must keep both."""

    def __init__(self, name):
        self.process = subprocess.Popen([str(TINE), "exec", name, "--", "cat"], text=True, bufsize=1,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.words = 0

    def expect_answer(self, what):
        self.words += 1
        word = f"word {self.words}\n"
        self.process.stdin.write(word)
        if self.process.stdout.readline() != word:
            sys.exit(f"demo: the command in the parent stopped answering {what}")
        say(f"a command that runs in the parent answers over its connection {what}")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def prove(names):
    """Runs the command in every copy and checks that no two of them are the same machine."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = list(pool.map(lambda n: tine("exec", n, "--", "sh", "-c", PROOF).split(), names))
    for name, answer in zip(names, answers):
        if len(answer) != 3 or answer[0] != name or answer[2] != name:
            sys.exit(f"demo: {name} answered {answer}, expected its own name twice")
    uuids = {answer[1] for answer in answers}
    if len(uuids) != len(names):
        sys.exit("demo: two copies drew the same random bytes")
    return answers


def pss_kib(pid):
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def floors(folder):
    say(f"measuring the floors: the bare system calls, {FLOOR_SAMPLES} times")
    dirty = FloorFork(str(BUILD), MEMORY_MIB, 16)
    forks = [dirty.fork() for _ in range(FLOOR_SAMPLES)]
    dirty.close()

    class Guest:  # what FloorRestore asks for
        memory_mib = MEMORY_MIB

    restore = FloorRestore(str(BUILD), str(folder))
    restore.prepare(Guest, 1)
    watch = Stopwatch(str(BUILD / "bench" / "stopwatch"))
    return {
        "restore": [watch.run(restore.launch())[0] for _ in range(FLOOR_SAMPLES)],
        "pause": [f["pause_us"] for f in forks],
        "child": [f["child_us"] for f in forks],
    }


def restore_copies(image, count):
    say(f"restoring {count} copies, one process each")
    timings, names = [], []
    for i in range(count):
        began = time.monotonic()
        answer = tine_json("restore", str(image), "--name", f"copy-{i + 1}")
        answer["timings"]["ready_wall_us"] = (time.monotonic() - began) * 1e6
        timings.append(answer["timings"])
        names.append(answer["id"])
    return names, timings


def row(label, samples, floor=None, unit="ms", scale=1000.0):
    text = f"  {label:<44}"
    if len(samples) == 1:
        return f"{text}{samples[0] / scale:>10.2f} {unit:<5}"
    text += f"{percentile(samples, 50) / scale:>10.2f} {unit:<5}{percentile(samples, 99) / scale:>10.2f}"
    if floor:
        text += f"{percentile(floor, 50) / scale:>10.2f}"
    return text


def to_entry(timings):
    """From the start of the copy's process to its first entry into the guest."""
    parts = ("map_us", "create_us", "load_us", "entry_us")
    return [sum(t.get(p, 0) for p in parts) for t in timings]


def report(facts):
    fork = facts["fork"]
    children = [c["timings"] for c in fork["children"]]
    floor = facts["floors"]
    lines = [
        "", f"  {'':<44}{'p50':>10} {'':<5}{'p99':>10}{'floor p50':>10}",
        row("boot to the agent (once)", [facts["boot_us"]], unit="s", scale=1e6),
        row("snapshot: the guest stands still", [facts["snapshot"]["stopped_us"]]),
        row("restore: VM, memory, state, first entry", to_entry(facts["restores"]), floor["restore"]),
        row("restore: renewed and ready, by `tine restore`",
            [t["ready_wall_us"] for t in facts["restores"]]),
        row(f"fork of {len(children)}: the parent stands still", [fork["timings"]["stopped_us"]]),
        row("  of it the fork(2)", [fork["timings"]["fork_us"]]),
        row("  the floor: a bare fork(2), 16 MiB dirty", floor["pause"]),
        row("fork: a child's VM, state, first entry", to_entry(children), floor["child"]),
        row("fork: renewed and ready, from the request", [t["total_us"] for t in children]),
        row("memory of a fork (PSS)", facts["pss_kib"], unit="MiB", scale=1024.0),
    ]
    print("\n".join(lines))
    print("\n  The restore floor is a whole process start; everything ran on this machine, just now.")


def main():
    parser = argparse.ArgumentParser(prog="demo")
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tine-demo-"))
    os.environ["TINE_STATE"] = str(folder / "state")
    names = []  # machines that live
    try:
        facts = {"boot_us": boot("parent")}
        names.append("parent")
        facts["snapshot"] = tine_json("snapshot", "parent", str(folder / "image"))["timings"]
        copies, facts["restores"] = restore_copies(folder / "image", args.copies)
        names += copies
        prove(copies)
        say(f"{len(copies)} restored copies: each has its own host name, random bytes and file")
        tine("kill", *copies)
        names = ["parent"]
        talk = Talk("parent")
        talk.expect_answer("before the fork")
        say(f"forking the running parent {args.copies} ways from one pause")
        facts["fork"] = tine_json("fork", "-n", str(args.copies), "parent")
        forks = [c["id"] for c in facts["fork"]["children"]]
        names += forks
        talk.expect_answer("after the fork")
        proofs = prove(forks)
        say(f"{len(forks)} forks: each has its own host name, random bytes and file; the first three:")
        for proof in proofs[:3]:
            say("    " + "  ".join(proof))
        talk.close()
        facts["pss_kib"] = [pss_kib(c["pid"]) for c in facts["fork"]["children"]]
        grand = tine_json("fork", "-n", "2", forks[0])
        names += [c["id"] for c in grand["children"]]
        tree = tine("tree")
        tine("kill", *names)
        names = []
        facts["floors"] = floors(folder)
        if args.json:
            print(json.dumps(facts))
        else:
            print("\n" + tree)
            report(facts)
        say("done")
    finally:
        if names:
            tine("kill", *names, check=False)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
