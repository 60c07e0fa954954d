"""Norms that return FP8 or int8 values and their scales, in the layouts of `torch._scaled_mm`."""

import torch
from torch import Tensor

from .._norm import Form
from . import checks
from .functional import _takes, default_eps
from .operators import ops

_CODES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}
_SCALES = {"given": 0, "tensor": 1, "row": 2, "block": 3, "mx": 4}


def quantized_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, scales: str = "row",
                       scale: Tensor | None = None, residual: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn,
                       weight_offset: float = 0.0, cast_before_weight: bool = False) -> tuple[Tensor, ...]:
    """(codes, scales), or (codes, scales, h) with a residual: `codes * scales` approximates
    `rms_norm(x)`, or `rms_norm(h)` of h = x + residual. One kernel.

    Equations (Q1) to (Q5). codes: the shape of x, in `dtype`: float8_e4m3fn, float8_e5m2 or int8. A
    scale multiplies its codes, as `scale_a` of `torch._scaled_mm` does (x seen as (rows, cols)):

    | scales | one scale for | returned tensor |
    |---|---|---|
    | "given" | all of x: the argument `scale`, float32, one element | `scale` |
    | "tensor" | all of x, from its largest element | float32, () |
    | "row" | each row | float32, (..., 1) |
    | "block" | 128 columns of a row | float32, (rows, ceil(cols / 128)), column-major |
    | "mx" | 32 columns of a row; powers of two | float8_e8m0fnu, 1-d, in cuBLAS's tiles of 128 x 4 |

    Not differentiable: no result requires grad, and a tangent (forward mode) raises
    NotImplementedError. To train, use `rms_norm`, or a straight-through estimator as in
    rmsnorm-core/examples/quantized_training.rs of the repository.

    >>> import torch, rmsnorm.torch as rt
    >>> codes, scales = rt.quantized_rms_norm(torch.ones(2, 128), None, 1e-6, scales="row")
    >>> codes.dtype, tuple(scales.shape)
    (torch.float8_e4m3fn, (2, 1))
    >>> torch.allclose(codes.float() * scales, torch.ones(2, 128), rtol=2**-4)
    True
    """
    if scales not in _SCALES:
        raise ValueError(f"scales must be one of {', '.join(_SCALES)}, got {scales!r}")
    if (scale is None) == (scales == "given"):
        raise ValueError(f'scale must be given with scales="given", and only then, got scale={"None" if scale is None else "a tensor"} '
                         f"and scales={scales!r}")
    if dtype not in _CODES:
        raise ValueError(f"dtype must be float8_e4m3fn, float8_e5m2 or int8, got {dtype}")
    try:
        eps = default_eps(x) if eps is None else checks.number("eps", eps)
        weight_offset = checks.number("weight_offset", weight_offset)
        checks.check_flag("cast_before_weight", cast_before_weight)
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
    """Raises an error of the kernels as a Python exception."""
    form = Form(False, 0.0 if eps is None else eps, weight_offset, cast_before_weight)
    checks.arguments(form, x, residual, None, weight, None, None, None)
    if scale is not None and not isinstance(scale, Tensor):
        raise TypeError(f"scale: expected a torch.Tensor, got {type(scale).__name__}; pass torch.tensor([scale])")
    if scale is not None:
        checks.devices({"scale": scale}, x)
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"scale: expected one element of float32, got the shape {list(scale.shape)} of {scale.dtype}")
    if not _takes(x, residual, None, weight):
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in dict(x=x, residual=residual, weight=weight).items() if tensor is not None)
        raise NotImplementedError("x: quantized norms support float32, float16 and bfloat16 on the CPU and CUDA, with residual and "
                                  f"weight of the dtype of x or float32; got {dtypes} on {x.device}; convert them")
