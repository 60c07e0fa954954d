"""A norm without its arrays, and a norm as a value, for `rmsnorm.torch` and `rmsnorm.jax`."""

from typing import Any, NamedTuple, TypeVar

_V = TypeVar("_V", bound="Value")


class Form(NamedTuple):
    """A norm without its arrays: the kind, the options and the pieces.

    residual_after: the norm is added to the residual. has_next: and the sum is normalized as well.
    activation: of the gate, None without one. gate_before: the gate multiplies x, not the result.
    groups: the number of groups of columns, each with its own statistics.
    l2: "l2_norm" or "l2_norm_clamped", in place of an RMS norm. cast_order: "rstd_first" or "weight_first", which `cast_before_weight`
    does not tell. out_dtype: of y, None for that of x.
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

    @property
    def is_plain(self) -> bool:
        """Whether it is an RMS or layer norm with none of the last six, and a layer norm that rounds once."""
        return self[6:] == _PLAIN and not (self.is_layer and self.cast_before_weight)

    @property
    def name(self) -> str:
        """The native library's name of the norm."""
        return self.l2 or ("layer_norm" if self.is_layer else "rms_norm")

    @property
    def has_y(self) -> bool:
        """Whether the call has a y: only a sum after the norm has none."""
        return self.has_next or not self.residual_after


_PLAIN = Form(False, 0.0)[6:]
#: The kinds of norms and the cast orders, by their numbers in the native library.
NORMS = "rms_norm", "layer_norm", "l2_norm", "l2_norm_clamped"
CAST_ORDERS = "at_store", "before_weight", "rstd_first", "weight_first"


def order_of(cast_before_weight: bool, cast_order: str | None) -> tuple[bool, str | None]:
    """The fields `cast_before_weight` and `cast_order` of a form, for these arguments of a function."""
    if cast_order is None or cast_order in CAST_ORDERS[2:]:
        return cast_before_weight, cast_order
    if cast_order not in CAST_ORDERS:
        raise ValueError(f"cast_order: expected one of {', '.join(CAST_ORDERS)}, got {cast_order!r}; None is as cast_before_weight says")
    return cast_order == "before_weight", None


class Value:
    """The base of `rmsnorm.torch.Norm` and `rmsnorm.jax.Norm`, which have `apply`."""

    __slots__ = ("_options",)

    def __init__(self, **options: Any):
        self._options = options

    @classmethod
    def rms(cls: type[_V], eps: float | None = None, *, weight_offset: float = 0.0, cast_before_weight: bool = False,
            cast_order: str | None = None, out_dtype: Any = None) -> _V:
        """An RMS norm, with the options of `rms_norm`."""
        more = _given(cast_order=cast_order, out_dtype=out_dtype)
        return cls(is_layer=False, eps=eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight, **more)

    @classmethod
    def layer(cls: type[_V], eps: float | None = None, *, cast_order: str | None = None, out_dtype: Any = None) -> _V:
        """A layer norm, with the options of `layer_norm`, and a cast order."""
        return cls(is_layer=True, eps=eps, **_given(cast_order=cast_order, out_dtype=out_dtype))

    @classmethod
    def l2(cls: type[_V], eps: float = 1e-6, *, clamped: bool = False, weight_offset: float = 0.0, cast_order: str | None = None,
           out_dtype: Any = None) -> _V:
        """An L2 norm, with the options of `l2_norm`."""
        more = _given(cast_order=cast_order, out_dtype=out_dtype)
        return cls(is_layer=False, eps=eps, weight_offset=weight_offset, l2=l2_name(clamped), **more)

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


def l2_name(clamped: bool) -> str:
    """The kind of an L2 norm."""
    if not isinstance(clamped, bool):
        raise TypeError(f"clamped: expected a bool, got {type(clamped).__name__}; pass True or False")
    return NORMS[2 + clamped]


def _given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _there(residual: Any) -> Any:
    if residual is None:
        raise TypeError("residual: expected an array, got None; leave the call out for a norm without a residual")
    return residual
