"""A norm without its arrays, and a norm as a value, for `rmsnorm.torch` and `rmsnorm.jax`."""

from typing import Any, NamedTuple, TypeVar

_V = TypeVar("_V", bound="Value")


class Form(NamedTuple):
    """A norm without its arrays: the kind, the options and the pieces.

    residual_after: the norm is added to the residual. has_next: and the sum is normalized as well.
    activation: of the gate, None without one. gate_before: the gate multiplies x, not the result.
    groups: the number of groups of columns, each with its own statistics.
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

    @property
    def is_plain(self) -> bool:
        """Whether it has neither a gate nor groups."""
        return self.activation is None and self.groups == 1

    @property
    def name(self) -> str:
        """The native library's name of the norm."""
        return "layer_norm" if self.is_layer else "rms_norm"

    @property
    def has_y(self) -> bool:
        """Whether the call has a y: only a sum after the norm has none."""
        return self.has_next or not self.residual_after


class Value:
    """The base of `rmsnorm.torch.Norm` and `rmsnorm.jax.Norm`, which have `apply`."""

    __slots__ = ("_options",)

    def __init__(self, **options: Any):
        self._options = options

    @classmethod
    def rms(cls: type[_V], eps: float | None = None, *, weight_offset: float = 0.0, cast_before_weight: bool = False) -> _V:
        """An RMS norm, with the options of `rms_norm`."""
        return cls(is_layer=False, eps=eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight)

    @classmethod
    def layer(cls: type[_V], eps: float | None = None) -> _V:
        """A layer norm, with the option of `layer_norm`."""
        return cls(is_layer=True, eps=eps)

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


def _there(residual: Any) -> Any:
    if residual is None:
        raise TypeError("residual: expected an array, got None; leave the call out for a norm without a residual")
    return residual
