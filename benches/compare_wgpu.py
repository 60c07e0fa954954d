"""Puts `rmsnorm bench --json` of wgpu and of CUDA, from one machine and session, into one table with wgpu's targets.

usage: python -B compare_wgpu.py FILE.json.. > TABLE.md

Rates are shares of the backend's own copy in the same run, and speed is CUDA's time over wgpu's.
"""
import json
import sys

from compare_gpu import FULL, OPS

# ../shared/TARGETS.md: percent of the WGSL copy in bf16, by columns. Beyond them the slope should be graceful.
TARGETS = {"fwd": [(128, 16384, 95), (16385, 65536, 85)], "bwd": [(128, 16384, 85)]}


def read(paths):
    """(backend, op, dtype, rows, cols) -> row."""
    rows = {}
    for path in paths:
        for report in json.load(open(path))["reports"]:
            for row in report["rows"]:
                op = OPS.get((row["norm"], row["op"]))
                if op and row["cold"]:
                    rows[report["backend"].split(":")[0], op, row["dtype"], row["rows"], row["cols"]] = row
    return rows


def target(op, dtype, rows, cols, row):
    """The target in words, and whether it is met; rows of few megabytes have none."""
    of_copy = round(100 * row["of_copy"], 1)
    if dtype == "bf16" and rows * cols >= 1 << 25:
        for least, most, percent in TARGETS[op[-3:]]:
            if least <= cols <= most:
                missed = percent - of_copy
                return f">= {percent} %", "met" if missed <= 0 else f"missed by {missed:.1f} points"
    return "-", "-"


def main(paths):
    rows = read(paths)
    head = ["op, rows x cols, dtype", "WGSL copy, GB/s", "wgpu us", "of copy", "target", "outcome", "CUDA us",
            "of its copy", "wgpu/CUDA"]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    outcomes = []
    for op in FULL:
        for key in sorted((key for key in rows if key[:2] == ("wgpu", op)), key=lambda key: (key[2], key[4], key[3])):
            _, _, dtype, count, cols = key
            row, cuda = rows[key], rows.get(("cuda", *key[1:]))
            aim, outcome = target(op, dtype, count, cols, row)
            outcomes.append(outcome)
            of_cuda = [f"{cuda['us']:.1f}", f"{100 * cuda['of_copy']:.1f} %", f"{cuda['us'] / row['us']:.2f}"]
            cells = [f"{FULL[op]} {count}x{cols} {dtype}", f"{row['copy_gbs']:.0f}", f"{row['us']:.1f}",
                     f"{100 * row['of_copy']:.1f} %", aim, outcome, *(of_cuda if cuda else ["-"] * 3)]
            print("| " + " | ".join(cells) + " |")
    with_target = [outcome for outcome in outcomes if outcome != "-"]
    print(f"\n{with_target.count('met')} of {len(with_target)} targets met")


if __name__ == "__main__":
    main(sys.argv[1:])
