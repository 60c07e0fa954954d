"""Fused RMSNorm and LayerNorm, forward and backward.

`rmsnorm.torch` for PyTorch, `rmsnorm.jax` for JAX, `rmsnorm.arrays` for NumPy and whatever else speaks DLPack. Each needs its framework
only; this module needs none.
"""

import importlib.util as _util
import os as _os
import pathlib as _pathlib

from . import _native

__all__ = ["devices"]
__version__: str = _native.VERSION
# The commit that the native half was built from, with a "+" if files had changed since; "unknown" outside a repository.
__revision__: str = _native.REVISION


def _nvrtc():
    """The NVRTC of NVIDIA's wheels, which PyTorch and JAX bring along and no system loader knows; None if there is none."""
    spec = _util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted(_pathlib.Path(folder).glob("*/lib/libnvrtc.so.[0-9]*"))]
    return str(found[-1]) if found else None


if "RMSNORM_NVRTC" not in _os.environ and (_path := _nvrtc()) is not None:
    _os.environ["RMSNORM_NVRTC"] = _path


def devices() -> dict[str, tuple[bool, str]]:
    """The devices of this machine: of each name whether it can be used, and what it is or why not."""
    return {name: (is_there, text) for name, is_there, text in _native.devices() if not name.startswith("wgpu")}
