"""The modules for flax.nnx and Equinox, compared with the frameworks' own."""

import numpy as np
import pytest
from conftest import framework
from judge import wide

jax = framework("jax")
import jax.numpy as jnp  # noqa: E402

NAMES = ["RMSNorm", "LayerNorm"]


@pytest.fixture
def nnx():
    flax = framework("flax")
    import rmsnorm.jax.nnx

    return flax.nnx, rmsnorm.jax.nnx


@pytest.fixture
def equinox():
    equinox = framework("equinox")
    import rmsnorm.jax.equinox

    return equinox, rmsnorm.jax.equinox


def random(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def close(got, expected, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.linalg.norm(wide(a) - wide(b)) <= tolerance * np.linalg.norm(wide(b))


def runs_a_kernel(function, *args):
    return "rmsnorm_forward" in jax.jit(function).lower(*args).compile().as_text()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype, param_dtype, x_dtype", [
    (None, jnp.float32, jnp.float32), (None, jnp.float32, jnp.bfloat16), (None, jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float32, jnp.bfloat16), (jnp.float32, jnp.bfloat16, jnp.float16),
])
def test_nnx_is_drop_in(nnx, name, dtype, param_dtype, x_dtype):
    flax_nnx, ours = nnx
    initializers = {"scale_init": lambda key, shape, dtype: 1.5 + jnp.arange(shape[0], dtype=dtype)}
    initializers |= {"bias_init": lambda key, shape, dtype: 0.5 - jnp.arange(shape[0], dtype=dtype)} if name == "LayerNorm" else {}
    own, other = (getattr(module, name)(24, epsilon=1e-3, dtype=dtype, param_dtype=param_dtype, rngs=flax_nnx.Rngs(0), **initializers)
                  for module in (ours, flax_nnx))
    assert isinstance(own, type(other))
    close(flax_nnx.state(own), flax_nnx.state(other), 0.0)
    x = random(0, 3, 5, 24, dtype=x_dtype)
    tolerance = 2e-5 if own(x).dtype == jnp.float32 else 3 * 2.0**-8
    close(own(x), other(x), tolerance)
    assert runs_a_kernel(own, x)
    # Divided by 8, so that no gradient exceeds float16.
    loss = lambda norm, x: ((norm(x).astype(jnp.float32) / 8) ** 3).sum()  # noqa: E731
    gradients = [flax_nnx.jit(flax_nnx.grad(loss, argnums=(0, 1)))(norm, x) for norm in (own, other)]
    close(jax.tree.leaves(gradients[0]), jax.tree.leaves(gradients[1]), 2 * tolerance)
    close(jax.vmap(own)(x), own(x), 0.0)
    # Each loads the other's checkpoint.
    flax_nnx.update(own, jax.tree.map(lambda array: 2 * array, flax_nnx.state(other)))
    close(flax_nnx.state(own), jax.tree.map(lambda array: 2 * array, flax_nnx.state(other)), 0.0)


@pytest.mark.parametrize("name, options", [
    ("RMSNorm", {"use_scale": False}), ("LayerNorm", {"use_scale": False}), ("LayerNorm", {"use_bias": False}),
    ("LayerNorm", {"use_bias": False, "use_scale": False}), ("LayerNorm", {"use_fast_variance": False}), ("RMSNorm", {}), ("LayerNorm", {}),
    *(("RMSNorm", {name: axes}) for name in ("reduction_axes", "feature_axes") for axes in (-1, (-1,), [-1], 2, (2,))),
])
def test_nnx_options(nnx, name, options):
    flax_nnx, ours = nnx
    own, other = (getattr(module, name)(24, rngs=flax_nnx.Rngs(0), **options) for module in (ours, flax_nnx))
    x = random(0, 3, 5, 24) * 1e-3
    close(own(x), other(x))
    assert runs_a_kernel(own, x)


@pytest.mark.parametrize("name", NAMES)
def test_nnx_leaves_to_flax_what_is_not_of_rows(nnx, name):
    flax_nnx, ours = nnx
    x, mask = random(0, 4, 4, 4), jnp.ones((4, 4, 4), bool).at[:, :, 1].set(False)
    for options, more in (
        *(({"reduction_axes": axes}, {}) for axes in (0, (0,), [0], 1, (1,), [1], (1, 2), (0, -1))),
        *(({"feature_axes": axes}, {}) for axes in (0, (0,), [0], 1, (1,), [1])), ({}, {"mask": mask}), ({"axis_name": "batch"}, {}),
    ):
        options = dict(options, scale_init=lambda key, shape, dtype: jnp.arange(4, dtype=dtype), rngs=flax_nnx.Rngs(0))
        own, other = (getattr(module, name)(4, **options) for module in (ours, flax_nnx))
        run = (lambda norm: jax.vmap(norm, axis_name="batch")) if "axis_name" in options else (lambda norm: norm)
        close(run(own)(x, **more), run(other)(x, **more))


def train(step, parameters, steps=10):
    losses = []
    for _ in range(steps):
        value, parameters = step(parameters)
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_nnx_trains_as_flax_does(nnx, name):
    flax_nnx, ours = nnx

    class Model(flax_nnx.Module):
        def __init__(self, norm, rngs):
            self.before, self.norm, self.after = flax_nnx.Linear(8, 16, rngs=rngs), norm(16, rngs=rngs), flax_nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            return self.after(self.norm(self.before(x)))

    x, target = random(0, 32, 8), random(1, 32, 1)

    def losses(norm):
        graph, state = flax_nnx.split(Model(norm, flax_nnx.Rngs(0)))

        @jax.jit
        def step(state):
            value, gradient = jax.value_and_grad(lambda state: ((flax_nnx.merge(graph, state)(x) - target) ** 2).mean())(state)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient)

        return train(step, state)

    own, other = losses(getattr(ours, name)), losses(getattr(flax_nnx, name))
    assert own[-1] < 0.9 * own[0] and np.allclose(own, other, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options, dtype, shape", [
    ({}, jnp.float32, 24), ({}, jnp.bfloat16, (4, 6)), ({"use_weight": False, "eps": 0.1}, jnp.float32, 24),
    ({"use_bias": False}, jnp.bfloat16, 24), ({"use_weight": False, "use_bias": False}, jnp.float32, (4, 6)),
    ({"dtype": jnp.bfloat16}, jnp.float32, 24), ({"dtype": jnp.float16}, jnp.bfloat16, 24),
])
def test_equinox_is_drop_in(equinox, name, options, dtype, shape):
    eqx, ours = equinox
    own, other = (getattr(module, name)(shape, **options) for module in (ours, eqx.nn))
    assert isinstance(own, type(other))

    def moved(norm):
        arrays, rest = eqx.partition(norm, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda a: a + jnp.arange(a.size, dtype=a.dtype).reshape(a.shape), arrays), rest)

    own, other = moved(own), moved(other)
    close(jax.tree.leaves(own), jax.tree.leaves(other), 0.0)
    x = random(0, 5, *own.shape, dtype=dtype)
    tolerance = 2e-5 if dtype == jnp.float32 else 2.0**-8
    close(own(x[0]), other(x[0]), tolerance)
    assert own(x[0], None, key=jax.random.key(0))[1] is None
    close(eqx.filter_jit(jax.vmap(own))(x), eqx.filter_jit(jax.vmap(other))(x), tolerance)
    assert runs_a_kernel(jax.vmap(own), x)

    @eqx.filter_jit
    def gradients(norm, x):
        loss = lambda both: (jax.vmap(both[0])(both[1]).astype(jnp.float32) ** 3).sum()  # noqa: E731
        return jax.tree.leaves(eqx.filter_grad(loss)((norm, x)))

    close(gradients(own, x), gradients(other, x), max(tolerance, 2.0**-7 if "dtype" in options else 0.0) * 2)
    with pytest.raises(ValueError, match=r"x: expected the shape \(.*\), got \(5, .*jax.vmap"):
        own(x)


@pytest.mark.parametrize("name", NAMES)
def test_equinox_trains_as_its_own_under_strict_promotion(equinox, name):
    eqx, ours = equinox
    x, target = random(0, 32, 8, dtype=jnp.bfloat16), random(1, 32)

    def losses(norm):
        model = eqx.nn.Sequential([norm(8), eqx.nn.Linear(8, "scalar", key=jax.random.key(0))])

        @eqx.filter_jit
        def step(model):
            def loss(model):
                return ((jax.vmap(lambda row: model[1](model[0](row).astype(jnp.float32)))(x) - target) ** 2).mean()

            value, gradient = eqx.filter_value_and_grad(loss)(model)
            return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))

        return train(step, model)

    with jax.numpy_dtype_promotion("strict"):
        own, other = losses(getattr(ours, name)), losses(getattr(eqx.nn, name))
    assert own[-1] < 0.98 * own[0] and np.allclose(own, other, rtol=1e-2)
