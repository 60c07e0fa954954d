"""PyTorch on CUDA: streams, graphs, memory, and products of codes. test_torch.py tests the
values."""

import os
import subprocess
import sys

import pytest
from conftest import framework, need

torch = framework("torch")
import torch.nn.functional as F  # noqa: E402

import rmsnorm.torch as rt  # noqa: E402

need("cuda", torch.cuda.is_available(), "PyTorch finds no such device")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


def random(*shape, dtype=torch.bfloat16, grad=False):
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def test_calls_go_to_the_current_stream():
    """The norm reads the result of a long product on a side stream. On another stream it would run
    too early."""
    a, w = random(6000, 6000), random(6000)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(side):
            x = torch.zeros(6000, 6000, device="cuda", dtype=torch.bfloat16)
            product = a @ a
            x.copy_(product)
            y = rt.rms_norm(x, w, 1e-6)
        torch.cuda.synchronize()
        assert torch.equal(y, rt.rms_norm(product, w, 1e-6))


@pytest.mark.parametrize("function", [
    lambda x, w: rt.rms_norm(x, w, 1e-6), lambda x, w: rt.layer_norm(x, w, w), lambda x, w: sum(rt.add_rms_norm(x, 2 * x, w, 1e-6)),
    lambda x, w: rt.layer_norm_add(x, 2 * x, w, w), lambda x, w: sum(rt.rms_norm_add_rms_norm(x, 2 * x, w, w, 1e-6)),
])
def test_graphs_replay_with_new_data(function):
    x, w, dy = random(64, 4096, grad=True), random(4096, grad=True), random(64, 4096)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(function(x, w), (x, w), dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = function(x, w)
        gradients = torch.autograd.grad(y, (x, w), dy)
    for _ in range(5):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        for tensor in (y.detach(), *gradients):
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = function(x, w)
        for got, exact in zip((y, *gradients), (expected, *torch.autograd.grad(expected, (x, w), dy))):
            assert torch.equal(got, exact)


def test_the_first_call_of_a_shape_may_be_captured():
    """The capture compiles the kernels, but the graph does not contain that."""
    x, w = random(3, 1234), random(1234)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = rt.rms_norm(x, w, 1e-6), *rt.rms_norm_add_rms_norm(x, x, w, w, 1e-6)
    for result in results:
        result.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    expected = rt.rms_norm(x, w, 1e-6), *rt.rms_norm_add_rms_norm(x, x, w, w, 1e-6)
    assert all(torch.equal(got, exact) for got, exact in zip(results, expected))


@pytest.fixture
def kernels_in_compiled_programs():
    rt.set_compiled("kernels")
    yield
    rt.set_compiled("auto")


@pytest.mark.usefixtures("kernels_in_compiled_programs")
def test_reduce_overhead():
    """Only norms, so that the graphs have the same bits as eager mode."""
    block = torch.nn.Sequential(rt.RMSNorm(1024, eps=1e-6), rt.LayerNorm(1024)).to("cuda", torch.bfloat16)
    parameters = tuple(block.parameters())
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        x, dy = random(64, 1024, grad=True), random(64, 1024)
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        got = [tensor.clone() for tensor in (y, *torch.autograd.grad(y, (x, *parameters), dy))]
        expected = block(x)
        for a, b in zip(got, (expected, *torch.autograd.grad(expected, (x, *parameters), dy)), strict=True):
            assert torch.equal(a, b)


def test_memory_is_pytorchs_own_and_no_more_than_results():
    x, w, dy = random(4096, 4096, grad=True), random(4096, grad=True), random(4096, 4096)
    for _ in range(2):
        torch.autograd.grad(rt.rms_norm(x, w, 1e-6), (x, w), dy)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, size = torch.cuda.mem_get_info()[0], x.numel() * x.element_size()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = rt.rms_norm(x, w, 1e-6)
    # y and rstd; x is saved without a copy.
    assert torch.cuda.memory_allocated() - before <= size + 4096 * 4 + 1024
    gradients = torch.autograd.grad(y, (x, w), dy)
    torch.cuda.synchronize()
    # Also dx, dweight and partial sums.
    assert torch.cuda.max_memory_allocated() - before <= 2 * size + 8 * 2**20
    del y, gradients
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - 4 * 2**20


def test_two_norms_around_a_residual_make_two_matrices_forward():
    x, r, w = random(4096, 4096, grad=True), random(4096, 4096), random(4096, grad=True)
    rt.rms_norm_add_rms_norm(x, r, w, w, 1e-6)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y, h = rt.rms_norm_add_rms_norm(x, r, w, w, 1e-6)
    # y, h and the statistics of both; x and h are saved without a copy.
    assert torch.cuda.memory_allocated() - before <= 2 * x.numel() * x.element_size() + 2 * 4096 * 4 + 2048


def test_the_current_device_and_context_stay():
    device = torch.cuda.current_device()
    rt.rms_norm(random(2, 64), None, 1e-6)
    assert torch.cuda.current_device() == device
    for index in range(1, torch.cuda.device_count()):
        x = torch.randn(2, 64, device=f"cuda:{index}", requires_grad=True)
        rt.rms_norm(x, None, 1e-6).sum().backward()
        assert torch.cuda.current_device() == device and x.grad.device == x.device


def test_a_first_call_leaves_the_context_of_its_thread():
    """Runs in a new process that has used CUDA only for an allocation."""
    code = """if True:
        import ctypes, torch, rmsnorm.torch as rt
        driver, current = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        x = torch.randn(4, 64, device="cuda", requires_grad=True)
        def context():
            assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
            return current.value
        before = context()
        rt.rms_norm(x, None, 1e-6).sum().backward()
        assert context() == before, (context(), before)
        import threading
        def work():
            assert driver.cuCtxSetCurrent(None) == 0
            with torch.no_grad():
                rt._sharding.ops.rms_norm_inference(x, None, 1e-6, 0.0, False)
            seen.append(True)
        seen = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [True]
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tensors_of_two_devices_are_refused():
    with pytest.raises((RuntimeError, ValueError), match="device"):
        rt.rms_norm(random(2, 64), torch.ones(64), 1e-6)


def test_threads_may_call_at_the_same_time():
    import threading

    inputs = [(random(100 + index, 2048), random(2048)) for index in range(8)]
    expected, wrong = [rt.rms_norm(x, w, 1e-6) for x, w in inputs], []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(rt.rms_norm(*inputs[index], 1e-6), expected[index]):
                    wrong.append(index)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("scales", ["given", "tensor", "row", "block", "mx"])
def test_codes_go_into_scaled_mm(scales):
    """The product of codes with an E4M3 weight equals the product of the decoded values."""
    rows, cols, out = 256, 512, 384
    x, w = random(rows, cols), random(cols)
    scale = torch.tensor([0.02], device="cuda") if scales == "given" else None
    codes, found = rt.quantized_rms_norm(x, w, 1e-6, scales=scales, scale=scale)
    b = (torch.randn(out, cols, device="cuda") * 0.5).to(torch.float8_e4m3fn).t()
    ones = lambda *shape: torch.ones(shape, device="cuda")  # noqa: E731
    if scales in ("given", "tensor"):
        wide, scale_b = codes.float() * found, ones(1).reshape(found.shape)
    elif scales == "row":
        wide, scale_b = codes.float() * found, ones(1, out)
    elif scales == "block":
        # DeepSeek's recipe: blocks of 1x128 for activations, 128x128 for the weight.
        wide, scale_b = codes.float() * found.repeat_interleave(128, 1), ones(cols // 128, out // 128).t().contiguous().t()
    else:
        need("blackwell", torch.cuda.get_device_capability()[0] >= 10, "MX products need compute capability 10.0")
        wide, scale_b = None, torch.full((out // 128 * cols // 128 * 512,), 127, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
    try:
        got = torch._scaled_mm(codes, b, scale_a=found, scale_b=scale_b, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError) as error:
        if scales == "block" and "CUDA" in str(error) and "12.9" in str(error):
            pytest.skip(f"_scaled_mm: {error}")
        raise
    exact = wide.double() @ b.double()
    error = ((got.double() - exact).norm() / exact.norm()).item()
    # One rounding to bf16, and the tensor cores' sums of products, which keep about 14 bits.
    assert error < 2**-8, error
    norm = F.rms_norm(x.double(), (cols,), w.double(), 1e-6)
    assert ((wide.double() - norm).norm() / norm.norm()).item() < 2**-4


def test_without_nvrtc_pytorchs_own_norms_are_used_and_it_is_said_why():
    code = """if True:
        import warnings, torch, torch.nn.functional as F, rmsnorm.torch as rt
        x = torch.randn(4, 64, device="cuda")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y, again = rt.rms_norm(x, None, 1e-6), rt.rms_norm(x, None, 1e-6)
        torch.testing.assert_close(y, F.rms_norm(x, (64,), None, 1e-6))
        compiled = torch.compile(lambda x: rt.rms_norm(x, None, 1e-6), fullgraph=True)
        torch.testing.assert_close(compiled(x), F.rms_norm(x, (64,), None, 1e-6))
        said = [str(warning.message) for warning in caught if "rmsnorm" in str(warning.message)]
        assert len(said) == 1 and "NVRTC" in said[0], said
    """
    environment = os.environ | {"RMSNORM_NVRTC": "/nowhere/libnvrtc.so"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_arrays_of_cupy_and_pytorch_by_dlpack():
    cupy = framework("cupy")
    from rmsnorm import arrays

    x, w = cupy.random.standard_normal((7, 300), dtype=cupy.float32), cupy.random.standard_normal(300, dtype=cupy.float32)
    y = arrays.rms_norm(x, w, 1e-6)
    cupy.cuda.Device().synchronize()
    expected = F.rms_norm(torch.from_dlpack(x).double(), (300,), torch.from_dlpack(w).double(), 1e-6)
    torch.testing.assert_close(torch.from_dlpack(y).double(), expected, rtol=1e-6, atol=1e-6)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        again = arrays.rms_norm(x, w, 1e-6, stream=stream.ptr)
    stream.synchronize()
    assert (again == y).all()
    x, w = random(7, 300, dtype=torch.float32), random(300, dtype=torch.float32)
    y = arrays.rms_norm(x, w, 1e-6)
    found = arrays.rms_norm_add_rms_norm(x, x, w, w, 1e-6)
    torch.cuda.synchronize()
    assert torch.equal(y, rt.rms_norm(x, w, 1e-6))
    assert all(torch.equal(got, exact) for got, exact in zip(found, rt.rms_norm_add_rms_norm(x, x, w, w, 1e-6)))
