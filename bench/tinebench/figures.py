"""
The figures of bench/run: how each is taken, what it is held against and what its goal is.
docs/benchmarks.md says the same in prose; the two change together.
"""

import contextlib

from peers.firecracker import Firecracker
from peers.qemu import Qemu

from . import guests, memory
from .clock import Stopwatch, in_turns
from .errors import NotHere
from .floors import FloorFork, FloorRestore
from .stats import percentile, summary
from .tine import ForkParent, Tine, vmm_path

DIRTY_MIB = 16
COPIES = {"bare": 1, "lean": 10}  # how many images of a guest the samples go round


class Goal:
    """`p50 <= factor x the p50 of other`, or with other None `p50 <= factor` in the figure's unit."""

    def __init__(self, factor, other=None):
        self.factor = factor
        self.other = other

    def text(self, unit):
        return f"<= {self.factor:g} x {self.other}" if self.other else f"<= {self.factor:g} {unit}"

    def holds(self, p50, others):
        limit = self.factor * (percentile(others[self.other], 50) if self.other else 1)
        return p50 <= limit


def figure(name, unit, samples, others, goals):
    """One row of the report. `others` maps "floor" and peers' names to their samples."""
    row = {"name": name, "unit": unit, **summary(samples)}
    p50 = percentile(samples, 50)
    ratio = {o: round(p50 / percentile(s, 50), 3) for o, s in others.items()}
    row["floor_p50"] = summary(others["floor"])["p50"] if "floor" in others else None
    row["peers"] = {o: {**summary(s), "ratio": ratio[o]} for o, s in others.items() if o != "floor"}
    row["ratio"] = ratio.get("floor")
    asked = [g for g in goals if g.other is None or g.other in others]
    row["goal"] = " and ".join(g.text(unit) for g in asked)
    row["ok"] = all(g.holds(p50, others) for g in asked)
    return row


class Bench:
    """One run: where things are, and what was prepared once for several figures."""

    def __init__(self, source, build, folder, samples, peers):
        self.source = source
        self.build = build
        self.folder = folder
        self.samples = samples
        self.peer_programs = peers
        self.stopwatch = Stopwatch(f"{build}/bench/stopwatch")
        self._guests = {}
        self._contenders = {}

    def guest(self, name):
        if name not in self._guests:
            self._guests[name] = (guests.lean(self.source, self.build, self.folder)
                                  if name == "lean" else guests.bare(self.build))
        return self._guests[name]

    def _contender(self, name):
        if name == "tine":
            return Tine(vmm_path(self.build), self.folder)
        if name == "floor":
            return FloorRestore(self.build, self.folder)
        if name == "firecracker":
            return Firecracker(self.folder, self.peer_programs[name])
        return Qemu(self.folder, self.peer_programs.get("qemu-microvm"))

    def contenders(self, names, guest_name):
        """name -> contender that has saved `guest_name` and can be restored from now on."""
        guest = self.guest(guest_name)
        for name in names:
            if (name, guest_name) not in self._contenders:
                contender = self._contender(name)
                contender.prepare(guest, COPIES[guest_name])
                self._contenders[name, guest_name] = contender
        return {name: self._contenders[name, guest_name] for name in names}

    def peers(self):
        """QEMU always; Firecracker when a binary of it was given."""
        return ["qemu-microvm"] + [p for p in ("firecracker",) if p in self.peer_programs]

    def restores(self, what, contenders, look=None):
        """Restore everyone in turns; name -> [(first byte in microseconds, look(contender, pid))]."""
        def taker(contender):
            see = (lambda pid: look(contender, pid)) if look else None
            return lambda: self.stopwatch.run(contender.launch(), see)
        return in_turns(self.samples, {n: taker(c) for n, c in contenders.items()}, what)


def _split(taken, column):
    """(samples of tine, name -> samples of everyone else) of one column of the results."""
    rest = {name: [r[column] for r in results] for name, results in taken.items()}
    return rest.pop("tine"), rest


def restore_first_instruction(bench, name):
    contenders = bench.contenders(["tine", "floor"], "bare")
    ours, others = _split(bench.restores(name, contenders), 0)
    return [figure(name, "us", ours, others, [Goal(2, "floor")])]


def restore_lean_first_byte(bench, name):
    contenders = bench.contenders(["tine", "floor", *bench.peers()], "lean")
    ours, others = _split(bench.restores(name, contenders), 0)
    return [figure(name, "us", ours, others, [Goal(0.4, "firecracker"), Goal(0.08, "qemu-microvm")])]


def fork_live(bench, pause_name, child_name):
    guest = guests.bare(bench.build, DIRTY_MIB)
    with contextlib.ExitStack() as stack:
        parties = {"tine": ForkParent(vmm_path(bench.build), guest, bench.folder, DIRTY_MIB),
                   "floor": FloorFork(bench.build, guest.memory_mib, DIRTY_MIB)}
        for party in parties.values():
            stack.callback(party.close)
        taken = in_turns(bench.samples, {n: p.fork for n, p in parties.items()}, "fork")
    rows = []
    for name, ours, theirs in ((pause_name, "pause_us", "pause_us"),
                               (child_name, "child_us", "child_us")):
        others = {n: [r[theirs] for r in results] for n, results in taken.items() if n != "tine"}
        rows.append(figure(name, "us", [r[ours] for r in taken["tine"]], others, [Goal(2, "floor")]))
    return rows


def overhead_pss(bench, name):
    contenders = bench.contenders(["tine", *bench.peers()], "lean")

    def look(contender, pid):
        bytes_ = contender.guest.memory_mib << 20
        return memory.overhead_kib(pid, bytes_, contender.folder) / 1024

    ours, others = _split(bench.restores(name, contenders, look), 1)
    return [figure(name, "MiB", ours, others, [Goal(3)])]


# What takes figures, and the names of those it takes.
FIGURES = [
    (restore_first_instruction, ["restore.first_instruction"]),
    (restore_lean_first_byte, ["restore.lean_first_byte"]),
    (fork_live, ["fork.pause", "fork.child_first_instruction"]),
    (overhead_pss, ["overhead.pss"]),
]


def chosen(asked):
    """The takers behind the names asked for: a group (`fork`), a figure, or none for all."""
    for word in asked:
        if not any(_matches(n, word) for _, names in FIGURES for n in names):
            raise ValueError(word)
    return [(take, names) for take, names in FIGURES
            if not asked or any(_matches(n, word) for n in names for word in asked)]


def _matches(name, word):
    return name == word or name.startswith(word + ".")


def take(bench, asked):
    """Take all figures asked for; one that could not be taken becomes a row with its reason."""
    rows = []
    for function, names in chosen(asked):
        try:
            taken = function(bench, *names)
        except NotHere as e:
            taken = [{"name": n, "ok": None, "not_here": str(e)} for n in names]
        except (OSError, RuntimeError, KeyError) as e:
            taken = [{"name": n, "ok": False, "error": f"{type(e).__name__}: {e}"} for n in names]
        rows += [r for r in taken if not asked or any(_matches(r["name"], w) for w in asked)]
    return rows
