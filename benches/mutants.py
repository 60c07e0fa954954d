"""Plants one-line bugs in the sources, one at a time, and runs the tests that should catch them.

    python3 benches/mutants.py --check                    checks that every bug's text occurs exactly once, also those of kernels
    python3 benches/mutants.py [--out results.json]       every bug: hours on two cores
    python3 benches/mutants.py --sample 14 --quick        a fixed sample of every crate, with each crate's first tests

The bugs are data: benches/mutants/rust.toml. Each is tried in a copy of the tree; the checkout does
not change. Builds are kept in target/mutants. A bug ends as `caught` (a test failed or hung),
`survived`, or `unbuildable` (counts as neither). The bug's crate is tested first, then the crates
that depend on it. At the end the tests that failed are run without a bug, and must pass. Exit code
1: a bug survived, did not build, or was not tried.
"""

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "benches/mutants/rust.toml"
sys.path.append(str(LIST.parent))
import patch  # noqa: E402

# (folder, arguments of the test runs for its files). The runs follow each other until one fails.
TESTS = [
    ("rmsnorm-spec/", [["-p", "rmsnorm-spec", "-p", "rmsnorm-conformance"], ["-p", "rmsnorm-cpu"]]),
    ("rmsnorm-conformance/", [["-p", "rmsnorm-conformance"], ["-p", "rmsnorm-cpu"]]),
    ("rmsnorm-tuning/", [["-p", "rmsnorm-tuning"], ["-p", "rmsnorm-gpu"]]),
    ("rmsnorm-gpu/", [["-p", "rmsnorm-gpu"], ["-p", "rmsnorm-cuda", "--lib"], ["-p", "rmsnorm-wgpu", "--lib"]]),
    ("rmsnorm-cpu/", [["-p", "rmsnorm-cpu"]]),
    ("rmsnorm-core/", [["-p", "rmsnorm-core"], ["-p", "rmsnorm-cli"]]),
    ("benches/", [["-p", "rmsnorm-bench", "--lib"], ["-p", "rmsnorm-cli"]]),
    ("rmsnorm-cli/", [["-p", "rmsnorm-cli"]]),
    # These need NVRTC and a software adapter; without them tests are skipped, and bugs survive. The
    # first run takes seconds.
    ("rmsnorm-cuda/", [["-p", "rmsnorm-cuda", "--lib", "--", "--skip", "programs"], ["-p", "rmsnorm-cuda"]]),
    ("rmsnorm-wgpu/", [["-p", "rmsnorm-wgpu", "--lib"], ["-p", "rmsnorm-wgpu", "--test", "gpu"], ["-p", "rmsnorm-wgpu"]]),
]

# A test run that takes longer counts as hanging.
LIMIT_S = 400


def tests_of(path):
    return next(tests for folder, tests in TESTS if path.startswith(folder))


def cargos(args):
    """cargo's arguments, before `--`; the rest is for the tests."""
    return list(itertools.takewhile("--".__ne__, args))


def load(path):
    bugs = tomllib.loads(path.read_text())["bug"]
    ids = [bug["id"] for bug in bugs]
    assert len(ids) == len(set(ids)), "two bugs have one id"
    return bugs


def misplaced(bug, tree):
    """The reason why a bug cannot be planted in the tree, or None."""
    text = (tree / bug["file"]).read_text()
    count = text.count(bug["find"])
    if count != 1:
        return f"{bug['id']}: its text occurs {count} times in {bug['file']}"
    return None if bug["find"] != bug["replace"] else f"{bug['id']}: changes nothing"


class Worker:
    """A copy of the tree with a separate target folder."""

    def __init__(self, number, runs=None):
        self.runs = runs
        self.tree = ROOT / f"target/mutants/tree-{number}"
        target = ROOT / f"target/mutants/target-{number}"
        self.env = os.environ | {
            "CARGO_TARGET_DIR": str(target),
            "CARGO_INCREMENTAL": "1",
            "CARGO_PROFILE_DEV_DEBUG": "0",
            "RUST_BACKTRACE": "0",
            # Without a display server Mesa's device selection layer prints errors.
            "NODEVICE_SELECT": "1",
        }
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True, text=True,
        ).stdout.split("\0")
        for name in filter(None, listed):
            source, copy = ROOT / name, self.tree / name
            if not source.is_file() and not source.is_symlink():
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                if not copy.is_symlink():
                    copy.symlink_to(os.readlink(source))
            elif not copy.exists() or copy.read_bytes() != source.read_bytes():
                shutil.copy(source, copy)

    def cargo(self, *args):
        """(exit code, or None after the time limit; output) of `cargo test`. All its processes are
        ended."""
        process = subprocess.Popen(
            ["cargo", "test", "--quiet", *args], cwd=self.tree, env=self.env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""

    def outcome(self, tests):
        """(outcome, names of the tests that failed)"""
        for args in tests[:self.runs]:
            if self.cargo(*cargos(args), "--no-run")[0] != 0:
                return "unbuildable", []
            code, output = self.cargo(*args)
            if code is None:
                return "caught", ["(no end)"]
            if code:
                failed = re.findall(r"^(\S+) --- FAILED|^test (\S+) \.\.\. FAILED|^    (\S+)$", output, re.M)
                return "caught", sorted({name for names in failed for name in names if name})[:8]
        return "survived", []

    def failing(self, tests, names):
        """The tests, of these names, that fail without a bug."""
        names = {name for name in names if name != "(no end)"}
        failed = set()
        for args in tests[:self.runs] if names else []:
            code, output = self.cargo(*cargos(args), "--no-fail-fast", "--", "--exact", *sorted(names))
            if code != 0:
                # If a build fails or a process ends early, the output names no test.
                failed |= {name for name in names if name in output} or names
        return sorted(failed)

    def run(self, bug):
        file, start = self.tree / bug["file"], time.monotonic()
        right = file.read_text()
        try:
            file.write_text(right.replace(bug["find"], bug["replace"]))
            outcome, failed = self.outcome(tests_of(bug["file"]))
        finally:
            file.write_text(right)
        if bug.get("equivalent") and outcome == "survived":
            outcome = "equivalent"
        return {"id": bug["id"], "class": bug["class"], "file": bug["file"], "outcome": outcome,
                "tests": failed, "seconds": round(time.monotonic() - start, 1)}


def summary(results):
    """A table with a line per crate."""
    by_crate = {}
    for result in results:
        by_crate.setdefault(crate_of(result), []).append(result["outcome"])
    kinds = ["caught", "survived", "equivalent", "unbuildable"]
    lines = [f"{'crate':<8}{'tried':>7}" + "".join(f"{kind:>13}" for kind in kinds)]
    for crate, outcomes in sorted(by_crate.items()) + [("all", [r["outcome"] for r in results])]:
        lines.append(f"{crate:<8}{len(outcomes):>7}" + "".join(f"{outcomes.count(kind):>13}" for kind in kinds))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only check that every bug's text occurs exactly once")
    parser.add_argument("--sample", type=int, help="number of bugs of a fixed sample")
    parser.add_argument("--ids", nargs="+", help="these bugs")
    parser.add_argument("--crate", help="bugs whose id begins with this word")
    parser.add_argument("--quick", action="store_true", help="only the first test run of a crate, which takes seconds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new bug after this time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first copy, to run next to another process")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()

    bugs = load(LIST)
    wrong = list(filter(None, (misplaced(bug, ROOT) for bug in bugs)))
    if wrong:
        sys.exit("\n".join(wrong))
    if args.check:
        print(f"{len(bugs)} bugs find their place")
        sys.exit(any([patch.check(None, LIST.with_name(f"{language}.toml"), ROOT) for language in ("cuda", "wgsl")]))
    if args.crate:
        bugs = [bug for bug in bugs if bug["id"].startswith(args.crate + "-")]
    if args.ids:
        bugs = [bug for bug in bugs if bug["id"] in args.ids]
    if args.sample:
        # Sorted by a hash of the id, so that a new bug hardly changes the sample; crates take
        # turns.
        bugs = [bug for bug in bugs if not bug.get("needs_gpu")]
        bugs.sort(key=lambda bug: (crate_of(bug), hashlib.sha256(bug["id"].encode()).digest()))
        turns = itertools.zip_longest(*(list(group) for _, group in itertools.groupby(bugs, crate_of)))
        bugs = sorted(list(filter(None, itertools.chain(*turns)))[:args.sample], key=crate_of)

    workers = queue.SimpleQueue()
    for number in range(args.first, args.first + args.jobs):
        workers.put(Worker(number, 1 if args.quick else None))
    start, results = time.monotonic(), []

    def attempt(bug):
        if time.monotonic() - start > args.seconds:
            return None
        worker = workers.get()
        try:
            return worker.run(bug)
        finally:
            workers.put(worker)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(attempt, bug) for bug in bugs]):
            if result := future.result():
                results.append(result)
                print(f"{result['outcome']:<12}{result['id']:<48}{result['seconds']:>6} s  {', '.join(result['tests'][:2])}", flush=True)
                if args.out:
                    args.out.write_text(json.dumps(results, indent=1))
    # Without a bug these tests must pass, or the result proves nothing.
    worker, by_tests = workers.get(), {}
    for result in results:
        by_tests.setdefault(json.dumps(tests_of(result["file"])), set()).update(result["tests"])
    broken = [name for tests, names in by_tests.items() for name in worker.failing(json.loads(tests), names)]
    print(f"\n{summary(results)}")
    if broken:
        sys.exit(f"these tests fail without a bug: {broken}")
    if any(result["outcome"] in ("survived", "unbuildable") for result in results) or len(results) < len(bugs):
        sys.exit(f"{len(results)} of {len(bugs)} were tried, and not all of them caught")


def crate_of(bug):
    return bug["id"].split("-")[0]


main()
