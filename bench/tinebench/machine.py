"""What the numbers were taken on: the `machine` object of a report."""

import json
import os
import platform
import re
import subprocess


def _read(path):
    try:
        with open(path, encoding="utf-8") as f:
            return f.read().strip()
    except OSError:
        return None


def _cpu_model():
    found = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo") or "", re.M)
    return found.group(1) if found else platform.machine()


def _thp_mode():
    chosen = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return chosen.group(1) if chosen else None


def _kvm(vmm):
    """The kernel modules that make /dev/kvm, and what tine-vmm's own probe says of it."""
    modules = sorted(m for m in os.listdir("/sys/module") if m.startswith("kvm_"))
    kvm = {"modules": modules, "usable": os.access("/dev/kvm", os.R_OK | os.W_OK)}
    if vmm and os.path.exists(vmm):
        probe = subprocess.run([vmm, "--probe"], capture_output=True, text=True, check=False)
        try:
            kvm["probe"] = json.loads(probe.stdout)
        except ValueError:
            pass
    return kvm


def load():
    return round(os.getloadavg()[0], 2)


def describe(vmm):
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        "kernel": platform.release(),
        "thp": _thp_mode(),
        "kvm": _kvm(vmm),
        "load_before": load(),
    }
