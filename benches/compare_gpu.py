"""Puts `rmsnorm bench --backend cuda --json` and the GPU peers' results into one table, with the targets.

usage: python -B compare_gpu.py FILE.json.. > TABLE.md

The files, in any order: ours, and those of ../shared/peers/bench_peers.py, of the same machine and session (h200.sh
makes them). Rates are GB/s over the fewest bytes that an operation must move, with the data outside the caches. `copy`
is the one that ours alternated with, and behind it the peers' own. A rate with * was not taken from a graph: it holds
launch gaps, and is not compared with. A target is met or missed by ours of this run.
"""
import json
import sys

OPS = {
    ("rms_norm", "forward"): "rms_fwd",
    ("rms_norm", "backward"): "rms_bwd",
    ("rms_norm", "add_forward"): "add_rms_fwd",
    ("layer_norm", "forward"): "ln_fwd",
    ("layer_norm", "backward"): "ln_bwd",
}
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
FULL = {"rms_fwd": "RMS forward", "rms_bwd": "RMS backward", "add_rms_fwd": "add + RMS forward",
        "ln_fwd": "LN forward", "ln_bwd": "LN backward"}
PEERS = ["torch", "compile", "liger", "quack"]

# What is aimed at on an H200 in bf16, as ../shared/TARGETS.md has it: percent of the copy's rate, by shape.
OF_COPY = {
    "rms_fwd": {"1048576x128": 100, "32768x1024": 100, "32768x4096": 100, "16384x8192": 100, "8192x16384": 100,
                "4096x32768": 99, "2048x65536": 98, "1024x131072": 98, "4096x4096": 100},
    "rms_bwd": {"1048576x128": 95, "576000x384": 95, "32768x1024": 92, "32768x4096": 93, "16384x8192": 93,
                "8192x16384": 92, "4096x32768": 90, "2048x65536": 88, "1024x131072": 85},
    "ln_fwd": {"32768x1024": 98, "32768x4096": 99, "8192x16384": 98, "2048x65536": 95},
    "ln_bwd": {"32768x1024": 90, "32768x4096": 90, "8192x16384": 88, "2048x65536": 80},
    "add_rms_fwd": {"32768x1024": 100, "32768x4096": 98, "8192x16384": 98},
}
# The most microseconds of a call, where that is the target.
AT_MOST_US = {
    "rms_fwd": {"1x4096": 1.6, "8x4096": 1.6, "128x4096": 2.5, "128x8192": 3.1, "1024x4096": 5.4},
    "rms_bwd": {"4096x1024": 11, "4096x4096": 30, "4096x8192": 56},
}


def read(paths):
    """(op, dtype, shape) -> rows of ours, one for each way to reduce; and -> {peer: row}; (dtype, shape) -> copy."""
    ours, peers, copies = {}, {}, {}
    for path in paths:
        document = json.load(open(path))
        if isinstance(document, list):
            read_peers(document, peers, copies)
        else:
            read_ours(document, ours)
    return ours, peers, copies


def read_ours(document, ours):
    for report in document["reports"]:
        for row in report["rows"]:
            op = OPS.get((row["norm"], row["op"]))
            if report["backend"].startswith("cuda") and op:
                key = op, row["dtype"], f"{row['rows']}x{row['cols']}"
                ours.setdefault(key, []).append(row)


def read_peers(rows, peers, copies):
    for row in rows:
        if "error" in row:
            continue
        dtype, shape = DTYPES.get(row["dtype"], row["dtype"]), f"{row['M']}x{row['N']}"
        if row["op"] == "copy":
            copies[dtype, shape] = row["gbps"]
        else:
            peers.setdefault((row["op"], dtype, shape), {})[row["provider"]] = row


def verdict(row, key, best_us):
    """The target of this row in words, and whether it is met."""
    op, dtype, shape = key
    us, of_copy = row["us"], 100 * row["of_copy"]
    if dtype == "bf16" and shape in OF_COPY.get(op, {}):
        target = OF_COPY[op][shape]
        # As exact as the table shows it.
        missed = target - round(of_copy, 1)
        return f">= {target} % of copy", "met" if missed <= 0 else f"missed by {missed:.1f} points"
    if dtype == "bf16" and shape in AT_MOST_US.get(op, {}):
        target = AT_MOST_US[op][shape]
        missed = round(us, 2) - target
        return f"<= {target} us", "met" if missed <= 0 else f"missed by {missed:.2f} us"
    if dtype == "f32" and best_us is not None:
        return "<= best peer's us", "met" if us <= best_us else f"missed by {us - best_us:.2f} us"
    return "-", "-"


def rate(row):
    return "-" if row is None else f"{row['gbps']:.0f}" + ("" if row["mode"] == "graph" else "*")


def line(key, row, theirs, their_copy):
    op, dtype, shape = key
    compared = [peer["ms"] * 1e3 for peer in theirs.values() if peer["mode"] == "graph"]
    best_us = min(compared, default=None)
    reduction = row.get("reduction") if op.endswith("_bwd") else None
    name, (target, outcome) = FULL[op], verdict(row, key, best_us)
    if reduction not in (None, "partials"):
        # Shown beside the default, for which the targets are.
        name, target, outcome = f"{name}, {reduction}", "-", "-"
    return [
        f"{name} {shape} {dtype}",
        f"{row['copy_gbs']:.0f}" + (f" / {their_copy:.0f}" if their_copy else ""),
        *(rate(theirs.get(peer)) for peer in PEERS),
        f"{row['gbs']:.0f}" + ("" if row.get("mode", "graph") == "graph" else "*"),
        f"{100 * row['of_copy']:.1f} %",
        f"{row['us']:.2f}",
        f"{best_us:.2f}" if best_us else "-",
        f"{best_us / row['us']:.2f}" if best_us else "-",
        target,
        outcome,
    ]


def main(paths):
    ours, peers, copies = read(paths)
    head = ["op, rows x cols, dtype", "copy, ours / peers'", *PEERS, "ours", "of copy", "ours us", "best peer us",
            "faster than best", "target", "outcome"]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    outcomes = []
    for key, rows in ours.items():
        for row in rows:
            cells = line(key, row, peers.get(key, {}), copies.get(key[1:]))
            outcomes.append(cells[-1])
            print("| " + " | ".join(cells) + " |")
    for op, dtype, shape in sorted(peers.keys() - ours.keys()):
        print(f"not measured: ours, {FULL[op]} {shape} {dtype}", file=sys.stderr)
    with_target = [outcome for outcome in outcomes if outcome != "-"]
    print(f"\n{with_target.count('met')} of {len(with_target)} targets met")


if __name__ == "__main__":
    main(sys.argv[1:])
