"""Replacements for the norms of `equinox.nn`, computed with rmsnorm's kernels. Arguments and fields
are the same.

>>> import equinox, rmsnorm.jax.equinox as re
>>> isinstance(re.LayerNorm(8), equinox.nn.LayerNorm)
True
"""

import equinox
import jax

from . import functions

__all__ = ["RMSNorm", "LayerNorm", "RMSNormGated", "L2Norm"]

# The default of `state`. Not None, since None is a valid state.
_NONE = object()


def _run(norm, module, x, state):
    if x.shape != module.shape:
        raise ValueError(f"x: expected the shape {module.shape}, got {x.shape}; use jax.vmap for a batch")
    y = norm(x.reshape(-1)).reshape(x.shape)
    return y if state is _NONE else (y, state)


def _flat(parameter):
    return None if parameter is None else parameter.reshape(-1)


class RMSNorm(equinox.nn.RMSNorm):
    """`equinox.nn.RMSNorm`, with the same arguments. It normalizes all of x; use `jax.vmap` for a
    batch of rows.

    >>> import equinox, jax, jax.numpy as jnp, rmsnorm.jax.equinox as re
    >>> print(jax.vmap(re.RMSNorm(2, eps=0.0))(jnp.array([[1.0, 7.0], [7.0, 1.0]])))
    [[0.2 1.4]
     [1.4 0.2]]
    """

    def __call__(self, x: jax.Array, state: object = _NONE, *, key: jax.Array | None = None):
        def norm(row):
            return functions.normalize(functions.norm_of(False, self.eps), row, None, _flat(self.weight), _flat(self.bias))[0]

        return _run(norm, self, x, state)


class LayerNorm(equinox.nn.LayerNorm):
    """`equinox.nn.LayerNorm`, with the same arguments. It normalizes all of x; use `jax.vmap` for a
    batch of rows.

    >>> import equinox, jax, jax.numpy as jnp, rmsnorm.jax.equinox as re
    >>> print(jax.vmap(re.LayerNorm(2, eps=0.0))(jnp.array([[1.0, 7.0], [7.0, 1.0]])))
    [[-1.  1.]
     [ 1. -1.]]
    """

    def __call__(self, x: jax.Array, state: object = _NONE, *, key: jax.Array | None = None):
        return _run(lambda row: functions.layer_norm(row, _flat(self.weight), _flat(self.bias), self.eps), self, x, state)


class RMSNormGated(equinox.nn.RMSNorm):
    """`y = norm(x, gate)`: `rms_norm_gated`, with its options, and the other arguments and the fields
    of `equinox.nn.RMSNorm`. It normalizes all of x; use `jax.vmap` for a batch of rows.

    >>> import equinox, jax, jax.numpy as jnp, rmsnorm.jax.equinox as re
    >>> norm = re.RMSNormGated(2, eps=0.0, activation="sigmoid")
    >>> print(jax.vmap(norm)(jnp.array([[3.0, -3.0]]), jnp.zeros((1, 2))))
    [[ 0.5 -0.5]]
    """

    activation: str = equinox.field(static=True)
    norm_before_gate: bool = equinox.field(static=True)
    groups: int = equinox.field(static=True)
    cast_before_weight: bool = equinox.field(static=True)

    def __init__(self, shape, eps: float = 1e-5, use_weight: bool = True, use_bias: bool = False, dtype=None, *, activation: str = "silu",
                 norm_before_gate: bool = True, groups: int = 1, cast_before_weight: bool = False):
        super().__init__(shape, eps, use_weight, use_bias, dtype)
        self.activation, self.norm_before_gate, self.groups = activation, norm_before_gate, groups
        self.cast_before_weight = cast_before_weight

    def __call__(self, x: jax.Array, gate: jax.Array | None = None, *, key: jax.Array | None = None) -> jax.Array:
        """y, with the shape of x. Without a gate, the norm alone."""
        if gate is not None and gate.shape != x.shape:
            raise ValueError(f"gate: expected the shape {x.shape}, got {gate.shape}")

        def norm(row):
            return functions.rms_norm_gated(
                row, _flat(gate), _flat(self.weight), self.eps, bias=_flat(self.bias), activation=self.activation,
                norm_before_gate=self.norm_before_gate, groups=self.groups, cast_before_weight=self.cast_before_weight,
            )

        return _run(norm, self, x, _NONE)


class L2Norm(equinox.nn.RMSNorm):
    """`l2_norm`, with its options, and the other arguments and the fields of `equinox.nn.RMSNorm`.
    It has no weight by default. It normalizes all of x; use `jax.vmap` for a batch of rows.

    >>> import jax, jax.numpy as jnp, rmsnorm.jax.equinox as re
    >>> print(jax.vmap(re.L2Norm(2, eps=0.0))(jnp.array([[3.0, 4.0]])))
    [[0.6 0.8]]
    """

    groups: int = equinox.field(static=True)
    clamped: bool = equinox.field(static=True)
    weight_offset: float = equinox.field(static=True)
    cast_order: str | None = equinox.field(static=True)
    out_dtype: object = equinox.field(static=True)

    def __init__(self, shape, eps: float = 1e-6, use_weight: bool = False, use_bias: bool = False, dtype=None, *, groups: int = 1,
                 clamped: bool = False, weight_offset: float = 0.0, cast_order: str | None = None, out_dtype=None):
        super().__init__(shape, eps, use_weight, use_bias, dtype)
        self.groups, self.clamped, self.weight_offset, self.cast_order = groups, clamped, weight_offset, cast_order
        self.out_dtype = functions.dtype_of(out_dtype)

    def __call__(self, x: jax.Array, state: object = _NONE, *, key: jax.Array | None = None):
        norm = functions.Norm.l2(self.eps, clamped=self.clamped, weight_offset=self.weight_offset, cast_order=self.cast_order,
                                 out_dtype=self.out_dtype).groups(self.groups)
        return _run(lambda row: norm.apply(row, _flat(self.weight), _flat(self.bias)), self, x, state)
