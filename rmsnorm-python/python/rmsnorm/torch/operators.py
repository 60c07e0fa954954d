"""The operators `rmsnorm::*`: their kernels are the native half's, shapes for tracing and gradients are here.

An operator's derivatives, registered with the dispatcher by `autograd.py`, are for compiled and exported graphs, DTensor and whoever
calls the operator itself. They cost some microseconds in every call, so that the functions of this package go around them.
"""

import pathlib
import types

import torch

from .. import _native
from . import checks

_library = torch.library.Library("rmsnorm", "DEF")


def _register():
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    cpu, cuda = libraries / "libtorch_cpu.so", libraries / "libtorch_cuda.so"
    for schema in _native.torch_schemas():
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _native.register_torch_operators(str(cpu), str(cuda) if cuda.exists() else None)


_register()
#: The names of each operator's parameters.
parameter_names = {
    name: [parameter.split(" ")[1] for parameter in parameters.partition(")")[0].split(", ")]
    for name, _, parameters in (schema.partition("(") for schema in _native.torch_schemas())
}
_overloads = {name: getattr(torch.ops.rmsnorm, name).default for name in parameter_names}
#: The operators, and what is under them: a function of Python's less on the way, which no tracer follows.
ops = types.SimpleNamespace(**_overloads)
eager_ops = types.SimpleNamespace(**{name: overload._op for name, overload in _overloads.items()})


def _new(like, shape, dtype):
    return torch.empty(shape, dtype=dtype, device=like.device)


def _fake_forward(has_mean, has_statistics, adds):
    """Shapes and dtypes of a forward operator's results."""

    def fake(x, *args):
        y, statistics = _new(x, x.shape, x.dtype), x.shape[:-1]
        results = (y, _new(x, x.shape, args[0].dtype)) if adds else (y,)
        if has_statistics:
            results += tuple(_new(x, statistics, torch.float32) for _ in range(1 + has_mean))
        return results if len(results) > 1 else y

    return fake


def _fake_gradients(dy, x, weight, need_dweight, need_dbias, need_dresidual):
    dtype = torch.float32 if weight is None else weight.dtype
    vector = lambda is_needed: _new(dy, dy.shape[-1:] if is_needed else 0, dtype)  # noqa: E731
    dresidual = _new(dy, dy.shape if need_dresidual else 0, x.dtype)
    return _new(dy, dy.shape, dy.dtype), vector(need_dweight), vector(need_dbias), dresidual


def _register_fake(name, fake):
    """Registers a function of shapes, which is the meta device's kernel too: it refuses what the kernels refuse."""

    def checked(*args):
        checks.operands(dict(zip(parameter_names[name], args)))
        return fake(*args)

    torch.library.register_fake(f"rmsnorm::{name}", checked, lib=_library)


def _fake_rms_norm_backward(dy, x, weight, rstd, dresidual_out, weight_offset, need_dweight, need_dresidual):
    dx, dweight, _, dresidual = _fake_gradients(dy, x, weight, need_dweight, False, need_dresidual)
    return dx, dweight, dresidual


def _fake_layer_norm_backward(dy, x, weight, mean, rstd, dresidual_out, need_dweight, need_dbias, need_dresidual):
    return _fake_gradients(dy, x, weight, need_dweight, need_dbias, need_dresidual)


def _fake_quantized_rms_norm(x, residual, weight, eps, weight_offset, cast_before_weight, scale, codes_type, scale_kind):
    cols = x.shape[-1]
    rows = x.numel() // max(cols, 1)
    codes = _new(x, x.shape, (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)[codes_type])
    h = _new(x, 0, x.dtype) if residual is None else _new(x, x.shape, residual.dtype)
    if scale_kind == 3:
        scales = torch.empty_strided((rows, -(-cols // 128)), (1, max(rows, 1)), dtype=torch.float32, device=x.device)
    elif scale_kind == 4:
        scales = _new(x, -(-rows // 128) * -(-cols // 128) * 512, torch.float8_e8m0fnu)
    else:
        scales = _new(x, (0, (), (*x.shape[:-1], 1))[scale_kind], torch.float32)
    return codes, scales, h


def forward(ops, is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight):
    """(y, h, mean, rstd) by these operators; None for what a norm has not."""
    if is_layer:
        if residual is not None:
            return ops.add_layer_norm(x, residual, weight, bias, eps)
        y, mean, rstd = ops.layer_norm(x, weight, bias, eps)
        return y, None, mean, rstd
    if residual is not None:
        y, h, rstd = ops.add_rms_norm(x, residual, weight, eps, weight_offset, cast_before_weight)
        return y, h, None, rstd
    y, rstd = ops.rms_norm(x, weight, eps, weight_offset, cast_before_weight)
    return y, None, None, rstd


def gradients(ops, is_layer, dy, h, weight, mean, rstd, dh, weight_offset, need_dweight, need_dbias, need_dresidual):
    """(dx, dweight, dbias, dresidual) by these operators; those that are not needed have no elements."""
    if is_layer:
        return ops.layer_norm_backward(dy, h, weight, mean, rstd, dh, need_dweight, need_dbias, need_dresidual)
    dx, dweight, dresidual = ops.rms_norm_backward(dy, h, weight, rstd, dh, weight_offset, need_dweight, need_dresidual)
    return dx, dweight, None, dresidual


def gradients_of_inputs(call, ctx, needs, dy, dh):
    """(dx, dweight, dbias, dresidual) as autograd takes them: None for what is not needed. `call` is `gradients` with its operators.

    ctx: of a forward call that `save` was told of. needs: whether dweight, dbias and dresidual are. dy, dh: None for zeros.
    """
    h, weight, mean, rstd = ctx.saved_tensors
    y_dtype, bias_dtype, residual_dtype = ctx.dtypes
    if dy is None:
        if dh is None:
            return (None,) * 4
        dy = torch.zeros_like(h, dtype=y_dtype)
    need_dweight, need_dbias, need_dresidual = needs
    # The gradient of an f32 stream is rounded to it, and not to the dtype of x.
    is_wider = need_dresidual and residual_dtype != dy.dtype
    dx, dweight, dbias, dresidual = call(
        ctx.is_layer, dy, h, weight, mean, rstd, dh, ctx.weight_offset, need_dweight, need_dbias, is_wider
    )
    dresidual = dresidual if is_wider else dx
    return (
        dx, dweight if need_dweight else None, dbias.to(bias_dtype) if need_dbias else None,
        dresidual if need_dresidual else None,
    )


def save(ctx, is_layer, x, residual, weight, bias, weight_offset, results):
    """Keeps what the gradients of a forward call need, and returns it. results: (y, h, mean, rstd), None for what there is not."""
    _, h, mean, rstd = results
    ctx.is_layer, ctx.weight_offset = is_layer, weight_offset
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype
    # A gradient that nobody sends is None, and no zeros are made.
    ctx.set_materialize_grads(False)
    kept = x if residual is None else h, weight, mean, rstd
    ctx.save_for_backward(*kept)
    return kept


for _name in parameter_names:
    if not _name.endswith("_backward") and not _name.startswith("quantized"):
        _register_fake(_name, _fake_forward("layer" in _name, not _name.endswith("_inference"), _name.startswith("add_")))
_register_fake("rms_norm_backward", _fake_rms_norm_backward)
_register_fake("layer_norm_backward", _fake_layer_norm_backward)
_register_fake("quantized_rms_norm", _fake_quantized_rms_norm)
