"""PyTorch: compilers, exporters and transforms, with the norms of `torch.nn` and of this package.
The guide's table has the results."""

import copy
import io
import pathlib
import pickle
import subprocess
import sys

import pytest
from conftest import framework

torch = framework("torch")
import rmsnorm.torch as rt  # noqa: E402

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs/guide/pytorch.md"


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


def model(nn):
    """Both norms after a product, with weights that are not all one."""
    found = torch.nn.Sequential(torch.nn.Linear(8, 8), nn.RMSNorm(8, 1e-6), nn.LayerNorm(8))
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    return found


def gradients(y, model, x):
    """The gradients of a loss with respect to x and the parameters."""
    return torch.autograd.grad(y.sin().sum(), (x, *model.parameters()))


def same_gradients(function, model):
    """The function, after a check that its gradients equal the model's."""
    x = torch.randn(3, 8, requires_grad=True)
    for got, expected in zip(gradients(function(x), model, x), gradients(model(x), model, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return function


def exported(model, x, **options):
    rows = torch.export.Dim("rows", min=1)
    return torch.export.export(model, (x,), dynamic_shapes=({0: rows},), **options)


def decomposed(model, x):
    """The exported program, decomposed into PyTorch's operators only."""
    program = exported(model.eval(), x).run_decompositions()
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert all(getattr(target, "namespace", "aten") == "aten" for target in targets), targets
    return program


def loaded_elsewhere(load, x, tmp_path):
    """The result for x in a process without this package."""
    torch.save(x, tmp_path / "x.pt")
    code = f"""if True:
        import sys, torch
        sys.modules["rmsnorm"] = None
        x = torch.load({str(tmp_path / "x.pt")!r})
        with torch.no_grad():
            torch.save({load}(x), {str(tmp_path / "y.pt")!r})
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    return torch.load(tmp_path / "y.pt")


def program_elsewhere(model, x, tmp_path):
    path = str(tmp_path / "program.pt2")
    torch.export.save(decomposed(model, x), path)
    return loaded_elsewhere(f"torch.export.load({path!r}).module()", x, tmp_path)


def package_elsewhere(model, x, tmp_path):
    path = str(tmp_path / "package.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.export(model.eval(), (x,)), package_path=path)
    # PyTorch 2.10 loads a package only where this module is imported.
    imported = "__import__('torch._inductor.codecache')._inductor"
    return loaded_elsewhere(f"{imported}.aoti_load_package({path!r})", x, tmp_path)


def script_elsewhere(model, x, tmp_path):
    path = str(tmp_path / "script.pt")
    scripted = torch.jit.script(model)
    same_gradients(scripted, model)
    scripted.save(path)
    return loaded_elsewhere(f"torch.jit.load({path!r})", x, tmp_path)


def onnx(model, x, tmp_path, **options):
    """The result for x of ONNX's reference implementation."""
    framework("onnxscript")
    reference = framework("onnx.reference")
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(model.eval(), (x,), path, verbose=False, **options)
    evaluator = reference.ReferenceEvaluator(path)
    (y,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    return torch.from_numpy(y)


def jagged(model, x, tmp_path):
    nested = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return model(nested).values()


def fake(model, x, tmp_path):
    """Checks shapes with fake tensors and on the meta device; returns the model's values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = model(mode.from_tensor(x))
    assert y.shape == x.shape and copy.deepcopy(model).to("meta")(x.to("meta")).is_meta
    return model(x)


def traced_by_make_fx(model, x, tmp_path):
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: gradients(model(x), model, x)[0])(x.clone().requires_grad_())
    x = x.clone().requires_grad_()
    torch.testing.assert_close(graph(x), gradients(model(x), model, x)[0], rtol=1e-4, atol=1e-4)
    return model(x)


def functional(model, x, tmp_path):
    parameters = dict(model.named_parameters())
    loss = lambda parameters, row: torch.func.functional_call(model, parameters, row).sin().sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for index, row in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, row), tuple(parameters.values()))
        torch.testing.assert_close(tuple(grad[index] for grad in got.values()), expected, rtol=1e-4, atol=1e-4)
    return torch.func.vmap(model)(x)


# {way: function that returns the model's result for x, some after further checks}.
WAYS = {
    "`torch.compile(fullgraph=True)`, with gradients": lambda m, x, _: same_gradients(torch.compile(m, fullgraph=True), m)(x),
    "`torch.compile(backend=\"aot_eager\")`": lambda m, x, _: same_gradients(torch.compile(m, backend="aot_eager"), m)(x),
    "`torch.export.export`, with `strict=True` and without":
        lambda m, x, _: exported(m, x, strict=True).module()(x) / 2 + exported(m, x).module()(x) / 2,
    "`ExportedProgram.run_decompositions()`: ATen operators only": lambda m, x, _: decomposed(m, x).module()(x),
    "`torch.export.save` after it, loaded without rmsnorm": program_elsewhere,
    "an AOTInductor package, loaded without rmsnorm": package_elsewhere,
    "`torch.onnx.export(dynamo=True)`": lambda m, x, path: onnx(m, x, path, dynamo=True),
    "`torch.onnx.export(dynamo=False)`": lambda m, x, path: onnx(m, x, path, dynamo=False),
    "`torch.fx.symbolic_trace`": lambda m, x, _: same_gradients(torch.fx.symbolic_trace(m), m)(x),
    "`torch.jit.script`, with gradients, loaded without rmsnorm": script_elsewhere,
    "`torch.jit.trace`, with gradients": lambda m, x, _: same_gradients(torch.jit.trace(m, torch.randn(5, 8)), m)(x),
    "`make_fx` of gradients": traced_by_make_fx,
    "`torch.func`: gradients of each example": functional,
    "nested tensors (`torch.jagged`)": jagged,
    "`FakeTensorMode` and the meta device": fake,
    "copy and pickle": lambda m, x, _: pickle.loads(pickle.dumps(copy.deepcopy(m)))(x),
}


def outcome(way, nn, tmp_path):
    """Whether PyTorch supports the way. If it does, the result is compared with the same norms in
    float64."""
    built, x = model(nn), torch.randn(3, 8)
    exact = copy.deepcopy(built).double()(x.double()).float()
    try:
        y = WAYS[way](built, x, tmp_path)
    except Exception as error:  # Of any of PyTorch's compilers and exporters.
        print(f"{way}: {type(error).__name__}: {error}")
        return "no"
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-4)
    return "yes"


def table():
    """The guide's rows: the way, torch.nn, rmsnorm.torch."""
    text = GUIDE.read_text().partition("| way | torch.nn | rmsnorm.torch |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[1:]]
    return {way: (theirs, ours) for way, theirs, ours in rows}


def test_the_table_lists_these_ways():
    assert list(table()) == list(WAYS) and len(WAYS) >= 15
    assert {ours for _, ours in table().values()} == {"yes"}


@pytest.mark.parametrize("way", WAYS)
def test_both_go_as_the_table_says(way, tmp_path):
    (tmp_path / "nn").mkdir(), (tmp_path / "rt").mkdir()
    theirs = outcome(way, torch.nn, tmp_path / "nn")
    if theirs != table()[way][0] and f"with PyTorch {torch.__version__.rpartition('.')[0]} " not in GUIDE.read_text():
        pytest.skip(f"{way}: torch.nn's norms go another way in PyTorch {torch.__version__}")
    assert (theirs, outcome(way, rt, tmp_path / "rt")) == table()[way]


MODULES = {
    "offset": lambda: rt.RMSNorm(8, 1e-6, weight_offset=1.0), "cast": lambda: rt.RMSNorm(8, 1e-6, cast_before_weight=True),
    "no weight": lambda: rt.RMSNorm(8, elementwise_affine=False), "two dimensions": lambda: rt.RMSNorm((4, 8)),
    "two dimensions, no weight": lambda: rt.LayerNorm((4, 8), elementwise_affine=False), "no bias": lambda: rt.LayerNorm(8, bias=False),
    "after": lambda: rt.RMSNormAdd(8, 1e-6, weight_offset=1.0, cast_before_weight=True), "after, layer": lambda: rt.LayerNormAdd((4, 8)),
    "after, bfloat16": lambda: rt.RMSNormAdd(8, dtype=torch.bfloat16), "after, float64": lambda: rt.LayerNormAdd(8).double(),
    "add": lambda: rt.AddRMSNorm(8, 1e-6, weight_offset=1.0), "add layer": lambda: rt.AddLayerNorm((4, 8)),
    "bfloat16": lambda: rt.AddRMSNorm(8, dtype=torch.bfloat16), "float32 weight": lambda: rt.LayerNorm(8), "float64": lambda: rt.AddRMSNorm(8).double(),
}


@pytest.mark.parametrize("name", MODULES)
def test_options_go_the_same_ways(name):
    module = MODULES[name]()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    dtype = torch.bfloat16 if "bfloat16" in name or name == "float32 weight" else torch.float64 if "float64" in name else torch.float32
    args = tuple(torch.randn(3, 4, 8, dtype=dtype) for _ in range(2 if "Add" in type(module).__name__ else 1))
    expected = module(*args)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    buffer.seek(0)
    program = torch.export.export(module, args)
    for found in (
        torch.fx.symbolic_trace(module), torch.jit.trace(module, args), torch.jit.load(buffer), program.module(),
        program.run_decompositions().module(), torch.compile(module, fullgraph=True, backend="aot_eager"),
    ):
        torch.testing.assert_close(found(*args), expected)


def test_functions_go_the_same_ways():
    def function(x: torch.Tensor, weight: torch.Tensor):
        y, h = rt.add_rms_norm(x, x, weight, 1e-6, weight_offset=1.0)
        y, h = rt.rms_norm_add_rms_norm(y, rt.layer_norm_add(y, rt.rms_norm_add(y, h, weight), weight, weight), weight, weight, 1e-6)
        return rt.rms_norm(y, weight, 1e-6) + rt.layer_norm(h, weight, weight, 1e-5)

    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = function(x, weight)
    for found in (torch.fx.symbolic_trace(function), torch.jit.script(function), torch.jit.trace(function, (x, weight))):
        torch.testing.assert_close(found(x, weight), expected)
    assert {node.target for node in torch.fx.symbolic_trace(function).graph.nodes} >= {
        rt.add_rms_norm, rt.rms_norm, rt.layer_norm, rt.rms_norm_add, rt.layer_norm_add, rt.rms_norm_add_rms_norm}
    around = lambda x, w: sum(rt.Norm.layer().residual_after(x).next_norm(w, w).apply(x, w))  # noqa: E731
    torch.testing.assert_close(torch.fx.symbolic_trace(around)(x, weight), around(x, weight))
    for call in (lambda x, w: rt.rms_norm(x, (8,), w, 1e-6), lambda x, w: rt.layer_norm(x, (8,), weight=w, bias=w, eps=1e-5),
                 lambda x, w: rt.add_layer_norm(x, x, normalized_shape=(8,))[0], lambda x, w: rt.rms_norm(x.double(), w.double())):
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x, weight), call(x, weight))
    with pytest.raises(Exception, match="weight: expected the shape"):
        torch.jit.script(rt.rms_norm)(x, weight[:1], 1e-6, weight_offset=1.0)


def test_an_exported_program_has_the_bits_of_eager_and_trains():
    built, x = model(rt), torch.randn(3, 8)
    program = exported(built, x)
    assert {"rmsnorm.exported_rms_norm.default", "rmsnorm.exported_layer_norm.default"} <= {str(node.target) for node in program.graph.nodes}
    module = program.module()
    assert torch.equal(module(x), built(x))
    for got, expected in zip(gradients(module(x.requires_grad_()), module, x), gradients(built(x), built, x), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["exported", "decomposed", "traced"])
def test_a_program_has_derivatives_of_every_kind(kind):
    """Also under transforms, which see a program's operators before they are decomposed."""
    norms, x = model(rt), torch.randn(3, 8)
    programs = {
        "exported": lambda: torch.export.export(norms, (x,)).module(),
        "decomposed": lambda: torch.export.export(norms, (x,)).run_decompositions().module(),
        "traced": lambda: torch.jit.trace(norms, (x,)),
    }
    program = programs[kind]()
    transforms = {
        "jvp": lambda norm: torch.func.jvp(norm, (x,), (x.sin(),))[1],
        "grad": lambda norm: torch.func.grad(lambda x: norm(x).sin().sum())(x),
        "hessian": lambda norm: torch.func.hessian(lambda x: norm(x).sin().sum())(x),
        "vmap": lambda norm: torch.func.vmap(torch.func.grad(lambda x: norm(x).sin().sum()))(torch.stack([x, 2 * x])),
    }
    for name, transform in transforms.items():
        assert torch.allclose(transform(program), transform(norms), rtol=1e-4, atol=1e-5), name


def test_subclasses_and_modes_see_the_functions():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    with Mode():
        rt.rms_norm(x, weight, 1e-6)
    assert rt.rms_norm in seen
    seen.clear()
    y, h = rt.add_layer_norm(x.detach().as_subclass(Subclass), x.detach(), weight)
    assert type(y) is type(h) is Subclass and rt.add_layer_norm in seen
    torch.testing.assert_close(y.as_subclass(torch.Tensor), rt.layer_norm(2 * x.detach(), weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nested_tensors_have_the_norms_of_their_rows(dtype):
    parts = [torch.randn(rows, 8, dtype=dtype) for rows in (3, 5)]
    weight, bias = torch.randn(8, dtype=dtype), torch.randn(8, dtype=dtype)
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    for function in (
        lambda x: rt.rms_norm(x, weight, 1e-6), lambda x: rt.rms_norm(x), lambda x: rt.rms_norm(x, weight, 1e-6, weight_offset=1.0),
        lambda x: rt.rms_norm(x, (8,), weight, 1e-6, cast_before_weight=True), lambda x: rt.layer_norm(x, weight, bias),
        lambda x: rt.add_rms_norm(x, x, weight)[0], lambda x: sum(rt.add_layer_norm(x, x, weight, bias)),
        lambda x: rt.layer_norm_add(x, x, weight, bias), lambda x: rt.rms_norm_add_rms_norm(x, x, weight, bias, weight_offset=1.0)[0],
    ):
        y = function(nested)
        assert y.is_nested and y.dtype == dtype
        rows = torch.cat(parts).requires_grad_()
        tolerance = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(y.values(), function(rows), rtol=tolerance, atol=tolerance)
        (got,), (expected,) = torch.autograd.grad(y.values().sin().sum(), nested), torch.autograd.grad(function(rows).sin().sum(), rows)
        # torch.nn.functional computes nested tensors, and rounds between its steps in 16 bits.
        tolerance = 2.0**-5 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got.values(), expected, rtol=tolerance, atol=tolerance)
    dense = torch.cat(parts)
    for call, error, text in (
        (lambda: rt.rms_norm(nested, weight[:7]), ValueError, r"weight: expected a shape that ends in 8, as x does, got \[7\]"),
        (lambda: rt.rms_norm(nested, weight[:1], weight_offset=1.0), ValueError, "weight: expected a shape that ends in 8"),
        (lambda: rt.layer_norm(nested, weight, bias[:2]), ValueError, r"bias: expected a shape that ends in 8, as x does, got \[2\]"),
        (lambda: rt.add_rms_norm(nested, dense, weight), ValueError, "residual: expected a nested tensor"),
        (lambda: rt.add_rms_norm(dense, nested, weight), ValueError, "residual: expected a dense tensor"),
        (lambda: rt.rms_norm(dense, nested), ValueError, "weight: expected a dense tensor"),
        (lambda: rt.layer_norm(nested, nested), ValueError, "weight: expected a dense tensor"),
        (lambda: rt.rms_norm(torch.nested.nested_tensor(parts), weight), NotImplementedError, "x: expected the layout torch.jagged"),
    ):
        with pytest.raises(error, match=text):
            call()
    # PyTorch supports only the layer norm for the older layout. Also without a gradient, which
    # takes another path.
    strided = torch.nested.nested_tensor(parts)
    for got, part in zip(rt.layer_norm(strided, weight, bias).unbind(), parts, strict=True):
        tolerance = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, rt.layer_norm(part, weight, bias), rtol=tolerance, atol=tolerance)
