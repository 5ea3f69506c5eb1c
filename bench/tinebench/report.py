"""The report of a run, for people."""


def _number(value):
    return "-" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _verdict(row):
    return {True: "ok", False: "MISSED", None: "not here"}[row["ok"]]


def table(report):
    head = ["figure", "unit", "n", "min", "p50", "p99", "floor", "ratio", "goal (p50)", ""]
    lines, notes = [head], []
    for row in report["figures"]:
        if "p50" not in row:
            lines.append([row["name"], *["-"] * 8, _verdict(row)])
            notes.append(f"{row['name']}: {row.get('not_here') or row.get('error')}")
            continue
        lines.append([row["name"], row["unit"], str(row["n"]), _number(row["min"]),
                      _number(row["p50"]), _number(row["p99"]), _number(row["floor_p50"]),
                      _number(row["ratio"]), row["goal"], _verdict(row)])
        for name, peer in row["peers"].items():
            lines.append([f"  {name}", row["unit"], str(peer["n"]), _number(peer["min"]),
                          _number(peer["p50"]), _number(peer["p99"]), "", _number(peer["ratio"]),
                          "", ""])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = "\n".join("  ".join(cell.ljust(w) if i in (0, 1, 8, 9) else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
                     for line in lines)
    machine = report["machine"]
    text += (f"\n\n{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
             f"{'+'.join(machine['kvm']['modules']) or 'no KVM module'}, THP {machine['thp']}, "
             f"load {machine['load_before']} -> {machine['load_after']}")
    if machine["load_before"] > machine["cores"]:
        notes.append("The machine was busy with other work: ratios may be off, p99 says nothing.")
    return "\n".join([text, *notes])
