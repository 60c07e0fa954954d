"""JAX: the kernels under its transformations, with one CPU that acts as four devices."""

import functools
import pathlib
import re

import numpy as np
import pytest
from conftest import framework, need
from judge import judge, judge_after, wide

jax = framework("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

import rmsnorm.jax as rj  # noqa: E402
from rmsnorm import _native  # noqa: E402
from rmsnorm._norm import Form  # noqa: E402
from rmsnorm.jax import reference  # noqa: E402

DTYPES = [(jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)]


def random(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.fixture
def xw():
    return random(0, 8, 16, 256), random(1, 256)


@pytest.fixture
def four_devices():
    devices = jax.devices()
    need("four devices", len(devices) >= 4, f"JAX has {len(devices)}; the CPU stands for four")
    return np.array(devices[:4])


def ours(x, w):
    return rj.rms_norm(x, w, 1e-6)


def plain(is_layer, eps, x, residual=None, weight=None, bias=None, offset=0.0):
    """(y, h) from the definition, in the dtypes of the inputs."""
    h = x if residual is None else x + residual
    centred = h - h.mean(-1, keepdims=True) if is_layer else h
    y = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)
    y = y if weight is None else y * (weight + offset)
    return y if bias is None else y + bias, None if residual is None else h


def around(is_layer, eps, x, residual, weight, bias, next_weight, next_bias, offset=0.0):
    """(y, h) from the definition: h = residual + norm(x), y its norm."""
    h = residual + plain(is_layer, eps, x, None, weight, bias, offset)[0]
    return plain(is_layer, eps, h, None, next_weight, next_bias, offset)[0], h


def gated(is_layer, x, gate, weight=None, bias=None, activation="silu", before=False, groups=1, offset=0.0, residual=None):
    """(y, h) from the definition: equations (1) to (6) and (19)."""
    h = x if residual is None else x + residual
    act = 1.0 if gate is None else jax.nn.sigmoid(gate) * (gate if activation == "silu" else 1.0)
    rows = (h * act if before else h).reshape(*x.shape[:-1], groups, -1)
    y = plain(is_layer, 1e-3, rows)[0].reshape(x.shape)
    y = y if weight is None else y * (weight + offset)
    y = y if bias is None else y + bias
    return y if before else y * act, None if residual is None else h


def theirs(x, w):
    return plain(False, 1e-6, x, None, w)[0]


def loss(function):
    return lambda x, w: (function(x, w).astype(jnp.float32) ** 2).sum()


def is_custom(text):
    return 'custom_call_target="rmsnorm_' in text or "@rmsnorm_" in text


def close(got, expected, tolerance=2e-5):
    """A loose comparison. Error bounds are tested elsewhere; this finds wrong combinations."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(wide(a) - wide(b)) <= tolerance * np.linalg.norm(wide(b))


@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("adds, stream", [(False, None), (True, None), (True, jnp.float32)])
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
def test_values_and_gradients_are_within_their_bounds(dtype, weight_dtype, is_layer, adds, stream, jit):
    x, dy = random(0, 3, 5, 203, dtype=dtype), random(1, 3, 5, 203, dtype=dtype)
    weight, bias = random(2, 203, dtype=weight_dtype), random(3, 203, dtype=weight_dtype)
    residual, dh = (random(seed, 3, 5, 203, dtype=stream or dtype) for seed in (4, 5))
    function = {
        (False, False): lambda x, weight, bias, residual: rj.rms_norm(x, weight, 1e-5),
        (True, False): lambda x, weight, bias, residual: rj.layer_norm(x, weight, bias, 1e-5),
        (False, True): lambda x, weight, bias, residual: rj.add_rms_norm(x, residual, weight, 1e-5),
        (True, True): lambda x, weight, bias, residual: rj.add_layer_norm(x, residual, weight, bias, 1e-5),
    }[is_layer, adds]

    @jit
    def run(x, weight, bias, residual, gradients):
        results, vjp = jax.vjp(function, x, weight, bias, residual)
        return results, vjp(gradients)

    results, (dx, dweight, dbias, dresidual) = run(x, weight, bias, residual, (dy, dh) if adds else dy)
    inputs = dict(x=x, weight=weight, dy=dy) | ({"bias": bias} if is_layer else {})
    got = dict(dx=dx, dweight=dweight) | ({"dbias": dbias} if is_layer else {})
    if adds:
        inputs |= dict(residual=residual, dresidual_out=dh)
        got |= dict(y=results[0], h=results[1], dresidual=dresidual)
    else:
        got |= dict(y=results)
    assert {name: array.dtype for name, array in got.items() if name in ("y", "dx")} == {"y": dtype, "dx": dtype}
    judge("layer_norm" if is_layer else "rms_norm", 1e-5, inputs, got)


@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
@pytest.mark.parametrize("stream", [None, jnp.float32])
@pytest.mark.parametrize("partition", [True, False])
def test_residuals_after_the_norm_are_within_their_bounds(dtype, weight_dtype, is_layer, has_next, stream, partition):
    shape = (3, 5, 203)
    x, dy = random(0, *shape, dtype=dtype), random(1, *shape, dtype=dtype)
    residual, dh = (random(seed, *shape, dtype=stream or dtype) for seed in (2, 3))
    names = ("weight", "bias")[: 1 + is_layer] + ("next_weight", "next_bias")[: (1 + is_layer) * has_next]
    parameters = {name: random(4 + index, 203, dtype=weight_dtype) for index, name in enumerate(names)}

    def function(x, residual, parameters):
        weight, bias, *of_next = map(parameters.get, ("weight", "bias", "next_weight", "next_bias"))
        if not has_next:
            args = (x, residual, weight, bias, 1e-5) if is_layer else (x, residual, weight, 1e-5)
            return (rj.layer_norm_add if is_layer else rj.rms_norm_add)(*args, partition=partition)
        if is_layer:
            return rj.Norm.layer(1e-5).residual_after(residual).next_norm(*of_next).apply(x, weight, bias, partition=partition)
        return rj.rms_norm_add_rms_norm(x, residual, weight, of_next[0], 1e-5, partition=partition)

    @jax.jit
    def run(gradients, *args):
        results, vjp = jax.vjp(function, *args)
        return results, vjp(gradients)

    results, (dx, dresidual, dparameters) = run((dy, dh) if has_next else dh, x, residual, parameters)
    got = dict(zip("yh", results)) if has_next else {"h": results}
    got |= {"dx": dx, "dresidual": dresidual} | {f"d{name}": array for name, array in dparameters.items()}
    inputs = dict(x=x, residual=residual, dresidual_out=dh) | parameters | ({"dy": dy} if has_next else {})
    assert got["h"].dtype == residual.dtype == dresidual.dtype and dx.dtype == dtype and (not has_next or got["y"].dtype == dtype)
    judge_after("layer_norm" if is_layer else "rms_norm", 1e-5, inputs, got)


def test_norms_as_values_are_the_functions():
    """No option has its default, so that a lost one is noticed."""
    x, r, w, b = random(0, 4, 64, dtype=jnp.bfloat16), random(1, 4, 64), random(2, 64), random(3, 64)
    options = dict(weight_offset=0.25, cast_before_weight=True)
    rms, layer = rj.Norm.rms(0.3, **options), rj.Norm.layer(0.3)
    for found, expected in (
        (rms.apply(x, w), rj.rms_norm(x, w, 0.3, **options)),
        (rms.residual(r).apply(x, w), rj.add_rms_norm(x, r, w, 0.3, **options)),
        (rms.residual_after(r).apply(x, w), rj.rms_norm_add(x, r, w, 0.3, **options)),
        (rms.residual_after(r).next_norm(b).apply(x, w), rj.rms_norm_add_rms_norm(x, r, w, b, 0.3, **options)),
        (layer.apply(x, w, b), rj.layer_norm(x, w, b, 0.3)),
        (layer.residual(r).apply(x, w, b), rj.add_layer_norm(x, r, w, b, 0.3)),
        (layer.residual_after(r).apply(x, w, b), rj.layer_norm_add(x, r, w, b, 0.3)),
    ):
        found, expected = (each if isinstance(each, tuple) else (each,) for each in (found, expected))
        assert all(np.array_equal(wide(got), wide(right)) for got, right in zip(found, expected, strict=True))
    for call, text in (
        (lambda: rms.next_norm(w).apply(x), "next_norm: expected a residual after the norm, got none"),
        (lambda: rms.residual(None), "residual: expected an array, got None"),
        (lambda: rms.apply(None), "x: expected an array, got None"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_options():
    x, w = random(0, 4, 128, dtype=jnp.bfloat16), random(1, 128, dtype=jnp.bfloat16)
    judge("rms_norm", 1e-6, {"x": x, "weight": w}, {"y": rj.rms_norm(x, w, 1e-6, weight_offset=1.0)}, 1.0)
    judge("rms_norm", 1e-6, {"x": x}, {"y": rj.rms_norm(x, eps=1e-6)})
    judge("layer_norm", 1e-6, {"x": x}, {"y": rj.layer_norm(x, eps=1e-6)})
    # Llama's order: jax.numpy with the same roundings, where a few values round to the other side
    # of a tie.
    got, expected = (wide(f) for f in (
        rj.rms_norm(x, w, 1e-6, cast_before_weight=True), reference.forward(Form(False, 1e-6, 0.0, True), x, None, None, w, None)[0]
    ))
    assert (got != expected).mean() < 0.01 and not np.array_equal(got, wide(rj.rms_norm(x, w, 1e-6)))


@pytest.mark.parametrize("adds", [False, True])
def test_every_option_reaches_the_norm(adds):
    """Each option changes the result and matches jax.numpy, except a few values on the other side
    of a tie. None is on by default."""
    x, r, w = random(0, 16, 128, dtype=jnp.bfloat16), random(1, 16, 128, dtype=jnp.bfloat16), random(2, 128, dtype=jnp.bfloat16)
    norm = (lambda **options: rj.add_rms_norm(x, r, w, **options)[0]) if adds else functools.partial(rj.rms_norm, x, w)
    found = []
    for options in ({}, {"eps": 0.3}, {"weight_offset": 1.5}, {"cast_before_weight": True}):
        of = {"is_layer": False, "eps": 2.0**-23} | options
        found.append(wide(norm(**options)))
        assert (found[-1] != wide(reference.forward(Form(**of), x, r if adds else None, None, w, None)[0])).mean() < 0.02, options
    assert len({values.tobytes() for values in found}) == 4
    assert np.array_equal(found[0], wide(norm(weight_offset=0.0, cast_before_weight=False)))


@pytest.mark.parametrize("shape", [(1, 24), (5, 1), (1,), (3, 1, 24), (0, 24), (2, 0), (0,)])
def test_the_kernel_takes_every_shape_with_elements(shape):
    x, w = random(0, *shape), random(1, shape[-1])
    text = jax.jit(ours).lower(x, w).compile().as_text()
    assert is_custom(text) == (0 not in shape) and ours(x, w).shape == shape
    close(jax.grad(lambda w: ours(x, w).sum())(w), jax.grad(lambda w: theirs(x, w).sum())(w))


def test_one_row_of_one_dimension():
    x, w, dy = (random(seed, 40) for seed in range(3))
    y, vjp = jax.vjp(ours, x, w)
    dx, dweight = vjp(dy)
    judge("rms_norm", 1e-6, {"x": x, "weight": w, "dy": dy}, {"y": y, "dx": dx, "dweight": dweight})
    close(jax.vmap(ours, (None, 0))(x, jnp.stack([w, 2 * w])), jnp.stack([y, 2 * y]))


def test_the_kernel_runs_and_not_jax_numpy(xw):
    text = jax.jit(jax.grad(loss(ours), (0, 1))).lower(*xw).compile().as_text()
    assert text.count('custom_call_target="rmsnorm_forward"') == 1
    assert text.count('custom_call_target="rmsnorm_backward"') == 1


TRANSFORMS = {
    "vmap of x": lambda f: lambda x, w: jax.vmap(f, (0, None))(x, w),
    "vmap of the last dimension but one": lambda f: lambda x, w: jax.vmap(f, (1, None), 1)(x, w),
    "vmap of weights": lambda f: lambda x, w: jax.vmap(f, (None, 0))(x[0], jnp.arange(1.0, 4)[:, None] * w),
    "vmap of both": lambda f: lambda x, w: jax.vmap(f)(x, jnp.arange(1.0, 9)[:, None] * w),
    "vmap of vmap": lambda f: lambda x, w: jax.vmap(jax.vmap(f, (0, 0)), (0, None))(x, jnp.arange(1.0, 17)[:, None] * w),
    "gradients of each example": lambda f: lambda x, w: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(x, w),
    "gradients of each of both": lambda f: lambda x, w: jax.vmap(jax.grad(loss(f), 1))(x, jnp.arange(1.0, 9)[:, None] * w),
    "gradient of vmap": lambda f: jax.grad(loss(jax.vmap(f, (0, None))), (0, 1)),
    "gradient of vmap of both": lambda f: jax.grad(lambda x, w: loss(jax.vmap(f))(x, jnp.arange(1.0, 9)[:, None] * w), (0, 1)),
    "remat": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1)),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda carry, x: (carry, f(x, w)), 0, x)[1],
    "gradient of scan": lambda f: jax.grad(lambda x, w: jax.lax.scan(lambda h, _: (f(h, w) + h, None), x, None, 3)[0].sum(), (0, 1)),
    "jit of all": lambda f: jax.jit(jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("partition", [True, False])
def test_transformations(xw, name, partition):
    function = functools.partial(rj.rms_norm, eps=1e-6, partition=partition)
    close(TRANSFORMS[name](function)(*xw), TRANSFORMS[name](theirs)(*xw))


def operators_in(jaxpr):
    """The operators of a traced program and of the programs within it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("rmsnorm_"):
            yield equation.params["operator"]
        else:
            for inner in equation.params.values():
                yield from operators_in(inner.jaxpr) if hasattr(inner, "jaxpr") else ()


@pytest.mark.parametrize("batched, is_more_rows", [
    ((0, 0, None, None), True), ((0, 0, 0, None), False), ((0, 0, None, 0), False), ((0, None, None, None), False), ((0, 0, 0, 0), False),
])
@pytest.mark.parametrize("form", ["add layer", "next layer", "gate rms", "gate before rms"])
def test_a_batch_of_rows_is_more_rows(batched, is_more_rows, form):
    """The norm, its tangent and its gradients are one call each, unless members have separate
    weights or biases."""
    args = [array if axis is None else jnp.stack([array] * 3) for axis, array in zip(batched, arrays(2, 4))]

    def run(*args):
        one = FORMS[form][0]
        return jax.vmap(lambda *args: (jax.jvp(one, args, args), jax.grad(weighed(one), (0, 1))(*args)), batched)(*args)

    found = list(operators_in(jax.make_jaxpr(run)(*args).jaxpr))
    assert {operator.role for operator in found} == {"norm", "tangent", "gradients"}
    assert all((operator.levels == ()) == is_more_rows for operator in found if is_more_rows or operator.role == "norm")


def test_a_batch_of_layer_norms_with_bias_and_residual(xw):
    x, w = xw
    weights, residuals = jnp.arange(1.0, 9)[:, None] * w, x[::-1]

    def run(function):
        return jax.vmap(jax.grad(lambda x, r, w, b: sum((t**2).sum() for t in function(x, r, w, b)), (0, 1, 2, 3)))

    expected = run(lambda x, r, w, b: reference.forward(Form(True, 1e-5), x, r, None, w, b)[:2])(x, residuals, weights, weights)
    close(run(rj.add_layer_norm)(x, residuals, weights, weights), expected)


def test_bits_do_not_depend_on_the_batch_or_the_way(xw):
    x, w = xw
    whole = ours(x, w)
    assert np.array_equal(whole[3:4, 5:6], ours(x[3:4, 5:6], w))
    assert np.array_equal(whole, jax.vmap(ours, (0, None))(x, w))
    assert np.array_equal(whole, jax.jit(functools.partial(rj.rms_norm, eps=1e-6, partition=False))(x, w))


@pytest.mark.parametrize("call, text", [
    (lambda x, w: rj.rms_norm(x, w[:-1]), r"weight: expected the shape \(256,\), got \(255,\)"),
    (lambda x, w: rj.add_rms_norm(x, x[:1], w), "residual: expected the shape"),
    (lambda x, w: rj.layer_norm(x, w, w[None]), "bias: expected the shape"),
    (lambda x, w: rj.rms_norm_add(x, x[0], w), "residual: expected the shape"),
    (lambda x, w: rj.rms_norm_add_rms_norm(x, x, w, w[1:]), r"next_weight: expected the shape \(256,\), got \(255,\)"),
    (lambda x, w: rj.rms_norm(x[0, 0, 0], w), "at least one dimension"),
    (lambda x, w: rj.rms_norm(x, w[None]), r"weight: expected the shape \(256,\), got \(1, 256\)"),
    (lambda x, w: rj.rms_norm(x, w, -1.0), "eps: expected a number of at least 0, got -1.0"),
    (lambda x, w: rj.layer_norm(x, w, eps=float("nan")), "eps: expected a finite number, got nan"),
    (lambda x, w: rj.rms_norm(x, w, weight_offset=float("inf")), "weight_offset: expected a finite number, got inf"),
])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_errors_say_what_was_expected(xw, call, text, is_compiled):
    with pytest.raises(ValueError, match=text):
        (jax.jit(call) if is_compiled else call)(*xw)


MIXES = [(x, r, w, b) for x in ("float32", "bfloat16", "float16") for r in ("float32", x) for w, b in (
    ("float32", "float32"), (x, x), ("bfloat16", "float32"), ("float16", "bfloat16"))]


@pytest.mark.parametrize("mix", MIXES + [("float64", "float32", "float32", "bfloat16"), ("float32", "float64", "float64", "float32")])
def test_strict_promotion(mix):
    """Nothing is promoted implicitly, and the result does not change. Kernels get weights of any
    float dtype."""
    with jax.enable_x64("float64" in mix):
        args = [array.astype(dtype) for array, dtype in zip(arrays(4, 24), mix)]

        def run(*args):
            first, second = jax.vjp(rj.add_layer_norm, *args)
            return first, second(first), jax.jvp(rj.add_layer_norm, args, args)

        expected = jax.jit(run)(*args)
        with jax.numpy_dtype_promotion("strict"):
            got = jax.jit(run)(*args)
            text = jax.jit(run).lower(*args).compile().as_text()
            assert is_custom(text) == ("float64" not in mix)
            rj.rms_norm(args[0], args[2]), jax.jit(jax.hessian(lambda w: rj.rms_norm(args[0], w, 1e-3).astype(jnp.float32).sum()))(args[2])
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
        assert [array.dtype for array in (*got[0], *got[1])] == [mix[0], mix[1], *mix]
        plainly = [array.astype(jnp.float32) for array in args]
        unit = max(float(jnp.finfo(dtype).eps) for dtype in mix)
        close(got, jax.jit(run)(*plainly), 4 * max(unit, 2.0**-20))


def compilations(call, count=5):
    """The number of programs that repeated calls compile after the first two calls."""
    events = []

    def listen(event, seconds, **more):
        events.append(event)

    call(), call()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(count):
            jax.block_until_ready(call())
    finally:
        jax.monitoring.clear_event_listeners() if not hasattr(jax.monitoring, "unregister_event_duration_listener") else (
            jax.monitoring.unregister_event_duration_listener(listen))
    return sum("backend_compile" in event for event in events)


def test_eager_calls_compile_once(xw):
    """Calls, gradients, tangents and batches outside of jit."""
    x, w = xw
    mean = lambda f: lambda *args: f(*args).sum()  # noqa: E731
    layer = lambda x, w: rj.layer_norm(x, w, w)  # noqa: E731
    added = lambda x, w: rj.add_rms_norm(x, x, w)[0]  # noqa: E731
    for norm in (ours, layer, added, functools.partial(rj.rms_norm, partition=False)):
        assert compilations(lambda norm=norm: norm(x, w)) == 0
        assert compilations(lambda norm=norm: jax.grad(mean(norm), (0, 1))(x, w)) == 0
        assert compilations(lambda norm=norm: jax.jvp(norm, (x, w), (x, w))) == 0
        assert compilations(lambda norm=norm: jax.vmap(norm, (0, None))(x, w)) == 0
        assert compilations(lambda norm=norm: jax.vmap(jax.grad(mean(norm), (0, 1)), (0, None))(x, w)) == 0
    # The listener is called for compilations.
    shapes = iter(range(1, 1000))
    assert compilations(lambda: ours(x[0, 0], w * next(shapes)) + jnp.ones(next(shapes)).sum()) > 0


def test_eager_calls_keep_nothing(xw):
    """Results and programs do not accumulate with new arrays and a new eps in each call: the caches
    are bounded."""
    x, w = xw
    client = jax.devices()[0].client
    for index in range(150):
        rj.rms_norm(x[0, :1, :8], w[:8], 1e-6 * (index + 1))
    ours(x, w + 1)
    before = len(jax.live_arrays()), len(client.live_executables())
    for index in range(300):
        ours(x, w + index)
    for index in range(150, 300):
        rj.rms_norm(x[0, :1, :8], w[:8], 1e-6 * (index + 1))
    assert len(jax.live_arrays()) <= before[0] + 2
    assert len(client.live_executables()) <= before[1] + 10


@pytest.mark.parametrize("kind", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
@pytest.mark.parametrize("place", ["x", "residual", "weight", "bias"])
@pytest.mark.parametrize("convert", [jnp.asarray, np.asarray, lambda array: array.tolist()])
def test_numbers_that_are_not_real_are_refused(kind, place, convert):
    """Integer rows would give integer results, and the square of complex numbers is another one."""
    given = dict(x=jnp.ones((2, 3)), residual=jnp.ones((2, 3)), weight=jnp.ones(3), bias=jnp.ones(3))
    given[place] = convert(given[place].astype(kind))
    calls = [rj.add_layer_norm] if place == "residual" else [rj.add_layer_norm, functools.partial(take, rj.layer_norm, "xwb")]
    calls += [functools.partial(take, rj.rms_norm, "xw")] if place in ("x", "weight") else []
    calls += [functools.partial(take, rj.add_rms_norm, "xrw")] if place != "bias" else []
    for call in calls:
        with pytest.raises(TypeError, match=f"^{place}: expected an array of real floating-point numbers, got (int|uint|bool|complex)"):
            call(**given)


def take(function, which, **given):
    return function(**{name: array for name, array in given.items() if name[0] in which})


def test_arguments_of_another_type_are_refused_by_name(xw):
    x, w = xw
    for call, text in (
        (lambda: rj.rms_norm(None), "x: expected an array, got None"),
        (lambda: rj.layer_norm(None), "x: expected an array, got None"),
        (lambda: rj.add_rms_norm(x, None, w), "residual: expected an array, got None"),
        (lambda: rj.add_layer_norm(x, None, w), "residual: expected an array, got None"),
        (lambda: rj.rms_norm("x"), "x: expected an array, got str"),
        (lambda: rj.layer_norm(x, w, object()), "bias: expected an array, got object"),
        (lambda: rj.rms_norm(x, w, "1e-6"), "eps: expected a Python number, got str"),
        (lambda: rj.rms_norm(x, w, 1j), "eps: expected a Python number, got complex"),
        (lambda: rj.rms_norm(x, w, weight_offset=None), "weight_offset: expected a Python number, got NoneType"),
        (lambda: jax.jit(rj.rms_norm)(x, w, 1e-6), "eps: expected a Python number, got a traced array; .*static_argnames"),
        (lambda: jax.jit(lambda x, o: rj.rms_norm(x, weight_offset=o))(x, 1.0), "weight_offset: .* traced"),
        (lambda: jax.jit(lambda x, c: rj.rms_norm(x, cast_before_weight=c))(x, True), "cast_before_weight: .* traced"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_the_default_eps_is_that_of_the_package():
    x = random(0, 4, 64) * 1e-4
    for function, eps in ((rj.rms_norm, 2.0**-23), (rj.layer_norm, 1e-5)):
        assert np.array_equal(function(x), function(x, eps=eps))
    for function, eps in ((rj.add_rms_norm, 2.0**-23), (rj.add_layer_norm, 1e-5), (rj.rms_norm_add_rms_norm, 2.0**-23)):
        assert np.array_equal(function(x, x)[0], function(x, x, eps=eps)[0])
    for function, eps in ((rj.rms_norm_add, 2.0**-23), (rj.layer_norm_add, 1e-5)):
        assert np.array_equal(function(x, x), function(x, x, eps=eps)) and not np.array_equal(function(x, x), function(x, x, eps=1e-6))


def test_dtypes_without_kernels_are_computed_all_the_same(xw):
    x, w = (array.astype(jnp.float16) for array in xw)
    mixed = jax.jit(ours)(x, w.astype(jnp.bfloat16))
    close(mixed, theirs(x.astype(jnp.float32), w.astype(jnp.bfloat16).astype(jnp.float32)), 2.0**-11)
    assert mixed.dtype == jnp.float16
    assert ours(x[:0], w).shape == (0, 16, 256)
    jax.config.update("jax_enable_x64", True)
    try:
        x64, w64 = (jnp.asarray(wide(array)) for array in xw)
        assert ours(x64, w64).dtype == jnp.float64
        close(ours(x64, w64), theirs(x64, w64), 1e-12)
        # The kernels' calls do not depend on the setting.
        close(ours(*xw), theirs(*xw))
    finally:
        jax.config.update("jax_enable_x64", False)


def joined(both):
    """One array that depends on y and h."""
    return both[0] + 3 * both[1]


# Every norm with every set of arrays: (this package, jax.numpy), functions of x, residual, weight,
# bias with one result.
FORMS = {
    "rms": (lambda x, r, w, b: rj.rms_norm(x, eps=1e-3), lambda x, r, w, b: plain(False, 1e-3, x)[0]),
    "rms weight": (lambda x, r, w, b: rj.rms_norm(x, w, 1e-3), lambda x, r, w, b: plain(False, 1e-3, x, None, w)[0]),
    "rms offset": (
        lambda x, r, w, b: rj.rms_norm(x, w, 1e-3, weight_offset=1.5), lambda x, r, w, b: plain(False, 1e-3, x, None, w, None, 1.5)[0]
    ),
    "layer": (lambda x, r, w, b: rj.layer_norm(x, eps=1e-3), lambda x, r, w, b: plain(True, 1e-3, x)[0]),
    "layer weight": (lambda x, r, w, b: rj.layer_norm(x, w, eps=1e-3), lambda x, r, w, b: plain(True, 1e-3, x, None, w)[0]),
    "layer bias": (lambda x, r, w, b: rj.layer_norm(x, None, b, 1e-3), lambda x, r, w, b: plain(True, 1e-3, x, None, None, b)[0]),
    "layer both": (lambda x, r, w, b: rj.layer_norm(x, w, b, 1e-3), lambda x, r, w, b: plain(True, 1e-3, x, None, w, b)[0]),
    "add rms": (
        lambda x, r, w, b: joined(rj.add_rms_norm(x, r, eps=1e-3)),
        lambda x, r, w, b: joined(plain(False, 1e-3, x, r)),
    ),
    "add rms weight": (
        lambda x, r, w, b: joined(rj.add_rms_norm(x, r, w, 1e-3, weight_offset=1.5)),
        lambda x, r, w, b: joined(plain(False, 1e-3, x, r, w, None, 1.5)),
    ),
    "add layer": (
        lambda x, r, w, b: joined(rj.add_layer_norm(x, r, w, b, 1e-3)),
        lambda x, r, w, b: joined(plain(True, 1e-3, x, r, w, b)),
    ),
    "after rms": (
        lambda x, r, w, b: rj.rms_norm_add(x, r, w, 1e-3, weight_offset=1.5),
        lambda x, r, w, b: around(False, 1e-3, x, r, w, None, None, None, 1.5)[1],
    ),
    "after layer": (
        lambda x, r, w, b: rj.layer_norm_add(x, r, w, b, 1e-3), lambda x, r, w, b: around(True, 1e-3, x, r, w, b, None, None)[1],
    ),
    "next rms": (
        lambda x, r, w, b: joined(rj.rms_norm_add_rms_norm(x, r, w, b, 1e-3, weight_offset=1.5)),
        lambda x, r, w, b: joined(around(False, 1e-3, x, r, w, None, b, None, 1.5)),
    ),
    "next layer": (
        lambda x, r, w, b: joined(rj.Norm.layer(1e-3).residual_after(r).next_norm(b, w).apply(x, w, b)),
        lambda x, r, w, b: joined(around(True, 1e-3, x, r, w, b, b, w)),
    ),
    "next rms, y": (
        lambda x, r, w, b: rj.rms_norm_add_rms_norm(x, r, None, b, 1e-3)[0],
        lambda x, r, w, b: around(False, 1e-3, x, r, None, None, b, None)[0],
    ),
    "next rms, h": (
        lambda x, r, w, b: rj.rms_norm_add_rms_norm(x, r, w, None, 1e-3)[1],
        lambda x, r, w, b: around(False, 1e-3, x, r, w, None, None, None)[1],
    ),
    "gate rms": (
        lambda x, z, w, b: rj.rms_norm_gated(x, z, w, 1e-3, bias=b, weight_offset=1.5),
        lambda x, z, w, b: gated(False, x, z, w, b, offset=1.5)[0],
    ),
    "gate layer": (
        lambda x, z, w, b: rj.Norm.layer(1e-3).gate_after(z, "sigmoid").apply(x, w, b),
        lambda x, z, w, b: gated(True, x, z, w, b, "sigmoid")[0],
    ),
    "gate alone": (lambda x, z, w, b: rj.rms_norm_gated(x, z, eps=1e-3), lambda x, z, w, b: gated(False, x, z)[0]),
    "gate before rms": (
        lambda x, z, w, b: rj.rms_norm_gated(x, z, w, 1e-3, bias=b, norm_before_gate=False, groups=2, weight_offset=1.5),
        lambda x, z, w, b: gated(False, x, z, w, b, before=True, groups=2, offset=1.5)[0],
    ),
    "gate before layer": (
        lambda x, z, w, b: rj.Norm.layer(1e-3).gate_before(z, "sigmoid").apply(x, None, b),
        lambda x, z, w, b: gated(True, x, z, None, b, "sigmoid", True)[0],
    ),
    "groups": (lambda x, r, w, b: rj.rms_norm_gated(x, None, w, 1e-3, groups=2), lambda x, r, w, b: gated(False, x, None, w, groups=2)[0]),
    "add gate": (
        lambda x, z, w, b: joined(rj.Norm.layer(1e-3).residual(jnp.cos(z)).gate_after(z).apply(x, w, b)),
        lambda x, z, w, b: joined(gated(True, x, z, w, b, residual=jnp.cos(z))),
    ),
    "add gate groups": (
        lambda x, z, w, b: joined(rj.Norm.rms(1e-3).residual(z).gate_after(x, "sigmoid").groups(2).apply(x, w, b)),
        lambda x, z, w, b: joined(gated(False, x, x, w, b, "sigmoid", groups=2, residual=z)),
    ),
    "add layer, y": (lambda x, r, w, b: rj.add_layer_norm(x, r, w, b, 1e-3)[0], lambda x, r, w, b: plain(True, 1e-3, x, r, w, b)[0]),
    "add layer, h": (lambda x, r, w, b: rj.add_layer_norm(x, r, w, b, 1e-3)[1], lambda x, r, w, b: plain(True, 1e-3, x, r, w, b)[1]),
}
ALL = (0, 1, 2, 3)


def arrays(*shape, dtype=jnp.float32):
    return tuple(random(seed, *shape[-1:] if seed > 1 else shape, dtype=dtype) for seed in range(4))


def weighed(f):
    """A loss with non-zero derivatives of all orders."""

    def loss(*args):
        y = f(*args).astype(jnp.float32)
        return (jnp.sin(y) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()

    return loss


def along(args):
    """The directions of the derivatives."""
    return tuple(random(10 + index, *array.shape, dtype=array.dtype) for index, array in enumerate(args))


DERIVATIVES = {
    "jvp": lambda f: lambda *args: jax.jvp(f, args, along(args)),
    "jvp of jit": lambda f: lambda *args: jax.jvp(jax.jit(f), args, along(args)),
    "jit of jvp": lambda f: jax.jit(lambda *args: jax.jvp(f, args, along(args))),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*along(args)),
    "linear transpose": lambda f: lambda *args: jax.linear_transpose(jax.linearize(f, *args)[1], *args)(f(*args)),
    "jacfwd": lambda f: jax.jacfwd(f, ALL),
    "jacrev": lambda f: jax.jacrev(f, ALL),
    "gradient": lambda f: jax.grad(weighed(f), ALL),
    "hessian": lambda f: jax.hessian(weighed(f), ALL),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(weighed(f), ALL), ALL),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(weighed(f), ALL), ALL),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(weighed(f), ALL), ALL),
    "gradient penalty": lambda f: jax.jit(jax.grad(lambda *args: sum((g**2).sum() for g in jax.grad(weighed(f), ALL)(*args)), ALL)),
    "third": lambda f: lambda *args: jax.jvp(lambda *args: jax.jvp(jax.grad(weighed(f), ALL), args, along(args))[1], args, along(args)),
    "jvp of vmap": lambda f: lambda *args: jax.jvp(jax.vmap(f, (0, 0, None, None)), args, along(args)),
    "vmap of jvp": lambda f: lambda *args: jax.vmap(lambda *args: jax.jvp(f, args, args), (0, 0, None, None))(*args),
    "vmap of hessians": lambda f: jax.vmap(jax.hessian(weighed(f), ALL), (0, 0, None, None)),
    "jvp of gradient of vmap": lambda f: lambda *args: jax.jvp(jax.grad(weighed(jax.vmap(f, (0, 0, None, None))), ALL), args, along(args)),
    "scan of jvp": lambda f: lambda x, r, w, b: jax.lax.scan(lambda c, x: (c, jax.jvp(f, (*x, w, b), along((*x, w, b)))), 0, (x, r))[1],
    "jvp of gradient of scan": lambda f: lambda *args: jax.jvp(
        jax.grad(lambda x, r, w, b: jax.lax.scan(lambda c, x: (c + weighed(f)(*x, w, b), None), 0.0, (x, r))[0], ALL), args, along(args)
    ),
    "jvp of gradient of remat": lambda f: lambda *args: jax.jvp(jax.grad(jax.checkpoint(weighed(f)), ALL), args, along(args)),
}


def agree(run, ours, theirs, args, tolerance=1e-4):
    """Asserts that a transformation gives the same for both. Compiled, which takes a tenth of the
    time, without optimizations."""
    close(*(jax.jit(run(f), compiler_options={"xla_backend_optimization_level": 0})(*args) for f in (ours, theirs)), tolerance)


@pytest.mark.parametrize("form", ["rms offset", "layer bias", "add layer", "next layer", "gate before rms", "add gate"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_every_kind(name, form):
    agree(DERIVATIVES[name], *FORMS[form], arrays(2, 4))


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_every_norm(form):
    def run(f):
        gradient = jax.grad(weighed(f), ALL)
        return lambda *args: (gradient(*args), jax.jvp(f, args, along(args)), jax.jvp(gradient, args, along(args)))

    agree(run, *FORMS[form], arrays(2, 4))


def test_derivatives_without_a_compiled_program():
    """Derivatives outside of jit, which run operator by operator."""
    args = arrays(2, 4)
    for name in ("jvp", "linearize", "gradient"):
        close(*(DERIVATIVES[name](f)(*args) for f in FORMS["add layer"]), 1e-4)
        with jax.disable_jit():
            close(*(DERIVATIVES[name](f)(*args) for f in FORMS["layer both"]), 1e-4)


@pytest.mark.parametrize("name", ["jvp", "vmap of hessians", "reverse over reverse"])
def test_derivatives_without_partition(name):
    agree(DERIVATIVES[name], lambda x, r, w, b: rj.layer_norm(x, w, b, 1e-3, partition=False), FORMS["layer both"][1], arrays(2, 4))


@pytest.mark.parametrize("batched", [(0, None, None, None), (None, None, 0, None), (None, None, None, 0), (None, 0, None, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("of", ["jvp", "gradient", "jvp of gradient"])
@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("form", ["add layer", "next layer", "gate rms", "gate before rms"])
def test_derivatives_of_batches(batched, of, is_inner, form):
    """Members have some separate arrays; the batch is inside or outside of the derivative."""
    args = [array if axis is None else jnp.stack([array, array[::-1] - 1, 2 * array]) for axis, array in zip(batched, arrays(2, 4))]
    run = {
        "jvp": lambda f: lambda *args: jax.jvp(f, args, along(args)), "gradient": lambda f: jax.grad(weighed(f), ALL),
        "jvp of gradient": lambda f: lambda *args: jax.jvp(jax.grad(weighed(f), ALL), args, along(args)),
    }[of]
    agree(lambda f: run(jax.vmap(f, batched)) if is_inner else jax.vmap(run(f), batched), *FORMS[form], args)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
@pytest.mark.parametrize("form", ["layer both", "add layer", "after layer", "next rms", "gate layer", "gate before rms", "add gate groups"])
def test_derivatives_in_some_arrays(wanted, form):
    def run(f):
        def both(*args):
            def of(*some):
                return f(*(dict(enumerate(args)) | dict(zip(wanted, some))).values())

            some = tuple(args[index] for index in wanted)
            return jax.jvp(of, some, along(some)), jax.grad(weighed(f), wanted)(*args)

        return both

    agree(run, *FORMS[form], arrays(2, 4))


@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("stream", [None, jnp.float32])
@pytest.mark.parametrize("is_after", [False, True])
def test_tangents_are_within_their_bounds(dtype, weight_dtype, stream, is_after):
    x, dx = (random(seed, 5, 203, dtype=dtype) for seed in (0, 1))
    r, dr = (random(seed, 5, 203, dtype=stream or dtype) for seed in (2, 3))
    (w, b), (dw, db) = ((random(seed, 203, dtype=weight_dtype), random(seed + 1, 203, dtype=weight_dtype)) for seed in (4, 6))
    norm = (lambda x, r, w, b: rj.Norm.layer(1e-5).residual_after(r).next_norm(b, w).apply(x, w, b)) if is_after else (
        lambda *args: rj.add_layer_norm(*args, 1e-5))
    (y, h), (dy, dh) = jax.jvp(norm, (x, r, w, b), (dx, dr, dw, db))
    assert [array.dtype for array in (y, dy, h, dh)] == [dtype, dtype, stream or dtype, stream or dtype]
    unit, stream_unit = (float(jnp.finfo(kind).eps) / 2 for kind in (dtype, stream or dtype))
    x, dx, r, dr, h, dh, y, dy, w, b, dw, db = map(wide, (x, dx, r, dr, h, dh, y, dy, w, b, dw, db))

    def check(got, rows, change, w, dw, db, plus, kernel_unit, unit):
        """In float64, from the rounded rows and their tangent. The kernel rounds its result, and the sum is rounded once; the rest is in
        float32."""
        centred = rows - rows.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        x_hat = centred * rstd
        through = rstd * (change - change.mean(-1, keepdims=True) - x_hat * (change * x_hat).mean(-1, keepdims=True))
        exact, terms = through * w + x_hat * dw + db + plus, abs(through * w) + abs(x_hat * dw) + abs(db) + abs(plus)
        bound = unit * abs(exact) + kernel_unit * abs(through * w) + 64 * 2.0**-24 * (terms + abs(w) * rstd * abs(change).max(-1, keepdims=True))
        assert (abs(got - exact) <= bound).all()

    if is_after:
        check(dh, x, dx, w, dw, db, dr, unit, stream_unit)
        check(dy, h, dh, b, db, dw, 0.0, stream_unit, unit)
    else:
        assert np.array_equal(dh, wide(jnp.asarray(dx + dr, jnp.float32).astype(stream or dtype)))
        check(dy, h, dh, w, dw, db, 0.0, stream_unit, unit)


def test_forward_mode_runs_both_kernels_and_reverse_mode_one_each_way(xw):
    def count(f):
        text = jax.jit(f).lower(*xw).compile().as_text()
        return [text.count(f'custom_call_target="rmsnorm_{name}"') for name in ("forward", "backward")]

    for norm in (ours, functools.partial(rj.rms_norm, partition=False), lambda x, w: rj.layer_norm(x, w, w)):
        assert count(jax.value_and_grad(loss(norm), (0, 1))) == [1, 1]
        assert count(jax.grad(loss(norm), 1)) == [1, 1]
        assert count(lambda x, w: jax.jvp(norm, (x, w), (x, w))) == [1, 1]
        assert count(lambda x, w: jax.jvp(lambda w: norm(x, w), (w,), (w,))) == [1, 0]
    assert count(jax.value_and_grad(loss(lambda x, w: rj.rms_norm_add(x, 2 * x, w)), (0, 1))) == [1, 1]
    assert count(jax.value_and_grad(loss(lambda x, w: sum(rj.rms_norm_add_rms_norm(x, 2 * x, w, w))), (0, 1))) == [1, 2]
    for options in ({}, dict(norm_before_gate=False, groups=4)):
        norm = functools.partial(rj.rms_norm_gated, **options)
        assert count(jax.value_and_grad(loss(lambda x, w: norm(x, jnp.sin(x), w, bias=w)), (0, 1))) == [1, 1]  # noqa: B023
        assert count(lambda x, w: jax.jvp(lambda x: norm(x, jnp.sin(x), w), (x,), (x,))) == [1, 1]  # noqa: B023


def test_reverse_mode_keeps_x_and_its_statistics_only():
    x, r, w, b = arrays(64, 32)
    for count, function, args in (
        (1, rj.rms_norm, (x, w)), (1, rj.layer_norm, (x, w, b)), (1, rj.add_layer_norm, (x, r, w, b)), (1, rj.layer_norm_add, (x, r, w, b)),
        (2, rj.rms_norm_add_rms_norm, (x, r, w, b)), (2, rj.rms_norm_gated, (x, r, w)),
    ):
        kept = jax.tree.leaves(jax.vjp(function, *args)[1])
        assert [array.shape for array in kept if array.ndim == 2] == [(64, 32)] * count
        assert sum(array.size for array in kept) <= count * (64 * 32 + 2 * 64 + 2 * 32)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm", "add_rms_norm", "layer_norm_add", "rms_norm_add_rms_norm", "gate", "gate before"])
def test_automatic_sharding_moves_no_activations(xw, norm, four_devices):
    x, w = xw
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"))
    xs, ws = jax.device_put(x, NamedSharding(mesh, P("a", "b"))), jax.device_put(w, NamedSharding(mesh, P()))
    call = {
        "rms_norm": lambda x, w: rj.rms_norm(x, w), "layer_norm": lambda x, w: rj.layer_norm(x, w, w),
        "add_rms_norm": lambda x, w: sum(rj.add_rms_norm(x, 2 * x, w)), "layer_norm_add": lambda x, w: rj.layer_norm_add(x, 2 * x, w, w),
        "rms_norm_add_rms_norm": lambda x, w: sum(rj.rms_norm_add_rms_norm(x, 2 * x, w, w)),
        "gate": lambda x, w: rj.rms_norm_gated(x, jnp.sin(x), w, bias=w),
        "gate before": lambda x, w: rj.rms_norm_gated(x, jnp.sin(x), w, norm_before_gate=False, groups=4),
    }[norm]
    compiled = jax.jit(jax.grad(loss(call), (0, 1))).lower(xs, ws).compile()
    text = compiled.as_text()
    assert is_custom(text) and not re.search(r"all-gather|all-to-all|collective-permute", text)
    # The gradients of the weight, and of layer norm's bias or of the next weight.
    assert len(re.findall(r" all-reduce[\w.-]*\(", text)) <= (1 if norm in ("rms_norm", "add_rms_norm", "gate before") else 2)
    dx, dw = compiled(xs, ws)
    assert dx.sharding.spec == P("a", "b") and dw.sharding.is_fully_replicated
    close((dx, dw), jax.grad(loss(call), (0, 1))(x, w))


SPLITS = [P("a"), P("a", "b"), P(("a", "b")), P(None, "b"), P(None, None, "a"), P("a", None, "b"), P()]


@pytest.fixture
def explicit(four_devices):
    if not hasattr(jax.sharding, "AxisType") or not hasattr(jax, "set_mesh"):
        pytest.skip(f"jax.set_mesh: JAX {jax.__version__} has no explicit sharding")
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", ["rms", "rms offset", "layer both", "add rms weight", "add layer", "next layer", "gate layer",
                                  "gate before rms", "add gate groups"])
def test_explicit_sharding(form, split, explicit):
    ours, theirs = FORMS[form]
    args = arrays(8, 4, 16)
    sharded = [jax.device_put(array, NamedSharding(explicit, split if array.ndim == 3 else P())) for array in args]

    def run(f):
        def of(*args):
            return f(*args), jax.grad(lambda *args: (f(*args) ** 2).sum(), ALL)(*args), jax.jvp(f, args, args)

        return of

    got = jax.jit(run(ours))(*sharded)
    close(got, jax.jit(run(theirs))(*args), 1e-4)
    text = jax.jit(run(ours)).lower(*sharded).compile().as_text()
    assert is_custom(text)
    if len(split) < 3:
        assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    whole = P(*split, *[None] * (3 - len(split)))
    assert [array.sharding.spec for array in (got[0], *got[1], *got[2])] == [whole, whole, whole, P(None), P(None), whole, whole]
    if split in (P("a"), P(None, None, "a")):
        close((ours(*sharded), jax.grad(lambda *args: (ours(*args) ** 2).sum(), ALL)(*sharded)), got[:2])


def test_explicit_sharding_of_each_array(explicit):
    """Split weights, a residual with another split than x, no partition, vmap, and second
    derivatives."""
    args = arrays(8, 4, 16)
    ours, theirs = FORMS["add layer"]
    splits = P("a", "b"), P("a"), P("b"), P("a")
    sharded = [jax.device_put(array, NamedSharding(explicit, split)) for array, split in zip(args, splits)]
    gradients = jax.jit(jax.grad(weighed_by_squares(ours), ALL))(*sharded)
    assert [array.sharding.spec for array in gradients] == [P("a", "b", None), P("a", None, None), P("b"), P("a")]
    close(gradients, jax.jit(jax.grad(weighed_by_squares(theirs), ALL))(*args), 1e-4)

    rows = [jax.device_put(array, NamedSharding(explicit, P("a") if array.ndim == 3 else P())) for array in args]
    whole = functools.partial(rj.layer_norm, eps=1e-3, partition=False)
    for ours, theirs in (
        (lambda x, r, w, b: whole(x, w, b), FORMS["layer both"][1]),
        (*(jax.vmap(f, (1, 1, None, None), 1) for f in FORMS["layer both"]),),
    ):
        close(jax.jit(jax.grad(weighed_by_squares(ours), ALL))(*rows), jax.jit(jax.grad(weighed_by_squares(theirs), ALL))(*args), 1e-4)
    ours, theirs = FORMS["layer both"]
    penalty = lambda f: jax.jit(lambda *args: jax.jvp(jax.grad(weighed_by_squares(f), ALL), args, args))  # noqa: E731
    close(penalty(ours)(*rows), penalty(theirs)(*args), 1e-4)


def weighed_by_squares(f):
    return lambda *args: (f(*args) ** 3).sum()


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_program_without_sharded_arguments_under_a_mesh(xw, kind, four_devices):
    if not hasattr(jax.sharding, "AxisType") or not hasattr(jax, "set_mesh"):
        pytest.skip(f"jax.set_mesh: JAX {jax.__version__} has none")
    x, w = (np.asarray(array) for array in xw)
    with jax.set_mesh(Mesh(four_devices, ("a",), axis_types=(getattr(jax.sharding.AxisType, kind),))):
        close(jax.jit(jax.value_and_grad(loss(ours), (0, 1)))(x, w), jax.value_and_grad(loss(theirs), (0, 1))(*xw))


def test_sums_over_devices_are_rounded_once(four_devices):
    """If each device rounded its partial sum, a bfloat16 dweight would have an error of some units
    in the last place."""
    mesh = Mesh(four_devices, ("a",))
    x, dy = random(0, 64, 96, dtype=jnp.bfloat16), random(1, 64, 96, dtype=jnp.bfloat16)
    w = random(2, 96, dtype=jnp.bfloat16)
    rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    run = jax.jit(lambda x, w, dy: jax.vjp(ours, x, w)[1](dy))
    dx, dweight = run(jax.device_put(x, rows), jax.device_put(w, whole), jax.device_put(dy, rows))
    judge("rms_norm", 1e-6, {"x": x, "weight": w, "dy": dy}, {"dx": dx, "dweight": dweight})


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(xw, check_vma, four_devices):
    x, w = xw
    if not hasattr(jax, "shard_map"):
        pytest.skip(f"jax.shard_map: JAX {jax.__version__} has none")
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"))
    f = jax.shard_map(ours, mesh=mesh, in_specs=(P("a", "b"), P()), out_specs=P("a", "b"), check_vma=check_vma)
    close(jax.jit(jax.grad(loss(f), (0, 1)))(x, w), jax.grad(loss(theirs), (0, 1))(x, w))


def test_calls_become_part_of_a_graph():
    """Runs norms with gradients in one program repeatedly: on CUDA XLA captures them in graphs and
    replays these."""
    x, w = random(0, 128, 1024, dtype=jnp.bfloat16), random(1, 1024, dtype=jnp.bfloat16)

    def loss(norm):
        def of(x, w):
            for _ in range(8):
                x = x + norm(x, w)
            return x.astype(jnp.float32).sum()

        return jax.grad(of, (0, 1))

    step = jax.jit(loss(ours))
    results = [step(x + index % 2, w) for index in range(6)]
    for index in range(2, 6):
        assert all(np.array_equal(wide(a), wide(b)) for a, b in zip(results[index], results[index % 2]))
    # Eight successive roundings to bfloat16, of 2^-9 each.
    close(results[0], loss(theirs)(x, w), 8 * 2.0**-9)


@pytest.mark.parametrize("form", ["rms offset", "add layer", "next layer", "gate before rms", "add gate"])
@pytest.mark.parametrize("size", ["3", "n", "2*n + 1"])
def test_export_without_special_arguments(form, size):
    """Exports values and gradients, for any batch size and for platforms with and without kernels.
    The program does not call the kernels."""
    export = pytest.importorskip("jax.export")
    args = arrays(3, 8)
    rows = export.symbolic_shape(f"{size}, 8")
    shapes = [jax.ShapeDtypeStruct(rows if array.ndim == 2 else (8,), array.dtype) for array in args]
    ours, theirs = FORMS[form]

    def run(f):
        return jax.jit(lambda *args: (f(*args), jax.grad(weighed(f), ALL)(*args), jax.jvp(f, args, args)))

    exported = export.export(run(ours), platforms=("cpu", "cuda", "tpu"))(*shapes)
    assert not is_custom(exported.mlir_module())
    close(exported.call(*args), run(theirs)(*args), 1e-4)


def test_export_of_sharded_rows(xw, four_devices):
    export = pytest.importorskip("jax.export")
    sharding = NamedSharding(Mesh(four_devices, ("a",)), P("a"))
    x, w = jax.device_put(xw[0], sharding), jax.device_put(xw[1], NamedSharding(sharding.mesh, P()))
    exported = export.export(jax.jit(jax.grad(loss(ours), (0, 1))))(x, w)
    close(exported.call(x, w), jax.grad(loss(theirs), (0, 1))(*xw))


def test_the_workspace_bound_asks_for_no_device():
    plain, cast = "dy,x,weight,rstd,dx,dweight", "dy,x,weight,rstd,dresidual,dweight"
    calls = [("rms_norm", plain, "bfloat16", "at_store", (None, False, 1)), ("l2_norm", plain, "bfloat16", "weight_first", (None, False, 1)),
             ("rms_norm", "dy,x,gate,weight,rstd,dx,dgate,dweight", "bfloat16", "at_store", ("silu", True, 8)),
             ("rms_norm", cast, "float32", "rstd_first", (None, False, 1))]
    lengths = [_native.xla_workspace_len(is_cuda, (norm, order), (8192, 4096), tensors, ("bfloat16", "bfloat16", dtype), pieces)
               for is_cuda in (False, True) for norm, tensors, dtype, order, pieces in calls]
    assert all(4096 <= length <= 8192 * 4096 // 8 for length in lengths)
    for norm, dtype, order, activation, text in (
        ("rms_norm", "float64", "at_store", None, "float64"), ("rms_norm", "float32", "at_store", "swish", "activation: expected one of silu, sigmoid"),
        ("norm", "float32", "at_store", None, "norm: expected one of rms_norm, layer_norm, l2_norm, l2_norm_clamped, got \"norm\""),
        ("rms_norm", "float32", "first", None, "cast_order: expected one of at_store, before_weight, rstd_first, weight_first, got \"first\""),
    ):
        with pytest.raises(ValueError, match=text):
            _native.xla_workspace_len(False, (norm, order), (1, 1), "dy", (dtype,) * 3, (activation, False, 1))


def test_structs_are_those_of_the_installed_header(tmp_path):
    """Compares with offsets that a C compiler computes from the header that jaxlib ships."""
    import shutil
    import subprocess

    import jaxlib

    include = pathlib.Path(jaxlib.__file__).parent / "include"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not (include / "xla/ffi/api/c_api.h").exists() or compiler is None:
        pytest.skip("a C compiler and jaxlib's header: not both are here")
    header = (include / "xla/ffi/api/c_api.h").read_text()
    # Names may change in a new version, offsets do not. Only the functions that are called are
    # compared.
    renamed = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}
    called = {"XLA_FFI_Error_Create", "XLA_FFI_Stream_Get", "XLA_FFI_DeviceOrdinal_Get"}
    lines, expected = [], []
    for struct, fields in _native.xla_layouts():
        if not (f"}} {struct};" in header or f"struct {struct} {{" in header):
            if struct == "XLA_FFI_DeviceOrdinal_Get_Args":
                continue
            struct = renamed[struct]
        for field, offset in fields:
            is_function = struct == "XLA_FFI_Api" and field.startswith("XLA_FFI_")
            # The last came with a later version than the first.
            is_missing = field == "XLA_FFI_DeviceOrdinal_Get" and f"{field})" not in header
            if not is_missing and (field in called or not is_function):
                lines.append(f'printf("%zu\\n", offsetof({struct}, {field}));')
                expected.append((struct, field, offset))
    assert called - {"XLA_FFI_DeviceOrdinal_Get"} <= {field for _, field, _ in expected}
    source = tmp_path / "offsets.c"
    source.write_text('#include <stdio.h>\n#include "xla/ffi/api/c_api.h"\nint main(void) {\n' + "\n".join(lines) + "\n}\n")
    subprocess.run([compiler, f"-I{include}", str(source), "-o", str(tmp_path / "offsets")], check=True)
    printed = subprocess.run([str(tmp_path / "offsets")], check=True, capture_output=True, text=True).stdout.split()
    assert [(*of, int(offset)) for (*of, _), offset in zip(expected, printed)] == expected
