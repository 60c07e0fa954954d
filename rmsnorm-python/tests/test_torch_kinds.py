"""PyTorch: L2 norms, cast orders and a dtype of y that is not that of x. Values, gradients, derivatives of every kind, the ways of
programs, and errors."""

import copy
import io

import pytest
from conftest import framework, need
from judge import judge_gated

torch = framework("torch")
import torch.nn.functional as F  # noqa: E402
from test_torch_derivatives import FIRST, SECOND, by_position, compiler_of, near  # noqa: E402
from test_torch_gated import EPS, both, exact_kernels, make, operator_arguments, ours, random, theirs  # noqa: E402, F401
from test_torch_ways import WAYS  # noqa: E402

import rmsnorm.torch as rt  # noqa: E402
from rmsnorm.torch import functional  # noqa: E402

OPS = torch.ops.rmsnorm
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


# (kind, options, the inputs as in test_torch_gated, groups).
FORMS = [
    ("l2", {}, "x", 1), ("l2", dict(weight_offset=0.5), "xw", 1), ("l2", {}, "xrw", 2), ("l2", {}, "xzwb", 1), ("l2", {}, "xZw", 4),
    ("l2", dict(clamped=True), "xw", 1), ("l2", dict(clamped=True), "xzw", 4), ("l2", dict(clamped=True), "xrb", 2),
    ("rms", dict(cast_order="rstd_first", weight_offset=0.5), "xw", 1), ("rms", dict(cast_order="rstd_first"), "xrzw", 2),
    ("layer", dict(cast_order="rstd_first"), "xwb", 1), ("rms", dict(cast_order="weight_first", weight_offset=0.5), "xw", 1),
    ("rms", dict(cast_order="weight_first"), "xzwb", 2), ("layer", dict(cast_order="weight_first"), "xwb", 1),
    ("l2", dict(cast_order="weight_first", clamped=True), "xw", 1), ("layer", dict(cast_order="before_weight"), "xwb", 1),
]
ROWS = torch.tensor([[0.01], [1.0], [3.0]])


def given_to(names, dtype=F32):
    tensors = make(names, dtype)
    return {name: (tensor * ROWS.to(dtype) if name in "xr" else tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype, weight_dtype", [(F32, F32), (BF16, BF16), (BF16, F32), (F16, F16)])
@pytest.mark.parametrize("names, groups", [("x", 1), ("xw", 1), ("xwb", 4), ("xzw", 1), ("xZw", 4), ("xrw", 1)])
@pytest.mark.parametrize("clamped", [False, True])
def test_l2_norms_are_within_their_bounds(device, dtype, weight_dtype, names, groups, clamped):
    """An L2 norm of rows of 4**k elements is an RMS norm with eps / cols, whose result is divided by 2**k: exact scalings of its bounds."""
    need(device, device == "cpu" or torch.cuda.is_available(), "PyTorch finds no such device")
    cols, eps = 256 * groups, 0.0 if clamped else 0.25
    tensors = make(names, dtype, weight_dtype, None, (3, 7), cols)
    if "w" in tensors:
        # A 16th of a smaller weight may be no number of float16.
        tensors["w"] = tensors["w"].abs().clamp_min(2.0**-6).copysign(tensors["w"])
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in tensors.items()}
    # Rows that are clamped are in the next test.
    norm = rt.Norm.l2(0.0 if not clamped else 2.0**-20, clamped=clamped) if clamped else rt.Norm.l2(eps)
    norm = norm.groups(groups) if groups != 1 else norm
    norm = norm.residual(leaves["r"]) if "r" in names else norm
    norm = norm.gate_after(leaves["z"]) if "z" in names else norm.gate_before(leaves["Z"]) if "Z" in names else norm
    found = norm.apply(*map(leaves.get, "xwb"))
    got = dict(zip("yh", found if "r" in names else (found,)))
    arriving = [random(3, 7, cols, dtype=result.dtype).to(device) for result in got.values()]
    torch.autograd.backward(tuple(got.values()), tuple(arriving))
    long = {"x": "x", "r": "residual", "z": "gate", "Z": "gate", "w": "weight", "b": "bias"}
    got |= {f"d{long[name]}": leaf.grad for name, leaf in leaves.items()}
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves.values()) and got["y"].dtype == dtype
    inputs = {long[name]: leaf.detach() for name, leaf in leaves.items()} | dict(zip(("dy", "dresidual_out"), arriving))
    inputs["weight"] = inputs.get("weight", torch.ones(cols, device=device)) / 16
    if "dweight" in got:
        got["dweight"] = got["dweight"] * 16
    judge_gated("rms_norm", eps / 256, inputs, got, "silu", "Z" in names, groups)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_clamped_norm_divides_small_rows_by_eps(dtype):
    x, w, dy = random(6, 64, dtype=dtype), random(64, dtype=dtype), random(6, 64, dtype=dtype)
    x = (x * torch.tensor([0.0, 1e-6, 1e-3, 1.0, 1e3, 1e-3]).to(dtype)[:, None]).requires_grad_()
    w.requires_grad_()
    y = rt.l2_norm(x, w, 0.25, clamped=True)
    expected = F.normalize(x.double(), eps=0.25) * w.double()
    exact = torch.autograd.grad(expected, (x, w), dy.double())
    # Four roundings: of rstd, of two products, and the last.
    u = torch.finfo(dtype).eps / 2
    for got, right in zip((y, *torch.autograd.grad(y, (x, w), dy)), (expected, *exact), strict=True):
        assert got.dtype == dtype
        assert (got.double() - right.double()).abs().max() <= 8 * u * right.double().abs().max()
    small = slice(0, 3)
    assert torch.equal(rt.l2_norm(x, None, 0.25, clamped=True)[small], (x * 4)[small])
    assert rt.l2_norm(torch.zeros(1, 8), eps=0.0, clamped=True).isnan().all()
    assert torch.equal(rt.l2_norm(torch.zeros(1, 8), eps=1e-12, clamped=True), torch.zeros(1, 8))


def chain(order, x, w, gate=None, is_layer=False):
    """The chains of models, in the dtypes of their tensors."""
    mean = lambda rows: rows - rows.mean(-1, keepdim=True) if is_layer else rows  # noqa: E731
    if order == "weight_first":
        h = mean((x.float() * w.float()).to(x.dtype).float())
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
        return (y if gate is None else y * F.silu(gate.float())).to(x.dtype)
    h = mean(x.float())
    y = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS).to(x.dtype).float()).to(x.dtype)
    y = y if w is None else w * y
    return y if gate is None else (y * F.silu(gate.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("of_weight", [None, F32, "same"])
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("order", ["rstd_first", "weight_first"])
def test_the_roundings_of_a_cast_order(order, dtype, of_weight, is_layer, has_gate):
    """A few values round to the other side of a tie. With another order, many differ."""
    if of_weight is None and order == "weight_first":
        return
    x, z = random(64, 512, dtype=dtype), random(64, 512, dtype=dtype) if has_gate else None
    w = None if of_weight is None else random(512, dtype=dtype if of_weight == "same" else of_weight)
    norm = lambda order: rt.Norm.layer(EPS, cast_order=order) if is_layer else rt.Norm.rms(EPS, cast_order=order)  # noqa: E731
    call = lambda order: (norm(order) if z is None else norm(order).gate_after(z)).apply(x, w)  # noqa: E731
    expected = chain(order, x, w, z, is_layer).to(dtype)
    differ = {name: float((call(name) != expected).float().mean()) for name in ("at_store", "before_weight", "rstd_first", "weight_first")
              if w is not None or name != "weight_first"}
    assert differ.pop(order) < 0.01 < 0.03 < min(differ.values()), differ
    with torch.no_grad():
        args = functional.Form(is_layer, EPS, cast_order=order, activation="silu"), x, None, z, w, None, None, None
        assert (functional.fallback.unchecked(*args)[0] != expected).float().mean() < 0.01


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("x_dtype, y_dtype", [(F32, BF16), (F32, F16), (BF16, F32), (F16, F32)])
@pytest.mark.parametrize("of_weight", ["x", "y", "f32"])
@pytest.mark.parametrize("kind, names, groups", [("rms", "x", 1), ("rms", "xw", 1), ("layer", "xwb", 1), ("rms", "xzw", 2), ("layer", "xzwb", 1)])
def test_y_of_another_dtype_is_within_the_bounds_of_the_wide_row(device, x_dtype, y_dtype, of_weight, kind, names, groups):
    need(device, device == "cpu" or torch.cuda.is_available(), "PyTorch finds no such device")
    weight_dtype = dict(x=x_dtype, y=y_dtype, f32=F32)[of_weight]
    leaves = {name: random(*(() if name in "wb" else (3, 7)), 264, dtype=weight_dtype if name in "wb" else y_dtype if name == "z" else x_dtype)
              for name in names}
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    norm = getattr(rt.Norm, kind)(EPS, out_dtype=y_dtype)
    norm = norm.groups(groups) if groups != 1 else norm
    norm = norm.gate_after(leaves["z"]) if "z" in names else norm
    y = norm.apply(*map(leaves.get, "xwb"))
    dy = random(3, 7, 264, dtype=y_dtype).to(device)
    assert y.dtype == y_dtype
    y.backward(dy)
    long = {"x": "x", "z": "gate", "w": "weight", "b": "bias"}
    got = {"y": y} | {f"d{long[name]}": leaf.grad for name, leaf in leaves.items()}
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves.values())
    inputs = {long[name]: leaf.detach().float() for name, leaf in leaves.items()} | {"dy": dy.float()}
    judge_gated("layer_norm" if kind == "layer" else "rms_norm", EPS, inputs, got, "silu", False, groups)


def test_kernels_run_for_each_kind_order_and_dtype_of_y():
    norms = [(F32, F32, rt.Norm.l2()), (F32, F32, rt.Norm.l2(clamped=True)), (BF16, BF16, rt.Norm.rms(cast_order="rstd_first")),
             (BF16, BF16, rt.Norm.rms(cast_order="weight_first")), (BF16, F32, rt.Norm.layer(cast_order="before_weight"))]
    norms += [(x_dtype, F32, rt.Norm.rms(EPS, out_dtype=y_dtype)) for x_dtype, y_dtype in ((F32, BF16), (F32, F16), (BF16, F32), (F16, F32))]
    for x_dtype, weight_dtype, norm in norms:
        x, w = random(3, 64, dtype=x_dtype, grad=True), random(64, dtype=weight_dtype, grad=True)
        with torch.profiler.profile() as profile:
            norm.apply(x, w).sum().backward()
        assert {"rmsnorm::norm", "rmsnorm::norm_backward"} <= {event.key for event in profile.key_averages()}, norm
    # No kernel has these pairs of dtypes.
    x = random(3, 64, dtype=F16)
    assert rt.rms_norm(x, None, EPS, out_dtype=BF16).dtype == BF16 and rt.rms_norm(x, None, EPS, out_dtype=torch.float64).dtype == torch.float64
    assert torch.equal(rt.rms_norm(x, None, EPS, out_dtype=F16), rt.rms_norm(x, None, EPS))


def test_a_function_a_value_and_a_module_are_one_norm():
    x, w = random(3, 16, dtype=BF16), random(16, dtype=BF16)
    assert torch.equal(rt.l2_norm(x, w, 0.3, groups=2, weight_offset=0.5), rt.Norm.l2(0.3, weight_offset=0.5).groups(2).apply(x, w))
    module = rt.L2Norm(16, 0.3, True, groups=2, clamped=True, weight_offset=0.5, dtype=BF16)
    with torch.no_grad():
        module.weight.copy_(w)
    assert torch.equal(module(x), rt.l2_norm(x, w, 0.3, groups=2, clamped=True, weight_offset=0.5))
    assert "groups=2" in repr(module) and "clamped=True" in repr(module) and not list(rt.L2Norm(16).parameters())
    assert torch.equal(rt.L2Norm(16)(x), rt.l2_norm(x))
    for order in ("at_store", "before_weight", "rstd_first", "weight_first"):
        module = rt.RMSNorm(16, 0.3, dtype=BF16, cast_order=order, weight_offset=1.0)
        with torch.no_grad():
            module.weight.copy_(w)
        expected = rt.rms_norm(x, w, 0.3, cast_order=order, weight_offset=1.0)
        assert torch.equal(module(x), expected) and order in repr(module)
        assert torch.equal(expected, rt.Norm.rms(0.3, cast_order=order, weight_offset=1.0).apply(x, w))
        assert torch.equal(rt.rms_norm(x, (16,), w, 0.3, cast_order=order, weight_offset=1.0), expected)
    assert torch.equal(rt.rms_norm(x, w, 0.3, cast_order="before_weight"), rt.rms_norm(x, w, 0.3, cast_before_weight=True))
    assert torch.equal(rt.rms_norm(x, w, 0.3, cast_order="at_store"), rt.rms_norm(x, w, 0.3))
    module = rt.RMSNorm(16, 0.3, dtype=BF16, out_dtype=F32)
    assert module(x).dtype == F32 and "out_dtype=torch.float32" in repr(module)
    assert rt.layer_norm(x, out_dtype=F32).dtype == F32 and rt.rms_norm_gated(x, x.float(), out_dtype=F32).dtype == F32
    wide = random(3, 5, 48)
    x = wide[..., :24]
    assert torch.equal(rt.l2_norm(x), rt.l2_norm(x.contiguous()))
    assert torch.equal(rt.l2_norm(x.unflatten(-1, (4, 6)), normalized_shape=(4, 6)).flatten(-2), rt.l2_norm(x))
    torch.testing.assert_close(rt.l2_norm(x, groups=4), rt.l2_norm(x.unflatten(-1, (4, 6))).flatten(-2))
    assert rt.l2_norm(random(0, 8)).shape == (0, 8) and rt.l2_norm(random(2, 0)).shape == (2, 0)


# Derivatives.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, options, names, groups", FORMS, ids=range(len(FORMS)))
def test_gradcheck_and_gradgradcheck(exact_kernels, kind, options, names, groups):
    tensors = make(names, torch.float64, rows=(2,), cols=2 * groups + 2 * (groups == 1))
    tensors = {name: tensor * torch.tensor([[0.02], [2.0]], dtype=torch.float64) if name in "xr" else tensor for name, tensor in tensors.items()}
    function = by_position(lambda given: ours(kind, options, groups)(tensors | given), names)
    leaves = [tensors[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIRST | SECOND)
def test_every_way_to_differentiate(name):
    for form in FORMS:
        near(*both(form, (FIRST | SECOND)[name], make=given_to))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["grad", "jvp", "hessian", "vmap of grad"])
def test_every_way_under_a_compiler(name):
    for form in (FORMS[5], FORMS[11]):
        near(*both(form, (FIRST | SECOND)[name], compiler_of(name, given_to(form[2]).values()), make=given_to))


@pytest.mark.parametrize("x_dtype, y_dtype", [(F32, BF16), (BF16, F32)])
@pytest.mark.parametrize("name", ["grad", "jvp", "hessian", "vmap of grad", "create_graph"])
def test_derivatives_of_a_y_of_another_dtype(x_dtype, y_dtype, name):
    x, w, dy = random(3, 24, dtype=x_dtype), random(24), random(3, 24)
    ours = lambda x, w: (rt.rms_norm(x, w, EPS, out_dtype=y_dtype).double() * dy).sin().sum()  # noqa: E731
    theirs = lambda x, w: (torch.nn.functional.rms_norm(x, (24,), w, EPS) * dy.double()).sin().sum()  # noqa: E731
    got, right = (FIRST | SECOND)[name](ours)(x, w), (FIRST | SECOND)[name](theirs)(x.double(), w.double())
    flat = lambda found: torch.utils._pytree.tree_leaves(found)  # noqa: E731
    for a, b in zip(flat(got), flat(right), strict=True):
        assert (a.double() - b).abs().max() <= 2.0**-5 * b.abs().max().clamp_min(1.0)


@pytest.mark.parametrize("kind, order", [(2, 0), (3, 0), (0, 2), (0, 3), (1, 3), (2, 1)])
def test_opcheck(kind, order):
    given, _ = operator_arguments("layer" if kind == 1 else "rms", "xzwb", 2)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    options = EPS, 0.5, kind, order, True, False, 2
    x, _, z, w, b = given
    _, _, mean, rstd = OPS.norm(*given, *options, 0)
    backward = x, x, z, w, b, mean if kind == 1 else None, rstd, None, *options
    # With the weight first there is no residual, nor a gradient of one.
    for needs in ((True, True, True, True, False), (True, False, False, True, order != 3)):
        assert set(torch.library.opcheck(OPS.norm_backward.default, (*backward, *needs), test_utils=tests).values()) == {"SUCCESS"}
    given = [tensor if tensor is None else tensor.requires_grad_() for tensor in given]
    assert set(torch.library.opcheck(OPS.norm.default, (*given, *options, 0)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("x_dtype, y_dtype, number", [(F32, BF16, 3), (F32, F16, 2), (BF16, F32, 1), (F32, F32, 1)])
def test_operators_of_a_y_of_another_dtype(x_dtype, y_dtype, number):
    x, w = random(3, 24, dtype=x_dtype, grad=True), random(24, dtype=y_dtype, grad=True)
    args = x, None, None, w, None, EPS, 0.0, 0, 0, False, False, 1, number
    y, _, _, rstd = OPS.norm(*args)
    assert y.dtype == y_dtype
    assert set(torch.library.opcheck(OPS.norm.default, args).values()) == {"SUCCESS"}
    found = OPS.norm_backward(y.detach(), x.detach(), None, w.detach(), None, None, rstd.detach(), None, EPS, 0.0, 0, 0, False, False, 1,
                              x_dtype == y_dtype, False, True, False, x_dtype != y_dtype)
    assert found[0 if x_dtype == y_dtype else 4].dtype == x_dtype and found[2].dtype == y_dtype


# Programs.


MODULES = {
    "l2": lambda: rt.L2Norm(8), "l2, clamped, groups": lambda: rt.L2Norm(8, 1.0, True, clamped=True, groups=2),
    "rstd first": lambda: rt.RMSNorm(8, EPS, cast_order="rstd_first", dtype=BF16), "weight first": lambda: rt.RMSNorm(8, EPS, cast_order="weight_first"),
    "float64": lambda: rt.L2Norm(8, EPS, True).double(), "two dimensions": lambda: rt.L2Norm((4, 8), EPS, True, weight_offset=1.0),
    "wider": lambda: rt.RMSNorm(8, EPS, dtype=BF16, out_dtype=F32), "narrower": lambda: rt.RMSNorm(8, EPS, out_dtype=BF16),
    "gate, weight first": lambda: rt.RMSNormGated(8, EPS, cast_order="weight_first"),
}


@pytest.mark.parametrize("name", MODULES)
def test_programs_go_the_same_ways(name):
    module = MODULES[name]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    dtype = next((parameter.dtype for parameter in module.parameters()), F32)
    args = tuple(torch.randn(3, 4, 8, dtype=dtype) for _ in range(1 + ("gate" in name)))
    expected = module(*args)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    buffer.seek(0)
    program = torch.export.export(module, args)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for found in (torch.fx.symbolic_trace(module), torch.jit.trace(module, args), torch.jit.load(buffer), program.module(),
                  program.run_decompositions().module(), compiled):
        got = found(*args)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)
    assert "float64" in name or "rmsnorm.exported_norm.default" in {str(node.target) for node in program.graph.nodes}
    leaves = [arg.requires_grad_() for arg in args]
    for found in (compiled, program.module()):
        got, right = (torch.autograd.grad(one(*leaves).sin().sum(), [*leaves, *one.parameters()]) for one in (found, module))
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("way", [way for way in WAYS if "jagged" not in way])
def test_every_way_through_pytorch(way, tmp_path):
    norms = rt.L2Norm(8, EPS), rt.L2Norm(8, 4.0, clamped=True, groups=2), rt.RMSNorm(8, EPS, cast_order="weight_first"), rt.RMSNorm(8, EPS, cast_order="rstd_first")
    model, x = torch.nn.Sequential(*norms), torch.randn(3, 8)
    exact = copy.deepcopy(model).double()(x.double()).float()
    torch.testing.assert_close(WAYS[way](model, x, tmp_path), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_programs_have_the_bits_of_eager(backend):
    w = random(24, grad=True)
    for function in (
        lambda x: rt.l2_norm(x, w, EPS, groups=2), lambda x: rt.l2_norm(x, w, 2.0, clamped=True), lambda x: rt.rms_norm(x, w, EPS, cast_order="weight_first"),
        lambda x: rt.rms_norm(x, w, EPS, out_dtype=BF16),
    ):
        torch._dynamo.reset()
        x, found = random(3, 5, 24, grad=True), []
        for call in (torch.compile(function, fullgraph=True, backend=backend), function):
            y = call(x)
            found.append([y, *torch.autograd.grad(y.float().sin().sum(), (x, w))])
        for got, right in zip(*found, strict=True):
            torch.testing.assert_close(got, right, rtol=0 if backend == "aot_eager" else 1e-5, atol=0 if backend == "aot_eager" else 1e-6)


def test_fake_tensors_modes_and_other_devices():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w = torch.empty(3, 64, dtype=BF16), torch.empty(64)
        assert rt.l2_norm(x, w).dtype == BF16 and rt.rms_norm(x, w, out_dtype=F32).dtype == F32
    x = torch.empty(2, 8, device="meta")
    assert rt.l2_norm(x, x[0], groups=2).is_meta and rt.rms_norm(x, x[0], out_dtype=BF16).dtype == BF16
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x, w = random(3, 8), random(8)
    for call in (lambda: rt.l2_norm(x, w, 0.3, groups=2), lambda: rt.rms_norm(x, w, 0.3, cast_order="weight_first"),
                 lambda: rt.rms_norm(x, w, 0.3, out_dtype=BF16)):
        with Mode():
            y = call()
        assert functional.normalize in seen and torch.equal(y, call())
        seen.clear()


@pytest.mark.parametrize("kind, options, names, groups", FORMS, ids=range(len(FORMS)))
def test_float64_is_computed_by_pytorch(kind, options, names, groups):
    tensors = given_to(names, torch.float64)
    for got, right in zip(ours(kind, options, groups)(tensors), theirs(kind, options, groups)(tensors), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


# Errors.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["eager", "grad", "compile", "func"])
@pytest.mark.parametrize("error, text, call", [
    (ValueError, "cast_order: expected one of at_store, before_weight, rstd_first, weight_first, got 'first'",
     lambda x, w: rt.rms_norm(x, w, cast_order="first")),
    (ValueError, "weight: expected a tensor with cast_order=\"weight_first\"", lambda x, w: rt.rms_norm(x, cast_order="weight_first")),
    (TypeError, "cast_order: expected no residual with weight_first", lambda x, w: rt.Norm.rms(cast_order="weight_first").residual(x).apply(x, w)),
    (TypeError, "cast_order: expected no gate before the norm with weight_first",
     lambda x, w: rt.rms_norm_gated(x, x, w, norm_before_gate=False, cast_order="weight_first")),
    (TypeError, "cast_order: expected no residual after", lambda x, w: rt.Norm.rms(cast_order="rstd_first").residual_after(x).apply(x, w)),
    (TypeError, "l2_norm: expected no residual after", lambda x, w: rt.Norm.l2().residual_after(x).apply(x, w)),
    (TypeError, "out_dtype: expected a floating-point dtype of at least 16 bits, got torch.int32", lambda x, w: rt.rms_norm(x, w, out_dtype=torch.int32)),
    (TypeError, "out_dtype: expected a floating-point dtype of at least 16 bits, got 'bf16'", lambda x, w: rt.rms_norm(x, w, out_dtype="bf16")),
    (TypeError, "out_dtype: expected no residual, got one", lambda x, w: rt.Norm.rms(out_dtype=BF16).residual(x).apply(x, w)),
    (TypeError, "out_dtype: expected no gate before the norm", lambda x, w: rt.rms_norm_gated(x, x, w, norm_before_gate=False, out_dtype=BF16)),
    (TypeError, "gate: expected the dtype of y, torch.bfloat16", lambda x, w: rt.rms_norm_gated(x, x, w, out_dtype=BF16)),
    (TypeError, "clamped: expected a bool, got int", lambda x, w: rt.l2_norm(x, w, clamped=1)),
    (ValueError, "eps: expected a finite number of at least 0, got -1.0", lambda x, w: rt.l2_norm(x, w, -1.0)),
    (ValueError, "eps: expected 0 or a number from 2\\*\\*-63 to 2\\*\\*63", lambda x, w: rt.l2_norm(x, w, 1e-30, clamped=True)),
    (ValueError, "groups: expected a number that divides the 8 columns", lambda x, w: rt.l2_norm(x, w, groups=3)),
    (ValueError, r"weight: expected the shape \[8\], got \[7\]", lambda x, w: rt.l2_norm(x, w[:-1])),
])
def test_every_way_refuses_what_is_wrong(dtype, way, error, text, call):
    x, w = random(2, 8, dtype=dtype, grad=way == "grad"), random(8, dtype=dtype)
    run = {"compile": torch.compile(call, backend="eager"), "func": lambda x, w: torch.func.vjp(lambda x: call(x, w), x)}.get(way, call)
    with pytest.raises(Exception if way == "compile" else error, match=text):
        run(x, w)


@pytest.mark.parametrize("options, text", [
    (dict(kind=4), "kind: expected 0 to 3, got 4"), (dict(cast_order=-1), "cast_order: expected 0 to 3, got -1"),
    (dict(y_dtype=7), "y_dtype: expected 0 to 3, got 7"), (dict(residual=True, y_dtype=3), "residual"), (dict(weight=None, cast_order=3), "weight"),
    (dict(kind=3, eps=1e-30), "eps"),
])
def test_operators_refuse_what_is_wrong(options, text):
    x, given = random(2, 8), dict(kind=0, cast_order=0, y_dtype=0, eps=EPS, residual=None, weight=random(8)) | options
    residual = x if given["residual"] else None
    with pytest.raises(RuntimeError, match=text):
        OPS.norm(x, residual, None, given["weight"], None, given["eps"], 0.0, given["kind"], given["cast_order"], False, False, 1, given["y_dtype"])
