"""The same norms with PyTorch's operators, for tensors that no kernel supports (float64, other
devices, other mixes of dtypes, nested tensors) and for programs that leave Python. TorchScript
compiles these functions, and exporters trace them."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import checks


def checked(form, *args):
    """Checks the arguments, then calls `unchecked`."""
    checks.arguments(form, *args[:8])
    return unchecked(form, *args)


def unchecked(form, x, residual, gate, weight, bias, next_weight, next_bias, normalized_shape=None, is_composed=False):
    """`norm` with the arguments of the kernels."""
    is_layer, eps, weight_offset, cast_before_weight, residual_after, has_next, activation, gate_before, groups, l2, cast_order, out_dtype = form
    if not form.is_plain():
        return general(is_layer, x, residual, gate, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape,
                       activation or "", gate_before, groups, l2 or "", cast_order or "", out_dtype or x.dtype)
    return norm(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape, is_composed,
                residual_after, has_next, next_weight, next_bias)


def norm(is_layer: bool, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
         weight_offset: float, cast_before_weight: bool, normalized_shape: list[int] | None = None, is_composed: bool = False,
         residual_after: bool = False, has_next: bool = False, next_weight: Tensor | None = None,
         next_bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(y, h); h is None without a residual, y is h if the call has no y. is_composed: compute the
    RMS norm with elementary operations, and any norm in float32 or wider."""
    dtype = x.dtype
    if residual is None:
        return _of_rows(is_layer, x, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape, is_composed, dtype).to(dtype), None
    if not residual_after:
        h = (x + residual).to(residual.dtype)
        y = _of_rows(is_layer, h, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape, is_composed, dtype)
        return y.to(dtype), h
    # In float32 or wider, so that the sum is rounded once.
    wide = torch.promote_types(dtype, torch.float32)
    y = _of_rows(is_layer, x.to(wide), weight, bias, eps, weight_offset, cast_before_weight, normalized_shape, is_composed, dtype)
    h = (residual + y).to(residual.dtype)
    if not has_next:
        return h, h
    y = _of_rows(is_layer, h, next_weight, next_bias, eps, weight_offset, cast_before_weight, normalized_shape, is_composed, dtype)
    return y.to(dtype), h


def _of_rows(is_layer: bool, rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
             cast_before_weight: bool, normalized_shape: list[int] | None, is_composed: bool, y_dtype: torch.dtype, groups: int = 1, l2: str = "",
             rounds_rstd: bool = False) -> Tensor:
    """The norm of rows, not rounded to the dtype of y if the rows or the parameters have another
    one. l2: the kind of L2 norm in place of an RMS norm. rounds_rstd: rstd is rounded to the dtype of y."""
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
    is_mixed, wide = False, torch.float64 if y_dtype == torch.float64 else torch.float32
    for dtype in dtypes:
        is_mixed = is_mixed or dtype != y_dtype
        wide = torch.float64 if dtype == torch.float64 else wide
    # With 16 bits, PyTorch's layer norm on the CPU rounds the statistics that its gradient needs.
    is_mixed = is_mixed or is_composed
    is_composed = not is_layer and (is_composed or weight_offset != 0.0 or cast_before_weight)
    if not torch.jit.is_scripting():
        # PyTorch's layer_norm gives wrong second derivatives in forward mode and in batches.
        is_again = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        is_composed = is_composed or (is_layer and is_again)
    is_composed = is_composed or groups != 1 or (is_layer and (cast_before_weight or rounds_rstd))
    if is_mixed or is_composed:
        # PyTorch's norms refuse mixed dtypes, or round intermediate results.
        rows = rows.to(wide)
        weight = None if weight is None else weight.to(wide)
        bias = None if bias is None else bias.to(wide)
    if is_composed:
        over, shape = [-1 - i for i in range(len(dims))], list(rows.shape)
        if groups != 1:
            rows, over = rows.reshape(shape[: len(shape) - len(dims)] + [groups, checks.group_width(dims, groups)]), [-1]
        rows = rows - rows.mean(over, keepdim=True) if is_layer else rows
        if l2 == "":
            rstd = torch.rsqrt(rows.square().mean(over, keepdim=True) + eps)
        elif l2 == "l2_norm":
            rstd = torch.rsqrt(rows.square().sum(over, keepdim=True) + eps)
        else:
            rstd = torch.rsqrt(rows.square().sum(over, keepdim=True).clamp_min(eps * eps))
        y = rows * (rstd.to(y_dtype).to(wide) if rounds_rstd else rstd)
        y = y if groups == 1 else y.reshape(shape)
        y = y.to(y_dtype).to(wide) if cast_before_weight else y
        y = y if weight is None else y * (weight + weight_offset)
        return y if bias is None else y + bias
    return F.layer_norm(rows, dims, weight, bias, eps) if is_layer else F.rms_norm(rows, dims, weight, eps)


def activated(activation: str, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The activation of a gate and its derivative, in float32 or wider."""
    gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
    sigmoid = torch.sigmoid(gate)
    if activation == "silu":
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    if activation == "sigmoid":
        return sigmoid, sigmoid * (1 - sigmoid)
    raise ValueError(f"activation: expected silu or sigmoid, got {activation}")


def general(is_layer: bool, x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
            weight_offset: float, cast_before_weight: bool, normalized_shape: list[int] | None, activation: str, gate_before: bool,
            groups: int, l2: str, cast_order: str, y_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(y, h) of a norm that is not plain; h is None without a residual."""
    h = None if residual is None else (x + residual).to(residual.dtype)
    rows = x if h is None else h
    # In float32 or wider, so that the product with the gate is rounded once.
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if gate is not None and gate_before:
        rows = rows * activated(activation, gate)[0]
    if cast_order == "weight_first" and weight is not None:
        normalized_shape = list(weight.shape)
        rows = (rows * (weight.to(torch.promote_types(rows.dtype, weight.dtype)) + weight_offset)).to(x.dtype).to(rows.dtype)
        weight = None
    cast = cast_before_weight or cast_order == "rstd_first"
    y = _of_rows(is_layer, rows, weight, bias, eps, weight_offset, cast, normalized_shape, True, y_dtype, groups, l2, cast_order == "rstd_first")
    if gate is not None and not gate_before:
        if cast:
            y = y.to(y_dtype if weight is None else torch.promote_types(y_dtype, weight.dtype))
        y = y * activated(activation, gate)[0]
    return y.to(y_dtype), h


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, normalized_shape: list[int] | None = None,
             weight_offset: float = 0.0, cast_before_weight: bool = False, cast_order: str | None = None,
             out_dtype: torch.dtype | None = None) -> Tensor:
    """The public function of the same name for TorchScript, as are those below."""
    eps = checks.default_eps(x) if eps is None else eps
    checks.shapes(x, None, weight, None, normalized_shape)
    if cast_order is not None or out_dtype is not None:
        return _without_residual(False, x, None, weight, None, eps, weight_offset, cast_before_weight, normalized_shape, "", False, 1, "",
                                 cast_order, out_dtype)
    return norm(False, x, None, weight, None, eps, weight_offset, cast_before_weight, normalized_shape)[0]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = 1e-5,
               normalized_shape: list[int] | None = None, out_dtype: torch.dtype | None = None) -> Tensor:  # noqa: D103
    checks.shapes(x, None, weight, bias, normalized_shape)
    if out_dtype is not None:
        return _without_residual(True, x, None, weight, bias, 1e-5 if eps is None else eps, 0.0, False, normalized_shape, "", False, 1, "",
                                 None, out_dtype)
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


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None,
                 normalized_shape: list[int] | None = None, weight_offset: float = 0.0, cast_before_weight: bool = False) -> Tensor:  # noqa: D103
    eps = checks.default_eps(x) if eps is None else eps
    checks.shapes(x, residual, weight, None, normalized_shape)
    return norm(False, x, residual, weight, None, eps, weight_offset, cast_before_weight, normalized_shape, False, True)[0]


def layer_norm_add(x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = 1e-5,
                   normalized_shape: list[int] | None = None) -> Tensor:  # noqa: D103
    checks.shapes(x, residual, weight, bias, normalized_shape)
    return norm(True, x, residual, weight, bias, 1e-5 if eps is None else eps, 0.0, False, normalized_shape, False, True)[0]


def rms_norm_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, next_weight: Tensor | None = None,
                          eps: float | None = None, normalized_shape: list[int] | None = None, weight_offset: float = 0.0,
                          cast_before_weight: bool = False) -> tuple[Tensor, Tensor]:  # noqa: D103
    eps = checks.default_eps(x) if eps is None else eps
    checks.shapes(x, residual, weight, None, normalized_shape, next_weight)
    y, h = norm(False, x, residual, weight, None, eps, weight_offset, cast_before_weight, normalized_shape, False, True, True, next_weight)
    return y, torch.jit._unwrap_optional(h)


def rms_norm_gated(x: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, eps: float | None = None, bias: Tensor | None = None,
                   activation: str = "silu", norm_before_gate: bool = True, groups: int = 1, normalized_shape: list[int] | None = None,
                   weight_offset: float = 0.0, cast_before_weight: bool = False, cast_order: str | None = None,
                   out_dtype: torch.dtype | None = None) -> Tensor:  # noqa: D103
    eps = checks.default_eps(x) if eps is None else eps
    dims = checks.shapes(x, None, weight, bias, normalized_shape, None, None, gate)
    checks.group_width(dims, groups)
    return _without_residual(False, x, gate, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape, activation,
                             not norm_before_gate, groups, "", cast_order, out_dtype)


def l2_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, groups: int = 1, clamped: bool = False,
            normalized_shape: list[int] | None = None, weight_offset: float = 0.0, cast_order: str | None = None,
            out_dtype: torch.dtype | None = None) -> Tensor:  # noqa: D103
    dims = checks.shapes(x, None, weight, None, normalized_shape)
    checks.group_width(dims, groups)
    return _without_residual(False, x, None, weight, None, eps, weight_offset, False, normalized_shape, "", False, groups,
                             "l2_norm_clamped" if clamped else "l2_norm", cast_order, out_dtype)


def _without_residual(is_layer: bool, x: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
                      weight_offset: float, cast_before_weight: bool, normalized_shape: list[int] | None, activation: str, gate_before: bool,
                      groups: int, l2: str, cast_order: str | None, out_dtype: torch.dtype | None) -> Tensor:
    order = "" if cast_order is None else cast_order
    if order == "at_store" or order == "before_weight":
        cast_before_weight = order == "before_weight"
    elif order != "" and order != "rstd_first" and order != "weight_first":
        raise ValueError(f"cast_order: expected at_store, before_weight, rstd_first or weight_first, got {order}")
    if order == "weight_first" and (weight is None or gate_before and gate is not None):
        raise ValueError("cast_order: weight_first needs a weight and no gate before the norm")
    y_dtype = x.dtype if out_dtype is None else out_dtype
    return general(is_layer, x, None, gate, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape, activation, gate_before,
                   groups, l2, order, y_dtype)[0]
