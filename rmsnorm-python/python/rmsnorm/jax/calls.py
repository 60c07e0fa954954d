"""Calls of the native XLA handlers, with jax.numpy as the default on platforms that have no
handler."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import _native
from . import reference

_FORWARD, _BACKWARD = "rmsnorm_forward", "rmsnorm_backward"


def _register():
    for (target, platform), handler in _native.xla_handlers().items():
        # The initialize stage compiles CUDA kernels before a program runs: XLA may capture the
        # execute stage in a CUDA graph.
        stages = {"initialize": handler, "execute": handler} if platform == "CUDA" else handler
        jax.ffi.register_ffi_target(target, stages, platform=platform)


_register()

typeof = getattr(jax, "typeof", None) or jax.core.get_aval


def present(values):
    """The values that are not None."""
    return [value for value in values if value is not None]


def filled(values, are_there):
    """The inverse of `present`: one entry per flag, the next value where it is true, else None."""
    values = iter(values)
    return [next(values) if is_there else None for is_there in are_there]


def manual_axes(array):
    """The axes of `shard_map` that an array varies over; empty outside `shard_map`."""
    kind = typeof(array)
    axes = getattr(kind, "mat", None)
    return frozenset(getattr(kind, "vma", None) or ()) if axes is None else axes.varying


def split_of(array):
    """The explicit sharding of an array: for each dimension a mesh axis, a tuple of axes, or
    None."""
    spec = tuple(getattr(getattr(typeof(array), "sharding", None), "spec", None) or ())
    return spec + (None,) * (array.ndim - len(spec))


def _beside(x, dims, dtype, cols=()):
    """The type of a result with the first `dims` dimensions of x, then `cols`. It varies over the
    same `shard_map` axes as x."""
    kind = typeof(x)
    changes = dict(shape=(*x.shape[:dims], *cols), dtype=jnp.dtype(dtype), weak_type=False)
    if getattr(kind, "sharding", None) is not None:
        changes["sharding"] = NamedSharding(kind.sharding.mesh, PartitionSpec(*split_of(x)[:dims], *[None] * len(cols)))
    return kind.update(**changes)


def _call(target, norm, inputs, outputs, rank, vmap_method):
    """{name: output}. inputs: {name: array, or None if absent}. outputs: {name: type}."""
    inputs = {name: array for name, array in inputs.items() if array is not None}
    call = jax.ffi.ffi_call(target, tuple(outputs.values()), vmap_method=vmap_method)
    of_gate = dict(activation=norm.activation, gate_before=np.bool_(norm.gate_before)) if norm.activation else {}
    found = call(
        *inputs.values(), norm=norm.name(), inputs=",".join(inputs), outputs=",".join(outputs), rank=np.int64(rank),
        eps=np.float32(norm.eps), weight_offset=np.float32(norm.weight_offset), cast_order=norm.order(),
        residual_after=np.bool_(norm.residual_after), groups=np.int64(norm.groups), **of_gate,
    )
    return dict(zip(outputs, found))


def _by_platform(kernel, default, *args):
    """The kernel on the CPU and CUDA, `default` elsewhere. XLA chooses when it lowers for a
    platform, so an export has all branches."""
    return jax.lax.platform_dependent(
        *args, cpu=lambda *args: kernel(False, *args), cuda=lambda *args: kernel(True, *args), default=default
    )


#: The arrays and the results of `forward`, in their order.
ARRAYS = "x", "residual", "gate", "weight", "bias", "next_weight", "next_bias"
RESULTS = "y", "residual_out", "mean", "rstd", "next_mean", "next_rstd"


def results_of(norm, has_residual):
    """For each of `RESULTS`, whether a call has it."""
    return norm.has_y(), has_residual, norm.is_layer, True, norm.is_layer and norm.has_next, norm.has_next


def forward(norm, *arrays):
    """`RESULTS` for `ARRAYS`; None for those that the call does not have."""

    def kernel(is_cuda, *arrays):
        inputs = dict(zip(ARRAYS, arrays))
        x, residual = arrays[:2]
        if norm.out_dtype is not None:
            # The handlers' name of an x that does not have the dtype of y.
            inputs["residual"] = inputs.pop("x")
        kinds = {"y": _beside(x, x.ndim, norm.dtype_of_y(x.dtype)), "residual_out": residual is not None and _beside(x, x.ndim, residual.dtype)}
        are_there = results_of(norm, residual is not None)
        statistics = _beside(x, x.ndim - 1, jnp.float32, () if norm.groups == 1 else (norm.groups,))
        outputs = {name: kinds.get(name, statistics) for name, is_there in zip(RESULTS, are_there) if is_there}
        # "expand_dims": a weight that a batch shares is not copied for each member.
        found = _call(_FORWARD, norm, inputs, outputs, x.ndim, "expand_dims")
        return tuple(map(found.get, RESULTS))

    return _by_platform(kernel, lambda *args: reference.forward(norm, *args), *arrays)


#: The arrays of `backward` in their order, and its results after dx.
BACKWARD_ARRAYS = "dy", "x", "gate", "weight", "bias", "mean", "rstd", "dresidual_out"
GRADIENTS = "dgate", "dweight", "dbias", "dresidual"


def backward(norm, *arrays, needs, dtypes):
    """dx and `GRADIENTS` for `BACKWARD_ARRAYS`; None for gradients that are not needed.

    x: the x of `forward`, or its residual_out. bias: only with a gate after the norm.
    needs: whether each of `GRADIENTS` is needed. dtypes: (of the parameters, of the residual).
    """
    parameter, stream = (jnp.dtype(dtype) for dtype in dtypes)

    def kernel(is_cuda, *arrays):
        inputs = dict(zip(BACKWARD_ARRAYS, arrays))
        dy, x = arrays[:2]
        matrix, vector = _beside(dy, dy.ndim, dy.dtype), _beside(dy, 0, parameter, dy.shape[-1:])
        kinds = matrix, vector, vector, _beside(dy, dy.ndim, stream)
        # The handlers' name of a dx that does not have the dtype of dy.
        dx, dtype = ("dx", dy.dtype) if norm.out_dtype is None else ("dresidual", x.dtype)
        outputs = {dx: _beside(dy, dy.ndim, dtype)}
        outputs |= {name: kind for name, kind, is_needed in zip(GRADIENTS, kinds, needs) if is_needed}
        names = [name for name, array in inputs.items() if array is not None] + list(outputs)
        room = _native.xla_workspace_len(
            is_cuda, (norm.name(), norm.order()), (math.prod(dy.shape[:-1]), dy.shape[-1]), ",".join(names),
            (dy.dtype.name, parameter.name, x.dtype.name), (norm.activation, norm.gate_before, norm.groups),
        )
        # XLA allocates the workspace, since a call that XLA captures in a CUDA graph must not
        # allocate.
        outputs |= {"workspace": _beside(dy, 0, jnp.float32, (room,))} if room else {}
        # "broadcast_all": each member of a batch gets separate gradients.
        found = _call(_BACKWARD, norm, inputs, outputs, dy.ndim, "broadcast_all")
        found["dx"] = found.pop(dx)
        return tuple(map(found.get, ("dx", *GRADIENTS)))

    return _by_platform(kernel, lambda *args: reference.backward(norm, *args, needs=needs, dtypes=dtypes), *arrays)
