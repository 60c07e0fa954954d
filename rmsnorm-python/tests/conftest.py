"""Common parts of all tests. A missing framework or device skips its tests, with the reason.
`RMSNORM_REQUIRE` (names separated by commas: torch, jax, transformers, flax, equinox, onnxscript,
cuda) makes it a failure."""

import importlib
import os
import sys

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


def framework(name):
    """Imports a framework, or skips or fails as `need` does."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name in REQUIRED or "all" in REQUIRED:
            raise
        pytest.skip(f"{name}: {error}", allow_module_level=True)


sys.modules.setdefault("conftest", sys.modules[__name__])
