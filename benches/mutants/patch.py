#!/usr/bin/env python3
"""Plants a bug of a list in the kernel texts that are embedded in a binary of rmsnorm.

    patch.py BINARY LIST.toml ID OUT     writes a copy of the binary with the bug
    patch.py --check BINARY LIST.toml    checks every bug of the list
    patch.py --apply ROOT LIST.toml ID   plants the bug in the source file below ROOT (a copy of the repository)

Python 3.11 or later, standard library only.
"""
import mmap
import os
import shutil
import sys
import tomllib
from pathlib import Path

FIELDS = {"id", "class", "file", "find", "replace", "why"}
OPTIONAL = {"order", "equivalent", "expect", "cases"}


def load(path):
    """The bugs of a list."""
    bugs = tomllib.loads(Path(path).read_text(encoding="utf-8"))["bug"]
    for index, bug in enumerate(bugs):
        lacks, more = FIELDS - bug.keys(), bug.keys() - FIELDS - OPTIONAL
        if lacks or more:
            sys.exit(f"{path}: bug {index} ({bug.get('id')}): lacks {sorted(lacks)}, has unknown {sorted(more)}")
    ids = [bug["id"] for bug in bugs]
    for name in {name for name in ids if ids.count(name) > 1}:
        sys.exit(f"{path}: the id {name} occurs twice")
    return bugs


def bug_of(bugs, name):
    found = [bug for bug in bugs if bug["id"] == name]
    if not found:
        sys.exit(f"no bug {name}")
    return found[0]


def padded(bug):
    """(text to find, replacement of the same length)."""
    find, replace = bug["find"].encode(), bug["replace"].encode()
    if len(replace) > len(find):
        raise ValueError(f"replace is {len(replace) - len(find)} bytes too long")
    if find == replace.ljust(len(find)):
        raise ValueError("nothing changes")
    return find, replace.ljust(len(find))


def place(data, find):
    """The offset of the text, which must occur once."""
    at = data.find(find)
    if at < 0:
        raise ValueError("the binary does not have the text")
    if data.find(find, at + 1) >= 0:
        raise ValueError("the binary has the text more than once")
    return at


def patch(binary, bug, out):
    """Writes a copy of the binary with a bug."""
    find, replace = padded(bug)
    shutil.copyfile(binary, out)
    with open(out, "r+b") as file:
        with mmap.mmap(file.fileno(), 0) as data:
            at = place(data, find)
            data[at:at + len(find)] = replace
    os.chmod(out, 0o755)


def sources(bug, root):
    """{path: text} of the files in the bug's folder; WGSL is in two folders."""
    wgsl = ["shaders", "rmsnorm-wgpu/src/source"]
    folder = str(Path(bug["file"]).parent)
    files = [path for each in (wgsl if folder in wgsl else [folder]) for path in sorted((Path(root) / each).iterdir())]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}


def check(binary, path, root):
    """The number of bugs of a list that do not find their place in the sources, and in the binary if there is one."""
    bugs = load(path)
    data = Path(binary).read_bytes() if binary else None
    bad = 0
    for bug in bugs:
        try:
            find, _ = padded(bug)
            texts = sources(bug, root)
            if bug["file"] not in texts:
                raise ValueError(f"no file {bug['file']}")
            if texts[bug["file"]].count(find) != 1:
                raise ValueError(f"{texts[bug['file']].count(find)} times in {bug['file']}")
            others = [name for name, text in texts.items() if name != bug["file"] and find in text]
            if others:
                raise ValueError(f"also in {others}")
            if data is not None:
                place(data, find)
        except ValueError as error:
            bad += 1
            print(f"{bug['id']}: {error}")
    classes = {}
    for bug in bugs:
        classes[bug["class"]] = classes.get(bug["class"], 0) + 1
    print(f"{path}: {len(bugs)} bugs, {bad} bad;", ", ".join(f"{n} {name}" for name, n in sorted(classes.items())))
    print(f"  order {sum('order' in b for b in bugs)}, equivalent {sum('equivalent' in b for b in bugs)}, expected to survive {sum('expect' in b for b in bugs)}")
    return bad


def main(args):
    if len(args) in (3, 4) and args[0] == "--check":
        # The repository, to check that no other file has the text.
        root = args[3] if len(args) == 4 else Path(__file__).resolve().parents[2]
        sys.exit(check(args[1], args[2], root) and 1)
    if len(args) == 4 and args[0] == "--apply":
        bug = bug_of(load(args[2]), args[3])
        find, replace = padded(bug)
        path = Path(args[1]) / bug["file"]
        text = path.read_bytes()
        if text.count(find) != 1:
            sys.exit(f"{bug['id']}: {text.count(find)} times in {path}")
        path.write_bytes(text.replace(find, replace))
        return
    if len(args) != 4:
        sys.exit(__doc__)
    binary, path, name, out = args
    try:
        patch(binary, bug_of(load(path), name), out)
    except ValueError as error:
        sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
