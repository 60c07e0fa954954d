"""The same norms with PyTorch's operators, for tensors that no kernel supports (float64, other
devices, other mixes of dtypes, nested tensors) and for programs that leave Python. TorchScript
compiles these functions, and exporters trace them."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import checks


def checked(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape=None, is_composed=False):
    """Checks the arguments, then calls `norm`."""
    args = is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape
    checks.arguments(*args)
    return norm(*args, is_composed)


def norm(is_layer: bool, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
         weight_offset: float, cast_before_weight: bool, normalized_shape: list[int] | None = None,
         is_composed: bool = False) -> tuple[Tensor, Tensor | None]:
    """(y, h); h is None without a residual. is_composed: compute the RMS norm with elementary
    operations."""
    h = None if residual is None else (x + residual).to(residual.dtype)
    rows = x if h is None else h
    dims = [rows.size(-1)]
    if normalized_shape is not None:
        dims = list(normalized_shape)
    elif weight is not None:
        dims = list(weight.shape)
    elif bias is not None:
        dims = list(bias.shape)
    dtypes = [rows.dtype]
    if weight is not None:
        dtypes.append(weight.dtype)
    if bias is not None:
        dtypes.append(bias.dtype)
    is_mixed, wide = False, torch.float64 if x.dtype == torch.float64 else torch.float32
    for dtype in dtypes:
        is_mixed = is_mixed or dtype != x.dtype
        wide = torch.float64 if dtype == torch.float64 else wide
    is_composed = not is_layer and (is_composed or weight_offset != 0.0 or cast_before_weight)
    if not torch.jit.is_scripting():
        # PyTorch's layer_norm gives wrong second derivatives in forward mode and in batches.
        is_again = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        is_composed = is_composed or (is_layer and is_again)
    if is_mixed or is_composed:
        # PyTorch's norms refuse mixed dtypes, or round intermediate results.
        rows = rows.to(wide)
        weight = None if weight is None else weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    if is_composed:
        over = [-1 - i for i in range(len(dims))]
        rows = rows - rows.mean(over, keepdim=True) if is_layer else rows
        y = rows * torch.rsqrt(rows.square().mean(over, keepdim=True) + eps)
        y = y.to(x.dtype).to(wide) if cast_before_weight else y
        y = y if weight is None else y * (weight + weight_offset)
        y = y if bias is None else y + bias
    elif is_layer:
        y = F.layer_norm(rows, dims, weight, bias, eps)
    else:
        y = F.rms_norm(rows, dims, weight, eps)
    return y.to(x.dtype), h


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, normalized_shape: list[int] | None = None,
             weight_offset: float = 0.0, cast_before_weight: bool = False) -> Tensor:
    """The public function of the same name for TorchScript, as are the next three."""
    eps = checks.default_eps(x) if eps is None else eps
    checks.shapes(x, None, weight, None, normalized_shape)
    return norm(False, x, None, weight, None, eps, weight_offset, cast_before_weight, normalized_shape)[0]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = 1e-5,
               normalized_shape: list[int] | None = None) -> Tensor:  # noqa: D103
    checks.shapes(x, None, weight, bias, normalized_shape)
    return norm(True, x, None, weight, bias, 1e-5 if eps is None else eps, 0.0, False, normalized_shape)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None,
                 normalized_shape: list[int] | None = None, weight_offset: float = 0.0,
                 cast_before_weight: bool = False) -> tuple[Tensor, Tensor]:  # noqa: D103
    eps = checks.default_eps(x) if eps is None else eps
    checks.shapes(x, residual, weight, None, normalized_shape)
    y, h = norm(False, x, residual, weight, None, eps, weight_offset, cast_before_weight, normalized_shape)
    return y, torch.jit._unwrap_optional(h)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = 1e-5,
                   normalized_shape: list[int] | None = None) -> tuple[Tensor, Tensor]:  # noqa: D103
    checks.shapes(x, residual, weight, bias, normalized_shape)
    y, h = norm(True, x, residual, weight, bias, 1e-5 if eps is None else eps, 0.0, False, normalized_shape)
    return y, torch.jit._unwrap_optional(h)
