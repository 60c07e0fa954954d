"""JAX: norms with a gate and with groups of columns. Values, gradients, tangents, roundings, errors and modules. Derivatives of every kind,
batches, sharding and exports: the forms of test_jax.py."""

import functools
import itertools

import numpy as np
import pytest
from conftest import framework
from judge import activated, judge_gated, wide

jax = framework("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402
from test_jax import close, four_devices, gated, is_custom, random  # noqa: E402, F401

import rmsnorm.jax as rj  # noqa: E402
from rmsnorm._norm import ACTIVATIONS, Form  # noqa: E402
from rmsnorm.jax import reference  # noqa: E402

EPS = 1e-5
# (is_layer, the inputs: x, residual (r), gate after (z) or before the norm (Z), weight (w), bias (b); groups).
FORMS = [(False, "xzw", 1), (False, "xz", 1), (False, "xrzwb", 1), (False, "xZw", 1), (False, "xZ", 3), (False, "xZwb", 2), (False, "xzw", 4),
         (False, "xw", 2), (True, "xzwb", 1), (True, "xrzw", 2), (True, "xZwb", 1), (True, "xZb", 3), (True, "xrwb", 2)]
LONG = {"x": "x", "r": "residual", "z": "gate", "Z": "gate", "w": "weight", "b": "bias"}


def norm_of(is_layer, given, activation, groups, offset):
    norm = (rj.Norm.layer(EPS) if is_layer else rj.Norm.rms(EPS, weight_offset=offset)).groups(groups)
    norm = norm.residual(given["r"]) if "r" in given else norm
    norm = norm.gate_after(given["z"], activation) if "z" in given else norm
    return norm.gate_before(given["Z"], activation) if "Z" in given else norm


def make(names, dtype, weight_dtype, stream, rows, cols):
    dtypes = {"w": weight_dtype, "b": weight_dtype, "r": stream}
    return {name: random(seed, *(() if name in "wb" else rows), cols, dtype=dtypes.get(name, dtype)) for seed, name in enumerate(names)}


@pytest.mark.parametrize("dtype, weight_dtype, stream", [
    (jnp.float32, jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32, jnp.float32),
    (jnp.float16, jnp.float16, jnp.float16),
])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_layer, names, groups", FORMS)
@pytest.mark.parametrize("rows, cols, partition", [((), 24, True), ((3, 7), 264, False), ((2,), 1032, True)])
def test_values_and_gradients_are_within_their_bounds(dtype, weight_dtype, stream, activation, is_layer, names, groups, rows, cols, partition):
    given, offset = make(names, dtype, weight_dtype, stream, rows, cols), 0.0 if is_layer else 0.5
    arriving = [random(10, *rows, cols, dtype=dtype), random(11, *rows, cols, dtype=stream)][: 1 + ("r" in names)]

    def function(given):
        return norm_of(is_layer, given, activation, groups, offset).apply(*map(given.get, "xwb"), partition=partition)

    @jax.jit
    def run(given, arriving):
        found, vjp = jax.vjp(function, given)
        return found, vjp(tuple(arriving) if "r" in names else arriving[0])[0]

    found, gradients = run(given, arriving)
    got = dict(zip("yh", found if "r" in names else (found,)))
    assert got["y"].dtype == dtype and all(gradients[name].dtype == array.dtype for name, array in given.items())
    got |= {f"d{LONG[name]}": array for name, array in gradients.items()}
    inputs = {LONG[name]: array for name, array in given.items()} | dict(zip(("dy", "dresidual_out"), arriving))
    judge_gated("layer_norm" if is_layer else "rms_norm", EPS, inputs, got, activation, "Z" in names, groups, offset)


@pytest.mark.parametrize("weight_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("before, groups", [(False, 1), (True, 1), (True, 4)])
def test_the_roundings_of_a_chain(weight_dtype, activation, before, groups):
    """A few values round to the other side of a tie, since sums are added in another order. With one rounding, many differ."""
    x, z, w = random(0, 64, 512, dtype=jnp.bfloat16), random(1, 64, 512, dtype=jnp.bfloat16), random(2, 512, dtype=weight_dtype)
    act = activated(activation, wide(z))[0].astype(np.float32)
    rows = wide(x) * act if before else wide(x)
    rows = rows.reshape(64, groups, -1)
    x_hat = jnp.asarray(rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS), jnp.float32).reshape(64, 512).astype(jnp.bfloat16)
    chain = w * x_hat
    chain = (chain if before else chain.astype(jnp.float32) * act).astype(jnp.bfloat16)
    call = functools.partial(rj.rms_norm_gated, x, z, w, EPS, activation=activation, norm_before_gate=not before, groups=groups)
    form = Form(False, EPS, 0.0, True, activation=activation, gate_before=before, groups=groups)
    for y in (call(cast_before_weight=True), reference.forward(form, x, None, z, w, None)[0]):
        assert (wide(y) != wide(chain)).mean() < 0.01
    assert (wide(call()) != wide(chain)).mean() > 0.05


def test_a_function_and_a_value_are_one_norm():
    """No option has its default, so that a lost one is noticed."""
    x, z = random(0, 3, 8, dtype=jnp.bfloat16), random(1, 3, 8, dtype=jnp.bfloat16)
    r, w, b = random(2, 3, 8), random(3, 8), random(4, 8)
    options = dict(weight_offset=0.25, cast_before_weight=True)
    rms = rj.Norm.rms(0.3, **options)
    call = functools.partial(rj.rms_norm_gated, x, z, w, 0.3, **options)
    for found, expected in (
        (rms.gate_after(z).apply(x, w), call()),
        (rms.gate_after(z, "sigmoid").groups(2).apply(x, w, b), call(bias=b, activation="sigmoid", groups=2)),
        (rms.gate_before(z).groups(2).apply(x, w), call(norm_before_gate=False, groups=2)),
        (rms.groups(2).apply(x, w), rj.rms_norm_gated(x, None, w, 0.3, groups=2, **options)),
        (rms.groups(1).apply(x, w), rj.rms_norm(x, w, 0.3, **options)),
        (rj.rms_norm_gated(x, None, w, 0.3, **options), rj.rms_norm(x, w, 0.3, **options)),
        (jax.vmap(lambda x, z: rms.gate_before(z).groups(2).apply(x, w))(x, z), call(norm_before_gate=False, groups=2)),
        (rms.residual(r).gate_after(z).apply(x, w)[1], x + r),
        (call(partition=False), call()),
    ):
        assert found.dtype == expected.dtype and np.array_equal(wide(found), wide(expected))
    assert len({wide(call(**each)).tobytes() for each in ({}, {"activation": "sigmoid"}, {"norm_before_gate": False}, {"groups": 2}, {"bias": b})}) == 5


@pytest.mark.parametrize("batched", [axes for axes in itertools.product((None, 0, 1), repeat=4) if any(axis is not None for axis in axes)])
def test_every_choice_of_batched_arguments_is_a_call_for_each_member(batched):
    args = [random(seed, *(() if seed > 1 else (4,)), 8) for seed in range(4)]
    args = [array if axis is None else jnp.stack([array, array[::-1] - 1, 2 * array], min(axis, array.ndim)) for axis, array in zip(batched, args)]
    batched = [axis if axis is None or array.ndim == 3 else min(axis, 1) for axis, array in zip(batched, args)]

    def function(x, z, w, b):
        return rj.rms_norm_gated(x, z, w, EPS, bias=b, groups=2), rj.Norm.layer(EPS).gate_before(z, "sigmoid").apply(x, w, b)

    found = jax.vmap(function, batched)(*args)
    for index in range(3):
        member = function(*(array if axis is None else array.take(index, axis) for axis, array in zip(batched, args)))
        assert all(np.array_equal(got[index], right) for got, right in zip(found, member, strict=True))


def test_dtypes_without_kernels_are_computed_all_the_same():
    x, z, w, b = random(0, 4, 24), random(1, 4, 24), random(2, 24), random(3, 24)
    run = lambda x, z, w, b: (rj.rms_norm_gated(x, z, w, 1e-3, bias=b, groups=3), rj.Norm.layer(1e-3).gate_before(z, "sigmoid").apply(x, w, b))  # noqa: E731
    plainly = gated(False, x, z, w, b, groups=3)[0], gated(True, x, z, w, b, "sigmoid", True)[0]
    close(run(x, z, w, b), plainly)
    mixed = x, z.astype(jnp.bfloat16), w, b
    assert not is_custom(jax.jit(run).lower(*mixed).compile().as_text())
    with jax.numpy_dtype_promotion("strict"):
        close(run(*mixed), run(x, mixed[1].astype(jnp.float32), w, b), 1e-5)
    with jax.enable_x64(True):
        wider = [jnp.asarray(wide(array)) for array in (x, z, w, b)]
        found = run(*wider)
        assert all(array.dtype == jnp.float64 for array in found)
        close(found, (gated(False, *wider, groups=3)[0], gated(True, *wider, "sigmoid", True)[0]), 1e-12)
    for rows in ((0, 3), (3, 0)):
        x, z = random(0, *rows, 8), random(1, *rows, 8)
        gradients = jax.grad(lambda x, z, w: rj.rms_norm_gated(x, z, w, groups=2, norm_before_gate=False).sum(), (0, 1, 2))(x, z, w[:8])
        assert [array.shape for array in gradients] == [x.shape, z.shape, (8,)] and not gradients[2].any()


def test_sums_over_devices_are_rounded_once(four_devices):  # noqa: F811
    rows, whole = (NamedSharding(Mesh(four_devices, ("a",)), spec) for spec in (P("a"), P()))
    x, z, dy = (random(seed, 64, 96, dtype=jnp.bfloat16) for seed in range(3))
    w, b = random(3, 96, dtype=jnp.bfloat16), random(4, 96, dtype=jnp.bfloat16)
    for before in (False, True):
        run = jax.jit(lambda x, z, w, b, dy, before=before: jax.vjp(
            lambda *args: rj.rms_norm_gated(*args[:3], EPS, bias=args[3], norm_before_gate=not before, groups=2), x, z, w, b)[1](dy))
        placed = [jax.device_put(array, rows if array.ndim == 2 else whole) for array in (x, z, w, b, dy)]
        got = dict(zip(("dx", "dgate", "dweight", "dbias"), run(*placed)))
        judge_gated("rms_norm", EPS, {"x": x, "gate": z, "weight": w, "bias": b, "dy": dy}, got, "silu", before, 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, four_devices):  # noqa: F811
    if not hasattr(jax, "shard_map"):
        pytest.skip(f"jax.shard_map: JAX {jax.__version__} has none")
    x, z, w = random(0, 8, 16, 32), random(1, 8, 16, 32), random(2, 32)
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"))
    rows = P("a", "b")
    for options in ({}, dict(norm_before_gate=False, groups=4)):
        call = functools.partial(rj.rms_norm_gated, eps=1e-3, **options)
        f = jax.shard_map(call, mesh=mesh, in_specs=(rows, rows, P()), out_specs=rows, check_vma=check_vma)
        square = lambda f: jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))  # noqa: E731
        before, groups = not options.get("norm_before_gate", True), options.get("groups", 1)
        exact = lambda x, z, w: gated(False, x, z, w, before=before, groups=groups)[0]  # noqa: B023, E731
        close(jax.jit(square(f))(x, z, w), square(exact)(x, z, w))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("error, text, call", [
    (ValueError, r"gate: expected the shape \(2, 8\), got \(1, 8\)", lambda x, w: rj.rms_norm_gated(x, x[:1], w)),
    (ValueError, r"gate: expected the shape \(2, 8\), got \(8,\)", lambda x, w: rj.Norm.rms().gate_before(w).apply(x, w)),
    (TypeError, "gate: expected an array of real floating-point numbers, got int32", lambda x, w: rj.rms_norm_gated(x, x.astype(jnp.int32), w)),
    (TypeError, "gate: expected an array, got str", lambda x, w: rj.rms_norm_gated(x, "x", w)),
    (TypeError, "gate: expected an array, got None", lambda x, w: rj.Norm.rms().gate_after(None)),
    (TypeError, "x: expected an array, got None", lambda x, w: rj.rms_norm_gated(None, x)),
    (ValueError, "activation: expected one of silu, sigmoid, got 'swish'", lambda x, w: rj.rms_norm_gated(x, x, w, activation="swish")),
    (ValueError, "activation: expected one of silu, sigmoid, got None", lambda x, w: rj.Norm.layer().gate_after(x, None).apply(x, w)),
    (ValueError, "groups: expected a number that divides the 8 columns of a row, got 3", lambda x, w: rj.rms_norm_gated(x, x, w, groups=3)),
    (ValueError, "groups: expected a number that divides the 8 columns of a row, got 16", lambda x, w: rj.Norm.rms().groups(16).apply(x, w)),
    (ValueError, "groups: expected at least 1, got 0", lambda x, w: rj.Norm.layer().groups(0).apply(x, w)),
    (TypeError, "groups: expected an int, got float", lambda x, w: rj.rms_norm_gated(x, x, w, groups=2.0)),
    (TypeError, "groups: expected an int, got bool", lambda x, w: rj.Norm.rms().groups(True).apply(x, w)),
    (TypeError, "gate: expected no residual with a gate before", lambda x, w: rj.Norm.rms().residual(x).gate_before(x).apply(x, w)),
    (TypeError, "gate: expected no residual after the norm", lambda x, w: rj.Norm.rms().residual_after(x).gate_after(x).apply(x, w)),
    (TypeError, "groups: expected no residual after the norm", lambda x, w: rj.Norm.rms().residual_after(x).groups(2).apply(x, w)),
    (ValueError, r"bias: expected the shape \(8,\), got \(7,\)", lambda x, w: rj.rms_norm_gated(x, x, w, bias=w[:-1])),
])
def test_errors_say_what_was_expected(is_compiled, error, text, call):
    with pytest.raises(error, match=text):
        (jax.jit(call) if is_compiled else call)(random(0, 2, 8), random(1, 8))


def test_a_traced_option_is_refused():
    x = random(0, 2, 8)
    for name, text in (("norm_before_gate", "norm_before_gate: expected a bool, got a traced array"), ("groups", "groups: expected an int, got")):
        with pytest.raises(TypeError, match=text):
            jax.jit(lambda value: rj.rms_norm_gated(x, x, **{name: value}))(1)  # noqa: B023


# Modules.


def test_modules_are_the_function():
    flax, equinox = framework("flax"), framework("equinox")
    import rmsnorm.jax.equinox as of_equinox
    import rmsnorm.jax.nnx as of_nnx

    x, z, w, b = random(0, 3, 8, dtype=jnp.bfloat16), random(1, 3, 8, dtype=jnp.bfloat16), random(2, 8), random(3, 8)
    options = dict(activation="sigmoid", norm_before_gate=False, groups=2, cast_before_weight=True)
    own = of_nnx.RMSNormGated(8, epsilon=0.3, rngs=flax.nnx.Rngs(0), dtype=jnp.bfloat16, **options)
    assert jax.tree.structure(flax.nnx.state(own)) == jax.tree.structure(flax.nnx.state(flax.nnx.RMSNorm(8, rngs=flax.nnx.Rngs(0))))
    own.scale[...] = w
    close(own(x, z), rj.rms_norm_gated(x, z, w.astype(jnp.bfloat16), 0.3, **options), 0.0)
    close(own(x), rj.rms_norm_gated(x, None, w.astype(jnp.bfloat16), 0.3, groups=2, cast_before_weight=True), 0.0)
    gradient = flax.nnx.grad(lambda norm, x: norm(x, z).astype(jnp.float32).sum())(own, x)
    assert jax.tree.leaves(gradient)[0].shape == (8,)
    assert of_nnx.RMSNormGated(8, rngs=flax.nnx.Rngs(0))(x, z).dtype == flax.nnx.RMSNorm(8, rngs=flax.nnx.Rngs(0))(x).dtype
    with pytest.raises(NotImplementedError, match="reduction_axes, feature_axes, axis_name: expected -1, -1 and None, got 0"):
        of_nnx.RMSNormGated(3, reduction_axes=0, feature_axes=0, rngs=flax.nnx.Rngs(0))(x, z)

    own = of_equinox.RMSNormGated((2, 4), 0.3, use_bias=True, **options)
    assert isinstance(own, equinox.nn.RMSNorm)
    own = equinox.tree_at(lambda norm: (norm.weight, norm.bias), own, (w.reshape(2, 4), b.reshape(2, 4)))
    found = equinox.filter_jit(jax.vmap(own))(x.reshape(3, 2, 4), z.reshape(3, 2, 4))
    close(found.reshape(3, 8), rj.rms_norm_gated(x, z, w, 0.3, bias=b, **options), 0.0)
    gradient = equinox.filter_grad(lambda norm: jax.vmap(norm)(x.reshape(3, 2, 4)).astype(jnp.float32).sum())(own)
    assert gradient.weight.shape == (2, 4)
    with pytest.raises(ValueError, match=r"gate: expected the shape \(2, 4\), got \(4, 2\)"):
        own(x[0].reshape(2, 4), z[0].reshape(4, 2))
