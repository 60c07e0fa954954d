"""Fused RMSNorm and LayerNorm for PyTorch: functions, modules, and `patch` for whole models.

They support reverse and forward mode and derivatives of any order, in eager mode and under
`torch.compile`, `torch.export` and `torch.func`, with autocast, checkpointing, CUDA graphs, FSDP
and DTensor. Tensors are float32, float16 or bfloat16, on the CPU or on CUDA; weight, bias and
residual have the dtype of x or float32. Rows may be strided; x is copied once if its rows need more
than two strides. `torch.nn.functional` computes everything the kernels do not support (float64,
other devices), and the programs of exporters and TorchScript. The operators are
`torch.ops.rmsnorm.*`.

eps: None means 2**-23 for an RMS norm (2**-52 for float64) and 1e-5 for a layer norm. All paths
raise the same errors: TypeError for a wrong type or dtype, ValueError for a wrong shape, value or
device, NotImplementedError for tensors that no path supports.

Calls run on PyTorch's current stream, and PyTorch allocates the results. On the CPU
`torch.get_num_threads()` threads work. Results of kernels do not depend on the number of rows or
threads, or on strides. `set_compiled` chooses which norms `torch.compile` leaves to kernels.

Definitions, roundings and error bounds: rmsnorm-spec/math.md, equations (1) to (14) and (19) to (21).

>>> import torch, rmsnorm.torch as rt
>>> x = torch.tensor([[1.0, -1.0]], requires_grad=True)
>>> rt.rms_norm(x, eps=0.0)[0, 0].backward()
>>> x.grad
tensor([[0.5000, 0.5000]])
"""

from .. import _need

_need("torch", (2, 10))

from . import sharding as _sharding
from .functional import (
    Norm, add_layer_norm, add_rms_norm, l2_norm, layer_norm, layer_norm_add, rms_norm, rms_norm_add, rms_norm_add_rms_norm,
    rms_norm_gated, set_compiled,
)
from .modules import AddLayerNorm, AddRMSNorm, L2Norm, LayerNorm, LayerNormAdd, RMSNorm, RMSNormAdd, RMSNormGated
from .patching import Patch, patch
from .quantized import quantized_rms_norm

_sharding.register()

__all__ = [
    "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add", "rms_norm_add_rms_norm",
    "rms_norm_gated", "l2_norm", "Norm", "quantized_rms_norm", "RMSNorm", "LayerNorm", "AddRMSNorm", "AddLayerNorm", "RMSNormAdd",
    "LayerNormAdd", "RMSNormGated", "L2Norm", "patch", "Patch", "set_compiled",
]
