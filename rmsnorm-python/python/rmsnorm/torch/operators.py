"""The operators `rmsnorm::*`. The native library has their kernels; this module has their fake
kernels, for tracing.

`autograd.py` registers the operators' derivatives with the dispatcher, for compiled and exported
graphs, DTensor and direct calls of an operator. They cost some microseconds a call, so the
functions of this package bypass them.
"""

import functools
import pathlib
import types

import torch

from .. import _native
from .._norm import CAST_ORDERS, NORMS, Form
from . import checks

_library = torch.library.Library("rmsnorm", "DEF")


def _register():
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    cpu, cuda = libraries / "libtorch_cpu.so", libraries / "libtorch_cuda.so"
    for schema in _native.torch_schemas():
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _native.register_torch_operators(str(cpu), str(cuda) if cuda.exists() else None)


_register()
_overloads = {name: getattr(torch.ops.rmsnorm, name).default
              for name, _, _ in (schema.partition("(") for schema in _native.torch_schemas())}
#: {operator: the names of its parameters}, and of its results.
parameter_names = {name: [one.name for one in overload._schema.arguments] for name, overload in _overloads.items()}
result_names = {name: [one.name for one in overload._schema.returns] for name, overload in _overloads.items()}
#: The tensors that a forward call may have, and its results, in the order of this package's
#: functions.
FORWARD_TENSORS = "x", "residual", "gate", "weight", "bias", "next_weight", "next_bias"
#: Those that have the rows of x; the others are parameters.
ROWS = FORWARD_TENSORS[:3]
FORWARD_RESULTS = "y", "residual_out", "mean", "rstd", "next_mean", "next_rstd"
#: The dtypes of y by their number in `norm`; the first is that of x.
Y_DTYPES = None, torch.float32, torch.float16, torch.bfloat16
#: The operators, and their builtin functions: one Python call less, but invisible to tracers.
ops = types.SimpleNamespace(**_overloads)
eager_ops = types.SimpleNamespace(**{name: overload._op for name, overload in _overloads.items()})


def _fake(operator, *args):
    """The fake kernel of an operator: results without values, also on the meta device. It raises
    where the kernels do."""
    given = dict(zip(parameter_names[operator], args))
    checks.operands(given)
    found = tuple(_fake_result(name, given) for name in result_names[operator])
    return found if len(found) > 1 else found[0]


def is_needed(name, given):
    """Whether a call with these arguments, by name, has the result. The statistics of a next norm
    come with its y, and an RMS norm has no mean."""
    if name == "mean" and given.get("kind", 1) != 1:
        return False
    return given.get(f"need_{'y' if name.startswith('next_') else name}", True)


def _fake_result(name, given):
    """A result of that name, for arguments by name."""
    x, residual, parameters = given["x"], given.get("residual"), (given.get("weight"), given.get("bias"))
    main = given.get("dy", x)
    shape, dtype = main.shape, main.dtype
    if name in ("mean", "rstd", "next_mean", "next_rstd"):
        shape, dtype = checks.statistics_shape(x, given.get("groups", 1)), torch.float32
    elif name in ("dweight", "dbias"):
        shape, dtype = x.shape[-1:], next((one.dtype for one in parameters if one is not None), torch.float32)
    elif name == "dresidual":
        dtype = x.dtype
    elif name == "y":
        dtype = Y_DTYPES[given.get("y_dtype", 0)] or dtype
    elif name == "residual_out":
        shape, dtype = (0, dtype) if residual is None else (shape, residual.dtype)
    elif name == "codes":
        dtype = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)[given["codes_type"]]
    elif name == "scales":
        return _fake_scales(x, given["scale_kind"])
    # A result that is not needed has no elements.
    return torch.empty(shape if is_needed(name, given) else 0, dtype=dtype, device=x.device)


def _fake_scales(x, kind):
    cols = x.shape[-1]
    rows = x.numel() // max(cols, 1)
    if kind == 3:
        return torch.empty_strided((rows, -(-cols // 128)), (1, max(rows, 1)), dtype=torch.float32, device=x.device)
    if kind == 4:
        return torch.empty(-(-rows // 128) * -(-cols // 128) * 512, dtype=torch.float8_e8m0fnu, device=x.device)
    return torch.empty((0, (), (*x.shape[:-1], 1))[kind], dtype=torch.float32, device=x.device)


for _name in parameter_names:
    torch.library.register_fake(f"rmsnorm::{_name}", functools.partial(_fake, _name), lib=_library)


def forward(ops, form, x, residual, gate, weight, bias, next_weight, next_bias):
    """The `FORWARD_RESULTS` of these operators; those that the call does not have are None."""
    is_layer, eps, *options, residual_after, has_next = form[:6]
    if not form.is_plain():
        y_dtype = 0 if form.out_dtype in (None, x.dtype) else Y_DTYPES.index(form.out_dtype)
        y, h, mean, rstd = ops.norm(x, residual, gate, weight, bias, eps, form.weight_offset, *_general_options(form), y_dtype)
        return y, None if residual is None else h, mean if is_layer else None, rstd, None, None
    if residual_after:
        mean = next_mean = None
        if is_layer:
            found = ops.layer_norm_add(x, residual, weight, bias, next_weight, next_bias, eps, has_next)
            y, h, mean, rstd, next_mean, next_rstd = found
        else:
            y, h, rstd, next_rstd = ops.rms_norm_add(x, residual, weight, next_weight, eps, *options, has_next)
        return (y, h, mean, rstd, next_mean, next_rstd) if has_next else (None, h, mean, rstd, None, None)
    if is_layer:
        if residual is not None:
            return *ops.add_layer_norm(x, residual, weight, bias, eps), None, None
        y, mean, rstd = ops.layer_norm(x, weight, bias, eps)
        return y, None, mean, rstd, None, None
    if residual is not None:
        y, h, rstd = ops.add_rms_norm(x, residual, weight, eps, *options)
        return y, h, None, rstd, None, None
    y, rstd = ops.rms_norm(x, weight, eps, *options)
    return y, None, None, rstd, None, None


def _general_options(form):
    """The options of `norm` and `norm_backward` that other operators do not have."""
    return NORMS.index(form.name()), CAST_ORDERS.index(form.order()), form.activation == "sigmoid", form.gate_before, form.groups


def form_of(given):
    """The form of an operator with these options, by name."""
    kind, order, y_dtype = given["kind"], given["cast_order"], Y_DTYPES[given.get("y_dtype", 0)]
    return Form(kind == 1, given["eps"], given["weight_offset"], order == 1, activation="sigmoid" if given["is_sigmoid"] else "silu",
                gate_before=given["gate_before"], groups=given["groups"], l2=NORMS[kind] if kind > 1 else None,
                cast_order=CAST_ORDERS[order] if order > 1 else None, out_dtype=y_dtype)


def is_cast(form, dy, x):
    """Whether the gradient of x has a dtype of its own: y has another one than x."""
    return form.out_dtype is not None and dy.dtype != x.dtype


def general_gradients(ops, form, needs, dy, x, gate, weight, bias, mean, rstd, dh):
    """(dx, dgate, dweight, dbias, dresidual) of a norm that is not plain; gradients that are not
    needed have no elements. needs: of all except dx."""
    bias = None if gate is None or form.gate_before else bias
    call = functools.partial(ops.norm_backward, dy, x, gate, weight, bias, mean, rstd, dh, form.eps, form.weight_offset, *_general_options(form))
    if is_cast(form, dy, x):
        dx, *parameters, dresidual = call(False, *needs[:3], True)
        return dresidual, *parameters, dx
    return call(True, *needs)


def gradients(ops, is_layer, dy, h, weight, mean, rstd, dh, weight_offset, need_dweight, need_dbias, need_dresidual):
    """(dx, dweight, dbias, dresidual) of these operators; gradients that are not needed have no
    elements."""
    if is_layer:
        return ops.layer_norm_backward(dy, h, weight, mean, rstd, dh, need_dweight, need_dbias, need_dresidual)
    dx, dweight, dresidual = ops.rms_norm_backward(dy, h, weight, rstd, dh, weight_offset, need_dweight, need_dresidual)
    return dx, dweight, None, dresidual
