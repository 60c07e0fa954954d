"""Automatic sharding: rows may be on several devices, a row may not, and gradients of parameters are summed over the devices.

A plain foreign call under jit would have XLA gather all rows on every device. `custom_partitioning` says how to split it, and has no rule
for vmap, which `custom_vmap` around it gives.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from . import calls

_MATRIX, _STATISTICS, _VECTOR = "... n", "...", "n"


def _rows(sharding, rank):
    """How the rows of an array with that sharding are split."""
    spec = tuple(sharding.spec)
    return (spec + (None,) * (rank - len(spec)))[: rank - 1]


def _axes(rows):
    """The axes of the mesh that rows are split over."""
    names = [name for name in rows if name is not None]
    return tuple(axis for name in names for axis in (name if isinstance(name, tuple) else (name,)))


def _split(function, local, kinds_in, kinds_out):
    """`function` of arrays of these kinds, which XLA may split by rows; each part is done by `local`, told the axes of the mesh."""
    split = custom_partitioning(function)

    def shardings(mesh, args):
        rows = _rows(args[0].sharding, len(args[0].shape))
        kinds = {
            _MATRIX: NamedSharding(mesh, PartitionSpec(*rows, None)), _STATISTICS: NamedSharding(mesh, PartitionSpec(*rows)),
            _VECTOR: NamedSharding(mesh, PartitionSpec(None)),
        }
        return rows, *(tuple(kinds[kind] for kind in side) for side in (kinds_in, kinds_out))

    def partition(mesh, args, results):
        rows, ins, outs = shardings(mesh, args)
        return mesh, functools.partial(local, _axes(rows)), outs, ins

    def infer(mesh, args, results):
        return shardings(mesh, args)[2]

    # Shardy, JAX's partitioner from 0.7 on, goes by the rule; the one before it asks `infer`.
    rule = ", ".join(kinds_in) + " -> " + ", ".join(kinds_out)
    options = {"infer_sharding_from_operands": infer, "sharding_rule": rule, "need_replication_factors": ("n",)}
    known = inspect.signature(split.def_partition).parameters
    split.def_partition(partition=partition, **{name: value for name, value in options.items() if name in known})
    return split


def _present(values):
    return [value for value in values if value is not None]


def _filled(values, are_there):
    """With None where there is nothing."""
    values = iter(values)
    return [next(values) if is_there else None for is_there in are_there]


def _batched(split, local, kinds):
    """`split`, with a rule for vmap: a batch of rows is so many more rows, and all else goes to `local`, member by member."""
    call = custom_vmap(lambda *args: split(*args))

    @call.def_vmap
    def rule(size, are_batched, *args):
        goes = all(is_batched == (kind != _VECTOR) for is_batched, kind in zip(are_batched, kinds[0]))
        if goes and _VECTOR not in kinds[1]:
            found = call(*args)
        else:
            axes = [0 if is_batched else None for is_batched in are_batched]
            found = jax.vmap(local, axes)(*args)
        return found, jax.tree.map(lambda _: True, found)

    return call


@functools.cache
def _forward(norm, are_there):
    def local(*args):
        return tuple(_present(calls.forward(norm, *_filled(args, are_there))))

    kinds_in = tuple(kind for kind, is_there in zip((_MATRIX, _MATRIX, _VECTOR, _VECTOR), are_there) if is_there)
    kinds_out = (_MATRIX,) * (1 + are_there[1]) + (_STATISTICS,) * (1 + norm.is_layer)
    split = _split(local, lambda axes, *args: local(*args), kinds_in, kinds_out)
    return _batched(split, local, (kinds_in, kinds_out))


def forward(norm, *args):
    """`calls.forward`, split by rows."""
    are_there = tuple(array is not None for array in args)
    found = _forward(norm, are_there)(*_present(args))
    return _filled(found, (True, are_there[1], norm.is_layer, True))


@functools.cache
def _backward(norm, are_there, needs, dtypes):
    def with_dtypes(dtypes, *args):
        return tuple(_present(calls.backward(norm, *_filled(args, are_there), needs, dtypes)))

    def local(*args):
        return with_dtypes(dtypes, *args)

    need_dweight, need_dbias, need_dresidual = needs
    kinds = (_MATRIX, _MATRIX, _VECTOR, _STATISTICS, _STATISTICS, _MATRIX)
    kinds_in = tuple(kind for kind, is_there in zip(kinds, are_there) if is_there)
    kinds_out = (_MATRIX,) + (_VECTOR,) * (need_dweight + need_dbias) + (_MATRIX,) * need_dresidual

    def part(axes, *args):
        if not axes or not (need_dweight or need_dbias):
            return local(*args)
        # Sums of a device are not rounded before they are added to the others': parameters in float32 have them so.
        dy, x, weight, *rest = _filled(args, are_there)
        weight = None if weight is None else weight.astype(jnp.float32)
        found = list(with_dtypes((jnp.dtype(jnp.float32), dtypes[1]), *_present((dy, x, weight, *rest))))
        for index, kind in enumerate(kinds_out):
            if kind == _VECTOR:
                found[index] = jax.lax.psum(found[index], axes).astype(dtypes[0])
        return tuple(found)

    return _batched(_split(local, part, kinds_in, kinds_out), local, (kinds_in, kinds_out))


def backward(norm, dy, x, weight, mean, rstd, dresidual_out, needs, dtypes):
    """`calls.backward`, split by rows."""
    args = dy, x, weight, mean, rstd, dresidual_out
    are_there = tuple(array is not None for array in args)
    found = _backward(norm, are_there, needs, tuple(jnp.dtype(dtype) for dtype in dtypes))(*_present(args))
    return _filled(found, (True, *needs))
