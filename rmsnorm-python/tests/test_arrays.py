"""NumPy's arrays, and others' by DLPack."""

import bisect
import importlib.metadata
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from judge import judge

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


@pytest.mark.parametrize("call, error, text", [
    (lambda x, w: arrays.rms_norm(x, w), TypeError, "eps is missing"),
    (lambda x, w: arrays.rms_norm(x, w, -1.0), ValueError, "eps must be finite and not negative"),
    (lambda x, w: arrays.rms_norm(x, w[:-1], 1e-6), ValueError, "weight: expected 8 elements, got 7"),
    (lambda x, w: arrays.rms_norm(x.astype(np.float64), w, 1e-6), NotImplementedError, "x is float32, float16 or bfloat16"),
    (lambda x, w: arrays.rms_norm(x, w.astype(np.float16), 1e-6), NotImplementedError, "weight and bias must be f32"),
    (lambda x, w: arrays.rms_norm(x[:, ::-1], w, 1e-6), ValueError, "no two strides lead from row to row"),
    (lambda x, w: arrays.rms_norm(x, w, 1e-6, out=np.empty((2, 9), np.float32)), ValueError, "y: expected 2 rows of 8 elements"),
    (lambda x, w: arrays.rms_norm(x, w, 1e-6, out=x), ValueError, "y overlaps x"),
    (lambda x, w: arrays.rms_norm(x, w, 1e-6, out=np.empty((2, 8), np.float16)), ValueError, "y: expected elements of f32"),
    (lambda x, w: arrays.forward("norm", 1e-6, x=x, y=x), ValueError, "rms_norm or layer_norm"),
    (lambda x, w: arrays.backward("layer_norm", dy=x, x=x, rstd=w[:2], dx=x.copy()), ValueError, "mean is missing"),
])
def test_errors_say_what_was_expected_and_write_nothing(call, error, text):
    x, w = _random(2, 8), _random(8)
    before = x.copy()
    with pytest.raises(error, match=text):
        call(x, w)
    assert np.array_equal(x, before)


def test_read_only_outputs_are_refused():
    x, out = _random(2, 8), np.empty((2, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises((BufferError, ValueError), match="read-?only"):
        arrays.rms_norm(x, None, 1e-6, out=out)
    x.flags.writeable = False
    arrays.rms_norm(x, None, 1e-6)


def test_nothing_leaks():
    x, w, out = _random(16, 64), _random(64), np.empty((16, 64), np.float32)
    before = sys.getrefcount(x), sys.getrefcount(w), sys.getrefcount(out)
    for _ in range(100):
        arrays.rms_norm(x, w, 1e-6, out=out)
        with pytest.raises(ValueError):
            arrays.rms_norm(x, w[:-1], 1e-6, out=out)
    assert (sys.getrefcount(x), sys.getrefcount(w), sys.getrefcount(out)) == before


def test_other_threads_run_meanwhile():
    """The interpreter's lock is let go: while a call runs another thread of Python gets on."""
    x, w, out = _random(20000, 1024), _random(1024), np.empty((20000, 1024), np.float32)
    is_done, moments = threading.Event(), []

    def note():
        while not is_done.is_set():
            moments.append(time.perf_counter())

    thread, spans = threading.Thread(target=note), []
    thread.start()
    try:
        for _ in range(20):
            start = time.perf_counter()
            arrays.rms_norm(x, w, 1e-6, out=out)
            spans.append((start, time.perf_counter()))
    finally:
        is_done.set()
        thread.join()

    def is_noted(start, end):
        tenth = (end - start) / 10
        return bisect.bisect(moments, start + tenth) < bisect.bisect(moments, end - tenth)

    # Without the lock's release there is no such moment within any call. With it a busy machine may pass over some.
    assert sum(is_noted(*span) for span in spans) >= 5


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
