"""Waiting for a guest to tick while it is booted for a snapshot."""

import os
import select
import time

BOOT_TIMEOUT_S = 120
PERIOD_S = 0.003  # of the slowest guest's tick
TICKS = 8  # in a row: text of the guest's kernel has none of that


def wait_for_ticks(fd, tick, process, what):
    """Read `fd` until the guest ticks; `process` is its VMM, `what` names it in errors."""
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    seen = b""
    wanted = tick.encode() * TICKS
    while wanted not in seen:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise RuntimeError(f"{what}: no tick in {BOOT_TIMEOUT_S} s; console: {seen[-300:]!r}")
        data = os.read(fd, 65536)
        if not data:
            raise RuntimeError(f"{what} ended with status {process.wait()}; console: {seen[-300:]!r}")
        seen = (seen + data)[-4096:]


def stagger(i, copies):
    """
    Call between a tick and the save of copy i of `copies`. How long a copy runs until its next
    tick depends on where between two ticks it was saved: copies are spread over that, alike for
    every VMM.
    """
    time.sleep(PERIOD_S * i / copies)
