"""DTensor rules: devices hold whole rows, nothing is gathered, and gradients of parameters are
partial sums."""

import importlib.abc
import importlib.util
import sys

from .operators import FORWARD_TENSORS, ROWS, is_needed, ops, parameter_names, result_names

_MODULE = "torch.distributed.tensor"


def _placements(x):
    """The placements of x on one mesh dimension: (placement of the rows, placement of sums over
    rows) each."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [(Replicate(), Replicate())] + [(Shard(dim), Partial()) for dim in range(x.ndim - 1)]


def _rule(operator):
    """The sharding rule of an operator: the placements of its results and arguments. Weights and
    biases are replicated."""

    def rule(main, *args):
        from torch.distributed.tensor import Replicate

        given, found = dict(zip(parameter_names[operator], (main, *args))), []
        for rows, sums in _placements(main):
            results = [sums if name in ("dweight", "dbias") else rows for name in result_names[operator]]
            needed = [is_needed(name, given) for name in result_names[operator]]
            inputs = [Replicate() if name in FORWARD_TENSORS[len(ROWS):] else rows for name in given]
            are_tensors = [value is not None and not isinstance(value, (bool, int, float)) for value in given.values()]
            found.append(([placed if is_needed else Replicate() for placed, is_needed in zip(results, needed)],
                          [placed if is_tensor else None for placed, is_tensor in zip(inputs, are_tensors)]))
        return found

    return rule


def _register():
    from torch.distributed.tensor.experimental import register_sharding

    for name in parameter_names:
        if not name.startswith("quantized_"):
            register_sharding(getattr(ops, name))(_rule(name))


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the rules when DTensor is imported. Importing it here would cost every program more
    than half a second."""

    is_asking = False

    def find_spec(self, name, path, target=None):
        """The module's spec as the other finders return it. This finder stays installed until the
        module is executed."""
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
    """Registers the rules with DTensor, now or when it is imported."""
    if _MODULE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenImported())
