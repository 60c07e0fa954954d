"""Fused RMSNorm and LayerNorm, forward and backward.

`rmsnorm.torch` is for PyTorch, `rmsnorm.jax` for JAX, `rmsnorm.arrays` for NumPy and other arrays
that support DLPack. Each submodule needs only its own framework and is imported on first use.

>>> import rmsnorm
>>> "cpu" in rmsnorm.devices()
True
"""

import importlib as _importlib
import importlib.util as _util
import pathlib as _pathlib
import re as _re
import typing as _typing

from . import _native

if _typing.TYPE_CHECKING:
    from . import arrays as arrays
    from . import jax as jax
    from . import torch as torch

__all__ = ["devices"]
__version__: str = _native.VERSION
# The commit that the native library was built from, "+" if the tree had uncommitted changes;
# "unknown" if it was built outside a repository.
__revision__: str = _native.REVISION

_PARTS = ("arrays", "jax", "torch")


def __getattr__(name: str) -> _typing.Any:
    if name in _PARTS:
        return _importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})


def _nvrtc_folders() -> list[str]:
    """The folders of NVIDIA's wheels that contain NVRTC. PyTorch and JAX install it there, outside
    the search path of the system's loader."""
    spec = _util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    return [str(folder) for root in roots for folder in sorted(_pathlib.Path(root).glob("*/lib")) if any(folder.glob("libnvrtc.so.*"))]


_native.look_for_nvrtc_in(_nvrtc_folders())
# Kernels that wheel.sh compiled. A package that was built in another way has none.
_native.look_for_programs_in(str(_pathlib.Path(__file__).parent / "programs"))


def _need(framework: str, oldest: tuple[int, int]) -> None:
    """Raises ImportError with the install command if a framework is missing or too old."""
    install = f"in a clone, pip install '.[{framework}]'"
    try:
        version = getattr(_importlib.import_module(framework), "__version__", "unknown")
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ModuleNotFoundError(f"rmsnorm.{framework} needs {framework}, which is not installed: {install}", name=framework) from None
    if tuple(map(int, _re.findall(r"\d+", version)[:2])) < oldest:
        raise ImportError(f"rmsnorm.{framework} needs {framework} {oldest[0]}.{oldest[1]} or later, got {version}: {install} --upgrade")


def devices() -> dict[str, tuple[bool, str]]:
    """{name: (can be used, description, or the reason why it cannot be used)} of this machine's
    devices.

    >>> import rmsnorm
    >>> can_be_used, description = rmsnorm.devices()["cpu"]
    >>> can_be_used
    True
    """
    return {name: (is_there, text) for name, is_there, text in _native.devices() if not name.startswith("wgpu")}
