#!/usr/bin/env python3
"""
Unit tests of what bench/run judges by: statistics, goals, choice of figures, cpio, and the stopwatch,
whose path is the argument (without it, its tests are skipped).
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

from tinebench import cpio, figures, memory, report, stats  # noqa: E402  (the path comes first)
from tinebench.errors import NotHere  # noqa: E402


STOPWATCH = sys.argv[1] if len(sys.argv) > 1 else None


class Stats(unittest.TestCase):
    def test_percentiles_are_measured_values(self):
        samples = list(range(100, 0, -1))
        self.assertEqual([stats.percentile(samples, p) for p in (1, 50, 99, 100)], [1, 50, 99, 100])

    def test_one_sample_is_every_percentile(self):
        self.assertEqual(stats.summary([7.0]), {"n": 1, "min": 7.0, "p50": 7.0, "p99": 7.0})


class Goals(unittest.TestCase):
    def row(self, ours, goals, **others):
        return figures.figure("f.g", "us", [ours], {n: [v] for n, v in others.items()}, goals)

    def test_goal_holds_at_its_limit_and_not_above(self):
        goals = [figures.Goal(2, "floor")]
        self.assertTrue(self.row(200.0, goals, floor=100.0)["ok"])
        self.assertFalse(self.row(200.1, goals, floor=100.0)["ok"])

    def test_absolute_goal(self):
        self.assertTrue(self.row(3.0, [figures.Goal(3)])["ok"])
        self.assertFalse(self.row(3.1, [figures.Goal(3)])["ok"])

    def test_every_goal_must_hold(self):
        goals = [figures.Goal(0.4, "firecracker"), figures.Goal(0.08, "qemu-microvm")]
        row = self.row(10.0, goals, **{"firecracker": 30.0, "qemu-microvm": 100.0})
        self.assertFalse(row["ok"])
        self.assertEqual(row["peers"]["firecracker"]["ratio"], 0.333)

    def test_a_peer_that_was_not_given_is_not_asked_about(self):
        goals = [figures.Goal(0.4, "firecracker"), figures.Goal(0.08, "qemu-microvm")]
        row = self.row(8.0, goals, **{"qemu-microvm": 100.0})
        self.assertTrue(row["ok"])
        self.assertEqual(row["goal"], "<= 0.08 x qemu-microvm")


class Choice(unittest.TestCase):
    def test_group_figure_and_nothing(self):
        self.assertEqual(len(figures.chosen([])), len(figures.FIGURES))
        self.assertEqual([f for f, _ in figures.chosen(["fork"])], [figures.fork_live])
        self.assertEqual([f for f, _ in figures.chosen(["overhead.pss"])], [figures.overhead_pss])
        with self.assertRaises(ValueError):
            figures.chosen(["fo"])

    def test_a_figure_that_cannot_be_taken_keeps_its_reason(self):
        def not_here(bench, *names):
            raise NotHere("no such thing")

        kept, figures.FIGURES = figures.FIGURES, [(not_here, ["a.b", "a.c"])]
        try:
            rows = figures.take(None, ["a.c"])
        finally:
            figures.FIGURES = kept
        self.assertEqual(rows, [{"name": "a.c", "ok": None, "not_here": "no such thing"}])
        machine = {"cpu": "c", "cores": 1, "kernel": "k", "kvm": {"modules": []}, "thp": "never",
                   "load_before": 0, "load_after": 0}
        text = report.table({"figures": rows, "machine": machine})
        self.assertIn("a.c: no such thing", text)


class Formats(unittest.TestCase):
    def test_archive_names_its_entries(self):
        archive = cpio.with_program("ticker", b"12345")
        self.assertEqual(len(archive) % 4, 0)
        self.assertEqual(archive.count(b"070701"), 5)
        head = archive[archive.index(b"bin/ticker\0") - 110:]
        self.assertEqual((int(head[14:22], 16), int(head[54:62], 16)), (0o100755, 5))

    def test_overhead_leaves_out_the_guest(self):
        own = memory.overhead_kib(os.getpid(), 1 << 40, "/nowhere")
        self.assertGreater(own, 1000)
        self.assertEqual(memory.overhead_kib(os.getpid(), 2, "/nowhere"), 0)


class Run(unittest.TestCase):
    def test_status_3_when_nothing_is_built(self):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run([os.path.join(HERE, "run"), "fork", "--build", empty],
                                  capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("is not built", done.stdout)

    def test_status_2_for_an_unknown_figure_or_peer(self):
        for wrong in (["speed"], ["--peer", "xen=/x"], ["--samples", "0"]):
            done = subprocess.run([os.path.join(HERE, "run"), *wrong], capture_output=True, check=False)
            self.assertEqual(done.returncode, 2)


@unittest.skipUnless(STOPWATCH, "no stopwatch was named")
class Clock(unittest.TestCase):
    def watch(self, *options, program):
        argv = [STOPWATCH, "--timeout", "20", *options, "--", "sh", "-c", program]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def test_first_byte_on_the_fd_that_was_asked_for(self):
        done = self.watch("--fd", "3", program="echo noise; sleep 0.05; echo x >&3; exec sleep 60")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("noise", done.stderr)
        self.assertGreaterEqual(json.loads(done.stdout)["first_byte_us"], 50000)

    def test_other_bytes_are_skipped_when_one_is_named(self):
        done = self.watch("--byte", "T", program="echo x; sleep 0.05; echo yT; exec sleep 60")
        self.assertGreaterEqual(json.loads(done.stdout)["first_byte_us"], 50000)

    def test_a_program_that_ends_or_stays_silent_is_an_error(self):
        for options, program, why in (((), "exit 0", "ended before"),
                                      (("--timeout", "1"), "exec sleep 60", "no byte")):
            done = self.watch(*options, program=program)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(why, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
