"""Replacements for the norms of `flax.nnx`, computed with rmsnorm's kernels. Arguments, parameters
and checkpoints are the same.

>>> from flax import nnx
>>> import rmsnorm.jax.nnx as rn
>>> isinstance(rn.RMSNorm(8, rngs=nnx.Rngs(0)), nnx.RMSNorm)
True
"""

import flax.nnx
import jax

from .functions import dtype_of, l2_norm, layer_norm, rms_norm, rms_norm_gated

__all__ = ["RMSNorm", "LayerNorm", "RMSNormGated", "L2Norm"]


def _is_of_rows(module, x, mask):
    """Whether a norm is over the whole last dimension, on one device, without a mask. Flax computes
    the others."""
    last = (-1, (-1,), [-1], x.ndim - 1, (x.ndim - 1,))
    return mask is None and module.reduction_axes in last and module.feature_axes in last and module.axis_name is None


def _check_rows(module, x):
    """Raises NotImplementedError for a norm that Flax does not compute either."""
    if not _is_of_rows(module, x, None):
        raise NotImplementedError(f"reduction_axes, feature_axes, axis_name: expected -1, -1 and None, got {module.reduction_axes}, "
                                  f"{module.feature_axes} and {module.axis_name}; {type(module).__name__} is over the last dimension")


def _value(parameter):
    return None if parameter is None else parameter[...]


class RMSNorm(flax.nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, with the same arguments. The result has the same dtype as Flax's, and is
    rounded once.

    `use_fast_variance` has no effect: squares are summed in float32. Flax's code runs for a mask,
    for axes other than the last one, and across devices (`axis_name`).

    >>> from flax import nnx
    >>> import jax.numpy as jnp, rmsnorm.jax.nnx as rn
    >>> print(rn.RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([1.0, 7.0])))
    [0.2 1.4]
    """

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        if not _is_of_rows(self, x, mask):
            return super().__call__(x, mask=mask)
        x, scale = self.promote_dtype((x, _value(self.scale)), dtype=self.dtype)
        return rms_norm(x, scale, self.epsilon)


class LayerNorm(flax.nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, with the same arguments. Dtypes and exceptions are as in `RMSNorm`.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, rmsnorm.jax.nnx as rn
    >>> print(rn.LayerNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([1.0, 7.0])))
    [-1.  1.]
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        if not _is_of_rows(self, x, mask):
            return super().__call__(x, mask=mask)
        x, scale, bias = self.promote_dtype((x, _value(self.scale), _value(self.bias)), dtype=self.dtype)
        return layer_norm(x, scale, bias, self.epsilon)


class RMSNormGated(flax.nnx.RMSNorm):
    """`y = norm(x, gate)`: `rms_norm_gated`, with its options, and the other arguments and the
    parameters of `flax.nnx.RMSNorm`. The dtype of the result is that of Flax's norm of x and the gate.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, rmsnorm.jax.nnx as rn
    >>> norm = rn.RMSNormGated(2, epsilon=0.0, activation="sigmoid", rngs=nnx.Rngs(0))
    >>> print(norm(jnp.array([3.0, -3.0]), jnp.zeros(2)))
    [ 0.5 -0.5]
    """

    def __init__(self, num_features: int, *, activation: str = "silu", norm_before_gate: bool = True, groups: int = 1,
                 cast_before_weight: bool = False, **options):
        super().__init__(num_features, **options)
        self.activation, self.norm_before_gate, self.groups = activation, norm_before_gate, groups
        self.cast_before_weight = cast_before_weight

    def __call__(self, x: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """y, with the shape of x. Without a gate, the norm alone."""
        _check_rows(self, x)
        x, gate, scale = self.promote_dtype((x, gate, _value(self.scale)), dtype=self.dtype)
        return rms_norm_gated(x, gate, scale, self.epsilon, activation=self.activation, norm_before_gate=self.norm_before_gate,
                              groups=self.groups, cast_before_weight=self.cast_before_weight)


class L2Norm(flax.nnx.RMSNorm):
    """`l2_norm`, with its options, and the other arguments and the parameters of
    `flax.nnx.RMSNorm`. It has no scale by default. The dtype of the result is that of Flax's norm, or out_dtype.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, rmsnorm.jax.nnx as rn
    >>> print(rn.L2Norm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([3.0, 4.0])))
    [0.6 0.8]
    """

    def __init__(self, num_features: int, *, epsilon: float = 1e-6, use_scale: bool = False, groups: int = 1, clamped: bool = False,
                 weight_offset: float = 0.0, cast_order: str | None = None, out_dtype=None, **options):
        super().__init__(num_features, epsilon=epsilon, use_scale=use_scale, **options)
        self.groups, self.clamped, self.weight_offset, self.cast_order = groups, clamped, weight_offset, cast_order
        self.out_dtype = dtype_of(out_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """y, with the shape of x."""
        _check_rows(self, x)
        x, scale = self.promote_dtype((x, _value(self.scale)), dtype=self.dtype)
        return l2_norm(x, scale, self.epsilon, groups=self.groups, clamped=self.clamped, weight_offset=self.weight_offset,
                       cast_order=self.cast_order, out_dtype=self.out_dtype)
