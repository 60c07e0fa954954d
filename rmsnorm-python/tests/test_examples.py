"""Every public function and class has an example in its docstring that runs on the CPU, as does
every public module."""

import doctest
import importlib
import inspect

import pytest
from conftest import framework

# {module: the framework that it needs, or None}.
_MODULES = {
    "rmsnorm": None, "rmsnorm.arrays": "numpy", "rmsnorm.torch": "torch", "rmsnorm.jax": "jax", "rmsnorm.jax.nnx": "flax",
    "rmsnorm.jax.equinox": "equinox",
}


def _public(module):
    """(name, object) of a module, its public names, and the documented public methods that its
    classes define."""
    yield module.__name__, module
    for name in module.__all__:
        item = getattr(module, name)
        yield name, item
        for method, function in vars(item).items() if inspect.isclass(item) else ():
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{method}", function


@pytest.mark.parametrize("name", _MODULES)
def test_every_public_item_has_an_example_that_runs(name):
    if _MODULES[name] is not None:
        framework(_MODULES[name])
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    for label, item in _public(importlib.import_module(name)):
        # Without globals: an example imports everything that it uses.
        examples = [example for example in finder.find(item, label, globs={}) if example.examples]
        # The class's example shows its methods.
        assert examples or "." in label.removeprefix(name), f"{label} has no example"
        for example in examples:
            assert runner.run(example).failed == 0, f"the example of {label} failed"
