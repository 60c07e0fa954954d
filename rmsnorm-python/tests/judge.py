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
