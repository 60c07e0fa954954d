"""`flax.nnx`'s norms by rmsnorm's kernels: its arguments, its parameters, its checkpoints; only the class changes."""

import flax.nnx
import jax

from .functions import layer_norm, rms_norm

__all__ = ["RMSNorm", "LayerNorm"]


def _is_of_rows(module, x, mask):
    """Whether a norm is over the last dimension of one device, of all elements; Flax computes what is not."""
    last = (-1, (-1,), [-1], x.ndim - 1, (x.ndim - 1,))
    return mask is None and module.reduction_axes in last and module.feature_axes in last and module.axis_name is None


def _value(parameter):
    return None if parameter is None else parameter[...]


class RMSNorm(flax.nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, with the same arguments. The result has the dtype that Flax gives it, and is rounded once.

    `use_fast_variance` changes nothing, as squares are summed in float32. With a mask, with other axes than the last or across devices
    by `axis_name` Flax's own code runs.

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
    """`flax.nnx.LayerNorm`, with the same arguments, as `RMSNorm` here.

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
