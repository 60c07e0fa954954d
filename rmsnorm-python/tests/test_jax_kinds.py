"""JAX: L2 norms, cast orders and a dtype of y that is not that of x. Values, gradients, derivatives of every kind, batches, sharding,
exports, errors and modules."""

import functools
import itertools
import re

import numpy as np
import pytest
from conftest import framework
from judge import judge_gated, judge_weight_first, wide

jax = framework("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402
from test_jax import ALL, DERIVATIVES, agree, along, arrays, close, four_devices, is_custom, joined, random, weighed  # noqa: E402, F401

import rmsnorm.jax as rj  # noqa: E402
from rmsnorm._norm import CAST_ORDERS, Form  # noqa: E402
from rmsnorm.jax import reference  # noqa: E402

EPS, F32, BF16, F16 = 1e-2, jnp.float32, jnp.bfloat16, jnp.float16
LONG = {"x": "x", "r": "residual", "z": "gate", "Z": "gate", "w": "weight", "b": "bias"}


def of_pieces(norm, given, groups=1):
    norm = norm.groups(groups) if groups != 1 else norm
    norm = norm.residual(given["r"]) if "r" in given else norm
    norm = norm.gate_after(given["z"]) if "z" in given else norm
    return norm.gate_before(given["Z"]) if "Z" in given else norm


def run(norm, given, groups, y_dtype=None, partition=True):
    """The results of a norm and its gradients by name, and the inputs by name."""
    shape = given["x"].shape
    arriving = [random(10, *shape, dtype=y_dtype or given["x"].dtype)] + ([random(11, *shape, dtype=given["r"].dtype)] if "r" in given else [])

    @jax.jit
    def both(given, arriving):
        found, vjp = jax.vjp(lambda given: of_pieces(norm, given, groups).apply(*map(given.get, "xwb"), partition=partition), given)
        return found, vjp(tuple(arriving) if "r" in given else arriving[0])[0]

    found, gradients = both(given, arriving)
    assert is_custom(both.lower(given, arriving).compile().as_text())
    got = dict(zip("yh", found if "r" in given else (found,)))
    assert got["y"].dtype == arriving[0].dtype and all(gradients[name].dtype == array.dtype for name, array in given.items())
    got |= {f"d{LONG[name]}": array for name, array in gradients.items()}
    return {LONG[name]: array for name, array in given.items()} | dict(zip(("dy", "dresidual_out"), arriving)), got


def make(names, dtype, weight_dtype, rows, cols, gate_dtype=None):
    dtypes = {"w": weight_dtype, "b": weight_dtype, "z": gate_dtype or dtype}
    return {name: random(seed, *(() if name in "wb" else rows), cols, dtype=dtypes.get(name, dtype)) for seed, name in enumerate(names)}


@pytest.mark.parametrize("dtype, weight_dtype", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)])
@pytest.mark.parametrize("names, groups", [("x", 1), ("xw", 1), ("xwb", 4), ("xzw", 1), ("xZw", 4), ("xrw", 1)])
@pytest.mark.parametrize("clamped", [False, True])
def test_l2_norms_are_within_their_bounds(dtype, weight_dtype, names, groups, clamped):
    """An L2 norm of rows of 4**k elements is an RMS norm with eps / cols, whose result is divided by 2**k: exact scalings of its bounds."""
    cols, eps = 256 * groups, 0.0 if clamped else 0.25
    given = make(names, dtype, weight_dtype, (3, 7), cols)
    if "w" in given:
        # A 16th of a smaller weight may be no number of float16.
        given["w"] = jnp.copysign(jnp.maximum(jnp.abs(given["w"]), jnp.asarray(2.0**-6, weight_dtype)), given["w"])
    # Rows that are clamped are in the next test.
    inputs, got = run(rj.Norm.l2(2.0**-20, clamped=True) if clamped else rj.Norm.l2(eps), given, groups, partition=groups == 1)
    inputs["weight"] = inputs.get("weight", jnp.ones(cols)) / 16
    if "dweight" in got:
        got["dweight"] = got["dweight"] * 16
    judge_gated("rms_norm", eps / 256, inputs, got, "silu", "Z" in names, groups)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_clamped_norm_divides_small_rows_by_eps(dtype):
    x, w, dy = random(0, 6, 64, dtype=dtype), random(1, 64, dtype=dtype), random(2, 6, 64, dtype=dtype)
    x = x * jnp.asarray([0.0, 1e-6, 1e-3, 1.0, 1e3, 1e-3], dtype)[:, None]
    y, vjp = jax.vjp(lambda x, w: rj.l2_norm(x, w, 0.25, clamped=True), x, w)
    wide_x, wide_w, wide_dy = map(wide, (x, w, dy))
    length = np.sqrt((wide_x**2).sum(-1, keepdims=True))
    x_hat, wdy = wide_x / np.maximum(length, 0.25), wide_dy * wide_w
    dx = (wdy - np.where(length > 0.25, x_hat * (wdy * x_hat).sum(-1, keepdims=True), 0)) / np.maximum(length, 0.25)
    # Four roundings: of rstd, of two products, and the last.
    u = float(jnp.finfo(dtype).eps) / 2
    for got, right in zip((y, *vjp(dy)), (x_hat * wide_w, dx, (wide_dy * x_hat).sum(0)), strict=True):
        assert got.dtype == dtype and np.abs(wide(got) - right).max() <= 8 * u * np.abs(right).max()
    assert np.array_equal(wide(rj.l2_norm(x, None, 0.25, clamped=True))[:3], wide(x * 4)[:3])
    assert jnp.isnan(rj.l2_norm(jnp.zeros((1, 8)), eps=0.0, clamped=True)).all()
    assert not rj.l2_norm(jnp.zeros((1, 8)), eps=1e-12, clamped=True).any()


@pytest.mark.parametrize("dtype, weight_dtype", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)])
@pytest.mark.parametrize("kind, names", [("rms", "xw"), ("layer", "xw"), ("layer", "xwb")])
@pytest.mark.parametrize("rows, cols, partition", [((), 24, True), ((3, 7), 264, False), ((2,), 1032, True)])
def test_a_weight_before_the_norm_is_within_the_bounds(dtype, weight_dtype, kind, names, rows, cols, partition):
    options = {} if kind == "layer" else {"weight_offset": 0.5}
    norm = getattr(rj.Norm, kind)(EPS, cast_order="weight_first", **options)
    inputs, got = run(norm, make(names, dtype, weight_dtype, rows, cols), 1, partition=partition)
    judge_weight_first(f"{kind}_norm", EPS, inputs, got, *options.values())


def chain(order, x, w, gate=None, is_layer=False):
    """The chains of models, in the dtypes of their arrays."""
    mean = lambda rows: rows - rows.mean(-1, keepdims=True) if is_layer else rows  # noqa: E731
    rstd = lambda h: jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + EPS)  # noqa: E731
    if order == "weight_first":
        h = mean((x.astype(F32) * w.astype(F32)).astype(x.dtype).astype(F32))
        y = h * rstd(h)
        return (y if gate is None else y * jax.nn.silu(gate.astype(F32))).astype(x.dtype)
    h = mean(x.astype(F32))
    y = (h * rstd(h).astype(x.dtype).astype(F32)).astype(x.dtype)
    y = y if w is None else w * y
    return (y if gate is None else y.astype(F32) * jax.nn.silu(gate.astype(F32))).astype(x.dtype)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("of_weight", [None, F32, "same"])
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("order", ["rstd_first", "weight_first"])
def test_the_roundings_of_a_cast_order(order, dtype, of_weight, is_layer, has_gate):
    """A few values round to the other side of a tie. With another order, many differ."""
    if of_weight is None and order == "weight_first":
        return
    x, z = random(0, 64, 512, dtype=dtype), random(1, 64, 512, dtype=dtype) if has_gate else None
    w = None if of_weight is None else random(2, 512, dtype=dtype if of_weight == "same" else of_weight)
    norm = lambda order: rj.Norm.layer(EPS, cast_order=order) if is_layer else rj.Norm.rms(EPS, cast_order=order)  # noqa: E731
    call = lambda order: (norm(order) if z is None else norm(order).gate_after(z)).apply(x, w)  # noqa: E731
    expected = wide(chain(order, x, w, z, is_layer))
    differ = {name: (wide(call(name)) != expected).mean() for name in CAST_ORDERS if w is not None or name != "weight_first"}
    assert differ.pop(order) < 0.01 < 0.03 < min(differ.values()), differ
    form = Form(is_layer, EPS, cast_order=order, activation="silu")
    assert (wide(reference.forward(form, x, None, z, w, None)[0]) != expected).mean() < 0.01


@pytest.mark.parametrize("x_dtype, y_dtype", [(F32, BF16), (F32, F16), (BF16, F32), (F16, F32)])
@pytest.mark.parametrize("of_weight", ["x", "y", "f32"])
@pytest.mark.parametrize("kind, names, groups", [("rms", "x", 1), ("rms", "xw", 1), ("layer", "xwb", 1), ("rms", "xzw", 2), ("layer", "xzwb", 1)])
@pytest.mark.parametrize("partition", [True, False])
def test_y_of_another_dtype_is_within_the_bounds_of_the_wide_row(x_dtype, y_dtype, of_weight, kind, names, groups, partition):
    weight_dtype = dict(x=x_dtype, y=y_dtype, f32=F32)[of_weight]
    given = make(names, x_dtype, weight_dtype, (3, 7), 264, y_dtype)
    inputs, got = run(getattr(rj.Norm, kind)(EPS, out_dtype=y_dtype), given, groups, y_dtype, partition)
    inputs = {name: array.astype(F32) for name, array in inputs.items()}
    judge_gated("layer_norm" if kind == "layer" else "rms_norm", EPS, inputs, got, "silu", False, groups)


@pytest.mark.parametrize("x_dtype, y_dtype", [(F32, BF16), (BF16, F32)])
def test_tangents_of_a_y_of_another_dtype_are_rounded_once(x_dtype, y_dtype):
    x, dx, w, dw = (random(seed, *(() if seed > 1 else (5,)), 203, dtype=x_dtype) for seed in range(4))
    y, dy = jax.jvp(lambda x, w: rj.rms_norm(x, w, EPS, out_dtype=y_dtype), (x, w), (dx, dw))
    assert y.dtype == dy.dtype == y_dtype
    got, (x, dx, w, dw) = wide(dy), map(wide, (x, dx, w, dw))
    rstd = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    x_hat = x * rstd
    through = rstd * (dx - x_hat * (dx * x_hat).mean(-1, keepdims=True))
    exact, terms = through * w + x_hat * dw, abs(through * w) + abs(x_hat * dw)
    bound = float(jnp.finfo(y_dtype).eps) / 2 * abs(exact) + 64 * 2.0**-24 * (terms + abs(w) * rstd * abs(dx).max(-1, keepdims=True))
    assert (abs(got - exact) <= bound).all()


def test_a_function_a_value_and_a_module_are_one_norm():
    flax, equinox = framework("flax"), framework("equinox")
    import rmsnorm.jax.equinox as of_equinox
    import rmsnorm.jax.nnx as of_nnx

    same = lambda found, expected: found.dtype == expected.dtype and np.array_equal(wide(found), wide(expected))  # noqa: E731
    x, w = random(0, 3, 16, dtype=BF16), random(1, 16, dtype=BF16)
    options = dict(clamped=True, weight_offset=0.5, out_dtype=F32)
    expected = rj.l2_norm(x, w, 0.3, groups=2, **options)
    assert expected.dtype == F32 and same(expected, rj.Norm.l2(0.3, **options).groups(2).apply(x, w))
    assert len({wide(rj.l2_norm(x, w, **each)).tobytes() for each in (
        {}, {"eps": 0.3}, {"groups": 2}, {"clamped": True, "eps": 9.0}, {"weight_offset": 0.5}, {"cast_order": "weight_first"},
        {"out_dtype": F32})}) == 7
    own = of_nnx.L2Norm(16, epsilon=0.3, use_scale=True, groups=2, param_dtype=BF16, rngs=flax.nnx.Rngs(0), **options)
    own.scale[...] = w
    assert same(own(x), expected) and same(of_nnx.L2Norm(16, rngs=flax.nnx.Rngs(0))(x), rj.l2_norm(x))
    with pytest.raises(NotImplementedError, match="reduction_axes, feature_axes, axis_name: expected -1, -1 and None, got 0"):
        of_nnx.L2Norm(3, reduction_axes=0, feature_axes=0, rngs=flax.nnx.Rngs(0))(x)
    own = of_equinox.L2Norm((2, 8), 0.3, True, groups=2, **options)
    own = equinox.tree_at(lambda norm: norm.weight, own, w.reshape(2, 8))
    assert same(equinox.filter_jit(jax.vmap(own))(x.reshape(3, 2, 8)).reshape(3, 16), expected)
    assert of_equinox.L2Norm(16).weight is None and same(jax.vmap(of_equinox.L2Norm(16))(x), rj.l2_norm(x))
    for order in CAST_ORDERS:
        expected = rj.rms_norm(x, w, 0.3, cast_order=order, weight_offset=1.0)
        assert same(expected, rj.Norm.rms(0.3, cast_order=order, weight_offset=1.0).apply(x, w))
        assert same(expected, rj.rms_norm_gated(x, None, w, 0.3, cast_order=order, weight_offset=1.0))
    assert same(rj.rms_norm(x, w, 0.3, cast_order="before_weight"), rj.rms_norm(x, w, 0.3, cast_before_weight=True))
    assert same(rj.rms_norm(x, w, 0.3, cast_order="at_store"), rj.rms_norm(x, w, 0.3))
    assert same(rj.rms_norm(x, w, 0.3, out_dtype="bfloat16"), rj.rms_norm(x, w, 0.3))
    assert rj.layer_norm(x, out_dtype=F32).dtype == F32 and rj.rms_norm_gated(x, x.astype(F32), out_dtype=F32).dtype == F32
    close(rj.l2_norm(x, groups=4), rj.l2_norm(x.reshape(3, 4, 4)).reshape(3, 16), 2.0**-8)
    assert rj.l2_norm(jnp.zeros((0, 8))).shape == (0, 8) and rj.l2_norm(jnp.zeros((2, 0))).shape == (2, 0)


# Derivatives.


def plainly(kind, x, w=None, b=None, *, offset=0.0, clamped=None, groups=1, first=False, gate=None, residual=None):
    """(y, h) from the definition."""
    h = x if residual is None else x + residual
    rows, w = (h * (w + offset), None) if first else (h, w)
    rows = rows.reshape(*x.shape[:-1], groups, -1)
    rows = rows - rows.mean(-1, keepdims=True) if kind == "layer" else rows
    total = (rows * rows).sum(-1, keepdims=True)
    if clamped is not None:
        y = jnp.where(total <= clamped**2, rows / clamped, rows * jax.lax.rsqrt(total))
    else:
        y = rows * jax.lax.rsqrt((total if kind == "l2" else total / rows.shape[-1]) + EPS)
    y = y.reshape(x.shape)
    y = y if w is None else y * (w + offset)
    y = y if b is None else y + b
    return y if gate is None else y * jax.nn.silu(gate), h


# (this package, the definition): functions of x, residual, weight and bias. A clamped norm has one row below and one above its eps.
FORMS = {
    "l2": (lambda x, r, w, b: rj.l2_norm(x, w, EPS, weight_offset=1.5), lambda x, r, w, b: plainly("l2", x, w, offset=1.5)[0]),
    "l2 residual": (lambda x, r, w, b: joined(rj.Norm.l2(EPS).residual(r).groups(2).apply(x, w, b)),
                    lambda x, r, w, b: joined(plainly("l2", x, w, b, groups=2, residual=r))),
    "l2 gate": (lambda x, r, w, b: rj.Norm.l2(EPS).gate_after(r).apply(x, w, b), lambda x, r, w, b: plainly("l2", x, w, b, gate=r)[0]),
    "clamped": (lambda x, r, w, b: rj.l2_norm(x * jnp.array([[0.1], [1.0]]), w, 0.5, clamped=True),
                lambda x, r, w, b: plainly("l2", x * jnp.array([[0.1], [1.0]]), w, clamped=0.5)[0]),
    "rstd first": (lambda x, r, w, b: rj.Norm.layer(EPS, cast_order="rstd_first").apply(x, w, b), lambda x, r, w, b: plainly("layer", x, w, b)[0]),
    "weight first": (lambda x, r, w, b: rj.rms_norm(x, w, EPS, cast_order="weight_first", weight_offset=1.5),
                     lambda x, r, w, b: plainly("rms", x, w, offset=1.5, first=True)[0]),
    "weight first, gate": (lambda x, r, w, b: rj.rms_norm_gated(x, r, w, EPS, bias=b, groups=2, cast_order="weight_first"),
                           lambda x, r, w, b: plainly("rms", x, w, b, groups=2, first=True, gate=r)[0]),
    "weight first, layer": (lambda x, r, w, b: rj.Norm.layer(EPS, cast_order="weight_first").apply(x, w, b),
                            lambda x, r, w, b: plainly("layer", x, w, b, first=True)[0]),
}


@pytest.mark.parametrize("form", ["l2 residual", "clamped", "weight first, gate"])
@pytest.mark.parametrize("name", [name for name in DERIVATIVES if "vmap" not in name and "scan" not in name])
def test_derivatives_of_every_kind(name, form):
    agree(DERIVATIVES[name], *FORMS[form], arrays(2, 4))


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_every_norm(form):
    def run(f):
        gradient = jax.grad(weighed(f), ALL)
        return lambda *args: (gradient(*args), jax.jvp(f, args, along(args)), jax.jvp(gradient, args, along(args)))

    agree(run, *FORMS[form], arrays(2, 4))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
@pytest.mark.parametrize("form", ["l2 gate", "weight first, gate"])
def test_derivatives_in_some_arrays(wanted, form):
    def run(f):
        def both(*args):
            def of(*some):
                return f(*(dict(enumerate(args)) | dict(zip(wanted, some))).values())

            some = tuple(args[index] for index in wanted)
            return jax.jvp(of, some, along(some)), jax.grad(weighed(f), wanted)(*args)

        return both

    agree(run, *FORMS[form], arrays(2, 4))


@pytest.mark.parametrize("x_dtype, y_dtype", [(F32, BF16), (BF16, F32)])
@pytest.mark.parametrize("order", [None, "weight_first"])
@pytest.mark.parametrize("name", ["jvp", "linear transpose", "gradient", "hessian", "vmap of jvp", "jvp of gradient of vmap"])
def test_derivatives_of_a_y_of_another_dtype(x_dtype, y_dtype, order, name):
    args = [array.astype(x_dtype) if array.ndim == 2 else array for array in arrays(2, 4)]
    ours = lambda x, r, w, b: rj.rms_norm(x, w, EPS, cast_order=order, out_dtype=y_dtype)  # noqa: E731
    theirs = lambda x, r, w, b: plainly("rms", x, w, first=order is not None)[0]  # noqa: E731
    found, expected = DERIVATIVES[name](ours)(*args), DERIVATIVES[name](theirs)(*(array.astype(F32) for array in args))
    for got, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(wide(got) - wide(right)).max() <= 2.0**-5 * max(np.abs(wide(right)).max(), 1.0)


@pytest.mark.parametrize("batched", [axes for axes in itertools.product((None, 0, 1), repeat=3) if any(axis is not None for axis in axes)])
def test_every_choice_of_batched_arguments_is_a_call_for_each_member(batched):
    args = [random(seed, *(() if seed == 2 else (4,)), 8) for seed in range(3)]
    args = [array if axis is None else jnp.stack([array, array[::-1] - 1, 2 * array], min(axis, array.ndim)) for axis, array in zip(batched, args)]
    batched = [axis if axis is None or array.ndim == 3 else min(axis, 1) for axis, array in zip(batched, args)]

    def function(x, z, w):
        return (rj.l2_norm(x, w, 1.0, clamped=True, groups=2), rj.rms_norm_gated(x, z, w, EPS, cast_order="weight_first"),
                rj.rms_norm(x, w, EPS, out_dtype=BF16))

    both = lambda *args: (function(*args), jax.grad(lambda *args: sum((y.astype(F32) ** 2).sum() for y in function(*args)), (0, 1, 2))(*args))  # noqa: E731
    found = jax.vmap(both, batched)(*args)
    for index in range(3):
        member = both(*(array if axis is None else array.take(index, axis) for axis, array in zip(batched, args)))
        assert all(np.array_equal(wide(got[index]), wide(right)) for got, right in zip(found[0], member[0], strict=True))
        close(jax.tree.map(lambda array: array[index], found[1]), member[1])  # noqa: B023


def test_one_kernel_each_way():
    x, w = random(0, 16, 64), random(1, 64)
    for norm in (rj.Norm.l2(), rj.Norm.l2(clamped=True), rj.Norm.rms(cast_order="rstd_first"), rj.Norm.rms(cast_order="weight_first"),
                 rj.Norm.layer(cast_order="before_weight"), rj.Norm.rms(out_dtype=BF16)):
        for partition in (True, False):
            f = lambda x, w: norm.apply(x, w, partition=partition)  # noqa: B023, E731
            for run, expected in ((jax.value_and_grad(lambda x, w: f(x, w).astype(F32).sum(), (0, 1)), [1, 1]),  # noqa: B023
                                  (lambda x, w: jax.jvp(f, (x, w), (x, w)), [1, 1])):  # noqa: B023
                text = jax.jit(run).lower(x, w).compile().as_text()
                assert [text.count(f'custom_call_target="rmsnorm_{name}"') for name in ("forward", "backward")] == expected, norm


# Devices and programs.


@pytest.mark.parametrize("norm", ["l2", "weight first", "narrow", "wide"])
def test_automatic_sharding_moves_no_activations_and_rounds_sums_once(norm, four_devices):  # noqa: F811
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"))
    dtype, y_dtype = F32 if norm == "narrow" else BF16, F32 if norm == "wide" else BF16
    x, dy, w = random(0, 8, 16, 256, dtype=dtype), random(1, 8, 16, 256, dtype=y_dtype), random(2, 256, dtype=BF16)
    call = {"l2": lambda x, w: rj.l2_norm(x, w, groups=4), "weight first": lambda x, w: rj.rms_norm(x, w, EPS, cast_order="weight_first")}.get(
        norm, lambda x, w: rj.rms_norm(x, w, EPS, out_dtype=y_dtype))
    placed = [jax.device_put(array, NamedSharding(mesh, P("a", "b") if array.ndim == 3 else P())) for array in (x, w, dy)]
    compiled = jax.jit(lambda x, w, dy: jax.vjp(call, x, w)[1](dy)).lower(*placed).compile()
    text = compiled.as_text()
    assert is_custom(text) and not re.search(r"all-gather|all-to-all|collective-permute", text)
    dx, dweight = compiled(*placed)
    assert dx.sharding.spec == P("a", "b") and dweight.sharding.is_fully_replicated and dx.dtype == dtype
    got, inputs = {"dx": dx, "dweight": dweight}, {"x": x, "weight": w, "dy": dy}
    if norm == "weight first":
        judge_weight_first("rms_norm", EPS, inputs, got)
    elif norm != "l2":
        judge_gated("rms_norm", EPS, {name: array.astype(F32) for name, array in inputs.items()}, got, "silu")
    else:
        close(got, dict(zip(got, jax.vjp(call, x, w)[1](dy))), 2.0**-7)


@pytest.mark.parametrize("form", ["l2", "weight first, gate"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(form, check_vma, four_devices):  # noqa: F811
    if not hasattr(jax, "shard_map"):
        pytest.skip(f"jax.shard_map: JAX {jax.__version__} has none")
    args, mesh = arrays(8, 16), Mesh(four_devices, ("a",))
    ours, theirs = FORMS[form]
    f = jax.shard_map(ours, mesh=mesh, in_specs=(P("a"), P("a"), P(), P()), out_specs=P("a"), check_vma=check_vma)
    square = lambda f: jax.grad(lambda *args: (f(*args) ** 2).sum(), ALL)  # noqa: E731
    close(jax.jit(square(f))(*args), square(theirs)(*args), 1e-4)


@pytest.mark.parametrize("split", [P("a"), P("a", "b"), P(None, None, "a")])
@pytest.mark.parametrize("form", ["l2", "weight first", "narrow"])
def test_explicit_sharding(form, split, four_devices):  # noqa: F811
    if not hasattr(jax.sharding, "AxisType") or not hasattr(jax, "set_mesh"):
        pytest.skip(f"jax.set_mesh: JAX {jax.__version__} has no explicit sharding")
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    narrow = lambda x, r, w, b: rj.rms_norm(x, w, EPS, out_dtype=BF16).astype(F32)  # noqa: E731
    ours, theirs = FORMS[form] if form in FORMS else (narrow, lambda x, r, w, b: plainly("rms", x, w)[0])
    args = arrays(8, 4, 16)
    run = lambda f: lambda *args: (f(*args), jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 2))(*args))  # noqa: E731
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, NamedSharding(mesh, split if array.ndim == 3 else P())) for array in args]
        got = jax.jit(run(ours))(*sharded)
        assert is_custom(jax.jit(run(ours)).lower(*sharded).compile().as_text())
    close(got, jax.jit(run(theirs))(*args), 2.0**-6 if form == "narrow" else 1e-4)


@pytest.mark.parametrize("form", ["l2 residual", "clamped", "weight first, gate"])
def test_export_without_special_arguments(form):
    export = pytest.importorskip("jax.export")
    args = arrays(2, 8)
    run = lambda f: jax.jit(lambda *args: (f(*args), jax.grad(weighed(f), ALL)(*args), jax.jvp(f, args, args)))  # noqa: E731
    exported = export.export(run(FORMS[form][0]), platforms=("cpu", "cuda", "tpu"))(*args)
    assert not is_custom(exported.mlir_module())
    close(exported.call(*args), run(FORMS[form][1])(*args), 1e-4)


def test_export_of_a_y_of_another_dtype_with_symbolic_shapes():
    export = pytest.importorskip("jax.export")
    x, w = random(0, 5, 8), random(1, 8)
    norm = lambda x, w: rj.rms_norm(x, w, EPS, out_dtype=BF16)  # noqa: E731
    run = jax.jit(lambda x, w: (norm(x, w), jax.grad(lambda x: norm(x, w).astype(F32).sum())(x)))
    shapes = jax.ShapeDtypeStruct(export.symbolic_shape("n, 8"), F32), jax.ShapeDtypeStruct((8,), F32)
    exported = export.export(run)(*shapes)
    assert not is_custom(exported.mlir_module())
    close(exported.call(x, w), run(x, w), 2.0**-8)


@pytest.mark.parametrize("form", FORMS)
def test_dtypes_without_kernels_are_computed_all_the_same(form):
    ours, theirs = FORMS[form]
    with jax.enable_x64(True):
        args = [jnp.asarray(wide(array)) for array in arrays(2, 4)]
        run = lambda f: lambda *args: (f(*args), jax.grad(weighed(f), ALL)(*args))  # noqa: E731
        got = run(ours)(*args)
        assert all(array.dtype == jnp.float64 for array in jax.tree.leaves(got))
        # The loss is float32.
        close(got[0], theirs(*args), 1e-12)
        close(got[1], run(theirs)(*args)[1], 1e-5)


def test_pairs_of_dtypes_without_kernels():
    x, w = random(0, 3, 64, dtype=F16), random(1, 64)
    exact = plainly("rms", x.astype(F32), w)[0]
    for call, dtype, bound in ((lambda x: rj.rms_norm(x, w, EPS, out_dtype=BF16), BF16, 2.0**-8),
                               (lambda x: rj.rms_norm_gated(x, jnp.full(x.shape, 40.0, F16), w, EPS, activation="sigmoid", out_dtype=F32),
                                F32, 1e-6)):
        assert call(x).dtype == dtype and not is_custom(jax.jit(call).lower(x).compile().as_text())
        close(call(x), exact, bound)
        assert jax.grad(lambda x: call(x).astype(F32).sum())(x).dtype == F16  # noqa: B023
    call = lambda x: rj.rms_norm(x, w, EPS, cast_order="weight_first", out_dtype=F32)  # noqa: E731
    assert call(x).dtype == F32 and not is_custom(jax.jit(call).lower(x).compile().as_text())
    close(call(x), chain("weight_first", (x.astype(F32) * w).astype(F16).astype(F32), jnp.ones(64)), 1e-6)


# Errors.


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("error, text, call", [
    (ValueError, "cast_order: expected one of at_store, before_weight, rstd_first, weight_first, got 'first'",
     lambda x, w: rj.rms_norm(x, w, cast_order="first")),
    (ValueError, "weight: expected an array with cast_order=\"weight_first\"", lambda x, w: rj.rms_norm(x, cast_order="weight_first")),
    (TypeError, "cast_order: expected no residual with weight_first", lambda x, w: rj.Norm.rms(cast_order="weight_first").residual(x).apply(x, w)),
    (TypeError, "cast_order: expected no gate before the norm with weight_first",
     lambda x, w: rj.rms_norm_gated(x, x, w, norm_before_gate=False, cast_order="weight_first")),
    (TypeError, "cast_order: expected no residual after", lambda x, w: rj.Norm.rms(cast_order="rstd_first").residual_after(x).apply(x, w)),
    (TypeError, "l2_norm: expected no residual after", lambda x, w: rj.Norm.l2().residual_after(x).apply(x, w)),
    (TypeError, "out_dtype: expected a floating-point dtype of at least 16 bits, got .*int32", lambda x, w: rj.rms_norm(x, w, out_dtype=jnp.int32)),
    (TypeError, "out_dtype: expected a floating-point dtype of at least 16 bits, got 'bf16'", lambda x, w: rj.rms_norm(x, w, out_dtype="bf16")),
    (TypeError, "out_dtype: expected a floating-point dtype of at least 16 bits", lambda x, w: rj.rms_norm(x, w, out_dtype=jnp.float8_e4m3fn)),
    (TypeError, "out_dtype: expected no residual, got one", lambda x, w: rj.Norm.rms(out_dtype=BF16).residual(x).apply(x, w)),
    (TypeError, "out_dtype: expected no gate before the norm", lambda x, w: rj.rms_norm_gated(x, x, w, norm_before_gate=False, out_dtype=BF16)),
    (TypeError, "clamped: expected a bool, got int", lambda x, w: rj.l2_norm(x, w, clamped=1)),
    (ValueError, "eps: expected a number of at least 0, got -1.0", lambda x, w: rj.l2_norm(x, w, -1.0)),
    (ValueError, "eps: expected 0 or a number from 2\\*\\*-63 to 2\\*\\*63", lambda x, w: rj.l2_norm(x, w, 1e-30, clamped=True)),
    (ValueError, "groups: expected a number that divides the 8 columns", lambda x, w: rj.l2_norm(x, w, groups=3)),
    (ValueError, r"weight: expected the shape \(8,\), got \(7,\)", lambda x, w: rj.l2_norm(x, w[:-1])),
    (TypeError, "x: expected an array, got None", lambda x, w: rj.l2_norm(None)),
])
def test_errors_say_what_was_expected(is_compiled, error, text, call):
    with pytest.raises(error, match=text):
        (jax.jit(call) if is_compiled else call)(random(0, 2, 8), random(1, 8))


def test_a_traced_option_is_refused():
    x = random(0, 2, 8)
    for name, text in (("clamped", "clamped: expected a bool, got"), ("eps", "eps: expected a Python number, got a traced array")):
        with pytest.raises(TypeError, match=text):
            jax.jit(functools.partial(lambda name, value: rj.l2_norm(x, **{name: value}), name))(1.0)
