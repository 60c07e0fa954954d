"""Times the first call of each kernel in a process, with an empty cache: host time until the call returns.

    python rmsnorm-python/benches/torch_first_calls.py --device cuda [--rows 8192] [--out FILE]

The last line has the number of kernels that NVRTC compiled, because the package lacks them. With
RMSNORM_CACHE_DIR= (set and empty) NVRTC compiles all of them.
"""

import os
import statistics
import tempfile
import time

import measure
import torch
import torch.nn.functional as F

import rmsnorm
import rmsnorm.torch as rt

# Lengths of heads and hidden sizes of today's models.
COLS, EPS = (64, 128, 256, 512, 1024, 1536, 2048, 2560, 2880, 3072, 3584, 3840, 4096, 5120, 6144, 7168, 8192), 1e-6


def timed(call):
    """(result, microseconds) of one call."""
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e6


def first_calls(rows, cols, device):
    """{name: microseconds} of the calls of one row length. Results are those of PyTorch."""
    x, residual, dy = (torch.randn(rows, cols, device=device, dtype=torch.bfloat16) for _ in range(3))
    w = torch.randn(cols, device=device, dtype=torch.bfloat16)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, residual, w)]
    names = ["rms_norm", "add_rms_norm", "rms_norm, cast_before_weight", "add_rms_norm, cast_before_weight"]
    times, results = {}, {}
    for name, order in zip(names, (False, False, True, True)):
        call, given = (rt.add_rms_norm, leaves[:2]) if name.startswith("add") else (rt.rms_norm, leaves[:1])
        results[name], times[name] = timed(lambda: call(*given, leaves[2], EPS, cast_before_weight=order))
    y, (sum_y, total) = results["rms_norm"], results["add_rms_norm"]
    ours, times["rms_norm, backward"] = timed(lambda: torch.autograd.grad(y, (leaves[0], leaves[2]), dy))
    of_sum, times["add_rms_norm, backward"] = timed(lambda: torch.autograd.grad((sum_y, total), leaves, (dy, dy)))
    right = F.rms_norm(leaves[0], (cols,), leaves[2], EPS)
    right_total = leaves[0] + leaves[1]
    right_sum = F.rms_norm(right_total, (cols,), leaves[2], EPS)
    tolerance = dict(rtol=2e-2, atol=2e-2)
    for got, expected in [(y, right), (results[names[2]], right), (sum_y, right_sum), (results[names[3]][0], right_sum)]:
        torch.testing.assert_close(got, expected, **tolerance)
    # Sums over rows have the error of as many terms.
    expected = torch.autograd.grad(right, (leaves[0], leaves[2]), dy)
    expected_of_sum = torch.autograd.grad((right_sum, right_total), leaves, (dy, dy))
    for got, wanted in [(ours[0], expected[0]), (of_sum[0], expected_of_sum[0]), (of_sum[1], expected_of_sum[1])]:
        torch.testing.assert_close(got, wanted, **tolerance)
    for got, wanted in [(ours[1], expected[1]), (of_sum[2], expected_of_sum[2])]:
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 * rows**0.5)
    return times


def main():
    args = measure.arguments(__doc__, device="cuda", rows=8192)
    with tempfile.TemporaryDirectory() as cache:
        is_off = os.environ.get("RMSNORM_CACHE_DIR") == ""
        if not is_off:
            os.environ["RMSNORM_CACHE_DIR"] = cache
        # These start the device and NVRTC, and let PyTorch import sympy, which takes two seconds. They are not counted.
        rt.rms_norm(torch.ones(1, 8, device=args.device))
        x = torch.ones(1, 8, device=args.device, requires_grad=True)
        torch.autograd.grad(F.rms_norm(x, (8,)), x, torch.ones_like(x))
        before = len(os.listdir(cache))
        rows = {cols: first_calls(args.rows, cols, args.device) for cols in COLS}
        compiled = "all" if is_off else len(os.listdir(cache)) - before
    stored = {cols: {name: dict(us=us) for name, us in found.items()} for cols, found in rows.items()}
    report = measure.report(rmsnorm.devices()[args.device][1], stored, torch=torch.__version__, compiled=compiled)
    for name in rows[COLS[0]]:
        times = [found[name] for found in rows.values()]
        print(f"{name:34s} median {statistics.median(times) / 1e3:8.2f} ms   most {max(times) / 1e3:8.2f} ms")
    every = [us for found in rows.values() for us in found.values()]
    print(f"{len(every)} first calls: median {statistics.median(every) / 1e3:.2f} ms, at most {max(every) / 1e3:.2f} ms; {compiled} kernels compiled")
    measure.write(args.out, report)


main()
