#!/usr/bin/env python3
"""Plants the bugs of a list, one after the other, and reports which of them a run of the binary
catches.

    drive.py BINARY LIST.toml [options] --out results.json -- ARGS...

ARGS are the binary's arguments, such as `conformance --backend cuda --profile core`. {id} in them
is the bug's id, {dir} its temporary folder. Options:

    --jobs N         bugs that run at once (1)
    --seconds S      start no new bug after this time; running bugs may end (no limit)
    --each S         time limit of a bug in seconds (600)
    --out FILE       the results, rewritten after each bug; bugs that are already in FILE are not run again
    --only REGEX     only bugs with a matching id, class or file
    --skip REGEX     no bugs with a matching id, class or file
    --sort KEY       list (the order of the list), likely (bugs that may survive, or that change an order, last), spread
                     (the files and classes in turn: for lists that will not be finished)
    --cache PATH     RMSNORM_CACHE_DIR: own (default: an empty folder for each bug), off, or one folder for all. One folder
                     is safe: entries are named by a hash of their text
    --ids FILE       ids of cases, one per line, as `conformance --list` prints them. A bug with a regex `cases` is then
                     run only on --pick N (60) of the matching cases, spread over the list
    --baseline       first runs the binary without a bug; it must pass

The verdict of a bug, from the exit code: caught (1, or 101 from a test), survived (0), nothing (1,
but all cases were skipped), timeout, crash (a signal; counts as caught), broken (2, or the text
does not compile: not a valid bug), bad (the bug could not be planted).

Python 3.11 or later, standard library only.
"""
import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import patch

# A file that is open for writing during another thread's fork stays open in the child, and cannot
# be executed until then.
SPAWN = threading.Lock()

# The compilers' messages for invalid text.
NO_PROGRAM = re.compile(
    r"does not compile|[Ss]hader validation|[Ss]hader '|parsing error|create_shader_module|nvrtcCompileProgram gives"
)
FAILED = re.compile(r"^\s*(FAILED\b|test .* FAILED|thread '.*' panicked|.*\bFAILED$)")
SUMMARY = re.compile(r"(\d+) passed[,;] (\d+) failed")


def environment(cache, folder):
    env = dict(os.environ)
    if cache == "own":
        path = Path(folder, "cache")
        path.mkdir()
        env["RMSNORM_CACHE_DIR"] = str(path)
    else:
        env["RMSNORM_CACHE_DIR"] = "" if cache == "off" else cache
    return env


def stop(process):
    """Ends a process and its children. The process must have its own session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def lines_of(path, most):
    """The first failures in a run's output, each with the next line."""
    lines = path.read_text(errors="replace").splitlines()
    found = [index for index, line in enumerate(lines) if FAILED.match(line)][:most]
    return [" | ".join(line.strip()[:400] for line in lines[index:index + 2]) for index in found]


def run(binary, folder, args, options, name):
    """Runs a binary and returns its result."""
    out, err = Path(folder, "stdout"), Path(folder, "stderr")
    args = [arg.replace("{id}", name).replace("{dir}", folder) for arg in args]
    began = time.monotonic()
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        env = environment(options.cache, folder)
        with SPAWN:
            process = subprocess.Popen(
                [binary, *args], stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True, env=env
            )
        try:
            code = process.wait(options.each)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process)
            process.wait()
    result = {"exit": code, "seconds": round(time.monotonic() - began, 1), "failures": lines_of(out, 3)}
    text = out.read_text(errors="replace")
    counts = SUMMARY.findall(text)
    if counts:
        result["passed"], result["failed"] = (int(count) for count in counts[-1])
    said = [line.strip() for line in err.read_text(errors="replace").splitlines() if line.strip()]
    no_program = NO_PROGRAM.search(text) or NO_PROGRAM.search("\n".join(said))
    result["verdict"] = (
        "timeout" if code is None
        else "survived" if code == 0
        else "broken" if no_program or code not in (1, 101) and code > 0
        else "crash" if code < 0
        # No case failed, but none passed, or too few ran for the profile.
        else "nothing" if counts and result["failed"] == 0
        else "caught"
    )
    if result["verdict"] in ("broken", "crash"):
        around = text[max(0, no_program.start() - 200):no_program.end() + 600] if NO_PROGRAM.search(text) else ""
        result["said"] = (around or (said[-1] if said else ""))[-800:]
    return result


class Results:
    """The results so far, which are always on disk."""

    def __init__(self, path):
        self.path, self.lock, self.bugs = Path(path), threading.Lock(), {}
        if self.path.exists():
            bugs = json.loads(self.path.read_text())["bugs"]
            self.bugs = {name: result for name, result in bugs.items() if result["verdict"] != "bad"}

    def add(self, name, result, head):
        with self.lock:
            self.bugs[name] = result
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps({**head, "bugs": self.bugs}, indent=1) + "\n")
            os.replace(part, self.path)
            first = result["failures"][0] if result["failures"] else result.get("said", "")
            mark = " (order)" if result.get("order") else ""
            print(f"{result['verdict']:<9}{result['seconds']:>7.1f} s  {name}{mark}  {first[:140]}", flush=True)


def sorted_bugs(bugs, key):
    if key == "likely":
        return sorted(bugs, key=lambda bug: 2 * ("expect" in bug or "equivalent" in bug) + bug.get("order", False))
    if key == "spread":
        seen = {}
        def turn(bug):
            kind = (bug["file"], bug["class"])
            seen[kind] = seen.get(kind, 0) + 1
            return seen[kind]
        return [bug for _, _, bug in sorted((turn(bug), index, bug) for index, bug in enumerate(bugs))]
    return bugs


def table(bugs, results):
    """Prints the verdicts by class, and the bugs that were not caught."""
    verdicts = ["caught", "timeout", "crash", "survived", "nothing", "broken", "bad"]
    print(f"\n{'class':<14}" + "".join(f"{verdict:>10}" for verdict in verdicts) + f"{'not run':>10}")
    for name in sorted({bug["class"] for bug in bugs}) + ["all"]:
        of_class = [bug for bug in bugs if name in ("all", bug["class"])]
        got = [results.bugs.get(bug["id"], {}).get("verdict") for bug in of_class]
        print(f"{name:<14}" + "".join(f"{got.count(verdict):>10}" for verdict in verdicts) + f"{got.count(None):>10}")
    for verdict in ("survived", "timeout", "nothing", "crash", "broken", "bad"):
        of_verdict = [bug for bug in bugs if results.bugs.get(bug["id"], {}).get("verdict") == verdict]
        if of_verdict:
            print(f"\n{verdict}:")
        for bug in of_verdict:
            why = " ".join(
                f"[{key}: {bug[key]}]" if bug[key] is not True else f"[{key}]"
                for key in ("equivalent", "expect", "order") if key in bug
            )
            print(f"  {bug['id']}  {bug['file']}: {bug['why']} {why}")
    caught = [bug for bug in bugs if "expect" in bug and results.bugs.get(bug["id"], {}).get("verdict") == "caught"]
    if caught:
        print("\ncaught against expectation: " + ", ".join(bug["id"] for bug in caught))


def main():
    argv = sys.argv[1:]
    if "--" not in argv:
        sys.exit(__doc__)
    split = argv.index("--")
    own, args = argv[:split], argv[split + 1:]
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("binary")
    parser.add_argument("list")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--each", type=float, default=600)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only")
    parser.add_argument("--skip")
    parser.add_argument("--sort", choices=["list", "likely", "spread"], default="list")
    parser.add_argument("--cache", default="own")
    parser.add_argument("--ids")
    parser.add_argument("--pick", type=int, default=60)
    parser.add_argument("--baseline", action="store_true")
    options = parser.parse_args(own)

    began = time.monotonic()
    binary = os.path.abspath(options.binary)
    chosen = []
    for bug in patch.load(options.list):
        text = f"{bug['id']} {bug['class']} {bug['file']}"
        if (not options.only or re.search(options.only, text)) and not (options.skip and re.search(options.skip, text)):
            chosen.append(bug)
    ids = Path(options.ids).read_text().split() if options.ids else []
    results = Results(options.out)

    def named(bug):
        """The cases that reach a bug, as arguments."""
        matching = [id for id in ids if "cases" in bug and re.search(bug["cases"], id)]
        picked = matching[::max(1, -(-len(matching) // options.pick))]
        return [word for id in picked for word in ("--case", id)]

    head = {"binary": binary, "list": options.list, "args": args}

    if options.baseline:
        with tempfile.TemporaryDirectory(prefix="bug-") as folder:
            result = run(binary, folder, args, options, "baseline")
            print(f"baseline {result['verdict']} in {result['seconds']} s", *result["failures"], flush=True)
            if result["verdict"] != "survived":
                sys.exit(f"without a bug: {result}")

    def one(bug):
        if time.monotonic() - began > options.seconds:
            return
        about = {key: bug[key] for key in ("class", "file", "why", "order", "equivalent", "expect") if key in bug}
        with tempfile.TemporaryDirectory(prefix="bug-") as folder:
            patched = os.path.join(folder, "patched")
            try:
                with SPAWN:
                    patch.patch(binary, bug, patched)
                cases = named(bug)
                result = run(patched, folder, args + cases, options, bug["id"])
                if cases:
                    result["cases"] = len(cases) // 2
            except (OSError, ValueError) as error:
                result = {"exit": None, "seconds": 0.0, "failures": [], "verdict": "bad", "said": str(error)}
        results.add(bug["id"], {**result, **about}, head)

    todo = [bug for bug in sorted_bugs(chosen, options.sort) if bug["id"] not in results.bugs]
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            list(pool.map(one, todo))
        except KeyboardInterrupt:
            options.seconds = 0
            raise
    table(chosen, results)


if __name__ == "__main__":
    main()
