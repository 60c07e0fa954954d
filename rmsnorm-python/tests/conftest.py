"""What tests of all frameworks share. A missing framework or device is a skip with its reason; `RMSNORM_REQUIRE` (names separated by
commas: torch, jax, transformers, flax, equinox, onnxscript, cuda) makes it a failure."""

import importlib
import os
import sys

import pytest

# Before JAX is imported: sharding is tested on four devices that one CPU stands for.
# On a GPU: JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

REQUIRED = frozenset(filter(None, os.environ.get("RMSNORM_REQUIRE", "").split(",")))


def need(name, is_there, why):
    """Skips what needs it where it is not there, or fails where it is required."""
    if is_there:
        return
    if name in REQUIRED or "all" in REQUIRED:
        pytest.fail(f"{name} is required: {why}", pytrace=False)
    pytest.skip(f"{name}: {why}", allow_module_level=True)


def framework(name):
    """The module of a framework."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name in REQUIRED or "all" in REQUIRED:
            raise
        pytest.skip(f"{name}: {error}", allow_module_level=True)


sys.modules.setdefault("conftest", sys.modules[__name__])
