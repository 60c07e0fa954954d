"""All operators and all ways to their gradients: the weight offset, each member of a batch, and the
dtypes of fake kernels. Results are compared with the definition in float64, in all arguments at
once."""

import itertools

import pytest
from conftest import framework

torch = framework("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.func import grad, vmap  # noqa: E402

import rmsnorm.torch as rt  # noqa: E402

_OPS = torch.ops.rmsnorm
OFFSETS = (0.0, 1.0, -0.75, 2.5)


def _random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _definition(is_layer, x, residual, weight, bias, eps, offset):
    """(y, h) of `rmsnorm-spec/math.md`, in PyTorch's elementary operations."""
    h = x if residual is None else x + residual
    centred = h - h.mean(-1, keepdim=True) if is_layer else h
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * (weight + offset)
    return (y if bias is None else y + bias), h


def _weighed(y, h):
    """A number in which every element of the results has another factor."""
    far = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
    return (y * far).sum() + (h.flip(-1) * far).sum()


def _call_rms(x, residual, weight, offset):
    if residual is None:
        return rt.rms_norm(x, weight, 1e-3, weight_offset=offset), x
    return rt.add_rms_norm(x, residual, weight, 1e-3, weight_offset=offset)


def _call_operator(x, residual, weight, offset):
    if residual is None:
        return _OPS.rms_norm(x, weight, 1e-3, offset, False)[0], x
    return _OPS.add_rms_norm(x, residual, weight, 1e-3, offset, False)[:2]


def _call_module(x, residual, weight, offset):
    module = (rt.RMSNorm if residual is None else rt.AddRMSNorm)(x.shape[-1], eps=1e-3, weight_offset=offset)
    found = torch.func.functional_call(module, {"weight": weight}, (x,) if residual is None else (x, residual))
    return (found, x) if residual is None else found


def _by_autograd(function, tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def _by_func(function, tensors):
    return grad(function, argnums=tuple(range(len(tensors))))(*tensors)


def _by_vmap(function, tensors):
    """Under vmap with a batch of one member, so that the batching rule is called."""
    found = vmap(grad(function, argnums=tuple(range(len(tensors)))))(*(tensor[None] for tensor in tensors))
    return [tensor[0] for tensor in found]


def _by_compile(function, tensors):
    torch.compiler.reset()
    return _by_autograd(torch.compile(function, backend="aot_eager", fullgraph=True), tensors)


@pytest.mark.parametrize("ways", [
    (_call_rms, _by_autograd), (_call_rms, _by_func), (_call_rms, _by_vmap), (_call_rms, _by_compile), (_call_operator, _by_autograd),
    (_call_operator, _by_compile), (_call_module, _by_autograd),
], ids=lambda ways: "".join(way.__name__ for way in ways).removeprefix("_"))
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
def test_the_weight_offset_reaches_every_gradient(ways, adds, offset):
    call, differentiate = ways
    tensors = [_random(5, 16, seed=1)] + [_random(5, 16, seed=2)] * adds + [_random(16, seed=3)]

    def function(x, *rest):
        return _weighed(*call(x, rest[0] if adds else None, rest[-1], offset))

    def definition(x, *rest):
        return _weighed(*_definition(False, x, rest[0] if adds else None, rest[-1], None, 1e-3, offset))

    expected = _by_autograd(definition, [tensor.double() for tensor in tensors])
    for got, right in zip(differentiate(function, tensors), expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "rms_norm_add_rms_norm"])
@pytest.mark.parametrize("makes_gradients", [False, True])
def test_every_choice_of_batched_arguments_is_a_call_for_each_member(name, makes_gradients):
    """vmap over any of x, residual, weight and bias, each along its first or last dimension, is the loop over the members."""
    adds = "add" in name
    shapes = [(4, 8)] * (1 + adds) + [(8,)] * (1 + ("layer" in name or name.endswith("add_rms_norm") and not name.startswith("add")))

    def call(*args):
        found = getattr(rt, name)(*args, eps=1e-3)
        return found if isinstance(found, tuple) else (found,)

    def weighed(*args):
        return _weighed(*(2 * call(*args))[:2])

    function = grad(weighed, argnums=tuple(range(len(shapes)))) if makes_gradients else call
    for batched in itertools.product((None, 0, -1), repeat=len(shapes)):
        if all(dim is None for dim in batched):
            continue
        args = [_random(*shape, seed=seed) if dim is None else _random(3, *shape, seed=seed).movedim(0, dim)
                for seed, (shape, dim) in enumerate(zip(shapes, batched))]
        found = vmap(function, in_dims=batched)(*args)
        members = [function(*(arg if dim is None else arg.select(dim, k) for arg, dim in zip(args, batched))) for k in range(3)]
        for got, right in zip(found, zip(*members), strict=True):
            torch.testing.assert_close(got, torch.stack(right), rtol=1e-5, atol=1e-5, msg=lambda text: f"{batched}: {text}")


def _description(results):
    results = results if isinstance(results, tuple) else (results,)
    return [(tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device) for tensor in results]


def _cases():
    """Calls of every operator in every mix of dtypes, with and without optional arguments."""
    mixes = [(t, w, r) for t in (torch.float32, torch.float16, torch.bfloat16) for w in {t, torch.float32} for r in {t, torch.float32}]
    for (t, w, r), has_weight, shape in itertools.product(mixes, (False, True), ((3, 5, 24), (0, 24), (3, 0, 24), (24,), (128, 128))):
        x, residual, weight = _random(*shape, dtype=t), _random(*shape, seed=1, dtype=r), _random(shape[-1], seed=2, dtype=w)
        weight = weight if has_weight else None
        statistics = torch.ones(shape[:-1])
        for name, args in {
            "rms_norm": (x, weight, 1e-6, 1.0, False), "rms_norm_inference": (x, weight, 1e-6, 1.0, False),
            "layer_norm": (x, weight, weight, 1e-6), "layer_norm_inference": (x, weight, weight, 1e-6),
            "add_rms_norm": (x, residual, weight, 1e-6, 1.0, False), "add_layer_norm": (x, residual, weight, weight, 1e-6),
        }.items():
            yield name, args
        for need_y in (False, True):
            of_next = weight if need_y else None
            yield "rms_norm_add", (x, residual, weight, of_next, 1e-6, 1.0, False, need_y)
            yield "layer_norm_add", (x, residual, weight, weight, of_next, of_next, 1e-6, need_y)
        for kind, groups, gate, before in itertools.product(range(4 if len(shape) == 1 else 2), (1, 4), (None, x), (False, True)):
            of_gate = True, before, groups
            added = None if gate is not None and before else residual
            yield "norm", (x, added, gate, weight, weight, 1e-6, 0.5, kind, 0, *of_gate, 0)
            yield "norm", (x, None, gate, weight, None, 1e-6, 0.5, kind, 2, *of_gate, 0)
            own = statistics if groups == 1 else torch.ones(*shape[:-1], groups)
            h = x if added is None else residual
            for needs in ((False,) * 4, (gate is not None, True, True, False), (False, True, False, h is residual)):
                of_bias = weight if gate is not None and not before else None
                given = x, h, gate, weight, of_bias, own if kind == 1 else None, own, None, 1e-6, 0.5
                yield "norm_backward", (*given, kind, 0, *of_gate, True, *needs)
            if gate is None and weight is not None:
                yield "norm", (x, None, None, weight, weight, 1e-6, 0.5, kind, 3, *of_gate, 0)
                of_x = x, x, None, weight, None, own if kind == 1 else None, own, None, 1e-6, 0.5
                yield "norm_backward", (*of_x, kind, 3, *of_gate, True, False, True, True, False)
            if gate is None and t != torch.float32 and w == torch.float32:
                yield "norm", (x, None, None, weight, weight, 1e-6, 0.5, kind, 1, *of_gate, rt.operators.Y_DTYPES.index(torch.float32))
                of_cast = x.float(), x, None, weight, None, own if kind == 1 else None, own, None, 1e-6, 0.5
                yield "norm_backward", (*of_cast, kind, 1, *of_gate, False, False, True, True, True)
        for needs in itertools.product((False, True), repeat=2):
            yield "rms_norm_backward", (x, residual, weight, statistics, residual, 1.0, *needs)
            yield "layer_norm_backward", (x, residual, weight, statistics, statistics, None, needs[0], needs[1], not needs[0])
        for codes, scales, adds in itertools.product(range(3), range(5), (False, True)):
            # MX scales exist for E4M3 only.
            if scales == 4 and codes != 0:
                continue
            scale = torch.ones(1) if scales == 0 else None
            yield "quantized_rms_norm", (x, residual if adds else None, weight, 1e-6, 0.0, False, scale, codes, scales)


def test_tracers_are_told_what_the_kernels_give():
    """Shapes, dtypes, strides and devices of all results, also of results that are not needed."""
    count = {}
    for name, args in _cases():
        operator = getattr(_OPS, name)
        try:
            real = _description(operator(*args))
        except RuntimeError as error:
            # Scales that rows of this length cannot have.
            assert name == "quantized_rms_norm" and ("scale" in str(error) or "e8m0" in str(error)), (name, error)
            continue
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
        assert _description(fake) == real, (name, args)
        count[name] = count.get(name, 0) + 1
    assert set(count) == {str(schema).partition("(")[0] for schema in rt.operators._native.torch_schemas()}
