"""Fused RMSNorm and LayerNorm for PyTorch: functions, modules, and `patch` for whole models.

They have derivatives of every kind, and work in eager mode, under `torch.compile`, `torch.export` and `torch.func`, with autocast,
checkpointing, CUDA graphs, FSDP and DTensor. Tensors are float32, float16 or bfloat16, on the CPU or on CUDA; weight, bias and residual
have the dtype of x or float32. Rows may be apart; where no two strides describe them, x is copied once. For all else (float64, other
devices) `torch.nn.functional` computes the same. Underneath are the operators `torch.ops.rmsnorm.*`.

Calls go to PyTorch's current stream, and results are PyTorch's own memory. On the CPU as many threads work as
`torch.get_num_threads()` says. Results do not depend on the number of rows, threads or the strides.

Definitions, roundings and error bounds: rmsnorm-spec/math.md, equations (1) to (12).
"""

from . import sharding as _sharding
from .functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .modules import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from .patching import Patch, patch
from .quantized import quantized_rms_norm

_sharding.register()

__all__ = [
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "quantized_rms_norm", "RMSNorm", "LayerNorm", "AddRMSNorm",
    "AddLayerNorm", "patch", "Patch",
]
