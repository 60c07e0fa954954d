"""The same norms with jax.numpy: for devices and dtypes without kernels, for exports, and for
second and higher derivatives."""

import functools

import jax
import jax.numpy as jnp

from .._norm import NORMS


def _wide(*arrays):
    """The arrays in float64 if one is, otherwise in float32; None stays None. Explicit casts
    satisfy strict dtype promotion."""
    is_double = any(array is not None and array.dtype == jnp.float64 for array in arrays)
    return [None if array is None else array.astype(jnp.float64 if is_double else jnp.float32) for array in arrays]


def _in_groups(norm, rows):
    """Rows with a dimension for the groups of columns, if there are several."""
    return rows if norm.groups == 1 else rows.reshape(*rows.shape[:-1], norm.groups, rows.shape[-1] // norm.groups)


def _over_columns(norm, rows):
    """The average, of L2 norms the sum, of each row or of each group of its columns: one value per
    statistic."""
    rows = _in_groups(norm, rows)
    return rows.mean(-1) if norm.l2 is None else rows.sum(-1)


def _spread(norm, statistics, like):
    """Statistics for every column of rows like these."""
    statistics = statistics[..., None]
    return statistics if norm.groups == 1 else jnp.broadcast_to(statistics, _in_groups(norm, like).shape).reshape(like.shape)


def _activated(norm, gate):
    """The activation of a gate and its derivative: equation (19)."""
    sigmoid, rest = jax.nn.sigmoid(gate), jax.nn.sigmoid(-gate)
    return (gate * sigmoid, sigmoid * (1 + gate * rest)) if norm.activation == "silu" else (sigmoid, sigmoid * rest)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(rows, dtype):
    """Rows that are rounded to a dtype. The rounding is part of the value and not of the derivatives."""
    return rows.astype(dtype).astype(rows.dtype)


@_rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return _rounded(primals[0], dtype), tangents[0]


def _is_first(norm):
    """Whether the weight multiplies x, and not the normalized rows."""
    return norm.cast_order == "weight_first"


def _into(norm, rows, gate, weight, dtype):
    """What is normalized, of wide rows: their product with a gate before the norm, or that with a
    weight before it, rounded to `dtype`, that of x: equations (19) and (24)."""
    if gate is not None and norm.gate_before:
        return rows * _activated(norm, gate)[0]
    return _rounded(_affine(norm, rows, weight, None), dtype) if _is_first(norm) else rows


def statistics(norm, rows, gate=None, weight=None):
    """(mean, rstd) of the rows, which a gate or a weight before the norm multiplies first; the mean
    is None except for a layer norm."""
    dtype = rows.dtype
    return _statistics(norm, _into(norm, *_wide(rows, gate, weight), dtype))


def _statistics(norm, rows):
    mean = _over_columns(norm, rows) if norm.is_layer else None
    centred = rows if mean is None else rows - _spread(norm, mean, rows)
    total, least = _over_columns(norm, jnp.square(centred)), norm.eps * norm.eps
    # Not a maximum, whose derivative is a half of each where both are equal.
    return mean, jax.lax.rsqrt(jnp.where(total <= least, least, total) if norm.l2 == NORMS[3] else total + norm.eps)


def _normalized(norm, rows, mean, rstd):
    return (rows if mean is None else rows - _spread(norm, mean, rows)) * _spread(norm, rstd, rows)


def _affine(norm, x_hat, weight, bias):
    y = x_hat if weight is None else x_hat * (weight + norm.weight_offset)
    return y if bias is None else y + bias


def forward(norm, x, residual, gate, weight, bias, next_weight=None, next_bias=None):
    """The results of `calls.forward`. 16-bit dtypes are computed in float32."""
    dtype = norm.dtype_of_y(x.dtype)
    wider = dtype if weight is None or weight.dtype.itemsize <= dtype.itemsize else weight.dtype
    rounds_rstd = norm.cast_order == "rstd_first"
    rounds = norm.cast_before_weight or rounds_rstd
    rows, stream, gate, weight, bias, next_weight, next_bias = _wide(x, residual, gate, weight, bias, next_weight, next_bias)
    act = None if gate is None else _activated(norm, gate)[0]

    def of_rows(rows, weight, bias):
        rows = _into(norm, rows, gate, weight, x.dtype)
        mean, rstd = _statistics(norm, rows)
        x_hat = _normalized(norm, rows, mean, _rounded(rstd, dtype) if rounds_rstd else rstd)
        if rounds:
            x_hat = _rounded(x_hat, dtype)
        y = _affine(norm, x_hat, None if _is_first(norm) else weight, bias)
        if act is not None and not norm.gate_before:
            y = (_rounded(y, wider) if rounds else y) * act
        return y, mean, rstd

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
    return y.astype(dtype) if norm.has_y() else None, h, *of_first, *of_next


def _sum(terms):
    """The sum of the terms that are not None."""
    terms = [term for term in terms if term is not None]
    return sum(terms[1:], terms[0])


def tangent(norm, gradient, dtype, h, gate, weight, bias, mean, rstd, dx, dresidual, dgate, dweight, dbias):
    """(dy, dh), the tangents of y and h, for tangents of the inputs (None for zero); dh is None if
    x and the residual have none.

    The Jacobian of the normalized row is symmetric, so `gradient`, a `backward` without a weight and
    a gate, also computes the forward derivative. dtype: of y. h: the rows of the norm, before a gate
    or a weight multiplies them. bias: only with a gate after the norm that has a tangent.
    """
    rows, z, weight, bias, *changes = _wide(h, gate, weight, bias, dx, dresidual, dgate, dweight, dbias)
    *of_h, dgate, dweight, dbias = changes
    dh = _sum(of_h).astype(h.dtype) if any(change is not None for change in of_h) else None
    act, slope = (None, None) if gate is None else _activated(norm, z)

    def gated(rows, drows):
        """The tangent of the product of these rows with the activation; None if it is zero."""
        terms = None if drows is None else drows.astype(act.dtype) * act, None if dgate is None else rows * slope * dgate
        return _sum(terms) if any(term is not None for term in terms) else None

    # The rows and their tangent, as they enter the norm.
    into, dinto = h, dh
    if gate is not None and norm.gate_before:
        into, dinto = rows * act, gated(rows, dh)
    elif _is_first(norm):
        into = _into(norm, rows, None, weight, h.dtype)
        changes = None if dh is None else _affine(norm, dh.astype(rows.dtype), weight, None), None if dweight is None else rows * dweight
        dinto = _sum(changes) if any(change is not None for change in changes) else None
        weight = dweight = None
    elif norm.out_dtype is not None and dtype.itemsize > h.dtype.itemsize:
        # The tangent of a wider y is not rounded to the dtype of x.
        into, dinto = rows, None if dh is None else dh.astype(rows.dtype)
    x_hat = _normalized(norm, into.astype(rows.dtype), mean, rstd)
    terms = []
    if dinto is not None:
        plain, needs = norm._replace(activation=None, gate_before=False, cast_order=None, out_dtype=None), (False,) * 4
        through = gradient(plain, dinto, into, None, None, None, mean, rstd, None, needs=needs, dtypes=(jnp.float32, into.dtype))[0]
        terms.append(_affine(norm, through.astype(rows.dtype), weight, None))
    if dweight is not None:
        terms.append(x_hat * dweight)
    if dbias is not None:
        terms.append(jnp.broadcast_to(dbias, h.shape))
    dy = _sum(terms) if terms else None
    if gate is not None and not norm.gate_before:
        dy = gated(_affine(norm, x_hat, weight, bias), dy)
    return dy.astype(dtype), dh


def backward(norm, dy, x, gate, weight, bias, mean, rstd, dresidual_out, *, needs, dtypes):
    """The results of `calls.backward`: equations (7) to (12), (20) to (23) and (25)."""
    dv, rows, z, wide_weight, wide_bias, arriving = _wide(dy, x, gate, weight, bias, dresidual_out)
    act, slope = (None, None) if gate is None else _activated(norm, z)
    into, after = _into(norm, rows, z, wide_weight, x.dtype), None if _is_first(norm) else wide_weight
    x_hat, dgate = _normalized(norm, into, mean, rstd), None
    if gate is not None and not norm.gate_before:
        dv, dgate = dv * act, dv * _affine(norm, x_hat, after, wide_bias) * slope
    wdy = _affine(norm, dv, after, None)
    over = lambda rows: _spread(norm, _over_columns(norm, rows), rows)  # noqa: E731
    along = x_hat * over(wdy * x_hat)
    if norm.l2 == NORMS[3]:
        # The divisor of a clamped row is a constant.
        along = jnp.where(_spread(norm, rstd, rows) * norm.eps >= 1 - 2.0**-20, 0, along)
    dx = wdy - along
    dx = _spread(norm, rstd, rows) * (dx if mean is None else dx - over(wdy))
    dx = dx if arriving is None else dx + arriving
    dresidual, dweight = dx, dv * x_hat
    if gate is not None and norm.gate_before:
        dx, dgate = dx * act, dx * rows * slope
    elif _is_first(norm):
        dx, dweight = _affine(norm, dx, wide_weight, None), dx * rows
    need_dgate, need_dweight, need_dbias, need_dresidual = needs
    parameter, stream = dtypes
    batch = tuple(range(x.ndim - 1))
    return (
        dx.astype(dy.dtype if norm.out_dtype is None else x.dtype),
        dgate.astype(dy.dtype) if need_dgate else None,
        dweight.sum(batch).astype(parameter) if need_dweight else None,
        dv.sum(batch).astype(parameter) if need_dbias else None,
        dresidual.astype(stream) if need_dresidual else None,
    )
