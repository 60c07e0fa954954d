"""Fused RMSNorm and LayerNorm for JAX: functions with gradients, under jit, vmap, remat, scan, shard_map, automatic sharding and export.

On the CPU and on CUDA the kernels are called through XLA's foreign function interface; elsewhere, and for other dtypes, the same is
computed with jax.numpy, so that one program runs anywhere. Arrays are float32, float16 or bfloat16; weight, bias and residual have the
dtype of x or float32.

Automatic sharding: rows may be on several devices, and nothing is gathered; gradients of weight and bias are summed over the devices in
float32. Second derivatives and forward mode are refused, as `jax.custom_vjp` does.

Definitions, roundings and error bounds: rmsnorm-spec/math.md, equations (1) to (12).
"""

from .. import _need

_need("jax", (0, 5))

from .functions import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"]
