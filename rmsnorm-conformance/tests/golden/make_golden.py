"""Writes golden.json: bounds and verdicts of the Python study from which rmsnorm_conformance was ported.

    pip install numpy==2.4.6 ml_dtypes==0.6.0
    python make_golden.py > golden.json

On x86-64, these versions reproduce the committed file byte for byte. Inputs are not stored:
tests/golden.rs generates the same inputs with the same counter-based generator. References have
extended precision here (bounds.py) and are f64 there. The judged outputs come from a simulated
kernel (kernel.py).
"""
import json

import numpy as np

import bounds
import kernel

SAMPLES = {"f32": 240, "f16": 900, "bf16": 900}  # judged elements of an output, by dtype
ARITHMETIC = {
    "cpu": (bounds.Arithmetic(), lambda: kernel.Ieee(0)),
    "cuda": (bounds.Arithmetic(rho=4.0), lambda: kernel.Ieee(1)),
    "wgsl": (bounds.Arithmetic(u=2.0 ** -23, k=1.5, stores_nearest=False, flushes=True), kernel.Wgsl),
}
DEFAULTS = dict(arithmetic="cpu", mode="worst", dtype="f32", weight=None, bias=False, offset=0.0, residual=False,
                dresidual_out=False, given=False, shift=0.0, scale=1.0, eps=1e-6, bug=None)
CASES = [
    dict(norm="rms_norm", rows=3, cols=7, weight="f32"),
    dict(norm="layer_norm", rows=3, cols=7, weight="f32", bias=True),
    dict(norm="rms_norm", rows=29, cols=541, dtype="bf16", weight="bf16", offset=1.0),
    dict(norm="layer_norm", rows=29, cols=541, dtype="f16", weight="f16", bias=True, eps=1e-5),
    dict(norm="rms_norm", rows=777, cols=24, weight="f32", mode="statistical"),
    dict(norm="layer_norm", rows=777, cols=24, weight="f32", bias=True, mode="statistical"),
    dict(norm="rms_norm", rows=2, cols=4099, dtype="f16", weight="f32", residual=True, dresidual_out=True),
    dict(norm="layer_norm", rows=2, cols=4099, dtype="bf16", weight="f32", residual=True, dresidual_out=True),
    dict(norm="rms_norm", rows=1, cols=1),
    dict(norm="layer_norm", rows=4, cols=1, weight="f32", bias=True),
    dict(norm="rms_norm", rows=5, cols=256, given=True, weight="f32", offset=1.0),
    dict(norm="layer_norm", rows=64, cols=129, given=True, dtype="bf16", weight="f32", bias=True, dresidual_out=True),
    dict(norm="layer_norm", rows=9, cols=1000, shift=300.0, weight="f32"),
    dict(norm="layer_norm", rows=9, cols=1000, shift=64.0, dtype="bf16", weight="bf16", bias=True),
    dict(norm="rms_norm", rows=17, cols=33, scale=1e-3, dtype="f16", weight="f16"),
    dict(norm="rms_norm", rows=300, cols=65, mode="statistical", dtype="bf16", weight="f32", residual=True),
    dict(norm="rms_norm", rows=11, cols=1025, arithmetic="cuda", weight="f32", dresidual_out=True),
    dict(norm="layer_norm", rows=11, cols=1024, arithmetic="cuda", dtype="f16", weight="f32", offset=1.0, bias=True),
    dict(norm="rms_norm", rows=6, cols=515, arithmetic="wgsl", dtype="bf16", weight="bf16"),
    dict(norm="layer_norm", rows=6, cols=515, arithmetic="wgsl", weight="f32", bias=True),
    # Kernels with a bug: the number of failures must agree, too.
    dict(norm="rms_norm", rows=8, cols=200, dtype="bf16", weight="f32", bug="rtz_store"),
    dict(norm="rms_norm", rows=8, cols=200, scale=1e-3, weight="f32", bug="eps_outside"),
    dict(norm="layer_norm", rows=8, cols=200, dtype="f16", weight="f32", bug="c_low"),
    dict(norm="layer_norm", rows=40, cols=50, weight="f32", bug="dw_lost_one"),
]
TENSORS = ["x", "residual", "weight", "bias", "dy", "dresidual_out"]


def uniform(count, seed):
    """`count` multiples of 2^-23 in [-1, 1): splitmix64 of a counter."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float64) * 2.0 ** -23 - 1.0


def inputs(index, case):
    rows, cols, dtype = case["rows"], case["cols"], case["dtype"]

    def tensor(name, shape, stored, transform=lambda t: t):
        values = transform(uniform(int(np.prod(shape)), 1000 * index + TENSORS.index(name))).reshape(shape)
        return values.astype(np.float32).astype(kernel.TYPES[stored])

    matrix, vector, parameters = (rows, cols), (cols,), case["weight"] or dtype
    return dict(
        x=tensor("x", matrix, dtype, lambda t: t * case["scale"] + case["shift"]),
        residual=tensor("residual", matrix, dtype) if case["residual"] else None,
        weight=tensor("weight", vector, parameters) if case["weight"] else None,
        bias=tensor("bias", vector, parameters) if case["bias"] else None,
        dy=tensor("dy", matrix, dtype),
        dresidual_out=tensor("dresidual_out", matrix, dtype) if case["dresidual_out"] else None,
    )


def summary(values):
    magnitudes = np.abs(np.asarray(values, dtype=np.longdouble))
    return [float(magnitudes.sum()), float(magnitudes.max())]


def verdict(got, reference, error, dtype, arithmetic):
    """Failures and used budget, as in rmsnorm_conformance's Verdict."""
    values = got.astype(np.float64)
    failures = int((~bounds.accept(values, reference, error, dtype, arithmetic)).sum())
    store = 0
    if dtype != "f32":
        below = bounds.round_to(np.abs(reference), dtype, "down")
        spacing = bounds.round_to(below + below * 2.0 ** -30 + 1e-300, dtype, "up") - below
        store = spacing / 2 if arithmetic.stores_nearest else spacing
    beyond = np.maximum(np.abs(values.astype(bounds.LD) - reference) - store, 0)
    return failures, float(np.max(beyond / error))


def judged(got, reference, error, dtype, arithmetic):
    got, reference, error = (np.asarray(t).reshape(-1) for t in (got, reference, error))
    step = -(-got.size // SAMPLES[dtype])
    got, reference, error = got[::step], reference[::step], error[::step]
    failures, budget = verdict(got, reference, error, dtype, arithmetic)
    bits = got.view(np.uint32 if dtype == "f32" else np.uint16)
    return dict(step=step, dtype=dtype, failures=failures, budget=budget,
                bits="".join(f"{b:0{8 if dtype == 'f32' else 4}x}" for b in bits))


def golden(index, case):
    norm, eps, dtype, parameters = case["norm"], np.float32(case["eps"]), case["dtype"], case["weight"] or case["dtype"]
    arithmetic, ops = ARITHMETIC[case["arithmetic"]]
    t = inputs(index, case)
    reference = bounds.reference(norm, t, eps, case["offset"], dtype)
    error = bounds.bounds(norm, reference, eps, arithmetic, dtype, case)
    outputs = ["rstd", "y", "dx", "dweight", "dbias"] + (["mean"] if norm == "layer_norm" else [])
    if case["given"]:
        # The backward pass of a backend that gets the reference's statistics, rounded to f32.
        statistics = [reference[name].astype(np.float32) for name in ("mean", "rstd")]
        backward = bounds.reference(norm, t, eps, case["offset"], dtype, *statistics)
        given = bounds.bounds(norm, backward, eps, arithmetic, dtype, case, given=True)
        for name in ("dx", "dweight", "dbias"):
            reference[name], error[name] = backward[name], given[name]
    result = dict(case, reference={}, bound={}, judged={})
    got = kernel.run(norm, t, eps, case["offset"], dtype, parameters, ops(), case["bug"])
    stored = dict(mean="f32", rstd="f32", y=dtype, dx=dtype, dweight=parameters, dbias=parameters)
    for name in outputs:
        result["reference"][name] = summary(reference[name])
        result["bound"][name] = summary(error[name])
        # The simulated kernel computes its statistics, so its gradients do not match given ones.
        if not (case["given"] and name in ("dx", "dweight", "dbias")):
            result["judged"][name] = judged(got[name], reference[name], error[name], stored[name], arithmetic)
    return result


if __name__ == "__main__":
    golden_cases = [golden(index, DEFAULTS | case) for index, case in enumerate(CASES)]
    print("[\n" + ",\n".join(json.dumps(case) for case in golden_cases) + "\n]")
