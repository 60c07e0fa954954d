"""The functions: which way a call goes."""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .. import _native
from . import fallback
from .autograd import Norm, NormForTransforms, below_autograd, forward_below, is_forward_mode
from .operators import eager_ops, forward, ops

_FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16))
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

# What these are looked up by costs as much as they do.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_transformed = torch._C._are_functorch_transforms_active
_rms_norm_inference, _layer_norm_inference = eager_ops.rms_norm_inference, eager_ops.layer_norm_inference


def _default_eps(dtype):
    """What `torch.nn.functional.rms_norm` takes if it is given none: the machine epsilon of what it computes in, or of x."""
    x, eps = torch.full((1, 1), 0.01, dtype=dtype), torch.finfo(torch.float32).eps
    is_wide = torch.equal(F.rms_norm(x, (1,)), F.rms_norm(x, (1,), None, eps))
    return eps if is_wide else torch.finfo(dtype).eps


_EPS = {dtype: _default_eps(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def default_eps(x):
    """The eps of an RMS norm that is given none."""
    return _EPS.get(x.dtype) or torch.finfo(x.dtype).eps


@functools.cache
def _why_no_cuda(index):
    """Why there are no kernels for that device, which is said once; None if there are."""
    reason = "PyTorch is not built for CUDA" if torch.version.cuda is None else _native.why_no_cuda(index)
    if reason is not None:
        warnings.warn(f"rmsnorm has no kernels for CUDA here, and torch.nn.functional is used instead: {reason}", stacklevel=6)
    return reason


def _has_cuda(index):
    """Whether there are kernels for that device."""
    return _why_no_cuda(index) is None


# A tracer takes the answer for a constant. What `torch.compiler.assume_constant_result` does, which imports all of Dynamo first.
_has_cuda._dynamo_marked_constant = True


def _takes(x, residual, weight, bias):
    """Whether there are kernels for these tensors."""
    dtype = x.dtype
    if dtype not in _FLOATS or x.ndim == 0 or not (x.is_cpu or x.is_cuda and _has_cuda(x.device.index or 0)):
        return False
    if residual is not None and residual.dtype is not dtype and residual.dtype is not torch.float32:
        return False
    parameter = bias if weight is None else weight
    if parameter is None or parameter.dtype is dtype or parameter.dtype is torch.float32:
        return bias is None or bias.dtype is parameter.dtype
    return False


def _norm(is_layer, x, residual, weight, bias, eps, weight_offset=0.0, cast_before_weight=False):
    """(y, h); h is None without a residual."""
    if (weight is not None and weight.ndim > 1) or (bias is not None and bias.ndim > 1):
        return _flattened(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight)
    args = is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight
    if not _takes(x, residual, weight, bias):
        return fallback.norm(*args)
    if _is_compiling():
        # A compiler traces PyTorch's own operations through every transform.
        return fallback.norm(*args) if _is_transformed() or is_forward_mode() else forward(ops, *args)[:2]
    if _is_transformed() or is_forward_mode():
        return NormForTransforms.apply(*args)[:2]
    for tensor in (x, residual, weight, bias):
        if tensor is not None and type(tensor) not in _PLAIN:
            # A DTensor, a FakeTensor: the dispatcher knows what to do.
            return forward(ops, *args)[:2]
    if not _is_grad_enabled():
        return forward_below(*args)[:2]
    found = Norm.apply(*args)
    return (found, None) if residual is None else found


def _flattened(is_layer, x, residual, weight, bias, *rest):
    """A norm over as many dimensions as the weight, or the bias, has."""
    parameter = bias if weight is None else weight
    dims = parameter.ndim
    if x.shape[-dims:] != parameter.shape:
        raise ValueError(f"x must end in the weight's dimensions {tuple(parameter.shape)}, got the shape {tuple(x.shape)}")
    flat = lambda tensor: None if tensor is None else tensor.flatten(-dims)  # noqa: E731
    y, h = _norm(is_layer, flat(x), flat(residual), flat(weight), flat(bias), *rest)
    return y.view(x.shape), None if h is None else h.view(x.shape)


def _is_plain(x, weight, bias=None):
    """Whether nothing is to be differentiated, transformed or traced, by the tensors that most calls have: the quick way."""
    if type(x) not in _PLAIN or _is_transformed() or _is_compiling() or forward_ad._current_level >= 0:
        return False
    is_recorded = _is_grad_enabled()
    if is_recorded and x.requires_grad:
        return False
    if weight is not None and (type(weight) not in _PLAIN or weight.ndim != 1 or (is_recorded and weight.requires_grad)):
        return False
    return bias is None or (type(bias) in _PLAIN and bias.ndim == 1 and not (is_recorded and bias.requires_grad))


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, weight_offset: float = 0.0,
             cast_before_weight: bool = False) -> Tensor:
    """`x / sqrt(mean(x**2, -1) + eps) * (weight + weight_offset)`: equations (1) to (6), gradients (7) to (12).

    x: (..., cols). weight: (cols), or as many of the last dimensions as are to be normalized together; ones if None. The result has the
    shape and dtype of x. It is computed in float32 and rounded once; with `cast_before_weight` the normalized value is rounded to the
    dtype of x before it is multiplied with the weight, as Llama does. `weight_offset` 1 is Gemma's `1 + w`.
    eps: None is that of `torch.nn.functional.rms_norm`, the machine epsilon of the dtype that is computed in.
    Derivatives: gradients and forward mode (`torch.func.jvp`, dual numbers) call the backward kernel. Second and higher derivatives go
    through PyTorch's operations, as do all transforms of `torch.func` within `torch.compile`.
    RuntimeError (of the dispatcher's) or ValueError if shapes, dtypes or devices do not go together.
    """
    if eps is None:
        eps = default_eps(x)
    if _is_plain(x, weight) and _takes(x, None, weight, None):
        with below_autograd():
            return _rms_norm_inference(x, weight, eps, weight_offset, cast_before_weight)
    return _norm(False, x, None, weight, None, eps, weight_offset, cast_before_weight)[0]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias`: equations (1) to (6), gradients (7) to (12).

    x: (..., cols). weight, bias: (cols), or as many of the last dimensions as are to be normalized together. The result has the shape
    and dtype of x. The variance is of the centred row, not a difference of moments. Errors as of `rms_norm`.
    """
    if _is_plain(x, weight, bias) and _takes(x, None, weight, bias):
        with below_autograd():
            return _layer_norm_inference(x, weight, bias, eps)
    return _norm(True, x, None, weight, bias, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *,
                 weight_offset: float = 0.0, cast_before_weight: bool = False) -> tuple[Tensor, Tensor]:
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = rms_norm(h), in the dtype of x. One pass over memory.

    residual: the shape of x; its dtype or float32, the stream's. Both results are differentiable. Otherwise as `rms_norm`.
    """
    eps = default_eps(x) if eps is None else eps
    return _norm(False, x, residual, weight, None, eps, weight_offset, cast_before_weight)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
                   eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = layer_norm(h), in the dtype of x. As `add_rms_norm`."""
    return _norm(True, x, residual, weight, bias, eps)
