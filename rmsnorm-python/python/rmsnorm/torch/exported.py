"""The functions as operators of exported programs, each one node: `rmsnorm::exported_*`.

They are composite operators. An exported program runs the kernels, with the same bits as in eager
mode. `run_decompositions()`, AOTInductor and the ONNX exporter decompose them into PyTorch's
operators, so their programs load without this package.
"""

import types

import torch

from .._norm import Form
from . import fallback
from .operators import FORWARD_TENSORS

_library = torch.library.Library("rmsnorm", "FRAGMENT")
_RMS, _LAYER = "Tensor? weight, float eps, float weight_offset, bool cast_before_weight", "Tensor? weight, Tensor? bias, float eps"
_GENERAL = ("Tensor? gate, Tensor? weight, Tensor? bias, float eps, float weight_offset, bool cast_before_weight, bool is_layer, "
            "str? activation, bool gate_before, int groups, str? l2, str? cast_order, ScalarType? out_dtype")
_SCHEMAS = {
    "rms_norm": f"(Tensor x, {_RMS}) -> Tensor", "add_rms_norm": f"(Tensor x, Tensor residual, {_RMS}) -> (Tensor y, Tensor h)",
    "layer_norm": f"(Tensor x, {_LAYER}) -> Tensor", "add_layer_norm": f"(Tensor x, Tensor residual, {_LAYER}) -> (Tensor y, Tensor h)",
    "rms_norm_add": f"(Tensor x, Tensor residual, {_RMS}) -> Tensor",
    "layer_norm_add": f"(Tensor x, Tensor residual, {_LAYER}) -> Tensor",
    "rms_norm_add_norm": f"(Tensor x, Tensor residual, {_RMS}, Tensor? next_weight) -> (Tensor y, Tensor h)",
    "layer_norm_add_norm": f"(Tensor x, Tensor residual, {_LAYER}, Tensor? next_weight, Tensor? next_bias) -> (Tensor y, Tensor h)",
    "norm": f"(Tensor x, {_GENERAL}) -> Tensor", "add_norm": f"(Tensor x, Tensor residual, {_GENERAL}) -> (Tensor y, Tensor h)",
}
_LAST = Form._fields[6:]
_ops = types.SimpleNamespace()


def register(eager):
    """Defines the operators. eager: the kernels, a function with the arguments of
    `fallback.unchecked`."""
    for name, schema in _SCHEMAS.items():
        _library.define(f"exported_{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        # Transforms need the function itself: below them autograd Functions are not available.
        for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
            _library.impl(f"exported_{name}", _composite(name, eager), key)
        setattr(_ops, name, getattr(torch.ops.rmsnorm, f"exported_{name}").default)


def _composite(name, eager):
    names = [part.split()[1] for part in _SCHEMAS[name].partition(")")[0].strip("(").split(", ")]
    is_layer, residual_after, has_next = "layer" in name, "_norm_add" in name, name.endswith("norm_add_norm")

    def composite(x, *args):
        given = {"weight_offset": 0.0, "cast_before_weight": False, "is_layer": is_layer} | dict(zip(names, (x, *args)))
        form = Form(given["is_layer"], given["eps"], given["weight_offset"], given["cast_before_weight"], residual_after, has_next,
                    *map(given.get, _LAST) if "groups" in names else ())
        # A tracer's tensors have other types, and are decomposed.
        norm = eager if type(x) in (torch.Tensor, torch.nn.Parameter) else fallback.unchecked
        y, h = norm(form, *map(given.get, FORWARD_TENSORS))
        return y if "residual" not in names else (y, h) if form.has_y() else h

    return composite


def norm(form, x, residual, gate, weight, bias, next_weight, next_bias):
    """(y, h) as one node of the program; h is None without a residual, y if the call has none."""
    if not form.is_plain():
        options = (gate, weight, bias, form.eps, form.weight_offset, form.cast_before_weight, form.is_layer, *form[6:])
        return (_ops.norm(x, *options), None) if residual is None else _ops.add_norm(x, residual, *options)
    options = (weight, bias, form.eps) if form.is_layer else (weight, form.eps, form.weight_offset, form.cast_before_weight)
    if form.has_next:
        of_next = (next_weight, next_bias) if form.is_layer else (next_weight,)
        return (_ops.layer_norm_add_norm if form.is_layer else _ops.rms_norm_add_norm)(x, residual, *options, *of_next)
    if form.residual_after:
        return None, (_ops.layer_norm_add if form.is_layer else _ops.rms_norm_add)(x, residual, *options)
    if residual is not None:
        return (_ops.add_layer_norm if form.is_layer else _ops.add_rms_norm)(x, residual, *options)
    return (_ops.layer_norm if form.is_layer else _ops.rms_norm)(x, *options), None
