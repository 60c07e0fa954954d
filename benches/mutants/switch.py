#!/usr/bin/env python3
"""Builds all mutants that `cargo mutants` makes of some files into one program. RMSNORM_MUTANT
selects one at run time.

    switch.py plant TREE LIST.json -p PACKAGE -f GLOB ...     rewrites the files of TREE, a clone, and writes the list
    switch.py run LIST.json --out results.json [options] -- PROGRAM ARGS...
                                                              runs the program once for each mutant of the list

Between the two, TREE is built as usual, with RUSTFLAGS="--cap-lints warn". One build has hundreds
of mutants, which can run on machines without a compiler, such as the GPU machine. Mutants that
cannot be selected at run time are in the list with the reason, `unfit`; most of them do not
compile, the others can be tried with `cargo mutants`. `plant` checks TREE until it compiles, and
removes the mutants that break it.

Options of run: --jobs N (1), --seconds S for all (no limit), --each S (100), --only REGEX of names,
--again FILE (only the survivors in that file). {mutant} in ARGS is the number. The program first
runs without a mutant, and must pass. A mutant may allocate all memory: set `ulimit -v`.

The verdict, from the exit code: survived (0), caught (any other), timeout (counts as caught, as
with cargo mutants).

Needs Python 3.11 or later, with drive.py and patch.py in the same folder; plant also needs
tree-sitter, tree-sitter-rust and `cargo mutants`.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drive import stop

FUNCTION = '''
/// The number of the selected mutant; 0 is none.
pub(crate) fn mutant_in_force() -> u32 {
    static NUMBER: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *NUMBER.get_or_init(|| std::env::var("RMSNORM_MUTANT").map_or(0, |number| number.parse().unwrap()))
}
'''
NUMBER = "crate::mutant_in_force()"
# The suffix that identifies a mutant's number in a line that does not compile.
MARK = "_u32"
MARKED = re.compile(rf"\b(\d+){MARK}\b")
COMPARISONS = {"<", ">", "<=", ">="}


class Unfit(Exception):
    """A mutant that cannot be selected at run time."""


class File:
    """A source file with its mutants, by the syntax node that they change."""

    def __init__(self, path, mutants):
        import tree_sitter
        import tree_sitter_rust

        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))
        self.path = path
        self.text = path.read_bytes()
        self.lines = self.text.decode().split("\n")
        self.tree = parser.parse(self.text)
        self.mutants = {}
        self.plain = set()
        for mutant in mutants:
            try:
                node = self.node_of(mutant)
                self.mutants.setdefault(node.id, []).append((node, mutant))
                self.strip_const(node)
            except Unfit as unfit:
                mutant["unfit"] = str(unfit)

    def point(self, place):
        line = self.lines[place["line"] - 1]
        return place["line"] - 1, len(line[: place["column"] - 1].encode())

    def node_of(self, mutant):
        first, last = self.point(mutant["span"]["start"]), self.point(mutant["span"]["end"])
        node = self.tree.root_node.descendant_for_point_range(first, last)
        match mutant["genre"]:
            case "BinaryOperator":
                node = node.parent if not node.is_named else node
                if node.type not in ("binary_expression", "compound_assignment_expr"):
                    raise Unfit(f"part of a {node.type}")
                if any("let" in child.type for child in node.children):
                    raise Unfit("part of a condition with let")
            case "UnaryOperator":
                node = node.parent if not node.is_named else node
                if node.type != "unary_expression":
                    raise Unfit(f"part of a {node.type}")
            case "FnValue":
                if "impl " in mutant["function"]["return_type"]:
                    raise Unfit("another type")
                while node.type != "function_item":
                    node = node.parent
                node = node.child_by_field_name("body")
            case "MatchArmGuard":
                while node.type != "match_pattern":
                    node = node.parent
            case "MatchArm":
                while node.type != "match_arm":
                    node = node.parent
                node = node.child_by_field_name("pattern")
            case "StructField":
                node = self.tree.root_node.descendant_for_point_range(first, first)
                while node.type not in ("field_initializer", "shorthand_field_initializer"):
                    node = node.parent
            case genre:
                raise Unfit(genre)
        return node

    def strip_const(self, node):
        """Marks the function around a node to lose its `const`: a const function cannot call
        `mutant_in_force`."""
        while node is not None and node.type not in ("function_item", "const_item", "static_item"):
            node = node.parent
        if node is None or node.type != "function_item":
            raise Unfit("part of a constant")
        modifiers = [child for child in node.children if child.type == "function_modifiers"]
        self.plain.update(modifier.id for modifier in modifiers if b"const" in modifier.text)

    def is_plain(self, node):
        """Whether a function loses its `const`. It keeps it if all its mutants have been
        removed."""
        if node.id not in self.plain:
            return False
        function = range(node.parent.start_byte, node.parent.end_byte)
        all_of_file = [entry for entries in self.mutants.values() for entry in entries]
        inside = [mutant for place, mutant in all_of_file if place.start_byte in function]
        return not inside or any("unfit" not in mutant for mutant in inside)

    def rendered(self):
        return self.render(self.tree.root_node)

    def render(self, node):
        end, parts = node.start_byte, []
        for child in node.children:
            parts += [self.text[end : child.start_byte].decode(), self.render(child)]
            end = child.end_byte
        plain = "".join(parts) + self.text[end : node.end_byte].decode()
        if self.is_plain(node):
            plain = plain.replace("const", "")
        mutants = [mutant for _, mutant in self.mutants.get(node.id, []) if "unfit" not in mutant]
        return self.switched(node, plain, mutants) if mutants else plain

    def field(self, node, name):
        return self.render(node.child_by_field_name(name))

    def switched(self, node, plain, mutants):
        arms = [(f"{mutant['number']}{MARK}", mutant["replacement"]) for mutant in mutants]
        match mutants[0]["genre"]:
            case "FnValue":
                returns = "".join(f" if {NUMBER} == {number} {{ return {value}; }}" for number, value in arms)
                return "{" + returns + plain[1:]
            case "UnaryOperator":
                operand = self.render(node.children[-1])
                return f"(if {NUMBER} == {arms[0][0]} {{ {operand} }} else {{ {plain} }})"
            case "MatchArm":
                (number, _), has_guard = arms[0], node.child_by_field_name("condition")
                if has_guard is None:
                    return f"{plain} if {NUMBER} != {number}"
                guard = self.field(node, "condition")
                return f"{plain[: -len(guard)]} {NUMBER} != {number} && ({guard})"
            case "MatchArmGuard":
                guard = self.field(node, "condition")
                by_value = {value: number for number, value in arms}
                true, false = by_value.get("true", "u32::MAX"), by_value.get("false", "0xFFFF_FFFE")
                condition = f"match {NUMBER} {{ {true} => true, {false} => false, _ => {guard} }}"
                return f"{plain[: -len(guard)]} ({condition})"
            case "StructField":
                bases = [child for child in node.parent.children if child.type == "base_field_initializer"]
                base = self.render(bases[0]).removeprefix("..")
                name = node.text.decode().split(":")[0].strip()
                value = plain.split(":", 1)[1] if node.type == "field_initializer" else name
                return f"{name}: if {NUMBER} == {arms[0][0]} {{ ({base}).{name} }} else {{ {value} }}"
        left, right = self.field(node, "left"), self.field(node, "right")
        operator = node.child_by_field_name("operator").text.decode()
        every = [*arms, ("_", operator)]
        if node.type == "compound_assignment_expr":
            choices = " ".join(f"{number} => {{ {left} {op} {right}; }}" for number, op in every)
            return f"match {NUMBER} {{ {choices} }}"
        if operator in ("==", "!="):
            return f"(({left} {operator} {right}) != ({NUMBER} == {arms[0][0]}))"
        if operator in ("&&", "||"):
            choices = ", ".join(f"{number} => {left} {op} {right}" for number, op in every)
            return f"(match {NUMBER} {{ {choices} }})"
        by = "&" if operator in COMPARISONS else ""
        choices = ", ".join(f"{number} => l {op} r" for number, op in every)
        return f"({{ let (l, r) = ({by}({left}), {by}({right})); match {NUMBER} {{ {choices} }} }})"


def plant(args):
    command = ["cargo", "mutants", "--list", "--json", "--all-features"]
    for package in args.package:
        command += ["-p", package]
    for pattern in args.file:
        command += ["-f", pattern]
    mutants = json.loads(subprocess.run(command, cwd=args.tree, check=True, capture_output=True).stdout)
    for number, mutant in enumerate(mutants, 1):
        mutant["number"] = number
    names = sorted({mutant["file"] for mutant in mutants})
    files = [File(Path(args.tree, name), [mutant for mutant in mutants if mutant["file"] == name]) for name in names]
    for package in args.package:
        library = Path(args.tree, package, "src/lib.rs")
        library.write_text(library.read_text() + FUNCTION)
    for _ in range(20):
        for file in files:
            file.path.write_text(file.rendered())
        if not take_out_what_breaks(args, mutants, files):
            break
    else:
        sys.exit(f"{args.tree} does not compile after 20 rounds")
    fields = ("number", "name", "unfit")
    listed = [{field: mutant[field] for field in fields if field in mutant} for mutant in mutants]
    Path(args.list).write_text(json.dumps(listed, indent=1))
    print(f"{sum('unfit' not in mutant for mutant in mutants)} of {len(mutants)} mutants are in {args.tree}")


def take_out_what_breaks(args, mutants, files):
    """Removes the mutants that an error names, or the `const` of functions that call a function
    without it."""
    command = ["cargo", "check", "--quiet", "--message-format=json", "--all-features"]
    for package in args.package:
        command += ["-p", package]
    env = dict(os.environ, RUSTFLAGS="--cap-lints warn")
    check = subprocess.run(command, cwd=args.tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    messages = [json.loads(line) for line in check.stdout.splitlines()]
    errors = [entry["message"] for entry in messages if entry.get("message", {}).get("level") == "error"]
    errors = [error for error in errors if error["spans"]]
    has_changed = False
    for error in errors:
        blamed = blamed_for(error, args, mutants, files)
        for mutant in blamed:
            mutant["unfit"] = f"does not compile: {error['message']}"
        has_changed = has_changed or bool(blamed) or make_plain(error, args, files)
    if errors and not has_changed:
        sys.exit("".join(error["rendered"] for error in errors) + "the tree does not compile, and no mutant is to blame")
    return bool(errors)


def blamed_for(error, args, mutants, files):
    """The mutant whose text an error points at; otherwise all mutants of the line, or all in the
    message."""
    by_number = {mutant["number"]: mutant for mutant in mutants if "unfit" not in mutant}
    in_constant = re.match(r"cannot call non-const .*`(?:.*::)?(\w+)` in (constants|statics)", error["message"])
    if in_constant:
        return [mutant for mutant in by_number.values() if name_of_function(mutant) == in_constant[1]]
    if error["code"] and error["code"]["code"] == "E0015":
        return []
    for span in error["spans"]:
        if span["is_primary"] and span["text"]:
            places = [(match.start(), int(match[1])) for match in MARKED.finditer(span["text"][0]["text"])]
            places = [place for place in places if place[1] in by_number]
            before = [number for start, number in places if start < span["column_start"]]
            if places:
                return [by_number[number] for number in before[-1:] or [number for _, number in places]]
    shown = error["rendered"]
    if error["code"] and error["code"]["code"] == "E0004":
        # This error shows only the beginning of the match.
        span = error["spans"][0]
        lines = Path(args.tree, span["file_name"]).read_text().split("\n")
        shown = "\n".join(lines[span["line_start"] :][:20])
    numbers = [int(number) for number in set(MARKED.findall(shown))]
    return [by_number[number] for number in numbers if number in by_number and by_number[number]["genre"] != "FnValue"]


def name_of_function(mutant):
    return (mutant["function"] or {"function_name": ""})["function_name"].split("::")[-1]


def make_plain(error, args, files):
    """Removes the `const` of the function around an error."""
    if not error["code"] or error["code"]["code"] != "E0015":
        return False
    span = next(span for span in error["spans"] if span["is_primary"])
    path = Path(args.tree, span["file_name"])
    file = next((file for file in files if file.path == path), None)
    if file is None:
        files.append(file := File(path, []))
    lines = file.rendered().split("\n")[: span["line_start"]]
    number = max(index for index, line in enumerate(lines) if "const fn" in line)
    name = re.search(r"const (?:unsafe )?fn (\w+)", lines[number])[1]
    nodes = [file.tree.root_node]
    for node in nodes:
        nodes += node.children
        if node.type == "function_item" and node.child_by_field_name("name").text.decode() == name:
            file.strip_const(node)
    return True


def run(args):
    listed = json.loads(Path(args.list).read_text())
    todo = [mutant for mutant in listed if "unfit" not in mutant and re.search(args.only, mutant["name"])]
    if args.again:
        before = json.loads(Path(args.again).read_text())
        survived = {entry["number"]: entry["name"] for entry in before if entry["verdict"] == "survived"}
        todo = [mutant for mutant in todo if mutant["number"] in survived]
        if any(survived[mutant["number"]] != mutant["name"] for mutant in todo):
            sys.exit(f"{args.again} is of another list")
    if not todo:
        sys.exit("no mutant is to be tried")
    verdict, words = outcome(args, 0)
    if verdict != "survived":
        sys.exit(f"fails without a mutant: {words}")
    begin, results = time.monotonic(), []

    def one(mutant):
        if time.monotonic() - begin > args.seconds:
            return {**mutant, "verdict": "not run"}
        verdict, words = outcome(args, mutant["number"])
        return {**mutant, "verdict": verdict, "by": words}

    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(one, todo):
            results.append(result)
            if result["verdict"] in ("survived", "not run"):
                print(result["verdict"], result["number"], result["name"], flush=True)
            Path(args.out).write_text(json.dumps(results, indent=1))
    verdicts = [result["verdict"] for result in results]
    counts = {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
    print(f"{len(results)} mutants in {time.monotonic() - begin:.0f} s: {counts}")


def outcome(args, number):
    env = dict(os.environ, RMSNORM_MUTANT=str(number))
    command = [word.replace("{mutant}", str(number)) for word in args.command]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=env, text=True, errors="replace", start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=args.each)
    except subprocess.TimeoutExpired:
        stop(process)
        process.communicate()
        return "timeout", ""
    lines = [line for line in output.splitlines() if re.search(r"FAILED|panicked|^error|passed", line)]
    words = " | ".join(line[:160] for line in lines[:3]) or f"exit code {process.returncode}"
    return ("survived" if process.returncode == 0 else "caught"), words


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    planting = commands.add_parser("plant")
    planting.add_argument("tree")
    planting.add_argument("list")
    planting.add_argument("-p", "--package", action="append", required=True)
    planting.add_argument("-f", "--file", action="append", required=True)
    planting.set_defaults(call=plant)
    running = commands.add_parser("run")
    running.add_argument("list")
    running.add_argument("--out", required=True)
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument("--seconds", type=float, default=float("inf"))
    running.add_argument("--each", type=float, default=100)
    running.add_argument("--only", default="")
    running.add_argument("--again")
    running.add_argument("command", nargs="+")
    running.set_defaults(call=run)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
