"""Norms of NumPy, CuPy and other arrays that support DLPack, on the CPU or on CUDA. Nothing is
copied.

Arrays are float32, float16 or bfloat16 (also of `ml_dtypes`), of any rank. A norm is over the last
dimension. Weight, bias and residual have the dtype of x or float32. Rows may be strided, such as a
slice of a fused QKV buffer. Definitions, roundings and error bounds: rmsnorm-spec/math.md,
equations (1) to (14) and (19) to (25).

eps: None means 2**-23 for an RMS norm and 1e-5 for a layer norm, as in `rmsnorm.torch` and
`rmsnorm.jax`. L2 norms have 1e-6.

y may have another dtype than x, one of them float32, where nothing is added to x or multiplied with
it before the norm. Weight, bias and gate have then the dtype of y, or weight and bias float32.

In place: pass an input as its output, `out=x`, with a residual `out=(x, residual)`, and with a
residual after the norm `out=residual`. Both must have the same address, shape and strides. Any
other overlap raises ValueError.

On CUDA a call is enqueued on `stream`, the address of a CUDA stream (default: the legacy default
stream), and returns. The caller orders other streams after it and keeps the arrays alive until it
is done. For autograd use `rmsnorm.torch` or `rmsnorm.jax`.

| error | reason |
|---|---|
| TypeError | an argument has a wrong type or dtype, is missing, or is not an argument of this norm |
| ValueError | shapes, strides, values, devices or memory do not match; a tensor's gradient would be lost |
| BufferError | an output is read-only |
| NotImplementedError | no kernel supports the call, for example its device |
| RuntimeError | the device failed |

After TypeError, ValueError, BufferError and NotImplementedError no output has been written.

>>> import numpy as np
>>> from rmsnorm import arrays
>>> x = np.array([[3.0, 3.0, -3.0]], np.float32)
>>> arrays.rms_norm(x, eps=0.0).tolist()
[[1.0, 1.0, -1.0]]
"""

import functools
import operator
import re
import sys
from typing import Any, Literal, Protocol, TypeVar, overload

from . import _native
from ._norm import EPS, NORMS, Form, check_clamped_eps, check_pieces, check_weight, l2_name, order_of

__all__ = [
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add", "rms_norm_add_rms_norm",
    "rms_norm_gated", "l2_norm", "forward", "backward",
]


class SupportsDLPack(Protocol):
    """An array that exports its memory with DLPack.

    >>> import numpy as np
    >>> hasattr(np.ones(2), "__dlpack__")
    True
    """

    def __dlpack__(self, *, stream: Any = ...) -> Any:
        """A DLPack capsule of the array."""

    def __dlpack_device__(self) -> Any:
        """(device type, device index) of the memory."""


_X = TypeVar("_X", bound=SupportsDLPack)
_H = TypeVar("_H", bound=SupportsDLPack)
_Norm = Literal["rms_norm", "layer_norm", "l2_norm", "l2_norm_clamped"]

_FLOATS = ("float32", "float16", "bfloat16")
_OUTPUTS = ("y", "residual_out", "mean", "rstd", "next_mean", "next_rstd", "dx", "dgate", "dweight", "dbias", "dresidual")


@functools.cache
def _dtype_name(dtype: Any) -> str:
    """The name of any library's dtype, such as `float32`: the last word of its text."""
    words: list[str] = re.findall(r"\w+", str(dtype))
    return words[-1] if words else ""


def _is_of(array: object, library: str, kind: str) -> bool:
    """Whether `array` is an instance of `library.kind`. False if the library was never imported."""
    module = sys.modules.get(library)
    return module is not None and isinstance(array, getattr(module, kind))


def _check(name: str, array: Any) -> None:
    """Refuses arrays that DLPack cannot export, or exports without their mask, gradient or sign."""
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} must be an array that supports DLPack, got {type(array).__name__}: pass one, such as "
                        f"numpy.asarray({name}, dtype=numpy.float32)")
    if hasattr(array, "dtype") and _dtype_name(array.dtype) not in _FLOATS:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {array.dtype}: convert it first")
    if _is_of(array, "numpy.ma", "MaskedArray"):
        raise TypeError(f"{name} is a masked array, and its mask would be lost: pass {name}.filled(value), or {name}.data")
    if _is_of(array, "torch", "Tensor"):
        _check_tensor(name, array)
    if name in _OUTPUTS and type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
        # JAX's arrays are immutable, but their DLPack capsules do not say so.
        raise BufferError(f"{name} is an output, and JAX arrays are read-only: pass {name} of another library, or call rmsnorm.jax")


def _check_tensor(name: str, tensor: Any) -> None:
    torch = sys.modules["torch"]
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor with data, got one that is {kind}: convert it first")
    if tensor.requires_grad or torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise ValueError(f"{name} requires grad, and its gradient would be lost: pass {name}.detach(), or call rmsnorm.torch")
    if tensor.is_neg():
        raise ValueError(f"{name} is a negative view, which DLPack cannot express: pass {name}.resolve_neg()")


def _lent(array: Any) -> tuple[Any, bool]:
    """(array, is bfloat16 as int16) for the native library. NumPy can export bfloat16 only as
    integers."""
    if _is_of(array, "numpy", "ndarray") and _dtype_name(array.dtype) == "bfloat16":
        return array.view("int16"), True
    return array, False


def _real(name: str, value: Any) -> float:
    if not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _run(norm: _Norm, eps: float | None, weight_offset: float, order: tuple[bool, str | None], tensors: dict[str, Any],
         pieces: tuple[str, bool, int], stream: int | None, residual_after: bool = False) -> None:
    """order: cast_before_weight and cast_order. pieces: the activation of the gate, whether the gate is before the norm, and the groups of
    columns."""
    if not isinstance(norm, str) or norm not in EPS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    eps, weight_offset = _real("eps", EPS[norm] if eps is None else eps), _real("weight_offset", weight_offset)
    if norm == NORMS[3]:
        check_clamped_eps(eps)
    cast_before_weight, cast_order = order_of(*order)
    if not isinstance(cast_before_weight, int):
        raise TypeError(f"cast_before_weight must be True or False, got {cast_before_weight!r}")
    if stream is not None and (not hasattr(stream, "__index__") or operator.index(stream) < 0):
        raise TypeError(f"stream must be the address of a CUDA stream, got {stream!r}")
    activation, gate_before, groups = pieces
    # Kernels add layer norms of both usual orders to a residual, so the form does not tell them from RMS norms.
    gate = tensors["gate"]
    form = Form(False, eps, weight_offset, bool(cast_before_weight), bool(residual_after),
                activation=None if gate is None else activation, gate_before=gate_before, groups=groups,
                l2=norm if norm in NORMS[2:] else None, cast_order=cast_order)
    check_pieces(form, tensors.get("residual"), gate)
    check_weight(form, tensors["weight"])
    tensors = {name: array for name, array in tensors.items() if array is not None}
    for name, array in tensors.items():
        _check(name, array)
    lent = {name: _lent(array) for name, array in tensors.items()}
    # Both 0 and None are the legacy default stream.
    of_gate = form.activation, gate_before, groups
    _native.run_arrays(norm, (eps, weight_offset, form.order(), form.residual_after), of_gate, lent, stream or None)


def forward(norm: _Norm, eps: float | None = None, *, x: SupportsDLPack, y: SupportsDLPack | None,
            weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = None, residual: SupportsDLPack | None = None,
            residual_out: SupportsDLPack | None = None, mean: SupportsDLPack | None = None, rstd: SupportsDLPack | None = None,
            residual_after: bool = False, next_weight: SupportsDLPack | None = None, next_bias: SupportsDLPack | None = None,
            next_mean: SupportsDLPack | None = None, next_rstd: SupportsDLPack | None = None, gate: SupportsDLPack | None = None,
            activation: str = "silu", gate_before: bool = False, groups: int = 1, weight_offset: float = 0.0,
            cast_before_weight: bool = False, cast_order: str | None = None, stream: int | None = None) -> None:
    """Writes y, and residual_out, mean and rstd where they are passed. norm: "rms_norm", "layer_norm",
    "l2_norm" or "l2_norm_clamped".

    x, y, residual, residual_out, gate: (..., cols). weight, bias: (cols). mean, rstd: (...), or with
    several groups (..., groups), float32.
    gate: multiplies the result after its activation, "silu" or "sigmoid", or x with gate_before.
    groups: the number of groups of columns, each with its own statistics. cast_order: as in `rms_norm`.
    residual_after: residual_out = residual + norm(x). y is None, or the norm of residual_out, and
    the `next_` arrays are those of this norm.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, y, rstd = np.array([[6.0, 8.0, 0.0, 0.0]], np.float32), np.empty((1, 4), np.float32), np.empty(1, np.float32)
    >>> arrays.forward("rms_norm", 0.0, x=x, y=y, rstd=rstd)
    >>> (y * 5).round(3).tolist(), (1 / rstd).round(3).tolist()
    ([[6.0, 8.0, 0.0, 0.0]], [5.0])
    """
    of_next = dict(next_weight=next_weight, next_bias=next_bias, next_mean=next_mean, next_rstd=next_rstd)
    tensors = dict(x=x, residual=residual, gate=gate, weight=weight, bias=bias, y=y, residual_out=residual_out, mean=mean, rstd=rstd,
                   **of_next)
    needed = ("residual", "residual_out") if residual_after else ("y",)
    for name in needed:
        if tensors[name] is None:
            raise TypeError(f"{name} is missing: every call {'with residual_after ' if residual_after else ''}needs it")
    for name, array in of_next.items():
        if array is not None and (y is None or not residual_after):
            raise TypeError(f"{name} must not be given: only a call with residual_after and a y has a next norm")
    _run(norm, eps, weight_offset, (cast_before_weight, cast_order), tensors, (activation, gate_before, groups), stream, residual_after)


def backward(norm: _Norm, *, dy: SupportsDLPack, x: SupportsDLPack, rstd: SupportsDLPack, dx: SupportsDLPack,
             mean: SupportsDLPack | None = None, weight: SupportsDLPack | None = None, dresidual_out: SupportsDLPack | None = None,
             dweight: SupportsDLPack | None = None, dbias: SupportsDLPack | None = None, dresidual: SupportsDLPack | None = None,
             gate: SupportsDLPack | None = None, dgate: SupportsDLPack | None = None, bias: SupportsDLPack | None = None,
             activation: str = "silu", gate_before: bool = False, groups: int = 1, weight_offset: float = 0.0,
             eps: float | None = None, cast_order: str | None = None, stream: int | None = None) -> None:
    """Writes dx, and dweight, dbias, dresidual and dgate where they are passed.

    dy, x, dx, dresidual_out, dresidual, gate, dgate: (..., cols). weight, dweight, dbias: (cols). mean, rstd: as in `forward`.
    gate, activation, gate_before, groups: those of `forward`. bias: that of `forward`, only with a gate
    after the norm. eps: that of `forward`, for "l2_norm_clamped" alone. cast_order: that of `forward`;
    only "weight_first" has another backward pass.
    A dx of another dtype than dy has that of x, for a y of another dtype than x.
    x: the normalized rows: the x of `forward`, or its residual_out if a residual was added before
    the norm.
    dresidual_out: the gradient of residual_out from later layers; it is added to dx.

    After `forward` with residual_after: the gradient of residual_out is that of the residual, and
    the dy of the norm. With a y, a first call gives it as its dx, for x=residual_out and
    rstd=next_rstd.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, rstd = np.array([[1.0, -1.0]], np.float32), np.ones(1, np.float32)
    >>> dx, dweight = np.empty((1, 2), np.float32), np.empty(2, np.float32)
    >>> arrays.backward("rms_norm", dy=np.array([[1.0, 0.0]], np.float32), x=x, rstd=rstd, dx=dx, dweight=dweight)
    >>> dx.tolist(), dweight.tolist()
    ([[0.5, 0.5]], [1.0, 0.0])
    """
    tensors = dict(dy=dy, x=x, gate=gate, weight=weight, bias=bias, mean=mean, rstd=rstd, dresidual_out=dresidual_out, dx=dx,
                   dgate=dgate, dweight=dweight, dbias=dbias, dresidual=dresidual)
    if norm == NORMS[3] and eps is None:
        raise TypeError("eps is missing: the gradient of a clamped L2 norm needs the eps of its forward")
    _run(norm, eps, weight_offset, (False, cast_order), tensors, (activation, gate_before, groups), stream)


def _new(name: str, like: Any, dtype: str | None = None) -> Any:
    """A new contiguous array with the shape and library of `like`, and its dtype or the one of this name."""
    _check(name, like)
    if _is_of(like, "numpy", "ndarray"):
        return sys.modules["numpy"].empty(like.shape, like.dtype if dtype is None else dtype)
    if _is_of(like, "torch", "Tensor"):
        torch = sys.modules["torch"]
        return torch.empty(like.shape, dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)
    library = sys.modules.get(type(like).__module__.partition(".")[0])
    library = like.__array_namespace__() if hasattr(like, "__array_namespace__") else library
    if not hasattr(library, "empty"):
        raise TypeError(f"{name} is of {type(like).__module__}, which has no function `empty`: pass an output array as `out`")
    return library.empty(like.shape, dtype=like.dtype if dtype is None else getattr(library, dtype, dtype))


def _y(x: Any, out: Any, out_dtype: Any, order: tuple[bool, str | None] = (False, None), gate: Any = None, gate_before: bool = False) -> Any:
    """`out`, or a new array like x of the dtype `out_dtype`. The rest: of the norm, which may not go with such a y."""
    name = None if out_dtype is None else _dtype_name(out_dtype)
    if name is not None and name not in _FLOATS:
        raise TypeError(f"out_dtype must be float32, float16 or bfloat16, got {out_dtype!r}: None is the dtype of x")
    if name is not None and out is not None and _dtype_name(getattr(out, "dtype", name)) != name:
        raise TypeError(f"out_dtype must be the dtype of out, {out.dtype}, got {name}: leave it out")
    if name is not None and name != _dtype_name(getattr(x, "dtype", name)):
        cast_order = order_of(*order)[1]
        check_pieces(Form(False, 0.0, gate_before=gate_before, cast_order=cast_order, out_dtype=name, activation="silu"), None, gate)
        if cast_order == "weight_first":
            raise TypeError("out_dtype: expected none with weight_first, which has a y of the dtype of x, got one; convert y after the call")
    return _new("x", x, name) if out is None else out


def _pair(out: Any, x: Any, residual: Any) -> tuple[Any, Any]:
    """(y, residual_out) of a norm that adds a residual: `out`, or new arrays."""
    if out is None:
        return _new("x", x), _new("residual", residual)
    if not isinstance(out, (tuple, list)) or len(out) != 2 or out[0] is None or out[1] is None:
        raise TypeError(f"out must be a pair of arrays, (y, residual_out), got {type(out).__name__}")
    return out[0], out[1]


@overload
def rms_norm(x: _X, weight: SupportsDLPack | None = None, eps: float | None = None, *, weight_offset: float = 0.0,
             cast_before_weight: bool = False, cast_order: str | None = None, out_dtype: None = None, out: _X | None = None,
             stream: int | None = None) -> _X: ...
@overload
def rms_norm(x: SupportsDLPack, weight: SupportsDLPack | None = None, eps: float | None = None, *,
             weight_offset: float = 0.0, cast_before_weight: bool = False, cast_order: str | None = None, out_dtype: Any,
             out: Any = None, stream: int | None = None) -> Any: ...
def rms_norm(x: Any, weight: SupportsDLPack | None = None, eps: float | None = None, *, weight_offset: float = 0.0,
             cast_before_weight: bool = False, cast_order: str | None = None, out_dtype: Any = None, out: Any = None,
             stream: int | None = None) -> Any:
    """`x / sqrt(mean(x**2, -1) + eps) * (weight + weight_offset)`, in `out` or a new array; `out=x`
    is in place.

    x, out: (..., cols). weight: (cols); ones if None.
    cast_before_weight: round the normalized value to x's dtype before the weight multiplies it, as
    Llama does. cast_order: the order of roundings by name, "at_store", "before_weight", "rstd_first"
    (DeepSeek-V4) or "weight_first" (Muse Spark); None is as cast_before_weight says.
    out_dtype: the dtype of a new array, None for that of x. An `out` has its own.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x = np.array([[6.0, 8.0, 0.0, 0.0]], np.float32)
    >>> weight = np.array([5.0, 10.0, 1.0, 1.0], np.float32)
    >>> arrays.rms_norm(x, weight, 0.0).round(3).tolist()
    [[6.0, 16.0, 0.0, 0.0]]
    """
    out = _y(x, out, out_dtype, (cast_before_weight, cast_order))
    forward("rms_norm", eps, x=x, y=out, weight=weight, weight_offset=weight_offset, cast_before_weight=cast_before_weight,
            cast_order=cast_order, stream=stream)
    return out


@overload
def layer_norm(x: _X, weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = None, eps: float | None = None, *,
               out_dtype: None = None, out: _X | None = None, stream: int | None = None) -> _X: ...
@overload
def layer_norm(x: SupportsDLPack, weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = None,
               eps: float | None = None, *, out_dtype: Any, out: Any = None, stream: int | None = None) -> Any: ...
def layer_norm(x: Any, weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = None, eps: float | None = None, *,
               out_dtype: Any = None, out: Any = None, stream: int | None = None) -> Any:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension, in `out` or a new array; `out=x` is in place.

    x, out: (..., cols). weight, bias: (cols); ones and zeros if None. out_dtype: as in `rms_norm`.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x = np.array([[1.0, 3.0]], np.float32)
    >>> arrays.layer_norm(x, bias=np.array([0.0, 7.0], np.float32), eps=0.0, out=x) is x
    True
    >>> x.tolist()
    [[-1.0, 8.0]]
    """
    out = _y(x, out, out_dtype)
    forward("layer_norm", eps, x=x, y=out, weight=weight, bias=bias, stream=stream)
    return out


def add_rms_norm(x: _X, residual: _H, weight: SupportsDLPack | None = None, eps: float | None = None, *, weight_offset: float = 0.0,
                 cast_before_weight: bool = False, out: tuple[_X, _H] | None = None, stream: int | None = None) -> tuple[_X, _H]:
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = rms_norm(h).

    In place: `out=(x, residual)`.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, residual = np.array([[5.0, 0.0]], np.float32), np.array([[0.0, 5.0]], np.float32)
    >>> y, h = arrays.add_rms_norm(x, residual, eps=0.0)
    >>> y.tolist(), h.tolist()
    ([[1.0, 1.0]], [[5.0, 5.0]])
    """
    y, h = _pair(out, x, residual)
    forward("rms_norm", eps, x=x, residual=residual, y=y, residual_out=h, weight=weight, weight_offset=weight_offset,
            cast_before_weight=cast_before_weight, stream=stream)
    return y, h


def add_layer_norm(x: _X, residual: _H, weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = None,
                   eps: float | None = None, *, out: tuple[_X, _H] | None = None, stream: int | None = None) -> tuple[_X, _H]:
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = layer_norm(h).

    In place: `out=(x, residual)`.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, residual = np.array([[1.0, 1.0]], np.float32), np.array([[0.0, 2.0]], np.float32)
    >>> y, h = arrays.add_layer_norm(x, residual, eps=0.0)
    >>> y.tolist(), h.tolist()
    ([[-1.0, 1.0]], [[1.0, 3.0]])
    """
    y, h = _pair(out, x, residual)
    forward("layer_norm", eps, x=x, residual=residual, y=y, residual_out=h, weight=weight, bias=bias, stream=stream)
    return y, h


def rms_norm_add(x: SupportsDLPack, residual: _H, weight: SupportsDLPack | None = None, eps: float | None = None, *,
                 weight_offset: float = 0.0, cast_before_weight: bool = False, out: _H | None = None, stream: int | None = None) -> _H:
    """`h = residual + rms_norm(x)`, rounded once, to the residual's dtype.

    In place: `out=residual`.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, residual = np.array([[3.0, -3.0]], np.float32), np.array([[1.0, 3.0]], np.float32)
    >>> arrays.rms_norm_add(x, residual, eps=0.0).tolist()
    [[2.0, 2.0]]
    """
    out = _new("residual", residual) if out is None else out
    forward("rms_norm", eps, x=x, residual=residual, y=None, residual_out=out, weight=weight, residual_after=True,
            weight_offset=weight_offset, cast_before_weight=cast_before_weight, stream=stream)
    return out


def layer_norm_add(x: SupportsDLPack, residual: _H, weight: SupportsDLPack | None = None, bias: SupportsDLPack | None = None,
                   eps: float | None = None, *, out: _H | None = None, stream: int | None = None) -> _H:
    """`h = residual + layer_norm(x)`, rounded once, to the residual's dtype.

    In place: `out=residual`.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, residual = np.array([[1.0, 3.0]], np.float32), np.array([[2.0, 2.0]], np.float32)
    >>> arrays.layer_norm_add(x, residual, eps=0.0, out=residual) is residual
    True
    >>> residual.tolist()
    [[1.0, 3.0]]
    """
    out = _new("residual", residual) if out is None else out
    forward("layer_norm", eps, x=x, residual=residual, y=None, residual_out=out, weight=weight, bias=bias, residual_after=True,
            stream=stream)
    return out


def rms_norm_add_rms_norm(x: _X, residual: _H, weight: SupportsDLPack | None = None, next_weight: SupportsDLPack | None = None,
                          eps: float | None = None, *, weight_offset: float = 0.0, cast_before_weight: bool = False,
                          out: tuple[_X, _H] | None = None, stream: int | None = None) -> tuple[_X, _H]:
    """(y, h): h of `rms_norm_add`, and y, the RMS norm of h by `next_weight`.

    The residual in place: `out=(y, residual)`. x is not overwritten.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, residual = np.array([[3.0, -3.0]], np.float32), np.array([[1.0, 3.0]], np.float32)
    >>> y, h = arrays.rms_norm_add_rms_norm(x, residual, None, np.array([4.0, 5.0], np.float32), 0.0)
    >>> y.tolist(), h.tolist()
    ([[4.0, 5.0]], [[2.0, 2.0]])
    """
    y, h = _pair(out, x, residual)
    forward("rms_norm", eps, x=x, residual=residual, y=y, residual_out=h, weight=weight, next_weight=next_weight, residual_after=True,
            weight_offset=weight_offset, cast_before_weight=cast_before_weight, stream=stream)
    return y, h


@overload
def rms_norm_gated(x: _X, gate: SupportsDLPack | None = None, weight: SupportsDLPack | None = None, eps: float | None = None,
                   *, bias: SupportsDLPack | None = None, activation: str = "silu", norm_before_gate: bool = True,
                   groups: int = 1, weight_offset: float = 0.0, cast_before_weight: bool = False,
                   cast_order: str | None = None, out_dtype: None = None, out: _X | None = None, stream: int | None = None) -> _X: ...
@overload
def rms_norm_gated(x: SupportsDLPack, gate: SupportsDLPack | None = None, weight: SupportsDLPack | None = None,
                   eps: float | None = None, *, bias: SupportsDLPack | None = None, activation: str = "silu",
                   norm_before_gate: bool = True, groups: int = 1, weight_offset: float = 0.0,
                   cast_before_weight: bool = False, cast_order: str | None = None, out_dtype: Any, out: Any = None,
                   stream: int | None = None) -> Any: ...
def rms_norm_gated(x: Any, gate: SupportsDLPack | None = None, weight: SupportsDLPack | None = None, eps: float | None = None, *,
                   bias: SupportsDLPack | None = None, activation: str = "silu", norm_before_gate: bool = True, groups: int = 1,
                   weight_offset: float = 0.0, cast_before_weight: bool = False, cast_order: str | None = None, out_dtype: Any = None,
                   out: Any = None, stream: int | None = None) -> Any:
    """`(rms_norm(x) + bias) * activation(gate)`, or with norm_before_gate=False
    `rms_norm(x * activation(gate)) + bias`, rounded once; `out=x` is in place.

    gate: the shape of x and the dtype of y; None for a norm without one. activation: "silu" or "sigmoid".
    groups: the number of groups of columns, each normalized by itself. The weight runs over all.
    cast_before_weight: the norm is rounded before the weight multiplies it, and again before the gate
    does, as in Qwen3-Next. cast_order, out_dtype: as in `rms_norm`.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> x, gate = np.array([[3.0, -3.0]], np.float32), np.zeros((1, 2), np.float32)
    >>> arrays.rms_norm_gated(x, gate, eps=0.0, activation="sigmoid").tolist()
    [[0.5, -0.5]]
    """
    out = _y(x, out, out_dtype, (cast_before_weight, cast_order), gate, not norm_before_gate)
    forward("rms_norm", eps, x=x, y=out, weight=weight, bias=bias, gate=gate, activation=activation, gate_before=not norm_before_gate,
            groups=groups, weight_offset=weight_offset, cast_before_weight=cast_before_weight, cast_order=cast_order, stream=stream)
    return out


@overload
def l2_norm(x: _X, weight: SupportsDLPack | None = None, eps: float = 1e-6, *, groups: int = 1, clamped: bool = False,
            weight_offset: float = 0.0, cast_order: str | None = None, out_dtype: None = None, out: _X | None = None,
            stream: int | None = None) -> _X: ...
@overload
def l2_norm(x: SupportsDLPack, weight: SupportsDLPack | None = None, eps: float = 1e-6, *, groups: int = 1,
            clamped: bool = False, weight_offset: float = 0.0, cast_order: str | None = None, out_dtype: Any,
            out: Any = None, stream: int | None = None) -> Any: ...
def l2_norm(x: Any, weight: SupportsDLPack | None = None, eps: float = 1e-6, *, groups: int = 1, clamped: bool = False,
            weight_offset: float = 0.0, cast_order: str | None = None, out_dtype: Any = None, out: Any = None,
            stream: int | None = None) -> Any:
    """`x / sqrt(sum(x**2, -1) + eps) * (weight + weight_offset)`, as in flash-linear-attention; `out=x` is in place.

    clamped: `x / max(sqrt(sum(x**2)), eps)`, as `torch.nn.functional.normalize`; eps is 0, or from
    2**-63 to 2**63. groups: the number of groups of columns, such as the heads of a row, each
    normalized by itself. The rest is as in `rms_norm`.

    >>> import numpy as np
    >>> from rmsnorm import arrays
    >>> print(arrays.l2_norm(np.array([[3.0, 4.0]], np.float32), eps=0.0))
    [[0.6 0.8]]
    """
    norm: Any = l2_name(clamped)
    out = _y(x, out, out_dtype, (False, cast_order))
    forward(norm, eps, x=x, y=out, weight=weight, groups=groups, weight_offset=weight_offset, cast_order=cast_order, stream=stream)
    return out
