"""Checks pages of docs/ that list public names and environment variables. Sources are read as text:
no framework is needed."""

import ast
import pathlib
import re

import pytest

import rmsnorm

_PACKAGE = pathlib.Path(rmsnorm.__file__).parent
_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = _ROOT / "docs"
_in_the_repository = pytest.mark.skipif(not _PAGES.is_dir(), reason="the pages are in the repository alone")
_CRATES = {"rmsnorm_candle": "rmsnorm-candle/src/lib.rs", "rmsnorm_burn": "rmsnorm-burn/src/lib.rs"}


def _told():
    """{module: public names} of the page's table."""
    _, table = (_PAGES / "support.md").read_text().split("| Module | Public names |\n|---|---|\n", 1)
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n", 1)[0].splitlines()]
    return {module.strip("`"): sorted(re.findall(r"`(\w+)`", names)) for module, names in rows}


def _of_python(path):
    """`__all__` of a module; None if it does not have one."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value))
    return None


def _of_rust(path):
    """The functions that a crate exports."""
    (names,) = re.findall(r"pub use functions::\{([^}]*)\};", path.read_text())
    return sorted(re.findall(r"\w+", names))


@_in_the_repository
def test_the_page_of_support_has_the_public_names_of_every_module():
    paths = sorted(_PACKAGE.rglob("*.py"))
    named = {".".join(["rmsnorm", *path.relative_to(_PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path for path in paths}
    public = {name: names for name, path in named.items() if (names := _of_python(path)) is not None}
    public |= {name: _of_rust(_ROOT / path) for name, path in _CRATES.items()}
    assert _told() == public


def _sources():
    """The source files that may read the environment."""
    yield _ROOT / ".ci" / "run"
    for folder in [*_ROOT.glob("rmsnorm-*"), *(_ROOT / name for name in ("benches", "kernels", "shaders"))]:
        for path in folder.rglob("*"):
            if path.suffix in {".rs", ".py", ".sh", ".c", ".cu", ".cuh", ".wgsl"} and "target" not in path.parts[len(_ROOT.parts):]:
                yield path


@_in_the_repository
def test_the_page_of_the_environment_has_every_variable_of_ours():
    read = {name for path in _sources() for name in re.findall(r"\bRMSNORM_[A-Z_]+", path.read_text())}
    assert set(re.findall(r"\bRMSNORM_[A-Z_]+", (_PAGES / "environment.md").read_text())) == read
