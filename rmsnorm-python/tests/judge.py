"""Compares outputs with the error bounds of math.md. Uses the reference and bounds that the Rust
suite is checked against."""

import pathlib
import sys

import numpy as np

_GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "rmsnorm-conformance/tests/golden"
sys.path.insert(0, str(_GOLDEN))
import bounds  # noqa: E402

# rho of the CUDA kernels; their bounds include the CPU's.
_ARITHMETIC = bounds.Arithmetic(rho=2.0, k=2.0)
_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def wide(array):
    """An array of NumPy, PyTorch or JAX as float64."""
    if array is None:
        return None
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    return np.asarray(array).astype(np.float64)


def dtype_of(array):
    """f32, f16 or bf16."""
    return _NAMES[str(array.dtype).removeprefix("torch.")]


def exact_and_error(norm, eps, inputs, weight_offset=0.0):
    """The outputs of math.md's reference by name, and the largest error of each before it is rounded to its dtype. Cast order: at the
    store.

    inputs: x, and weight, bias, residual, dy, dresidual_out where there are.
    """
    cols = inputs["x"].shape[-1]
    rows = {name: wide(array) for name, array in inputs.items()}
    rows = {name: array.reshape(-1, cols) if name not in ("weight", "bias") else array for name, array in rows.items()}
    tensors = dict.fromkeys(("x", "residual", "weight", "bias", "dy", "dresidual_out")) | rows
    if tensors["dy"] is None:
        tensors["dy"] = np.zeros_like(tensors["x"])
    stream = dtype_of(inputs["residual"] if "residual" in inputs else inputs["x"])
    eps = np.float32(eps)
    reference = bounds.reference(norm, tensors, eps, weight_offset, stream)
    case = dict(mode="worst", offset=weight_offset, bias=tensors["bias"] is not None, dresidual_out=tensors["dresidual_out"] is not None)
    error = bounds.bounds(norm, reference, eps, _ARITHMETIC, stream, case)
    # The sum of x and residual is rounded once: no error is allowed.
    error["h"] = np.zeros(1)
    # The residual of a bf16 call may be f32: dx and dresidual are one value, rounded to two dtypes.
    reference["dresidual"], error["dresidual"] = reference["dx"], error["dx"]
    return reference, error


def within(name, array, exact, error):
    """Asserts that every element is within `error` of the exact one, plus the rounding to its
    dtype."""
    values = wide(array)
    assert values.size == exact.size, f"{name}: {values.shape} for {exact.shape}"
    accepted = bounds.accept(values.reshape(exact.shape), exact, error + np.zeros(exact.shape), dtype_of(array), _ARITHMETIC)
    assert accepted.all(), f"{name}: {(~accepted).sum()} of {accepted.size} elements are beyond their bound"


def judge(norm, eps, inputs, got, weight_offset=0.0):
    """Asserts that every element of every output is within its bound. got: {name: output}. The rest
    is as in `exact_and_error`."""
    reference, error = exact_and_error(norm, eps, inputs, weight_offset)
    for name, array in got.items():
        within(name, array, reference[name], error[name])


def judge_after(norm, eps, inputs, got, weight_offset=0.0):
    """As `judge`, with the residual after the norm: equations (13) and (14), and backward as two calls. Each step is judged by the stored
    result of the one before.

    inputs: as for `judge`, and next_weight, next_bias. got: h, and y if there is a next norm, and gradients by the names of their inputs.
    """
    some = lambda **names: {to: inputs[name] for to, name in names.items() if name in inputs}  # noqa: E731
    first = some(x="x", weight="weight", bias="bias")
    exact, error = exact_and_error(norm, eps, first, weight_offset)
    total = exact["y"] + wide(inputs["residual"]).reshape(exact["y"].shape)
    within("h", got["h"], total, error["y"] + _ARITHMETIC.u * np.abs(total) * (1 + 2.0**-10))
    if "y" in got:
        of_next = some(weight="next_weight", bias="next_bias", dy="dy", dresidual_out="dresidual_out") | {"x": got["h"]}
        names = dict(y="y", dresidual="dresidual", dweight="dnext_weight", dbias="dnext_bias")
        judge(norm, eps, of_next, {to: got[name] for to, name in names.items() if name in got}, weight_offset)
    elif "dresidual" in got:
        assert np.array_equal(wide(got["dresidual"]), wide(inputs["dresidual_out"]))
    if "dx" in got:
        # The norm takes the gradient of the sum in the dtype of x.
        dy = bounds.round_to(wide(got["dresidual"]), dtype_of(inputs["x"]))
        gradients = {name: got[name] for name in ("dx", "dweight", "dbias") if name in got}
        judge(norm, eps, first | {"dy": dy}, gradients, weight_offset)


def activated(name, z):
    """(act, its error, act', its error) of a gate: math.md, (19) and sections 5.6 and 11.3, with the exp and the quotient of CUDA, whose
    bounds include the CPU's."""
    eta, w, u = 4.0 * _ARITHMETIC.u, 2.0 * _ARITHMETIC.u, _ARITHMETIC.u
    s, m = (1 / (1 + np.exp(sign * np.asarray(z, bounds.LD))) for sign in (-1, 1))
    e_s, e_m = (value * ((1 - value) * eta + u + w) + bounds.TINY for value in (s, m))
    if name == "sigmoid":
        return s, e_s, s * m, _product(s, e_s, m, e_m)
    inner, e_inner = 1 + z * m, _product(z, 0, m, e_m) + u * np.abs(1 + z * m)
    return z * s, _product(z, 0, s, e_s), s * inner, _product(s, e_s, inner, e_inner)


def _product(a, e_a, b, e_b):
    """The error of a product of computed values: math.md, section 5.6."""
    a, b = np.abs(a), np.abs(b)
    return (a * e_b + b * e_a + e_a * e_b) * (1 + _ARITHMETIC.u) + _ARITHMETIC.u * a * b + bounds.TINY


def judge_gated(norm, eps, inputs, got, activation, gate_before=False, groups=1, weight_offset=0.0):
    """As `judge`, with a gate (none in inputs: a norm of groups alone) and groups of columns: math.md, section 5.6. Cast order: at the
    store."""
    cols = inputs["x"].shape[-1]
    of = lambda arrays, group: {name: array[..., group] for name, array in arrays.items()}  # noqa: E731
    for start in range(0, cols, cols // groups):
        group = slice(start, start + cols // groups)
        _judge_group(norm, eps, of(inputs, group), of(got, group), activation, gate_before, weight_offset)


def _judge_group(norm, eps, inputs, got, activation, gate_before, weight_offset):
    flat = lambda name: wide(inputs[name]).reshape(-1, inputs["x"].shape[-1])  # noqa: E731
    if "gate" not in inputs:
        return judge(norm, eps, inputs, got, weight_offset)
    z, inputs = flat("gate"), {name: array for name, array in inputs.items() if name != "gate"}
    act, e_act, slope, e_slope = activated(activation, z)
    x = flat("x")
    average = lambda terms: terms.mean(axis=1, keepdims=True)  # noqa: E731
    is_layer, far = norm == "layer_norm", 1 + 2.0**-10
    e_dy, e = 0.0, 0.0
    if gate_before:
        e = _product(x, 0, act, e_act)
        inputs = inputs | {"x": (x * act).astype(np.float32)}
        # The reference's own h is exact to 2**-24 of itself.
        e = e + 2.0**-24 * np.abs(x * act)
    elif "dy" in inputs:
        dy = flat("dy")
        e_dy = _product(dy, 0, act, e_act) + 2.0**-24 * np.abs(dy * act)
        inputs = inputs | {"dy": (dy * act).astype(np.float32)}
    exact, error = exact_and_error(norm, eps, inputs, weight_offset)
    x_hat, rstd, weight = exact["x_hat"], exact["rstd"][:, None], np.abs(exact["weight"])
    wdy, mean_wdy_xhat = exact["wdy"], exact["mean_wdy_xhat"]
    # What an error of h adds: to var, to rstd, to x_hat.
    s = average(e + 0 * x) if is_layer else 0.0
    e_var = 2 * average(np.abs(exact["centred"]) * (e + s)) + average((e + s + 0 * x) ** 2)
    r = rstd**2 * e_var * far / 2
    e_x_hat = (rstd * (e + s) * (1 + r) + np.abs(x_hat) * r) * far
    e_y = error["y"] + weight * e_x_hat
    e_inner = weight * e_dy
    e_inner = e_inner + (average(e_inner + 0 * x) if is_layer else 0.0)
    e_mean = average(np.abs(wdy) * e_x_hat + np.abs(x_hat) * weight * e_dy)
    e_dx = error["dx"] + (rstd * (1 + r) * (e_inner + np.abs(x_hat) * e_mean + np.abs(mean_wdy_xhat) * e_x_hat) + np.abs(exact["dx_norm"]) * r) * far
    over = lambda terms: (terms + 0 * x).sum(axis=0)  # noqa: E731
    found = {
        "h": (exact["h"], error["h"]),
        "dweight": (exact["dweight"], error["dweight"] + over(np.abs(exact["dy"]) * e_x_hat + (np.abs(x_hat) + e_x_hat) * e_dy) * far),
        "dbias": (exact["dbias"], error["dbias"] + over(e_dy)),
        "dresidual": (exact["dx"], e_dx),
    }
    if gate_before:
        dh, v_slope, e_v_slope = exact["dx"], x * slope, _product(x, 0, slope, e_slope)
        found |= {"y": (exact["y"], e_y), "dx": (dh * act, _product(dh, e_dx, act, e_act)), "dgate": (dh * v_slope, _product(dh, e_dx, v_slope, e_v_slope))}
    else:
        v = exact["y"]
        found |= {"y": (v * act, _product(v, e_y, act, e_act)), "dx": (exact["dx"], e_dx)}
        if "dy" in inputs:
            found["dgate"] = dy * v * slope, _product(dy * v, _product(dy, 0, v, e_y), slope, e_slope)
    for name, array in got.items():
        within(name, array, *found[name])


def judge_weight_first(norm, eps, inputs, got, weight_offset=0.0):
    """As `judge`, with the weight before the norm: equations (24) and (25), and section 5.7. h is one value, a rounded product of float32
    numbers. inputs: x, weight, bias, dy."""
    x = inputs["x"]
    weight = (wide(inputs["weight"]).astype(np.float32) + np.float32(weight_offset)).astype(np.float32)
    h = bounds.round_to(wide(wide(x).astype(np.float32) * weight), dtype_of(x)).reshape(wide(x).shape)
    of_norm = {name: array for name, array in inputs.items() if name not in ("x", "weight")}
    exact, error = exact_and_error(norm, eps, of_norm | {"x": _Rounded(h, x.dtype)})
    found = {name: (exact[name], error[name]) for name in ("y", "dbias")}
    dh, e_dh, rows = exact["dx"], error["dx"], wide(x).reshape(exact["dx"].shape)
    found["dx"] = dh * weight, _product(dh, e_dh, weight, 0)
    terms, e_terms = np.abs(dh * rows), _product(dh, e_dh, rows, 0)
    sums = bounds.sum_error(terms + e_terms, 0, bounds.depth_rows(len(rows)), _ARITHMETIC.u, "worst")
    found["dweight"] = (dh * rows).sum(0), e_terms.sum(0) + sums
    for name, array in got.items():
        within(name, array, *found[name])


class _Rounded:
    """Float64 values of a narrower dtype."""

    def __init__(self, values, dtype):
        self.values, self.dtype, self.shape = values, dtype, values.shape

    def __array__(self, dtype=None, copy=None):
        return self.values
