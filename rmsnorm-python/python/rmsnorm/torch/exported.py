"""The functions as operators of exported programs, each one node: `rmsnorm::exported_*`.

They are composite operators. An exported program runs the kernels, with the same bits as in eager
mode. `run_decompositions()`, AOTInductor and the ONNX exporter decompose them into PyTorch's
operators, so their programs load without this package.
"""

import types

import torch

from . import fallback

_library = torch.library.Library("rmsnorm", "FRAGMENT")
_RMS, _LAYER = "Tensor? weight, float eps, float weight_offset, bool cast_before_weight", "Tensor? weight, Tensor? bias, float eps"
_SCHEMAS = {
    "rms_norm": f"(Tensor x, {_RMS}) -> Tensor", "add_rms_norm": f"(Tensor x, Tensor residual, {_RMS}) -> (Tensor y, Tensor h)",
    "layer_norm": f"(Tensor x, {_LAYER}) -> Tensor", "add_layer_norm": f"(Tensor x, Tensor residual, {_LAYER}) -> (Tensor y, Tensor h)",
}
_ops = types.SimpleNamespace()


def register(eager):
    """Defines the operators. eager: `f(is_layer, x, residual, weight, bias, eps, weight_offset,
    cast_before_weight)`, the kernels."""
    for name, schema in _SCHEMAS.items():
        _library.define(f"exported_{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        # Transforms need the function itself: below them autograd Functions are not available.
        for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
            _library.impl(f"exported_{name}", _composite(name, eager), key)
        setattr(_ops, name, getattr(torch.ops.rmsnorm, f"exported_{name}").default)


def _composite(name, eager):
    is_layer, adds = "layer" in name, name.startswith("add_")

    def composite(x, *args):
        residual, args = (args[0], args[1:]) if adds else (None, args)
        weight, bias, *options = args if is_layer else (args[0], None, *args[1:])
        options = (*options, 0.0, False) if is_layer else options
        # A tracer's tensors have other types, and are decomposed.
        norm = eager if type(x) in (torch.Tensor, torch.nn.Parameter) else fallback.norm
        found = norm(is_layer, x, residual, weight, bias, *options)
        return found if adds else found[0]

    return composite


def norm(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight):
    """(y, h) as one node of the program; h is None without a residual."""
    options = (weight, bias, eps) if is_layer else (weight, eps, weight_offset, cast_before_weight)
    if residual is not None:
        return (_ops.add_layer_norm if is_layer else _ops.add_rms_norm)(x, residual, *options)
    return (_ops.layer_norm if is_layer else _ops.rms_norm)(x, *options), None
