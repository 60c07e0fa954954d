"""`patch`: the norms of a model, found by trying each of its modules."""

import concurrent.futures
import contextvars
import functools
import inspect
import sys
import types

import torch

from .modules import LayerNorm, RMSNorm
from .trial import Code, Left, Trials, class_before


class _Patched:
    """The class of a module that was patched, before its own."""

    def __init_subclass__(cls, **_):
        """Nothing that a class of a module does to its subclasses."""

    def __reduce_ex__(self, protocol):
        return _remade, (_original(type(self)),), self.__dict__


#: {a module's class: [(its code, its patched class)]}.
_classes = {}


def _patched(original):
    """The patched class of a module's class: of its name, and a subclass of it."""
    known = _classes.setdefault(original, [])
    for code, cls in known:
        if code.is_as_it_was({}):
            return cls
    code, own = Code(original), original.forward
    name = next(iter(_parameters(own)), None)

    @functools.wraps(own)
    def forward(self, *args, **kwargs):
        state = self.__dict__
        found = state.get("_rmsnorm")
        if found is not None and code.is_as_it_was(state):
            if not kwargs:
                x = args[0] if len(args) == 1 else None
            else:
                x = None if args or len(kwargs) != 1 else kwargs.get(name)
            y = found(self, x) if isinstance(x, torch.Tensor) else None
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


def _parameters(forward):
    """The parameters of a forward that take a positional tensor, by name."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    return {parameter.name: parameter for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)}


class Patch:
    """What `patch` replaced, and what it left. `undo()`, or leaving it as a context, gives the model its own norms back."""

    def __init__(self, replaced, left):
        self._modules = [module for _, module in replaced]
        #: (name, class, what it computes) of each module that was replaced.
        self.replaced = [(name, type(module).__name__, str(module.__dict__["_rmsnorm"].kind)) for name, module in replaced]
        #: (name, class, reason) of each module that looks like a norm and stays as it is.
        self.left = left

    def undo(self):
        """Gives the modules their own forward back. Their parameters stay as they are."""
        ours = [cls for known in _classes.values() for _, cls in known]
        for module in self._modules:
            state = module.__dict__
            state.pop("_rmsnorm", None)
            for name in _FORWARDS:
                method = state.get(name)
                if isinstance(method, types.MethodType) and method.__func__ in [cls.forward for cls in ours]:
                    state[name] = types.MethodType(_original(type(module)).forward, module)
            # Unless something else has changed the class since, which then finds ours without effect.
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
        lines = [f"{len(self)} norms by rmsnorm:", *_grouped(self.replaced)]
        if self.left:
            lines += [f"{len(self.left)} left as they are:", *_grouped(self.left)]
        return "\n".join(lines)


def _grouped(entries):
    """A line for all modules of which the same is said."""
    kinds = {}
    for name, *kind in entries:
        kinds.setdefault(tuple(kind), []).append(name)
    for (cls, what), names in kinds.items():
        yield f"  {len(names)} x {cls}: {what} ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})"


def patch(model: torch.nn.Module) -> Patch:
    """Makes the RMS and layer norms of a model use these kernels, and says which: `print(patch(model))`.

    Each module is tried, whatever its name: its own forward is run on a twin with weights of its own on the CPU, in float32, bfloat16 and
    float16, for up to four dimensions before a row, in training and evaluation, with rows from 1e-7 to 1e12, outliers, zeros, NaN and infinity,
    and with gradients. It is replaced if a norm of ours gives the same each time, and `Patch.left` says why another norm is not. A module
    is left, too, if its forward reads anything besides weight, bias and plain values, changes anything, draws random numbers, compares
    values or sizes, or clips its gradient. What it does on other devices alone, or by objects that are global, cannot be seen.

    Weight, bias and eps are read from the module in each call, so that whatever holds them (FSDP, DataParallel, prune, parametrize, PEFT,
    accelerate) goes on. Calls for which the module was not tried go to its own forward: more arguments than one tensor, other dtypes or
    shapes, 16 bits under autocast, a plain value or a method that it reads and that has changed since. State dict, parameters,
    `isinstance` and hooks stay; the model can be copied, saved and wrapped before or after. There are two exceptions. Patch before
    FullyShardedDataParallel. Patch after torch.ao.quantization, which knows a norm by its exact class.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    >>> print(patch(model))
    1 norms by rmsnorm:
      1 x LayerNorm: layer_norm (1)
    """
    # A thread of its own has no mode of the caller's: default device, FakeTensorMode, inference mode, autocast, transforms.
    context = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found, left = thread.submit(context.run, _found, model).result()
    replaced = []
    for name, module, norm, cls in found:
        state = module.__dict__
        try:
            module.__class__ = cls
        except Exception as error:  # Of a layout of its own, or whatever its `__setattr__` raises.
            left.append((name, type(module).__name__, f"its class cannot be replaced: {error}"))
            continue
        state["_rmsnorm"] = norm
        for hooked in _FORWARDS:
            if isinstance(state.get(hooked), types.MethodType):
                state[hooked] = types.MethodType(cls.forward, module)
        replaced.append((name, module))
    return Patch(replaced, left)


# Where accelerate keeps the forward of a module with a hook, and where it puts it afterwards.
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
            found.append((name, module, trials.found(module), _patched(type(module))))
        except Left as reason:
            if looks_like:
                left.append((name, type(module).__name__, str(reason)))
    return found, left


def _looks_like_a_norm(module):
    """(whether its absence from the norms is to be explained, whether it is tried)."""
    if isinstance(module, torch.jit.ScriptModule):
        return ("norm" in module.original_name.lower(),) * 2
    state = vars(module)
    is_named = "norm" in type(module).__name__.lower()
    has_eps = any("eps" in name.lower() for name in state)
    small = any(isinstance(value, float) and 0 < value <= 0.01 for value in state.values())
    weight = state["_parameters"].get("weight")
    has_row = weight is not None and weight.ndim == 1
    return is_named or has_eps or (has_row and small), is_named or has_eps or has_row or small


def _check_before(module, is_sharded):
    """Refuses what is not to be tried."""
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
    required = [name for name, parameter in _parameters(own).items() if parameter.default is parameter.empty]
    if len(required) > 1:
        raise Left(f"its forward takes {len(required)} tensors: {', '.join(required)}")
