"""Derivatives: of eager calls, of `torch.func` transforms, in forward mode, of second order, and of
the operators.

The Jacobian J(v) of the normalized row x_hat is symmetric, so the backward kernel, called with a
tangent as dy and without a weight, also computes the forward derivative.

| derivatives | computed by |
|---|---|
| first, reverse and forward | the backward kernel; twice for two norms around a residual |
| forward, of norms with a gate or groups | PyTorch's operations: `_general_rows` |
| second and higher | PyTorch's operations: `_rows` |

There are two Functions. `torch.func` requires `setup_context`, but with it `apply` binds arguments
by name, which costs about 40 us a call. `NormForEager` has none; `NormForTransforms` has
it.
"""

import functools

import torch
from torch.autograd import forward_ad

from .._norm import NORMS, Form
from . import fallback
from .operators import (
    FORWARD_RESULTS,
    FORWARD_TENSORS,
    ROWS,
    _library,
    eager_ops,
    form_of,
    forward,
    general_gradients,
    gradients,
    is_cast,
    parameter_names,
    result_names,
)

# Skips the operators' registered gradients, whose dispatch costs some microseconds a call.
below_autograd = torch._C._AutoDispatchBelowAutograd
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_is_excluded, _exclude = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C._dispatch_tls_set_dispatch_key_excluded
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_forward_mode():
    """Whether a tensor may be a dual number.

    Dual numbers exist while a forward-mode level is entered. PyTorch's levels and this counter are
    both per process, so the answer is right in every thread, including the threads of the backward
    pass.
    """
    return forward_ad._current_level >= 0


def call_below_autograd(function, *args):
    """`function(*args)` under `below_autograd`, in a third of its time: dense tensors need only one
    key excluded."""
    is_below = _is_excluded(_AUTOGRAD)
    if not is_below:
        _exclude(_AUTOGRAD, True)
    try:
        return function(*args)
    finally:
        if not is_below:
            _exclude(_AUTOGRAD, False)


def forward_below(*args):
    """The `FORWARD_RESULTS` of the kernels, without autograd."""
    return call_below_autograd(forward, eager_ops, *args)


def _gradients_below(*args):
    with below_autograd():
        return gradients(eager_ops, *args)


def _general_below(*args):
    with below_autograd():
        return general_gradients(eager_ops, *args)


def _save(ctx, form, tensors, results):
    """Saves the tensors that the gradients of a forward call need, and returns them. results:
    `FORWARD_RESULTS`."""
    x, residual, gate, weight, bias, next_weight, _ = tensors
    _, h, mean, rstd, next_mean, next_rstd = results
    ctx.form, ctx.dtypes = form, [None if tensor is None else tensor.dtype for tensor in tensors]
    # A missing gradient stays None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)
    kept = x if residual is None or form.residual_after else h, weight, mean, rstd
    kept += (h, next_weight, next_mean, next_rstd) if form.has_next else () if form.is_plain() else (gate, bias)
    ctx.save_for_backward(*kept)
    return kept


def _gradients_in_order(is_long, ctx, dy, dh):
    """The gradients of the arguments of `NormForEager` and `NormForTransforms`, None if not needed.
    is_long: they may be differentiated again, or are a batch. dy, dh: None for zeros."""
    form, (x_dtype, residual_dtype, _, *dtypes), (rows, weight, mean, rstd, *others) = ctx.form, ctx.dtypes, ctx.saved_tensors
    _, need_dx, need_dresidual, need_dgate, *needs = ctx.needs_input_grad
    if dy is None and dh is None:
        return (None,) * (4 + len(needs))
    call = _gradients_again(form, dy, dh) if is_long else _gradients_below if form.is_plain() else _general_below

    def norm(dy, h, weight, mean, rstd, dh, needs, dtypes, need_dresidual):
        """(dx, the gradient in the residual's dtype, of the gate, of the weight, of the bias) of one
        norm."""
        # A float32 residual gets its gradient in float32, not in the dtype of x.
        is_wider = need_dresidual and residual_dtype != x_dtype
        if form.is_plain():
            dx, dweight, dbias, dresidual = call(form.is_layer, dy, h, weight, mean, rstd, dh, form.weight_offset, *needs, is_wider)
        else:
            gate, bias = others
            dx, dgate, dweight, dbias, dresidual = call(form, (need_dgate, *needs, is_wider), dy, h, gate, weight, bias, mean, rstd, dh)
        parameters = dweight if needs[0] else None, dbias.to(dtypes[1]) if needs[1] else None
        return dx, (dresidual if is_wider else dx) if need_dresidual else None, dgate if need_dgate else None, *parameters

    if not form.residual_after:
        dy = torch.zeros_like(rows, dtype=form.out_dtype or x_dtype) if dy is None else dy
        return None, *norm(dy, rows, weight, mean, rstd, dh, needs[:2], dtypes, need_dresidual), None, None
    next_parameters = None, None
    if dy is None:
        dy = dh.to(x_dtype)
    else:
        dy, dh, _, *next_parameters = norm(dy, *others, dh, needs[2:], dtypes[2:], need_dresidual)
    dx, _, _, *parameters = (
        norm(dy, rows, weight, mean, rstd, None, needs[:2], dtypes, False) if need_dx or any(needs[:2]) else (None,) * 5
    )
    return None, dx, dh, None, *parameters, *next_parameters


def _is_batch(dy, dh):
    """Whether dy or dh is a batch of `is_grads_batched`."""
    return (dy is not None and _is_batched(dy)) or (dh is not None and _is_batched(dh))


def _gradients_again(form, dy, dh=None):
    """A differentiable `gradients` or `general_gradients`. PyTorch loses the graph of a Function for a
    batch of `is_grads_batched`, so that uses operations."""
    if torch.is_grad_enabled() and _is_batch(dy, dh):
        return _gradients_by_operations if form.is_plain() else _general_by_operations
    return _NormBackward.apply if form.is_plain() else _GeneralBackward.apply


def _with_tangents(jvp):
    """Passes the saved tensors to a jvp without their tangents, and enables forward mode within it.

    PyTorch disables forward mode in a jvp: second tangents, of nested `torch.func.jvp`, would
    silently be zero.
    """

    def call(ctx, *tangents):
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [None if tensor is None else forward_ad.unpack_dual(tensor).primal for tensor in ctx.saved_tensors]
            return jvp(ctx, saved, *tangents)

    return call


class NormForEager(torch.autograd.Function):
    """y, (y, h) with a residual, or only h of a sum after the norm. For eager calls."""

    @staticmethod
    def forward(ctx, form, *tensors):
        results = forward_below(form, *tensors)
        _save(ctx, form, tensors, results)
        y, h = results[:2]
        return y if h is None else h if y is None else (y, h)

    @staticmethod
    def backward(ctx, dy, dh=None):
        if not ctx.form.has_y():
            dy, dh = None, dy
        return _gradients_in_order(torch.is_grad_enabled() or is_forward_mode() or _is_batch(dy, dh), ctx, dy, dh)


class NormForTransforms(torch.autograd.Function):
    """`FORWARD_RESULTS` for transforms and forward mode; None if absent. Statistics have no
    gradient."""

    @staticmethod
    def forward(*args):
        return forward_below(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*(tensor for tensor in output[2:] if tensor is not None))
        ctx.save_for_forward(*_save(ctx, inputs[0], inputs[1:], output))

    @staticmethod
    def backward(ctx, dy, dh, *_):
        return _gradients_in_order(True, ctx, dy, dh)

    @staticmethod
    @_with_tangents
    def jvp(ctx, saved, _, *tangents):
        form, (rows, weight, mean, rstd, *of_next), (x_dtype, residual_dtype, *_) = ctx.form, saved, ctx.dtypes
        # Computed in float32, so that a tangent is rounded once.
        wide = torch.promote_types(rows.dtype, torch.float32)
        x_t, residual_t, gate_t, *parameters_t = (None if tensor is None else tensor.to(wide) for tensor in tangents)
        if not form.is_plain():
            h_t = _sum(x_t, residual_t)
            y_t = _general_tangent(form, rows, weight, mean, rstd, *of_next, h_t, gate_t, *parameters_t[:2])
        elif form.residual_after:
            h_t = _sum(residual_t, _tangent(form, rows, weight, mean, rstd, x_t, *parameters_t[:2]))
            y_t = _tangent(form, *of_next, h_t, *parameters_t[2:]) if form.has_next else None
        else:
            h_t = _sum(x_t, residual_t)
            y_t = _tangent(form, rows, weight, mean, rstd, h_t, *parameters_t[:2])
        y_t, h_t = (torch.zeros_like(rows) if tensor is None else tensor for tensor in (y_t, h_t))
        return y_t.to(form.out_dtype or x_dtype) if form.has_y() else None, None if residual_dtype is None else h_t.to(residual_dtype), *[None] * 4

    @staticmethod
    def vmap(info, dims, form, *tensors):
        rows, parameters = tensors[:len(ROWS)], tensors[len(ROWS):]
        if any(dim is not None for dim in dims[1 + len(ROWS):]):
            found = _each(info, dims[1:], functools.partial(NormForTransforms.apply, form), *tensors)
        else:
            # The batch is folded into the rows.
            rows = [_in_front(tensor, dim, info.batch_size) for tensor, dim in zip(rows, dims[1:])]
            found = NormForTransforms.apply(form, *rows, *parameters)
        return found, tuple(None if tensor is None else 0 for tensor in found)


def _tangent(form, rows, weight, mean, rstd, rows_t, weight_t, bias_t):
    """The tangent of a norm of `rows` in the dtype of these tangents, float32 or wider; None if all
    are None."""
    terms = [None if bias_t is None else bias_t.expand(rows.shape)]
    if rows_t is not None:
        # The backward kernel, with the tangent as dy and without a weight.
        args = form.is_layer, rows_t, _wide(rows), None, mean, rstd, None, 0.0, False, False, False
        terms.append(_scaled(_gradients_again(form, rows_t)(*args)[0], weight, form.weight_offset))
    if weight_t is not None:
        terms.append(_rows(form.is_layer, rows, mean, rstd)[0] * weight_t)
    return _sum(*terms)


def _general_rows(form, x, gate, weight, bias, mean, rstd):
    """What the derivatives of a norm that is not plain are made of: the activation of the gate and its
    derivative (None without one), x before its multiplication, x_hat and `first` of `_rows`, the
    result before its multiplication, and the function that multiplies rows by the weight after the
    norm. With the cast order weight_first, the weight multiplies x instead."""
    dtype, x = x.dtype, _wide(x)
    act, slope = (None, None) if gate is None else fallback.activated(form.activation, gate)
    rows = x if gate is None or not form.gate_before else x * act
    weigh = lambda rows: _scaled(rows, weight, form.weight_offset)  # noqa: E731
    if form.cast_order == "weight_first":
        rows, weigh = weigh(x), lambda rows: rows
        # The rounding is part of the value and not of the derivatives.
        rows = rows + (rows.to(dtype).to(rows.dtype) - rows).detach()
    x_hat, first, _ = _rows(form.is_layer, rows, mean, rstd, form.groups, form)
    return act, slope, x, x_hat, first, _sum(weigh(x_hat), bias), weigh


def _general_tangent(form, x, weight, mean, rstd, gate, bias, x_t, gate_t, weight_t, bias_t):
    """The tangent of the result of a norm that is not plain; None if all are None."""
    act, slope, x, x_hat, first, v, weigh = _general_rows(form, x, gate, weight, bias, mean, rstd)
    gated = lambda rows, rows_t: _sum(None if rows_t is None else rows_t * act, None if gate_t is None else rows * slope * gate_t)  # noqa: E731
    h_t = gated(x, x_t) if gate is not None and form.gate_before else x_t
    after_t = None if weight_t is None else x_hat * weight_t
    if form.cast_order == "weight_first":
        h_t, after_t = _sum(None if x_t is None else _scaled(x_t, weight, form.weight_offset), None if weight_t is None else x * weight_t), None
    v_t = _sum(None if h_t is None else weigh(first(h_t)), after_t, None if bias_t is None else bias_t.expand(x.shape))
    return gated(v, v_t) if gate is not None and not form.gate_before else v_t


def _general_by_operations(form, needs, dy, x, gate, weight, bias, mean, rstd, dresidual_out):
    """`general_gradients` with PyTorch's operations: equations (7) to (12), (20) and (21)."""
    act, slope, wide_x, x_hat, first, v, weigh = _general_rows(form, x, gate, weight, bias, mean, rstd)
    need_dgate, need_dweight, need_dbias, need_dresidual = needs
    dv, dgate = dy.to(x_hat.dtype), None
    if gate is not None and not form.gate_before:
        dv, dgate = dv * act, dv * v * slope
    dx = _sum(first(weigh(dv)), dresidual_out)
    dweight = dv * x_hat if need_dweight else None
    if form.cast_order == "weight_first":
        dx, dweight = _scaled(dx, weight, form.weight_offset), dx * wide_x if need_dweight else None
    dresidual = dx.to(x.dtype) if need_dresidual else None
    if gate is not None and form.gate_before:
        dx, dgate = dx * act, dx * wide_x * slope
    dweight = _over_rows(dweight).to(weight.dtype) if need_dweight else None
    dx = dx.to(x.dtype if is_cast(form, dy, x) else dy.dtype)
    return dx, dgate.to(gate.dtype) if need_dgate else None, dweight, _over_rows(dv) if need_dbias else None, dresidual


_GENERAL_BACKWARD = "dy", "x", "gate", "weight", "bias", "mean", "rstd", "dresidual_out"


class _GeneralBackward(torch.autograd.Function):
    """(dx, dgate, dweight, dbias, dresidual) of a norm with a gate or groups. Its derivatives are those of
    `_general_by_operations`."""

    @staticmethod
    def forward(*args):
        return _general_below(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.form, ctx.needs, *tensors = inputs
        ctx.mark_non_differentiable(*(tensor for tensor, is_needed in zip(output[1:], ctx.needs) if not is_needed))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def _again(ctx, saved):
        """(the needed results as a function of the differentiable tensors, these by name)."""
        named = dict(zip(_GENERAL_BACKWARD, saved))
        # mean and rstd are functions of x.
        given = {name: tensor for name, tensor in named.items() if tensor is not None and name not in ("mean", "rstd")}

        def again(given):
            found = _general_by_operations(ctx.form, ctx.needs, **named | given)
            return tuple(tensor for tensor in found if tensor is not None)

        return again, given

    @staticmethod
    def backward(ctx, *cotangents):
        again, given = _GeneralBackward._again(ctx, ctx.saved_tensors)
        cotangents = tuple(tensor for tensor, is_made in zip(cotangents, (True, *ctx.needs)) if is_made)
        (found,) = torch.func.vjp(again, given)[1](cotangents)
        return None, None, *map(found.get, _GENERAL_BACKWARD)

    @staticmethod
    @_with_tangents
    def jvp(ctx, saved, _, __, *tangents):
        again, given = _GeneralBackward._again(ctx, saved)
        tangents = dict(zip(_GENERAL_BACKWARD, tangents))
        tangents = {name: torch.zeros_like(tensor) if tangents[name] is None else tangents[name] for name, tensor in given.items()}
        results, vjp = torch.func.vjp(again, given)
        # A vjp is linear in its cotangents: its own vjp is the jvp.
        found = torch.func.vjp(lambda *cotangents: vjp(cotangents)[0], *map(torch.zeros_like, results))[1](tangents)
        found = iter(found)
        return tuple(next(found) if is_made else None for is_made in (True, *ctx.needs))

    @staticmethod
    def vmap(info, dims, form, needs, *tensors):
        _, _, *dims = dims
        is_parameter = [name in ("weight", "bias") for name in _GENERAL_BACKWARD]
        if any(is_one and dim is not None for is_one, dim in zip(is_parameter, dims)) or needs[1] or needs[2]:
            # Each member of the batch needs a separate weight or dweight.
            found = _each(info, dims, functools.partial(_GeneralBackward.apply, form, needs), *tensors)
        else:
            tensors = [one if is_one else _in_front(one, dim, info.batch_size) for one, dim, is_one in zip(tensors, dims, is_parameter)]
            found = _GeneralBackward.apply(form, needs, *tensors)
        return found, tuple(0 if is_made else None for is_made in (True, *needs))


class _NormBackward(torch.autograd.Function):
    """(dx, dweight, dbias, dresidual). Its derivatives treat mean and rstd as functions of h."""

    @staticmethod
    def forward(*args):
        return _gradients_below(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.is_layer, *tensors, ctx.weight_offset, need_dweight, need_dbias, need_dresidual = inputs
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in output]
        is_made = True, need_dweight, need_dbias, need_dresidual
        ctx.mark_non_differentiable(*(t for t, is_needed in zip(output, is_made) if t is not None and not is_needed))
        ctx.is_made = is_made
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        dy, h, weight, mean, rstd, dh = ctx.saved_tensors
        x_hat, first, second = _rows(ctx.is_layer, h, mean, rstd)
        wide_dy = dy.to(x_hat.dtype)
        dx, dweight, dbias, dresidual = (None if tensor is None else tensor.to(x_hat.dtype) for tensor in cotangents)
        dx = _sum(dx, dresidual)
        to_dy, to_h, to_weight = [None if dbias is None else dbias.expand(dy.shape)], [], None
        if dx is not None:
            j = first(dx)
            to_dy.append(_scaled(j, weight, ctx.weight_offset))
            to_h.append(second(_scaled(wide_dy, weight, ctx.weight_offset), dx))
            to_weight = None if weight is None else _over_rows(wide_dy * j)
        if dweight is not None:
            to_dy.append(x_hat * dweight)
            to_h.append(first(wide_dy * dweight))
        found = _as(_sum(*to_dy), dy.dtype), _as(_sum(*to_h), h.dtype), _as(to_weight, weight is not None and weight.dtype)
        return None, *found, None, None, None if dh is None else _as(dx, dh.dtype), None, None, None, None

    @staticmethod
    @_with_tangents
    def jvp(ctx, saved, _, dy_t, h_t, weight_t, __, ___, dh_t, *____):
        dy, h, weight, mean, rstd, _ = saved
        x_hat, first, second = _rows(ctx.is_layer, h, mean, rstd)
        dy = dy.to(x_hat.dtype)
        dy_t, h_t, weight_t, dh_t = (None if t is None else t.to(x_hat.dtype) for t in (dy_t, h_t, weight_t, dh_t))
        wdy = _scaled(dy, weight, ctx.weight_offset)
        wdy_t = _sum(None if dy_t is None else _scaled(dy_t, weight, ctx.weight_offset), None if weight_t is None else dy * weight_t)
        dx_t = _sum(None if wdy_t is None else first(wdy_t), None if h_t is None else second(wdy, h_t), dh_t)
        dweight_t = _sum(None if dy_t is None else dy_t * x_hat, None if h_t is None else dy * first(h_t))
        found = dx_t, *(None if t is None else _over_rows(t) for t in (dweight_t, dy_t)), dx_t
        shapes = h.shape, h.shape[-1:], h.shape[-1:], h.shape
        found = [dy.new_zeros(shape) if tensor is None else tensor for tensor, shape in zip(found, shapes)]
        return tuple(t.to(dtype) if is_made else None for t, dtype, is_made in zip(found, ctx.dtypes, ctx.is_made))

    @staticmethod
    def vmap(info, dims, is_layer, dy, h, weight, mean, rstd, dh, weight_offset, *needs):
        if dims[3] is None and not any(needs[:2]):
            rows = [_in_front(t, dim, info.batch_size) for t, dim in zip((dy, h, mean, rstd, dh), (*dims[1:3], *dims[4:7]))]
            dy, h, mean, rstd, dh = rows
            found = _NormBackward.apply(is_layer, dy, h, weight, mean, rstd, dh, weight_offset, *needs)
            return found, tuple(None if t is None or not is_made else 0 for t, is_made in zip(found, (True, *needs)))
        # Each member of the batch needs a separate weight or dweight.
        found = _each(info, dims, _NormBackward.apply, is_layer, dy, h, weight, mean, rstd, dh, weight_offset, *needs)
        return found, tuple(None if tensor is None else 0 for tensor in found)


class _QuantizedNorm(torch.autograd.Function):
    """(codes, scales, h). Raises NotImplementedError where it is differentiated, instead of a
    silent zero."""

    @staticmethod
    def forward(*args):
        with below_autograd():
            return eager_ops.quantized_rms_norm(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        if any(ctx.needs_input_grad):
            raise NotImplementedError(_QUANTIZED)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(_QUANTIZED)

    @staticmethod
    def vmap(info, dims, *args):
        return _each(info, dims, _QuantizedNorm.apply, *args), (0, 0, 0)


_QUANTIZED = (
    "quantized_rms_norm has no derivative, and x, residual or weight requires one: pass them detached, as x.detach(), or call "
    "rms_norm"
)


def _wide(tensor):
    """The tensor in the dtype of the derivatives' arithmetic: float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _as(tensor, dtype):
    return None if tensor is None else tensor.to(dtype)


def _sum(*terms):
    """The sum of the terms that are not None; None if all are."""
    terms = [term for term in terms if term is not None]
    return sum(terms[1:], terms[0]) if terms else None


def _over_rows(rows):
    return rows.sum(tuple(range(rows.ndim - 1))) if rows.ndim > 1 else rows


def _scaled(rows, weight, weight_offset):
    return rows if weight is None else rows * (weight.to(rows.dtype) + weight_offset)


def _rows(is_layer, h, mean, rstd, groups=1, form=None):
    """(x_hat, first, second) with PyTorch's operations, so that all three can be differentiated
    again.

    first(v) is the derivative of x_hat along v; second(u, v) is the derivative of first(u) along v.
    Both are symmetric: first as a map, second in its arguments and as a map of either. mean and
    rstd arrive as constants with the bits of the forward pass; terms of value zero give them their
    derivatives. form: of a norm that is not plain.
    """
    width = h.shape[-1] // groups

    def spread(statistics):
        """Statistics, for every column."""
        statistics = statistics.unsqueeze(-1)
        return statistics if groups == 1 else statistics.expand(*statistics.shape[:-1], width).reshape(*statistics.shape[:-2], h.shape[-1])

    # Batches of `is_grads_batched` have no rule for unflatten.
    grouped = lambda rows: rows if groups == 1 else rows.reshape(*rows.shape[:-1], groups, width)  # noqa: E731
    average = lambda rows: spread(grouped(rows).mean(-1))  # noqa: E731
    if form is not None and form.l2 == NORMS[3]:
        # Where the norm is clamped, rstd is a constant.
        is_free = (rstd * form.eps < 1 - 2.0**-20).to(rstd.dtype)
        average = lambda rows: spread(grouped(rows).sum(-1) * is_free)  # noqa: E731
    elif form is not None and form.l2 is not None:
        average = lambda rows: spread(grouped(rows).sum(-1))  # noqa: E731
    zero = lambda tensor: tensor - tensor.detach()  # noqa: E731
    rows, rstd = _wide(h), spread(rstd)
    if is_layer:
        rows = rows - spread(mean)
        rows = rows - zero(average(rows))
    rstd = rstd * (1 + rstd.square() * zero(average(rows.square()))).rsqrt()
    x_hat = rows * rstd

    def first(v):
        centred = v - average(v) if is_layer else v
        return rstd * (centred - x_hat * average(v * x_hat))

    def second(u, v):
        first_u, first_v = first(u), first(v)
        return -rstd * (average(v * x_hat) * first_u + average(u * x_hat) * first_v + x_hat * average(u * first_v))

    return x_hat, first, second


def _gradients_by_operations(is_layer, dy, h, weight, mean, rstd, dh, weight_offset, need_dweight, need_dbias, need_dresidual):
    """`gradients` with PyTorch's operations."""
    x_hat, first, _ = _rows(is_layer, h, mean, rstd)
    wide_dy = dy.to(x_hat.dtype)
    dx = _sum(first(_scaled(wide_dy, weight, weight_offset)), dh)
    dweight = _over_rows(wide_dy * x_hat).to(weight.dtype) if need_dweight else None
    return dx.to(dy.dtype), dweight, _over_rows(wide_dy) if need_dbias else None, dx.to(h.dtype)


def _in_front(tensor, dim, size):
    """The tensor with the batch dimension first, expanded to `size` if it has none."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _each(info, dims, function, *args):
    """One call for each member of a batch, with stacked results."""
    member = lambda value, dim, index: value if dim is None else value.select(dim, index)  # noqa: E731
    calls = [function(*[member(v, d, index) for v, d in zip(args, dims)]) for index in range(info.batch_size)]
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*calls))


_BACKWARD = "dy", "x", "weight", "mean", "rstd", "dresidual_out", "weight_offset", "need_dweight", "need_dbias", "need_dresidual"


def _register(name, names):
    """Registers the derivatives of an operator, for autograd and for `torch.func`. names: of its
    parameters."""
    is_layer, below = "layer" in name, getattr(eager_ops, name)

    def differentiated(*args):
        if name.startswith("quantized"):
            return _QuantizedNorm.apply(*args)
        given = {"weight_offset": 0.0, "cast_before_weight": False, "need_dbias": False, "need_y": False} | dict(zip(names, args))
        if "groups" in given:
            # Also without a gate, since an operator of plain norms may lack an argument.
            form = form_of(given)
        else:
            form = Form(is_layer, given.get("eps", 0.0), given["weight_offset"], given["cast_before_weight"], name.endswith("_norm_add"),
                        given["need_y"])
        if name == "norm_backward":
            needs = tuple(given[f"need_{one}"] for one in result_names[name][1:])
            if given["need_dx"]:
                return _GeneralBackward.apply(form, needs, *map(given.get, _GENERAL_BACKWARD))
            form = form._replace(out_dtype=given["dy"].dtype)
            dx, *parameters, empty = _GeneralBackward.apply(form, (*needs[:3], False), *map(given.get, _GENERAL_BACKWARD))
            return empty, *parameters, dx
        if name.endswith("_backward"):
            return tuple(t for t in _NormBackward.apply(is_layer, *map(given.get, _BACKWARD)) if t is not None)
        results = dict(zip(FORWARD_RESULTS, NormForTransforms.apply(form, *map(given.get, FORWARD_TENSORS))))
        # A result that is not needed has no elements.
        found = tuple(given["x"].new_empty(0, dtype=None if one in ("y", "residual_out") else torch.float32) if results[one] is None else results[one]
                      for one in result_names[name])
        return found[0] if len(found) == 1 else found

    def under_autograd(*args):
        if is_forward_mode() or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return differentiated(*args)
        with below_autograd():
            return below(*args)

    _library.impl(name, under_autograd, "Autograd")
    _library.impl(name, differentiated, "FuncTorchDynamicLayerFrontMode")


for _name, _names in parameter_names.items():
    _register(_name, _names)
