"""Times the norms of this package for JAX and the same norms in jax.numpy under jit, in one
process.

    python rmsnorm-python/benches/jax_speed.py [--shapes 4096x1024,..] [--out FILE]

The platform is JAX's default. On a GPU calls are queued, and the host waits for the last one. Each
result is compared with float64 before it is timed.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import measure
import numpy as np

import rmsnorm.jax as rj

EPS = 1e-6


def with_jnp(is_layer, x, w):
    h = x.astype(jnp.float32)
    h = h - h.mean(-1, keepdims=True) if is_layer else h
    return (h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + EPS) * w.astype(jnp.float32)).astype(x.dtype)


FUNCTIONS = {
    "rms_norm": (lambda x, w: rj.rms_norm(x, w, EPS), functools.partial(with_jnp, False)),
    "layer_norm": (lambda x, w: rj.layer_norm(x, w, None, EPS), functools.partial(with_jnp, True)),
}


def exact(op, x, w):
    h = np.asarray(x.astype(jnp.float32), np.float64)
    h = h - h.mean(-1, keepdims=True) if op == "layer_norm" else h
    return h / np.sqrt((h * h).mean(-1, keepdims=True) + EPS) * np.asarray(w.astype(jnp.float32), np.float64)


def both(function):
    """y and the gradients, as in training. XLA removes the computation of results that are not
    returned."""
    def call(x, w, dy):
        y, gradients = jax.vjp(function, x, w)
        return y, *gradients(dy)

    return call


def run(op, shape, dtype, rounds, sets, queue):
    keys = iter(jax.random.split(jax.random.key(0), 2 * sets + 1))
    xs = [jax.random.normal(next(keys), shape, dtype) for _ in range(sets)]
    dys = [jax.random.normal(next(keys), shape, dtype) for _ in range(sets)]
    w = jax.random.normal(next(keys), shape[1:], dtype)
    found = {}
    for mode in ("forward", "forward + backward"):
        calls = {}
        for name, function in zip(("ours", "jax.numpy"), FUNCTIONS[op]):
            compiled = jax.jit(function if mode == "forward" else both(function))
            y, truth = np.asarray(jax.jit(function)(xs[0], w).astype(jnp.float32), np.float64), exact(op, xs[0], w)
            error = np.linalg.norm(y - truth) / np.linalg.norm(truth)
            assert error < (1e-5 if dtype == jnp.float32 else 2e-2), (name, error)
            turn = itertools.cycle(range(sets))

            def call(compiled=compiled, turn=turn):
                for _ in range(queue):
                    index = next(turn)
                    last = compiled(xs[index], w) if mode == "forward" else compiled(xs[index], w, dys[index])
                jax.block_until_ready(last)

            calls[name] = call
        timed = measure.in_turn(calls, rounds, 0.05)
        found[mode] = {
            name: dict(us=row["us"] / queue, least_us=row["least_us"] / queue, ratio=row["ratio"]) for name, row in timed.items()
        }
    return found


def main():
    args = measure.arguments(__doc__, shapes="4096x1024,1x4096", dtypes="float32,bfloat16", ops="rms_norm,layer_norm", sets=6)
    measure.keep_freed_memory()
    device = jax.devices()[0]
    queue = 1 if device.platform == "cpu" else 50
    report = measure.report(str(device.device_kind), [], jax=jax.__version__)
    for op, dtype, shape in itertools.product(args.ops.split(","), args.dtypes.split(","), args.shapes.split(",")):
        size = tuple(int(length) for length in shape.split("x"))
        for mode, rows in run(op, size, jnp.dtype(dtype), args.rounds, args.sets, queue).items():
            measure.show(f"{op} {mode}, {shape} {dtype}, {device.device_kind}", rows)
            report["rows"].append(dict(op=op, mode=mode, shape=shape, dtype=dtype, us=rows))
    measure.write(args.out, report)


main()
