"""PyTorch: values, gradients, layouts, errors and modules, in eager mode."""

import decimal
import fractions
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import framework, need
from judge import judge, judge_after

torch = framework("torch")
import torch.nn.functional as F  # noqa: E402

import rmsnorm.torch as rt  # noqa: E402
from rmsnorm.torch import functional  # noqa: E402

DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
          (torch.float16, torch.float16)]
DEVICES = ["cpu", "cuda"]
# libtorch's C interface has E8M0 in 2.11 and later.
HAS_E8M0 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)


def on(device):
    """The device; the test is skipped if it is missing."""
    need(device, device == "cpu" or torch.cuda.is_available(), "PyTorch finds no such device")
    return device


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32, device="cpu", grad=False):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("stream", [None, "own", torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (24,), (3, 7, 257), (2, 4096)])
def test_values_and_gradients_are_within_their_bounds(device, dtype, weight_dtype, is_layer, stream, shape):
    make = lambda *shape, dtype: random(*shape, dtype=dtype, device=on(device), grad=True)  # noqa: E731
    x, weight, bias = make(*shape, dtype=dtype), make(shape[-1], dtype=weight_dtype), make(shape[-1], dtype=weight_dtype)
    dy = make(*shape, dtype=dtype).detach()
    inputs, leaves = dict(x=x, weight=weight, dy=dy), dict(dx=x, dweight=weight)
    if is_layer:
        inputs, leaves = inputs | {"bias": bias}, leaves | {"dbias": bias}
    if stream is None:
        y = rt.layer_norm(x, weight, bias, 1e-5) if is_layer else rt.rms_norm(x, weight, 1e-5)
        got = dict(y=y)
        y.backward(dy)
    else:
        residual, dh = (make(*shape, dtype=dtype if stream == "own" else stream) for _ in range(2))
        dh = dh.detach()
        y, h = rt.add_layer_norm(x, residual, weight, bias, 1e-5) if is_layer else rt.add_rms_norm(x, residual, weight, 1e-5)
        got = dict(y=y, h=h)
        inputs, leaves = inputs | dict(residual=residual, dresidual_out=dh), leaves | {"dresidual": residual}
        torch.autograd.backward((y, h), (dy, dh))
    assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        got[name] = leaf.grad
    judge("layer_norm" if is_layer else "rms_norm", 1e-5, inputs, got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("stream", ["own", torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (24,), (3, 7, 257), (2, 4096)])
@pytest.mark.parametrize("has_next", [False, True])
def test_residuals_after_the_norm_are_within_their_bounds(device, dtype, weight_dtype, is_layer, stream, shape, has_next):
    make = lambda *shape, dtype: random(*shape, dtype=dtype, device=on(device), grad=True)  # noqa: E731
    x, residual = make(*shape, dtype=dtype), make(*shape, dtype=dtype if stream == "own" else stream)
    names = ("weight", "bias")[: 1 + is_layer] + ("next_weight", "next_bias")[: (1 + is_layer) * has_next]
    parameters = {name: make(shape[-1], dtype=weight_dtype) for name in names}
    leaves = dict(x=x, residual=residual) | parameters
    arriving = dict(dy=make(*shape, dtype=dtype).detach(), dresidual_out=make(*shape, dtype=residual.dtype).detach())
    w, b, v, c = map(parameters.get, ("weight", "bias", "next_weight", "next_bias"))
    if has_next:
        found = (rt.Norm.layer(1e-5).residual_after(residual).next_norm(v, c).apply(x, w, b) if is_layer
                 else rt.rms_norm_add_rms_norm(x, residual, w, v, 1e-5))
        got = dict(zip("yh", found))
    else:
        arriving.pop("dy")
        got = {"h": rt.layer_norm_add(x, residual, w, b, 1e-5) if is_layer else rt.rms_norm_add(x, residual, w, 1e-5)}
    assert got["h"].dtype == residual.dtype and all(result.shape == x.shape and result.is_contiguous() for result in got.values())
    assert not has_next or got["y"].dtype == dtype
    torch.autograd.backward(tuple(got.values()), tuple(arriving.values()))
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        got[f"d{name}"] = leaf.grad
    judge_after("layer_norm" if is_layer else "rms_norm", 1e-5, leaves | arriving, got)


def test_norms_as_values_are_the_functions():
    """No option has its default, so that a lost one is noticed. On the CPU a next norm has the bits of a call for itself."""
    x, r, w, b = random(3, 8, dtype=torch.bfloat16), random(3, 8), random(8), random(8)
    options = dict(weight_offset=0.25, cast_before_weight=True)
    rms, layer, h = rt.Norm.rms(0.3, **options), rt.Norm.layer(0.3), rt.layer_norm_add(x, r, w, b, 0.3)
    for found, expected in (
        (rms.apply(x, w), rt.rms_norm(x, w, 0.3, **options)),
        (rms.residual(r).apply(x, w), rt.add_rms_norm(x, r, w, 0.3, **options)),
        (rms.residual_after(r).apply(x, w), rt.rms_norm_add(x, r, w, 0.3, **options)),
        (rms.residual_after(r).next_norm(b).apply(x, w), rt.rms_norm_add_rms_norm(x, r, w, b, 0.3, **options)),
        (layer.apply(x, w, b), rt.layer_norm(x, w, b, 0.3)),
        (layer.residual(r).apply(x, w, b), rt.add_layer_norm(x, r, w, b, 0.3)),
        (layer.residual_after(r).apply(x, w, b), h),
        (layer.residual_after(r).next_norm(b, w).apply(x, w, b), (rt.layer_norm(h, b, w, 0.3).bfloat16(), h)),
    ):
        found, expected = ((each,) if isinstance(each, torch.Tensor) else each for each in (found, expected))
        assert all(torch.equal(got, right) for got, right in zip(found, expected, strict=True))


def test_a_value_is_not_changed_by_its_methods():
    x, r, w = random(3, 8), random(3, 8), random(8)
    plain = rt.Norm.rms(1e-6)
    after = plain.residual_after(r)
    after.next_norm(w)
    assert torch.equal(plain.apply(x, w), rt.rms_norm(x, w, 1e-6)) and torch.equal(after.apply(x, w), rt.rms_norm_add(x, r, w, 1e-6))
    assert "eps=1e-06" in repr(plain) and "residual=.." in repr(after)
    for call, text in (
        (lambda: plain.next_norm(w).apply(x), "next_norm: expected a residual after the norm, got none"),
        (lambda: plain.residual(r).next_norm().apply(x), "next_norm: expected a residual after the norm, got none"),
        (lambda: plain.residual(None), "residual: expected an array, got None"),
        (lambda: plain.apply(x, w, w), "bias: an RMS norm has none"),
        (lambda: after.next_norm(w, w).apply(x, w), "next_bias: an RMS norm has none"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_the_sum_after_a_norm_is_rounded_once():
    """A norm that is rounded before the addition gives other sums, and the cast before the weight another rounding."""
    x, r, w = random(64, 512, dtype=torch.bfloat16), random(64, 512, dtype=torch.bfloat16), random(512, dtype=torch.bfloat16)
    once = r.float() + rt.rms_norm(x.float(), w.float(), 1e-6)
    h = rt.rms_norm_add(x, r, w, 1e-6)
    assert (h != once.bfloat16()).float().mean() < 0.001 and (h != r + rt.rms_norm(x, w, 1e-6)).float().mean() > 0.05
    twice = r.float() + rt.rms_norm(x, None, 1e-6).float() * w.float()
    assert (rt.rms_norm_add(x, r, w, 1e-6, cast_before_weight=True) != twice.bfloat16()).float().mean() < 0.001
    # On the CPU the next norm has the bits of a call for itself.
    y, again = rt.rms_norm_add_rms_norm(x, r, w, w, 1e-6, weight_offset=1.0)
    assert torch.equal(again, rt.rms_norm_add(x, r, w, 1e-6, weight_offset=1.0))
    assert torch.equal(y, rt.rms_norm(again, w, 1e-6, weight_offset=1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_options(device):
    x, w = random(4, 9, 128, dtype=torch.bfloat16, device=on(device)), random(128, dtype=torch.bfloat16, device=device)
    judge("rms_norm", 1e-6, {"x": x, "weight": w}, {"y": rt.rms_norm(x, w, 1e-6, weight_offset=1.0)}, 1.0)
    judge("rms_norm", functional.default_eps(x), {"x": x}, {"y": rt.rms_norm(x)})
    judge("layer_norm", 1e-5, {"x": x}, {"y": rt.layer_norm(x)})
    judge("layer_norm", 1e-5, {"x": x, "bias": w}, {"y": rt.layer_norm(x, None, w)})
    # Llama's order: a few values round to the other side of a tie, since sums are added in another
    # order.
    llama = w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    got = rt.rms_norm(x, w, 1e-6, cast_before_weight=True)
    assert (got != llama).float().mean() < 0.01 and not torch.equal(got, rt.rms_norm(x, w, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_without_an_eps_it_is_that_of_pytorch(dtype):
    x = random(64, 8, dtype=dtype) * 0.01
    torch.testing.assert_close(rt.rms_norm(x), F.rms_norm(x, (8,)))
    torch.testing.assert_close(rt.rms_norm(x, weight_offset=1.0, cast_before_weight=True), F.rms_norm(x, (8,)))


def test_a_bias_without_a_weight_has_its_gradient():
    x, b, dy = random(9, 40, dtype=torch.bfloat16), random(40, dtype=torch.bfloat16, grad=True), random(9, 40, dtype=torch.bfloat16)
    y = rt.layer_norm(x, None, b)
    y.backward(dy)
    judge("layer_norm", 1e-5, {"x": x, "bias": b, "dy": dy}, {"y": y, "dbias": b.grad})


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_apart_are_read_where_they_are(device):
    w = random(64, device=on(device))
    qkv = random(4, 9, 3 * 2 * 64, device=device)
    base = qkv.view(4, 9, 3, 2, 64)
    for x in (qkv[..., 64:128], base[0, :, 1], random(5, 8, 64, device=device)[::2], random(9, 1, 64, device=device).transpose(0, 1),
              random(1, 64, device=device).expand(1, 64)):
        assert torch.equal(rt.rms_norm(x, w, 1e-6), rt.rms_norm(x.contiguous(), w, 1e-6))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = rt.rms_norm(base[0, :, 1], w, 1e-6)
        assert torch.cuda.max_memory_allocated() - before <= y.numel() * 4 + 512


@pytest.mark.parametrize("device", DEVICES)
def test_other_layouts_are_copied_once(device):
    w = random(64, device=on(device), grad=True)
    for x in (random(64, 9, device=device).t(), random(9, 1, 64, device=device).expand(9, 5, 64),
              random(3, 4, 5, 6, 64, device=device)[:, ::2, ::2, ::2], random(9, 128, device=device)[:, ::2]):
        y = rt.rms_norm(x, w, 1e-6)
        assert torch.equal(y, rt.rms_norm(x.contiguous(), w, 1e-6))
        # The gradient of a sum is one number, with strides of 0.
        (dw,) = torch.autograd.grad(y.sum(), w)
        (expected,) = torch.autograd.grad(rt.rms_norm(x.contiguous(), w, 1e-6), w, torch.ones_like(y))
        assert torch.equal(dw, expected)


def test_vectors_that_are_apart_are_copied():
    x, dy, wide = random(6, 5, 24), random(6, 5, 24), random(24, 3)
    y, rstd = torch.ops.rmsnorm.rms_norm(x, wide[:, 1], 1e-6, 0.0, False)
    judge("rms_norm", 1e-6, {"x": x, "weight": wide[:, 1]}, {"y": y})
    apart = torch.stack([rstd, rstd], -1)
    for other in (apart[..., 0], rstd.t().contiguous().t(), torch.cat([rstd, rstd], 1)[:, :5]):
        got = torch.ops.rmsnorm.rms_norm_backward(dy, x, wide[:, 1], other, None, 0.0, True, False)
        expected = torch.ops.rmsnorm.rms_norm_backward(dy, x, wide[:, 1], rstd, None, 0.0, True, False)
        assert not other.is_contiguous() and all(torch.equal(a, b) for a, b in zip(got, expected))


def test_empty_batches():
    x, w = random(0, 3, 8, grad=True), random(8, grad=True)
    y = rt.rms_norm(x, w, 1e-6)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape and torch.equal(w.grad, torch.zeros(8))


@pytest.mark.parametrize("scales, shape", {"given": (1,), "tensor": (), "row": (0, 3, 1), "block": (0, 2), "mx": (0,)}.items())
def test_empty_batches_have_codes(scales, shape):
    if scales == "mx" and not HAS_E8M0:
        pytest.skip("scales of MX: PyTorch 2.10 has no e8m0 in its C interface")
    given = torch.ones(1) if scales == "given" else None
    inputs = random(0, 3, 256), random(256), random(0, 3, 256), given
    on = lambda x, w, r, scale: rt.quantized_rms_norm(x, w, 1e-6, scales=scales, scale=scale, residual=r)  # noqa: E731
    codes, found, h = on(*inputs)
    told = on(*(None if tensor is None else tensor.to("meta") for tensor in inputs))
    assert [(t.shape, t.stride(), t.dtype) for t in told] == [(t.shape, t.stride(), t.dtype) for t in (codes, found, h)]
    assert codes.shape == h.shape == (0, 3, 256) and found.shape == shape
    assert found.numel() == 0 or found.item() in (0.0, 1.0), "of no elements the largest is 0"


@pytest.mark.parametrize("device", DEVICES)
def test_several_dimensions_are_one_row(device):
    x, w, b = random(5, 4, 6, device=on(device), grad=True), random(4, 6, device=device), random(4, 6, device=device)
    torch.testing.assert_close(rt.layer_norm(x, w, b), F.layer_norm(x, (4, 6), w, b))
    torch.testing.assert_close(rt.rms_norm(x, w, 1e-6), F.rms_norm(x, (4, 6), w, 1e-6))
    y, h = rt.add_rms_norm(x, x, w, 1e-6)
    assert y.shape == h.shape == x.shape
    torch.testing.assert_close(rt.layer_norm(x, None, b), F.layer_norm(x, (4, 6), None, b))
    with pytest.raises(ValueError, match="must end in the weight's dimensions"):
        rt.rms_norm(x[:, :3], w, 1e-6)


@pytest.mark.parametrize("name, function, inputs", [
    ("rms", lambda x, w: rt.rms_norm(x, w, 1e-6), "xw"),
    ("offset", lambda x, w: rt.rms_norm(x, w, 1e-6, weight_offset=1.0), "xw"),
    ("no weight", lambda x: rt.rms_norm(x, None, 1e-6), "x"),
    ("layer", lambda x, w, b: rt.layer_norm(x, w, b), "xwb"),
    ("layer, no bias", lambda x, w: rt.layer_norm(x, w), "xw"),
    ("layer, no weight", lambda x: rt.layer_norm(x), "x"),
    ("add", lambda x, r, w: rt.add_rms_norm(x, r, w, 1e-6), "xrw"),
    ("add, y only", lambda x, r, w: rt.add_rms_norm(x, r, w, 1e-6)[0], "xrw"),
    ("add, stream only", lambda x, r, w: rt.add_rms_norm(x, r, w, 1e-6)[1], "xrw"),
    ("add layer", lambda x, r, w, b: rt.add_layer_norm(x, r, w, b), "xrwb"),
    ("after", lambda x, r, w: rt.rms_norm_add(x, r, w, 1e-6), "xrw"),
    ("after, no weight", lambda x, r: rt.rms_norm_add(x, r), "xr"),
    ("after layer", lambda x, r, w, b: rt.layer_norm_add(x, r, w, b), "xrwb"),
    ("next", lambda x, r, w, v: rt.rms_norm_add_rms_norm(x, r, w, v, 1e-6, weight_offset=0.5), "xrwv"),
    ("next, y only", lambda x, r, w, v: rt.rms_norm_add_rms_norm(x, r, w, v, 1e-6)[0], "xrwv"),
    ("next, stream only", lambda x, r, w: rt.rms_norm_add_rms_norm(x, r, w, None, 1e-6)[1], "xrw"),
    ("next layer", lambda x, r, w, b, v: rt.Norm.layer().residual_after(r).next_norm(v, b).apply(x, w, b), "xrwbv"),
])
def test_gradcheck(name, function, inputs):
    """The kernels have no float64. In float32, central differences of 1e-2 have 2e-3 of truncation
    and rounding errors."""
    shapes = {"x": (3, 5, 24), "r": (3, 5, 24), "w": (24,), "b": (24,), "v": (24,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [random(*shapes[name], grad=True) for name in inputs]
        options = dict(eps=1e-2, atol=2e-3, rtol=2e-3, check_batched_grad=True)
        assert torch.autograd.gradcheck(function, tensors, **options)


def test_float64_has_gradcheck_by_pytorch_itself():
    x, w, b, r = (random(*shape, dtype=torch.float64, grad=True) for shape in ((3, 8), (8,), (8,), (3, 8)))
    for function, inputs in (
        (lambda x, w: rt.rms_norm(x, w, 1e-6, weight_offset=1.0), (x, w)), (rt.layer_norm, (x, w, b)),
        (lambda x, r, w: rt.add_rms_norm(x, r, w, 1e-6), (x, r, w)), (rt.add_layer_norm, (x, r, w, b)),
        (rt.layer_norm_add, (x, r, w, b)), (lambda x, r, w, v: rt.rms_norm_add_rms_norm(x, r, w, v, 1e-6, weight_offset=1.0), (x, r, w, b)),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_other_mixes_of_dtypes_are_computed_all_the_same():
    x, w = random(3, 8), random(8, dtype=torch.bfloat16)
    assert rt.rms_norm(x, w, 1e-6).dtype == torch.float32
    torch.testing.assert_close(rt.rms_norm(x, w, 1e-6), F.rms_norm(x, (8,), None, 1e-6) * w.float())
    y, h = rt.add_rms_norm(x, x.bfloat16(), w, 1e-6)
    assert (y.dtype, h.dtype) == (torch.float32, torch.bfloat16)
    x = random(3, 8, dtype=torch.float16)
    expected = (x.double() / x.double().square().mean(-1, keepdim=True).add(1e-6).sqrt()).half()
    got = functional.fallback.norm(False, x, None, None, None, 1e-6, 0.0, True)[0]
    torch.testing.assert_close(got, expected, rtol=2**-10, atol=0.0)
    for x, r, w in ((random(3, 8), None, random(8, dtype=torch.bfloat16)),
                    (random(3, 8), random(3, 8, dtype=torch.bfloat16), random(8, dtype=torch.bfloat16))):
        y, h = (rt.layer_norm(x, w, w), None) if r is None else rt.add_layer_norm(x, r, w, w)
        assert y.dtype == torch.float32
        judge("layer_norm", 1e-5, {"x": x if h is None else h, "weight": w, "bias": w}, {"y": y.bfloat16() if h is not None else y})
    # Mixed dtypes that the kernels support, on a device without kernels.
    x, r, w = random(3, 8, dtype=torch.bfloat16), random(3, 8), random(8)
    for parameter in (w, w.bfloat16()):
        for is_layer in (False, True):
            y, h = functional.fallback.norm(is_layer, x, r, parameter, None, 1e-5, 0.0, False)
            judge("layer_norm" if is_layer else "rms_norm", 1e-5, {"x": x, "residual": r, "weight": parameter}, {"y": y, "h": h})
            args = is_layer, x, r, parameter, None, 1e-5, 0.0, False, None, False, True
            y, h = functional.fallback.norm(*args, True, parameter)
            norm, inputs = "layer_norm" if is_layer else "rms_norm", {"x": x, "residual": r, "weight": parameter, "next_weight": parameter}
            judge_after(norm, 1e-5, inputs, {"y": y, "h": h})
            assert torch.equal(functional.fallback.norm(*args)[1], h)
    meta = rt.layer_norm(torch.empty(3, 8, device="meta"))
    assert meta.shape == (3, 8) and meta.is_meta


def test_only_gradients_that_are_asked_for_are_made():
    x, w = random(5, 16), random(16, grad=True)
    y = rt.rms_norm(x, w, 1e-6)
    y.sum().backward()
    assert x.grad is None and w.grad is not None
    x, w = random(5, 16, grad=True), random(16)
    rt.rms_norm(x, w, 1e-6).sum().backward()
    assert w.grad is None and x.grad is not None
    # A result that is not used has no gradient.
    x, r, w = random(5, 16, grad=True), random(5, 16, grad=True), random(16, grad=True)
    rt.add_rms_norm(x, r, w, 1e-6)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 16)) and torch.equal(r.grad, x.grad) and torch.equal(w.grad, torch.zeros(16))
    with torch.no_grad():
        assert not rt.add_rms_norm(x, r, w, 1e-6)[0].requires_grad
    with torch.inference_mode():
        assert rt.rms_norm(x, w, 1e-6).is_inference()


@pytest.mark.parametrize("call", [
    lambda x, w: (rt.rms_norm(x, w),), lambda x, w: (rt.layer_norm(x, w),), lambda x, w: rt.add_rms_norm(x, x, w),
    lambda x, w: torch.ops.rmsnorm.layer_norm(x, w, w, 1e-5), lambda x, w: torch.ops.rmsnorm.add_rms_norm(x, x, w, 1e-5, 0.0, False),
    lambda x, w: (rt.rms_norm_add(x, x, w),), lambda x, w: rt.rms_norm_add_rms_norm(x, x, w, w),
    lambda x, w: torch.ops.rmsnorm.rms_norm_add(x, x, w, w, 1e-5, 0.0, False, True),
])
def test_gradients_that_nobody_sends_are_none(call):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *results):
            return torch.zeros(())

        @staticmethod
        def backward(ctx, gradient):
            return (None,) * len(ctx.needs_input_grad)

    x, w = random(3, 8, grad=True), random(8, grad=True)
    assert torch.autograd.grad(Nothing.apply(*call(x, w)), (x, w), allow_unused=True) == (None, None)


def test_a_part_of_a_batch_has_the_bits_of_the_whole():
    x, w = random(64, 1000, dtype=torch.bfloat16), random(1000, dtype=torch.bfloat16)
    whole = rt.rms_norm(x, w, 1e-6)
    assert all(torch.equal(whole[row : row + 1], rt.rms_norm(x[row : row + 1], w, 1e-6)) for row in range(64))


def test_bits_do_not_depend_on_the_number_of_threads():
    x, w, threads = random(4096, 512, grad=True), random(512, grad=True), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = rt.rms_norm(x, w, 1e-6)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, w))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result))


NAN, INF = float("nan"), float("inf")
# Arguments that no path supports: (exception, message, call with x of (2, 8) and w of (8)).
REFUSED = [
    (ValueError, r"weight: expected the shape \[8\], got \[7\]", lambda x, w: rt.rms_norm(x, w[:-1], 1e-6)),
    (ValueError, r"weight: expected the shape \[8\], got \[1\]", lambda x, w: rt.rms_norm(x, w[:1], 1e-6)),
    (ValueError, r"weight: expected the shape \[8\], got \[1\]", lambda x, w: rt.rms_norm(x, w[:1], 1e-6, weight_offset=1.0)),
    (ValueError, r"weight: expected the shape \[8\], got \[0\]", lambda x, w: rt.rms_norm(x, w[:0], 1e-6, cast_before_weight=True)),
    (ValueError, r"weight: expected the shape \[8\], got \[\]", lambda x, w: rt.rms_norm(x, w[0], 1e-6)),
    (ValueError, r"x: expected a shape that ends in .*\[1, 8\]", lambda x, w: rt.rms_norm(x, w[None], 1e-6, weight_offset=1.0)),
    (ValueError, r"x: expected a shape that ends in .*\[2, 1\]", lambda x, w: rt.rms_norm(x, w[:2, None], 1e-6, weight_offset=1.0)),
    (ValueError, r"bias: expected the shape \[8\], got \[3\]", lambda x, w: rt.layer_norm(x, w, w[:3])),
    (ValueError, r"bias: expected the shape \[8\], got \[1\]", lambda x, w: rt.layer_norm(x, None, w[:1])),
    (ValueError, r"residual: expected the shape \[2, 8\], got \[1, 8\]", lambda x, w: rt.add_rms_norm(x, x[:1], w, 1e-6)),
    (ValueError, r"residual: expected the shape \[1, 8\], got \[2, 8\]", lambda x, w: rt.add_rms_norm(x[:1], x, w, 1e-6)),
    (ValueError, r"residual: expected the shape \[2, 8\], got \[8\]", lambda x, w: rt.add_layer_norm(x, x[0], w)),
    (ValueError, r"residual: expected the shape \[2, 8\], got \[8\]", lambda x, w: rt.rms_norm_add(x, x[0], w)),
    (ValueError, r"weight: expected the shape \[8\], got \[7\]", lambda x, w: rt.rms_norm_add(x, x, w[:-1])),
    (ValueError, r"bias: expected the shape \[8\], got \[1\]", lambda x, w: rt.layer_norm_add(x, x, w, w[:1])),
    (ValueError, r"next_weight: expected the shape \[8\], got \[7\]", lambda x, w: rt.rms_norm_add_rms_norm(x, x, w, w[:-1])),
    (ValueError, r"next_bias: expected the shape \[8\], got \[7\]",
     lambda x, w: rt.Norm.layer().residual_after(x).next_norm(w, w[:-1]).apply(x, w)),
    (TypeError, "next_weight: expected a torch.Tensor, got float", lambda x, w: rt.rms_norm_add_rms_norm(x, x, w, 1e-6)),
    (TypeError, "residual: expected a torch.Tensor, got None", lambda x, w: rt.rms_norm_add(x, None, w)),
    (TypeError, "eps: expected a number, got str", lambda x, w: rt.rms_norm_add(x, x, w, "1e-6")),
    (ValueError, "x: expected at least one dimension", lambda x, w: rt.rms_norm(x[0, 0], None, 1e-6)),
    (ValueError, r"x: expected a shape that ends in normalized_shape \[7\]", lambda x, w: rt.rms_norm(x, (7,), w)),
    (ValueError, r"x: expected a shape that ends in normalized_shape \[4, 8\]", lambda x, w: rt.layer_norm(x, normalized_shape=(4, 8))),
    (ValueError, r"x: expected a shape that ends in normalized_shape \[\]", lambda x, w: rt.layer_norm(x, ())),
    (ValueError, r"weight: expected the shape \[2, 8\], got \[8\]", lambda x, w: rt.rms_norm(x, (2, 8), w)),
    (ValueError, "eps: expected a finite number of at least 0, got -1.0", lambda x, w: rt.rms_norm(x, w, -1.0)),
    (ValueError, "eps: expected a finite number of at least 0, got -0.5", lambda x, w: rt.add_layer_norm(x, x, w, w, -0.5)),
    (ValueError, "eps: expected a finite number of at least 0, got nan", lambda x, w: rt.layer_norm(x, w, w, NAN)),
    (ValueError, "eps: expected a finite number of at least 0, got inf", lambda x, w: rt.rms_norm(x, w, INF)),
    (ValueError, "eps: expected a finite number", lambda x, w: rt.rms_norm(x, w, 1e300)),
    (ValueError, "weight_offset: expected a finite number, got nan", lambda x, w: rt.rms_norm(x, w, 1e-6, weight_offset=NAN)),
    (ValueError, "weight_offset: expected a finite number, got inf", lambda x, w: rt.add_rms_norm(x, x, w, 1e-6, weight_offset=INF)),
    (ValueError, "weight: expected the device of the other tensors", lambda x, w: rt.rms_norm(x, w.to("meta"), 1e-6)),
    (TypeError, "eps: expected a number, got str", lambda x, w: rt.rms_norm(x, w, "1e-6")),
    (TypeError, "eps: expected a number, got Decimal", lambda x, w: rt.rms_norm(x, w, decimal.Decimal("1e-6"))),
    (TypeError, r"eps: expected a number, got a tensor of shape \[1\]", lambda x, w: rt.layer_norm(x, w, w, torch.ones(1))),
    (TypeError, r"eps: expected a number, got a tensor of shape \[\] on meta", lambda x, w: rt.add_rms_norm(x, x, w, torch.ones((), device="meta"))),
    (TypeError, "eps: expected a number, got complex", lambda x, w: rt.rms_norm(x, w, 1j)),
    (TypeError, "weight_offset: expected a number, got a tensor of shape", lambda x, w: rt.rms_norm(x, w, weight_offset=torch.ones(1))),
    (TypeError, "weight_offset: expected a number, got NoneType", lambda x, w: rt.add_rms_norm(x, x, w, weight_offset=None)),
    (TypeError, "cast_before_weight: expected a bool, got int", lambda x, w: rt.rms_norm(x, w, cast_before_weight=1)),
    (TypeError, "cast_before_weight: expected a bool, got NoneType", lambda x, w: rt.add_rms_norm(x, x, w, cast_before_weight=None)),
    (TypeError, "x: expected a torch.Tensor, got NoneType", lambda x, w: rt.layer_norm(None, w)),
    (ValueError, "weight: expected a dense tensor, got a nested one", lambda x, w: rt.rms_norm(x, torch.nested.nested_tensor([w.detach()]))),
    (TypeError, "eps: expected a number, got list", lambda x, w: rt.layer_norm(x, w, w, [1e-6])),
    (TypeError, "weight_offset: expected a number, got str", lambda x, w: rt.rms_norm(x, w, 1e-6, weight_offset="1")),
    (TypeError, "eps: expected a number, got a tensor", lambda x, w: rt.rms_norm(x, w, torch.full((1,), 1e-6))),
    (TypeError, "eps: expected a number, got a tensor", lambda x, w: rt.layer_norm(x, w, w, torch.ones(2))),
    (TypeError, "weight_offset: expected a number, got a tensor", lambda x, w: rt.add_rms_norm(x, x, w, weight_offset=torch.ones(1, 1))),
    (TypeError, "eps: .* to be differentiated", lambda x, w: rt.rms_norm(x, w, torch.tensor(1e-6, requires_grad=True))),
    (TypeError, "eps: .* to be differentiated", lambda x, w: rt.layer_norm(x, w, w, torch.tensor(1e-6, requires_grad=True))),
    (TypeError, "eps: .* to be differentiated", lambda x, w: rt.add_layer_norm(x, x, w, eps=torch.tensor(1e-6, requires_grad=True))),
    (TypeError, "weight_offset: .* to be differentiated",
     lambda x, w: rt.rms_norm(x, w, weight_offset=torch.tensor(1.0, requires_grad=True))),
    (TypeError, "cast_before_weight: expected a bool, got str", lambda x, w: rt.rms_norm(x, w, 1e-6, cast_before_weight="no")),
    (TypeError, "weight: expected a floating-point dtype, got torch.int64", lambda x, w: rt.rms_norm(x, w.long(), 1e-6)),
    (TypeError, "weight: expected a torch.Tensor, got ndarray", lambda x, w: rt.rms_norm(x, w.detach().double().numpy(), 1e-6)),
    (TypeError, "weight: expected a torch.Tensor, got float", lambda x, w: rt.rms_norm(x, 1e-6)),
    (TypeError, "bias: expected a torch.Tensor, got float", lambda x, w: rt.layer_norm(x, w, 1e-5)),
    (TypeError, "residual: expected a torch.Tensor, got None", lambda x, w: rt.add_rms_norm(x, None, w, 1e-6)),
    (TypeError, "x: expected a torch.Tensor, got list", lambda x, w: rt.rms_norm([1.0, 2.0])),
    (TypeError, "x: expected a torch.Tensor, got ndarray", lambda x, w: rt.layer_norm(x.detach().double().numpy())),
    (TypeError, "x: expected a floating-point dtype, got torch.int32", lambda x, w: rt.rms_norm(x.int())),
    (TypeError, "x: expected a floating-point dtype, got torch.bool", lambda x, w: rt.layer_norm(x > 0)),
    (TypeError, "normalized_shape: expected a tuple or list of ints, got int", lambda x, w: rt.rms_norm(x, normalized_shape=8)),
    (TypeError, "weight: expected one value", lambda x, w: rt.rms_norm(x, w, weight=w)),
    (TypeError, "normalized_shape: expected one value", lambda x, w: rt.layer_norm(x, (8,), normalized_shape=(8,))),
    (TypeError, "expected at most 2 arguments after the rows", lambda x, w: rt.rms_norm(x, w, 1e-6, 0.0)),
    (NotImplementedError, "x: expected a strided tensor", lambda x, w: rt.rms_norm(x.detach().as_subclass(torch.Tensor).to_sparse())),
    (NotImplementedError, "x: norms are not computed in torch.float8_e4m3fn", lambda x, w: rt.rms_norm(x.detach().to(torch.float8_e4m3fn))),
    (NotImplementedError, "x: only rms_norm supports torch.complex64", lambda x, w: rt.layer_norm(x.to(torch.complex64))),
    (NotImplementedError, "x: only rms_norm supports torch.complex64", lambda x, w: rt.rms_norm(x.to(torch.complex64), weight_offset=1.0)),
    (NotImplementedError, "weight: only rms_norm supports torch.complex64", lambda x, w: rt.rms_norm(x, w.to(torch.complex64))),
]
# The paths of calls: the kernels, without and with gradients, and PyTorch's operators for several
# reasons.
PATHS = {
    "kernels": lambda x, w: (x, w), "gradients": lambda x, w: (x.requires_grad_(), w.requires_grad_()),
    "float64": lambda x, w: (x.double(), w.double()), "a mix": lambda x, w: (x, w.bfloat16()),
    "no kernels": lambda x, w: (x, w), "subclass": lambda x, w: (x.as_subclass(Subclass), w), "inference": lambda x, w: (x, w),
}


class Subclass(torch.Tensor):
    """A mode that changes nothing."""


@pytest.mark.parametrize("path", PATHS)
def test_every_path_refuses_the_same_in_the_same_words(path, monkeypatch):
    if path == "no kernels":
        monkeypatch.setattr(functional, "_takes", lambda *_, **__: False)
    wrong = []
    with torch.inference_mode(path == "inference"):
        for error, text, call in REFUSED:
            x, w = PATHS[path](random(2, 8), random(8))
            try:
                wrong.append((text, "taken", call(x, w)))
            except Exception as found:
                if type(found) is not error or not re.search(text, str(found)):
                    wrong.append((text, type(found).__name__, str(found)))
    assert not wrong


SCRIPTED = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "layer_norm_add", "rms_norm_add_rms_norm", "rms_norm_gated"]


@pytest.mark.parametrize("name", SCRIPTED)
def test_scripts_refuse_wrong_shapes(name):
    """TorchScript compiles the functions of `fallback`, and its exceptions have another type."""
    function = getattr(functional.fallback, name)
    for run in (function, torch.jit.script(function)):
        for rows, options, text in (
            (torch.ones(()), {"normalized_shape": []}, r"x: expected a shape that ends in normalized_shape \[\]"),
            (torch.ones(2, 8), {"normalized_shape": [7]}, r"x: expected a shape that ends in normalized_shape \[7\]"),
            (torch.ones(2, 8), {"weight": torch.ones(7)}, r"weight: expected the shape \[8\], got \[7\]"),
        ):
            with pytest.raises(Exception, match=text):
                run(*[rows] * (1 + ("add" in name)), **options)
        if "layer" in name:
            with pytest.raises(Exception, match=r"bias: expected the shape \[8\], got \[1\]"):
                run(*[torch.ones(2, 8)] * (1 + ("add" in name)), bias=torch.ones(1))


@pytest.mark.parametrize("name", SCRIPTED)
def test_scripts_have_the_same_defaults(name):
    """Small rows, so that eps matters."""
    rows = [random(3, 8, dtype=torch.bfloat16) * 1e-3 for _ in range(1 + ("add" in name))]
    for weight in ({}, {"weight": random(8, dtype=torch.bfloat16)}):
        torch.testing.assert_close(torch.jit.script(getattr(functional.fallback, name))(*rows, **weight), getattr(rt, name)(*rows, **weight))


def test_every_path_takes_the_same():
    """All paths support zero columns, zero rows, and an eps of 0, of a NumPy float or of a tensor
    with one element, as PyTorch does."""
    x, w = random(2, 8), random(8)
    for dtype in (torch.float32, torch.float64):
        for x in (random(2, 0, dtype=dtype, grad=True), random(0, 8, dtype=dtype, grad=True), random(3, 2, 0, dtype=dtype)):
            w = random(x.shape[-1], dtype=dtype, grad=True)
            for y in (rt.rms_norm(x, w, 1e-6), rt.rms_norm(x, w, 1e-6, weight_offset=1.0), rt.layer_norm(x, w, w), rt.rms_norm(x.detach()),
                      *rt.add_rms_norm(x, x, w), *rt.add_layer_norm(x, x, w, w), rt.layer_norm_add(x, x, w, w),
                      *rt.rms_norm_add_rms_norm(x, x, w, w)):
                assert y.shape == x.shape and y.dtype == dtype
            (dw,) = torch.autograd.grad(rt.rms_norm(x, w, 1e-6).sum(), w)
            assert torch.equal(dw, torch.zeros_like(w))
            with torch.no_grad():
                assert rt.rms_norm(x, w, 1e-6).shape == rt.layer_norm(x, w, w).shape == x.shape
        x, w = random(2, 8, dtype=dtype), random(8, dtype=dtype)
        for eps in (0, 1, 0.0, True, 1e-50, np.float32(1e-6), torch.tensor(1e-6), fractions.Fraction(1, 8)):
            torch.testing.assert_close(rt.rms_norm(x, w, eps), F.rms_norm(x, (8,), w, float(eps)))
            torch.testing.assert_close(rt.layer_norm(x, w, w, eps), F.layer_norm(x, (8,), w, w, float(eps)))
    z = torch.complex(random(2, 8), random(2, 8))
    assert torch.equal(rt.rms_norm(z, None, 1e-5), F.rms_norm(z, (8,), None, 1e-5))
    assert torch.equal(rt.rms_norm(z), F.rms_norm(z, (8,)))


def test_arguments_are_taken_in_the_order_of_torch_nn_functional_too():
    x, w, b = random(5, 4, 6), random(4, 6), random(4, 6)
    v, c = random(6), random(6)
    expected = F.rms_norm(x, (6,), v, 1e-3)
    for y in (rt.rms_norm(x, v, 1e-3), rt.rms_norm(x, (6,), v, 1e-3), rt.rms_norm(x, [6], weight=v, eps=1e-3), rt.rms_norm(x, v, eps=1e-3),
              rt.rms_norm(x, normalized_shape=(6,), weight=v, eps=1e-3), rt.rms_norm(x, torch.Size([6]), v, eps=1e-3),
              rt.rms_norm(x=x, weight=v, eps=1e-3), rt.rms_norm(x, v, 1e-3, normalized_shape=(6,))):
        torch.testing.assert_close(y, expected)
    torch.testing.assert_close(rt.rms_norm(x, (6,)), F.rms_norm(x, (6,)))
    torch.testing.assert_close(rt.rms_norm(x, (4, 6)), F.rms_norm(x, (4, 6)))
    torch.testing.assert_close(rt.rms_norm(x, None, 1e-3), F.rms_norm(x, (6,), None, 1e-3))
    expected = F.layer_norm(x, (6,), v, c, 1e-3)
    for y in (rt.layer_norm(x, v, c, 1e-3), rt.layer_norm(x, (6,), v, c, 1e-3), rt.layer_norm(x, (6,), weight=v, bias=c, eps=1e-3),
              rt.layer_norm(x, v, bias=c, eps=1e-3), rt.layer_norm(x, weight=v, bias=c, eps=1e-3, normalized_shape=[6])):
        torch.testing.assert_close(y, expected)
    torch.testing.assert_close(rt.layer_norm(x, None, c), F.layer_norm(x, (6,), None, c))
    torch.testing.assert_close(rt.layer_norm(x, v, None, None), F.layer_norm(x, (6,), v))
    torch.testing.assert_close(rt.layer_norm(x, (4, 6), w, b), F.layer_norm(x, (4, 6), w, b))
    torch.testing.assert_close(rt.layer_norm(x, (4, 6)), F.layer_norm(x, (4, 6)))
    torch.testing.assert_close(rt.add_rms_norm(x, x, (4, 6), w, 1e-3)[0], F.rms_norm(2 * x, (4, 6), w, 1e-3))
    torch.testing.assert_close(rt.add_layer_norm(x, x, (4, 6), w, bias=b)[0], F.layer_norm(2 * x, (4, 6), w, b))
    assert torch.equal(rt.LayerNorm(6)(input=x), rt.LayerNorm(6)(x)) and torch.equal(rt.RMSNorm(6)(x=x), rt.RMSNorm(6)(x))


def operands(name):
    """A call of an operator with arguments by the names of its schema."""
    schema = getattr(torch.ops.rmsnorm, name).default._schema
    shapes = {"weight": (8,), "bias": (8,), "next_weight": (8,), "next_bias": (8,), "mean": (3,), "rstd": (3,), "scale": (1,)}
    others = {"eps": 1e-6, "weight_offset": 0.0, "cast_before_weight": False, "codes_type": 0, "scale_kind": 0, "groups": 1,
              "gate_before": False, "activation": "silu", "y_dtype": 0}
    others |= {a.name: None for a in schema.arguments if str(a.type) in ("Optional[str]", "Optional[int]") and a.name != "activation"}
    return {a.name: random(*shapes.get(a.name, (3, 8))) if "Tensor" in str(a.type) else others.get(a.name, True) for a in schema.arguments}


OPERATORS = sorted(name.partition(".")[0].removeprefix("rmsnorm::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("rmsnorm::"))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_refuse_tensors_of_several_devices(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    op, given = getattr(torch.ops.rmsnorm, name).default, operands(name)
    on_meta = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    as_tuple = lambda found: found if isinstance(found, (tuple, list)) else (found,)  # noqa: E731
    real, meta = as_tuple(op(*given.values())), as_tuple(op(*on_meta.values()))
    assert all(m.is_meta and m.shape == r.shape and m.dtype == r.dtype for m, r in zip(meta, real, strict=True))
    assert len(OPERATORS) == 23
    with pytest.raises(ValueError, match="^(x|dy): expected at least one dimension"):
        op(*(value.flatten()[0] if isinstance(value, torch.Tensor) else value for value in on_meta.values()))
    for key in (key for key, value in given.items() if isinstance(value, torch.Tensor)):
        for base, other in ((given, on_meta), (on_meta, given)):
            with pytest.raises(ValueError, match="expected the device of the other tensors, (cpu|meta), got (cpu|meta)"):
                op(*(base | {key: other[key]}).values())
            with FakeTensorMode() as mode, pytest.raises((ValueError, RuntimeError), match="(?i)expected (the device|all tensors)|two different devices"):
                mixed = (base | {key: other[key]}).values()
                op(*(mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in mixed))
        # Fake kernels raise where kernels do.
        if not name.startswith("exported") and not (name.startswith("rms_norm_b") and key == "x") and key not in ("x", "dy"):
            for arguments in (given, on_meta):
                with pytest.raises((ValueError, RuntimeError), match="expected"):
                    op(*(arguments | {key: torch.cat([arguments[key], arguments[key]])}).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_functions_and_modules_refuse_tensors_of_several_devices(dtype, grad):
    tensors = {"x": (3, 8), "residual": (3, 8), "weight": (8,), "bias": (8,), "next_weight": (8,)}
    tensors = {name: random(*shape, dtype=dtype, grad=grad) for name, shape in tensors.items()}
    on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    for function, names in (
        (rt.rms_norm, ("x", "weight")), (rt.layer_norm, ("x", "weight", "bias")), (rt.add_rms_norm, ("x", "residual", "weight")),
        (rt.add_layer_norm, ("x", "residual", "weight", "bias")), (rt.layer_norm_add, ("x", "residual", "weight", "bias")),
        (rt.rms_norm_add_rms_norm, ("x", "residual", "weight", "next_weight")), (lambda x, **o: rt.rms_norm(x, weight_offset=1.0, **o), ("x", "weight")),
        (lambda x, **o: rt.layer_norm(x, normalized_shape=(8,), **o), ("x", "weight", "bias")),
    ):
        found = function(**{name: on_meta[name] for name in names})
        assert all(y.is_meta and y.dtype == dtype for y in (found if isinstance(found, tuple) else (found,)))
        for name in names:
            for base, other in ((tensors, on_meta), (on_meta, tensors)):
                with pytest.raises(ValueError, match="expected the device of the other tensors"):
                    function(**{key: (other if key == name else base)[key] for key in names})
    for module in (rt.RMSNorm, rt.LayerNorm, rt.AddRMSNorm, rt.AddLayerNorm, rt.RMSNormAdd, rt.LayerNormAdd):
        rows = (tensors["x"],) * (1 + ("Add" in module.__name__))
        with pytest.raises(ValueError, match="expected the device"):
            module(8, device="meta", dtype=dtype)(*rows)
    if dtype != torch.float64:
        with pytest.raises(ValueError, match="expected the device"):
            rt.quantized_rms_norm(tensors["x"], on_meta["weight"])


MODES = {
    "set_default_device('meta')": ("torch.set_default_device('meta')", "if True"),
    "set_default_device('cuda')": ("torch.set_default_device('cuda')", "if True"),
    "torch.device('meta')": ("", "with torch.device('meta')"),
    "FakeTensorMode": ("from torch._subclasses import FakeTensorMode", "with FakeTensorMode()"),
    "inference_mode": ("", "with torch.inference_mode()"),
    "no_grad": ("", "with torch.no_grad()"),
    "autocast": ("", "with torch.autocast('cpu', torch.bfloat16)"),
    "float64": ("torch.set_default_dtype(torch.float64)", "if True"),
    "bfloat16": ("torch.set_default_dtype(torch.bfloat16)", "if True"),
    "dispatch mode": ("from torch.utils.flop_counter import FlopCounterMode", "with FlopCounterMode(display=False)"),
    "deterministic": ("torch.use_deterministic_algorithms(True)", "if True"),
}
INSIDE = """
    import rmsnorm.torch as rt
    x, w = torch.ones(2, 4, device="cpu", dtype=torch.float32), torch.ones(4, device="cpu", dtype=torch.float32)
    first = rt.rms_norm(x, w), rt.layer_norm(x, w, w), *rt.add_rms_norm(x, x, w), rt.rms_norm(x.double()), rt.quantized_rms_norm(x, w)[0]
    assert all(y.device.type == "cpu" and y.shape == (2, 4) for y in first) and first[0].dtype == torch.float32
"""
MODULE = """
    module = rt.RMSNorm(4)
    y = rt.AddLayerNorm(4)(*[torch.ones(2, 4)] * 2)[1] + module(torch.ones(2, 4))
    assert y.shape == (2, 4) and y.device == module.weight.device and y.dtype == module.weight.dtype == torch.get_default_dtype()
"""
# Outside of the mode: objects made at import do not depend on the mode.
AFTER = """
torch.set_default_device("cpu")
torch.set_default_dtype(torch.float32)
x = torch.tensor([[3.0, 4.0]], requires_grad=True)
w = torch.nn.Parameter(torch.ones(2))
y = rt.rms_norm(x, w, 0.0)
y.sum().backward()
torch.testing.assert_close(y.detach(), torch.tensor([[3.0, 4.0]]) / 12.5 ** 0.5)
torch.testing.assert_close(w.grad, y[0].detach())
torch.testing.assert_close(rt.rms_norm(x.detach() * 1e-4), torch.nn.functional.rms_norm(x.detach() * 1e-4, (2,)))
"""


@pytest.mark.parametrize("mode", MODES)
def test_import_and_first_call_under_any_mode(mode):
    before, within = MODES[mode]
    code = f"import torch\n{before}\n{within}:{INSIDE}{'' if 'cuda' in mode else MODULE}{AFTER}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_import_and_first_call_in_another_thread():
    code = f"""
import torch, threading
def run():
    global rt, done{INSIDE}{MODULE}
    done = True
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert done
{AFTER}"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("call, text", [
    (lambda x, w: torch.ops.rmsnorm.rms_norm(x.double(), w, 1e-6, 0.0, False), "x must be float32, float16 or bfloat16"),
    (lambda x, w: torch.ops.rmsnorm.rms_norm(x, w.half(), 1e-6, 0.0, False), "weight and bias must be f32"),
    (lambda x, w: torch.ops.rmsnorm.rms_norm_backward(x, x, w, x[:, 0].half(), None, 0.0, True, False), "rstd: expected elements of f32"),
    (lambda x, w: torch.ops.rmsnorm.rms_norm_backward(x, x, w, w, None, 0.0, True, False), r"rstd: expected the shape \[2\], got \[8\]"),
])
def test_errors_of_operators_say_what_was_expected(call, text):
    with pytest.raises(RuntimeError, match=text):
        call(random(2, 8), random(8))


def test_neither_tensors_nor_memory_leak():
    """Arguments on the stack (also optional ones), results, and exceptions that pass through the
    dispatcher are released."""
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    pages = []
    for _ in range(5):
        for _ in range(2000):
            # New tensors, so that each leak is 8 KiB of memory.
            x, w = torch.empty(33, 65), torch.empty(65)
            torch.ops.rmsnorm.rms_norm(x, w, 1e-6, 0.0, False)
            torch.ops.rmsnorm.rms_norm(x, None, 1e-6, 0.0, False)
            torch.ops.rmsnorm.rms_norm(x.t(), None, 1e-6, 0.0, False)
            for _ in range(4):
                with pytest.raises(RuntimeError):
                    torch.ops.rmsnorm.rms_norm(x, w[:-1], 1e-6, 0.0, False)
        pages.append(resident())
    # 2000 leaks of 50 bytes are 24 pages, in every round.
    assert min(after - before for before, after in zip(pages[1:], pages[2:])) < 24, pages


@pytest.mark.parametrize("kind, shape, options", [
    ("RMSNorm", 8, {}), ("RMSNorm", (4, 8), dict(eps=1e-6)), ("RMSNorm", 8, dict(elementwise_affine=False)),
    ("RMSNorm", (4, 8), dict(elementwise_affine=False)), ("RMSNorm", 8, dict(dtype=torch.bfloat16)), ("LayerNorm", 8, {}),
    ("LayerNorm", (4, 8), dict(eps=1e-3)), ("LayerNorm", 8, dict(bias=False)), ("LayerNorm", [4, 8], dict(elementwise_affine=False)),
])
def test_modules_are_those_of_torch_nn(kind, shape, options):
    ours, theirs = getattr(rt, kind)(shape, **options), getattr(torch.nn, kind)(shape, **options)
    assert isinstance(ours, type(theirs))
    assert {k: (v.shape, v.dtype) for k, v in ours.state_dict().items()} == {k: (v.shape, v.dtype) for k, v in theirs.state_dict().items()}
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    x = random(3, 4, 8, dtype=options.get("dtype", torch.float32))
    torch.testing.assert_close(ours(x), theirs(x))
    with pytest.raises(ValueError, match="expected"):
        ours(x[..., :7])


@pytest.mark.parametrize("name, function", [
    ("RMSNorm", rt.rms_norm), ("AddRMSNorm", rt.add_rms_norm), ("LayerNorm", rt.layer_norm), ("AddLayerNorm", rt.add_layer_norm),
    ("RMSNormAdd", rt.rms_norm_add), ("LayerNormAdd", rt.layer_norm_add),
])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_modules_hand_on_all_that_they_hold(name, function, shape, has_weight):
    """No parameter and no option has its default, so that a lost one is noticed."""
    options = {} if "Layer" in name else dict(weight_offset=-0.75, cast_before_weight=True)
    module = getattr(rt, name)(shape, 0.3, has_weight, dtype=torch.bfloat16, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    rows = [random(3, *shape, dtype=torch.bfloat16) for _ in range(1 + ("Add" in name))]
    expected = function(*rows, normalized_shape=shape, eps=0.3, **dict(module.named_parameters()), **options)
    for got, right in zip(module(*rows), expected, strict=True):
        assert torch.equal(got, right)


def test_options_that_are_not_given_change_nothing():
    x, w = random(64, 512, dtype=torch.bfloat16), random(512, dtype=torch.bfloat16)
    for call in (
        lambda **options: rt.rms_norm(x, w, **options), lambda **options: rt.add_rms_norm(x, x, w, **options)[0],
        lambda **options: rt.quantized_rms_norm(x, w, dtype=torch.int8, **options)[0],
    ):
        y = call()
        assert torch.equal(y, call(weight_offset=0.0, cast_before_weight=False))
        assert not torch.equal(y, call(weight_offset=1.0)) and not torch.equal(y, call(cast_before_weight=True))
    for module in (rt.RMSNorm(8), rt.AddRMSNorm(8)):
        assert module.weight_offset == 0.0 and module.cast_before_weight is False


def test_modules_with_a_residual_and_options():
    x, r = random(3, 8, dtype=torch.bfloat16), random(3, 8)
    norm = rt.AddRMSNorm(8, eps=1e-6, weight_offset=1.0, dtype=torch.bfloat16)
    assert torch.equal(norm.weight, torch.zeros(8, dtype=torch.bfloat16))
    torch.nn.init.normal_(norm.weight)
    y, h = norm(x, r)
    judge("rms_norm", 1e-6, {"x": x, "residual": r, "weight": norm.weight}, {"y": y, "h": h}, 1.0)
    assert "weight_offset=1.0" in repr(norm)
    norm = rt.AddLayerNorm(8)
    y, h = norm(r, r)
    judge("layer_norm", 1e-5, {"x": r, "residual": r, "weight": norm.weight, "bias": norm.bias}, {"y": y, "h": h})


def test_autocast_keeps_the_dtype_of_x():
    x, w = random(3, 8, dtype=torch.bfloat16), random(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert rt.rms_norm(x, w, 1e-6).dtype == torch.bfloat16
        assert rt.RMSNorm(8)(torch.nn.Linear(8, 8)(random(3, 8))).dtype == torch.bfloat16


def test_checkpointing_gives_the_same_gradients():
    block = torch.nn.Sequential(rt.RMSNorm(16), torch.nn.Linear(16, 16), rt.LayerNorm(16))
    x = random(5, 16, grad=True)
    plain = torch.autograd.grad(block(x).square().sum(), (x, *block.parameters()))
    kept = torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).square().sum(), (x, *block.parameters())
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, kept))


def test_calls_appear_in_the_profiler():
    x, w = random(3, 8, grad=True), random(8, grad=True)
    with torch.profiler.profile() as profile:
        rt.rms_norm(x, w, 1e-6).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"rmsnorm::rms_norm", "rmsnorm::rms_norm_backward"} <= names


# {dtype of codes: (least code, largest code, half a unit of a normal code, half a step of the
# smallest code)}.
CODES = {
    torch.float8_e4m3fn: (-448, 448, 2.0**-4, 2.0**-10), torch.float8_e5m2: (-57344, 57344, 2.0**-3, 2.0**-17),
    torch.int8: (-128, 127, 0.0, 0.5),
}


@pytest.mark.parametrize("scales", ["given", "tensor", "row", "block"])
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("device", DEVICES)
def test_codes_times_scales_are_the_norm(device, dtype, scales):
    x, w = random(6, 40, 300, dtype=torch.bfloat16, device=on(device)), random(300, dtype=torch.bfloat16, device=device)
    scale = torch.tensor([0.01], device=device) if scales == "given" else None
    codes, found = rt.quantized_rms_norm(x, w, 1e-6, scales=scales, scale=scale, dtype=dtype)
    assert codes.dtype == dtype and codes.shape == x.shape and found.dtype == torch.float32
    assert found.shape == {"given": (1,), "tensor": (), "row": (6, 40, 1), "block": (240, 3)}[scales]
    factors = {"given": found, "tensor": found, "row": found}.get(scales)
    if factors is None:
        assert found.shape == (240, 3) and found.stride() == (1, 240)
        factors = found.repeat_interleave(128, 1)[:, :300].reshape(x.shape)
    exact = F.rms_norm(x.double(), (300,), w.double(), 1e-6)
    # Codes saturate at the largest one. The error of f32 is negligible.
    least, most, unit, step = CODES[dtype]
    bound = torch.maximum(exact.abs() * unit, factors.double() * step) * (1 + 2.0**-10)
    factors = factors.double()
    assert ((codes.double() * factors - exact.clamp(least * factors, most * factors)).abs() <= bound).all()
    assert scales == "given" or found.is_contiguous() or scales == "block"
    # Each scale is the smallest possible: the largest element that shares it has the largest code.
    if scales != "given":
        dims = {"tensor": (0, 1, 2), "row": 2, "block": 1}[scales]
        wide = codes.double().abs()
        wide = torch.stack([part.amax(1) for part in wide.reshape(240, 300).split(128, 1)]) if scales == "block" else wide.amax(dims)
        assert (wide == most).all()


def test_codes_with_a_residual_and_their_errors():
    x, r, w = random(4, 64), random(4, 64), random(64)
    codes, scales, h = rt.quantized_rms_norm(x, w, 1e-6, residual=r)
    assert torch.equal(h, x + r)
    again = rt.quantized_rms_norm(h, w, 1e-6)
    assert torch.equal(codes.view(torch.uint8), again[0].view(torch.uint8)) and torch.equal(scales, again[1])
    assert rt.quantized_rms_norm(x, w, 1e-6, dtype=torch.int8)[0].dtype == torch.int8
    if HAS_E8M0:
        codes, scales = rt.quantized_rms_norm(x, w, 1e-6, scales="mx")
        assert scales.dtype == torch.float8_e8m0fnu and scales.numel() == 512
    else:
        with pytest.raises(RuntimeError, match="this PyTorch has no dtype for e8m0"):
            rt.quantized_rms_norm(x, w, 1e-6, scales="mx")
    for arguments, text in (
        (dict(scales="column"), "scales must be one of given, tensor, row, block, mx, got 'column'"),
        (dict(scales="given"), "scale must be given with .*, got scale=None and scales='given'"),
        (dict(scale=torch.ones(1)), "scale must be given with .*, got scale=a tensor and scales='row'"),
        (dict(dtype=torch.float16), "dtype must be .*, got torch.float16"),
    ):
        with pytest.raises(ValueError, match=text):
            rt.quantized_rms_norm(x, w, 1e-6, **arguments)
    with pytest.raises(RuntimeError, match="MX has codes of floating point|no dtype for e8m0"):
        rt.quantized_rms_norm(x, w, 1e-6, scales="mx", dtype=torch.int8)
    for call, error, text in (
        (lambda: rt.quantized_rms_norm(x.double()), NotImplementedError, "x: quantized norms support .*; got x torch.float64 on cpu"),
        (lambda: rt.quantized_rms_norm(x, w.half(), residual=r.bfloat16()), NotImplementedError,
         "got x torch.float32, residual torch.bfloat16, weight torch.float16 on cpu"),
        (lambda: rt.quantized_rms_norm(x.numpy()), TypeError, "x: expected a torch.Tensor, got ndarray"),
        (lambda: rt.quantized_rms_norm(x, w[:1]), ValueError, r"weight: expected the shape \[64\], got \[1\]"),
        (lambda: rt.quantized_rms_norm(x, w, residual=r[:1]), ValueError, "residual: expected the shape"),
        (lambda: rt.quantized_rms_norm(x, w, NAN), ValueError, "eps: expected a finite number"),
        (lambda: rt.quantized_rms_norm(x, w, torch.tensor(1.0, requires_grad=True)), TypeError, "eps: expected a number, got a tensor that"),
        (lambda: rt.quantized_rms_norm(x, w, weight_offset=torch.ones(1)), TypeError, "weight_offset: expected a number"),
        (lambda: rt.quantized_rms_norm(x, w, cast_before_weight=1), TypeError, "cast_before_weight: expected a bool, got int"),
        (lambda: rt.quantized_rms_norm(x, scales="given", scale=torch.ones(2)), ValueError, "scale: expected one element of float32"),
        (lambda: rt.quantized_rms_norm(x, scales="given", scale=1.0), TypeError, "scale: expected a torch.Tensor, got float"),
        (lambda: rt.quantized_rms_norm(x, scales="given", scale=torch.ones(1, device="meta")), ValueError, "scale: expected the device"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_a_forked_worker_of_a_data_loader():
    code = """if True:
        import torch, rmsnorm.torch as rt
        x, w = torch.randn(4096, 1024), torch.randn(1024)
        y = rt.rms_norm(x, w, 1e-6)
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return bool((rt.rms_norm(x, w, 1e-6) == y).all())
        loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork", timeout=60)
        assert all(bool(batch.all()) for batch in loader)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


def test_importing_does_not_import_what_most_programs_do_not_need():
    code = "import sys, rmsnorm, rmsnorm.arrays; assert not {'torch', 'jax', 'numpy'} & set(sys.modules); " \
        "import rmsnorm.torch; assert not {'jax', 'torch.distributed.tensor', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
