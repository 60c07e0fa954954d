"""Norms of NumPy, CuPy and other arrays that speak DLPack, on the CPU or on CUDA. Nothing is copied.

Arrays are float32, float16 or bfloat16 (of `ml_dtypes` too), of any rank; a norm is over the last dimension. Weight, bias and residual
have the dtype of x or float32. Rows may be apart, as in a slice of a fused QKV buffer. Definitions, roundings and error bounds are in
rmsnorm-spec/math.md, equations (1) to (12).

On CUDA a call is enqueued on `stream`, the address of a stream (by default the legacy default stream), and returns; the caller orders
other streams after it and keeps the arrays until it is done. For gradients by autograd see `rmsnorm.torch` and `rmsnorm.jax`.

Errors: ValueError for arguments that do not go together, NotImplementedError for dtypes and devices that there are no kernels for,
BufferError for an output that is read-only, RuntimeError from a device. Nothing is written then.
"""

import math
import sys

from . import _native

__all__ = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "forward", "backward"]


def _lent(array):
    """An array as the native half takes it: NumPy has no way to hand over a bfloat16 but as integers."""
    if str(array.dtype) == "bfloat16" and hasattr(array, "__array_interface__"):
        return array.view("int16"), True
    return array, False


def _run(norm, eps, weight_offset, cast_before_weight, tensors, stream):
    for name in ("y", "residual_out", "mean", "rstd", "dx", "dweight", "dbias", "dresidual"):
        # Its arrays are immutable, which its way of lending them does not tell.
        if type(tensors.get(name)).__module__.partition(".")[0] in ("jax", "jaxlib"):
            raise BufferError(f"{name} is written, and JAX's arrays cannot be; see rmsnorm.jax")
    lent = {name: _lent(array) for name, array in tensors.items() if array is not None}
    _native.run_arrays(norm, eps, weight_offset, cast_before_weight, lent, stream)


def forward(norm, eps, *, x, y, weight=None, bias=None, residual=None, residual_out=None, mean=None, rstd=None,
            weight_offset=0.0, cast_before_weight=False, stream=None):
    """Writes y, and of residual_out, mean and rstd what is given. norm: "rms_norm" or "layer_norm".

    x, y, residual, residual_out: (..., cols). weight, bias: (cols). mean, rstd: (...), float32.
    """
    tensors = dict(x=x, residual=residual, weight=weight, bias=bias, y=y, residual_out=residual_out, mean=mean, rstd=rstd)
    _run(norm, eps, weight_offset, cast_before_weight, tensors, stream)


def backward(norm, *, dy, x, rstd, dx, mean=None, weight=None, dresidual_out=None, dweight=None, dbias=None, dresidual=None,
             weight_offset=0.0, stream=None):
    """Writes dx, and of dweight, dbias and dresidual what is given. x is what was normalized: residual_out where a residual was added.

    dy, x, dx, dresidual_out, dresidual: (..., cols). weight, dweight, dbias: (cols). mean, rstd: (...), float32.
    """
    tensors = dict(dy=dy, x=x, weight=weight, mean=mean, rstd=rstd, dresidual_out=dresidual_out, dx=dx, dweight=dweight,
                   dbias=dbias, dresidual=dresidual)
    _run(norm, 0.0, weight_offset, False, tensors, stream)


def _new(like):
    """A new array of that shape and dtype with dense rows, by the library whose array it is."""
    library = sys.modules[type(like).__module__.partition(".")[0]]
    if not hasattr(library, "empty"):
        raise TypeError(f"{library.__name__} has no function `empty`: use rmsnorm.arrays.forward, with an output of yours")
    if library.__name__ == "torch":
        return library.empty(like.shape, dtype=like.dtype, device=like.device)
    return library.empty(like.shape, dtype=like.dtype)


def rms_norm(x, weight=None, eps=None, *, weight_offset=0.0, cast_before_weight=False, out=None, stream=None):
    """`x / sqrt(mean(x**2, -1) + eps) * (weight + weight_offset)`, in `out` or a new array. eps has no default.

    cast_before_weight: round the normalized value to x's dtype before it is multiplied with the weight, as Llama does.
    """
    out = _new(x) if out is None else out
    forward("rms_norm", _eps(eps), x=x, y=out, weight=weight, weight_offset=weight_offset,
            cast_before_weight=cast_before_weight, stream=stream)
    return out


def layer_norm(x, weight=None, bias=None, eps=None, *, out=None, stream=None):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension, in `out` or a new array. eps has no default."""
    out = _new(x) if out is None else out
    forward("layer_norm", _eps(eps), x=x, y=out, weight=weight, bias=bias, stream=stream)
    return out


def add_rms_norm(x, residual, weight=None, eps=None, *, weight_offset=0.0, cast_before_weight=False, stream=None):
    """(y, h): h = x + residual, rounded to the residual's dtype, and y its RMS norm. eps has no default."""
    y, h = _new(x), _new(residual)
    forward("rms_norm", _eps(eps), x=x, residual=residual, y=y, residual_out=h, weight=weight, weight_offset=weight_offset,
            cast_before_weight=cast_before_weight, stream=stream)
    return y, h


def add_layer_norm(x, residual, weight=None, bias=None, eps=None, *, stream=None):
    """(y, h): h = x + residual, rounded to the residual's dtype, and y its layer norm. eps has no default."""
    y, h = _new(x), _new(residual)
    forward("layer_norm", _eps(eps), x=x, residual=residual, y=y, residual_out=h, weight=weight, bias=bias, stream=stream)
    return y, h


def _eps(eps):
    if eps is None or math.isnan(eps):
        raise TypeError("eps is missing: models differ, so there is no default")
    return eps
