"""Automatic sharding: devices hold whole rows, and gradients of parameters are summed over the
devices.

XLA would gather all rows on every device for a plain foreign call. `custom_partitioning` tells it
how to split the call.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import calls
from .calls import filled, present

_MATRIX, _STATISTICS, _VECTOR, _GROUP_STATISTICS = "... n", "...", "n", "... g"


def _axes(rows):
    """The mesh axes that split the rows."""
    names = [name for name in rows if name is not None]
    return tuple(axis for name in names for axis in (name if isinstance(name, tuple) else (name,)))


def _specs(rows, *sides):
    """For each side, the partition specs of arrays of these kinds. rows: the split of the rows."""
    whole = PartitionSpec(*rows, None)
    specs = {_MATRIX: whole, _GROUP_STATISTICS: whole, _STATISTICS: PartitionSpec(*rows), _VECTOR: PartitionSpec(None)}
    return [tuple(specs[kind] for kind in side) for side in sides]


def _split(function, local, kinds_in, kinds_out):
    """`function`, split by rows. Each device runs `local(mesh axes that split the rows, *arrays)`.
    kinds: of the arrays."""
    split = custom_partitioning(function)

    def shardings(mesh, args):
        spec = getattr(args[0].sharding, "spec", None)
        if spec is None:
            # Without a sharded argument the program has devices but no mesh: everything is
            # replicated.
            mesh, spec = Mesh(np.array(list(args[0].sharding.device_set)), ("devices",)), ()
        rank = len(args[0].shape)
        rows = (tuple(spec) + (None,) * (rank - len(spec)))[: rank - 1]
        ins, outs = (tuple(NamedSharding(mesh, spec) for spec in side) for side in _specs(rows, kinds_in, kinds_out))
        return mesh, rows, ins, outs

    def partition(mesh, args, results):
        mesh, rows, ins, outs = shardings(mesh, args)
        return mesh, functools.partial(local, _axes(rows)), outs, ins

    def infer(mesh, args, results):
        return shardings(mesh, args)[3]

    # Shardy, the partitioner of JAX 0.7 and later, reads `sharding_rule`; GSPMD calls `infer`.
    rule = ", ".join(kinds_in) + " -> " + ", ".join(kinds_out)
    factors = ("n", "g") if _GROUP_STATISTICS in (*kinds_in, *kinds_out) else ("n",)
    options = {"infer_sharding_from_operands": infer, "sharding_rule": rule, "need_replication_factors": factors}
    known = inspect.signature(split.def_partition).parameters
    split.def_partition(partition=partition, **{name: value for name, value in options.items() if name in known})

    def run(*args):
        # Explicit sharding is part of the types at trace time.
        rows = calls.split_of(args[0])[:-1]
        if not _axes(rows):
            return split(*args)
        mesh = calls.typeof(args[0]).sharding.mesh
        ins, outs = _specs(rows, kinds_in, kinds_out)
        return jax.shard_map(functools.partial(local, _axes(rows)), mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*args)

    return run


def _statistics(norm):
    """The kind of mean and rstd."""
    return _STATISTICS if norm.groups == 1 else _GROUP_STATISTICS


@functools.lru_cache(256)
def _forward(norm, are_there):
    def local(*args):
        return tuple(present(calls.forward(norm, *filled(args, are_there))))

    kinds_in = tuple(_MATRIX if index < 3 else _VECTOR for index, is_there in enumerate(are_there) if is_there)
    results = calls.results_of(norm, are_there[1])
    kinds_out = tuple(_MATRIX if index < 2 else _statistics(norm) for index, is_there in enumerate(results) if is_there)
    return _split(local, lambda axes, *args: local(*args), kinds_in, kinds_out)


def forward(norm, *args):
    """`calls.forward`, split by rows."""
    are_there = tuple(array is not None for array in args)
    found = _forward(norm, are_there)(*present(args))
    return filled(found, calls.results_of(norm, are_there[1]))


@functools.lru_cache(256)
def _backward(norm, are_there, needs, dtypes):
    def with_dtypes(dtypes, *args):
        return tuple(present(calls.backward(norm, *filled(args, are_there), needs=needs, dtypes=dtypes)))

    def local(*args):
        return with_dtypes(dtypes, *args)

    kinds = _MATRIX, _MATRIX, _MATRIX, _VECTOR, _VECTOR, _statistics(norm), _statistics(norm), _MATRIX
    kinds_in = tuple(kind for kind, is_there in zip(kinds, are_there) if is_there)
    kinds_out = tuple(kind for kind, is_there in zip((_MATRIX, _MATRIX, _VECTOR, _VECTOR, _MATRIX), (True, *needs)) if is_there)

    def part(axes, *args):
        if not axes or _VECTOR not in kinds_out:
            return local(*args)
        # Float32 parameters give float32 partial sums, so that the sum over the devices is rounded
        # once.
        args = [array.astype(jnp.float32) if kind == _VECTOR else array for kind, array in zip(kinds_in, args)]
        found = list(with_dtypes((jnp.dtype(jnp.float32), dtypes[1]), *args))
        for index, kind in enumerate(kinds_out):
            if kind == _VECTOR:
                found[index] = jax.lax.psum(found[index], axes).astype(dtypes[0])
        return tuple(found)

    return _split(local, part, kinds_in, kinds_out)


def backward(norm, *args, needs, dtypes):
    """`calls.backward`, split by rows."""
    are_there = tuple(array is not None for array in args)
    found = _backward(norm, are_there, needs, tuple(jnp.dtype(dtype) for dtype in dtypes))(*present(args))
    return filled(found, (True, *needs))
