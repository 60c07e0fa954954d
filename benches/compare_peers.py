"""Puts `rmsnorm bench --json` and the CPU peers' result lines into one table.

usage: python compare_peers.py OURS.json PEERS.jsonl > TABLE.md

The peers are timed by the scripts of ../shared/peers/cpu on the same machine, in the same session, with the same number
of threads. Both count the fewest bytes that an operation must move, so the rates compare. `copy` is the one that ours
alternated with; the peers' own copy lines are shown where their file has them.
"""
import collections
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


def our_rows(path):
    """(op, dtype, rows, cols) -> row of `rmsnorm bench`."""
    document = json.load(open(path))
    rows = [row for report in document["reports"] for row in report["rows"]]
    return {
        (OPS[row["norm"], row["op"]], row["dtype"], row["rows"], row["cols"]): row
        for row in rows
        if (row["norm"], row["op"]) in OPS
    }


def peer_rows(path):
    """(op, dtype, rows, cols) -> {library: best GB/s}, and the microseconds of the same rows."""
    rates = collections.defaultdict(dict)
    for line in open(path):
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        library = row["lib"].split(" jit")[0].replace("onnxruntime", "ort")
        key = row["op"], DTYPES.get(row["dtype"], row["dtype"]), row["M"], row["N"]
        best = rates[key].get(library)
        if best is None or row["us"] < best["us"]:
            rates[key][library] = row
    return rates


def main(ours_path, peers_path):
    ours, peers = our_rows(ours_path), peer_rows(peers_path)
    print("| op, rows x cols, dtype | ours | of copy | copy | best peer | ours / best | all peers |")
    print("|---|---|---|---|---|---|---|")
    for key, row in ours.items():
        op, dtype, rows, cols = key
        ranked = sorted(peers.get(key, {}).values(), key=lambda peer: peer["us"])
        others = ", ".join(f"{peer['lib'].split(' jit')[0]} {peer['gbs']:.1f}" for peer in ranked) or "-"
        best, ratio = "-", "-"
        if ranked:
            best, ratio = f"{ranked[0]['us']:.1f} us", f"{ranked[0]['us'] / row['us']:.2f}"
        of_copy = f"{100 * row['of_copy']:.0f} %" if row["cold"] else "from cache"
        print(f"| {op} {rows}x{cols} {dtype} | {row['us']:.2f} us, {row['gbs']:.1f} GB/s | {of_copy} "
              f"| {row['copy_gbs']:.1f} | {best} | {ratio} | {others} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
