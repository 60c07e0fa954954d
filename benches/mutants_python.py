"""Plants the one-line bugs of cosmic-ray's operators in the Python package, one at a time, and runs
the tests that should catch them.

    pip install cosmic-ray
    python benches/mutants_python.py rmsnorm/arrays.py --tests "test_arrays.py test_package.py" [--out results.json]
    python benches/mutants_python.py rmsnorm/torch/*.py --preload torch --sample 100 --tests test_torch_operators.py

Each bug is tried in a copy of the package, in a fork of a process that has already imported the
frameworks, to save the time of `import torch`. It ends as `caught` (a test failed or hung),
`unloadable` (the package could not be imported, which proves nothing about the tests), or
`survived`. Exit code 1: a bug survived, or the tests fail without one.
"""

import argparse
import ast
import collections
import importlib
import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Removing a cache decorator, or one for type checkers, changes nothing that a test could see.
SKIPPED = ("core/RemoveDecorator",)
# The largest number of an operator's replacements (one comparison by each other one, say) that are
# tried at a place.
MOST_AT_A_PLACE = 2


def places(code):
    """(operator's name, its occurrence, line) of each bug of a file, in a fixed order."""
    import parso
    from cosmic_ray.ast import get_ast
    from cosmic_ray.operators.provider import OperatorProvider
    from cosmic_ray.plugins import get_operator

    nodes, stack = [], [get_ast(code)]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += reversed(node.children) if isinstance(node, parso.tree.BaseNode) else []
    typed = list(annotated(code))
    found = collections.defaultdict(list)
    for name in sorted(OperatorProvider()):
        if f"core/{name}" in SKIPPED or get_operator(f"core/{name}").arguments():
            continue
        operator, occurrence = get_operator(f"core/{name}")(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                if not any(first <= start <= last for first, last in typed):
                    found[name.partition("_")[0], start].append((name, occurrence, start[0]))
                occurrence += 1
    for options in found.values():
        random.Random(len(options)).shuffle(options)
        yield from options[:MOST_AT_A_PLACE]


def annotated(code):
    """The positions of annotations and overloads, which have no effect at run time."""
    for node in ast.walk(ast.parse(code)):
        if any(getattr(decorator, "id", None) == "overload" for decorator in getattr(node, "decorator_list", [])):
            yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if note is not None:
                yield (note.lineno, note.col_offset), (note.end_lineno, note.end_col_offset)


def lost(code):
    """[(`Lost`, number, line)] of the bugs that replace an argument of a call by None, and the
    arguments."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    values = [value for call in calls for value in [*call.args, *(keyword.value for keyword in call.keywords)]]
    values = [value for value in values if isinstance(value, (ast.Name, ast.Attribute))]
    return [("Lost", number, value.lineno) for number, value in enumerate(values)], values


def mutated(code, name, occurrence):
    """The file's text with this bug."""
    if name == "Lost":
        value, lines = lost(code)[1][occurrence], code.splitlines(keepends=True)
        line = lines[value.lineno - 1].encode()
        lines[value.lineno - 1] = (line[: value.col_offset] + b"None" + line[value.end_col_offset :]).decode()
        return "".join(lines)
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(code, get_operator(f"core/{name}")(), occurrence)


def run(folder, tests, module, limit):
    """Runs the tests in a forked process. Returns `passed`, `caught` or `unloadable`."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "python"), os.environ.get("PYTHONPATH")]))
        sys.path.insert(0, str(folder / "python"))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        code = 3
        try:
            os.chdir(folder / "tests")
            importlib.import_module(module)
            import pytest

            code = 0 if pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]) == 0 else 1
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return {0: "passed", 3: "unloadable"}.get(os.waitstatus_to_exitcode(status), "caught")
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "caught"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="below rmsnorm-python/python")
    parser.add_argument("--tests", type=shlex.split, required=True, help="pytest's arguments, below rmsnorm-python/tests")
    parser.add_argument("--preload", nargs="*", default=[], help="modules to import once, before the forks")
    parser.add_argument("--sample", type=int, help="number of bugs of a fixed sample")
    parser.add_argument("--again", type=pathlib.Path, help="results of an earlier run: only its survivors are tried")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts, so that N processes share the work")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a run counts as hanging")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    for name in ["numpy", "pytest", *options.preload]:
        importlib.import_module(name)
    results = []
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work) / "rmsnorm-python"
        shutil.copytree(ROOT / "rmsnorm-python", folder, ignore=shutil.ignore_patterns("__pycache__", "src"))
        # The tests' error bounds.
        golden = "rmsnorm-conformance/tests/golden"
        shutil.copytree(ROOT / golden, pathlib.Path(work) / golden)
        modules = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in options.files}
        for file, module in modules.items():
            if run(folder, options.tests, module, options.limit) != "passed":
                sys.exit(f"the tests fail without a bug in {file}")
        codes = {file: (folder / "python" / file).read_text() for file in options.files}
        found = [(file, *place) for file, code in codes.items() for place in [*places(code), *lost(code)[0]]]
        if options.sample is not None:
            random.Random(0).shuffle(found)
            found = found[: options.sample]
        again = json.loads(options.again.read_text()) if options.again else []
        again = [{key: value for key, value in result.items() if key != "line"} for result in again if result["end"] == "survived"]
        part, parts = map(int, options.part.split("/"))
        for file, operator, occurrence, line in found[part - 1 :: parts]:
            path, code = folder / "python" / file, codes[file]
            changed = mutated(code, operator, occurrence)
            before, after = (text.splitlines()[line - 1].strip() for text in (code, changed))
            result = dict(file=file, operator=operator, before=before, after=after, end="survived")
            if options.again and result not in again:
                continue
            path.write_text(changed)
            end = run(folder, options.tests, modules[file], options.limit).replace("passed", "survived")
            path.write_text(code)
            results.append(dict(result, line=line, end=end))
            if end == "survived":
                print(f"survived {file}:{line} {operator}\n    - {before}\n    + {after}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
    counts = collections.Counter((result["file"], result["end"]) for result in results)
    for (file, end), count in sorted(counts.items()):
        print(f"{file}: {count} {end}")
    return any(result["end"] == "survived" for result in results)


if __name__ == "__main__":
    sys.exit(main())
