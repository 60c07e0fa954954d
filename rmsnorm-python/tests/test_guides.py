"""The programs of README and of the guides run unchanged."""

import pathlib
import re

import pytest
from conftest import framework

_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = ["README.md", "rmsnorm-python/README.md", *(f"docs/guide/{name}.md" for name in ("pytorch", "pytorch_norms", "jax", "fp8"))]


def _programs():
    for page in _PAGES:
        text = (_ROOT / page).read_text() if (_ROOT / page).is_file() else ""
        for number, program in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)):
            yield pytest.param(program, id=f"{page}-{number}")


@pytest.mark.parametrize("program", list(_programs()))
def test_a_program_of_a_page_runs(program):
    for name in ("torch", "jax"):
        if re.search(rf"^import {name}\b", program, re.MULTILINE):
            framework(name)
    try:
        exec(compile(program, "a page", "exec"), {"__name__": "__main__"})
    finally:
        if "torch.set_default_device" in program:
            framework("torch").set_default_device(None)
