"""Norms whose results are 8-bit codes and their scales, as `torch._scaled_mm` takes them."""

import torch
from torch import Tensor

from . import checks
from .functional import _takes, default_eps
from .operators import ops

_CODES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}
_SCALES = {"given": 0, "tensor": 1, "row": 2, "block": 3, "mx": 4}


def quantized_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, scales: str = "row",
                       scale: Tensor | None = None, residual: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn,
                       weight_offset: float = 0.0, cast_before_weight: bool = False) -> tuple[Tensor, ...]:
    """(codes, scales), or (codes, scales, h) with a residual: `codes * scales` is about `rms_norm(x)`, or of h = x + residual. One pass.

    Equations (Q1) to (Q5). codes: the shape of x, in `dtype`: float8_e4m3fn, float8_e5m2 or int8. Scales are what codes are multiplied
    with, as `scale_a` of `torch._scaled_mm` (of x as (rows, cols)):

    | scales | shared by | the tensor |
    |---|---|---|
    | "given" | all; `scale` has it, float32 of one element | that one |
    | "tensor" | all, by the largest element | float32, () |
    | "row" | a row | float32, (..., 1) |
    | "block" | 128 columns of a row | float32, (rows, ceil(cols / 128)), rows side by side |
    | "mx" | 32 columns of a row, as powers of two | float8_e8m0fnu, in the tiles of 128 by 4 that cuBLAS reads, as one row |

    >>> codes, scales = quantized_rms_norm(torch.ones(2, 128), None, 1e-6, scales="row")
    >>> torch.allclose(codes.float() * scales, torch.ones(2, 128), rtol=2**-4)
    True

    Not differentiable: results require no grad, h neither, and a tangent (forward mode) is refused. Training goes through `rms_norm`, or
    straight through, as rmsnorm-core/examples/quantized_training.rs in the repository does.
    """
    if scales not in _SCALES:
        raise ValueError(f"scales must be one of {', '.join(_SCALES)}, got {scales!r}")
    if (scale is None) == (scales == "given"):
        raise ValueError(f'scale goes with scales="given", got scale={"None" if scale is None else "a tensor"} and {scales!r}')
    if dtype not in _CODES:
        raise ValueError(f"dtype must be float8_e4m3fn, float8_e5m2 or int8, got {dtype}")
    try:
        eps = default_eps(x) if eps is None else checks.number("eps", eps)
        weight_offset = checks.number("weight_offset", weight_offset)
        checks.flag("cast_before_weight", cast_before_weight)
        with torch.no_grad():
            codes, found, h = ops.quantized_rms_norm(
                x, residual, weight, eps, weight_offset, cast_before_weight, scale, _CODES[dtype], _SCALES[scales]
            )
    except (RuntimeError, AttributeError):
        _refuse(x, residual, weight, eps, weight_offset, cast_before_weight, scale)
        raise
    found = scale if scales == "given" else found
    return (codes, found) if residual is None else (codes, found, h)


def _refuse(x, residual, weight, eps, weight_offset, cast_before_weight, scale):
    """Python's words for what the kernels refused."""
    checks.arguments(False, x, residual, weight, None, 0.0 if eps is None else eps, weight_offset, cast_before_weight)
    if scale is not None and not isinstance(scale, Tensor):
        raise TypeError(f"scale: expected a torch.Tensor, got {type(scale).__name__}; torch.tensor([scale]) makes one")
    if scale is not None:
        checks.devices({"scale": scale}, x)
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"scale: expected one element of float32, got the shape {list(scale.shape)} of {scale.dtype}")
    if not _takes(x, residual, weight, None):
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in dict(x=x, residual=residual, weight=weight).items() if tensor is not None)
        raise NotImplementedError("x: quantized norms have kernels for float32, float16 and bfloat16 on the CPU and CUDA, residual and "
                                  f"weight of that dtype or float32; got {dtypes} on {x.device}; convert them")
