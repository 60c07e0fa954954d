"""Fused RMSNorm and LayerNorm for PyTorch: functions, modules, and `patch` for whole models.

They have derivatives of every kind, and work in eager mode, under `torch.compile`, `torch.export` and `torch.func`, with autocast,
checkpointing, CUDA graphs, FSDP and DTensor. Tensors are float32, float16 or bfloat16, on the CPU or on CUDA; weight, bias and residual
have the dtype of x or float32. Rows may be apart; where no two strides describe them, x is copied once. For all else (float64, other
devices) `torch.nn.functional` computes the same, and so do the programs that exporters and TorchScript make. Underneath are the
operators `torch.ops.rmsnorm.*`.

The default eps of an RMS norm is the machine epsilon of the dtype that is computed in, 2**-23 or for float64 2**-52; that of a layer norm
is 1e-5. Every path refuses the same: TypeError for a wrong type or dtype, ValueError for a wrong shape, value or device,
NotImplementedError for tensors that no path computes with.

Calls go to PyTorch's current stream, and results are PyTorch's own memory. On the CPU as many threads work as
`torch.get_num_threads()` says. Results do not depend on the number of rows, threads or the strides.

Definitions, roundings and error bounds: rmsnorm-spec/math.md, equations (1) to (12).
"""

from .. import _need

_need("torch", (2, 10))

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
