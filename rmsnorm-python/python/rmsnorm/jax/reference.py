"""The same norms with jax.numpy: for devices and dtypes without kernels, for exports, and for
second and higher derivatives."""

import jax
import jax.numpy as jnp


def _wide(*arrays):
    """The arrays in float64 if one is, otherwise in float32; None stays None. Explicit casts
    satisfy strict dtype promotion."""
    is_double = any(array is not None and array.dtype == jnp.float64 for array in arrays)
    return [None if array is None else array.astype(jnp.float64 if is_double else jnp.float32) for array in arrays]


def statistics(norm, rows):
    """(mean, rstd) of the rows; the mean is None for an RMS norm."""
    (rows,) = _wide(rows)
    mean = rows.mean(-1) if norm.is_layer else None
    centred = rows if mean is None else rows - mean[..., None]
    return mean, jax.lax.rsqrt(jnp.square(centred).mean(-1) + norm.eps)


def _normalized(rows, mean, rstd):
    return (rows if mean is None else rows - mean[..., None]) * rstd[..., None]


def forward(norm, x, residual, weight, bias, next_weight=None, next_bias=None):
    """The results of `calls.forward`. 16-bit dtypes are computed in float32."""
    rows, stream, weight, bias, next_weight, next_bias = _wide(x, residual, weight, bias, next_weight, next_bias)

    def of_rows(rows, weight, bias):
        mean, rstd = statistics(norm, rows)
        x_hat = _normalized(rows, mean, rstd)
        if norm.cast_before_weight:
            x_hat = x_hat.astype(x.dtype).astype(rows.dtype)
        y = x_hat if weight is None else x_hat * (weight + norm.weight_offset)
        return y if bias is None else y + bias, mean, rstd

    h, of_next = None, (None, None)
    if norm.residual_after:
        y, *of_first = of_rows(rows, weight, bias)
        h = (stream + y).astype(residual.dtype)
        if norm.has_next:
            y, *of_next = of_rows(h.astype(rows.dtype), next_weight, next_bias)
    else:
        if residual is not None:
            h = (rows + stream).astype(residual.dtype)
            rows = h.astype(rows.dtype)
        y, *of_first = of_rows(rows, weight, bias)
    return y.astype(x.dtype) if norm.has_y else None, h, *of_first, *of_next


def tangent(norm, gradient, dtype, h, weight, mean, rstd, dx, dresidual, dweight, dbias):
    """(dy, dh), the tangents of y and h, for tangents of the inputs (None for zero); dh is None if
    x and the residual have none.

    The Jacobian of h -> x_hat is symmetric, so `gradient`, a `backward` without a weight, also
    computes the forward derivative. dtype: of y. h: the normalized rows.
    """
    wide_h, wide_weight, wide_dx, wide_dresidual, wide_dweight, wide_dbias = _wide(h, weight, dx, dresidual, dweight, dbias)
    parts = [part for part in (wide_dx, wide_dresidual) if part is not None]
    dh = sum(parts[1:], parts[0]).astype(h.dtype) if parts else None
    terms = []
    if dh is not None:
        through = gradient(norm, dh, h, None, mean, rstd, None, (False, False, False), (jnp.float32, h.dtype))[0]
        (through,) = _wide(through)
        terms.append(through if weight is None else through * (wide_weight + norm.weight_offset))
    if wide_dweight is not None:
        terms.append(_normalized(wide_h, mean, rstd) * wide_dweight)
    if wide_dbias is not None:
        terms.append(jnp.broadcast_to(wide_dbias, h.shape))
    return sum(terms[1:], terms[0]).astype(dtype), dh


def backward(norm, dy, x, weight, mean, rstd, dresidual_out, needs, dtypes):
    """(dx, dweight, dbias, dresidual); None for gradients that are not needed. dtypes: (of the
    parameters, of the residual)."""
    wide_dy, rows, wide_weight, arriving = _wide(dy, x, weight, dresidual_out)
    x_hat = _normalized(rows, mean, rstd)
    wdy = wide_dy if weight is None else wide_dy * (wide_weight + norm.weight_offset)
    dx = wdy - x_hat * (wdy * x_hat).mean(-1, keepdims=True)
    dx = rstd[..., None] * (dx if mean is None else dx - wdy.mean(-1, keepdims=True))
    dx = dx if arriving is None else dx + arriving
    need_dweight, need_dbias, need_dresidual = needs
    parameter, stream = dtypes
    batch = tuple(range(x.ndim - 1))
    return (
        dx.astype(dy.dtype),
        (wide_dy * x_hat).sum(batch).astype(parameter) if need_dweight else None,
        wide_dy.sum(batch).astype(parameter) if need_dbias else None,
        dx.astype(stream) if need_dresidual else None,
    )
