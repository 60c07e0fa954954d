"""The public functions: they check their arguments and pass the arrays to the operators."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .._norm import EPS, NORMS, Form, Value, check_clamped_eps, check_pieces, check_weight, group_width, l2_name, order_of
from . import calls, operators, reference

_F32 = jnp.dtype(jnp.float32)
_NARROW = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


def _number(name, value):
    """A number as a Python float, a constant of the compiled program."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name}: expected a Python number, got a traced array; pass it to jax.jit by static_argnames")
    try:
        # The addition refuses strings, which `float` would parse.
        number = float(value + 0.0)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a Python number, got {type(value).__name__}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def dtype_of(out_dtype):
    """The dtype of y; None for that of x."""
    if out_dtype is None:
        return None
    try:
        dtype = jnp.dtype(out_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
        raise TypeError(f"out_dtype: expected a floating-point dtype of at least 16 bits, got {out_dtype!r}; None is the dtype of x")
    return dtype


def norm_of(is_layer, eps=None, weight_offset=0.0, cast_before_weight=False, residual_after=False, has_next=False, *, l2=None,
            cast_order=None, out_dtype=None, **of_gate):
    """A norm without its arrays. of_gate: activation, gate_before and groups."""
    norm = Form(is_layer, 0.0, l2=l2).name()
    eps = EPS[norm] if eps is None else _number("eps", eps)
    if eps < 0.0:
        raise ValueError(f"eps: expected a number of at least 0, got {eps}; with a negative one, small rows have no real square root")
    if isinstance(cast_before_weight, jax.core.Tracer):
        raise TypeError("cast_before_weight: expected a bool, got a traced array; pass it to jax.jit by static_argnames")
    if norm == NORMS[3]:
        check_clamped_eps(eps)
    cast_before_weight, cast_order = order_of(bool(cast_before_weight), cast_order)
    return Form(is_layer, eps, _number("weight_offset", weight_offset), cast_before_weight, residual_after, has_next, l2=l2,
                cast_order=cast_order, out_dtype=dtype_of(out_dtype), **of_gate)


def _array(name, value):
    if isinstance(value, jax.Array) or value is None:
        return value
    try:
        return jnp.asarray(value)
    except TypeError as error:
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}") from error


def _check(x, *others):
    """Raises for arrays whose dtypes or shapes do not match."""
    arrays = dict(zip(calls.ARRAYS, (x, *others)))
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name}: expected an array of real floating-point numbers, got {array.dtype}; convert it with astype")
    if x.ndim == 0:
        raise ValueError("x: expected at least one dimension, got a scalar")
    for name, array in arrays.items():
        shape = x.shape if name in ("x", "residual", "gate") else x.shape[-1:]
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: expected the shape {shape}, got {array.shape}")


def _have_kernels(norm, x, residual, gate, *parameters):
    """Whether the kernels support these dtypes and shapes."""
    narrow_or_f32 = (_F32, *_NARROW)
    dtype = norm.dtype_of_y(x.dtype)
    is_one = dtype == x.dtype or _F32 in (dtype, x.dtype) and norm.cast_order != "weight_first"
    stream = (residual is None or residual.dtype in (x.dtype, _F32)) and (gate is None or gate.dtype == dtype)
    are_known = all(array.dtype in narrow_or_f32 for array in calls.present(parameters))
    return x.dtype in narrow_or_f32 and dtype in narrow_or_f32 and 0 not in x.shape and is_one and stream and are_known


def _parameters(dtype, parameters, axes):
    """Weights and biases, all in one dtype, varying over all the axes of `shard_map`, so that their
    gradients are summed over the axes.

    All become float32 if one has another dtype than y or has a gradient that is summed over
    devices: otherwise each device would round its partial sum. dtype: of y.
    """
    is_wide = any(array.dtype != dtype or axes - calls.manual_axes(array) for array in calls.present(parameters))
    return [None if array is None else _varying(array.astype(_F32) if is_wide else array, axes) for array in parameters]


def _varying(array, axes):
    """Marks an array that is equal on every device as varying over axes of `shard_map`: its
    gradient is then summed over them."""
    missing = tuple(axes - calls.manual_axes(array)) if array is not None else ()
    if not missing:
        return array
    cast = getattr(jax.lax, "pcast", None)
    return cast(array, missing, to="varying") if cast else jax.lax.pvary(array, missing)


def _resharded(array, split):
    """The array with this explicit sharding; resharded if it has another one."""
    if array is None or calls.split_of(array) == split:
        return array
    return jax.sharding.reshard(array, PartitionSpec(*split))


def _apply(norm, is_split, *arrays):
    """(y, h); None for those that the call does not have."""
    _check(*arrays)
    group_width(arrays[0].shape[-1:], norm.groups)
    if norm.out_dtype == arrays[0].dtype:
        norm = norm._replace(out_dtype=None)
    if not _have_kernels(norm, *arrays):
        return reference.forward(norm, *arrays)[:2]
    rows, parameters = arrays[:3], arrays[3:]
    # Explicit sharding: rows are split as in x, or else as in the residual or the gate; the last
    # dimension is not split.
    split = calls.split_of(rows[0])
    for other in calls.present(rows[1:]):
        split = tuple(ours or theirs for ours, theirs in zip(split, calls.split_of(other)))
    rows = [_resharded(array, (*split[:-1], None)) for array in rows]
    parameters = [_resharded(array, (None,)) for array in parameters]
    axes = frozenset().union(*map(calls.manual_axes, calls.present((*rows, *parameters))))
    parameters = _parameters(norm.dtype_of_y(rows[0].dtype), parameters, axes)
    rows = [_varying(array, axes) for array in rows]
    y, h, *_ = operators.norm(norm, is_split and not axes, *rows, *parameters)
    return _resharded(y, split), _resharded(h, split)


@functools.lru_cache(128)
def _jitted(norm, is_split):
    """The norm under jit: compiled once per argument types, and inlined into a surrounding jit."""

    def apply(*arrays):
        return _apply(norm, is_split, *arrays)

    return jax.jit(apply, inline=True)


def normalize(norm, x, residual, weight, bias, partition=True, next_weight=None, next_bias=None, gate=None):
    """(y, h) of any norm; None for those that it does not have."""
    check_pieces(norm, residual, gate)
    check_weight(norm, weight)
    arrays = zip(calls.ARRAYS, (x, residual, gate, weight, bias, next_weight, next_bias))
    return _jitted(norm, bool(partition))(*(_array(name, array) for name, array in arrays))


def _required(name, value):
    if value is None:
        raise TypeError(f"{name}: expected an array, got None")
    return value


def rms_norm(
    x: ArrayLike, weight: ArrayLike | None = None, eps: float | None = None, *, weight_offset: float = 0.0,
    cast_before_weight: bool = False, cast_order: str | None = None, out_dtype: DTypeLike | None = None, partition: bool = True,
) -> jax.Array:
    """`x / sqrt(mean(x**2, -1) + eps) * (weight + weight_offset)`: equations (1) to (12).

    x: (..., cols). weight: (cols); ones if None. The result has the shape and dtype of x. It is
    computed in float32 and rounded once.
    eps: None means 2**-23. weight_offset: 1 is Gemma's `1 + w`. cast_before_weight: round the
    normalized value to the dtype of x before the weight multiplies it, as Llama does.
    cast_order: the order of roundings by name; None is "before_weight" with cast_before_weight, else
    "at_store".

    | cast_order | y | model |
    |---|---|---|
    | "at_store" | rounded once | Gemma |
    | "before_weight" | x_hat is rounded, then its product with the weight | Llama |
    | "rstd_first" | 1 / sqrt(..) is rounded, then as "before_weight" | DeepSeek-V4 |
    | "weight_first" | x * (weight + weight_offset) is rounded, and that is normalized | Muse Spark |

    out_dtype: the dtype of y; None is that of x. It is rounded once. Kernels compute float32 from 16
    bits, and 16 bits from float32; jax.numpy computes other pairs, and "weight_first" with a y of
    another dtype.
    Options are Python values that cannot be traced; a new value compiles a new program.
    partition: let jit's automatic sharding split the rows. Pass False where `custom_partitioning`
    is not supported, as on some TPUs.

    Raises TypeError for an array of a dtype that is not real floating-point, ValueError for shapes
    that do not match.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> print(rj.rms_norm(jnp.array([1.0, 7.0]), jnp.array([10.0, 100.0]), eps=0.0))
    [  2. 140.]
    """
    norm = norm_of(False, eps, weight_offset, cast_before_weight, cast_order=cast_order, out_dtype=out_dtype)
    return normalize(norm, _required("x", x), None, weight, None, partition)[0]


def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float | None = None, *,
    out_dtype: DTypeLike | None = None, partition: bool = True,
) -> jax.Array:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension: equations (1) to (12).

    x: (..., cols). weight, bias: (cols); ones and zeros if None. eps: None means 1e-5. The rest is
    as in `rms_norm`.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> print(rj.layer_norm(jnp.array([1.0, 7.0]), bias=jnp.array([0.5, 0.5]), eps=0.0))
    [-0.5  1.5]
    """
    return normalize(norm_of(True, eps, out_dtype=out_dtype), _required("x", x), None, weight, bias, partition)[0]


def add_rms_norm(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, eps: float | None = None, *, weight_offset: float = 0.0,
    cast_before_weight: bool = False, partition: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = rms_norm(h), in the dtype
    of x. One kernel.

    residual: the shape of x, in the dtype of x or float32. The rest is as in `rms_norm`.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> y, h = rj.add_rms_norm(jnp.array([1.0, 3.0]), jnp.array([0.0, 4.0]), eps=0.0)
    >>> print(y, h)
    [0.2 1.4] [1. 7.]
    """
    norm = norm_of(False, eps, weight_offset, cast_before_weight)
    return normalize(norm, _required("x", x), _required("residual", residual), weight, None, partition)


def add_layer_norm(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float | None = None, *,
    partition: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """(y, h): h = x + residual, rounded to the residual's dtype, and y = layer_norm(h), in the
    dtype of x. One kernel.

    residual: the shape of x, in the dtype of x or float32. The rest is as in `layer_norm`.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> y, h = rj.add_layer_norm(jnp.array([1.0, 3.0]), jnp.array([0.0, 4.0]), eps=0.0)
    >>> print(y, h)
    [-1.  1.] [1. 7.]
    """
    return normalize(norm_of(True, eps), _required("x", x), _required("residual", residual), weight, bias, partition)


def rms_norm_add(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, eps: float | None = None, *, weight_offset: float = 0.0,
    cast_before_weight: bool = False, partition: bool = True,
) -> jax.Array:
    """`h = residual + rms_norm(x)`, in the dtype of the residual, rounded once. One kernel.

    The end of a post-norm block. residual: the shape of x, in the dtype of x or float32. The
    gradient of the residual is that of h; the norm's backward takes it in the dtype of x. The rest
    is as in `rms_norm`.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> print(rj.rms_norm_add(jnp.array([3.0, -3.0]), jnp.array([1.0, 3.0]), eps=0.0))
    [2. 2.]
    """
    norm = norm_of(False, eps, weight_offset, cast_before_weight, True)
    return normalize(norm, _required("x", x), _required("residual", residual), weight, None, partition)[1]


def layer_norm_add(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float | None = None, *,
    partition: bool = True,
) -> jax.Array:
    """`h = residual + layer_norm(x)`, in the dtype of the residual, rounded once: as
    `rms_norm_add`.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> print(rj.layer_norm_add(jnp.array([1.0, 3.0]), jnp.array([2.0, 2.0]), eps=0.0))
    [1. 3.]
    """
    norm = norm_of(True, eps, residual_after=True)
    return normalize(norm, _required("x", x), _required("residual", residual), weight, bias, partition)[1]


def rms_norm_add_rms_norm(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, next_weight: ArrayLike | None = None, eps: float | None = None, *,
    weight_offset: float = 0.0, cast_before_weight: bool = False, partition: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """(y, h): h of `rms_norm_add`, and y, the RMS norm of h by `next_weight`, in the dtype of x. One
    kernel.

    The norms after one part of a Gemma block and before the next. Both have the same options.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> x, residual = jnp.array([3.0, -3.0]), jnp.array([1.0, 3.0])
    >>> y, h = rj.rms_norm_add_rms_norm(x, residual, None, jnp.array([4.0, 5.0]), 0.0)
    >>> print(y, h)
    [4. 5.] [2. 2.]
    """
    norm = norm_of(False, eps, weight_offset, cast_before_weight, True, True)
    return normalize(norm, _required("x", x), _required("residual", residual), weight, None, partition, next_weight)


def rms_norm_gated(
    x: ArrayLike, gate: ArrayLike | None = None, weight: ArrayLike | None = None, eps: float | None = None, *, bias: ArrayLike | None = None,
    activation: str = "silu", norm_before_gate: bool = True, groups: int = 1, weight_offset: float = 0.0, cast_before_weight: bool = False,
    cast_order: str | None = None, out_dtype: DTypeLike | None = None, partition: bool = True,
) -> jax.Array:
    """`(rms_norm(x) + bias) * activation(gate)`, or with norm_before_gate=False
    `rms_norm(x * activation(gate)) + bias`: equations (19) to (21).

    gate: the shape of x; None for a norm without one. activation: "silu" (`swish` of FLA) or "sigmoid".
    groups: the number of groups of columns, each normalized by itself; the `group_size` of Mamba2 is
    cols / groups. The weight runs over all columns.

    The result is computed in float32 and rounded once. With cast_before_weight the norm is rounded
    before the weight multiplies it, and again before the gate does, as in Qwen3-Next. The rest is as
    in `rms_norm`. Layer norms and a residual: `Norm`.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> print(rj.rms_norm_gated(jnp.array([3.0, -3.0]), jnp.array([0.0, 0.0]), eps=0.0, activation="sigmoid"))
    [ 0.5 -0.5]
    """
    # A flag that is traced has no value.
    if isinstance(norm_before_gate, jax.core.Tracer):
        raise TypeError("norm_before_gate: expected a bool, got a traced array; pass it to jax.jit by static_argnames")
    norm = norm_of(False, eps, weight_offset, cast_before_weight, cast_order=cast_order, out_dtype=out_dtype,
                   activation=None if gate is None else activation, gate_before=gate is not None and not norm_before_gate, groups=groups)
    return normalize(norm, _required("x", x), None, weight, bias, partition, gate=gate)[0]


def l2_norm(
    x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6, *, groups: int = 1, clamped: bool = False, weight_offset: float = 0.0,
    cast_order: str | None = None, out_dtype: DTypeLike | None = None, partition: bool = True,
) -> jax.Array:
    """`x / sqrt(sum(x**2, -1) + eps) * (weight + weight_offset)`, as in flash-linear-attention:
    equations (1) to (12), (22) and (23).

    clamped: `x / max(sqrt(sum(x**2)), eps)`, as `torch.nn.functional.normalize`. The gradient takes
    the divisor as a constant where it is eps. Such an eps is 0, or from 2**-63 to 2**63. groups: the
    number of groups of columns, each normalized by itself, such as the heads of a row. The rest is as
    in `rms_norm`. Gates, biases and a residual: `Norm.l2`.

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> print(rj.l2_norm(jnp.array([3.0, 4.0]), eps=0.0))
    [0.6 0.8]
    """
    norm = norm_of(False, eps, weight_offset, groups=groups, l2=l2_name(clamped), cast_order=cast_order, out_dtype=out_dtype)
    return normalize(norm, _required("x", x), None, weight, None, partition)[0]


class Norm(Value):
    """A norm as a value: its options and its pieces. Methods return a new value, and `apply`
    computes it with one kernel.

    `rms`, `layer` and `l2` take the options of `rms_norm`, `layer_norm` and `l2_norm`.
    `apply(x, weight, bias)` returns

    | pieces | result |
    |---|---|
    | none | y |
    | `residual(r)` | (y, h): h = x + r, y = norm(h) |
    | `residual_after(r)` | h = r + norm(x) |
    | `residual_after(r).next_norm(weight, bias)` | (y, h): h = r + norm(x), y = norm(h) by these parameters |
    | `gate_after(z, activation)` | y = norm(x) * activation(z); also after `residual(r)` |
    | `gate_before(z, activation)` | y = norm(x * activation(z)) |
    | `groups(n)` | y, each group of cols / n columns normalized by itself; also with a gate and `residual(r)` |

    >>> import jax.numpy as jnp, rmsnorm.jax as rj
    >>> around = rj.Norm.layer(0.0).residual_after(jnp.array([3.0, 5.0])).next_norm(bias=jnp.ones(2))
    >>> y, h = around.apply(jnp.array([1.0, 3.0]))
    >>> print(y, h)
    [0. 2.] [2. 6.]
    """

    __slots__ = ()

    def apply(
        self, x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *, partition: bool = True
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """y, h or (y, h) of these rows. partition: as in `rms_norm`."""
        given = dict(self._given())
        arrays = {name: given.pop(name, None) for name in ("residual", "gate", "next_weight", "next_bias")}
        norm, residual = norm_of(**given), arrays.pop("residual")
        y, h = normalize(norm, _required("x", x), residual, weight, bias, partition, **arrays)
        return y if residual is None else (y, h) if norm.has_y() else h
