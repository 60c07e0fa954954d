"""Arrays of NumPy, and of other libraries through DLPack."""

import bisect
import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from conftest import framework
from judge import judge, judge_after, judge_gated, judge_weight_first, wide

import rmsnorm
from rmsnorm import arrays


def _random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_version_is_the_package_s():
    assert rmsnorm.__version__ == importlib.metadata.version("rmsnorm")
    assert rmsnorm.__revision__ == "unknown" or len(rmsnorm.__revision__) >= 7


def test_devices_are_told():
    found = rmsnorm.devices()
    assert found["cpu"][0] and "thread" in found["cpu"][1]
    assert any(name.startswith("cuda") for name in found)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(1, 1), (24,), (3, 7, 257), (2, 4096)])
def test_norms_and_gradients_are_within_their_bounds(dtype, shape):
    x, residual, dy = (_random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    weight, bias = (_random(shape[-1], seed=seed) for seed in (3, 4))
    for norm, bias in (("rms_norm", None), ("layer_norm", bias)):
        y, h = np.full_like(x, np.nan), np.full_like(x, np.nan)
        mean, rstd = (np.full(shape[:-1], np.nan, np.float32) for _ in range(2))
        statistics = {"rstd": rstd} | ({"mean": mean} if bias is not None else {})
        arrays.forward(norm, 1e-5, x=x, residual=residual, weight=weight, bias=bias, y=y, residual_out=h, **statistics)
        inputs = dict(x=x, residual=residual, weight=weight, dy=dy) | ({} if bias is None else {"bias": bias})
        got = {"dx": np.full_like(x, np.nan), "dweight": np.full_like(weight, np.nan)}
        got |= {} if bias is None else {"dbias": np.full_like(weight, np.nan)}
        arrays.backward(norm, dy=dy, x=h, weight=weight, **statistics, **got)
        judge(norm, 1e-5, inputs, {"y": y, "h": h, **statistics, **got})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(1, 1), (24,), (3, 7, 257), (2, 4096)])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_two_norms_around_a_residual_are_within_their_bounds(dtype, shape, norm):
    """With a float32 residual, whose gradient the first norm takes in the dtype of x."""
    is_layer, offset = norm == "layer_norm", -0.75
    x, dy = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=1)
    residual, dresidual_out = _random(*shape, seed=2), _random(*shape, seed=3)
    names = ("weight", "bias", "next_weight", "next_bias")[:: 1 if is_layer else 2]
    parameters = {name: _random(shape[-1], seed=4 + index) for index, name in enumerate(names)}
    new = lambda like: np.full_like(like, np.nan)  # noqa: E731
    statistics = ("mean", "rstd", "next_mean", "next_rstd") if is_layer else ("rstd", "next_rstd")
    rows = {name: np.full(shape[:-1], np.nan, np.float32) for name in statistics}
    got = {"y": new(x), "h": new(residual)}
    arrays.forward(norm, 1e-5, x=x, residual=residual, y=got["y"], residual_out=got["h"], residual_after=True, weight_offset=offset,
                   **parameters, **rows)
    given = parameters | rows
    of_next = {name.removeprefix("next_"): array for name, array in given.items() if name.startswith("next_") and "bias" not in name}
    of_first = {name: given[name] for name in of_next}
    got |= {f"d{name}": new(array) for name, array in (dict(x=x, residual=residual) | parameters).items()}
    dsum = new(x)
    biases = lambda name: {"dbias": got[name]} if is_layer else {}  # noqa: E731
    arrays.backward(norm, dy=dy, x=got["h"], dx=dsum, dresidual_out=dresidual_out, dresidual=got["dresidual"], dweight=got["dnext_weight"],
                    weight_offset=offset, **of_next, **biases("dnext_bias"))
    arrays.backward(norm, dy=dsum, x=x, dx=got["dx"], dweight=got["dweight"], weight_offset=offset, **of_first, **biases("dbias"))
    inputs = dict(x=x, residual=residual, dy=dy, dresidual_out=dresidual_out) | parameters
    judge_after(norm, 1e-5, inputs, got, offset)


_GATED = [(False, "xzw", 1), (False, "xz", 1), (False, "xrzwb", 1), (False, "xZw", 1), (False, "xZwb", 2), (False, "xw", 4),
          (True, "xzwb", 1), (True, "xrzw", 2), (True, "xZb", 3), (True, "xrwb", 2)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(24,), (3, 7, 264), (2, 4104)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("is_layer, names, groups", _GATED)
def test_gates_and_groups_are_within_their_bounds(dtype, shape, activation, is_layer, names, groups):
    """The inputs: x, residual (r), gate after (z) or before the norm (Z), weight (w), bias (b)."""
    norm, offset = "layer_norm" if is_layer else "rms_norm", -0.75
    long = {"x": "x", "r": "residual", "z": "gate", "Z": "gate", "w": "weight", "b": "bias"}
    of = {long[name]: _random(*(shape if name in "xrzZ" else shape[-1:]), dtype=np.float32 if name in "wbr" else dtype, seed=seed)
          for seed, name in enumerate(names)}
    new = lambda like: np.full_like(like, np.nan)  # noqa: E731
    statistics = {name: np.full((*shape[:-1], *([groups] if groups > 1 else [])), np.nan, np.float32) for name in ("mean", "rstd")[not is_layer:]}
    options = dict(activation=activation, gate_before="Z" in names, groups=groups, weight_offset=offset)
    results = {"y": new(of["x"])} | ({"residual_out": new(of["residual"])} if "r" in names else {})
    arrays.forward(norm, 1e-5, **of, **results, **statistics, **options)
    got = {f"d{name}": new(array) for name, array in of.items() if name != "residual"}
    got |= {"dresidual": new(of["residual"])} if "r" in names else {}
    arriving = {"dy": _random(*shape, dtype=dtype, seed=10)} | ({"dresidual_out": _random(*shape, seed=11)} if "r" in names else {})
    rows = results.get("residual_out", of["x"])
    given = {name: of[name] for name in ("gate", "weight") if name in of} | ({"bias": of["bias"]} if "z" in names and "b" in names else {})
    arrays.backward(norm, x=rows, **arriving, **given, **statistics, **got, **options)
    # The statistics of each group are those of its columns.
    judged = got | {"y": results["y"]} | ({"h": rows} if "r" in names else {})
    judge_gated(norm, 1e-5, of | arriving, judged, activation, "Z" in names, groups, offset)
    if not {"z", "Z"} & set(names):
        for group in range(groups):
            columns = slice(group * (shape[-1] // groups), (group + 1) * (shape[-1] // groups))
            inputs = {name: array[..., columns] for name, array in of.items()}
            judge(norm, 1e-5, inputs, {name: array[..., group] for name, array in statistics.items()}, offset)


def test_a_gated_norm_is_one_function():
    """No option has its default, so that a lost one is noticed."""
    x, z, w, b = _random(5, 64, dtype=np.float16), _random(5, 64, dtype=np.float16, seed=1), _random(64, seed=2), _random(64, seed=3)
    inputs, options = {"x": x, "gate": z, "weight": w, "bias": b}, dict(bias=b, activation="sigmoid", groups=4, weight_offset=0.25)
    for before in (False, True):
        y = arrays.rms_norm_gated(x, z, w, 0.3, norm_before_gate=not before, **options)
        judge_gated("rms_norm", 0.3, inputs, {"y": y}, "sigmoid", before, 4, 0.25)
        out = x.copy()
        assert arrays.rms_norm_gated(out, z, w, 0.3, norm_before_gate=not before, **options, out=out) is out and np.array_equal(out, y)
    assert np.array_equal(arrays.rms_norm_gated(x, None, w, 0.3), arrays.rms_norm(x, w, 0.3))
    # The norm is rounded before the weight, and before the gate to the dtype of the weight.
    w = w.astype(np.float16)
    chain = arrays.rms_norm(x, w, 1e-6, cast_before_weight=True).astype(np.float32) / (1 + np.exp(-z.astype(np.float32)))
    y = arrays.rms_norm_gated(x, z, w, 1e-6, activation="sigmoid", cast_before_weight=True)
    assert (y != chain.astype(np.float16)).mean() < 0.01 < (y != arrays.rms_norm_gated(x, z, w, 1e-6, activation="sigmoid")).mean()


def test_groups_are_rows_of_their_own():
    x = _random(3, 5, 24)
    for groups in (2, 3, 24):
        for norm, function in (("rms_norm", arrays.rms_norm), ("layer_norm", arrays.layer_norm)):
            y, rstd = np.empty_like(x), np.empty((3, 5, groups), np.float32)
            arrays.forward(norm, 1e-5, x=x, y=y, rstd=rstd, groups=groups)
            alone = x.reshape(3, 5, groups, -1)
            np.testing.assert_allclose(y, function(alone, eps=1e-5).reshape(x.shape), rtol=1e-5, atol=1e-6)
            spread = wide(alone) - (wide(alone).mean(-1, keepdims=True) if norm == "layer_norm" else 0)
            np.testing.assert_allclose(rstd, 1 / np.sqrt((spread**2).mean(-1) + 1e-5), rtol=1e-4)


def _new(like):
    return np.full_like(like, np.nan)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("names, groups", [("x", 1), ("xw", 1), ("xwb", 4), ("xzw", 1), ("xZw", 4), ("xrw", 1)])
@pytest.mark.parametrize("clamped", [False, True])
def test_l2_norms_are_within_their_bounds(dtype, names, groups, clamped):
    """An L2 norm of rows of 4**k elements is an RMS norm with eps / cols, whose result is divided by 2**k: exact scalings of its bounds."""
    cols, eps = 256 * groups, 2.0**-20 if clamped else 0.25
    long = {"x": "x", "r": "residual", "z": "gate", "Z": "gate", "w": "weight", "b": "bias"}
    of = {long[name]: _random(*(() if name in "wb" else (3, 7)), cols, dtype=np.float32 if name in "wb" else dtype, seed=seed)
          for seed, name in enumerate(names)}
    rstd, options = np.full((3, 7, *([groups] if groups > 1 else [])), np.nan, np.float32), dict(gate_before="Z" in names, groups=groups)
    results = {"y": _new(of["x"])} | ({"residual_out": _new(of["x"])} if "r" in names else {})
    norm = "l2_norm_clamped" if clamped else "l2_norm"
    arrays.forward(norm, eps, **of, **results, rstd=rstd, **options)
    got = {f"d{name}": _new(array) for name, array in of.items()}
    arriving = {name: _random(3, 7, cols, dtype=dtype, seed=seed) for seed, name in enumerate(("dy", "dresidual_out")[: 1 + ("r" in names)], 10)}
    rows = results.get("residual_out", of["x"])
    given = {name: of[name] for name in ("gate", "weight") if name in of}
    arrays.backward(norm, x=rows, **arriving, **given, rstd=rstd, **got, eps=eps, **options)
    inputs = of | arriving | {"weight": of.get("weight", np.ones(cols, np.float32)) / 16}
    got |= {"dweight": got["dweight"] * 16} if "w" in names else {}
    got |= {"y": results["y"]} | ({"h": rows} if "r" in names else {})
    # A clamped norm without clamped rows: those are in the next test.
    judge_gated("rms_norm", 0.0 if clamped else eps / 256, inputs, got, "silu", "Z" in names, groups)


def test_a_clamped_norm_divides_small_rows_by_eps():
    x, w, dy = _random(4, 64), _random(64, seed=1), _random(4, 64, seed=2)
    x *= np.array([[0.0], [1e-3], [1.0], [1e3]], np.float32)
    y, rstd, dx, dweight = np.empty_like(x), np.empty(4, np.float32), np.empty_like(x), np.empty_like(w)
    arrays.forward("l2_norm_clamped", 0.25, x=x, y=y, weight=w, rstd=rstd)
    arrays.backward("l2_norm_clamped", dy=dy, x=x, weight=w, rstd=rstd, dx=dx, dweight=dweight, eps=0.25)
    rows, wdy = wide(x), wide(dy) * wide(w)
    length = np.sqrt((rows**2).sum(-1, keepdims=True))
    x_hat, divisor = rows / np.maximum(length, 0.25), np.maximum(length, 0.25)
    right = (wdy - np.where(length > 0.25, x_hat * (wdy * x_hat).sum(-1, keepdims=True), 0)) / divisor
    for got, exact in ((y, x_hat * wide(w)), (rstd, 1 / divisor[:, 0]), (dx, right), (dweight, (wide(dy) * x_hat).sum(0))):
        assert np.abs(got - exact).max() <= 8 * 2.0**-24 * np.abs(exact).max()
    assert np.array_equal(arrays.l2_norm(x, None, 0.25, clamped=True)[:2], (x * 4)[:2])
    assert np.array_equal(arrays.l2_norm(x, w, 0.25, clamped=True), y)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(24,), (3, 7, 264), (2, 4104)])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_weight_before_the_norm_is_within_the_bounds(dtype, shape, norm):
    is_layer, offset = norm == "layer_norm", -0.75
    x, dy, w, b = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype, seed=1), _random(shape[-1], seed=2), _random(shape[-1], seed=3)
    rows = {name: np.full(shape[:-1], np.nan, np.float32) for name in ("mean", "rstd")[not is_layer:]}
    bias, got = {"bias": b} if is_layer else {}, {"dx": _new(x), "dweight": _new(w)} | ({"dbias": _new(b)} if is_layer else {})
    y, options = _new(x), dict(weight_offset=offset, cast_order="weight_first")
    arrays.forward(norm, 1e-2, x=x, y=y, weight=w, **bias, **rows, **options)
    arrays.backward(norm, dy=dy, x=x, weight=w, **rows, **got, **options)
    judge_weight_first(norm, 1e-2, {"x": x, "weight": w, "dy": dy} | bias, got | {"y": y}, offset)


@pytest.mark.parametrize("order", ["before_weight", "rstd_first"])
@pytest.mark.parametrize("has_gate", [False, True])
def test_the_roundings_of_a_cast_order(order, has_gate):
    """A few values round to the other side of a tie. With another order, many differ."""
    x, z, w = _random(64, 512, dtype=np.float16), _random(64, 512, dtype=np.float16, seed=1), _random(512, dtype=np.float16, seed=2)
    rows, f4 = x.astype(np.float32), np.float32
    rstd = (1 / np.sqrt((rows**2).mean(-1, keepdims=True) + f4(1e-2))).astype(f4)
    rstd = rstd.astype(np.float16).astype(f4) if order == "rstd_first" else rstd
    expected = ((rows * rstd).astype(np.float16).astype(f4) * w.astype(f4)).astype(np.float16)
    expected = (expected / (1 + np.exp(-z.astype(f4)))).astype(np.float16) if has_gate else expected
    gate = z if has_gate else None
    differ = {name: (arrays.rms_norm_gated(x, gate, w, 1e-2, activation="sigmoid", cast_order=name) != expected).mean()
              for name in ("at_store", "before_weight", "rstd_first", "weight_first")}
    assert differ.pop(order) < 0.01 < 0.03 < min(differ.values()), differ


@pytest.mark.parametrize("x_dtype, y_dtype", [(np.float32, np.float16), (np.float16, np.float32)])
@pytest.mark.parametrize("is_layer, names, groups", [(False, "x", 1), (False, "xw", 1), (True, "xwb", 1), (False, "xzw", 2), (True, "xzwb", 1)])
def test_y_of_another_dtype_is_within_the_bounds_of_the_wide_row(x_dtype, y_dtype, is_layer, names, groups):
    norm, long = "layer_norm" if is_layer else "rms_norm", {"x": "x", "z": "gate", "w": "weight", "b": "bias"}
    dtypes = {"x": x_dtype, "z": y_dtype, "w": np.float32, "b": np.float32}
    of = {long[name]: _random(*(() if name in "wb" else (3, 7)), 264, dtype=dtypes[name], seed=seed) for seed, name in enumerate(names)}
    shape, options = (3, 7, *([groups] if groups > 1 else [])), dict(groups=groups)
    statistics = {name: np.full(shape, np.nan, np.float32) for name in ("mean", "rstd")[not is_layer:]}
    y, dy, added = np.full((3, 7, 264), np.nan, y_dtype), _random(3, 7, 264, dtype=y_dtype, seed=10), _random(3, 7, 264, dtype=x_dtype, seed=11)
    arrays.forward(norm, 1e-2, **of, y=y, **statistics, **options)
    got = {f"d{name}": _new(array) for name, array in of.items()}
    given = {name: of[name] for name in ("gate", "weight") if name in of} | ({"bias": of["bias"]} if "z" in names and "b" in names else {})
    arrays.backward(norm, x=of["x"], dy=dy, **given, **statistics, **got, **options)
    inputs = {name: array.astype(np.float32) for name, array in (of | {"dy": dy}).items()}
    judge_gated(norm, 1e-2, inputs, got | {"y": y}, "silu", False, groups)
    dx = _new(of["x"])
    arrays.backward(norm, x=of["x"], dy=dy, dresidual_out=added, **given, **statistics, dx=dx, **options)
    judge_gated(norm, 1e-2, inputs | {"dresidual_out": added.astype(np.float32)}, {"dx": dx}, "silu", False, groups)


def test_an_l2_norm_and_the_dtype_of_y_are_options_of_functions():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, w = _random(5, 64), _random(64, seed=1)
    y = np.empty_like(x)
    arrays.forward("l2_norm", 0.3, x=x, y=y, weight=w, groups=4, weight_offset=0.25, cast_order="weight_first")
    assert np.array_equal(arrays.l2_norm(x, w, 0.3, groups=4, weight_offset=0.25, cast_order="weight_first"), y)
    np.testing.assert_allclose(arrays.l2_norm(x, groups=4), arrays.l2_norm(x.reshape(5, 4, 16)).reshape(5, 64), rtol=1e-6)
    assert np.array_equal(arrays.l2_norm(x), arrays.l2_norm(x, eps=1e-6))
    assert np.array_equal(arrays.l2_norm(x, clamped=True), arrays.l2_norm(x, None, 0.0))
    out = x.copy()
    assert arrays.l2_norm(out, w, 0.3, out=out) is out and np.array_equal(out, arrays.l2_norm(x, w, 0.3))
    assert np.array_equal(arrays.rms_norm(x, w, cast_order="before_weight"), arrays.rms_norm(x, w, cast_before_weight=True))
    for dtype in (np.float16, "float16", np.dtype("float16"), ml_dtypes.bfloat16):
        found = arrays.rms_norm(x, w, 1e-6, out_dtype=dtype)
        assert found.dtype == np.dtype(dtype)
        judge("rms_norm", 1e-6, {"x": x, "weight": w}, {"y": found})
        out = np.empty(x.shape, found.dtype)
        assert arrays.rms_norm(x, w, 1e-6, out=out) is out and np.array_equal(out, found)
    half = x.astype(np.float16)
    assert arrays.layer_norm(half, w, w, out_dtype=np.float32).dtype == np.float32
    assert arrays.l2_norm(half, out_dtype=np.float32).dtype == np.float32 and arrays.l2_norm(half, out_dtype="float16").dtype == np.float16
    assert arrays.rms_norm_gated(half, x, w, out_dtype=np.float32).dtype == np.float32


def test_the_library_of_x_makes_a_y_of_another_dtype():
    torch = framework("torch")
    x = torch.from_numpy(_random(2, 8))
    for dtype in (torch.bfloat16, "bfloat16"):
        assert arrays.rms_norm(x, None, 1e-6, out_dtype=dtype).dtype == torch.bfloat16


def test_norms_that_are_added_to_a_residual():
    x, r, w, b = _random(5, 64, dtype=np.float16), _random(5, 64, seed=1), _random(64, seed=2), _random(64, seed=3)
    eps, offset = 0.25, -0.75
    h = arrays.rms_norm_add(x, r, w, eps, weight_offset=offset)
    judge_after("rms_norm", eps, {"x": x, "residual": r, "weight": w}, {"h": h}, offset)
    judge_after("layer_norm", eps, {"x": x, "residual": r, "weight": w, "bias": b}, {"h": arrays.layer_norm_add(x, r, w, b, eps)})
    y, again = arrays.rms_norm_add_rms_norm(x, r, w, b, eps, weight_offset=offset)
    judge_after("rms_norm", eps, {"x": x, "residual": r, "weight": w, "next_weight": b}, {"y": y, "h": again}, offset)
    assert np.array_equal(h, again) and (y.dtype, h.dtype) == (np.float16, np.float32)
    for function, args in ((arrays.rms_norm_add, (w, eps)), (arrays.layer_norm_add, (w, b, eps))):
        expected, before, residual = function(x, r, *args), x.copy(), r.copy()
        out = np.full_like(r, np.nan)
        assert function(x, residual, *args, out=out) is out and np.array_equal(residual, r)
        assert function(x, residual, *args, out=residual) is residual
        assert np.array_equal(out, expected) and np.array_equal(residual, expected) and np.array_equal(x, before)
    residual, out = r.copy(), np.full_like(x, np.nan)
    found = arrays.rms_norm_add_rms_norm(x, residual, w, b, eps, weight_offset=offset, out=(out, residual))
    assert found[0] is out and found[1] is residual and np.array_equal(out, y) and np.array_equal(residual, h)
    twice = (arrays.rms_norm(x, None, 1e-6).astype(np.float32) * w + r).astype(np.float32)
    np.testing.assert_allclose(arrays.rms_norm_add(x, r, w, 1e-6, cast_before_weight=True), twice, rtol=2.0**-22)
    assert (arrays.rms_norm_add(x, r, w, 1e-6) != twice).mean() > 0.5


def test_functions_give_new_arrays():
    x, r, w, b = _random(5, 64), _random(5, 64, seed=1), _random(64, seed=2), _random(64, seed=3)
    judge("rms_norm", 1e-6, {"x": x, "weight": w}, {"y": arrays.rms_norm(x, w, 1e-6)})
    judge("rms_norm", 1e-6, {"x": x, "weight": w}, {"y": arrays.rms_norm(x, w, 1e-6, weight_offset=1.0)}, 1.0)
    judge("layer_norm", 1e-6, {"x": x, "weight": w, "bias": b}, {"y": arrays.layer_norm(x, w, b, 1e-6)})
    y, h = arrays.add_rms_norm(x, r, w, 1e-6)
    judge("rms_norm", 1e-6, {"x": x, "residual": r, "weight": w}, {"y": y, "h": h})
    y, h = arrays.add_layer_norm(x, r, w, b, 1e-6)
    judge("layer_norm", 1e-6, {"x": x, "residual": r, "weight": w, "bias": b}, {"y": y, "h": h})
    out = np.empty_like(x)
    assert arrays.rms_norm(x, w, 1e-6, out=out) is out


def test_every_option_reaches_the_kernels():
    """The values are so far from the defaults that a lost option leaves the bounds."""
    x, r, dy = (_random(5, 64, seed=seed) for seed in range(3))
    w, b = _random(64, seed=3), _random(64, seed=4)
    inputs, eps, offset = {"x": x, "residual": r, "weight": w, "bias": b, "dy": dy}, 0.25, -0.75

    def some(*names):
        return {name: inputs[name] for name in names}

    judge("rms_norm", eps, some("x", "weight"), {"y": arrays.rms_norm(x, w, eps, weight_offset=offset)}, offset)
    judge("layer_norm", eps, some("x", "weight", "bias"), {"y": arrays.layer_norm(x, w, b, eps)})
    y, h = arrays.add_rms_norm(x, r, w, eps, weight_offset=offset)
    judge("rms_norm", eps, some("x", "residual", "weight"), {"y": y, "h": h}, offset)
    y, h = arrays.add_layer_norm(x, r, w, b, eps)
    judge("layer_norm", eps, some("x", "residual", "weight", "bias"), {"y": y, "h": h})
    y, mean, rstd, dresidual_out = np.empty_like(x), np.empty(5, np.float32), np.empty(5, np.float32), _random(5, 64, seed=5)
    arrays.forward("layer_norm", eps, x=x, residual=r, weight=w, bias=b, y=y, residual_out=h, mean=mean, rstd=rstd, weight_offset=offset)
    got = {"dx": np.empty_like(x), "dweight": np.empty_like(w), "dbias": np.empty_like(w), "dresidual": np.empty_like(x)}
    arrays.backward("layer_norm", dy=dy, x=h, weight=w, mean=mean, rstd=rstd, dresidual_out=dresidual_out, weight_offset=offset, **got)
    inputs["dresidual_out"] = dresidual_out
    judge("layer_norm", eps, inputs, {"y": y, "h": h, "mean": mean, "rstd": rstd, **got}, offset)


def test_the_address_of_a_stream_is_handed_on(monkeypatch):
    """PyTorch's default stream has the address 0, which means no stream."""
    given = []
    monkeypatch.setattr(arrays, "_native", types.SimpleNamespace(run_arrays=lambda *args: given.append(args[-1])))
    for stream in (None, 0, 7, np.int64(9)):
        arrays.rms_norm(_random(2, 8), stream=stream)
    assert given == [None, None, 7, 9]


@pytest.mark.parametrize("function", [arrays.rms_norm, arrays.add_rms_norm])
def test_the_cast_before_the_weight_rounds_twice(function):
    x, w = _random(50, 64, dtype=np.float16), _random(64, dtype=np.float16, seed=1)
    rows = (x,) if function is arrays.rms_norm else (x, np.zeros_like(x))

    def y_of(*args, **options):
        found = function(*rows, *args, **options)
        return found[0] if isinstance(found, tuple) else found

    twice = (y_of(None, 1e-6).astype(np.float32) * w.astype(np.float32)).astype(np.float16)
    assert np.array_equal(y_of(w, 1e-6, cast_before_weight=True), twice)
    assert not np.array_equal(y_of(w, 1e-6), twice)


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, w = (_random(*shape).astype(ml_dtypes.bfloat16) for shape in ((7, 100), (100,)))
    y = arrays.rms_norm(x, w, 1e-6)
    assert y.dtype == ml_dtypes.bfloat16
    judge("rms_norm", 1e-6, {"x": x, "weight": w}, {"y": y})


def test_rows_that_are_apart_are_read_where_they_are():
    qkv, w = _random(6, 3 * 4 * 64), _random(64)
    keys = qkv.reshape(6, 3, 4, 64)[:, 1]
    out = np.full((6, 3, 4, 64), 7.0, np.float32)
    got = arrays.rms_norm(keys, w, 1e-6, out=out[:, 1])
    assert np.array_equal(got, arrays.rms_norm(np.ascontiguousarray(keys), w, 1e-6))
    assert (out[:, (0, 2)] == 7.0).all()


def test_a_part_of_a_batch_has_the_bits_of_the_whole():
    x, w = _random(100, 1000), _random(1000)
    whole = arrays.layer_norm(x, w, w, 1e-6)
    assert all(np.array_equal(whole[k : k + 1], arrays.layer_norm(x[k : k + 1], w, w, 1e-6)) for k in range(100))


_FUNCTIONS = {
    "rms_norm": lambda out: lambda x, r, w: arrays.rms_norm(x, w, 1e-6, out=x if out else None),
    "layer_norm": lambda out: lambda x, r, w: arrays.layer_norm(x, w, w, 1e-6, out=x if out else None),
    "add_rms_norm": lambda out: lambda x, r, w: arrays.add_rms_norm(x, r, w, 1e-6, out=(x, r) if out else None),
    "add_layer_norm": lambda out: lambda x, r, w: arrays.add_layer_norm(x, r, w, w, 1e-6, out=(x, r) if out else None),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("x_dtype, r_dtype", [("float32", "float32"), ("float16", "float16"), ("float16", "float32")])
def test_in_place_has_the_bits_of_a_new_array(name, x_dtype, r_dtype):
    """Dense arrays, slices of larger arrays, and one row: the output is the input, and memory
    around it does not change."""
    for whole, part in [((5, 64), np.s_[:]), ((6, 3, 4, 64), np.s_[:, 1]), ((3, 64), np.s_[1]), ((0, 64), np.s_[:]), ((2, 1), np.s_[:])]:
        buffers = _random(*whole, dtype=x_dtype), _random(*whole, dtype=r_dtype, seed=1)
        before, (x, r) = [buffer.copy() for buffer in buffers], [buffer[part] for buffer in buffers]
        w = _random(whole[-1], seed=2)
        expected = _FUNCTIONS[name](False)(x, r, w)
        assert all(np.array_equal(*pair) for pair in zip(buffers, before))
        got = _FUNCTIONS[name](True)(x, r, w)
        adds = name.startswith("add_")
        assert got is x if not adds else got[0] is x and got[1] is r
        for new, buffer, old in zip(expected if adds else (expected,), buffers, before):
            old[part] = new
            assert np.array_equal(buffer, old)
        assert adds or np.array_equal(buffers[1], before[1])


def test_in_place_is_by_memory_and_not_by_object():
    x, w = _random(4, 16), _random(16, seed=1)
    expected = arrays.layer_norm(x, w, None, 1e-6)
    mean, rstd = np.empty(4, np.float32), np.empty(4, np.float32)
    arrays.forward("layer_norm", 1e-6, x=x, y=x[:], weight=w, mean=mean, rstd=rstd)
    assert np.array_equal(x, expected) and np.isfinite(mean).all() and (rstd > 0).all()


def test_bfloat16_in_place():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, r, w = (_random(*shape).astype(ml_dtypes.bfloat16) for shape in ((7, 100), (7, 100), (100,)))
    expected = arrays.add_rms_norm(x, r, w, 1e-6)
    arrays.add_rms_norm(x, r, w, 1e-6, out=(x, r))
    assert np.array_equal(x, expected[0]) and np.array_equal(r, expected[1])


def test_outputs_of_yours_for_norms_that_add():
    x, r, w = _random(4, 16), _random(4, 16, seed=1), _random(16, seed=2)
    out = np.full_like(x, np.nan), np.full_like(x, np.nan)
    for call, rest in [(arrays.add_rms_norm, (w,)), (arrays.add_layer_norm, (w, w))]:
        got, expected = call(x, r, *rest, 1e-6, out=out), call(x, r, *rest, 1e-6)
        assert got[0] is out[0] and got[1] is out[1] and all(np.array_equal(*pair) for pair in zip(got, expected))


def _rms(x, w, **options):
    return arrays.rms_norm(x, w, 1e-6, **options)


def _forward(x, norm="rms_norm", **tensors):
    return arrays.forward(norm, 1e-6, x=x, **{"y": np.empty_like(x)} | tensors)


def _backward(dy, w, norm="rms_norm", **tensors):
    given = {"dy": dy, "x": dy, "rstd": w[:2].copy(), "dx": np.empty_like(dy)}
    return arrays.backward(norm, **given | tensors)


def _misaligned(x):
    return np.ndarray(x.shape, x.dtype, b"+" + x.tobytes(), 1)


# The mistakes by exception. Messages name the argument, the rule, the value found and the next
# step.
_MISTAKES = {
    TypeError: [
        (lambda x, w: arrays.rms_norm(x.tolist(), w), "x must be an array that supports DLPack, got list: pass .*asarray"),
        (lambda x, w: _rms(3.0, w), "x must be an array .* got float"),
        (lambda x, w: _rms(None, w), "x must be an array .* got NoneType"),
        (lambda x, w: _rms(memoryview(x), w), "x must be an array .* got memoryview"),
        (lambda x, w: _rms(x, w.tolist()), "weight must be an array .* got list"),
        (lambda x, w: _rms(x, w, out=x.tolist()), "y must be an array .* got list"),
        (lambda x, w: arrays.add_rms_norm(x, x.tolist()), "residual must be an array .* got list"),
        (lambda x, w: arrays.add_rms_norm(x, x, out=np.empty_like(x)), "out must be a pair of arrays, .* got ndarray"),
        *[(lambda x, w, out=out: arrays.add_layer_norm(x, x, out=out(x)), "out must be a pair of arrays")
          for out in [lambda x: (None, x), lambda x: (x, None), lambda x: (x,), lambda x: (x, x, x), lambda x: ()]],
        *[(lambda x, w, dtype=dtype: _rms(x.astype(dtype), w), f"x must be float32, float16 or bfloat16, got {name}: convert it")
          for dtype, name in [("f8", "float64"), ("i4", "int32"), ("i2", "int16"), ("c8", "complex64"), ("?", "bool"), ("O", "object"),
                              (">f4", ">f4"), ("U3", "<U3")]],
        (lambda x, w: _rms(x, w.astype("f8")), "weight must be float32, float16 or bfloat16, got float64"),
        (lambda x, w: _rms(x, w.astype("f2")), "weight must be float32, as x is, got float16: convert it"),
        (lambda x, w: arrays.layer_norm(x, w, w.astype("f2")), "bias must be float32, got float16: convert it"),
        (lambda x, w: arrays.add_rms_norm(x, x.astype("f2"), w), "residual must be float32, as x is, got float16"),
        (lambda x, w: arrays.add_rms_norm(x, x.copy(), w, out=(x.astype("f2"), x.copy())),
         "y must be float32, as x is beside a residual, .* got float16: convert it"),
        (lambda x, w: arrays.rms_norm_gated(x, x.copy(), norm_before_gate=False, out=x.astype("f2")),
         "y must be float32, as x is beside .* got float16: convert it"),
        (lambda x, w: _rms(x, w, cast_order="weight_first", out=x.astype("f2")), "y must be float32, as x is beside .* weight_first, got float16"),
        (lambda x, w: _forward(x.astype("f2"), weight=w.astype("f2"), y=x.copy()), "weight must be float32, as y is, got float16"),
        (lambda x, w: arrays.rms_norm_gated(x.astype("f2"), x.astype("f2"), out_dtype="float32"), "gate must be float32, got float16"),
        (lambda x, w: _backward(x, w, dx=x.astype("f2")), "dx must be float32, got float16"),
        (lambda x, w: _backward(x, w, dx=x.astype("f2"), dresidual=x.copy()), "dx must be float32, as dy is beside a residual, .* got float16"),
        (lambda x, w: _backward(x, w, "l2_norm_clamped"), "eps is missing: the gradient of a clamped L2 norm needs the eps"),
        (lambda x, w: _rms(x, w, out_dtype=np.int32), "out_dtype must be float32, float16 or bfloat16, got .*int32"),
        (lambda x, w: _rms(x, w, out_dtype=float), "out_dtype must be float32, float16 or bfloat16, got .*float"),
        (lambda x, w: _rms(x, w, out_dtype="float16", out=x.copy()), "out_dtype must be the dtype of out, float32, got float16: leave it out"),
        (lambda x, w: arrays.rms_norm_gated(x, x.copy(), norm_before_gate=False, out_dtype="float16"), "out_dtype: expected no gate before the norm"),
        (lambda x, w: _rms(x, w, out_dtype="float16", cast_order="weight_first"), "out_dtype: expected none with weight_first"),
        (lambda x, w: arrays.l2_norm(x, clamped=1), "clamped: expected a bool, got int"),
        (lambda x, w: _forward(x, "l2_norm", residual_after=True, residual=x, residual_out=np.empty_like(x)), "l2_norm: expected no residual after"),
        (lambda x, w: _forward(x, cast_order="rstd_first", residual_after=True, residual=x, residual_out=np.empty_like(x)),
         "cast_order: expected no residual after"),
        (lambda x, w: _forward(x, weight=w, cast_order="weight_first", residual=x), "cast_order: expected no residual with weight_first"),
        (lambda x, w: _forward(x, rstd=np.empty(2, "f2")), "rstd must be float32, got float16"),
        (lambda x, w: _forward(x, "layer_norm", mean=np.empty(2)), "mean must be .* got float64"),
        (lambda x, w: _backward(x, w, x=x.astype("f2")), "x must be float32, as dy is, got float16"),
        (lambda x, w: _backward(x, w, weight=w, dweight=w.astype("f2")), "dweight must be float32, got float16"),
        (lambda x, w: arrays.rms_norm(x, w, "1e-6"), "eps must be a number, got '1e-6'"),
        (lambda x, w: _rms(x, w, weight_offset=None), "weight_offset must be a number, got None"),
        (lambda x, w: _rms(x, w, cast_before_weight="yes"), "cast_before_weight must be True or False, got 'yes'"),
        (lambda x, w: _rms(x, w, stream="0"), "stream must be the address of a CUDA stream, got '0'"),
        (lambda x, w: _rms(x, w, stream=-1), "stream must be the address of a CUDA stream, got -1"),
        (lambda x, w: _rms(np.ma.array(x, mask=x > 0), w), "x is a masked array, and its mask would be lost: pass x.filled"),
        (lambda x, w: _rms(x, np.ma.array(w)), "weight is a masked array"),
        (lambda x, w: _rms(x, w, out=np.ma.array(x)), "y is a masked array"),
        (lambda x, w: _forward(x, y=None), "y is missing"),
        (lambda x, w: _backward(x, w, "layer_norm"), "mean is missing"),
        (lambda x, w: _forward(x, mean=np.empty(2, "f4")), "mean must not be given: rms norm"),
        (lambda x, w: _forward(x, residual_out=np.empty_like(x)), "residual_out must not be given: there is no residual"),
        (lambda x, w: arrays.rms_norm_add(x, None, w), "residual must be an array .* got NoneType"),
        (lambda x, w: arrays.rms_norm_add_rms_norm(x, x, out=x), "out must be a pair of arrays"),
        (lambda x, w: _forward(x, residual_after=True, residual=x), "residual_out is missing: every call with residual_after needs it"),
        (lambda x, w: _forward(x, residual_after=True, residual_out=np.empty_like(x)), "residual is missing: every call with residual_after"),
        (lambda x, w: _forward(x, next_weight=w), "next_weight must not be given: only a call with residual_after and a y has a next norm"),
        (lambda x, w: _forward(x, y=None, residual=x, residual_out=np.empty_like(x), residual_after=True, next_rstd=w[:2]),
         "next_rstd must not be given: only a call with residual_after and a y"),
        (lambda x, w: _forward(x, residual=x, residual_out=np.empty_like(x), residual_after=True, next_mean=w[:2]),
         "next_mean must not be given: rms norm"),
        (lambda x, w: arrays.rms_norm_add_rms_norm(x, x, w, w.astype("f2")), "next_weight must be float32, got float16"),
        (lambda x, w: arrays.rms_norm_gated(x, x.tolist()), "gate must be an array .* got list"),
        (lambda x, w: arrays.rms_norm_gated(x, x.astype("f2")), "gate must be float32, got float16: convert it"),
        (lambda x, w: arrays.rms_norm_gated(x, x.copy(), groups=2.0), "groups: expected an int, got float"),
        (lambda x, w: arrays.rms_norm_gated(x, x.copy(), groups=True), "groups: expected an int, got bool"),
        (lambda x, w: _forward(x, gate=x.copy(), gate_before=1), "gate_before: expected a bool, got int"),
        (lambda x, w: _forward(x, gate=x.copy(), gate_before=True, residual=x, residual_out=np.empty_like(x)),
         "gate: expected no residual with a gate before the norm, got one"),
        (lambda x, w: _forward(x, gate=x.copy(), residual_after=True, residual=x, residual_out=np.empty_like(x)),
         "gate: expected no residual after the norm, got one"),
        (lambda x, w: _forward(x, groups=2, residual_after=True, residual=x, residual_out=np.empty_like(x)),
         "groups: expected no residual after the norm, got one"),
        (lambda x, w: _backward(x, w, dgate=np.empty_like(x)), "dgate must not be given: the norm has no gate"),
        (lambda x, w: _backward(x, w, bias=w), "bias must not be given: only a gate after the norm needs it"),
        (lambda x, w: _backward(x, w, bias=w, gate=x.copy(), gate_before=True), "bias must not be given: only a gate after the norm needs it"),
    ],
    ValueError: [
        (lambda x, w: arrays.rms_norm(x, w, -1.0), "eps must be finite and not negative, got -1: with a negative eps"),
        (lambda x, w: arrays.rms_norm(x, w, float("nan")), "eps must be finite and not negative, got NaN"),
        (lambda x, w: arrays.layer_norm(x, w, None, float("inf")), "eps must be finite and not negative, got inf"),
        (lambda x, w: _rms(x, w, weight_offset=float("nan")), "weight_offset must be finite, got NaN"),
        (lambda x, w: _forward(x, "norm"), "norm must be one of rms_norm, layer_norm, l2_norm, l2_norm_clamped, got .norm."),
        (lambda x, w: _forward(x, 3), "norm must be one of rms_norm, layer_norm, l2_norm, l2_norm_clamped, got 3"),
        (lambda x, w: _rms(x, w, cast_order="first"),
         "cast_order: expected one of at_store, before_weight, rstd_first, weight_first, got 'first'"),
        (lambda x, w: _rms(x, None, cast_order="weight_first"), 'weight: expected an array with cast_order="weight_first"'),
        (lambda x, w: arrays.l2_norm(x, w, 1e-30, clamped=True), r"eps: expected 0 or a number from 2\*\*-63 to 2\*\*63"),
        (lambda x, w: _rms(x, w, out=x.view(np.float16)[:, :8]), "y shares memory with x"),
        (lambda x, w: _rms(np.array(3.0, "f4"), None), "x must have at least one dimension, got a scalar"),
        (lambda x, w: _rms(x[:, :0], None), "x: the last dimension must have at least 1 element, got 0"),
        (lambda x, w: _rms(x, w[:-1]), r"weight: expected the shape \(8,\), got \(7,\)"),
        (lambda x, w: _rms(x, w[:0]), r"weight: expected the shape \(8,\), got \(0,\)"),
        (lambda x, w: _rms(x, w.reshape(1, 8)), r"weight: expected the shape \(8,\), got \(1, 8\)"),
        (lambda x, w: _rms(x, w.reshape(2, 4)), r"weight: expected the shape \(8,\), got \(2, 4\)"),
        (lambda x, w: arrays.layer_norm(x, w, w[:3]), r"bias: expected the shape \(8,\), got \(3,\)"),
        (lambda x, w: _rms(x, w, out=np.empty((2, 9), "f4")), r"y: expected the shape \(2, 8\), got \(2, 9\)"),
        (lambda x, w: _rms(x, w, out=np.empty((16,), "f4")), r"y: expected the shape \(2, 8\), got \(16,\)"),
        (lambda x, w: _rms(x.reshape(2, 2, 4), None, out=np.empty((4, 4), "f4")), r"y: expected the shape \(2, 2, 4\), got \(4, 4\)"),
        (lambda x, w: arrays.add_rms_norm(x, x[:1].copy(), w), r"residual: expected the shape \(2, 8\), got \(1, 8\)"),
        (lambda x, w: _forward(x, rstd=np.empty((2, 1), "f4")), r"rstd: expected the shape \(2,\), got \(2, 1\)"),
        (lambda x, w: _backward(x, w, x=x[:1]), r"x: expected the shape \(2, 8\), got \(1, 8\), since dy"),
        (lambda x, w: _backward(x, w, weight=w[:4]), r"weight: expected the shape \(8,\), got \(4,\)"),
        *[(lambda x, w, change=change: _rms(change(x), None), "x: each row's elements .* pass a copy, such as numpy.ascontiguousarray")
          for change in [np.asfortranarray, lambda x: x[:, ::-1], lambda x: x[:, ::2], lambda x: x[::-1],
                         lambda x: np.broadcast_to(x[0], (2, 8)), lambda x: np.zeros((2, 2, 2, 8), "f4")[:, ::2, :, :].swapaxes(0, 2)[..., ::2]]],
        (lambda x, w: _rms(x, np.repeat(w, 2)[::2]), "weight: each row's elements must be contiguous.* pass a copy"),
        (lambda x, w: _rms(x, w, out=np.asfortranarray(x)), "y: each row's elements must be contiguous.* pass a copy"),
        (lambda x, w: _forward(x, rstd=np.empty(4, "f4")[::2]), "rstd: .*contiguous.* pass a (contiguous )?copy"),
        (lambda x, w: _rms(_misaligned(x), w), "x: .*multiple of its element's size, got 0x.*: pass a copy"),
        (lambda x, w: _rms(x, _misaligned(w)), "weight: .*multiple of its element's size, got 0x.*: pass a copy"),
        (lambda x, w: _rms(x[:1], w, out=x.reshape(-1)[4:12].reshape(1, 8)), "y shares memory with x: pass a separate array"),
        (lambda x, w: _rms(x, x[0], out=x), "x shares memory with weight"),
        (lambda x, w: _rms(x, w, out=np.lib.stride_tricks.as_strided(x, (2, 8), (4 * 9, 4))), "y shares memory with x"),
        (lambda x, w: _backward(x, w, dx=x), "dx shares memory with (x|dy): pass a separate array for dx$"),
        (lambda x, w: _backward(x, w, rstd=w[:2], dweight=w), "dweight shares memory with rstd"),
        (lambda x, w: _forward(x, residual=x, residual_out=x, y=np.empty_like(x)), "residual_out: in place both .* y is not x: pass both"),
        (lambda x, w: _forward(x, residual=x.copy(), residual_out=x.copy(), y=x), "residual_out: in place both .* residual_out is not: pass both"),
        (lambda x, w: _forward(x, residual=x.copy(), y=x), "residual_out: in place both .* residual_out is not: pass both"),
        (lambda x, w: arrays.add_rms_norm(x, (r := x.copy()), out=(r, x)), "shares memory with"),
        (lambda x, w: arrays.rms_norm_add(x, x.copy(), out=x), "residual_out shares memory with x"),
        (lambda x, w: arrays.rms_norm_add_rms_norm(x, (r := x.copy()), out=(x, r)), "y is x; with residual_after, x is not overwritten"),
        (lambda x, w: arrays.rms_norm_add_rms_norm(x, x.copy(), w, w[:4]), r"next_weight: expected the shape \(8,\), got \(4,\)"),
        (lambda x, w: arrays.rms_norm_gated(x, x[:1].copy()), r"gate: expected the shape \(2, 8\), got \(1, 8\)"),
        (lambda x, w: arrays.rms_norm_gated(x, x.copy(), activation="swish"), "activation: expected one of silu, sigmoid, got 'swish'"),
        (lambda x, w: arrays.rms_norm_gated(x, x.copy(), activation=None), "activation: expected one of silu, sigmoid, got None"),
        (lambda x, w: arrays.rms_norm_gated(x, x.copy(), groups=0), "groups: expected at least 1, got 0"),
        (lambda x, w: arrays.rms_norm_gated(x, groups=3), "groups: their number must divide the 8 columns of a row, got 3"),
        (lambda x, w: arrays.rms_norm_gated(x, groups=16), "groups: their number must divide the 8 columns of a row, got 16"),
        (lambda x, w: _forward(x, groups=2, rstd=np.empty(2, "f4")), r"rstd: expected the shape \(2, 2\), got \(2,\)"),
        (lambda x, w: arrays.rms_norm_gated(x, (z := x.copy()), out=z), "y shares memory with gate"),
        (lambda x, w: _backward(x, w, gate=(z := x.copy()), dgate=z), "dgate shares memory with gate"),
    ],
}


@pytest.mark.parametrize("error, call, text", [(error, *case) for error, cases in _MISTAKES.items() for case in cases])
def test_errors_say_what_was_expected_and_write_nothing(error, call, text):
    x, w = _random(2, 8), _random(8)
    before = x.copy(), w.copy()
    with pytest.raises(error, match=text) as raised:
        call(x, w)
    assert raised.type is error
    # Messages must not have terms of Rust, of DLPack's tables or of this library's internals.
    assert not re.search(r"::|DLPack's type|stride lead|in_place|Some\(|None,", str(raised.value))
    assert np.array_equal(x, before[0]) and np.array_equal(w, before[1])


def test_read_only_outputs_are_refused():
    x, out = _random(2, 8), np.empty((2, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises(BufferError, match="y is an output, and the array is read-only"):
        arrays.rms_norm(x, None, 1e-6, out=out)
    with pytest.raises(BufferError, match="residual_out is an output, and the array is read-only"):
        arrays.add_rms_norm(x, out, None, 1e-6, out=(x, out))
    x.flags.writeable = False
    arrays.rms_norm(x, None, 1e-6)
    with pytest.raises(BufferError, match="y is an output, and the array is read-only"):
        arrays.rms_norm(x, None, 1e-6, out=x)


def test_subclasses_of_arrays_give_plain_arrays():
    class Own(np.ndarray):
        pass

    x = _random(2, 8)
    assert np.array_equal(arrays.rms_norm(x.view(Own), None, 1e-6), arrays.rms_norm(x, None, 1e-6))


def test_a_library_without_new_arrays_is_told_of_out():
    class Lender:
        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    x = _random(2, 8)
    with pytest.raises(TypeError, match=f"x is of {__name__}, which has no function `empty`: pass an output array as `out`"):
        arrays.rms_norm(Lender(x), None, 1e-6)
    out = np.empty_like(x)
    arrays.rms_norm(Lender(x), None, 1e-6, out=Lender(out))
    assert np.array_equal(out, arrays.rms_norm(x, None, 1e-6))


def test_new_arrays_are_made_by_the_library_of_x():
    class Own(_Library):
        """A library with `__array_namespace__`, as in the array API standard."""

        def __init__(self, array):
            super().__init__(array)
            self.shape, self.dtype = array.shape, array.dtype

        def __array_namespace__(self):
            return types.SimpleNamespace(empty=lambda shape, dtype: Own(np.empty(shape, dtype)))

    class Older(Own):
        """A library whose functions are in the array's module, as CuPy."""

        __array_namespace__ = property()
        __module__ = "own_library"

    x, residual = _random(2, 8), _random(2, 8, dtype=np.float16)
    expected = arrays.rms_norm(x, None, 1e-6)
    assert np.array_equal(arrays.rms_norm(Own(x), None, 1e-6).kept[0], expected)
    y, h = arrays.add_layer_norm(Own(x), Own(x.copy()), None, None, 1e-6)
    assert type(y) is type(h) is Own
    sys.modules["own_library"] = types.SimpleNamespace(empty=lambda shape, dtype: Older(np.empty(shape, dtype)))
    try:
        assert type(arrays.rms_norm(Older(x), None, 1e-6)) is Older
    finally:
        del sys.modules["own_library"]
    y, h = arrays.add_rms_norm(residual, x, None, 1e-6)
    assert (y.dtype, h.dtype) == (np.float16, np.float32)


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _Loan(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Library:
    """An array whose DLPack export differs from NumPy's: with an offset, without strides, on any
    device."""

    def __init__(self, array, *, device=(1, 0), offset=0, code=2, lanes=1, has_strides=False):
        dims = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides)) if has_strides else None
        self.kept, self.device = (array, dims, strides), device
        self.loan = _Loan(array.ctypes.data - offset, _Device(*device), array.ndim, code, 8 * array.itemsize, lanes, dims, strides, offset)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.loan), b"dltensor", None)


def test_loans_are_read_as_dlpack_says():
    x, out = _random(3, 8), np.full((3, 8), np.nan, np.float32)
    expected = arrays.rms_norm(x, None, 1e-6)
    assert np.array_equal(arrays.rms_norm(_Library(x), None, 1e-6, out=out), expected)
    # The address is 8 bytes before the first element.
    assert np.array_equal(arrays.rms_norm(_Library(x.reshape(-1)[8:].reshape(2, 8), offset=32), None, 1e-6, out=out[1:]), expected[1:])
    wide = _random(3, 20)[:, 4:12]
    expected = arrays.rms_norm(np.ascontiguousarray(wide), None, 1e-6)
    assert np.array_equal(arrays.rms_norm(_Library(wide, has_strides=True), None, 1e-6, out=out), expected)
    for options, text in [({"lanes": 2}, "x must be .* got float32"), ({"code": 0}, "x must be .* got int32"),
                          ({"code": 5}, "x must be .* got complex32"), ({"code": 77}, "x must be .* got another type of 32")]:
        with pytest.raises(TypeError, match=text + ": convert it first"):
            arrays.rms_norm(_Library(x, **options), None, 1e-6, out=out)


def test_who_lends_is_told_the_stream():
    class Told(_Library):
        def __dlpack__(self, **options):
            told.append(options.get("stream"))
            return super().__dlpack__(**options)

    x, out = _random(2, 8), np.empty((2, 8), np.float32)
    for device, stream, expected in (((2, 0), None, 1), ((2, 0), 1234, 1234), ((1, 0), 1234, None)):
        told = []
        # Refused before any kernel is called, so this runs on every machine.
        with pytest.raises(ValueError, match="y must be on the device of x"):
            arrays.rms_norm(Told(x, device=device), None, 1e-6, out=Told(out, device=(device[0], 1)), stream=stream)
        assert told == [expected] * 2


def test_devices_that_do_not_go_together_are_named():
    x, w, out = _random(2, 8), _random(8), np.empty((2, 8), np.float32)
    with pytest.raises(ValueError, match="^weight must be on the device of x, cpu, got cuda:3: copy it there first"):
        arrays.rms_norm(x, _Library(w, device=(2, 3)), 1e-6, out=out)
    with pytest.raises(ValueError, match="^y must be on the device of x, cuda:1, got cuda:0"):
        arrays.rms_norm(_Library(x, device=(2, 1)), None, 1e-6, out=_Library(out, device=(2, 0)))
    with pytest.raises(NotImplementedError, match="^arrays must be on the CPU or on CUDA, got DLPack's device 8: copy them there"):
        arrays.rms_norm(_Library(x, device=(8, 0)), None, 1e-6, out=_Library(out, device=(8, 0)))
    # CUDA's pinned host memory is host memory.
    got = arrays.rms_norm(_Library(x, device=(3, 0)), None, 1e-6, out=_Library(out, device=(3, 0)))
    assert got.kept[0] is out and np.array_equal(out, arrays.rms_norm(x, None, 1e-6))


def test_statistics_lie_side_by_side():
    x, buffer = _random(2, 3, 8), np.full((2, 5), 7.0, np.float32)
    with pytest.raises(ValueError, match="^rstd: its elements must be contiguous: pass a contiguous copy"):
        _forward(x, rstd=buffer[:, :3])
    assert (buffer == 7.0).all()


def test_empty_batches():
    x, h = np.empty((0, 8), np.float32), np.empty((0, 8), np.float32)
    assert arrays.add_rms_norm(x, h, _random(8), 1e-6)[0].shape == (0, 8)
    torch = framework("torch")
    # All tensors without elements have the address 0, but do not overlap.
    x, y, h = (torch.empty(0, 8) for _ in range(3))
    arrays.forward("rms_norm", 1e-6, x=x, y=y, residual=h)
    assert arrays.rms_norm(x, None, 1e-6, out=x) is x


def test_a_bias_alone_says_the_dtype_of_the_parameters():
    x, bias = _random(4, 16, dtype=np.float16), _random(16, seed=1)
    judge("layer_norm", 1e-6, {"x": x, "bias": bias}, {"y": arrays.layer_norm(x, None, bias, 1e-6)})


def test_tensors_whose_gradient_or_sign_would_be_lost_are_refused():
    torch = framework("torch")
    x, w = torch.randn(2, 8), torch.ones(8)
    grad, cases = "requires grad, and its gradient would be lost: pass {0}.detach\\(\\), or call rmsnorm.torch", []
    for tensor, lost in [(x.clone().requires_grad_(), grad), (torch._neg_view(x), "is a negative view.*resolve_neg")]:
        cases += [("x", lost, (tensor, w), {}), ("y", lost, (x, w), {"out": tensor})]
    cases += [("weight", grad, (x, torch.nn.Parameter(w)), {})]
    for name, lost, args, options in cases:
        with pytest.raises(ValueError, match=f"^{name} " + lost.format(name)):
            arrays.rms_norm(*args, 1e-6, **options)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(ValueError, match="^x " + grad.format("x")):
            arrays.rms_norm(torch.autograd.forward_ad.make_dual(x, x), w, 1e-6)
    with pytest.raises(ValueError, match="^residual " + grad.format("residual")):
        arrays.add_rms_norm(x, x.clone().requires_grad_(), w)
    y = arrays.rms_norm(x, w, 1e-6)
    assert type(y) is torch.Tensor and torch.equal(y, torch.from_numpy(arrays.rms_norm(x.numpy(), w.numpy(), 1e-6)))


def test_tensors_without_plain_memory_are_refused():
    torch = framework("torch")
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    for tensor, kind in [(torch.randn(2, 8).to_sparse(), "sparse_coo"), (torch.empty(2, 8, device="meta"), "meta"), (nested, "nested")]:
        with pytest.raises(TypeError, match=f"^x must be a dense tensor with data, got one that is {kind}: convert it first"):
            arrays.rms_norm(tensor, None, 1e-6)
    with pytest.raises(TypeError, match="^weight must be a dense tensor with data, got one that is meta"):
        arrays.rms_norm(torch.randn(2, 8), torch.ones(8, device="meta"), 1e-6)


def test_arrays_of_jax_are_read_and_not_written():
    jax = framework("jax")
    import jax.numpy as jnp

    x, of = jnp.ones((2, 8)), np if jax.default_backend() == "cpu" else framework("cupy")
    for call in (lambda: arrays.rms_norm(x, None, 1e-6), lambda: arrays.rms_norm(_random(2, 8), None, 1e-6, out=x)):
        with pytest.raises(BufferError, match="^y is an output, and JAX arrays are read-only: .* rmsnorm.jax"):
            call()
    assert (arrays.rms_norm(x, None, 0.0, out=of.empty((2, 8), np.float32)) == 1.0).all()


def test_nothing_leaks():
    x, w, out = _random(16, 64), _random(64), np.empty((16, 64), np.float32)
    before = sys.getrefcount(x), sys.getrefcount(w), sys.getrefcount(out)
    for _ in range(100):
        arrays.rms_norm(x, w, 1e-6, out=out)
        with pytest.raises(ValueError):
            arrays.rms_norm(x, w[:-1], 1e-6, out=out)
    assert (sys.getrefcount(x), sys.getrefcount(w), sys.getrefcount(out)) == before


def test_other_threads_run_meanwhile():
    """A call releases the interpreter's lock, so another Python thread makes progress meanwhile."""
    x, w, out = _random(20000, 1024), _random(1024), np.empty((20000, 1024), np.float32)
    is_done, moments = threading.Event(), []

    def note():
        while not is_done.is_set():
            moments.append(time.perf_counter())

    def is_noted(start, end):
        tenth = (end - start) / 10
        return bisect.bisect(moments, start + tenth) < bisect.bisect(moments, end - tenth)

    def call():
        start = time.perf_counter()
        arrays.rms_norm(x, w, 1e-6, out=out)
        return start, time.perf_counter()

    thread = threading.Thread(target=note)
    thread.start()
    try:
        # If the lock is not released, no call has such a moment. If it is, a busy machine may still
        # miss most of them.
        assert any(is_noted(*call()) for _ in range(300))
    finally:
        is_done.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_wait_for_threads_that_are_not_there():
    code = """if True:
        import multiprocessing, numpy as np
        from rmsnorm import arrays
        x, w = np.ones((4096, 1024), np.float32), np.ones(1024, np.float32)
        y = arrays.rms_norm(x, w, 1e-6)
        def child(queue):
            queue.put(bool((arrays.rms_norm(x, w, 1e-6) == y).all()))
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        process = fork.Process(target=child, args=(queue,))
        process.start()
        assert queue.get(timeout=60)
        process.join()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
