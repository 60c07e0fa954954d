"""The functions, and their gradients."""

import functools

import jax
import jax.numpy as jnp

from . import calls, partition, reference
from .calls import Norm

_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(norm, how, x, residual, weight, bias):
    """(y, h); h is None without a residual. how: `calls` or `partition`."""
    return tuple(how.forward(norm, x, residual, weight, bias)[:2])


def _norm_forward(norm, how, x, residual, weight, bias):
    y, h, mean, rstd = how.forward(norm, x, residual, weight, bias)
    # Of the bias only the dtype is needed.
    kept = x if residual is None else h, weight, mean, rstd
    return (y, h), (kept, None if bias is None else bias[:0])


def _norm_backward(norm, how, saved, gradients):
    (x, weight, mean, rstd), bias = saved
    dy, dresidual_out = gradients
    adds = dresidual_out is not None
    parameter = weight if weight is not None else bias
    dtypes = jnp.float32 if parameter is None else parameter.dtype, x.dtype
    # The gradient of an f32 stream is rounded to it, and not to the dtype of x.
    is_wider = adds and x.dtype != dy.dtype
    needs = weight is not None, bias is not None, is_wider
    dx, dweight, dbias, dresidual = how.backward(norm, dy, x, weight, mean, rstd, dresidual_out, needs, dtypes)
    return dx, (dresidual if is_wider else dx) if adds else None, dweight, dbias


_norm.defvjp(_norm_forward, _norm_backward)


def _check(x, residual, weight, bias):
    """Refuses what does not go together."""
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension, got a scalar")
    for name, array, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:]), ("bias", bias, x.shape[-1:])):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: expected the shape {shape}, got {array.shape}")


def _takes(x, residual, weight, bias):
    """Whether there are kernels for arrays of these dtypes."""
    good = (x.dtype, jnp.dtype(jnp.float32))
    parameters = {array.dtype for array in (weight, bias) if array is not None}
    stream = residual is None or residual.dtype in good
    return x.dtype in _DTYPES and x.size > 0 and stream and len(parameters) <= 1 and all(dtype in good for dtype in parameters)


def _varying(array, axes):
    """An array that is the same on every device as one that varies over axes of `shard_map`: its gradient is then their sum."""
    missing = tuple(axes - calls.manual_axes(array)) if array is not None else ()
    if not missing:
        return array
    cast = getattr(jax.lax, "pcast", None)
    return cast(array, missing, to="varying") if cast else jax.lax.pvary(array, missing)


def _apply(norm, x, residual, weight, bias, is_split):
    arrays = [None if array is None else jnp.asarray(array) for array in (x, residual, weight, bias)]
    _check(*arrays)
    if not _takes(*arrays):
        return reference.forward(norm, *arrays)[:2]
    axes = frozenset().union(*(calls.manual_axes(array) for array in arrays if array is not None))
    arrays = [_varying(array, axes) for array in arrays]
    return _norm(norm, calls if axes or not is_split else partition, *arrays)


def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, cast_before_weight=False, partition=True):
    """`x / sqrt(mean(x**2, -1) + eps) * (weight + weight_offset)`: equations (1) to (6), gradients (7) to (12).

    x: (..., cols). weight: (cols); ones if None. The result has the shape and dtype of x. It is computed in float32 and rounded once;
    with `cast_before_weight` the normalized value is rounded to the dtype of x before it is multiplied with the weight, as Llama does.
    `weight_offset` 1 is Gemma's `1 + w`. eps, weight_offset and cast_before_weight are Python's numbers, not traced.
    partition: let jit's automatic sharding split the rows. False where `custom_partitioning` does not work, as on some TPUs.
    ValueError if shapes do not go together.
    """
    norm = Norm(False, float(eps), float(weight_offset), bool(cast_before_weight))
    return _apply(norm, x, None, weight, None, partition)[0]


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, partition=True):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension: equations (1) to (6), gradients (7) to (12).

    x: (..., cols). weight, bias: (cols). Otherwise as `rms_norm`.
    """
    return _apply(Norm(True, float(eps)), x, None, weight, bias, partition)[0]


def add_rms_norm(x, residual, weight=None, eps=1e-6, *, weight_offset=0.0, cast_before_weight=False, partition=True):
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = rms_norm(h), in the dtype of x. One pass over memory.

    residual: the shape of x; its dtype or float32, the stream's. Otherwise as `rms_norm`.
    """
    norm = Norm(False, float(eps), float(weight_offset), bool(cast_before_weight))
    return _apply(norm, x, residual, weight, None, partition)


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5, *, partition=True):
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = layer_norm(h), in the dtype of x. As `add_rms_norm`."""
    return _apply(Norm(True, float(eps)), x, residual, weight, bias, partition)
