"""Gradients outside the operators: for every day, and for `torch.func`.

Two Functions, since one cannot be quick and transformed: `apply` of one that has `setup_context` binds its arguments by name, at some
40 us a call, and `torch.func` takes no other.
"""

import torch

from .operators import SECOND, eager_ops, forward, gradients, gradients_of_inputs, save

# Below autograd, so that the operators' own gradients, which cost some microseconds a call, are not looked at.
_below_autograd = torch._C._AutoDispatchBelowAutograd
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def forward_below(*args):
    """(y, h, mean, rstd), without autograd."""
    with _below_autograd():
        return forward(eager_ops, *args)


def _gradients_below(*args):
    with _below_autograd():
        return gradients(eager_ops, *args)


def _gradients_in_order(call, ctx, dy, dh):
    """The gradients of the arguments of `Norm` and `NormForTransforms`."""
    _, _, need_dresidual, need_dweight, need_dbias, _, _, _ = ctx.needs_input_grad
    needs = need_dweight, need_dbias, need_dresidual
    dx, dweight, dbias, dresidual = gradients_of_inputs(call, ctx, needs, dy, dh)
    return None, dx, dresidual, dweight, dbias, None, None, None


class Norm(torch.autograd.Function):
    """y, or (y, h) where a residual is added."""

    @staticmethod
    def forward(ctx, is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight):
        results = forward_below(is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight)
        save(ctx, is_layer, x, residual, weight, bias, weight_offset, results)
        return results[0] if residual is None else results[:2]

    @staticmethod
    def backward(ctx, dy, dh=None):
        # To be differentiated again, or a batch of gradients: the long way.
        is_long = torch.is_grad_enabled() or (dy is not None and _is_batched(dy)) or (dh is not None and _is_batched(dh))
        call = _NormBackward.apply if is_long else _gradients_below
        return _gradients_in_order(call, ctx, dy, dh)


class NormForTransforms(torch.autograd.Function):
    """(y, h, mean, rstd), of which the last two have no gradient; None for what the norm has not."""

    @staticmethod
    def forward(*args):
        return forward_below(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        is_layer, x, residual, weight, bias, _, weight_offset, _ = inputs
        ctx.mark_non_differentiable(*(tensor for tensor in output[2:] if tensor is not None))
        save(ctx, is_layer, x, residual, weight, bias, weight_offset, output)

    @staticmethod
    def backward(ctx, dy, dh, _, __):
        return _gradients_in_order(_NormBackward.apply, ctx, dy, dh)

    @staticmethod
    def vmap(info, dims, is_layer, x, residual, weight, bias, eps, weight_offset, cast_before_weight):
        _, x_dim, residual_dim, weight_dim, bias_dim, _, _, _ = dims
        rest = eps, weight_offset, cast_before_weight
        if weight_dim is not None or bias_dim is not None:
            found = _each(info, dims, NormForTransforms.apply, is_layer, x, residual, weight, bias, *rest)
        else:
            # A batch of rows is so many more rows.
            x = _in_front(x, x_dim, info.batch_size)
            residual = None if residual is None else _in_front(residual, residual_dim, info.batch_size)
            found = NormForTransforms.apply(is_layer, x, residual, weight, bias, *rest)
        return found, tuple(None if tensor is None else 0 for tensor in found)


class _NormBackward(torch.autograd.Function):
    """(dx, dweight, dbias, dresidual)."""

    @staticmethod
    def forward(*args):
        return _gradients_below(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(SECOND)

    @staticmethod
    def vmap(info, dims, *args):
        # Each member of the batch has a dweight of its own.
        found = _each(info, dims, _NormBackward.apply, *args)
        return found, tuple(None if tensor is None else 0 for tensor in found)


def _in_front(tensor, dim, size):
    """With the dimension of the batch first."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _each(info, dims, function, *args):
    """One call for each member of a batch."""
    member = lambda value, dim, index: value if dim is None else value.select(dim, index)  # noqa: E731
    calls = [function(*[member(v, d, index) for v, d in zip(args, dims)]) for index in range(info.batch_size)]
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*calls))
