"""PyTorch: derivatives of every kind. Forward mode, second and third derivatives, `torch.func`, eager and compiled, the operators alone.

Three ways to judge. Tangents of the kernels are held to bounds that follow from math.md's. In float64, for which there are no kernels,
exact ones take their place, so that gradcheck and gradgradcheck go the same ways as every call. What is left is compared with the
definition in float64.
"""

import functools
import itertools
import threading

import numpy as np
import pytest
from conftest import framework
from judge import exact_and_error, wide, within

torch = framework("torch")
import torch.autograd.forward_ad as forward_ad  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import rmsnorm.torch as rt  # noqa: E402
from rmsnorm.torch import autograd, functional  # noqa: E402

OPS, EPS, COLS = torch.ops.rmsnorm, 1e-5, 24
F32_UNIT = 2.0**-24


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


def random(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def subsets(names):
    return ["".join(found) for count in range(1, len(names) + 1) for found in itertools.combinations(names, count)]


# (is_layer, the inputs of a norm: x, residual before (r) or after the norm (R), weight (w), bias (b), and weight (v) and bias (c) of
# the next norm).
INPUTS = [(False, names) for names in ("x", "xw", "xr", "xrw", "xR", "xRw", "xRwv")] + [
    (True, names) for names in ("x", "xw", "xb", "xwb", "xr", "xrw", "xrb", "xrwb", "xRwb", "xRwbvc")
]
MODES = [(is_layer, names, offset, cast) for is_layer, names in INPUTS for offset, cast in
         ([(0.0, False)] if is_layer or "w" not in names else [(0.0, False), (1.0, False), (0.25, True)])]


def make(names, dtype=torch.float32, weight_dtype=None, stream=None, rows=(3,), grad=False):
    dtypes = {"x": dtype, "r": stream or dtype, "R": stream or dtype}
    return {name: random(*(rows if name in "xrR" else ()), COLS, dtype=dtypes.get(name, weight_dtype or dtype), grad=grad) for name in names}


def ours(is_layer, offset=0.0, cast=False):
    """A function from {name: tensor} to (y, h), (y,) or (h,)."""

    def call(tensors):
        x, r, after, w, b, v, c = map(tensors.get, "xrRwbvc")
        options = dict(weight_offset=offset, cast_before_weight=cast)
        if after is not None:
            norm = (rt.Norm.layer(EPS) if is_layer else rt.Norm.rms(EPS, **options)).residual_after(after)
            return norm.next_norm(v, c).apply(x, w, b) if v is not None else (norm.apply(x, w, b),)
        if r is None:
            return (rt.layer_norm(x, w, b, EPS) if is_layer else rt.rms_norm(x, w, EPS, **options),)
        return rt.add_layer_norm(x, r, w, b, EPS) if is_layer else rt.add_rms_norm(x, r, w, EPS, **options)

    return call


def theirs(is_layer, offset=0.0):
    """The definition. F.layer_norm of PyTorch 2.15 is wrong in nested forward mode (jacfwd of
    jacfwd), also in float64."""

    def norm(h, w, b):
        centred = h - h.mean(-1, keepdim=True) if is_layer else h
        y = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
        y = y if w is None else y * (w + offset)
        return y if b is None else y + b

    def call(tensors):
        x, r, after, w, b, v, c = map(tensors.get, "xrRwbvc")
        if after is not None:
            h = after + norm(x, w, b)
            return (h,) if v is None else (norm(h, v, c), h)
        h = x if r is None else x + r
        y = norm(h, w, b)
        return (y,) if r is None else (y, h)

    return call


def by_position(function, names):
    """`function` with tensors by position instead of by name."""
    return lambda *tensors: function(dict(zip(names, tensors)))


def near(got, exact, tolerance=2e-4):
    """Asserts a small error relative to the largest element. float32 has hundreds of additions, and
    a factor per derivative."""
    got, exact = ((found,) if isinstance(found, torch.Tensor) else found for found in (got, exact))
    assert len(got) == len(exact)
    for g, e in zip(got, exact):
        assert g.shape == e.shape and e.abs().max() > 0
        assert (g.double() - e).abs().max() <= tolerance * e.abs().max(), ((g.double() - e).abs().max(), e.abs().max())


# Forward mode, computed by the kernels.


def dual_tangents(function, tensors, tangents, with_grad=False):
    with forward_ad.dual_level():
        given = {name: tensor.detach().requires_grad_(with_grad) for name, tensor in tensors.items()}
        given |= {name: forward_ad.make_dual(given[name], tangent) for name, tangent in tangents.items()}
        return [forward_ad.unpack_dual(tensor).tangent for tensor in function(given)]


def jvp_tangents(function, tensors, tangents):
    names = list(tangents)
    return torch.func.jvp(
        lambda *given: function(tensors | dict(zip(names, given))), tuple(tensors[name] for name in names), tuple(tangents.values()),
    )[1]


def exact_tangent(is_layer, offset, inputs, weight, rows_t, weight_t, bias_t):
    """The tangent of a norm in float64 and its error before the last rounding, from math.md's
    bounds of its terms. inputs: x, and the residual before the norm. rows_t: (the tangent of the
    rows, its error)."""
    norm = "layer_norm" if is_layer else "rms_norm"
    terms, zero = [], np.zeros((1, COLS))
    if rows_t is not None:
        # The Jacobian is symmetric, so the tangent takes the place of dy.
        exact, error = exact_and_error(norm, EPS, inputs | {"dy": rows_t[0]})
        size, x_hat = rows_t[1] + zero, np.abs(exact["x_hat"])
        of_rows = size + (size.mean(-1, keepdims=True) if is_layer else 0) + x_hat * (x_hat * size).mean(-1, keepdims=True)
        weight = 1.0 if weight is None else wide(weight.float() + offset)
        terms.append((exact["dx"] * weight, (error["dx"] + exact["rstd"][:, None] * of_rows * (1 + 2.0**-10)) * np.abs(weight)))
    if weight_t is not None:
        exact, error = exact_and_error(norm, EPS, inputs)
        w_t = wide(weight_t)
        # One product more than in the norm, since mean and rstd come from the forward pass.
        terms.append((exact["y"] * w_t, (error["y"] + 2 * F32_UNIT * np.abs(exact["y"])) * np.abs(w_t)))
    if bias_t is not None:
        terms.append((wide(bias_t) + zero, 0))
    # Each term is a rounded product and a rounded summand; terms after the first are rounded once
    # more.
    size = sum((np.abs(value) for value, _ in terms), zero)
    return sum((value for value, _ in terms), zero), sum(error for _, error in terms) + (len(terms) + 1) * F32_UNIT * size * (1 + 2.0**-10)


def exact_tangents(is_layer, offset, tensors, tangents, results):
    """The tangents of the results in float64, and the error of each before the last rounding."""
    x_t, r_t, after_t, w_t, b_t, v_t, c_t = map(tangents.get, "xrRwbvc")
    flat = lambda tensor: wide(tensor.float()).reshape(-1, COLS)  # noqa: E731
    if "R" in tensors:
        rows_t = None if x_t is None else (flat(x_t), 0.0)
        h_t, error = exact_tangent(is_layer, offset, {"x": tensors["x"]}, tensors.get("w"), rows_t, w_t, b_t)
        if after_t is not None:
            h_t = h_t + flat(after_t)
            error = error + F32_UNIT * np.abs(h_t) * (1 + 2.0**-10)
        found = exact_tangent(is_layer, offset, {"x": results[-1]}, tensors.get("v"), (h_t + 0 * flat(tensors["x"]), error), v_t, c_t)
        return (found, (h_t, error))[-len(results):]
    h_t = [tangent.float() for tangent in (x_t, r_t) if tangent is not None]
    h_t = flat(sum(h_t[1:], h_t[0])) if h_t else None
    inputs = {"x": tensors["x"]} | ({"residual": tensors["r"]} if "r" in tensors else {})
    y_t = exact_tangent(is_layer, offset, inputs, tensors.get("w"), None if h_t is None else (h_t, 0.0), w_t, b_t)
    return y_t, (np.zeros((1, COLS)) if h_t is None else h_t, 0.0)


@pytest.mark.parametrize("dtype, weight_dtype, stream", [
    (torch.float32, torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32), (torch.float16, torch.float16, torch.float16),
])
@pytest.mark.parametrize("is_layer, names, offset, cast", MODES)
def test_tangents_are_within_their_bounds(dtype, weight_dtype, stream, is_layer, names, offset, cast):
    """For every subset of inputs, with and without a graph, and with torch.func."""
    tensors, tangents = (make(names, dtype, weight_dtype, stream, (2, 3)) for _ in range(2))
    function = ours(is_layer, offset, cast)
    for chosen in subsets(names):
        given = {name: tangents[name] for name in chosen}
        got = dual_tangents(function, tensors, given)
        for again in (torch.no_grad()(dual_tangents)(function, tensors, given), dual_tangents(function, tensors, given, True)):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, again))
        jvp = jvp_tangents(function, tensors, given)
        assert all(torch.equal(torch.zeros_like(b) if a is None else a, b) for a, b in zip(got, jvp))
        results = function(tensors)
        for index, (tangent, exact, primal) in enumerate(zip(got, exact_tangents(is_layer, offset, tensors, given, results), results)):
            assert tangent.dtype == primal.dtype and tangent.shape == primal.shape
            within(f"result {index}, tangents of {chosen}", tangent, *(part + np.zeros((6, COLS)) for part in exact))


def test_a_level_that_nobody_uses_changes_no_bit():
    tensors = make("xrRwbvc", torch.bfloat16)
    for is_layer, names in INPUTS:
        function, given = ours(is_layer), {name: tensors[name] for name in names}
        expected = function(given)
        with forward_ad.dual_level():
            found = function(given)
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
            assert all(forward_ad.unpack_dual(tensor).tangent is None for tensor in found)


def test_tangents_are_seen_in_other_threads():
    tensors, tangents, found = make("xw"), make("x"), []
    expected = dual_tangents(ours(False), tensors, tangents)[0]
    with forward_ad.dual_level():
        x = forward_ad.make_dual(tensors["x"], tangents["x"])
        thread = threading.Thread(target=lambda: found.append(forward_ad.unpack_dual(rt.rms_norm(x, tensors["w"], EPS)).tangent))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)


def test_frozen_networks_have_tangents():
    """Tangents of modules, also with flattened dimensions."""
    for module, shape in ((rt.RMSNorm(COLS, EPS), (3, COLS)), (rt.LayerNorm((4, 6)), (3, 4, 6)),
                          (rt.RMSNorm((4, 6), EPS, elementwise_affine=False), (3, 4, 6))):
        module.requires_grad_(False)
        x, x_t = random(*shape), random(*shape)
        double = (torch.nn.LayerNorm if isinstance(module, rt.LayerNorm) else torch.nn.RMSNorm)(module.normalized_shape, EPS).double()
        exact = torch.func.jvp(double, (x.double(),), (x_t.double(),))[1].detach()
        near(torch.func.jvp(module, (x,), (x_t,))[1], exact)
        near(torch.func.linearize(module, x)[1](x_t), exact)
        with forward_ad.dual_level():
            near(forward_ad.unpack_dual(module(forward_ad.make_dual(x, x_t))).tangent, exact)


# gradcheck, with exact kernels.


@pytest.fixture
def exact_kernels(monkeypatch):
    """Replaces the float32 kernels by float64 ones, and changes nothing else."""

    def forward(form, x, residual, gate, weight, bias, next_weight, next_bias):
        def norm(h, weight, bias):
            mean = h.mean(-1) if form.is_layer else None
            centred = h - mean.unsqueeze(-1) if form.is_layer else h
            rstd = (centred.square().mean(-1) + form.eps).rsqrt()
            y = centred * rstd.unsqueeze(-1)
            y = y if weight is None else y * (weight + form.weight_offset)
            return y if bias is None else y + bias, mean, rstd

        if form.residual_after:
            y, *statistics = norm(x, weight, bias)
            y, *of_next = norm(h := residual + y, next_weight, next_bias)
            return (y, h, *statistics, *of_next) if form.has_next else (None, h, *statistics, None, None)
        h = x if residual is None else x + residual
        y, *statistics = norm(h, weight, bias)
        return y, None if residual is None else h, *statistics, None, None

    def gradients(is_layer, dy, h, weight, mean, rstd, dh, offset, need_dweight, need_dbias, need_dresidual):
        x_hat = (h - mean.unsqueeze(-1) if is_layer else h) * rstd.unsqueeze(-1)
        wdy, rows = dy if weight is None else dy * (weight + offset), tuple(range(dy.ndim - 1))
        over = lambda tensor: tensor.sum(rows) if rows else tensor.clone()  # noqa: E731
        dx = wdy - (wdy.mean(-1, keepdim=True) if is_layer else 0) - x_hat * (wdy * x_hat).mean(-1, keepdim=True)
        dx = dx * rstd.unsqueeze(-1) + (0 if dh is None else dh)
        none = dy.new_empty(0)
        return (dx, over(dy * x_hat) if need_dweight else none, (over(dy) if need_dbias else none.clone()) if is_layer else None,
                dx.clone() if need_dresidual else none.clone())

    monkeypatch.setattr(autograd, "forward_below", forward)
    monkeypatch.setattr(functional, "forward_below", forward)
    monkeypatch.setattr(autograd, "_gradients_below", gradients)
    monkeypatch.setattr(functional, "_is_eager", lambda *tensors: False)
    monkeypatch.setattr(functional, "_takes", lambda *tensors, **given: True)


def used_results(names):
    """The results that a loss uses: y, h or both."""
    return {"y": (0,), "h": (1,), "both": (0, 1)} if set(names) & set("rvc") else {"y": (0,)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_layer, names, offset, cast", MODES)
@pytest.mark.parametrize("rows", [(), (2,)])
def test_gradcheck_and_gradgradcheck_of_the_same_ways(exact_kernels, is_layer, names, offset, cast, rows):
    """First derivatives in both modes, second ones as backward over backward and forward over
    backward, and batches of each."""
    tensors = {name: random(*(rows if name in "xrR" else ()), 4, dtype=torch.float64) for name in names}
    of_h = set("xRwb") if "R" in names else set("xr")
    for chosen, indices in itertools.product({names, *names}, used_results(names).values()):
        if indices == (1,) and not set(chosen) & of_h:
            continue

        def function(*given):
            found = ours(is_layer, offset, cast)(tensors | dict(zip(chosen, given)))
            return tuple(found[index] for index in indices)

        leaves = [tensors[name].clone().requires_grad_() for name in chosen]
        assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
        assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_third_derivatives(exact_kernels):
    for is_layer, names in INPUTS:
        tensors = {name: random(*((2, 3) if name in "xrR" else (3,)), dtype=torch.float64) for name in names}
        loss = lambda function: lambda *given: sum(t.pow(3).sum() for t in by_position(function, names)(*given))  # noqa: E731
        for third in (
            lambda f: torch.func.grad(lambda *t: torch.func.grad(lambda *t: torch.func.grad(f)(*t).pow(2).sum())(*t).pow(2).sum()),
            lambda f: torch.func.grad(lambda *t: torch.func.jacfwd(torch.func.jacfwd(f))(*t).pow(2).sum()),
            lambda f: torch.func.jacfwd(lambda *t: torch.func.jacrev(torch.func.jacrev(f))(*t)),
        ):
            got, expected = (third(loss(function(is_layer)))(*tensors.values()) for function in (ours, theirs))
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


# Comparison with the definition in float64.


def loss_of(function, names, weights):
    """A scalar function of y and h with dense second derivatives."""
    return lambda *given: sum((t * weight).sin().sum() for t, weight in zip(by_position(function, names)(*given), weights))


def _penalty(loss):
    def call(*tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        found = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in found), leaves)

    return call


def _tangents_of_gradients(loss):
    """Forward over reverse with dual numbers: the backward pass must propagate them. Nothing else
    is recorded."""
    def call(*tensors):
        with forward_ad.dual_level():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            given = [forward_ad.make_dual(leaf, leaf.detach().cos()) for leaf in leaves]
            return tuple(forward_ad.unpack_dual(found).tangent for found in torch.autograd.grad(loss(*given), leaves))

    return call


def _gradients_of_tangents(loss):
    def call(*tensors):
        with forward_ad.dual_level():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            given = [forward_ad.make_dual(leaf, leaf.detach().cos()) for leaf in leaves]
            return torch.autograd.grad(forward_ad.unpack_dual(loss(*given)).tangent, leaves)

    return call


def _flat(found):
    """All tensors of nested tuples."""
    return (found,) if isinstance(found, torch.Tensor) else tuple(t for part in found for t in _flat(part))


def _of_all(transform):
    return lambda f: lambda *t: _flat(transform(f, argnums=tuple(range(len(t))))(*t))


def _vmapped(transform):
    """A derivative over a batch of x only."""
    return lambda f: lambda x, *t: _flat(
        torch.func.vmap(transform(f), (0, *[None] * len(t)))(torch.stack([x, 2 * x.flip(0)]), *t))


FIRST = {
    "grad": _of_all(torch.func.grad), "jacrev": _of_all(torch.func.jacrev), "jacfwd": _of_all(torch.func.jacfwd),
    "jvp": lambda f: lambda *t: torch.func.jvp(f, t, tuple(x.cos() for x in t))[1],
    "linearize": lambda f: lambda *t: torch.func.linearize(f, *t)[1](*[x.cos() for x in t]),
    "functional.jvp": lambda f: lambda *t: torch.autograd.functional.jvp(f, t, tuple(x.cos() for x in t))[1],
    "jacobian, forward mode": lambda f: lambda *t: _flat(
        torch.autograd.functional.jacobian(f, t, vectorize=True, strategy="forward-mode")),
    "jacobian, vectorized": lambda f: lambda *t: _flat(torch.autograd.functional.jacobian(f, t, vectorize=True)),
}
SECOND = {
    "hessian": _of_all(torch.func.hessian),
    "jacfwd of jacrev": _of_all(lambda f, argnums: torch.func.jacfwd(torch.func.jacrev(f, argnums), argnums)),
    "jacrev of jacfwd": _of_all(lambda f, argnums: torch.func.jacrev(torch.func.jacfwd(f, argnums), argnums)),
    "jacrev of jacrev": _of_all(lambda f, argnums: torch.func.jacrev(torch.func.jacrev(f, argnums), argnums)),
    "jacfwd of jacfwd": _of_all(lambda f, argnums: torch.func.jacfwd(torch.func.jacfwd(f, argnums), argnums)),
    "grad of grad": _of_all(lambda f, argnums: torch.func.grad(
        lambda *t: sum(g.square().sum() for g in torch.func.grad(f, argnums)(*t)), argnums)),
    "jvp of grad": lambda f: lambda *t: torch.func.jvp(
        lambda *t: torch.func.grad(f, tuple(range(len(t))))(*t), t, tuple(x.cos() for x in t))[1],
    "linearize of grad": lambda f: lambda *t: _flat(torch.func.linearize(torch.func.grad(f), *t)[1](*[x.cos() for x in t])),
    "create_graph": _penalty, "dual numbers, backward": _tangents_of_gradients, "backward of tangents": _gradients_of_tangents,
    "hvp": lambda f: lambda *t: torch.autograd.functional.hvp(f, t, tuple(x.cos() for x in t))[1],
    "vhp": lambda f: lambda *t: torch.autograd.functional.vhp(f, t, tuple(x.cos() for x in t))[1],
    "functional.hessian": lambda f: lambda *t: _flat(torch.autograd.functional.hessian(f, t)),
    "functional.hessian, vectorized": lambda f: lambda *t: _flat(torch.autograd.functional.hessian(f, t, vectorize=True)),
    "functional.hessian, forward mode": lambda f: lambda *t: _flat(
        torch.autograd.functional.hessian(f, t, vectorize=True, outer_jacobian_strategy="forward-mode")),
    "vmap of grad": _vmapped(torch.func.grad), "vmap of jacfwd": _vmapped(torch.func.jacfwd), "vmap of hessian": _vmapped(torch.func.hessian),
    "vmap of grad of grad": _vmapped(lambda f: torch.func.grad(lambda *t: torch.func.grad(f)(*t).square().sum())),
    "vmap of jvp": _vmapped(lambda f: lambda *t: torch.func.jvp(f, t, tuple(x.cos() for x in t))[1]),
}


def both(is_layer, names, offset, transform, compiled=None, dtype=torch.float32):
    """(this package's result in the dtype, the definition in float64)."""
    tensors = make(names, dtype)
    weights = [random(3, COLS, dtype=dtype) for _ in range(2)]
    call = transform(loss_of(ours(is_layer, offset), names, weights))
    got = (call if compiled is None else compiled(call))(*tensors.values())
    exact = transform(loss_of(theirs(is_layer, offset), names, [w.double() for w in weights]))(*(t.double() for t in tensors.values()))
    return got, exact


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, dtype", [*itertools.product(FIRST | SECOND, [torch.float32]), ("jacfwd of jacfwd", torch.float64),
                                         ("jacrev of jacrev", torch.float64), ("jacrev of jacfwd", torch.float64)])
def test_every_way_to_differentiate(name, dtype):
    """The float64 cases: there are no kernels, and F.layer_norm of PyTorch 2.15 is wrong in these
    three."""
    for is_layer, names in INPUTS:
        near(*both(is_layer, names, 0.0 if is_layer else 0.5, (FIRST | SECOND)[name], dtype=dtype))


def compiler_of(name, tensors):
    """The compiler of this transform; skips if Dynamo of this PyTorch cannot trace it of any function."""
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    try:
        compiled((FIRST | SECOND)[name](lambda *tensors: sum(tensor.sin().sum() for tensor in tensors)))(*tensors)
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"{name}: PyTorch {torch.__version__} compiles it of no function: {error}")
    torch._dynamo.reset()
    return compiled


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["grad", "jvp", "jacfwd", "jacrev", "hessian", "grad of grad", "jvp of grad", "vmap of grad",
                                  "vmap of jvp", "vmap of grad of grad"])
@pytest.mark.parametrize("is_layer, names, offset", [(False, "xw", 1.0), (True, "xrwb", 0.0)])
def test_every_way_under_a_compiler(name, is_layer, names, offset):
    compiled = compiler_of(name, make(names).values())
    near(*both(is_layer, names, offset, (FIRST | SECOND)[name], compiled))


@pytest.mark.filterwarnings("ignore")
def test_inductor_compiles_gradients_of_each_example_and_tangents():
    for name in ("vmap of grad", "jvp"):
        torch._dynamo.reset()
        near(*both(False, "xw", 0.0, (FIRST | SECOND)[name], lambda call: torch.compile(call, fullgraph=True)))


def test_a_compiled_norm_has_the_tangents_of_dual_numbers():
    """The level is entered outside of the compiled function, where PyTorch's compiled norms have
    tangents."""
    tensors, tangents = make("xw"), make("xw")
    for is_layer in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(ours(is_layer), backend="aot_eager")
        near(dual_tangents(compiled, tensors, tangents), dual_tangents(
            theirs(is_layer), {k: t.double() for k, t in tensors.items()}, {k: t.double() for k, t in tangents.items()}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_second_derivatives_in_16_bits_are_no_less_exact_than_pytorchs_own(dtype):
    """The error over all elements is at most twice the error of the definition in this dtype."""
    for is_layer, names in INPUTS:
        tensors, weights = make(names, dtype, rows=(16,)), [random(16, COLS) for _ in range(2)]
        for transform in (_penalty, _tangents_of_gradients, SECOND["jvp of grad"]):
            exact = transform(loss_of(theirs(is_layer), names, [w.double() for w in weights]))(*(t.double() for t in tensors.values()))
            error = []
            for function in (ours, theirs):
                got = transform(loss_of(function(is_layer), names, weights))(*tensors.values())
                assert all(g.dtype == dtype for g in got)
                error.append(sum(((g.double() - e).norm() / e.norm()).square() for g, e in zip(got, exact)).sqrt())
            assert error[0] <= 2 * error[1], (names, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("transform", [torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.jacfwd(f)), torch.func.jacfwd])
def test_several_dimensions_have_derivatives_of_every_kind(is_layer, dtype, transform):
    x, weight = random(2, 3, 4, dtype=dtype), random(3, 4, dtype=dtype)
    norm = rt.layer_norm if is_layer else rt.rms_norm
    flat = theirs(is_layer)
    got = transform(lambda x: norm(x, (3, 4), weight, eps=EPS).sin().sum())(x)
    exact = transform(lambda x: flat({"x": x.flatten(1), "w": weight.double().flatten()})[0].sin().sum())(x.double())
    near(got, exact)


@pytest.mark.parametrize("weight, error", [(torch.ones(7), ValueError), (torch.ones(8, device="meta"), ValueError), ([1.0], TypeError),
                                           (torch.ones(8, dtype=torch.int32), TypeError)])
def test_every_transform_refuses_what_a_call_refuses(weight, error):
    x = random(3, 8)
    with pytest.raises(error, match="^weight: "):
        torch.func.jvp(lambda x: rt.rms_norm(x, weight=weight), (x,), (x,))
    with pytest.raises(error, match="^weight: "):
        torch.func.grad(lambda x: rt.layer_norm(x, weight=weight).sum())(x)
    with pytest.raises(error, match="^weight: "), forward_ad.dual_level():
        rt.add_rms_norm(forward_ad.make_dual(x, x), x, weight=weight)


@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("along", range(4))
def test_tangents_of_gradients_in_one_direction(is_layer, along):
    """Some gradients of a linear loss do not change along the direction: their tangents are zeros
    of the right shape."""
    tensors, c = [random(3, 8), random(3, 8), random(8), random(8)], random(3, 8)
    direction = random(*tensors[along].shape)

    def changes(norm):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(leaf, direction) if index == along else leaf for index, leaf in enumerate(leaves)]
            found = torch.autograd.grad(sum((result * c).sum() for result in norm(*duals)), leaves)
            found = [forward_ad.unpack_dual(gradient).tangent for gradient in found]
        return [torch.zeros_like(leaf) if tangent is None else tangent for leaf, tangent in zip(leaves, found)]

    def ours(x, r, w, b):
        return rt.add_layer_norm(x, r, w, b, 1e-3) if is_layer else (rt.add_rms_norm(x, r, w, 1e-3)[0] + b, x + r)

    def definition(x, r, w, b):
        h = x + r
        centred = h - h.mean(-1, keepdim=True) if is_layer else h
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-3) * w + b, h

    for got, expected in zip(changes(ours), changes(definition), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_layer", [False, True])
def test_gradients_of_tangents_of_dual_numbers(is_layer, dtype):
    x, t, w = random(3, 8, dtype=dtype), random(3, 8, dtype=dtype), random(8, dtype=dtype)

    def gradient(norm):
        leaf = x.clone().requires_grad_()
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(norm(forward_ad.make_dual(leaf, t))).tangent
            return torch.autograd.grad(tangent.sin().sum(), leaf)[0]

    def definition(x):
        h = x.double() - x.double().mean(-1, keepdim=True) if is_layer else x.double()
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3) * w

    near(gradient(lambda x: (rt.layer_norm if is_layer else rt.rms_norm)(x, w, eps=1e-3)), gradient(definition))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.hessian])
@pytest.mark.parametrize("name", ["eps", "weight_offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [rt.rms_norm, lambda x, **number: rt.add_rms_norm(x, x, **number)[0]])
def test_numbers_have_no_derivative_and_none_that_is_zero(transform, name, dtype, function):
    x = random(3, 8, dtype=dtype)
    with pytest.raises(TypeError, match=f"^{name}: expected a number, got a tensor that is to be differentiated"):
        transform(lambda number: function(x, weight=x[0], **{name: number}).sin().sum())(torch.tensor(0.5))


def test_checkpointing_keeps_second_derivatives():
    from torch.utils.checkpoint import checkpoint

    w, weights = random(COLS), [random(3, COLS)]
    direct = lambda x: loss_of(ours(False), "xw", weights)(x, w)  # noqa: E731
    x = random(3, COLS)
    assert torch.equal(*(_penalty(f)(x)[0] for f in (direct, lambda x: checkpoint(direct, x, use_reentrant=False))))


def test_a_batch_of_gradients_can_be_differentiated():
    tensors, weights = make("xw"), random(3, COLS)
    results = []
    for function, dtype in ((ours(True), torch.float32), (theirs(True), torch.float64)):
        x, w = (tensors[name].to(dtype).requires_grad_() for name in "xw")
        dy = torch.stack([weights, weights.sin()]).to(dtype)
        found = torch.autograd.grad(function({"x": x, "w": w})[0], (x, w), dy, is_grads_batched=True, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in found), (x, w)))
    near(*results)


# The operators.


def operator_calls():
    """(operator, its arguments by name, the differentiable ones, PyTorch's operator as a function
    of these)."""
    for is_layer, names in INPUTS:
        tensors, adds = make(names), {"r", "R"} & set(names)
        order = "x" + "".join(adds) + ("wb" if is_layer else "w") + ("R" in names) * ("vc" if is_layer else "v")
        given = [tensors.get(name) for name in order]
        rest = ([EPS] if is_layer else [EPS, 0.5, False]) + ["v" in names] * ("R" in names)
        name = ("add_" if "r" in names else "") + ("layer_norm" if is_layer else "rms_norm") + ("_add" if "R" in names else "")
        results = slice(1, 2) if "R" in names and "v" not in names else slice(0, 1 + len(adds))
        for kind in ("", "_inference") if not adds else ("",):
            operator = getattr(OPS, name + kind)

            def call(*leaves, operator=operator, given=given, rest=rest, results=results):
                leaves = iter(leaves)
                found = operator(*[None if t is None else next(leaves) for t in given], *rest)
                return (found if isinstance(found, tuple) else (found,))[results]

            yield name + kind, call, [t for t in given if t is not None], by_position(theirs(is_layer, 0.0 if is_layer else 0.5), names)


def backward_calls():
    """The operators of the backward pass as functions of dy, h, weight and dh. The statistics are
    computed from h."""
    for is_layer in (False, True):
        dy, h, w, dh = random(3, COLS), random(3, COLS), random(COLS), random(3, COLS)
        if is_layer:
            _, mean, rstd = OPS.layer_norm(h, None, None, EPS)
            call = lambda *t, s=(mean, rstd): OPS.layer_norm_backward(*t[:3], *s, t[3], True, True, False)[:3]  # noqa: E731
        else:
            _, rstd = OPS.rms_norm(h, None, EPS, 0.0, False)
            call = lambda *t, rstd=rstd: OPS.rms_norm_backward(*t[:3], rstd, t[3], 0.5, True, False)[:2]  # noqa: E731

        def exact(dy, h, w, dh, is_layer=is_layer):
            names = "xwb" if is_layer else "xw"
            leaves = (h, w, torch.zeros_like(w))[: len(names)]
            function = lambda *t: by_position(theirs(is_layer, 0.0 if is_layer else 0.5), names)(*t)[0]  # noqa: E731
            dx, *others = torch.func.vjp(function, *leaves)[1](dy)
            return dx + dh, *others

        yield f"backward of {'layer' if is_layer else 'rms'}", call, [dy, h, w, dh], exact


@pytest.mark.parametrize("name, call, leaves, exact", [*operator_calls(), *backward_calls()])
def test_operators_have_derivatives(name, call, leaves, exact):
    """No operator loses a derivative: dual numbers with and without a graph, torch.func, autograd,
    and second derivatives."""
    wide_leaves, tangents = [t.double() for t in leaves], [random(*t.shape) for t in leaves]
    expected = torch.func.jvp(exact, tuple(wide_leaves), tuple(t.double() for t in tangents))[1]
    near(torch.func.jvp(call, tuple(leaves), tuple(tangents))[1], expected)
    for with_grad in (False, True):
        with forward_ad.dual_level():
            given = [forward_ad.make_dual(t.detach().requires_grad_(with_grad), tangent) for t, tangent in zip(leaves, tangents)]
            near([forward_ad.unpack_dual(t).tangent for t in call(*given)], expected)
    loss = lambda f: lambda *t: sum(y.sin().sum() for y in f(*t))  # noqa: E731
    order = tuple(range(len(leaves)))
    first, second = (lambda f: torch.func.grad(loss(f), order)), (lambda f: _of_all(torch.func.hessian)(loss(f)))
    for transform in (first, second, lambda f: _penalty(loss(f)), lambda f: _vmapped(torch.func.grad)(loss(f))):
        near(transform(call)(*leaves), transform(exact)(*wide_leaves))
    # Below torch.func and autograd the results have the kernel's bits.
    batch = [torch.stack([t, t]) for t in leaves]
    for once, twice in zip(call(*leaves), torch.func.vmap(call)(*batch)):
        assert torch.equal(torch.stack([once, once]), twice)


# The quantized norm, which has no derivative.


@pytest.mark.parametrize("name", "xrw")
def test_quantized_norms_refuse_tangents(name):
    tensors = make("xrw")
    function = lambda x, r, w: rt.quantized_rms_norm(x, w, EPS, residual=r)  # noqa: E731
    text = "quantized_rms_norm has no derivative.*pass them detached"
    with forward_ad.dual_level():
        given = tensors | {name: forward_ad.make_dual(tensors[name], tensors[name])}
        for call in (lambda: function(*given.values()), lambda: torch.no_grad()(function)(*given.values()),
                     lambda: OPS.quantized_rms_norm(*given.values(), EPS, 0.0, False, None, 0, 2)):
            with pytest.raises(NotImplementedError, match=text):
                call()
        function(*(t.detach() for t in given.values()))
    with pytest.raises(NotImplementedError, match=text):
        torch.func.jvp(lambda t: function(*(tensors | {name: t}).values())[1], (tensors[name],), (tensors[name],))


@pytest.mark.parametrize("name", "xrw")
def test_quantized_norms_have_no_gradients(name):
    """The function documents it and returns detached results. The operator raises."""
    tensors = make("xrw")
    tensors[name].requires_grad_()
    found = rt.quantized_rms_norm(tensors["x"], tensors["w"], EPS, residual=tensors["r"])
    assert not any(t.requires_grad for t in found)
    arguments = [*tensors.values(), EPS, 0.0, False, None, 0, 2]
    for call in (lambda: OPS.quantized_rms_norm(*arguments),
                 lambda: torch.func.grad(lambda t: OPS.quantized_rms_norm(*(tensors | {name: t}).values(), *arguments[3:])[1].sum())(
                     tensors[name].detach())):
        with pytest.raises(NotImplementedError, match="has no derivative"):
            call()
    with torch.no_grad():
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(OPS.quantized_rms_norm(*arguments), found))


@pytest.mark.parametrize("function", [
    lambda x, w: (rt.rms_norm(x, w, 1e-6),), lambda x, w: (rt.layer_norm(x, w, w),), lambda x, w: rt.add_rms_norm(x, 2 * x, w, 1e-6),
    lambda x, w: rt.add_layer_norm(x, 2 * x, w, w), lambda x, w: (rt.rms_norm_add(x, 2 * x, w),),
    lambda x, w: rt.rms_norm_add_rms_norm(x, 2 * x, w, w),
], ids=["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_add", "rms_norm_add_rms_norm"])
def test_functionalize(function):
    """Alone, inside and outside of other transforms, and traced by make_fx."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = torch.randn(3, 8), torch.randn(8)
    loss = lambda x: sum(y.square().sum() for y in function(x, w))  # noqa: E731
    expected, gradient = function(x, w), torch.func.grad(loss)(x)
    whole = torch.func.functionalize(lambda x: torch.func.grad(loss)(x))
    for got, exact in zip(torch.func.functionalize(function)(x, w), expected, strict=True):
        torch.testing.assert_close(got, exact)
    for got in (torch.func.grad(torch.func.functionalize(loss))(x), whole(x), make_fx(whole)(x)(x)):
        torch.testing.assert_close(got, gradient)
