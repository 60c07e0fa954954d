"""`patch` finds the norms of a model by running each of its modules on test inputs, and replaces
them."""

import concurrent.futures
import contextvars
import functools
import sys
import types

import torch

from .modules import LayerNorm, RMSNorm
from .trial import Code, Left, Trials, arguments_of, class_before


class _Patched:
    """The mixin of a patched module's class, in front of the original class."""

    def __init_subclass__(cls, **_):
        """Does not run the original class's `__init_subclass__`."""

    def __reduce_ex__(self, protocol):
        return _remade, (_original(type(self)),), self.__dict__


#: {original class: [(its code, its patched class)]}.
_classes = {}


def _patched(original):
    """The patched class of a module's class: a subclass with the same name."""
    known = _classes.setdefault(original, [])
    for code, cls in known:
        if code.is_as_it_was({}):
            return cls
    code, own = Code(original), original.forward
    names, _, _ = arguments_of(own)

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        state = self.__dict__
        found = state.get("_rmsnorm")
        if found is not None and code.is_as_it_was(state):
            x, gate = (args[0], None) if len(args) == 1 and not kwargs else _tensors(names, args, kwargs)
            y = found(self, x, gate) if isinstance(x, torch.Tensor) and (gate is None or isinstance(gate, torch.Tensor)) else None
            if y is not None:
                return y
        return original.forward(self, *args, **kwargs)

    known.append((code, class_before(_Patched, original, forward=forward)))
    return known[-1][1]


def _original(patched):
    return patched.__mro__[patched.__mro__.index(_Patched) + 1]


def _remade(original):
    patched = _patched(original)
    return object.__new__(patched)


def _tensors(names, args, kwargs):
    """The arguments of these one or two names; (None, None) for other arguments."""
    given = dict(zip(names, args))
    if len(args) > len(names) or any(name in given or name not in names for name in kwargs):
        return None, None
    given.update(kwargs)
    return given.get(names[0]) if names else None, given.get(names[1]) if len(names) == 2 else None


class Patch:
    """The result of `patch`: the modules that it replaced and left. `undo()`, or leaving the `with`
    block, restores the model.

    >>> import torch, rmsnorm.torch as rt
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> with rt.patch(model) as patched:
    ...     print(patched.replaced, patched.left)
    [('1', 'LayerNorm', 'layer_norm')] []
    """

    def __init__(self, replaced, left):
        self._modules = [module for _, module in replaced]
        #: (name, class, norm that it computes) of each replaced module.
        self.replaced = [(name, type(module).__name__, str(module.__dict__["_rmsnorm"])) for name, module in replaced]
        #: (name, class, reason) of each module that looks like a norm but was not replaced.
        self.left = left

    def undo(self):
        """Restores the modules' own forward. Parameters are not changed.

        >>> import torch, rmsnorm.torch as rt
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        >>> rt.patch(model).undo()
        >>> type(model[0]) is torch.nn.LayerNorm
        True
        """
        ours = [cls for known in _classes.values() for _, cls in known]
        for module in self._modules:
            state = module.__dict__
            state.pop("_rmsnorm", None)
            for name in _FORWARDS:
                method = state.get(name)
                if isinstance(method, types.MethodType) and method.__func__ in [cls.forward for cls in ours]:
                    state[name] = types.MethodType(_original(type(module)).forward, module)
            # If other code changed the class after `patch`, the class stays, without effect.
            if type(module) in ours:
                module.__class__ = _original(type(module))
        self._modules = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.undo()

    def __len__(self):
        return len(self.replaced)

    def __repr__(self):
        lines = [f"norms replaced: {len(self)}", *_grouped(self.replaced, " by")]
        if self.left:
            lines += [f"norms left as they are: {len(self.left)}", *_grouped(self.left, ":")]
        return "\n".join(lines)


def _grouped(entries, link):
    """One line for all modules with the same class and text, with the names of the first three."""
    kinds = {}
    for name, *kind in entries:
        kinds.setdefault(tuple(kind), []).append(name)
    for (cls, what), names in kinds.items():
        modules = f"module{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{', ..' if len(names) > 3 else ''}"
        yield f"  {len(names)} x {cls}{link} {what} ({modules})"


def patch(model: torch.nn.Module) -> Patch:
    """Makes the RMS and layer norms of a model, also those with a gate and in groups of columns, use
    these kernels, and reports which: `print(patch(model))`.

    Every module that may be a norm is tested, also of unknown classes. Its forward runs on a copy
    of the module with test weights on the CPU: in float32, bfloat16 and float16, with up to four
    dimensions before a row, in training and evaluation, on rows from 1e-7 to 1e12, outliers, zeros,
    NaN and infinity, with gates from 1e-3 to 1e3, and with gradients. The module is replaced if one norm of this package gives
    the same results in all tests. `Patch.left` has the reason for each norm that is not replaced. A
    module is not replaced, too, if its forward reads anything except weight, bias and plain values,
    changes anything, draws random numbers, compares values or sizes, or clips its gradient. Not
    detected: behaviour that is specific to another device, or that depends on global objects.

    Each call reads weight, bias and eps from the module, so tools that manage them (FSDP,
    DataParallel, prune, parametrize, PEFT, accelerate) keep working. The module's own forward runs
    for calls that were not tested: arguments beside a tensor and its gate, other dtypes or shapes, 16 bits
    under autocast, or after a change of a plain value or method that forward reads. State dict,
    parameters, `isinstance` and hooks stay. The model can be copied, saved and wrapped before or
    after `patch`, with two exceptions: patch before FullyShardedDataParallel, and after
    torch.ao.quantization, which looks for the exact class.

    >>> import torch, rmsnorm.torch as rt
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> print(rt.patch(model))
    norms replaced: 1
      1 x LayerNorm by layer_norm (module 1)
    """
    # A new thread has none of the caller's modes: default device, FakeTensorMode, inference mode,
    # autocast, transforms.
    context = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found, left = thread.submit(context.run, _found, model).result()
    replaced = []
    for name, module, norm, cls in found:
        state = module.__dict__
        try:
            module.__class__ = cls
        except Exception as error:  # The class has another memory layout, or its `__setattr__` raises.
            left.append((name, type(module).__name__, f"its class cannot be replaced: {error}"))
            continue
        state["_rmsnorm"] = norm
        for hooked in _FORWARDS:
            if isinstance(state.get(hooked), types.MethodType):
                state[hooked] = types.MethodType(cls.forward, module)
        replaced.append((name, module))
    return Patch(replaced, left)


# accelerate keeps the forward of a hooked module in `_old_forward`, and restores it to `forward`.
_FORWARDS = ("_old_forward", "forward")


def _found(model):
    """[(name, module, its norm, its class when patched)] and [(name, class, reason)]."""
    trials, found, left = Trials(), [], []
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    sharded = {id(part) for module in model.modules() if isinstance(module, fsdp) for part in module.modules()}
    for name, module in model.named_modules():
        looks_like, is_tried = _looks_like_a_norm(module)
        if not is_tried:
            continue
        try:
            _check_before(module, id(module) in sharded)
            norms = trials.found(module)
            found.append((name, module, norms, _patched(type(module))))
        except Left as reason:
            if looks_like:
                left.append((name, type(module).__name__, str(reason)))
    return found, left


def _looks_like_a_norm(module):
    """(whether `left` explains why the module is not replaced, whether it is tested)."""
    if isinstance(module, torch.jit.ScriptModule):
        return ("norm" in module.original_name.lower(),) * 2
    state = vars(module)
    is_named = "norm" in type(module).__name__.lower()
    has_eps = any("eps" in name.lower() for name in state)
    small = any(isinstance(value, float) and 0 < value <= 0.01 for value in state.values())
    weight = state["_parameters"].get("weight")
    has_row = weight is not None and weight.ndim == 1
    # A layer may keep the eps of a norm within it.
    is_layer = state["_modules"] and not has_row
    return is_named or has_eps and not is_layer or has_row and small, is_named or has_eps or has_row or small


def _check_before(module, is_sharded):
    """Raises `Left` for modules that cannot be tested."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Left("it is a ScriptModule: patch before torch.jit.script")
    if isinstance(module, _Patched):
        raise Left("it is patched already")
    if isinstance(module, (RMSNorm, LayerNorm)):
        raise Left("it is a norm of rmsnorm already")
    if is_sharded:
        raise Left("FullyShardedDataParallel holds its weight in flat shards: patch before wrapping")
    state, own = vars(module), type(module).forward
    is_own = lambda forward: isinstance(forward, types.MethodType) and forward.__self__ is module and forward.__func__ is own  # noqa: E731
    hooked = state.get("_old_forward") if "_hf_hook" in state else state.get("forward")
    if "forward" in state and not is_own(hooked):
        raise Left("its forward was replaced by another one on the module itself")
