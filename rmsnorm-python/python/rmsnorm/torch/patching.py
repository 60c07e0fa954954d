"""`patch`: the norms of a model, found by what they compute."""

import torch

from .functional import layer_norm, rms_norm

# What a module may compute, in the order in which it is asked: (is_layer, weight_offset, cast_before_weight).
_CANDIDATES = ((False, 0.0, True), (False, 0.0, False), (False, 1.0, False), (False, 1.0, True), (True, 0.0, False))

# Elements in which the bits of bfloat16 may differ: sums of a row are added in another order, and a few lie at a tie.
_MOST_DIFFERENT = 0.01


class _Found:
    """What a module computes, and under which name it has its eps."""

    def __init__(self, is_layer, weight_offset, cast_before_weight, eps_name, takes_f32_weight):
        self.is_layer, self.weight_offset, self.cast_before_weight = is_layer, weight_offset, cast_before_weight
        self.eps_name, self.takes_f32_weight = eps_name, takes_f32_weight

    def __call__(self, module, x):
        weight, eps = module._parameters.get("weight"), getattr(module, self.eps_name)
        if self.is_layer:
            return layer_norm(x, weight, module._parameters.get("bias"), eps)
        return rms_norm(x, weight, eps, weight_offset=self.weight_offset, cast_before_weight=self.cast_before_weight)

    def takes(self, x, weight):
        """Whether the module's own result has the dtype of x, as ours has."""
        return weight is None or weight.dtype == x.dtype or (self.takes_f32_weight and weight.dtype == torch.float32)

    def __str__(self):
        if self.is_layer:
            return "layer_norm"
        return f"rms_norm(weight_offset={self.weight_offset:g}, cast_before_weight={self.cast_before_weight})"


class _Patched:
    """The class of a module that was patched, before its own."""

    def forward(self, x, *args, **kwargs):
        """The module's own forward, by our kernels where its arguments are those of a norm."""
        found = self.__dict__.get("_rmsnorm")
        if found is None or args or kwargs or not isinstance(x, torch.Tensor) or not found.takes(x, self._parameters.get("weight")):
            return super().forward(x, *args, **kwargs)
        return found(self, x)

    def __reduce_ex__(self, protocol):
        return _remade, (_original(type(self)),), self.__dict__


_classes = {}


def _patched(original):
    """The patched class of a module's class: of its name, and a subclass of it."""
    if original not in _classes:
        _classes[original] = type(original.__name__, (_Patched, original), {"__module__": original.__module__})
    return _classes[original]


def _original(patched):
    return patched.__mro__[patched.__mro__.index(_Patched) + 1]


def _remade(original):
    patched = _patched(original)
    return object.__new__(patched)


class Patch:
    """What `patch` replaced. `undo()`, or leaving it as a context, gives the model its own norms back."""

    def __init__(self, replaced):
        self._modules = replaced
        #: (name, class, what it computes) of each module.
        self.replaced = [(name, type(module).__name__, str(module._rmsnorm)) for name, module in replaced]

    def undo(self):
        """Gives the modules their own forward back. Their parameters stay as they are."""
        for _, module in self._modules:
            module.__dict__.pop("_rmsnorm", None)
            # Unless something else has changed the class since, which then finds ours without effect.
            if type(module) in _classes.values():
                module.__class__ = _original(type(module))
        self._modules = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.undo()

    def __len__(self):
        return len(self.replaced)

    def __repr__(self):
        lines = [f"{len(self)} norms by rmsnorm:"]
        for kind in dict.fromkeys((name, what) for _, name, what in self.replaced):
            names = [name for name, *of in self.replaced if tuple(of) == kind]
            lines.append(f"  {len(names)} x {kind[0]}: {kind[1]} ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})")
        return "\n".join(lines)


def patch(model: torch.nn.Module) -> Patch:
    """Makes the RMS and layer norms of a model use these kernels, and says which: `print(patch(model))`.

    A module is recognized by its bits, not by its name: its own forward is run on some rows of bfloat16 on the CPU, and it is replaced
    if a norm of ours gives the same. One that computes anything else, or is not understood, is left alone. State dict, parameters,
    `isinstance` and hooks stay; the model can be copied, saved and wrapped (PEFT, FSDP) before or after. Calls with other arguments
    than one tensor, or whose result would have another dtype than theirs, go to the module's own forward.
    """
    found, replaced = {}, []
    for name, module in model.named_modules():
        key = _key(module)
        if key is None:
            continue
        if key not in found:
            found[key] = _recognized(module)
        if found[key] is not None:
            module._rmsnorm = found[key]
            module.__class__ = _patched(type(module))
            replaced.append((name, module))
    return Patch(replaced)


def _eps_name(module):
    """The name of the one number of a module that may be an eps."""
    names = [name for name, value in vars(module).items() if isinstance(value, float) and 0 < value < 0.01]
    return names[0] if len(names) == 1 else None


def _key(module):
    """What the modules of a model that compute the same have in common; None of one that is no norm."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if isinstance(module, _Patched) or next(module.children(), None) is not None or any(True for _ in module.buffers(recurse=False)):
        return None
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    is_norm = "weight" in parameters and set(parameters) <= {"weight", "bias"} and len(shapes) == 1
    eps_name = _eps_name(module)
    if not is_norm or len(next(iter(shapes))) != 1 or eps_name is None or "forward" in vars(module):
        return None
    settings = tuple(sorted((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))))
    return type(module), next(iter(shapes)), tuple(parameters), eps_name, repr(settings)


def _twin(module, weight, bias):
    """The module with other parameters, on the CPU."""
    # Not by the class's own way, which may be FSDP's.
    twin = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    parameters = {"weight": weight} | ({"bias": bias} if module._parameters.get("bias") is not None else {})
    own = {name: None for name in module._parameters}
    twin.__dict__["_parameters"] = own | {name: torch.nn.Parameter(value, requires_grad=False) for name, value in parameters.items()}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        twin.__dict__[name] = {}
    return twin


def _answer(module, x):
    """What the module makes of x; None if it makes no such thing."""
    try:
        with torch.no_grad():
            y = type(module).forward(module, x)
    except Exception:  # Whatever a foreign module raises when it is not what it was taken for.
        return None
    return y if isinstance(y, torch.Tensor) and y.shape == x.shape else None


def _recognized(module):
    """What a module computes, if one of ours computes the same; None of anything else."""
    cols, generator = module.weight.numel(), torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    # No dimension but the last is as long as the weight. In the second batch eps is as large as the variance.
    batch = 5 if cols != 5 else 6
    scales = torch.cat([torch.ones(1, batch, 1), torch.full((1, batch, 1), getattr(module, _eps_name(module)) ** 0.5)])
    x, weight, bias = (random(2, batch, cols) * scales).bfloat16(), random(cols).bfloat16(), random(cols).bfloat16()
    with torch.device("cpu"):
        expected = _answer(_twin(module, weight, bias), x)
        mixed = _answer(_twin(module, weight.float(), bias.float()), x)
    if expected is None or expected.dtype != x.dtype:
        return None
    agreed = []
    for candidate in _CANDIDATES:
        found = _Found(*candidate, _eps_name(module), mixed is not None and mixed.dtype == x.dtype)
        got = found(_twin(module, weight, bias), x)
        different = (got != expected).float().mean().item()
        # Where bits differ they are neighbours.
        is_near = torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=1e-30)
        if different <= _MOST_DIFFERENT and is_near:
            agreed.append((different, len(agreed), found))
    return min(agreed, key=lambda entry: entry[:2])[2] if agreed else None
