"""Checks of a call's arguments. They raise TypeError for a wrong type or dtype, ValueError for a
wrong shape, value or device, NotImplementedError for a tensor that no path supports.

The kernels check the same in Rust, so a call that reaches them is not checked here. These checks
run before `torch.nn.functional` is used instead, in the fake kernels, and after an error of the
kernels, to raise it as a Python exception.
"""

import numbers

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._norm import ACTIVATIONS, NORMS, Form, check_clamped_eps, check_flag, check_pieces, check_weight, group_width

_NAMES = ("x", "residual", "gate", "weight", "bias", "next_weight", "next_bias")
LARGEST = torch.finfo(torch.float32).max


def default_eps(x: Tensor) -> float:
    """The default eps of an RMS norm: the machine epsilon of the dtype of its arithmetic.
    TorchScript compiles this."""
    return 2.0**-52 if x.dtype == torch.float64 or x.dtype == torch.complex128 else 2.0**-23


def arguments(form, x, residual, gate, weight, bias, next_weight, next_bias, normalized_shape=None):
    """Raises for arguments that no path supports."""
    is_layer, eps, weight_offset, cast_before_weight, *_ = form
    tensors = dict(zip(_NAMES, (x, residual, gate, weight, bias, next_weight, next_bias)))
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None or name == "x"}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; pass torch.as_tensor({name})")
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            raise TypeError(f"{name}: expected a floating-point dtype, got {tensor.dtype}; call {name}.float()")
        if tensor.is_nested and (name not in ("x", "residual") or not x.is_nested):
            raise ValueError(f"{name}: expected a dense tensor, got a nested one; the residual may be nested if x is, weight and bias may not")
        if tensor.is_nested and tensor.layout is torch.strided and not is_layer:
            raise NotImplementedError(f"{name}: expected the layout torch.jagged of a nested tensor, got torch.strided; pass "
                                      "layout=torch.jagged to torch.nested.nested_tensor")
        if not tensor.is_nested and tensor.layout is not torch.strided:
            raise NotImplementedError(f"{name}: expected a strided tensor, got the layout {tensor.layout}; call {name}.to_dense()")
        if tensor.dtype.itemsize == 1:
            raise NotImplementedError(f"{name}: norms are not computed in {tensor.dtype}; call {name}.bfloat16()")
        if tensor.dtype.is_complex and (tensor.dtype != x.dtype or is_layer or "residual" in given or weight_offset or cast_before_weight
                                        or not form.is_plain()):
            raise NotImplementedError(f"{name}: only rms_norm supports {tensor.dtype}, with one dtype, no residual and no options; pass "
                                      "real numbers")
        if tensor.is_nested and not form.is_plain():
            raise NotImplementedError(f"{name}: a norm with a gate or groups expects dense tensors, got a nested one; pass its values()")
    devices(given, x)
    eps, weight_offset = number("eps", eps), number("weight_offset", weight_offset)
    check_flag("cast_before_weight", cast_before_weight)
    _values(eps, weight_offset, form.l2 == NORMS[3])
    y_dtype, of = (x.dtype, "x") if form.out_dtype is None else (form.out_dtype, "y")
    if gate is not None and gate.dtype != y_dtype:
        raise TypeError(f"gate: expected the dtype of {of}, {y_dtype}, got {gate.dtype}; call gate.to({of}.dtype)")
    check_weight(form, weight, "a tensor")
    if x.is_nested:
        if residual is not None and not residual.is_nested:
            raise ValueError("residual: expected a nested tensor, as x is one, got a dense one; nest both")
        for name in _NAMES[3:]:
            if name in given and list(given[name].shape[-1:]) != [x.size(-1)]:
                raise ValueError(f"{name}: expected a shape that ends in {x.size(-1)}, as x does, got {list(given[name].shape)}")
    elif x.ndim == 0:
        raise ValueError("x: expected at least one dimension, got the shape []; call x.reshape(1)")
    else:
        dims = shapes(x, residual, weight, bias, normalized_shape, next_weight, next_bias, gate)
        group_width(dims, form.groups)


def pieces(form, residual, gate):
    """Raises if the options of a norm that is not plain are wrong in themselves or beside the residual and the gate."""
    dtype = form.out_dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise TypeError(f"out_dtype: expected a floating-point dtype of at least 16 bits, got {dtype!r}; None is the dtype of x")
    check_pieces(form, residual, gate)


def number(name, value):
    """A real number as a float; symbolic numbers stay as they are."""
    if isinstance(value, (float, torch.SymFloat, torch.SymInt)):
        return value
    what = type(value).__name__
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Tensor):
        # Norms have no derivative with respect to this number.
        is_differentiated = value.requires_grad or forward_ad.unpack_dual(value).tangent is not None
        if value.ndim == 0 and not is_differentiated and not value.is_meta:
            return float(value)
        what = "a tensor " + ("that is to be differentiated" if is_differentiated else f"of shape {list(value.shape)} on {value.device}")
    raise TypeError(f"{name}: expected a number, got {what}; pass float({name})")


def _values(eps, weight_offset, is_clamped=False):
    """Raises ValueError if eps is negative, or eps or weight_offset is not finite in float32, or float32 cannot hold the square of a
    clamped L2 norm's eps."""
    if is_clamped:
        check_clamped_eps(eps)
    if not 0 <= eps <= LARGEST:
        raise ValueError(f"eps: expected a finite number of at least 0, got {eps}; a negative eps makes small rows NaN in "
                         "torch.nn.functional")
    if not -LARGEST <= weight_offset <= LARGEST:
        raise ValueError(f"weight_offset: expected a finite number, got {weight_offset}; 0.0 and 1.0 are usual")


def devices(tensors, main):
    """Raises ValueError if a tensor is on another device than `main`. tensors: by name."""
    for name, tensor in tensors.items():
        if tensor.device != main.device:
            raise ValueError(f"{name}: expected the device of the other tensors, {main.device}, got {tensor.device}; "
                             f"call {name}.to({str(main.device)!r})")


def shapes(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
           normalized_shape: list[int] | None, next_weight: Tensor | None = None, next_bias: Tensor | None = None,
           gate: Tensor | None = None) -> list[int]:
    """The normalized dimensions: normalized_shape, or the shape of the weight or bias, or the last
    dimension of x. Raises ValueError for shapes that do not match. TorchScript compiles this."""
    dims = list(x.shape[-1:])
    if normalized_shape is not None:
        dims = list(normalized_shape)
        if len(dims) == 0 or list(x.shape[-len(dims):]) != dims:
            raise ValueError(f"x: expected a shape that ends in normalized_shape {dims}, got {list(x.shape)}; "
                             "normalized_shape is the last dimensions of x, at least one")
    elif weight is not None and weight.dim() > 1:
        dims = list(weight.shape)
    elif weight is None and bias is not None and bias.dim() > 1:
        dims = list(bias.shape)
    if list(x.shape[-len(dims):]) != dims:
        raise ValueError(f"x: expected a shape that ends in that of the weight or bias, {dims}, got {list(x.shape)}; x must end in the "
                         "weight's dimensions")
    if residual is not None and list(residual.shape) != list(x.shape):
        raise ValueError(f"residual: expected the shape {list(x.shape)}, got {list(residual.shape)}; residual has the shape of x, and "
                         "nothing is broadcast")
    if gate is not None and list(gate.shape) != list(x.shape):
        raise ValueError(f"gate: expected the shape {list(x.shape)}, got {list(gate.shape)}; gate has the shape of x, and nothing is "
                         "broadcast")
    if weight is not None and list(weight.shape) != dims:
        raise ValueError(f"weight: expected the shape {dims}, got {list(weight.shape)}; weight has the shape of the normalized dimensions")
    if bias is not None and list(bias.shape) != dims:
        raise ValueError(f"bias: expected the shape {dims}, got {list(bias.shape)}; bias has the shape of the normalized dimensions")
    if next_weight is not None and list(next_weight.shape) != dims:
        raise ValueError(f"next_weight: expected the shape {dims}, got {list(next_weight.shape)}; it has the shape of the normalized dimensions")
    if next_bias is not None and list(next_bias.shape) != dims:
        raise ValueError(f"next_bias: expected the shape {dims}, got {list(next_bias.shape)}; it has the shape of the normalized dimensions")
    return dims


def statistics_shape(x, groups):
    """The shape of mean and rstd: several groups have one dimension more."""
    return x.shape[:-1] if groups == 1 else (*x.shape[:-1], groups)


def operands(given):
    """Raises for an operator's arguments that no kernel supports. given: by name of the schema.
    Traced shapes may be symbolic."""
    # Imported here: only traces and meta tensors need it.
    from torch.fx.experimental.symbolic_shapes import sym_eq

    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    name, main = next(iter(tensors.items()))
    devices(tensors, main)
    _values(given.get("eps", 0.0), given.get("weight_offset", 0.0), given.get("kind") == 3)
    if main.ndim == 0:
        raise ValueError(f"{name}: expected at least one dimension, got the shape []; call {name}.reshape(1)")
    if main.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {main.dtype}; call rmsnorm.torch's functions for other dtypes")
    groups = given.get("groups", 1)
    if "groups" in given:
        group_width(main.shape[-1:], groups)
        check_pieces(Form(False, 0.0, activation=ACTIVATIONS[0], gate_before=given["gate_before"]), given.get("residual"), given.get("gate"))
    expected = dict.fromkeys(_NAMES[3:], main.shape[-1:]) | dict.fromkeys(("mean", "rstd"), statistics_shape(main, groups))
    for name, tensor in tensors.items():
        shape = expected.get(name, main.shape)
        if name == "scale":
            torch._check_value(tensor.numel() == 1, lambda: f"scale: expected one element, got the shape {list(tensor.shape)}")
        else:
            torch._check_value(sym_eq(tuple(tensor.shape), tuple(shape)),
                               lambda: f"{name}: expected the shape {list(shape)}, got {list(tensor.shape)}")  # noqa: B023
