"""Common parts of all tests. A missing framework or device skips its tests, with the reason.
`RMSNORM_REQUIRE` (names separated by commas: torch, jax, transformers, flax, equinox, onnxscript,
cuda) makes it a failure. Tests of many cases run a part of them, which `RMSNORM_SWEEP` selects."""

import importlib
import os
import sys
from collections import Counter

import pytest

# Set before JAX is imported: one CPU acts as four devices, to test sharding. Set JAX_PLATFORMS=cuda
# to test on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

REQUIRED = frozenset(filter(None, os.environ.get("RMSNORM_REQUIRE", "").split(",")))


def need(name, is_there, why):
    """Skips the calling test or module if `name` is missing; fails if `RMSNORM_REQUIRE` lists
    it."""
    if is_there:
        return
    if name in REQUIRED or "all" in REQUIRED:
        pytest.fail(f"{name} is required: {why}", pytrace=False)
    pytest.skip(f"{name}: {why}", allow_module_level=True)


# A test of more cases than `FEW` runs one in `SWEPT`. As many consecutive numbers cover everything.
FEW, SWEPT = 8, 4


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves the part of the cases that a number in `RMSNORM_SWEEP` selects (default 0), and the
    first of each test. Any other value, such as `all`, selects everything."""
    asked = os.environ.get("RMSNORM_SWEEP", "0")
    if not asked.isdecimal():
        return
    cases, seen, parts = Counter(map(name_of, items)), Counter(), {True: [], False: []}
    for item in items:
        test = name_of(item)
        is_taken = cases[test] <= FEW or seen[test] == 0 or seen[test] % SWEPT == int(asked) % SWEPT
        parts[is_taken].append(item)
        seen[test] += 1
    items[:] = parts[True]
    config.hook.pytest_deselected(items=parts[False])


def name_of(item):
    """The name of the test that an item is a case of."""
    return item.nodeid.partition("[")[0]


def framework(name):
    """Imports a framework, or skips or fails as `need` does."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name in REQUIRED or "all" in REQUIRED:
            raise
        pytest.skip(f"{name}: {error}", allow_module_level=True)


sys.modules.setdefault("conftest", sys.modules[__name__])
