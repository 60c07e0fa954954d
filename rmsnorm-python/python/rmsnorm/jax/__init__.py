"""Fused RMSNorm and LayerNorm for JAX: functions with derivatives of every kind, under jit, vmap, remat, scan, shard_map and sharding.

On the CPU and on CUDA the kernels are called through XLA's foreign function interface; elsewhere, and for other dtypes, the same is
computed with jax.numpy, so that one program runs anywhere. Arrays are float32, float16 or bfloat16; the residual has the dtype of x or
float32, weight and bias have any of the three. Modules: `rmsnorm.jax.nnx` for flax.nnx, `rmsnorm.jax.equinox` for Equinox.

Sharding, automatic or explicit: rows may be on several devices, and nothing is gathered; gradients of weight and bias are summed over
the devices in float32. Gradients run one backward kernel, and forward mode runs the same on the tangent; second derivatives are
computed with jax.numpy. Exports (`jax.export`) need no special arguments: they are computed with jax.numpy, without this package.

eps is 2**-23 for RMS norms and 1e-5 for layer norms if None, in PyTorch, JAX and arrays alike.

Definitions, roundings and error bounds: rmsnorm-spec/math.md, equations (1) to (12).
"""

from .. import _need

_need("jax", (0, 5))

from .functions import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"]
