"""Fused RMSNorm, LayerNorm and L2 norm for JAX: functions that work under jit, grad, jvp, vmap,
remat, scan, shard_map and sharding.

On the CPU and on CUDA the kernels are called through XLA's foreign function interface. Other
devices and dtypes are computed with jax.numpy. Arrays are float32, float16 or bfloat16; the
residual has the dtype of x or float32, weight and bias have any of the three. Modules:
`rmsnorm.jax.nnx` for flax.nnx, `rmsnorm.jax.equinox` for Equinox.

Sharding, automatic or explicit: rows may be on several devices, and nothing is gathered. Gradients
of weight and bias are summed over the devices in float32. Reverse mode runs one backward kernel;
forward mode runs the same kernel on the tangent. Second derivatives are computed with jax.numpy.
Exported programs (`jax.export`) contain jax.numpy operations only and load without this package.

eps: None means 2**-23 for RMS norms and 1e-5 for layer norms, as in `rmsnorm.torch` and
`rmsnorm.arrays`. L2 norms have 1e-6.

Definitions, roundings and error bounds: rmsnorm-spec/math.md, equations (1) to (14) and (19) to
(25).

>>> import jax, jax.numpy as jnp, rmsnorm.jax as rj
>>> gradient = jax.grad(lambda x: rj.rms_norm(x, eps=0.0)[0])
>>> print(gradient(jnp.array([1.0, -1.0])))
[0.5 0.5]
"""

from .. import _need

_need("jax", (0, 5))

from .functions import (
    Norm, add_layer_norm, add_rms_norm, l2_norm, layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
    rms_norm_gated,
)

__all__ = [
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add", "rms_norm_add_rms_norm", "rms_norm_gated",
    "l2_norm", "Norm",
]
