"""A norm without its arrays, and a norm as a value, for `rmsnorm.torch`, `rmsnorm.jax` and `rmsnorm.arrays`."""

from typing import Any, NamedTuple, TypeVar

_V = TypeVar("_V", bound="Value")

#: The activations of gates.
ACTIVATIONS = "silu", "sigmoid"


class Form(NamedTuple):
    """A norm without its arrays: the kind, the options and the pieces.

    residual_after: the norm is added to the residual. has_next: and the sum is normalized as well.
    activation: of the gate, None without one. gate_before: the gate multiplies x, not the result.
    groups: the number of groups of columns, each with its own statistics.
    l2: "l2_norm" or "l2_norm_clamped", in place of an RMS norm. cast_order: "rstd_first" or "weight_first", which `cast_before_weight`
    does not tell. out_dtype: of y, None for that of x.

    It has methods where it could have properties: Dynamo of PyTorch 2.10 traces no property of a tuple with symbolic numbers.
    """

    is_layer: bool
    eps: float
    weight_offset: float = 0.0
    cast_before_weight: bool = False
    residual_after: bool = False
    has_next: bool = False
    activation: str | None = None
    gate_before: bool = False
    groups: int = 1
    l2: str | None = None
    cast_order: str | None = None
    out_dtype: Any = None

    def is_plain(self) -> bool:
        """Whether it is an RMS or layer norm with none of the last six, and a layer norm that rounds once."""
        return self[6:] == _PLAIN and not (self.is_layer and self.cast_before_weight)

    def name(self) -> str:
        """The native library's name of the norm."""
        return self.l2 or ("layer_norm" if self.is_layer else "rms_norm")

    def order(self) -> str:
        """The native library's name of the cast order."""
        # Dynamo of PyTorch 2.10 and 2.11 cannot index by a bool.
        return self.cast_order or CAST_ORDERS[1 if self.cast_before_weight else 0]

    def has_y(self) -> bool:
        """Whether the call has a y: only a sum after the norm has none."""
        return self.has_next or not self.residual_after

    def dtype_of_y(self, dtype: Any) -> Any:
        """The dtype of y for an x of this dtype."""
        return dtype if self.out_dtype is None else self.out_dtype


_PLAIN = Form(False, 0.0)[6:]
#: The kinds of norms and the cast orders, by their numbers in the native library.
NORMS = "rms_norm", "layer_norm", "l2_norm", "l2_norm_clamped"
CAST_ORDERS = "at_store", "before_weight", "rstd_first", "weight_first"
#: The default eps of each kind.
EPS = dict(zip(NORMS, (2.0**-23, 1e-5, 1e-6, 1e-6)))


def order_of(cast_before_weight: Any, cast_order: str | None) -> tuple[Any, str | None]:
    """The fields `cast_before_weight` and `cast_order` of a form, for these arguments of a function."""
    if cast_order is None or cast_order in CAST_ORDERS[2:]:
        return cast_before_weight, cast_order
    if cast_order not in CAST_ORDERS:
        raise ValueError(f"cast_order: expected one of {', '.join(CAST_ORDERS)}, got {cast_order!r}; None is as cast_before_weight says")
    return cast_order == "before_weight", None


def l2_name(clamped: bool) -> str:
    """The kind of an L2 norm."""
    check_flag("clamped", clamped)
    return NORMS[2 + clamped]


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError if a value is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}; pass True or False")


def check_clamped_eps(eps: Any) -> None:
    """Raises ValueError if float32 cannot hold the square of a clamped L2 norm's eps."""
    if not (eps == 0 or 2.0**-63 <= eps <= 2.0**63):
        raise ValueError(f"eps: expected 0 or a number from 2**-63 to 2**63 of a clamped L2 norm, got {eps}; float32 holds its square")


def check_weight(form: Form, weight: Any, kind: str = "an array") -> None:
    """Raises ValueError if the norm needs a weight and has none. kind: what a weight is."""
    if form.cast_order == "weight_first" and weight is None:
        raise ValueError(f"weight: expected {kind} with cast_order=\"weight_first\", which normalizes x * weight, got None; pass a weight, "
                         "or leave cast_order out")


def check_pieces(form: Form, residual: Any, gate: Any) -> None:
    """Raises if the gate or the groups are wrong in themselves or beside the residual."""
    if form.activation not in ACTIVATIONS and gate is not None:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {form.activation!r}; \"swish\" is \"silu\"")
    check_flag("gate_before", form.gate_before)
    if isinstance(form.groups, bool) or not isinstance(form.groups, int):
        raise TypeError(f"groups: expected an int, got {type(form.groups).__name__}; pass int(groups)")
    if form.groups < 1:
        raise ValueError(f"groups: expected at least 1, got {form.groups}; 1 is a norm of the whole row")
    if residual is not None and form.residual_after and not (gate is None and form.is_plain()):
        name = ("gate" if gate is not None else "groups" if form.groups != 1 else "cast_order" if form.cast_order is not None
                else "out_dtype" if form.out_dtype is not None else "l2_norm" if form.l2 is not None else "cast_before_weight")
        raise TypeError(f"{name}: expected no residual after the norm, got one; add it after the call, as residual + y")
    is_before = gate is not None and form.gate_before
    if residual is not None and is_before:
        raise TypeError("gate: expected no residual with a gate before the norm, got one; add it before the call, as x + residual")
    if form.out_dtype is not None and (residual is not None or is_before):
        what = "residual" if residual is not None else "gate before the norm"
        raise TypeError(f"out_dtype: expected no {what}, got one; leave out_dtype out and cast y after the call")
    if form.cast_order == "weight_first" and (residual is not None or is_before):
        what = "residual" if residual is not None else "gate before the norm"
        raise TypeError(f"cast_order: expected no {what} with weight_first, got one; apply it to x before the call")


def group_width(dims: list[int], groups: int) -> int:
    """The columns of a group of the normalized dimensions. Raises ValueError if the number of groups
    does not divide that of columns. TorchScript compiles this."""
    cols = 1
    for dim in dims:
        cols *= dim
    if groups < 1 or groups != 1 and cols % groups != 0:
        raise ValueError(f"groups: expected a number that divides the {cols} columns of a row, got {groups}; each group has as many columns")
    return cols // groups


class Value:
    """The base of `rmsnorm.torch.Norm` and `rmsnorm.jax.Norm`, which have `apply`. out_dtype: a dtype of their framework."""

    __slots__ = ("_options",)

    def __init__(self, **options: Any):
        self._options = options

    @classmethod
    def rms(cls: type[_V], eps: float | None = None, *, weight_offset: float = 0.0, cast_before_weight: bool = False,
            cast_order: str | None = None, out_dtype: Any = None) -> _V:
        """An RMS norm, with the options of `rms_norm`."""
        return cls(is_layer=False, eps=eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight,
                   **_given(cast_order=cast_order, out_dtype=out_dtype))

    @classmethod
    def layer(cls: type[_V], eps: float | None = None, *, cast_order: str | None = None, out_dtype: Any = None) -> _V:
        """A layer norm, with the options of `layer_norm`, and a cast order."""
        return cls(is_layer=True, eps=eps, **_given(cast_order=cast_order, out_dtype=out_dtype))

    @classmethod
    def l2(cls: type[_V], eps: float = 1e-6, *, clamped: bool = False, weight_offset: float = 0.0, cast_order: str | None = None,
           out_dtype: Any = None) -> _V:
        """An L2 norm, with the options of `l2_norm`."""
        return cls(is_layer=False, eps=eps, weight_offset=weight_offset, l2=l2_name(clamped),
                   **_given(cast_order=cast_order, out_dtype=out_dtype))

    def residual(self: _V, residual: Any) -> _V:
        """Normalizes `h = x + residual`. `apply` returns (y, h)."""
        return self._with(residual=_there(residual), residual_after=False)

    def residual_after(self: _V, residual: Any) -> _V:
        """Adds the norm to the residual: `apply` returns `h = residual + norm(x)`."""
        return self._with(residual=_there(residual), residual_after=True)

    def next_norm(self: _V, weight: Any = None, bias: Any = None) -> _V:
        """Normalizes the sum of `residual_after` as well, with the same options. `apply` returns
        (y, h)."""
        return self._with(has_next=True, next_weight=weight, next_bias=bias)

    def gate_after(self: _V, gate: Any, activation: str = "silu") -> _V:
        """Multiplies the result by an activated gate: "silu" or "sigmoid" of an array like x."""
        return self._with(gate=_there(gate, "gate"), activation=activation, gate_before=False)

    def gate_before(self: _V, gate: Any, activation: str = "silu") -> _V:
        """Multiplies x by an activated gate before the norm."""
        return self._with(gate=_there(gate, "gate"), activation=activation, gate_before=True)

    def groups(self: _V, groups: int) -> _V:
        """Normalizes that many groups of columns, each by itself. Weight and bias run over all."""
        return self._with(groups=groups)

    def _given(self) -> dict[str, Any]:
        """The options and the pieces' arrays by name. Raises TypeError if they do not go
        together."""
        if self._options.get("has_next") and not self._options.get("residual_after"):
            raise TypeError("next_norm: expected a residual after the norm, got none; call residual_after(residual) too")
        return self._options

    def _with(self: _V, **options: Any) -> _V:
        return type(self)(**{**self._options, **options})

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value if isinstance(value, (bool, float, int)) else '..'}"
                          for name, value in self._options.items() if value is not None)
        return f"{type(self).__name__}({given})"


def _given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _there(array: Any, name: str = "residual") -> Any:
    if array is None:
        raise TypeError(f"{name}: expected an array, got None; leave the call out for a norm without a {name}")
    return array
