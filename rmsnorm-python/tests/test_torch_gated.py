"""PyTorch: norms with a gate and with groups of columns. Values, gradients, derivatives of every kind, the ways of programs, errors, and
modules beside those of transformers."""

import copy
import functools
import importlib
import io
import itertools

import pytest
from conftest import framework, need
from judge import judge_gated

torch = framework("torch")
import torch.nn.functional as F  # noqa: E402
from test_torch_derivatives import FIRST, SECOND, by_position, compiler_of, loss_of, near  # noqa: E402
from test_torch_ways import WAYS  # noqa: E402

import rmsnorm.torch as rt  # noqa: E402
from rmsnorm.torch import autograd, functional  # noqa: E402
from rmsnorm.torch.checks import ACTIVATIONS  # noqa: E402

OPS, EPS, COLS = torch.ops.rmsnorm, 1e-2, 24
#: The largest eps of clamped norms. It is beyond some rows of the tests of kinds and below others.
LEAST = 0.4
ACT = {"silu": F.silu, "sigmoid": torch.sigmoid}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


def random(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


# (kind, options, the inputs: x, residual (r), gate after (z) or before the norm (Z), weight (w), bias (b); groups). The gate before the norm
# is a sigmoid, so that both activations are in both lists.
RMS = ("rms", dict(weight_offset=0.5))
FORMS = [(*RMS, "xzw", 1), (*RMS, "xz", 1), (*RMS, "xrzwb", 1), (*RMS, "xZw", 1), (*RMS, "xZ", 3), (*RMS, "xZwb", 2), (*RMS, "xzw", 4),
         (*RMS, "xw", 2), ("layer", {}, "xzwb", 1), ("layer", {}, "xrzw", 2), ("layer", {}, "xZwb", 1), ("layer", {}, "xZb", 3),
         ("layer", {}, "xrwb", 2)]


def make(names, dtype=torch.float32, weight_dtype=None, stream=None, rows=(3,), cols=COLS):
    dtypes = {"w": weight_dtype or dtype, "b": weight_dtype or dtype, "r": stream or dtype}
    return {name: random(*(() if name in "wb" else rows), cols, dtype=dtypes.get(name, dtype)) for name in names}


def norm_of(kind, options, tensors, groups):
    norm = getattr(rt.Norm, kind)(EPS if not options.get("clamped") else LEAST, **options)
    norm = norm.groups(groups) if groups != 1 else norm
    for name, add in (("r", norm.residual), ("z", lambda gate: norm.gate_after(gate)), ("Z", lambda gate: norm.gate_before(gate, "sigmoid"))):
        norm = add(tensors[name]) if name in tensors else norm
    return norm


def ours(kind, options, groups=1):
    """A function from {name: tensor} to (y,) or (y, h)."""

    def call(tensors):
        found = norm_of(kind, options, tensors, groups).apply(*map(tensors.get, "xwb"))
        return found if "r" in tensors else (found,)

    return call


def theirs(kind, options, groups=1):
    """The definition, without the roundings of 16 bits: equations (1) to (6), (19), (22) to (24)."""

    def call(tensors):
        x, r, z, before, w, b = map(tensors.get, "xrzZwb")
        h = x if r is None else x + r
        rows, weight = h if before is None else h * before.sigmoid(), None if w is None else w + options.get("weight_offset", 0.0)
        if options.get("cast_order") == "weight_first":
            rows, weight = rows * weight, None
        rows = rows.unflatten(-1, (groups, -1))
        rows = rows - rows.mean(-1, keepdim=True) if kind == "layer" else rows
        total = rows.square().sum(-1, keepdim=True)
        if options.get("clamped"):
            y = rows / total.sqrt().clamp_min(LEAST)
        else:
            y = rows * ((total if kind == "l2" else total / rows.shape[-1]) + EPS).rsqrt()
        y = y.flatten(-2)
        y = y if weight is None else y * weight
        y = y if b is None else y + b
        y = y if z is None else y * z * z.sigmoid()
        return (y,) if r is None else (y, h)

    return call


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype, weight_dtype, stream", [
    (torch.float32, torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32), (torch.float16, torch.float16, torch.float16),
])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind, options, names, groups", FORMS, ids=range(len(FORMS)))
@pytest.mark.parametrize("rows, cols", [((), 24), ((3, 7), 264), ((2,), 4104)])
def test_values_and_gradients_are_within_their_bounds(device, dtype, weight_dtype, stream, activation, kind, options, names, groups, rows, cols):
    need(device, device == "cpu" or torch.cuda.is_available(), "PyTorch finds no such device")
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in make(names, dtype, weight_dtype, stream, rows, cols).items()}
    norm = getattr(rt.Norm, kind)(EPS, **options).groups(groups)
    norm = norm.residual(leaves["r"]) if "r" in names else norm
    norm = norm.gate_after(leaves["z"], activation) if "z" in names else norm
    norm = norm.gate_before(leaves["Z"], activation) if "Z" in names else norm
    found = norm.apply(*map(leaves.get, "xwb"))
    got = dict(zip("yh", found if "r" in names else (found,)))
    arriving = [random(*rows, cols, dtype=result.dtype).to(device) for result in got.values()]
    torch.autograd.backward(tuple(got.values()), tuple(arriving))
    long = {"x": "x", "r": "residual", "z": "gate", "Z": "gate", "w": "weight", "b": "bias"}
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
        got[f"d{long[name]}"] = leaf.grad
    assert got["y"].dtype == dtype and got["y"].is_contiguous()
    inputs = {long[name]: leaf for name, leaf in leaves.items()} | dict(zip(("dy", "dresidual_out"), arriving))
    judge_gated(f"{kind}_norm", EPS, inputs, got, activation, "Z" in names, groups, options.get("weight_offset", 0.0))


def chain(x, z, w, activation, before, groups=1):
    """The gated norms of transformers: an eager chain in the dtypes of its tensors."""
    rows = x.float() * (ACT[activation](z.float()) if before else 1)
    rows = rows.unflatten(-1, (groups, -1))
    rows = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)).flatten(-2)
    y = w * rows.to(x.dtype)
    return y if before else (y * ACT[activation](z.float())).to(x.dtype)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("before, groups", [(False, 1), (True, 1), (True, 4)])
def test_the_roundings_of_a_chain(weight_dtype, activation, before, groups):
    """A few values round to the other side of a tie, since sums are added in another order. With one rounding, many differ."""
    x, z, w = random(64, 512, dtype=torch.bfloat16), random(64, 512, dtype=torch.bfloat16), random(512, dtype=weight_dtype)
    call = functools.partial(rt.rms_norm_gated, x, z, w, EPS, activation=activation, norm_before_gate=not before, groups=groups)
    expected = chain(x, z, w, activation, before, groups).bfloat16()
    assert (call(cast_before_weight=True) != expected).float().mean() < 0.01 < 0.05 < (call() != expected).float().mean()
    # The fallback has the same roundings.
    on_fallback = functional.fallback.rms_norm_gated(x, z, w, EPS, None, activation, not before, groups, None, 0.0, True)
    assert (on_fallback != expected).float().mean() < 0.01


def test_a_function_a_value_and_a_module_are_one_norm():
    """No option has its default, so that a lost one is noticed."""
    x, z, r, w, b = random(3, 8, dtype=torch.bfloat16), random(3, 8, dtype=torch.bfloat16), random(3, 8), random(8), random(8)
    options = dict(weight_offset=0.25, cast_before_weight=True)
    rms = rt.Norm.rms(0.3, **options)
    call = functools.partial(rt.rms_norm_gated, x, z, w, 0.3, **options)
    assert torch.equal(rms.gate_after(z).apply(x, w), call())
    assert torch.equal(rms.gate_after(z, "sigmoid").groups(2).apply(x, w, b), call(bias=b, activation="sigmoid", groups=2))
    assert torch.equal(rms.gate_before(z).groups(2).apply(x, w), call(norm_before_gate=False, groups=2))
    assert torch.equal(rms.groups(2).apply(x, w), rt.rms_norm_gated(x, None, w, 0.3, groups=2, **options))
    assert torch.equal(rms.groups(1).apply(x, w), rt.rms_norm(x, w, 0.3, **options))
    assert torch.equal(rt.rms_norm_gated(x, None, w, 0.3, **options), rt.rms_norm(x, w, 0.3, **options))
    y, h = rms.residual(r).gate_after(z).apply(x, w)
    assert torch.equal(h, x + r) and torch.equal(y, rms.residual(r).gate_after(z).apply(x, w)[0])
    module = rt.RMSNormGated(8, 0.3, "sigmoid", norm_before_gate=False, groups=2, **options)
    with torch.no_grad():
        module.weight.copy_(w)
    assert torch.equal(module(x, z), call(norm_before_gate=False, groups=2, activation="sigmoid"))
    assert torch.equal(module(x), rms.groups(2).apply(x, w))
    assert "activation='sigmoid', norm_before_gate=False, groups=2" in repr(module)


def test_groups_are_rows_of_their_own():
    x, w, b = random(5, COLS), random(COLS), random(COLS)
    for groups in (2, 3, COLS):
        alone = x.view(5, groups, -1)
        expected = rt.layer_norm(alone, eps=EPS).view(5, COLS) * w + b
        torch.testing.assert_close(rt.Norm.layer(EPS).groups(groups).apply(x, w, b), expected)
        expected = rt.rms_norm(alone, eps=EPS).view(5, COLS)
        torch.testing.assert_close(rt.Norm.rms(EPS).groups(groups).apply(x), expected)


def test_rows_that_are_apart_and_several_dimensions():
    w = random(4, 6)
    wide, gates = random(3, 5, 48), random(5, 3, 24).transpose(0, 1)
    x, z = wide[..., :24], gates
    expected = rt.rms_norm_gated(x.contiguous(), z.contiguous(), w.flatten(), EPS, groups=2)
    assert torch.equal(rt.rms_norm_gated(x, z, w.flatten(), EPS, groups=2), expected)
    folded = rt.rms_norm_gated(x.unflatten(-1, (4, 6)), z.unflatten(-1, (4, 6)), w, EPS, groups=2)
    assert torch.equal(folded.flatten(-2), expected)
    for rows in ((0, 3), (3, 0)):
        x, z, w = random(*rows, 8, grad=True), random(*rows, 8, grad=True), random(8, grad=True)
        for norm in (rt.Norm.rms().gate_after(z), rt.Norm.rms().gate_before(z).groups(2)):
            found = torch.autograd.grad(norm.apply(x, w).sum(), (x, z, w))
            assert found[0].shape == found[1].shape == x.shape and torch.equal(found[2], torch.zeros(8))
    assert rt.rms_norm_gated(random(2, 0), random(2, 0), random(0)).shape == (2, 0)


# Derivatives.


@pytest.fixture
def exact_kernels(monkeypatch):
    """Replaces the kernels by float64 ones, and changes nothing else."""

    def forward(form, *tensors):
        y, h = functional.fallback.unchecked(form, *tensors)
        x, residual, gate, weight = tensors[:4]
        rows = x if h is None else h
        rows = rows * ACT[form.activation](gate) if gate is not None and form.gate_before else rows
        rows = rows * (weight + form.weight_offset) if form.cast_order == "weight_first" else rows
        rows = rows.unflatten(-1, (form.groups, -1))
        mean = rows.mean(-1) if form.is_layer else None
        rows = rows - mean.unsqueeze(-1) if form.is_layer else rows
        total = rows.square().sum(-1)
        if form.l2 == "l2_norm_clamped":
            rstd = 1 / total.sqrt().clamp_min(form.eps)
        else:
            rstd = ((total if form.l2 else total / rows.shape[-1]) + form.eps).rsqrt()
        mean, rstd = (None if one is None else one[..., 0] if form.groups == 1 else one for one in (mean, rstd))
        return y, h, mean, rstd, None, None

    def gradients(*args):
        with torch.no_grad():
            found = autograd._general_by_operations(*args)
        return tuple(args[2].new_empty(0) if tensor is None else tensor.clone() for tensor in found)

    monkeypatch.setattr(autograd, "forward_below", forward)
    monkeypatch.setattr(functional, "forward_below", forward)
    monkeypatch.setattr(autograd, "_general_below", gradients)
    monkeypatch.setattr(functional, "_is_eager", lambda *tensors: False)
    monkeypatch.setattr(functional, "_takes", lambda *tensors, **given: True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind, options, names, groups", FORMS, ids=range(len(FORMS)))
def test_gradcheck_and_gradgradcheck_of_the_same_ways(exact_kernels, kind, options, names, groups):
    """First derivatives in both modes, second ones as backward over backward and forward over backward, and batches of each."""
    tensors = make(names, torch.float64, rows=(2,), cols=2 * groups + 2 * (groups == 1))
    for chosen in (names, *names):
        function = by_position(lambda given: ours(kind, options, groups)(tensors | given), chosen)  # noqa: B023
        leaves = [tensors[name].clone().requires_grad_() for name in chosen]
        assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
        assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_third_derivatives(exact_kernels):
    for kind, options, names, groups in FORMS:
        tensors = make(names, torch.float64, rows=(2,), cols=2 * groups)
        weights = [random(2, 2 * groups, dtype=torch.float64) for _ in range(2)]
        third = lambda f: torch.func.grad(lambda *t: torch.func.grad(lambda *t: torch.func.grad(f)(*t).pow(2).sum())(*t).pow(2).sum())  # noqa: E731
        got, expected = (third(loss_of(function(kind, options, groups), names, weights))(*tensors.values()) for function in (ours, theirs))
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def both(form, transform, compiled=lambda call: call, make=make):
    """(this package's result, the definition in float64)."""
    kind, options, names, groups = form
    tensors, weights = make(names), [random(3, COLS) for _ in range(2)]
    got = compiled(transform(loss_of(ours(kind, options, groups), names, weights)))(*tensors.values())
    exact = transform(loss_of(theirs(kind, options, groups), names, [w.double() for w in weights]))
    return got, exact(*(t.double() for t in tensors.values()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIRST | SECOND)
def test_every_way_to_differentiate(name):
    for form in FORMS:
        near(*both(form, (FIRST | SECOND)[name]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["grad", "jvp", "hessian", "grad of grad", "vmap of grad"])
def test_every_way_under_a_compiler(name):
    for form in ((*RMS, "xrzwb", 2), ("layer", {}, "xZwb", 1)):
        near(*both(form, (FIRST | SECOND)[name], compiler_of(name, make(form[2]).values())))


@pytest.mark.parametrize("makes_gradients", [False, True])
def test_every_choice_of_batched_arguments_is_a_call_for_each_member(makes_gradients):
    names = "xzwb"
    call = by_position(ours("rms", {}, 2), names)
    function = torch.func.grad(lambda *t: call(*t)[0].sin().sum(), argnums=tuple(range(4))) if makes_gradients else call
    for batched in itertools.product((None, 0, -1), repeat=4):
        if all(dim is None for dim in batched):
            continue
        args = [random(*(() if name in "wb" else (4,)), 8) if dim is None else random(3, *(() if name in "wb" else (4,)), 8).movedim(0, dim)
                for name, dim in zip(names, batched)]
        found = torch.func.vmap(function, in_dims=batched)(*args)
        members = [function(*(arg if dim is None else arg.select(dim, k) for arg, dim in zip(args, batched))) for k in range(3)]
        for got, right in zip(found, zip(*members), strict=True):
            torch.testing.assert_close(got, torch.stack(right), rtol=1e-5, atol=1e-5, msg=lambda text: f"{batched}: {text}")  # noqa: B023


def operator_arguments(kind, names, groups):
    """The arguments of `norm`: tensors, and the rest."""
    tensors = make(names)
    x, r, z, before, w, b = map(tensors.get, "xrzZwb")
    return [x, r, z if before is None else before, w, b], \
        (EPS, 0.5, int(kind == "layer"), 0, before is not None, before is not None, groups, 0)


@pytest.mark.parametrize("kind, options, names, groups", [*FORMS, (*RMS, "xwb", 1), ("layer", {}, "xrwb", 1)])
def test_operators_have_derivatives(kind, options, names, groups):
    given, rest = operator_arguments(kind, names, groups)
    leaves = [tensor for tensor in given if tensor is not None]
    order = "".join(name for name in "xrzZwb" if name in names)

    def call(*leaves):
        leaves = iter(leaves)
        return OPS.norm(*[None if tensor is None else next(leaves) for tensor in given], *rest)[: 1 + ("r" in names)]

    exact, wide = by_position(theirs(kind, options | dict(weight_offset=rest[1]), groups), order), [tensor.double() for tensor in leaves]
    tangents = [random(*tensor.shape) for tensor in leaves]
    near(call(*leaves), exact(*wide))
    near(torch.func.jvp(call, tuple(leaves), tuple(tangents))[1], torch.func.jvp(exact, tuple(wide), tuple(t.double() for t in tangents))[1])
    loss = lambda f: lambda *t: sum(y.sin().sum() for y in f(*t))  # noqa: E731
    for transform in (FIRST["grad"], SECOND["hessian"], SECOND["create_graph"], SECOND["vmap of grad"]):
        near(transform(loss(call))(*leaves), transform(loss(exact))(*wide))
    for once, twice in zip(call(*leaves), torch.func.vmap(call)(*[torch.stack([t, t]) for t in leaves])):
        assert torch.equal(torch.stack([once, once]), twice)


@pytest.mark.parametrize("kind, options, names, groups", FORMS, ids=range(len(FORMS)))
def test_opcheck(kind, options, names, groups):
    given, rest = operator_arguments(kind, names, groups)
    x, _, z, w, b = given
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    y, h, mean, rstd = OPS.norm(*given, *rest)
    backward = (x, x if h.numel() == 0 else h, z, w, b if "z" in names else None, mean if kind == "layer" else None, rstd, h if "r" in names else None,
                *rest[:-1], True, z is not None, w is not None, True, "r" in names)
    assert set(torch.library.opcheck(OPS.norm_backward.default, backward, test_utils=tests).values()) == {"SUCCESS"}
    given = [tensor if tensor is None else tensor.requires_grad_() for tensor in given]
    assert set(torch.library.opcheck(OPS.norm.default, (*given, *rest)).values()) == {"SUCCESS"}


# Programs.


MODULES = {
    "silu": lambda: rt.RMSNormGated(8, 1e-6), "sigmoid, cast": lambda: rt.RMSNormGated(8, 1e-6, "sigmoid", cast_before_weight=True),
    "before, groups": lambda: rt.RMSNormGated(8, 1e-6, norm_before_gate=False, groups=2), "float64": lambda: rt.RMSNormGated(8).double(),
    "two dimensions": lambda: rt.RMSNormGated((4, 8), groups=4, weight_offset=1.0), "bfloat16": lambda: rt.RMSNormGated(8, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", MODULES)
def test_programs_go_the_same_ways(name):
    module = MODULES[name]()
    torch.nn.init.normal_(module.weight)
    args = tuple(torch.randn(3, 4, 8, dtype=module.weight.dtype) for _ in range(2))
    expected = module(*args)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    buffer.seek(0)
    program = torch.export.export(module, args)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for found in (torch.fx.symbolic_trace(module), torch.jit.trace(module, args), torch.jit.load(buffer), program.module(),
                  program.run_decompositions().module(), compiled):
        torch.testing.assert_close(found(*args), expected)
    assert "float64" in name or "rmsnorm.exported_norm.default" in {str(node.target) for node in program.graph.nodes}
    leaves = [arg.requires_grad_() for arg in args]
    for found in (compiled, program.module()):
        got, right = (torch.autograd.grad(one(*leaves).sin().sum(), [*leaves, *one.parameters()]) for one in (found, module))
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b)


class Gated(torch.nn.Module):
    """A gated norm whose gate is made of its input."""

    def __init__(self, **options):
        super().__init__()
        self.norm = rt.RMSNormGated(8, 1e-6, **options)
        torch.nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.norm(x, x.flip(-1))


@pytest.mark.parametrize("way", [way for way in WAYS if "jagged" not in way])
def test_every_way_through_pytorch(way, tmp_path):
    norms = Gated(), Gated(norm_before_gate=False, groups=2), Gated(activation="sigmoid", cast_before_weight=True, groups=4)
    model, x = torch.nn.Sequential(*norms), torch.randn(3, 8)
    exact = copy.deepcopy(model).double()(x.double()).float()
    torch.testing.assert_close(WAYS[way](model, x, tmp_path), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_programs_have_the_bits_of_eager(backend):
    z, w, r = random(3, 5, COLS, grad=True), random(COLS, grad=True), random(3, 5, COLS, grad=True)
    for function in (
        lambda x: rt.rms_norm_gated(x, z, w, EPS), lambda x: sum(rt.Norm.layer(EPS).residual(r).gate_after(z).groups(2).apply(x, w, w)),
        lambda x: rt.rms_norm_gated(x, z, w, EPS, norm_before_gate=False, groups=3),
    ):
        torch._dynamo.reset()
        x = random(3, 5, COLS, grad=True)
        found = []
        for call in (torch.compile(function, fullgraph=True, backend=backend), function):
            y = call(x)
            found.append([y, *torch.autograd.grad(y.sin().sum(), (x, z, w))])
        for got, right in zip(*found, strict=True):
            torch.testing.assert_close(got, right, rtol=0 if backend == "aot_eager" else 1e-5, atol=0 if backend == "aot_eager" else 1e-6)


def test_fake_tensors_modes_and_other_devices():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, z, w, r = torch.empty(3, 5, 64, dtype=torch.bfloat16), torch.empty(3, 5, 64, dtype=torch.bfloat16), torch.empty(64), torch.empty(3, 5, 64)
        y, h = rt.Norm.rms().residual(r).gate_after(z).groups(4).apply(x, w)
        assert (y.dtype, h.dtype, y.shape, h.shape) == (torch.bfloat16, torch.float32, x.shape, x.shape)
    x = torch.empty(2, 8, device="meta")
    assert rt.rms_norm_gated(x, x, x[0], groups=2).is_meta
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x, z, w = random(3, 8), random(3, 8), random(8)
    with Mode():
        y = rt.rms_norm_gated(x, z, w, EPS)
    assert functional.normalize in seen and torch.equal(y, rt.rms_norm_gated(x, z, w, EPS))
    with torch.autocast("cpu", torch.bfloat16):
        assert rt.rms_norm_gated(x, z, w).dtype == torch.float32


@pytest.mark.parametrize("kind, options, names, groups", FORMS, ids=range(len(FORMS)))
def test_float64_and_other_mixes_of_dtypes_are_computed_by_pytorch(kind, options, names, groups):
    tensors = make(names, torch.float64)
    for got, right in zip(ours(kind, options, groups)(tensors), theirs(kind, options, groups)(tensors), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(by_position(ours(kind, options, groups), names), [t.requires_grad_() for t in tensors.values()])
    mixed = make(names, torch.float32, torch.bfloat16)
    assert ours(kind, options, groups)(mixed)[0].dtype == torch.float32
    near(ours(kind, options, groups)(mixed), theirs(kind, options, groups)({name: t.double() for name, t in mixed.items()}))


# Modules of transformers.


BEFORE = dict(norm_before_gate=False, cast_before_weight=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model, name, of_theirs, of_ours", [
    ("qwen3_next", "Qwen3NextRMSNormGated", {}, dict(cast_before_weight=True)),
    ("kimi_linear", "KimiLinearRMSNormGated", {}, dict(activation="sigmoid")),
    ("mamba2", "MambaRMSNormGated", dict(group_size=512), BEFORE), ("zamba2", "Zamba2RMSNormGated", dict(group_size=128), BEFORE | dict(groups=4)),
    ("falcon_h1", "FalconH1RMSNormGated", dict(n_groups=2, norm_before_gate=False), dict(groups=2, norm_before_gate=False)),
    ("falcon_h1", "FalconH1RMSNormGated", dict(n_groups=4, norm_before_gate=True), dict(groups=4)),
])
def test_modules_take_the_state_of_transformers(dtype, model, name, of_theirs, of_ours):
    framework("transformers")
    theirs = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(512, eps=EPS, **of_theirs).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours = rt.RMSNormGated(512, EPS, dtype=dtype, **of_ours)
    ours.load_state_dict(theirs.state_dict())
    x, z, dy = random(64, 512, dtype=dtype, grad=True), random(64, 512, dtype=dtype, grad=True), random(64, 512, dtype=dtype)
    found = []
    for module in (ours, theirs):
        y = module(x, z)
        found.append([y, *torch.autograd.grad(y, (x, z, module.weight), dy)])
    assert dtype == torch.float32 or (found[0][0] != found[1][0]).float().mean() < 0.01
    for got, right in zip(*found, strict=True):
        # A gradient of the weight is a sum over rows of what the chain has rounded.
        tolerance = 1e-5 if dtype == torch.float32 else 2.0**-5
        assert (got - right).abs().max() <= tolerance * right.abs().max()


# Errors.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["eager", "grad", "compile", "func"])
@pytest.mark.parametrize("error, text, call", [
    (ValueError, r"gate: expected the shape \[2, 8\], got \[1, 8\]", lambda x, w: rt.rms_norm_gated(x, x[:1], w)),
    (ValueError, r"gate: expected the shape \[2, 8\], got \[8\]", lambda x, w: rt.Norm.rms().gate_before(w).apply(x, w)),
    (TypeError, "gate: expected the dtype of x, torch.float(32|64), got torch.bfloat16", lambda x, w: rt.rms_norm_gated(x, x.bfloat16(), w)),
    (ValueError, "gate: expected the device of the other tensors", lambda x, w: rt.rms_norm_gated(x, x.to("meta"), w)),
    (TypeError, "gate: expected a torch.Tensor, got float", lambda x, w: rt.rms_norm_gated(x, 1.0, w)),
    (TypeError, "gate: expected an array, got None", lambda x, w: rt.Norm.rms().gate_after(None)),
    (ValueError, "activation: expected one of silu, sigmoid, got 'swish'", lambda x, w: rt.rms_norm_gated(x, x, w, activation="swish")),
    (ValueError, "activation: expected one of silu, sigmoid, got None", lambda x, w: rt.Norm.layer().gate_after(x, None).apply(x, w)),
    (ValueError, "groups: expected a number that divides the 8 columns of a row, got 3", lambda x, w: rt.rms_norm_gated(x, x, w, groups=3)),
    (ValueError, "groups: expected a number that divides the 8 columns of a row, got 16", lambda x, w: rt.Norm.rms().groups(16).apply(x, w)),
    (ValueError, "groups: expected at least 1, got 0", lambda x, w: rt.Norm.layer().groups(0).apply(x, w)),
    (TypeError, "groups: expected an int, got float", lambda x, w: rt.rms_norm_gated(x, x, w, groups=2.0)),
    (TypeError, "groups: expected an int, got bool", lambda x, w: rt.Norm.rms().groups(True).apply(x, w)),
    (TypeError, "gate: expected no residual with a gate before", lambda x, w: rt.Norm.rms().residual(x).gate_before(x).apply(x, w)),
    (TypeError, "gate: expected no residual after the norm", lambda x, w: rt.Norm.rms().residual_after(x).gate_after(x).apply(x, w)),
    (TypeError, "groups: expected no residual after the norm", lambda x, w: rt.Norm.rms().residual_after(x).groups(2).apply(x, w)),
    (ValueError, r"weight: expected the shape \[8\], got \[7\]", lambda x, w: rt.rms_norm_gated(x, x, w[:-1])),
    (ValueError, r"bias: expected the shape \[8\], got \[7\]", lambda x, w: rt.rms_norm_gated(x, x, w, bias=w[:-1])),
    (TypeError, "bias: an RMS norm has none", lambda x, w: rt.rms_norm_gated(x, None, w, bias=w)),
])
def test_every_way_refuses_what_is_wrong(dtype, way, error, text, call):
    x, w = random(2, 8, dtype=dtype, grad=way == "grad"), random(8, dtype=dtype)
    run = {"compile": torch.compile(call, backend="eager"), "func": lambda x, w: torch.func.vjp(lambda x: call(x, w), x)}.get(way, call)
    with pytest.raises(Exception if way == "compile" else error, match=text):
        run(x, w)


@pytest.mark.parametrize("call, text", [
    (lambda x, w: OPS.norm(x, x, x, w, None, EPS, 0.0, 0, 0, False, True, 1, 0), "no call adds a residual to a gated x"),
    (lambda x, w: OPS.norm(x, None, x, w, None, EPS, 0.0, 0, 0, False, False, 3, 0), "groups: their number must divide the 8 columns"),
    (lambda x, w: OPS.norm(x, None, None, w, None, EPS, 0.0, 0, 0, False, False, -2, 0), "groups: expected at least 1"),
    (lambda x, w: OPS.norm(x, None, x.bfloat16(), w, None, EPS, 0.0, 0, 0, False, False, 1, 0), "gate: expected elements of f32"),
    (lambda x, w: OPS.norm(x, None, x[0], w, None, EPS, 0.0, 0, 0, False, False, 1, 0), r"gate: expected the shape \[2, 8\], got \[8\]"),
])
def test_operators_refuse_what_is_wrong(call, text):
    with pytest.raises(RuntimeError, match=text):
        call(random(2, 8), random(8))


def test_nested_and_complex_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    z = torch.complex(random(2, 8), random(2, 8))
    for call in (lambda: rt.rms_norm_gated(nested, nested, torch.ones(8)), lambda: rt.Norm.rms().groups(2).apply(nested), lambda: rt.rms_norm_gated(z, z)):
        with pytest.raises(NotImplementedError):
            call()
