"""Trains a small model on this project's texts, with the norms of this package and in jax.numpy,
and prints both losses.

    python rmsnorm-python/examples/train_jax.py [--steps 100]

The models start from the same weights and see the same bytes. Their sums are rounded differently,
and the difference grows with the steps.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import rmsnorm.jax as rj

COLS, LAYERS, LENGTH, BATCH, EPS = 128, 3, 64, 16, 1e-6


def jnp_rms_norm(x, w):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPS) * w


OURS = dict(norm=lambda x, w: rj.rms_norm(x, w, EPS), add_norm=lambda x, r, w: rj.add_rms_norm(x, r, w, EPS))
THEIRS = dict(norm=jnp_rms_norm, add_norm=lambda x, r, w: (jnp_rms_norm(x + r, w), x + r))


def start(key):
    """The initial parameters."""
    keys = iter(jax.random.split(key, 3 + 3 * LAYERS))
    matrix = lambda rows, cols: jax.random.normal(next(keys), (rows, cols)) * rows**-0.5  # noqa: E731
    layers = [
        dict(norm=jnp.ones(COLS), mix=matrix(LENGTH, LENGTH), product_norm=jnp.ones(COLS), up=matrix(COLS, 4 * COLS),
             down=matrix(2 * COLS, COLS)) for _ in range(LAYERS)
    ]
    return dict(bytes=matrix(256, COLS) * 16, places=matrix(LENGTH, COLS), layers=layers, norm=jnp.ones(COLS), head=matrix(COLS, 256))


def model(kind, parameters, ids):
    """Predicts the next byte. Learned sums over the earlier positions stand in for attention."""
    stream, x = parameters["bytes"][ids], jnp.broadcast_to(parameters["places"], (*ids.shape, COLS))
    for layer in parameters["layers"]:
        y, stream = kind["add_norm"](x, stream, layer["norm"])
        x = jnp.einsum("ts,bsc->btc", jnp.tril(layer["mix"]), y)
        y, stream = kind["add_norm"](x, stream, layer["product_norm"])
        gate, value = jnp.split(y @ layer["up"], 2, -1)
        x = (jax.nn.silu(gate) * value) @ layer["down"]
    return kind["add_norm"](x, stream, parameters["norm"])[0] @ parameters["head"]


def train(kind, steps, text):
    @jax.jit
    def step(parameters, moments, count, batch):
        def loss(parameters):
            logits = jax.nn.log_softmax(model(kind, parameters, batch[:, :-1]))
            return -jnp.take_along_axis(logits, batch[:, 1:, None], -1).mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        # Adam.
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], gradients)
        change = lambda p, m, v: p - 3e-3 * m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8)  # noqa: E731
        return jax.tree.map(change, parameters, first, second), (first, second), value

    parameters = start(jax.random.key(0))
    moments = (jax.tree.map(jnp.zeros_like, parameters),) * 2
    generator, losses, begin = np.random.default_rng(1), [], time.perf_counter()
    for count in range(1, steps + 1):
        starts = generator.integers(len(text) - LENGTH - 1, size=BATCH)
        batch = np.stack([text[start : start + LENGTH + 1] for start in starts])
        parameters, moments, loss = step(parameters, moments, jnp.float32(count), batch)
        losses.append(loss)
    return [float(loss) for loss in losses], time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[2]
    text = b"".join((root / name).read_bytes() for name in ("README.md", "ARCHITECTURE.md", "rmsnorm-spec/math.md"))
    text = np.frombuffer(text, np.uint8).astype(np.int32)
    (ours, our_time), (theirs, their_time) = train(OURS, args.steps, text), train(THEIRS, args.steps, text)
    print(f"{'step':>6} {'rmsnorm':>10} {'jax.numpy':>10} {'difference':>12}   {jax.devices()[0].device_kind}")
    for index in sorted({0, 1, 3, 10, 30, *range(99, args.steps, 100), args.steps - 1}):
        if index < args.steps:
            print(f"{index + 1:6} {ours[index]:10.5f} {theirs[index]:10.5f} {ours[index] - theirs[index]:12.1e}")
    print(f"{args.steps} steps, compilation included: {our_time:.1f} s with rmsnorm, {their_time:.1f} s with jax.numpy")
    # Early losses agree up to rounding (a GPU multiplies in TF32). Later the models have drifted
    # apart, but are equally good.
    assert max(abs(a - b) for a, b in zip(ours[:4], theirs[:4])) < 1e-2
    assert ours[-1] < 0.8 * ours[0] and abs(ours[-1] - theirs[-1]) < 0.05 * theirs[-1]


main()
