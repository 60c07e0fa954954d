"""The same norms with jax.numpy: what runs where there is no kernel."""

import jax
import jax.numpy as jnp


def _wide(array):
    return None if array is None else array.astype(jnp.promote_types(array.dtype, jnp.float32))


def forward(norm, x, residual, weight, bias):
    """(y, h, mean, rstd) of a `Norm`; None for what it has not. Any float dtype; those of 16 bits are computed in float32."""
    h = None if residual is None else (_wide(x) + _wide(residual)).astype(residual.dtype)
    rows, weight, bias = _wide(x if h is None else h), _wide(weight), _wide(bias)
    mean = rows.mean(-1) if norm.is_layer else None
    centred = rows if mean is None else rows - mean[..., None]
    rstd = jax.lax.rsqrt(jnp.square(centred).mean(-1) + norm.eps)
    x_hat = centred * rstd[..., None]
    if norm.cast_before_weight:
        x_hat = x_hat.astype(x.dtype).astype(rows.dtype)
    y = x_hat if weight is None else x_hat * (weight + norm.weight_offset)
    return (y if bias is None else y + bias).astype(x.dtype), h, mean, rstd


def backward(norm, dy, x, weight, mean, rstd, dresidual_out, needs, dtypes):
    """(dx, dweight, dbias, dresidual); None for what is not needed. dtypes: of parameters and of the residual."""
    wide_dy, rstd = _wide(dy), rstd[..., None]
    x_hat = (_wide(x) if mean is None else _wide(x) - mean[..., None]) * rstd
    wdy = wide_dy if weight is None else wide_dy * (_wide(weight) + norm.weight_offset)
    dx = wdy - x_hat * (wdy * x_hat).mean(-1, keepdims=True)
    dx = rstd * (dx if mean is None else dx - wdy.mean(-1, keepdims=True))
    dx = dx if dresidual_out is None else dx + _wide(dresidual_out)
    need_dweight, need_dbias, need_dresidual = needs
    parameter, stream = dtypes
    batch = tuple(range(x.ndim - 1))
    return (
        dx.astype(dy.dtype),
        (wide_dy * x_hat).sum(batch).astype(parameter) if need_dweight else None,
        wide_dy.sum(batch).astype(parameter) if need_dbias else None,
        dx.astype(stream) if need_dresidual else None,
    )
