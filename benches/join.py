"""Joins reports of `rmsnorm bench --json` of one machine into one.

usage: python -B join.py OUT.json FILE.json..

Rows of the same backend and device come under one report, by operation, length and number of rows. Machines must agree
but for their devices, which are collected.
"""
import json
import sys

OPS = ["forward", "add_forward", "backward"]


def main(out, paths):
    if not paths:
        sys.exit("join.py: no files to join")
    joined = None
    for path in paths:
        document = json.load(open(path))
        if joined is None:
            joined = document
            continue
        mine, other = joined["machine"], document["machine"]
        if {**mine, "devices": None} != {**other, "devices": None}:
            sys.exit(f"join.py: {path} is of another machine: {other}")
        mine["devices"] += [device for device in other["devices"] if device not in mine["devices"]]
        for report in document["reports"]:
            add(joined["reports"], report)
    for report in joined["reports"]:
        report["rows"].sort(key=lambda row: (row["norm"], OPS.index(row["op"]), row["dtype"], row["cols"], row["rows"]))
    json.dump(joined, open(out, "w"), indent=1)


def add(reports, report):
    for known in reports:
        if all(known.get(field) == report.get(field) for field in ("backend", "device", "caps")):
            known["rows"] += report["rows"]
            for told in ("unsupported", "skipped"):
                known[told] += [line for line in report[told] if line not in known[told]]
            return
    reports.append(report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
