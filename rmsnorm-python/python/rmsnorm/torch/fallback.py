"""The same norms by PyTorch's own operators, for what there are no kernels for: float64, other devices, other mixes of dtypes."""

import functools

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad


def norm(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight):
    """(y, h); h is None without a residual."""
    h = None if residual is None else (x + residual).to(residual.dtype)
    rows = x if h is None else h
    # PyTorch's own layer_norm is wrong where forward mode is differentiated again, or a batch of second derivatives is taken.
    is_again = is_layer and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)
    if not is_again and (is_layer or (weight_offset == 0.0 and not cast_before_weight)):
        dtypes = [tensor.dtype for tensor in (x, rows, weight, bias) if tensor is not None]
        if any(dtype != x.dtype for dtype in dtypes):
            # PyTorch's own refuse a mix, or round in between.
            wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
            rows, weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (rows, weight, bias))
        cols = rows.shape[-1:]
        y = F.layer_norm(rows, cols, weight, bias, eps) if is_layer else F.rms_norm(rows, cols, weight, eps)
    else:
        y = _by_formula(is_layer, rows, x.dtype, weight, bias, eps, weight_offset, cast_before_weight)
    return y.to(x.dtype), h


def _by_formula(is_layer, rows, dtype, weight, bias, eps, weight_offset, cast_before_weight):
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True) if is_layer else wide
    x_hat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        x_hat = x_hat.to(dtype).to(wide.dtype)
    y = x_hat if weight is None else x_hat * (weight.to(wide.dtype) + weight_offset)
    return y if bias is None else y + bias.to(wide.dtype)
