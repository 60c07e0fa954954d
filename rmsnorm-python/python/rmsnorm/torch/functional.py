"""The public functions: they choose the path of a call (eager kernels, transforms, compiler,
exporter, fallback)."""

import functools
import warnings
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from .. import _native
from .._norm import Form, Value, l2_name, order_of
from . import checks, exported, fallback
from .autograd import NormForEager, NormForTransforms, call_below_autograd, forward_below, is_forward_mode
from .checks import default_eps
from .operators import ROWS, eager_ops, forward, ops

_FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16))
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_RMS_EPS, _LAYER_EPS = 2.0**-23, 1e-5

# Looking these up costs as much as calling them.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_dynamo, _is_traced = torch.compiler.is_dynamo_compiling, torch._C._get_tracing_state
_has_mode, _is_transformed = torch._C._is_torch_function_mode_enabled, torch._C._are_functorch_transforms_active
_rms_norm_inference, _layer_norm_inference = eager_ops.rms_norm_inference, eager_ops.layer_norm_inference


@functools.cache
def _why_no_cuda(index):
    """The reason why a CUDA device has no kernels, also given as a warning once; None if it has
    kernels."""
    reason = "PyTorch is not built for CUDA" if torch.version.cuda is None else _native.why_no_cuda(index)
    if reason is not None:
        warnings.warn(f"rmsnorm has no kernels for CUDA here, and torch.nn.functional is used instead: {reason}", stacklevel=6)
    return reason


def _has_cuda(index):
    """Whether a CUDA device has kernels."""
    return _why_no_cuda(index) is None


# Tracers treat the answer as a constant. Equals `torch.compiler.assume_constant_result`, which
# would import all of Dynamo.
_has_cuda._dynamo_marked_constant = True


#: The choice of `set_compiled`. Dynamo guards it: programs are compiled again when it changes.
_COMPILED = "auto", "kernels", "operations"
_compiled_norms = _COMPILED[0]


def set_compiled(norms: str) -> None:
    """Chooses what `torch.compile` makes of this package's norms, in the whole process:

    | norms | compiled programs have |
    |---|---|
    | "auto", the default | CPU: kernels. CUDA: kernels for norms with a gate or a residual, operations for all others |
    | "kernels" | the kernels, with the bits of eager mode |
    | "operations" | PyTorch's operations in float32, which inductor fuses with those around them |

    A kernel with a gate or a residual has in it what the compiler would fuse with it. Operations leave out roundings within a norm where
    inductor does. Programs that change are compiled again. `quantized_rms_norm`, `torch.ops.rmsnorm.*`, exported programs and calls outside
    of `torch.compile` always have kernels.

    >>> import rmsnorm.torch as rt
    >>> rt.set_compiled("auto")
    """
    global _compiled_norms
    if norms not in _COMPILED:
        raise ValueError(f"norms: expected one of {', '.join(_COMPILED)}, got {norms!r}")
    _compiled_norms = norms


def _compiles_kernel(x, residual, gate):
    """Whether a compiled program has a kernel for this norm."""
    if _compiled_norms == "auto":
        return not x.is_cuda or residual is not None or gate is not None
    return _compiled_norms == "kernels"


def _takes(x, residual, gate, *parameters, out_dtype=None, is_first=False):
    """Whether the kernels support these devices and dtypes. out_dtype: of y, None for that of x. is_first: whether the weight comes
    before the norm."""
    dtype = x.dtype
    if out_dtype is not None and out_dtype is not dtype:
        if is_first or dtype not in _FLOATS or out_dtype not in _FLOATS or torch.float32 not in (dtype, out_dtype):
            return False
        # Gate and parameters go with y.
        dtype = out_dtype
    if dtype not in _FLOATS or not (x.is_cpu or x.is_cuda and _has_cuda(x.device.index or 0)):
        return False
    if residual is not None and residual.dtype is not dtype and residual.dtype is not torch.float32:
        return False
    if gate is not None and gate.dtype is not dtype:
        return False
    found = None
    for parameter in parameters:
        if parameter is not None:
            found = parameter.dtype if found is None else found
            if parameter.dtype is not found:
                return False
    return found is None or found is dtype or found is torch.float32


def _norm(is_layer, x, residual, weight, bias, eps, weight_offset=0.0, cast_before_weight=False, normalized_shape=None,
          residual_after=False, has_next=False, next_weight=None, next_bias=None, gate=None, *general):
    """(y, h); y is None or unspecified if the call has none, h is None without a residual. general: the
    last fields of the form of a norm that is not plain, from activation on."""
    eps = _LAYER_EPS if eps is None and is_layer else eps
    tensors = x, residual, gate, weight, bias, next_weight, next_bias
    cast_order, out_dtype = general[-2:] if general else (None, None)
    is_first = cast_order == "weight_first"
    if general:
        checks.pieces(Form(is_layer, 0.0, 0.0, False, residual_after, has_next, *general), residual, gate)
        if out_dtype is torch.float32 and isinstance(x, Tensor) and x.dtype in _FLOATS and not is_first:
            # Parameters go with y, and 16 bits become float32 without a rounding.
            weight, bias = (one.float() if isinstance(one, Tensor) and one.dtype in _FLOATS else one for one in (weight, bias))
            tensors = x, residual, gate, weight, bias, next_weight, next_bias
    is_eager = _is_eager(*tensors) and not _has_mode() and (normalized_shape is None or _is_last(x, normalized_shape))
    if is_eager and _takes(*tensors, out_dtype=out_dtype, is_first=is_first):
        eps = _RMS_EPS if eps is None else eps
        if type(eps) is float and type(weight_offset) is float and type(cast_before_weight) is bool:
            return _recorded(Form(is_layer, eps, weight_offset, cast_before_weight, residual_after, has_next, *general), *tensors)
    # Dynamo of PyTorch 2.10 cannot query modes; in compiled code modes change nothing below.
    is_usual = type(x) in _PLAIN and not x.is_nested and (_is_compiling() or not _has_mode())
    for tensor in tensors[1:]:
        is_usual = is_usual and (tensor is None or type(tensor) in _PLAIN)
    is_tensor = is_usual or isinstance(x, Tensor) and all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors[1:])
    is_nested = not is_usual and any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)
    if not is_usual and not is_nested and not _is_compiling() and has_torch_function(tensors):
        form = Form(is_layer, eps, weight_offset, cast_before_weight, residual_after, has_next, *general)
        return _by_others(form, tensors, normalized_shape)
    if eps is None:
        eps = default_eps(x) if isinstance(x, Tensor) else _RMS_EPS
    eps, weight_offset = checks.number("eps", eps), checks.number("weight_offset", weight_offset)
    checks.check_flag("cast_before_weight", cast_before_weight)
    args = Form(is_layer, eps, weight_offset, cast_before_weight, residual_after, has_next, *general), *tensors
    if is_nested or not is_tensor:
        return fallback.checked(*args, normalized_shape)
    if not _is_compiling() and _is_traced() is not None and torch.onnx.is_in_onnx_export():
        # TorchScript's exporter supports elementary operations and PyTorch's layer norm only.
        return fallback.checked(*args, normalized_shape, True)
    is_flat = all(parameter is None or parameter.ndim <= 1 for parameter in tensors[len(ROWS):])
    if not is_flat or not (normalized_shape is None or _is_last(x, normalized_shape)):
        return _flattened(*args, normalized_shape)
    if not _takes(*tensors, out_dtype=out_dtype, is_first=is_first):
        return fallback.checked(*args)
    if _is_compiling() and (x.shape[-1] == 0 or _is_transformed() or is_forward_mode()):
        # Compilers can trace PyTorch's operations through every transform. No kernel supports zero
        # columns.
        return fallback.checked(*args)
    if not _is_compiling() and _is_functionalized():
        return fallback.checked(*args)
    # In Dynamo of PyTorch 2.10 and 2.11 `is_exporting()` is true in every program.
    if _is_compiling() and torch.compiler._is_exporting_flag:
        checks.arguments(*args)
        return exported.norm(*args)
    if _is_compiling():
        return _compiled(*args)
    try:
        if _is_traced() is not None:
            # A trace has the same operator with and without gradients.
            return forward(ops, *args)[:2]
        if _is_transformed() or is_forward_mode():
            return NormForTransforms.apply(*args)[:2]
        if not is_usual and any(tensor is not None and type(tensor) not in _PLAIN for tensor in tensors):
            # Subclasses such as DTensor and FakeTensor are handled by the dispatcher.
            return forward(ops, *args)[:2]
    except RuntimeError:
        return _after_refusal(*args)
    return _recorded(*args)


def _is_functionalized():
    """Whether `torch.func.functionalize` is an active transform; it does not support autograd
    Functions."""
    stack = torch._C._functorch.get_interpreter_stack() if _is_transformed() else None
    return any(one.key() == torch._C._functorch.TransformType.Functionalize for one in stack or ())


def _compiled(*args):
    """(y, h) in a compiled program: see `set_compiled`."""
    if not _compiles_kernel(*args[1:4]):
        # Contiguous, as the kernels' results.
        return tuple(None if one is None else one.contiguous() for one in fallback.checked(*args, None, True))
    # The operators refuse a missing weight in words of their own.
    checks.check_weight(args[0], args[4], "a tensor")
    return forward(ops, *args)[:2]


def _recorded(*args):
    """(y, h) of the kernels, recorded by autograd if it is enabled."""
    if _is_dynamo():
        # Dynamo could not trace the caller, runs that as it is, and compiles what it calls.
        return _compiled(*args)
    try:
        if not _is_grad_enabled():
            return forward_below(*args)[:2]
        found = NormForEager.apply(*args)
        return found if type(found) is tuple else (found, None) if args[2] is None else (None, found)
    except RuntimeError:
        return _after_refusal(*args)


def _by_others(form, tensors, normalized_shape):
    """`_norm`, computed by an override of `__torch_function__`: a subclass, a mode or a Proxy of
    torch.fx."""
    is_layer, eps, weight_offset, cast_before_weight, residual_after, has_next, *general = form
    x, residual, gate, weight, bias, next_weight, next_bias = tensors
    if not form.is_plain():
        found = handle_torch_function(
            normalize, tensors, x, weight, bias, is_layer=is_layer, eps=eps, residual=residual, gate=gate,
            normalized_shape=normalized_shape, weight_offset=weight_offset, cast_before_weight=cast_before_weight,
            **dict(zip(Form._fields[-len(general):], general)),
        )
        return (found, None) if residual is None else found
    rows = (x,) if residual is None else (x, residual)
    options = dict(bias=bias) if is_layer else dict(weight_offset=weight_offset, cast_before_weight=cast_before_weight)
    if has_next:
        options |= {"next_weight": next_weight} | ({"next_bias": next_bias} if is_layer else {})
    function = _FUNCTIONS[is_layer, residual is not None, residual_after, has_next]
    found = handle_torch_function(function, tensors, *rows, weight=weight, eps=eps, normalized_shape=normalized_shape, **options)
    return (found, None) if residual is None else found if form.has_y() else (None, found)


def _after_refusal(*args):
    """Handles a RuntimeError of the kernels: raises the Python error for a wrong argument, uses
    PyTorch's norm for zero columns, or raises the error again."""
    checks.arguments(*args)
    if args[1].shape[-1] == 0:
        return fallback.unchecked(*args)
    raise  # noqa: PLE0704


def _of_form(form, x, residual, gate, weight, bias, next_weight, next_bias):
    """`_norm` with the arguments of the kernels."""
    is_layer, eps, weight_offset, cast_before_weight, residual_after, has_next, *general = form
    return _norm(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight, None, residual_after, has_next, next_weight,
                 next_bias, gate, *([] if form.is_plain() else general))


def _flattened(form, x, *args):
    """A norm over several dimensions, which are flattened into one."""
    checks.arguments(form, x, *args)
    *tensors, normalized_shape = x, *args
    residual, gate, weight, bias, *of_next = tensors[1:]
    dims = checks.shapes(x, residual, weight, bias, normalized_shape, *of_next, gate)
    found = _of_form(form, *(None if tensor is None else tensor.flatten(-len(dims)) for tensor in tensors))
    return [None if tensor is None else tensor.view(x.shape) for tensor in found]


def _is_last(x, normalized_shape):
    """Whether normalized_shape is the last dimension of x alone."""
    if not isinstance(normalized_shape, (tuple, list)):
        raise TypeError(f"normalized_shape: expected a tuple or list of ints, got {type(normalized_shape).__name__}; pass x.shape[-1:]")
    return tuple(normalized_shape) == x.shape[-1:]


def _is_eager(x, residual, gate, *parameters):
    """Whether a call has plain dense tensors and 1-d parameters, and no transform, trace or forward
    mode is active."""
    if type(x) not in _PLAIN or x.is_nested or _is_transformed() or _is_dynamo() or _is_traced() is not None:
        return False
    for parameter in parameters:
        if parameter is not None and (type(parameter) not in _PLAIN or parameter.ndim != 1):
            return False
    return forward_ad._current_level < 0 and (residual is None or type(residual) in _PLAIN) and (gate is None or type(gate) in _PLAIN)


def _by_position(args, shape, **named):
    """(normalized_shape, weight, .., eps) from positional arguments, in the order of this package
    or of torch.nn.functional."""
    found, names = dict(named, normalized_shape=shape), list(named)
    if isinstance(args[0], Sequence):
        names.insert(0, "normalized_shape")
    if len(args) > len(names):
        raise TypeError(f"expected at most {len(names)} arguments after the rows, {', '.join(names)}, got {len(args)}; pass the others by name")
    for name, value in zip(names, args):
        if found[name] is not None:
            raise TypeError(f"{name}: expected one value, got one by position and one by name; drop one")
        found[name] = value
    return found.pop("normalized_shape"), *found.values()


@overload
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, normalized_shape: Sequence[int] | None = None,
             weight_offset: float = 0.0, cast_before_weight: bool = False, cast_order: str | None = None,
             out_dtype: torch.dtype | None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
             weight_offset: float = 0.0, cast_before_weight: bool = False, cast_order: str | None = None,
             out_dtype: torch.dtype | None = None) -> Tensor: ...
def rms_norm(x, *args, weight=None, eps=None, normalized_shape=None, weight_offset=0.0, cast_before_weight=False, cast_order=None,
             out_dtype=None):
    """`x / sqrt(mean(x**2, -1) + eps) * (weight + weight_offset)`: equations (1) to (12).

    `rms_norm(x, weight, eps)`, or with the arguments of `torch.nn.functional.rms_norm`:
    `rms_norm(x, normalized_shape, weight, eps)`.

    x: (..., cols), or (..., *normalized_shape). weight: (cols), or normalized_shape; ones if None.
    The result has the shape and dtype of x. It is computed in float32 and rounded once.
    eps: None means 2**-23, or 2**-52 for float64. weight_offset: 1 is Gemma's `1 + w`.
    cast_before_weight: round the normalized value to the dtype of x before the weight multiplies
    it, as Llama does.
    cast_order: the order of roundings by name; None is "before_weight" with cast_before_weight, else "at_store".

    | cast_order | y | model |
    |---|---|---|
    | "at_store" | rounded once | Gemma |
    | "before_weight" | x_hat is rounded, then its product with the weight | Llama |
    | "rstd_first" | 1 / sqrt(..) is rounded, then as "before_weight" | DeepSeek-V4 |
    | "weight_first" | x * (weight + weight_offset) is rounded, and that is normalized | Muse Spark |

    out_dtype: the dtype of y; None is that of x. It is rounded once. Kernels compute float32 from 16 bits, and 16 bits from float32;
    PyTorch's operations compute other pairs, and "weight_first" with a y of another dtype.
    normalized_shape: the last dimensions of x, normalized together; None means the shape of the
    weight, or the last dimension.

    Gradients and forward mode (`torch.func.jvp`, dual numbers) call the backward kernel. PyTorch's
    operations compute second and higher derivatives, and all transforms of `torch.func` within
    `torch.compile`.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, value or device,
    NotImplementedError for tensors that no path supports.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 1e-6)
    tensor([[0.8485, 2.2627]])
    """
    if args:
        if len(args) == 2 and type(args[0]) in _PLAIN and weight is eps is normalized_shape is None:
            weight, eps = args
        else:
            normalized_shape, weight, eps = _by_position(args, normalized_shape, weight=weight, eps=eps)
    if cast_order is not None or out_dtype is not None:
        return normalize(x, weight, is_layer=False, eps=eps, normalized_shape=normalized_shape, weight_offset=weight_offset,
                         cast_before_weight=cast_before_weight, cast_order=cast_order, out_dtype=out_dtype)
    if _is_eager(x, None, None, weight) and _takes(x, None, None, weight) and (normalized_shape is None or _is_last(x, normalized_shape)):
        eps = _RMS_EPS if eps is None else eps
        is_recorded = _is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
        if not is_recorded and type(eps) is float and type(weight_offset) is float and type(cast_before_weight) is bool:
            try:
                return call_below_autograd(_rms_norm_inference, x, weight, eps, weight_offset, cast_before_weight)
            except RuntimeError:
                return _after_refusal(Form(False, eps, weight_offset, cast_before_weight), x, None, None, weight, None, None, None)[0]
    return _norm(False, x, None, weight, None, eps, weight_offset, cast_before_weight, normalized_shape)[0]


@overload
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = 1e-5, *,
               normalized_shape: Sequence[int] | None = None, out_dtype: torch.dtype | None = None) -> Tensor: ...
@overload
def layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
               eps: float | None = 1e-5, *, out_dtype: torch.dtype | None = None) -> Tensor: ...
def layer_norm(x, *args, weight=None, bias=None, eps=None, normalized_shape=None, out_dtype=None):
    """`(x - mean) / sqrt(var + eps) * weight + bias`: equations (1) to (12).

    `layer_norm(x, weight, bias, eps)`, or with the arguments of `torch.nn.functional.layer_norm`:
    `layer_norm(x, normalized_shape, weight, bias, eps)`.

    x: (..., cols), or (..., *normalized_shape). weight, bias: (cols), or normalized_shape. The
    result has the shape and dtype of x. The variance is computed from the centred row, not as a
    difference of moments. eps: None means 1e-5. The rest is as in `rms_norm`.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.layer_norm(torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.5]))
    tensor([[-1.0000,  2.5000]])
    """
    if args:
        if 2 <= len(args) <= 3 and type(args[0]) in _PLAIN and weight is bias is eps is normalized_shape is None:
            weight, bias, eps = args if len(args) == 3 else (*args, None)
        else:
            normalized_shape, weight, bias, eps = _by_position(args, normalized_shape, weight=weight, bias=bias, eps=eps)
    eps = _LAYER_EPS if eps is None else eps
    if out_dtype is not None:
        return normalize(x, weight, bias, is_layer=True, eps=eps, normalized_shape=normalized_shape, out_dtype=out_dtype)
    if _is_eager(x, None, None, weight, bias) and _takes(x, None, None, weight, bias) and (normalized_shape is None or _is_last(x, normalized_shape)):
        is_recorded = _is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)
                                              or (bias is not None and bias.requires_grad))
        if not is_recorded and type(eps) is float:
            try:
                return call_below_autograd(_layer_norm_inference, x, weight, bias, eps)
            except RuntimeError:
                return _after_refusal(Form(True, eps), x, None, None, weight, bias, None, None)[0]
    return _norm(True, x, None, weight, bias, eps, normalized_shape=normalized_shape)[0]


@overload
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *,
                 normalized_shape: Sequence[int] | None = None, weight_offset: float = 0.0,
                 cast_before_weight: bool = False) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(x: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None,
                 *, weight_offset: float = 0.0, cast_before_weight: bool = False) -> tuple[Tensor, Tensor]: ...
def add_rms_norm(x, residual, *args, weight=None, eps=None, normalized_shape=None, weight_offset=0.0, cast_before_weight=False):
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = rms_norm(h), in the dtype
    of x. One kernel.

    residual: the shape of x, in the dtype of x or float32. Both results are differentiable. The
    rest is as in `rms_norm`.

    >>> import torch, rmsnorm.torch as rt
    >>> y, h = rt.add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 2.0]), 1e-6)
    >>> h
    tensor([[3., 4.]])
    """
    if args:
        if len(args) == 2 and type(args[0]) in _PLAIN and weight is eps is normalized_shape is None:
            weight, eps = args
        else:
            normalized_shape, weight, eps = _by_position(args, normalized_shape, weight=weight, eps=eps)
    return _norm(False, x, _residual(residual), weight, None, eps, weight_offset, cast_before_weight, normalized_shape)


@overload
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = 1e-5, *,
                   normalized_shape: Sequence[int] | None = None) -> tuple[Tensor, Tensor]: ...
@overload
def add_layer_norm(x: Tensor, residual: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
                   bias: Tensor | None = None, eps: float | None = 1e-5) -> tuple[Tensor, Tensor]: ...
def add_layer_norm(x, residual, *args, weight=None, bias=None, eps=None, normalized_shape=None):
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = layer_norm(h), in the
    dtype of x. One kernel.

    residual: the shape of x, in the dtype of x or float32. Both results are differentiable. The
    rest is as in `layer_norm`.

    >>> import torch, rmsnorm.torch as rt
    >>> y, h = rt.add_layer_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]))
    >>> y
    tensor([[-1.0000,  1.0000]])
    """
    if args:
        if 2 <= len(args) <= 3 and type(args[0]) in _PLAIN and weight is bias is eps is normalized_shape is None:
            weight, bias, eps = args if len(args) == 3 else (*args, None)
        else:
            normalized_shape, weight, bias, eps = _by_position(args, normalized_shape, weight=weight, bias=bias, eps=eps)
    return _norm(True, x, _residual(residual), weight, bias, eps, normalized_shape=normalized_shape)


def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *,
                 normalized_shape: Sequence[int] | None = None, weight_offset: float = 0.0, cast_before_weight: bool = False) -> Tensor:
    """`h = residual + rms_norm(x)`, in the dtype of the residual, rounded once. One kernel.

    The end of a post-norm block. residual: the shape of x, in the dtype of x or float32. The
    gradient of the residual is that of h; the norm's backward takes it in the dtype of x. The rest
    is as in `rms_norm`.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.rms_norm_add(torch.tensor([[3.0, -3.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 1.0]), 0.0)
    tensor([[2., 2.]])
    """
    return normalize(x, weight, is_layer=False, eps=eps, residual=_residual(residual), residual_after=True,
                     normalized_shape=normalized_shape, weight_offset=weight_offset, cast_before_weight=cast_before_weight)


def layer_norm_add(x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = 1e-5, *,
                   normalized_shape: Sequence[int] | None = None) -> Tensor:
    """`h = residual + layer_norm(x)`, in the dtype of the residual, rounded once: as
    `rms_norm_add`.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.layer_norm_add(torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 2.0]]), eps=0.0)
    tensor([[1., 3.]])
    """
    return normalize(x, weight, bias, is_layer=True, eps=eps, residual=_residual(residual), residual_after=True,
                     normalized_shape=normalized_shape)


def rms_norm_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, next_weight: Tensor | None = None,
                          eps: float | None = None, *, normalized_shape: Sequence[int] | None = None, weight_offset: float = 0.0,
                          cast_before_weight: bool = False) -> tuple[Tensor, Tensor]:
    """(y, h): h of `rms_norm_add`, and y, the RMS norm of h by `next_weight`, in the dtype of x. One
    kernel.

    The norms after one part of a Gemma block and before the next. Both have the same options. If
    the weights differ in dtype, `torch.nn.functional` computes both.

    >>> import torch, rmsnorm.torch as rt
    >>> x, residual, weight = torch.tensor([[3.0, -3.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([1.0, 1.0])
    >>> y, h = rt.rms_norm_add_rms_norm(x, residual, weight, torch.tensor([4.0, 5.0]), 0.0)
    >>> h, y
    (tensor([[2., 2.]]), tensor([[4., 5.]]))
    """
    return normalize(x, weight, is_layer=False, eps=eps, residual=_residual(residual), residual_after=True, has_next=True,
                     next_weight=next_weight, normalized_shape=normalized_shape, weight_offset=weight_offset,
                     cast_before_weight=cast_before_weight)


def _residual(residual):
    """The residual; raises TypeError if it is None."""
    if residual is None:
        raise TypeError("residual: expected a torch.Tensor, got None; rms_norm and layer_norm have no residual")
    return residual


def rms_norm_gated(x: Tensor, gate: Tensor | None = None, weight: Tensor | None = None, eps: float | None = None, *,
                   bias: Tensor | None = None, activation: str = "silu", norm_before_gate: bool = True, groups: int = 1,
                   normalized_shape: Sequence[int] | None = None, weight_offset: float = 0.0, cast_before_weight: bool = False,
                   cast_order: str | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`(rms_norm(x) + bias) * activation(gate)`, or with norm_before_gate=False
    `rms_norm(x * activation(gate)) + bias`: equations (19) to (21).

    gate: the shape and dtype of x; None for a norm without one. activation: "silu" (`swish` of FLA) or
    "sigmoid". groups: the number of groups of columns, each normalized by itself; the `group_size` of
    mamba_ssm and Zamba2 is cols / groups. The weight runs over all columns.

    The result is computed in float32 and rounded once. With cast_before_weight the norm is rounded
    before the weight multiplies it, and again before the gate does, as in Qwen3-Next. The rest is as in
    `rms_norm`. Layer norms and a residual: `Norm`.

    | model | arguments |
    |---|---|
    | Qwen3-Next, Qwen3.5, OLMo-hybrid | cast_before_weight=True |
    | FLA, Kimi-Linear | activation="sigmoid" or "silu" |
    | Mamba2, Zamba2, Bamba, Nemotron-H | norm_before_gate=False, groups=cols // group_size, cast_before_weight=True |
    | Falcon-H1, mamba_ssm | norm_before_gate as there, groups=n_groups or cols // group_size |

    >>> import torch, rmsnorm.torch as rt
    >>> rt.rms_norm_gated(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]]), eps=0.0, activation="sigmoid")
    tensor([[0.4243, 0.8271]])
    """
    return normalize(x, weight, bias, is_layer=False, eps=eps, gate=gate, activation=activation, gate_before=not norm_before_gate,
                     groups=groups, normalized_shape=normalized_shape, weight_offset=weight_offset, cast_before_weight=cast_before_weight,
                     cast_order=cast_order, out_dtype=out_dtype)


def l2_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, groups: int = 1, clamped: bool = False,
            normalized_shape: Sequence[int] | None = None, weight_offset: float = 0.0, cast_order: str | None = None,
            out_dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(sum(x**2, -1) + eps) * (weight + weight_offset)`, as in flash-linear-attention: equations (1) to (12) with sums in place
    of averages.

    clamped: `x / max(sqrt(sum(x**2, -1)), eps)`, as `torch.nn.functional.normalize`. The gradient takes the divisor as a constant where
    it is eps. Such an eps is 0, or from 2**-63 to 2**63. groups: the number of groups of columns, each normalized by itself, such as the
    heads of a row. The rest is as in `rms_norm`. Gates, biases and a residual: `Norm.l2`.

    >>> import torch, rmsnorm.torch as rt
    >>> rt.l2_norm(torch.tensor([[3.0, 4.0], [0.0, 5.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 1.0000]])
    """
    return normalize(x, weight, is_layer=False, eps=eps, groups=groups, l2=l2_name(clamped), normalized_shape=normalized_shape,
                     weight_offset=weight_offset, cast_order=cast_order, out_dtype=out_dtype)


def normalize(x, weight=None, bias=None, *, is_layer, eps=None, residual=None, residual_after=False, has_next=False, next_weight=None,
              next_bias=None, gate=None, activation=None, gate_before=False, groups=1, l2=None, cast_order=None, out_dtype=None,
              normalized_shape=None, weight_offset=0.0, cast_before_weight=False):
    """y, h or (y, h) of a norm with any pieces: what `Norm` calls, one argument a piece."""
    cast_before_weight, cast_order = order_of(cast_before_weight, cast_order)
    if out_dtype is not None and isinstance(x, Tensor) and out_dtype is x.dtype:
        out_dtype = None
    is_plain = gate is None and type(groups) is int and groups == 1 and l2 is cast_order is out_dtype is None
    is_plain = is_plain and not (is_layer and cast_before_weight is True)
    if not is_layer and (bias is not None and is_plain or next_bias is not None):
        raise TypeError(f"{'bias' if bias is not None else 'next_bias'}: an RMS norm has none, got one; leave it out")
    general = () if is_plain else (None if gate is None else activation, gate_before, groups, l2, cast_order, out_dtype)
    y, h = _norm(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight, normalized_shape, residual_after, has_next,
                 next_weight, next_bias, gate, *general)
    return y if residual is None else (y, h) if has_next or not residual_after else h


class Norm(Value):
    """A norm as a value: its options and its pieces. Methods return a new value, and `apply`
    computes it with one kernel.

    `rms`, `layer` and `l2` take the options of `rms_norm`, `layer_norm` and `l2_norm`. `apply(x, weight, bias)` has
    all paths and derivatives of the functions. It returns

    | pieces | result |
    |---|---|
    | none | y |
    | `residual(r)` | (y, h): h = x + r, y = norm(h) |
    | `residual_after(r)` | h = r + norm(x) |
    | `residual_after(r).next_norm(weight, bias)` | (y, h): h = r + norm(x), y = norm(h) by these parameters |
    | `gate_after(z, activation)` | y = norm(x) * activation(z); also after `residual(r)` |
    | `gate_before(z, activation)` | y = norm(x * activation(z)) |
    | `groups(n)` | y, each group of cols / n columns normalized by itself; also with a gate and `residual(r)` |

    >>> import torch, rmsnorm.torch as rt
    >>> x, residual = torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0, 5.0]])
    >>> rt.Norm.layer(0.0).residual_after(residual).next_norm(bias=torch.ones(2)).apply(x)
    (tensor([[0., 2.]]), tensor([[2., 6.]]))
    """

    __slots__ = ()

    def apply(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y, h or (y, h) of these rows."""
        return normalize(x, weight, bias, **self._given())


def _layer_norm_add_layer_norm(x, residual, **given):
    """What overrides of `__torch_function__` see of two layer norms around a residual."""
    return normalize(x, is_layer=True, residual=residual, residual_after=True, has_next=True, **given)


#: {(is_layer, has a residual, residual_after, has_next): the function that overrides see}.
_FUNCTIONS = {
    (False, False, False, False): rms_norm, (False, True, False, False): add_rms_norm, (False, True, True, False): rms_norm_add,
    (False, True, True, True): rms_norm_add_rms_norm, (True, False, False, False): layer_norm, (True, True, False, False): add_layer_norm,
    (True, True, True, False): layer_norm_add, (True, True, True, True): _layer_norm_add_layer_norm,
}
exported.register(_of_form)
# torch.jit.script compiles the functions of `fallback` in place of these.
for _function in (rms_norm, layer_norm, add_rms_norm, add_layer_norm, rms_norm_add, layer_norm_add, rms_norm_add_rms_norm, rms_norm_gated,
                  l2_norm):
    _function.__prepare_scriptable__ = functools.partial(getattr, fallback, _function.__name__)
