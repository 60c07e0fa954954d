"""DTensor: rows may be on several devices, a row may not. Then nothing is gathered, and gradients of parameters are partial sums."""

import importlib.abc
import importlib.util
import sys

from .operators import ops

_MODULE = "torch.distributed.tensor"


def _placements(x):
    """Every way in which one dimension of the mesh may have x: of each, how the rows lie and how the sums over them come out."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [(Replicate(), Replicate())] + [(Shard(dim), Partial()) for dim in range(x.ndim - 1)]


def _forward(adds, has_bias, statistics, scalars):
    """The rule of a forward operator with so many statistics and arguments that are no tensors."""

    def rule(x, *args):
        from torch.distributed.tensor import Replicate

        vectors = args[adds : adds + 1 + has_bias]
        found = []
        for rows, _ in _placements(x):
            inputs = [rows] * (1 + adds) + [None if vector is None else Replicate() for vector in vectors]
            found.append(([rows] * (1 + adds + statistics), inputs + [None] * scalars))
        return found

    return rule


def _rms_norm_backward(dy, x, weight, rstd, dresidual_out, weight_offset, need_dweight, need_dresidual):
    from torch.distributed.tensor import Replicate

    vector = None if weight is None else Replicate()
    return [
        (
            [rows, total if need_dweight else Replicate(), rows if need_dresidual else Replicate()],
            [rows, rows, vector, rows, None if dresidual_out is None else rows, None, None, None],
        )
        for rows, total in _placements(dy)
    ]


def _layer_norm_backward(dy, x, weight, mean, rstd, dresidual_out, need_dweight, need_dbias, need_dresidual):
    from torch.distributed.tensor import Replicate

    vector = None if weight is None else Replicate()
    return [
        (
            [rows, total if need_dweight else Replicate(), total if need_dbias else Replicate(),
             rows if need_dresidual else Replicate()],
            [rows, rows, vector, rows, rows, None if dresidual_out is None else rows, None, None, None],
        )
        for rows, total in _placements(dy)
    ]


def _register():
    from torch.distributed.tensor.experimental import register_sharding

    for operator, rule in (
        (ops.rms_norm, _forward(0, 0, 1, 3)),
        (ops.rms_norm_inference, _forward(0, 0, 0, 3)),
        (ops.layer_norm, _forward(0, 1, 2, 1)),
        (ops.layer_norm_inference, _forward(0, 1, 0, 1)),
        (ops.add_rms_norm, _forward(1, 0, 1, 3)),
        (ops.add_layer_norm, _forward(1, 1, 2, 1)),
        (ops.rms_norm_backward, _rms_norm_backward),
        (ops.layer_norm_backward, _layer_norm_backward),
    ):
        register_sharding(operator)(rule)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the rules once DTensor is imported, which takes more than half a second and most programs never do."""

    is_asking = False

    def find_spec(self, name, path, target=None):
        """The module as the others find it. Who only asks whether it is there does not run it, and this stays."""
        if name != _MODULE or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module):
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = run_and_register
        return spec


def register():
    """Gives DTensor the rules, now or when it is imported."""
    if _MODULE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())
