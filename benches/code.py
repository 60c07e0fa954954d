#!/usr/bin/env python3
"""Compares the compiled code of the tuned CUDA programs of two trees: code.py OLD NEW, two files `rmsnorm-cuda/tests/code.txt`.
A program is longer if it has more bytes of code, more registers, or spills more bytes. Exit status 1 if one is."""

import sys
from collections import Counter


def read(path):
    """What is listed of each program, by its name: bytes of code, registers, bytes spilled, hash."""
    with open(path) as file:
        head, *lines = file.read().splitlines()
    programs = dict(line.split(": ") for line in lines)
    return head, {name: (*map(int, facts.split()[:3]), facts.split()[3]) for name, facts in programs.items()}


def verdict(old, new):
    if old == new:
        return "equal"
    if any(is_now > was for is_now, was in zip(new[:3], old[:3])):
        return "longer"
    return "same length" if old[:3] == new[:3] else "shorter"


def main(old_path, new_path):
    (old_head, old), (new_head, new) = read(old_path), read(new_path)
    if old_head != new_head:
        sys.exit(f"two compilers or formats: {old_head!r}, {new_head!r}")
    verdicts = {name: verdict(old[name], new[name]) for name in sorted(old.keys() & new.keys())}
    kinds = ["equal", "same length", "shorter", "longer"]
    counts = Counter((name.split()[0], kind) for name, kind in verdicts.items())
    print("| program | " + " | ".join(kinds) + " |\n|---|" + "---:|" * len(kinds))
    for stem in [*sorted({name.split()[0] for name in verdicts}), "all"]:
        numbers = [counts[stem, kind] if stem != "all" else sum(kind == other for other in verdicts.values()) for kind in kinds]
        print(f"| {stem} | " + " | ".join(map(str, numbers)) + " |")
    print(f"\nonly in {old_path}: {len(old.keys() - new.keys())}; only in {new_path}: {len(new.keys() - old.keys())}")
    for name in verdicts:
        if verdicts[name] == "longer":
            numbers = ", ".join(f"{was} -> {is_now}" for was, is_now in zip(old[name][:3], new[name][:3]))
            print(f"longer: {name}: bytes of code, registers, bytes spilled: {numbers}")
    return any(kind == "longer" for kind in verdicts.values())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
