"""The native half of the package: functions of its other modules, no part of its interface."""

from typing import Any

VERSION: str
REVISION: str

def devices() -> list[tuple[str, bool, str]]: ...
def why_no_cuda(ordinal: int) -> str | None: ...
def look_for_nvrtc_in(folders: list[str]) -> None: ...
def run_arrays(
    norm: str,
    options: tuple[float, float, str, bool],
    pieces: tuple[str | None, bool, int],
    tensors: dict[str, tuple[Any, bool]],
    stream: int | None = None,
) -> None: ...
def torch_schemas() -> list[str]: ...
def register_torch_operators(libtorch_cpu: str, libtorch_cuda: str | None = None) -> None: ...
def xla_handlers() -> dict[tuple[str, str], Any]: ...
def xla_layouts() -> list[tuple[str, list[tuple[str, int]]]]: ...
def xla_workspace_len(
    is_cuda: bool,
    norm: str,
    rows: int,
    cols: int,
    tensors: str,
    dtypes: tuple[str, str, str],
    cast_order: str,
    pieces: tuple[str | None, bool, int],
) -> int: ...
