"""The trial of a module: its own forward runs on many inputs, and each result is compared with a
norm of this package.

A trial works on a twin: a copy of the module with test weights on the CPU, which records the
attributes that forward reads.
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import math
import numbers
import random
import sys
import types
import typing
import warnings

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .checks import ACTIVATIONS, LARGEST
from .functional import layer_norm, normalize, rms_norm


class ABSENT:
    """Stands for a missing value. A class, since copies and pickles of a class are the same
    object."""


# The relative difference at which two results count as equal. In float32 the sums may be added in
# another order; in 16 bits a few elements (`_MOST_NEIGHBOURS`) may be rounded to the neighbouring
# value.
_UNIT = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_MOST_NEIGHBOURS = 0.01
_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
_is_traced = torch._C._get_tracing_state


class Left(Exception):
    """The reason why a module is not replaced."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A norm of this package, without its eps."""

    is_layer: bool
    #: What is added to the weight: within the kernel, or before it and rounded to the weight's dtype.
    weight_offset: float = 0.0
    rounds_offset: bool = False
    cast_before_weight: bool = False
    #: Of the gate; None without one.
    activation: str | None = None
    gate_before: bool = False
    groups: int = 1
    #: "l2_norm" in place of an RMS norm; rstd_first or weight_first.
    l2: str | None = None
    cast_order: str | None = None

    @property
    def is_plain(self):
        """Whether it has neither a gate nor groups, nor an order of roundings of its own, and is no L2
        norm."""
        return self.activation is None and self.groups == 1 and self.l2 is None and self.cast_order is None

    def __call__(self, x, gate, weight, bias, eps, dims):
        if weight is None and bias is None and dims > 1:
            # Without weight and bias, only `dims` tells how many dimensions form one row.
            return self(x.flatten(-dims), None if gate is None else gate.flatten(-dims), weight, bias, eps, 1).view(x.shape)
        offset = self.weight_offset
        if offset and (self.is_layer or self.rounds_offset):
            weight, offset = weight + offset, 0.0
        if not self.is_plain:
            return self._general(x, gate, weight, bias, eps, offset)
        if self.is_layer:
            return layer_norm(x, weight, bias, eps)
        return rms_norm(x, weight, eps, weight_offset=offset, cast_before_weight=self.cast_before_weight)

    def _general(self, x, gate, weight, bias, eps, weight_offset):
        if x.dtype is _F32:
            # A gate and parameters of 16 bits beside a float32 x: they are not rounded here.
            gate, weight, bias = (None if tensor is None else tensor.float() for tensor in (gate, weight, bias))
        return normalize(x, weight, bias, is_layer=self.is_layer, eps=eps, gate=gate, activation=self.activation, gate_before=self.gate_before,
                         groups=self.groups, l2=self.l2, cast_order=self.cast_order, weight_offset=weight_offset,
                         cast_before_weight=self.cast_before_weight)

    def __str__(self):
        options = []
        if self.activation is not None:
            options += [f"activation={self.activation}", f"norm_before_gate={not self.gate_before}"]
        options += [f"groups={self.groups}"] * (self.groups != 1)
        options += [f"weight_offset={self.weight_offset:g}"] * (not self.is_layer or bool(self.weight_offset))
        options += ["rounds_offset=True"] * self.rounds_offset
        if self.cast_order is not None:
            options += [f"cast_order={self.cast_order}"]
        else:
            options += [] if self.is_layer else [f"cast_before_weight={self.cast_before_weight}"]
        name = self.l2 or ("layer_norm" if self.is_layer else "rms_norm")
        name += "_gated" * (self.activation is not None or self.groups != 1 and self.l2 is None)
        return f"{name}({', '.join(options)})" if options else name


# In the order in which they are compared. They differ in float32.
_KINDS = (Kind(False), Kind(False, 1.0), Kind(True), Kind(True, 1.0), Kind(False, l2="l2_norm"), Kind(False, cast_order="weight_first"),
          Kind(False, 1.0, cast_order="weight_first"))


@dataclasses.dataclass(frozen=True)
class Found:
    """The norm that a module computes, and the calls for which this was tested."""

    kind: Kind
    #: The attribute that is eps; None if eps is a constant in the code of forward.
    eps_name: str | None
    #: The eps of the trial.
    eps: float | None
    has_weight: bool
    has_bias: bool
    #: The last dimensions, which form one row; None for one dimension of any length.
    shape: tuple | None
    #: The numbers of dimensions that may come before the row.
    leading: tuple
    #: (dtype of x, of weight and bias, of the gate), None for those that the call does not have.
    dtypes: tuple
    #: Whether float32 gives the same results under autocast.
    in_autocast: bool
    #: (name, value) of the other attributes that forward reads; ABSENT for a missing attribute.
    settings: tuple

    def __call__(self, module, x, gate):
        """The norm of x, and of its gate or None, with the module's current weight, bias and eps;
        None if the trial did not cover this call or a change of the module."""
        # A weight or bias that is None and that forward reads is one of the settings.
        weight = getattr(module, "weight", None) if self.has_weight else None
        bias = getattr(module, "bias", None) if self.has_bias else None
        if (weight is None) is self.has_weight or (bias is None) is self.has_bias:
            return None
        parameter = weight if self.has_weight else bias if self.has_bias else None
        dtype, shape = x.dtype, self.shape
        if (dtype, None if parameter is None else parameter.dtype, None if gate is None else gate.dtype) not in self.dtypes:
            return None
        if gate is not None and (gate.is_nested or gate.layout is not torch.strided or gate.shape != x.shape):
            return None
        if self.has_weight and self.has_bias and (bias.dtype is not weight.dtype or bias.shape != weight.shape):
            return None
        dims = 1 if shape is None else len(shape)
        if x.ndim - dims not in self.leading or x.is_nested or x.layout is not torch.strided:
            return None
        if shape is not None and (x.size(-1) != shape[-1] or dims > 1 and x.shape[-dims:] != shape
                                  or (parameter is not None and parameter.shape != shape)):
            return None
        # Under autocast the module's operations may turn 16 bits into float32, as CUDA's do.
        # TorchScript traces must run without this package.
        if torch._C._is_any_autocast_enabled() and not (self.in_autocast and dtype is _F32) or _is_traced() is not None:
            return None
        for name, value in self.settings:
            now = getattr(module, name, ABSENT)
            if now is not value and _is_other(now, value):
                return None
        eps = self.eps if self.eps_name is None else getattr(module, self.eps_name, ABSENT)
        if not (isinstance(eps, (float, int)) and 0 <= eps <= LARGEST) and (eps is not None or self.eps is not None):
            return None
        return self.kind(x, gate, weight, bias, eps, dims)


@dataclasses.dataclass(frozen=True)
class Norms:
    """The norms that a module computes of one tensor, and of a tensor and its gate; None for one
    that is not a norm of this package."""

    alone: Found | None
    gated: Found | None

    def __call__(self, module, x, gate=None):
        """As `Found`."""
        found = self.alone if gate is None else self.gated
        return None if found is None else found(module, x, gate)

    def __str__(self):
        if self.gated is None or self.alone is None:
            return str((self.gated or self.alone).kind)
        return f"{self.gated.kind}, without a gate {self.alone.kind}"


def arguments_of(forward):
    """(the names of up to two tensors that a forward takes by position, whether it may take one
    alone, whether it may take a second one). The second one's default must be None."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return (), True, False
    parameters = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    required = [one.name for one in parameters if one.default is one.empty]
    if len(required) > 2:
        raise Left(f"its forward takes {len(required)} tensors: {', '.join(required)}")
    may_have_two = len(parameters) > 1 and (len(required) == 2 or parameters[1].default is None)
    return tuple(one.name for one in parameters[: 1 + may_have_two]), len(required) < 2, may_have_two


def _is_other(now, value):
    """Whether a value has changed. True and 1 differ, as do -0.0 and 0.0; values that cannot be
    compared, such as tensors, differ."""
    try:
        return type(now) is not type(value) or bool(now != value) or repr(now) != repr(value)
    except Exception:
        return True


def _is_constant(value):
    """Whether a value is immutable."""
    if isinstance(value, (bool, numbers.Number, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device, torch.layout,
                          torch.memory_format)):
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    if isinstance(value, types.FunctionType):
        return all(_is_constant(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    if isinstance(value, functools.partial):
        return all(map(_is_constant, (value.func, *value.args, *value.keywords.values())))
    return False


_CONTAINERS = (list, dict, set, tuple, collections.OrderedDict, collections.deque)


def _copied(value):
    """A copy of a constant or a container of constants; ABSENT for any other value."""
    if _is_constant(value):
        return value
    if type(value) not in _CONTAINERS:
        return ABSENT
    parts = list(map(_copied, value.values() if isinstance(value, dict) else value))
    if any(part is ABSENT for part in parts):
        return ABSENT
    return type(value)(zip(value, parts) if isinstance(value, dict) else parts)


# The attributes of every module.
_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"}
# The attributes that hold a module's tensors and submodules.
_TENSORS = ("_parameters", "_buffers", "_modules")


def _classes_of(original):
    """The classes of a module's class, except the base classes of every module."""
    return [cls for cls in original.__mro__ if cls not in torch.nn.Module.__mro__]


def _class_attribute(original, name):
    """The class attribute of this name; ABSENT if there is none."""
    return next((vars(cls)[name] for cls in _classes_of(original) if name in vars(cls)), ABSENT)


class _Twin:
    """The mixin of a twin's class, in front of the original class."""

    def __init_subclass__(cls, **_):
        """Does not run the original class's `__init_subclass__`."""

    def __getattribute__(self, name):
        trial = object.__getattribute__(self, "__dict__").get("_trial")
        own = super().__getattribute__
        if trial is not None and name == "__dict__":
            trial.reads_all |= trial.is_running
        return own(name) if trial is None or name.startswith("__") else trial.read(name, own)


def class_before(mixin, original, **namespace):
    """A subclass of (mixin, a module's class), with the name of the module's class."""
    namespace = {"__module__": original.__module__, "__qualname__": original.__qualname__} | namespace
    try:
        # `new_class` uses the metaclass of the module's class.
        return types.new_class(original.__name__, (mixin, original), {}, lambda own: own.update(namespace))
    except TypeError as error:
        raise Left(f"its class cannot be derived from: {error}") from None


def first_line(error):
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _tensor_of(module, name):
    """The module's attribute of this name if it is a tensor, or None."""
    try:
        with torch.no_grad():
            value = getattr(module, name, None)
        value is None or not isinstance(value, torch.Tensor) or value.shape
    except Exception as error:  # A property raised, or an uninitialized parameter has no shape.
        raise Left(f"its {name} cannot be read: {first_line(error)}") from None
    return value if isinstance(value, torch.Tensor) else None


class Trials:
    """The trials of a model's modules, with the inputs that they share."""

    def __init__(self):
        self._inputs, self._twins, self._known = {}, {}, {}

    def found(self, module):
        """The norms that a module computes. Raises `Left` with the reason if there are none."""
        _, may_have_one, may_have_two = arguments_of(type(module).forward)
        found, reasons = [], []
        for has_gate, may in enumerate((may_have_one, may_have_two)):
            one = self._tried(module, bool(has_gate)) if may else None
            found.append(None if isinstance(one, Left) else one)
            reasons += [one] if isinstance(one, Left) else []
        if found == [None, None]:
            raise Left("; with a gate, ".join(dict.fromkeys(map(str, reasons))))
        return Norms(*found)

    def _tried(self, module, has_gate):
        """The norm that a module computes of one tensor, or of a tensor and a gate; the reason,
        `Left`, if there is none.

        Modules of one class share a trial if all attributes that forward has read are equal: its
        code cannot tell them apart.
        """
        try:
            weight, bias = _tensor_of(module, "weight"), _tensor_of(module, "bias")
            shape, original = _row_shape(module, weight, bias), type(module)
            parameters = shape, type(weight), type(bias), has_gate
            for names, state, found in self._known.get(original, ()):
                if (parameters, _state(module, names)) == state:
                    return found
            if original not in self._twins:
                self._twins[original] = class_before(_Twin, original)
            trial = _Trial(module, self._twins[original], weight, bias, has_gate)
        except Left as reason:
            return reason
        # A norm for rows of any length is tested with two lengths.
        shapes = [(48,), (80,)] if shape is None else [shape]
        # A module that raises `Left` may have written to its inputs, so these are not reused.
        inputs = [self._inputs.pop(one, None) or _Inputs(one) for one in shapes]
        try:
            with warnings.catch_warnings(action="ignore"), _without_trace(_classes_of(self._twins[original])):
                found = trial.found(shape, inputs)
        except Left as reason:
            found = reason
        else:
            self._inputs.update(zip(shapes, inputs))
        if not trial.reads_all:
            state = parameters, _state(module, trial.names)
            self._known.setdefault(original, []).append((trial.names, state, found))
        return found


def _attributes_of(module):
    """The module's own attributes, parameters, buffers and submodules, without the attributes of
    every module."""
    own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
    return own | {name: value for tensors in _TENSORS for name, value in vars(module)[tensors].items()}


def _state(module, names):
    """The attributes that a forward reads, in a form to compare: it differs if a value or a type
    differs."""
    own = _attributes_of(module)
    values = [(name, name in own, _copied(own.get(name))) for name in sorted(names)]
    return [(name, is_there, type(value), repr(value), value) for name, is_there, value in values]


def _row_shape(module, weight, bias):
    """The last dimensions that a module normalizes; None if neither normalized_shape nor a
    parameter tells."""
    normalized_shape = vars(module).get("normalized_shape")
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    is_shape = isinstance(normalized_shape, (tuple, list)) and all(isinstance(size, int) for size in normalized_shape)
    normalized_shape = tuple(normalized_shape) if is_shape else None
    if weight is None and bias is None:
        return normalized_shape
    shape = tuple((bias if weight is None else weight).shape)
    if bias is not None and tuple(bias.shape) != shape:
        raise Left(f"its weight is of shape {shape}, and its bias of {tuple(bias.shape)}")
    if len(shape) != 1 and normalized_shape != shape:
        raise Left(f"its weight has {len(shape)} dimensions: {shape}")
    if 0 in shape:
        raise Left("its weight has no elements here: if others hold it in shards, patch before they do")
    return shape


def _generators():
    """(read, write) of the state of each random number generator."""
    yield lambda: torch.get_rng_state().tolist(), lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))
    yield random.getstate, random.setstate
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield lambda: [part.tolist() if hasattr(part, "tolist") else part for part in numpy.get_state()], numpy.set_state


@contextlib.contextmanager
def _without_trace(classes):
    """Restores random number generators and the module's classes after a trial, and raises `Left`
    if they changed."""
    generators = [(read, write, read()) for read, write in _generators()]
    attributes = [{name: (value, _copied(value)) for name, value in vars(cls).items()} for cls in classes]
    reason = None
    try:
        yield
    except Left as left:
        reason = left
    finally:
        for read, write, state in generators:
            if read() != state:
                write(state)
                reason = Left("its forward draws random numbers")
        for cls, before in zip(classes, attributes):
            changed = [name for name in vars(cls) if name not in before and not name.startswith("__")]
            for name in changed:
                delattr(cls, name)
            for name, (value, copy) in before.items():
                if vars(cls).get(name, ABSENT) is not value:
                    setattr(cls, name, value)
                    changed.append(name)
                if copy is not ABSENT and copy != value:
                    value.clear()
                    (value.update if hasattr(value, "update") else value.extend)(copy)
                    changed.append(name)
            reason = Left(f"its forward changes its class's `{changed[-1]}`") if changed else reason
    if reason is not None:
        raise reason


@functools.cache
def _settings_of(operator):
    """The indices of an operator's arguments that are neither tensors nor sizes."""
    def element(kind):
        while kind.kind() in ("ListType", "OptionalType"):
            kind = kind.getElementType()
        return kind.kind()
    return [i for i, argument in enumerate(operator._schema.arguments) if element(argument.real_type) not in ("TensorType", "SymIntType")]


class _Operators(TorchDispatchMode):
    """Records the operators of a forward, with the arguments that are neither tensors nor sizes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, _, args=(), kwargs=None):
        settings = [args[i] for i in _settings_of(operator) if i < len(args)]
        self.seen.append((operator, settings, {k: v for k, v in (kwargs or {}).items() if not isinstance(v, torch.Tensor)}))
        return operator(*args, **(kwargs or {}))


class _Size(int):
    """The size of a dimension before a row. It records comparisons, except with other sizes and
    with 0 and 1, which are tested."""

    def __new__(cls, value, told):
        self = super().__new__(cls, value)
        self.told = told
        return self

    def __hash__(self):
        self.told.append("looks up a size of its input in a table")
        return int(self)


def _method_of_size(name, is_comparison):
    own = getattr(int, name)

    def method(self, other):
        found = own(self, other)
        if is_comparison and not isinstance(other, _Size) and other not in (0, 1):
            self.told.append(f"compares a size of its input with {other}")
        return found if is_comparison or found is NotImplemented else _Size(found, self.told)

    setattr(_Size, name, method)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _method_of_size(f"__{_name}__", True)
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod"):
    _method_of_size(f"__{_name}__", False)


class _Queries(TorchFunctionMode):
    """Records queries of the input that a norm does not need. dims: the number of dimensions of a
    row."""

    def __init__(self, dims):
        super().__init__()
        self._dims, self.told = dims, []

    def __torch_function__(self, function, _, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        name = function.__self__.__name__ if name == "__get__" else name
        if name in _NOT_ASKED:
            self.told.append(f"looks at its input's `{name}`")
        if isinstance(found, torch.Size):
            return torch.Size([*[_Size(size, self.told) for size in found[: -self._dims]], *found[-self._dims :]])
        if name == "size":
            x, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
            return _Size(found, self.told) if dim % x.ndim < x.ndim - self._dims else found
        return _Size(found, self.told) if name in ("numel", "nelement") else found


_NOT_ASKED = frozenset(("__len__", "grad_fn", "is_leaf", "storage_offset", "stride", "data_ptr", "_version", "is_inference"))
# (device, sizes of the dimensions before a row): the operators must be the same for all entries of
# a line. Few elements, none, and on the meta device many. None stands for the length of a row.
_SIZES = (
    ("cpu", ((3,), (1,), (70,))),
    ("cpu", ((0, 6), (0, 1), (0, None), (None, 0), (1, 0), (2**16, 0))),
    ("cpu", ((0, 2, 3), (0, 1, 1), (1, 1, 0), (0, None, 7), (0, 7, None), (None, 0, 5), (2**16, 2**16, 0))),
    ("meta", ((18,), (2**20,))),
    ("meta", ((3, 6), (2**16, 2**15))),
)
# Operators whose result depends on comparing values, so that tests on some values prove nothing
# about others; and operators that no gradient of a norm needs.
_PIECEWISE = frozenset((
    "_local_scalar_dense", "equal", "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "isnan", "isinf", "isposinf", "isneginf",
    "sign", "sgn", "signbit", "floor", "ceil", "round", "trunc", "frac", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "sort",
    "topk", "any", "all", "nonzero", "bucketize", "searchsorted",
))
_CLIPS = frozenset((
    "clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "relu", "relu6", "nan_to_num", "maximum", "minimum", "fmax", "fmin",
    "hardshrink", "softshrink", "leaky_relu",
))


def _refuse_looks(operators, names=_PIECEWISE | _CLIPS, what="forward"):
    """Raises `Left` for operators, in place or not, that look at values."""
    for operator, *_ in operators.seen:
        name = operator._schema.name.partition("::")[2].rstrip("_")
        if name in names:
            raise Left(f"its {what} looks at values, by `{name}`")


class _Call(typing.NamedTuple):
    """The circumstances of one call in a trial."""

    #: The number of dimensions before a row.
    leading: int
    training: bool
    #: Whether autograd records.
    records: bool
    x_requires_grad: bool
    gate_requires_grad: bool
    parameters_require_grad: bool


_CALLS = tuple(itertools.starmap(_Call, (
    (2, False, False, False, False, False), (2, True, True, True, False, False), (1, False, False, False, True, True),
    (1, True, True, True, True, True), (3, False, True, False, True, True), (3, True, False, False, False, False),
    (0, False, False, False, False, False), (4, True, False, False, False, False),
)))


class _Inputs:
    """Rows of one shape, parameters and gradients, and the results of this package's norms for
    them."""

    def __init__(self, shape):
        self.shape, self.cols = shape, math.prod(shape)
        generator = torch.Generator("cpu").manual_seed(0)
        uniform = lambda *size: torch.rand(size, generator=generator, dtype=_F32, device="cpu")  # noqa: E731
        normal = lambda *size: torch.randn(size, generator=generator, dtype=_F32, device="cpu")  # noqa: E731
        scales = [10.0**exponent for exponent in range(-7, 5)] + [1e12, 1.0, 1.0, 0.0, 1.0, 1.0]
        # Short rows are repeated, for enough elements.
        repeats = 1 + 256 // (len(scales) * self.cols)
        rows = normal(len(scales) * repeats, self.cols) * torch.tensor(scales, dtype=_F32, device="cpu").repeat(repeats)[:, None]
        rows[13::18] += 3.0
        rows[14::18, self.cols // 2] = 1e4
        self._finite = rows.clone()
        self._finite[15::18] = normal(repeats, self.cols)
        # Where the weight comes first, the cube of 1 / 1e16 is no float32 in the module's own gradient.
        self._finite[12::18] *= 1e-4
        rows[16::18, self.cols // 3] = float("nan")
        rows[17::18, self.cols // 3] = float("inf")
        # Some rows have large gradients, so that a module that clips gradients is found.
        self._rows, self._dy = rows, uniform(*rows.shape) * 10.0 ** (torch.arange(len(rows), dtype=_F32, device="cpu")[:, None] % 7 - 2)
        # Magnitudes from 1e-3 to 1e4, so that a module that clips its result is found.
        vector = lambda: 10.0 ** (uniform(self.cols) * 7 - 3) * (1 - 2 * (uniform(self.cols) < 0.5).float())  # noqa: E731
        self._weight, self._bias = vector(), vector()
        # Gates of many sizes. None is between -100 and -60, where an activation is a subnormal number.
        sizes = torch.tensor([1.0, 0.1, 1e-3, 1.0, 3.0, 10.0, 1e3], dtype=_F32, device="cpu")[torch.arange(len(rows)) % 7, None]
        gates = normal(*rows.shape).clamp(-6.0, 6.0) * sizes
        gates = torch.where(sizes > 10.0, gates.abs(), gates)
        gates[1::5, self.cols // 4] = -1e4
        self._finite_gates = gates.clone()
        for first, value in ((2, "nan"), (3, "inf"), (4, "-inf")):
            gates[first::18, self.cols // 2] = float(value)
        self._gates = gates
        # Cached, since many modules use the same ones.
        self.x, self.gate, self.ours, self.scales = map(functools.cache, (self._x, self._gate, self._ours, self._scales))

    def __str__(self):
        return f"rows of {' x '.join(map(str, self.shape))}"

    def _x(self, dtype, leading, is_finite=False):
        """The rows in a dtype, with `leading` dimensions before the row; without NaN and infinity
        if `is_finite`."""
        rows = self._finite if is_finite else self._rows
        rows = torch.where(rows.isinf(), rows, rows.clamp(-6e4, 6e4)) if dtype == _F16 else rows
        return self._shaped(rows, dtype, leading)

    def _gate(self, dtype, leading, is_finite=False):
        """The gates of these rows; None if the dtype is None."""
        return None if dtype is None else self._shaped(self._finite_gates if is_finite else self._gates, dtype, leading)

    def _shaped(self, rows, dtype, leading):
        return (rows if leading else rows[0]).to(dtype).reshape(*((), (-1,), (3, -1), (3, 2, -1), (3, 2, 1, -1))[leading], *self.shape)

    def given(self, dtypes, call):
        """(x, gate) of a call."""
        x, gate = self.x(dtypes[0], call.leading, call.records), self.gate(dtypes[2], call.leading, call.records)
        return x.detach().requires_grad_(call.x_requires_grad), None if gate is None else gate.detach().requires_grad_(call.gate_requires_grad)

    def parameters(self, dtype, has):
        """(weight, bias), None for one that the module does not have."""
        return [vector.to(dtype).view(self.shape) if is_there else None for vector, is_there in zip((self._weight, self._bias), has)]

    def gradients(self, y, *inputs):
        """The gradients of the inputs that require them. dy has the sign of y: a module that
        detaches its statistics then misses a large term."""
        inputs = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        if not inputs or not y.requires_grad:
            return [None] * len(inputs)
        dy = self._dy.to(y.dtype)[: y.numel() // self.cols].view(y.shape) * y.detach().sign()
        return torch.autograd.grad(y, inputs, dy, allow_unused=True)

    def _ours(self, kind, eps, dtypes, call, has):
        """(y, gradients) of a norm of this package."""
        given = self.given(dtypes, call)
        parameters = [v if v is None else v.requires_grad_(call.parameters_require_grad) for v in self.parameters(dtypes[1], has)]
        with torch.set_grad_enabled(call.records):
            y = kind(*given, *parameters, eps, len(self.shape))
        return y.detach(), self.gradients(y, *given, *parameters) if call.records else []

    def size_of_y(self, kind, eps, has, call):
        """The magnitude of the terms of each element of y."""
        return self.scales(kind, eps, has)["y"][: None if call.leading else 1]

    def _scales(self, kind, eps, has):
        """The magnitude of the terms whose sums are y and the gradients, by name, for each finite
        row."""
        weight, bias = self._weight.double(), self._bias.double().abs() * has[1]
        weight = (weight + kind.weight_offset).abs() if has[0] else torch.ones_like(weight)
        x, z, grouped = self._finite.double(), self._finite_gates.double(), lambda rows: rows.unflatten(-1, (kind.groups, -1))
        before = after = torch.ones((), dtype=torch.float64, device="cpu")
        if kind.activation is not None:
            sigmoid = z.sigmoid()
            # A term that is small beside the 1 in its sum has the rounding errors of 1.
            rest = 1.0 - sigmoid + 2.0**-10
            act, slope = (z.abs() * sigmoid, sigmoid * (1.0 + z.abs() * rest)) if kind.activation == "silu" else (sigmoid, sigmoid * rest)
            before, after = (act, after) if kind.gate_before else (before, act)
        h, dv = x * before, self._dy * after
        is_first = kind.cast_order == "weight_first"
        if is_first:
            h, weight, first = h * weight, torch.ones_like(weight), weight
        rows = grouped(h)
        terms = rows.abs()
        if kind.is_layer:
            # An element near 0 beside a large one is -mean in the centred row.
            mean = rows.mean(-1, keepdim=True)
            rows, terms = rows - mean, terms + mean.abs()
        total = rows.square().sum(-1, keepdim=True) / (1 if kind.l2 else rows.shape[-1])
        rstd = (total + (torch.finfo(_F32).eps if eps is None else eps)).rsqrt()
        x_hat = (terms * rstd).flatten(-2)
        dh = (grouped(dv * weight).amax(-1, keepdim=True) * rstd).expand_as(rows).flatten(-2)
        sizes = dict(y=(weight + bias) * after, input=dh * before, weight=(dv * x_hat).sum(0), bias=dv.sum(0))
        if is_first:
            # The test weights differ by magnitudes, so x_hat is large in a few columns.
            dh = dh * (1.0 + x_hat)
            sizes |= dict(input=dh * first, weight=(dh * x.abs()).sum(0))
        if kind.activation is not None:
            sizes["gate"] = (dh * x.abs() if kind.gate_before else self._dy * (weight * x_hat + bias)) * slope
        sizes["y"] = sizes["y"].expand_as(x)
        return {name: size.float() for name, size in sizes.items()}


def _distance(got, expected, scale, unit):
    """(the largest difference, in units of the largest one that rounding explains; the fraction of
    the elements that differ)."""
    is_same = (got == expected) | (got.isnan() & expected.isnan())
    different = 1.0 - is_same.float().mean().item()
    if not different:
        return 0.0, 0.0
    info = torch.finfo(expected.dtype)
    got, expected, is_same = (tensor.reshape(scale.shape) for tensor in (got.float(), expected.float(), is_same))
    allowed = expected.abs().clamp(max=info.max) * unit + scale * _UNIT[_F32] + info.smallest_normal * info.eps
    return ((got - expected).abs() / allowed).masked_fill(is_same, 0.0).nan_to_num(math.inf, math.inf).max().item(), different


class Code:
    """The code that a module's forward may run: forward, the methods and properties of its classes,
    and global functions and plain values, all found by the names in the code."""

    def __init__(self, original):
        #: The float constants of the code, and the default eps of torch's norms that it calls.
        self.numbers = []
        #: The names of plain class attributes, and the strings of the code, which may name
        #: attributes.
        self.names, self.words = set(), set()
        #: Members of classes and global variables, which may be replaced later: {(namespace's id,
        #: name): (namespace, name, value)}.
        self._members = {}
        #: The names of methods and properties. An attribute of the module with such a name would
        #: hide them.
        self.methods = set()
        self._classes, self._reached = [vars(cls) for cls in _classes_of(original)], set()
        self._original, self._own = original, original.forward
        self._reach(self._own)
        names = {name for function in self._reached for code in _codes(function) for name in code.co_names}
        self.numbers += [1e-5] * ("layer_norm" in names) + [None] * ("rms_norm" in names)
        self.members = tuple(self._members.values())
        # accelerate's hook sets a `forward` attribute, which calls this forward.
        self.methods.discard("forward")

    def is_as_it_was(self, state):
        """Whether the code is unchanged, and no attribute of the module (state) hides a method."""
        if self._original.forward is not self._own:
            return False
        for namespace, name, value in self.members:
            now = namespace.get(name, ABSENT)
            if now is not value and _is_other(now, value):
                return False
        for name in self.methods:
            if name in state:
                return False
        return True

    def _reach(self, forward):
        functions = [forward]
        for function in functions:
            # The functions within a property, a class method, a decorated function and a partial.
            within = (getattr(function, name, None) for name in ("fget", "__func__", "__wrapped__", "func"))
            functions += [value for value in within if value is not None]
            if not isinstance(function, types.FunctionType) or function in self._reached:
                continue
            # PyTorch's functions are not searched, except the forward of a module.
            if (function.__module__ or "").startswith("torch.") and function.__name__ != "forward":
                continue
            self._reached.add(function)
            shared = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            shared += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
            for value in shared:
                if type(value) in _CONTAINERS and not _is_constant(value):
                    raise Left(f"its forward has a {type(value).__name__} that its calls share")
            functions += [value for value in shared if isinstance(value, (types.FunctionType, functools.partial))]
            self.numbers += [value for value in shared if type(value) is float]
            for code in _codes(function):
                self.numbers += [value for value in code.co_consts if type(value) is float]
                self.words |= {value for value in code.co_consts if isinstance(value, str) and value.isidentifier()}
                for name in code.co_names:
                    functions += self._named(function.__globals__, name)

    def _named(self, variables, name):
        """The functions of this name among the class attributes and the global variables."""
        values = [namespace.get(name, ABSENT) for namespace in self._classes]
        if any(map(_is_bound, values)):
            self.methods.add(name)
            # Record all classes: another one may get a method of this name later.
            self._members.update({(id(namespace), name): (namespace, name, value) for namespace, value in zip(self._classes, values)})
            yield from filter(_is_bound, values)
        elif any(value is not ABSENT and _copied(value) is not ABSENT for value in values):
            self.names.add(name)
        value = variables.get(name, ABSENT)
        if isinstance(value, (types.FunctionType, functools.partial)):
            self._members[id(variables), name] = variables, name, value
            yield value
        elif not isinstance(value, type) and _copied(value) is not ABSENT:
            self._members[id(variables), name] = variables, name, _copied(value)
            self.numbers += [value] * (type(value) is float)


def _is_bound(value):
    """Whether a class attribute is a method or property."""
    return hasattr(type(value), "__get__") and not isinstance(value, types.BuiltinFunctionType)


def _codes(function):
    """The code objects of a function and of its nested functions."""
    codes = [function.__code__]
    for code in codes:
        codes += [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return codes


def _is_filled(cell):
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


class _Trial:
    """The trial of one module."""

    def __init__(self, module, twin_class, weight, bias, has_gate):
        self._has_gate, self._what = has_gate, "a tensor and a gate" if has_gate else "one tensor"
        self._original, self._has = type(module), (weight is not None, bias is not None)
        self._code = Code(type(module))
        self._is_parameter = [isinstance(tensor, torch.nn.Parameter) for tensor in (weight, bias)]
        self._given = {name: None for name, is_there in zip(("weight", "bias"), self._has) if is_there}
        own = _attributes_of(module)
        # The twin gets the plain attributes only: other parameters, modules and objects could
        # change unnoticed.
        self._plain = {name: _copied(value) for name, value in own.items() if name not in self._given}
        self._withheld = {name for name, value in self._plain.items() if value is ABSENT} | set(_TENSORS)
        self._plain = {name: value for name, value in self._plain.items() if value is not ABSENT}
        self.names, self.reads_all, self.is_running, self._error = set(), False, False, None
        self._twin = object.__new__(twin_class)
        vars(self._twin).update(vars(torch.nn.Module()) | {name: _copied(value) for name, value in self._plain.items()})
        self._before = dict(vars(self._twin)) | self._plain
        vars(self._twin)["_trial"] = self

    def read(self, name, own):
        """An attribute of the twin."""
        if name in self._given:
            return self._given[name]
        self.names.add(name)
        if name in self._withheld:
            raise AttributeError(name)
        return own(name)

    def _is_of_class(self, name):
        """Whether an attribute is a class attribute, and not a method or property."""
        value = _class_attribute(self._original, name)
        return value is not ABSENT and not _is_bound(value)

    def _check_reads(self):
        """Raises `Left` if forward reads an attribute that the twin does not have."""
        for name in sorted(self.names):
            if name in self._withheld:
                raise Left(f"its forward reads its `{name}`, too")
            if name not in self._plain and self._is_of_class(name) and _copied(_class_attribute(self._original, name)) is ABSENT:
                raise Left(f"its forward reads its class's `{name}`, too")

    def _check_changes(self):
        """Raises `Left` if forward changes its module."""
        now = vars(self._twin)
        for name in sorted((now.keys() | self._before.keys()) - {"_trial", "training"}):
            a, b = now.get(name, ABSENT), self._before.get(name, ABSENT)
            if a is not b and not (name in self._before and a == b):
                raise Left(f"its forward changes its `{name}`")

    def _own(self, inputs, dtypes, call, change=lambda rows: rows):
        """(y, gradients) of the module's own forward; None if it raises."""
        x, gate = (None if rows is None else change(rows) for rows in inputs.given(dtypes, call))
        parameters = inputs.parameters(dtypes[1], self._has)
        for i, name in enumerate(("weight", "bias")):
            if name in self._given:
                if self._is_parameter[i]:
                    parameters[i] = torch.nn.Parameter(parameters[i], False)
                self._given[name] = parameters[i].requires_grad_(call.parameters_require_grad)
        vars(self._twin)["training"] = call.training
        y = self._forward(x, gate, call.records)
        if y is None:
            return None
        if not call.records:
            return y.detach(), []
        if y._backward_hooks:
            raise Left("its forward puts a hook on its result")
        try:
            with _Operators() as operators:
                gradients = inputs.gradients(y, x, gate, *parameters)
        except Exception as error:
            raise Left(f"its forward has no gradient: {first_line(error)}") from None
        _refuse_looks(operators, _CLIPS, "gradient")
        return y.detach(), gradients

    def _forward(self, x, gate, records, queries=contextlib.nullcontext()):  # noqa: B008
        given = [x] if gate is None else [x, gate]
        versions = [rows._version for rows in given]
        try:
            self.is_running = True
            # One of the calls without gradients runs in inference mode.
            is_inference = not records and x.ndim % 2
            with torch.inference_mode() if is_inference else torch.set_grad_enabled(records), queries:
                y = self._original.forward(self._twin, *given)
        except Exception as error:  # The module may raise anything.
            self._check_reads()
            self._error = error
            return None
        finally:
            self.is_running = False
        if [rows._version for rows in given] != versions:
            raise Left("its forward writes to its input")
        if not isinstance(y, torch.Tensor):
            raise Left(f"its forward gives a {type(y).__name__}")
        if y.shape != x.shape:
            raise Left(f"its forward gives the shape {tuple(y.shape)} for {tuple(x.shape)}")
        return y

    def found(self, shape, inputs):
        """The norm that the module computes. Afterwards `names` are those of all attributes that the
        result depends on."""
        try:
            return self._found(shape, inputs)
        finally:
            self._complete_names()

    def _complete_names(self):
        self.names |= self._code.names | (self._plain.keys() | self._code.words if self.reads_all else set())

    def _dtypes(self):
        """The dtypes of x, of weight and bias, and of the gate that are tested."""
        has_none = not any(self._has)
        found = [(_F32, _F32), (_BF16, _BF16), (_BF16, _F32), (_F16, _F16), (_F16, _F32)]
        found = [(x, None) for x in (_F32, _BF16, _F16)] if has_none else found
        if not self._has_gate:
            return [(*pair, None) for pair in found]
        # Models of 16 bits whose part before the norm is computed in float32.
        wide = [(_F32, None if has_none else parameters, gate) for gate in (_BF16, _F16) for parameters in (gate, _F32)]
        return [(*pair, pair[0]) for pair in found] + list(dict.fromkeys(wide))

    def _found(self, shape, inputs):
        first, *others = inputs
        possible = self._dtypes()
        kind, eps_name, eps = self._kind_and_eps(first, possible[0])
        results = {call: self._own(first, possible[0], call) for call in _CALLS}
        leading = tuple(sorted({call.leading for call in _CALLS} - {call.leading for call, got in results.items() if got is None}))
        if not {1, 2} <= set(leading):
            raise Left(f"its forward does not take {self._what} of 2 and 3 dimensions with {first}: {first_line(self._error)}")
        calls = [call for call in _CALLS if call.leading in leading]
        self._compare(first, kind, eps, possible[0], {call: results[call] for call in calls})
        self._compare_layout(first, kind, eps, possible[0], calls)
        kinds = self._roundings(kind)
        dtypes, reason = [possible[0]], None
        for some_dtypes in possible[1:]:
            # No gradients in float16: they may overflow in one of the two computations only.
            some = [call for call in calls if not (call.records and _F16 in some_dtypes)]
            results = {call: self._own(first, some_dtypes, call) for call in some}
            for one in kinds:
                try:
                    self._compare(first, one, eps, some_dtypes, results)
                    # The twin still has the last call's parameters, which are of these dtypes.
                    self._operators_of(first.x(some_dtypes[0], 2), first.gate(some_dtypes[2], 2))
                except Left as left:
                    reason = reason or str(left)
                else:
                    kinds = kinds if some_dtypes[0] is _F32 else [one]
                    dtypes.append(some_dtypes)
                    break
        if not any(x_dtype is _BF16 for x_dtype, *_ in dtypes):
            raise Left(reason)
        for more in others:
            self._compare(more, kinds[0], eps, possible[0], {call: self._own(more, possible[0], call) for call in calls})
        self._compare_operators(first, leading)
        in_autocast = self._is_same_in_autocast(first, kind, eps, possible[0], calls[0])
        self._check_reads()
        self._check_changes()
        self._complete_names()
        is_absent = lambda name: name not in self._given and not hasattr(self._original, name)  # noqa: E731
        settings = tuple((name, _copied(self._value(name))) for name in sorted(self.names - {eps_name, "training"})
                         if name in self._plain or self._is_of_class(name) or is_absent(name))
        return Found(kinds[0], eps_name, eps, *self._has, shape, leading, tuple(dtypes), in_autocast, settings)

    def _value(self, name):
        return self._plain[name] if name in self._plain else _class_attribute(self._original, name)

    def _kind_and_eps(self, inputs, dtypes):
        """(kind, name of the attribute that is eps or None, its value) of the norm that is equal in
        float32."""
        for call in (call for call in _CALLS if not call.records):
            got = self._own(inputs, dtypes, call)
            if got is not None:
                break
        else:
            raise Left(f"its forward does not take {self._what} with {inputs}: {first_line(self._error)}")
        self._check_reads()
        self._check_changes()
        is_number = lambda value: value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))  # noqa: E731
        names = [name for name in self.names - {"weight", "bias"} if name in self._plain or self._is_of_class(name)]
        values = {name: self._value(name) for name in sorted(names) if is_number(self._value(name))}
        in_code = self._code.numbers
        kinds, tried = self._kinds(inputs, values.values()), []
        for kind, value in itertools.product(kinds, dict.fromkeys([*values.values(), *in_code])):
            if 0 <= value < math.inf if value is not None else not kind.is_layer:
                eps = value if value is None else float(value)
                tried.append((*self._miss(inputs, kind, eps, dtypes, call, got), kind, value, eps))
        if not tried:
            raise Left("neither the module nor the code of its forward has a number that is its eps")
        alike = [(kind, value, eps) for miss, _, kind, value, eps in tried if miss <= 1]
        if not alike:
            _, expected, kind, *_ = min(tried, key=lambda entry: entry[0])
            raise Left(self._differs(got[0], kind, expected))
        followed = [(kind, name, eps) for kind, value, eps in alike for name in values
                    if values[name] == value and self._follows(inputs, kind, name, value, dtypes, call)]
        names = sorted({name for _, name, _ in followed})
        if len(names) > 1:
            raise Left(f"its {' and its '.join(names)} both act as eps")
        if followed:
            return followed[0]
        for kind, value, eps in alike:
            if value in in_code:
                return kind, None, eps
        raise Left(f"its eps, {alike[0][1]}, can be neither read from the module nor from the code of its forward")

    def _roundings(self, kind):
        """The norms that equal `kind` in float32 and round in 16 bits as the module may."""
        is_cast = not kind.is_layer and (any(self._has) or self._has_gate)
        orders = [{}]
        if kind.cast_order is None:
            orders += [dict(cast_before_weight=True)] * is_cast + [dict(cast_order="rstd_first")]
        offsets = (False, True) if kind.weight_offset and not kind.is_layer else (False,)
        return [dataclasses.replace(kind, rounds_offset=offset, **order) for offset in offsets for order in orders]

    def _kinds(self, inputs, numbers):
        """The norms that the module may compute, as far as they differ in float32. numbers: those
        that its forward reads, which may be the number of groups or their width."""
        groups = {1}
        if len(inputs.shape) == 1:
            sizes = [number for number in numbers if type(number) is int and number > 0 and inputs.cols % number == 0]
            groups |= {one for size in sizes for one in (size, inputs.cols // size)}
        gates = itertools.product(ACTIVATIONS, (False, True)) if self._has_gate else [(None, False)]
        found = [dataclasses.replace(kind, activation=activation, gate_before=is_before, groups=number)
                 for number, (activation, is_before), kind in itertools.product(sorted(groups), gates, _KINDS)]
        # A plain RMS norm has no bias.
        has_weight, has_bias = self._has
        needs_weight = lambda kind: kind.weight_offset or kind.cast_order == "weight_first"  # noqa: E731
        return [kind for kind in found if (has_weight or not needs_weight(kind)) and (kind.is_layer or not (kind.is_plain and has_bias))
                and not (kind.gate_before and kind.cast_order == "weight_first")]

    def _miss(self, inputs, kind, eps, dtypes, call, got):
        """(the distance of a float32 result from the norm `kind`, where rounding explains at most
        1; the norm's result)."""
        expected, _ = inputs.ours(kind, eps, dtypes, call, self._has)
        if got[0].dtype != _F32:
            return math.inf, expected
        return _distance(got[0], expected, inputs.size_of_y(kind, eps, self._has, call), _UNIT[_F32])[0], expected

    def _follows(self, inputs, kind, name, value, dtypes, call):
        """Whether an attribute is the module's eps: after a change of it, the result equals the
        norm with the new eps."""
        other = 0.01 if value is None else 2.0 * value + 0.01
        state = vars(self._twin)
        before = state.get(name, ABSENT)
        state[name] = other
        got = self._own(inputs, dtypes, call)
        if before is ABSENT:
            state.pop(name, None)
        else:
            state[name] = before
        return got is not None and self._miss(inputs, kind, other, dtypes, call, got)[0] <= 1

    @staticmethod
    def _differs(got, kind, expected, where="", what="result"):
        """The reason why a result does not match."""
        dtype = str(expected.dtype).removeprefix("torch.")
        if got.dtype != expected.dtype:
            return f"its {what} is {str(got.dtype).removeprefix('torch.')} for {dtype}{where}"
        is_finite = got.isfinite() & expected.isfinite()
        difference = torch.where(is_finite, (got.double() - expected.double()).abs() / (1.0 + expected.double().abs()), -1.0)
        index = difference.argmax()
        if not torch.equal(got.isfinite(), expected.isfinite()) and difference.flatten()[index] < 0.01:
            return f"its {what} differs from that of {kind}, the nearest of ours, where one is infinite or NaN, in {dtype}{where}"
        return (f"its {what} differs from that of {kind}, the nearest of ours: {got.flatten()[index]:.6g} for "
                f"{expected.flatten()[index]:.6g}, in {dtype}{where}")

    def _compare(self, inputs, kind, eps, dtypes, results):
        """Raises `Left` if results differ from the norm `kind`."""
        dtype = dtypes[0]
        # A value that was rounded to its neighbour is rounded again before it is multiplied by a gate.
        unit = _UNIT[dtype] * (1 if kind.is_plain else 2)
        if None in results.values():
            raise Left(f"its forward does not take {str(dtype).removeprefix('torch.')}: {first_line(self._error)}")
        ours = {call: inputs.ours(kind, eps, dtypes, call, self._has) for call in results}
        sizes = {call: inputs.size_of_y(kind, eps, self._has, call) for call in results}
        wrong = next((call for call, got in results.items() if got[0].dtype != dtype), None)
        flat = lambda found: torch.cat([y.reshape(-1, inputs.cols) for y in found])  # noqa: E731
        if wrong is None:
            distance, different = _distance(flat(y for y, _ in results.values()), flat(y for y, _ in ours.values()), flat(sizes.values()), unit)
            if distance > 1 or dtype is not _F32 and different > _MOST_NEIGHBOURS:
                wrong = max(results, key=lambda call: _distance(results[call][0], ours[call][0], sizes[call], unit))
        if wrong is not None:
            where = f", with {wrong.leading + len(inputs.shape)} dimensions, in {'training' if wrong.training else 'evaluation'}"
            raise Left(self._differs(results[wrong][0], kind, ours[wrong][0], where))
        sizes = inputs.scales(kind, eps, self._has)
        for call, (_, gradients) in results.items():
            for got, expected, name in zip(gradients, ours[call][1], self._names_of_gradients(call), strict=True):
                if (got is None) != (expected is None):
                    raise Left(f"there is {'no' if got is None else 'a'} gradient of its {name}")
                if got is None:
                    continue
                got, expected = (gradient.reshape(-1, inputs.cols) for gradient in (got, expected))
                # In 16 bits the module's operations round intermediate results.
                tolerance = 2.0**-13 if dtype is got.dtype is _F32 else 2.0**-5
                if (got.float() - expected.float()).abs().gt(tolerance * sizes[name] + tolerance * torch.finfo(dtype).tiny).any() or \
                        not torch.equal(got.isfinite(), expected.isfinite()):
                    raise Left(self._differs(got, kind, expected, what=f"gradient of {name}"))

    def _names_of_gradients(self, call):
        if not call.records:
            return []
        names = ["weight"] * self._has[0] + ["bias"] * self._has[1]
        names = ["gate"] * (self._has_gate and call.gate_requires_grad) + names * call.parameters_require_grad
        return ["input"] * call.x_requires_grad + names

    def _compare_layout(self, inputs, kind, eps, dtypes, calls):
        """Raises `Left` if rows with strided elements give another result."""
        call = calls[0]
        got = self._own(inputs, dtypes, call, lambda rows: torch.stack([rows] * 2, -1)[..., 0])
        if got is not None:
            self._compare(inputs, kind, eps, dtypes, {call: got})

    def _is_same_in_autocast(self, inputs, kind, eps, dtypes, call):
        with torch.autocast("cpu", _BF16):
            got = self._own(inputs, dtypes, call)
        try:
            self._compare(inputs, kind, eps, dtypes, {call: got})
        except Left:
            return False
        return True

    def _operators_of(self, x, gate, queries=contextlib.nullcontext()):  # noqa: B008
        """(y, the operators) of a forward. Raises `Left` if an operator looks at values."""
        with _Operators() as operators:
            y = self._forward(x, gate, False, queries)
        _refuse_looks(operators)
        return y, operators.seen

    def _compare_operators(self, inputs, leading):
        """Raises `Left` if forward runs other operators for other sizes."""
        parameters = dict(self._given)
        for i, (device, some) in enumerate(_SIZES):
            self._given.update({name: tensor.detach().to(device) for name, tensor in parameters.items()})
            vars(self._twin)["training"] = bool(i % 2)
            expected = None
            for sizes in (sizes for sizes in some if len(sizes) in leading):
                shape = [inputs.shape[-1] if size is None else size for size in sizes] + list(inputs.shape)
                x = torch.ones(shape, dtype=_F32, device=device)
                queries = _Queries(len(inputs.shape))
                y, operators = self._operators_of(x, x.clone() if self._has_gate else None, queries)
                if y is None:
                    raise Left(f"its forward does not take the shape {tuple(shape)}: {first_line(self._error)}")
                if queries.told:
                    raise Left(f"its forward {queries.told[0]}")
                expected = operators if expected is None else expected
                if operators != expected:
                    raise Left(f"its forward does something else for the shape {tuple(shape)}")
