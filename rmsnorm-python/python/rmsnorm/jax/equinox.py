"""Replacements for the norms of `equinox.nn`, computed with rmsnorm's kernels. Arguments and fields
are the same.

>>> import equinox, rmsnorm.jax.equinox as re
>>> isinstance(re.LayerNorm(8), equinox.nn.LayerNorm)
True
"""

import equinox
import jax

from . import functions

__all__ = ["RMSNorm", "LayerNorm"]

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
