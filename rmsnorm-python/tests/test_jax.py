"""JAX: kernels under its transformations, on four devices that one CPU stands for."""

import functools
import pathlib
import re

import numpy as np
import pytest
from conftest import framework, need
from judge import judge, wide

jax = framework("jax")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

import rmsnorm.jax as rj  # noqa: E402
from rmsnorm import _native  # noqa: E402
from rmsnorm.jax import reference  # noqa: E402
from rmsnorm.jax.calls import Norm  # noqa: E402

DTYPES = [(jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32)]


def random(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.fixture
def xw():
    return random(0, 8, 16, 256), random(1, 256)


@pytest.fixture
def four_devices():
    devices = jax.devices()
    need("four devices", len(devices) >= 4, f"JAX has {len(devices)}; the CPU stands for four")
    return np.array(devices[:4])


def ours(x, w):
    return rj.rms_norm(x, w, 1e-6)


def theirs(x, w):
    return reference.forward(Norm(False, 1e-6), x, None, w, None)[0]


def loss(function):
    return lambda x, w: (function(x, w).astype(jnp.float32) ** 2).sum()


def is_custom(text):
    return 'custom_call_target="rmsnorm_' in text or "@rmsnorm_" in text


def close(got, expected, tolerance=2e-5):
    """Of results whose bounds are tested elsewhere: that the right things were put together."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(wide(a) - wide(b)) <= tolerance * np.linalg.norm(wide(b))


@pytest.mark.parametrize("dtype, weight_dtype", DTYPES)
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("adds, stream", [(False, None), (True, None), (True, jnp.float32)])
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
def test_values_and_gradients_are_within_their_bounds(dtype, weight_dtype, is_layer, adds, stream, jit):
    x, dy = random(0, 3, 5, 203, dtype=dtype), random(1, 3, 5, 203, dtype=dtype)
    weight, bias = random(2, 203, dtype=weight_dtype), random(3, 203, dtype=weight_dtype)
    residual, dh = (random(seed, 3, 5, 203, dtype=stream or dtype) for seed in (4, 5))
    function = {
        (False, False): lambda x, weight, bias, residual: rj.rms_norm(x, weight, 1e-5),
        (True, False): lambda x, weight, bias, residual: rj.layer_norm(x, weight, bias, 1e-5),
        (False, True): lambda x, weight, bias, residual: rj.add_rms_norm(x, residual, weight, 1e-5),
        (True, True): lambda x, weight, bias, residual: rj.add_layer_norm(x, residual, weight, bias, 1e-5),
    }[is_layer, adds]

    @jit
    def run(x, weight, bias, residual, gradients):
        results, vjp = jax.vjp(function, x, weight, bias, residual)
        return results, vjp(gradients)

    results, (dx, dweight, dbias, dresidual) = run(x, weight, bias, residual, (dy, dh) if adds else dy)
    inputs = dict(x=x, weight=weight, dy=dy) | ({"bias": bias} if is_layer else {})
    got = dict(dx=dx, dweight=dweight) | ({"dbias": dbias} if is_layer else {})
    if adds:
        inputs |= dict(residual=residual, dresidual_out=dh)
        got |= dict(y=results[0], h=results[1], dresidual=dresidual)
    else:
        got |= dict(y=results)
    assert {name: array.dtype for name, array in got.items() if name in ("y", "dx")} == {"y": dtype, "dx": dtype}
    judge("layer_norm" if is_layer else "rms_norm", 1e-5, inputs, got)


def test_options():
    x, w = random(0, 4, 128, dtype=jnp.bfloat16), random(1, 128, dtype=jnp.bfloat16)
    judge("rms_norm", 1e-6, {"x": x, "weight": w}, {"y": rj.rms_norm(x, w, 1e-6, weight_offset=1.0)}, 1.0)
    judge("rms_norm", 1e-6, {"x": x}, {"y": rj.rms_norm(x, eps=1e-6)})
    judge("layer_norm", 1e-6, {"x": x}, {"y": rj.layer_norm(x, eps=1e-6)})
    # Llama's order: the same roundings by jax.numpy, in which a few values lie at another side of a tie.
    got, expected = (wide(f) for f in (
        rj.rms_norm(x, w, 1e-6, cast_before_weight=True), reference.forward(Norm(False, 1e-6, 0.0, True), x, None, w, None)[0]
    ))
    assert (got != expected).mean() < 0.01 and not np.array_equal(got, wide(rj.rms_norm(x, w, 1e-6)))


def test_one_row_of_one_dimension():
    x, w, dy = (random(seed, 40) for seed in range(3))
    y, vjp = jax.vjp(ours, x, w)
    dx, dweight = vjp(dy)
    judge("rms_norm", 1e-6, {"x": x, "weight": w, "dy": dy}, {"y": y, "dx": dx, "dweight": dweight})
    close(jax.vmap(ours, (None, 0))(x, jnp.stack([w, 2 * w])), jnp.stack([y, 2 * y]))


def test_the_kernel_runs_and_not_jax_numpy(xw):
    text = jax.jit(jax.grad(loss(ours), (0, 1))).lower(*xw).compile().as_text()
    assert text.count('custom_call_target="rmsnorm_forward"') == 1
    assert text.count('custom_call_target="rmsnorm_backward"') == 1


TRANSFORMS = {
    "vmap of x": lambda f: lambda x, w: jax.vmap(f, (0, None))(x, w),
    "vmap of the last dimension but one": lambda f: lambda x, w: jax.vmap(f, (1, None), 1)(x, w),
    "vmap of weights": lambda f: lambda x, w: jax.vmap(f, (None, 0))(x[0], jnp.arange(1.0, 4)[:, None] * w),
    "vmap of both": lambda f: lambda x, w: jax.vmap(f)(x, jnp.arange(1.0, 9)[:, None] * w),
    "vmap of vmap": lambda f: lambda x, w: jax.vmap(jax.vmap(f, (0, 0)), (0, None))(x, jnp.arange(1.0, 17)[:, None] * w),
    "gradients of each example": lambda f: lambda x, w: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(x, w),
    "gradients of each of both": lambda f: lambda x, w: jax.vmap(jax.grad(loss(f), 1))(x, jnp.arange(1.0, 9)[:, None] * w),
    "gradient of vmap": lambda f: jax.grad(loss(jax.vmap(f, (0, None))), (0, 1)),
    "gradient of vmap of both": lambda f: jax.grad(lambda x, w: loss(jax.vmap(f))(x, jnp.arange(1.0, 9)[:, None] * w), (0, 1)),
    "remat": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1)),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda carry, x: (carry, f(x, w)), 0, x)[1],
    "gradient of scan": lambda f: jax.grad(lambda x, w: jax.lax.scan(lambda h, _: (f(h, w) + h, None), x, None, 3)[0].sum(), (0, 1)),
    "jit of all": lambda f: jax.jit(jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("partition", [True, False])
def test_transformations(xw, name, partition):
    function = functools.partial(rj.rms_norm, eps=1e-6, partition=partition)
    close(TRANSFORMS[name](function)(*xw), TRANSFORMS[name](theirs)(*xw))


def test_a_batch_of_layer_norms_with_bias_and_residual(xw):
    x, w = xw
    weights, residuals = jnp.arange(1.0, 9)[:, None] * w, x[::-1]

    def run(function):
        return jax.vmap(jax.grad(lambda x, r, w, b: sum((t**2).sum() for t in function(x, r, w, b)), (0, 1, 2, 3)))

    expected = run(lambda x, r, w, b: reference.forward(Norm(True, 1e-5), x, r, w, b)[:2])(x, residuals, weights, weights)
    close(run(rj.add_layer_norm)(x, residuals, weights, weights), expected)


def test_bits_do_not_depend_on_the_batch_or_the_way(xw):
    x, w = xw
    whole = ours(x, w)
    assert np.array_equal(whole[3:4, 5:6], ours(x[3:4, 5:6], w))
    assert np.array_equal(whole, jax.vmap(ours, (0, None))(x, w))
    assert np.array_equal(whole, jax.jit(functools.partial(rj.rms_norm, eps=1e-6, partition=False))(x, w))


@pytest.mark.parametrize("call, text", [
    (lambda x, w: rj.rms_norm(x, w[:-1]), r"weight: expected the shape \(256,\), got \(255,\)"),
    (lambda x, w: rj.add_rms_norm(x, x[:1], w), "residual: expected the shape"),
    (lambda x, w: rj.layer_norm(x, w, w[None]), "bias: expected the shape"),
    (lambda x, w: rj.rms_norm(x[0, 0, 0], w), "at least one dimension"),
    (lambda x, w: jax.jit(lambda x, w: rj.rms_norm(x, w, -1.0))(x, w).block_until_ready(), "eps must be finite and not negative"),
])
def test_errors_say_what_was_expected(xw, call, text):
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text):
        call(*xw)


def test_dtypes_without_kernels_are_computed_all_the_same(xw):
    x, w = (array.astype(jnp.float16) for array in xw)
    mixed = jax.jit(ours)(x, w.astype(jnp.bfloat16))
    close(mixed, theirs(x, w.astype(jnp.bfloat16)))
    assert mixed.dtype == jnp.float16
    assert ours(x[:0], w).shape == (0, 16, 256)
    jax.config.update("jax_enable_x64", True)
    try:
        x64, w64 = (jnp.asarray(wide(array)) for array in xw)
        assert ours(x64, w64).dtype == jnp.float64
        close(ours(x64, w64), theirs(x64, w64), 1e-12)
        # The kernels' own calls do not depend on the setting.
        close(ours(*xw), theirs(*xw))
    finally:
        jax.config.update("jax_enable_x64", False)


def test_forward_mode_is_refused(xw):
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(ours, xw, xw)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm", "add_rms_norm"])
def test_automatic_sharding_moves_no_activations(xw, norm, four_devices):
    x, w = xw
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"))
    xs, ws = jax.device_put(x, NamedSharding(mesh, P("a", "b"))), jax.device_put(w, NamedSharding(mesh, P()))
    call = {
        "rms_norm": lambda x, w: rj.rms_norm(x, w), "layer_norm": lambda x, w: rj.layer_norm(x, w, w),
        "add_rms_norm": lambda x, w: sum(rj.add_rms_norm(x, 2 * x, w)),
    }[norm]
    compiled = jax.jit(jax.grad(loss(call), (0, 1))).lower(xs, ws).compile()
    text = compiled.as_text()
    assert is_custom(text) and not re.search(r"all-gather|all-to-all|collective-permute", text)
    # The gradient of the weight, and that of layer norm's bias.
    assert len(re.findall(r" all-reduce[\w.-]*\(", text)) <= (2 if norm == "layer_norm" else 1)
    dx, dw = compiled(xs, ws)
    assert dx.sharding.spec == P("a", "b") and dw.sharding.is_fully_replicated
    close((dx, dw), jax.grad(loss(call), (0, 1))(x, w))


def test_sums_over_devices_are_rounded_once(four_devices):
    """Each device's part of a bfloat16 dweight, rounded on its own, would be off by some units in the last place."""
    mesh = Mesh(four_devices, ("a",))
    x, dy = random(0, 64, 96, dtype=jnp.bfloat16), random(1, 64, 96, dtype=jnp.bfloat16)
    w = random(2, 96, dtype=jnp.bfloat16)
    rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    run = jax.jit(lambda x, w, dy: jax.vjp(ours, x, w)[1](dy))
    dx, dweight = run(jax.device_put(x, rows), jax.device_put(w, whole), jax.device_put(dy, rows))
    judge("rms_norm", 1e-6, {"x": x, "weight": w, "dy": dy}, {"dx": dx, "dweight": dweight})


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(xw, check_vma, four_devices):
    x, w = xw
    if not hasattr(jax, "shard_map"):
        pytest.skip(f"jax.shard_map: JAX {jax.__version__} has none")
    mesh = Mesh(four_devices.reshape(2, 2), ("a", "b"))
    f = jax.shard_map(ours, mesh=mesh, in_specs=(P("a", "b"), P()), out_specs=P("a", "b"), check_vma=check_vma)
    close(jax.jit(jax.grad(loss(f), (0, 1)))(x, w), jax.grad(loss(theirs), (0, 1))(x, w))


def test_calls_become_part_of_a_graph():
    """Norms with gradients in one program, run again and again: on CUDA XLA captures them into graphs, and replays them."""
    x, w = random(0, 128, 1024, dtype=jnp.bfloat16), random(1, 1024, dtype=jnp.bfloat16)

    def loss(norm):
        def of(x, w):
            for _ in range(8):
                x = x + norm(x, w)
            return x.astype(jnp.float32).sum()

        return jax.grad(of, (0, 1))

    step = jax.jit(loss(ours))
    results = [step(x + index % 2, w) for index in range(6)]
    for index in range(2, 6):
        assert all(np.array_equal(wide(a), wide(b)) for a, b in zip(results[index], results[index % 2]))
    # Eight roundings to bfloat16, of 2^-9 each, one after the other.
    close(results[0], loss(theirs)(x, w), 8 * 2.0**-9)


def test_export_for_platforms_with_and_without_a_kernel(xw):
    export = pytest.importorskip("jax.export")
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in xw]
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in ("rmsnorm_forward", "rmsnorm_backward")]
    platforms = ("cpu", "cuda", "tpu")
    exported = export.export(jax.jit(jax.grad(loss(ours), (0, 1))), platforms=platforms, disabled_checks=checks)(*shapes)
    assert is_custom(exported.mlir_module())
    close(exported.call(*xw), jax.grad(loss(theirs), (0, 1))(*xw))


def test_the_workspace_bound_asks_for_no_device():
    lengths = [_native.xla_workspace_len(is_cuda, "rms_norm", 8192, 4096, "dy,x,weight,rstd,dx,dweight", ("bfloat16",) * 3)
               for is_cuda in (False, True)]
    assert all(4096 <= length <= 8192 * 4096 // 8 for length in lengths)
    with pytest.raises(ValueError, match="float64"):
        _native.xla_workspace_len(False, "rms_norm", 1, 1, "dy", ("float64",) * 3)


def test_structs_are_those_of_the_installed_header(tmp_path):
    """Sizes and offsets by the C compiler, from the header that jaxlib ships."""
    import shutil
    import subprocess

    import jaxlib

    include = pathlib.Path(jaxlib.__file__).parent / "include"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not (include / "xla/ffi/api/c_api.h").exists() or compiler is None:
        pytest.skip("a C compiler and jaxlib's header: not both are here")
    header = (include / "xla/ffi/api/c_api.h").read_text()
    # Names change from version to version; places do not. Of the table those functions are looked at that are called.
    renamed = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}
    called = {"XLA_FFI_Error_Create", "XLA_FFI_Stream_Get", "XLA_FFI_DeviceOrdinal_Get"}
    lines, expected = [], []
    for struct, fields in _native.xla_layouts():
        if not (f"}} {struct};" in header or f"struct {struct} {{" in header):
            if struct == "XLA_FFI_DeviceOrdinal_Get_Args":
                continue
            struct = renamed[struct]
        for field, offset in fields:
            is_function = struct == "XLA_FFI_Api" and field.startswith("XLA_FFI_")
            # The last came with a later version than the first.
            is_missing = field == "XLA_FFI_DeviceOrdinal_Get" and f"{field})" not in header
            if not is_missing and (field in called or not is_function):
                lines.append(f'printf("%zu\\n", offsetof({struct}, {field}));')
                expected.append((struct, field, offset))
    assert called - {"XLA_FFI_DeviceOrdinal_Get"} <= {field for _, field, _ in expected}
    source = tmp_path / "offsets.c"
    source.write_text('#include <stdio.h>\n#include "xla/ffi/api/c_api.h"\nint main(void) {\n' + "\n".join(lines) + "\n}\n")
    subprocess.run([compiler, f"-I{include}", str(source), "-o", str(tmp_path / "offsets")], check=True)
    printed = subprocess.run([str(tmp_path / "offsets")], check=True, capture_output=True, text=True).stdout.split()
    assert [(*of, int(offset)) for (*of, _), offset in zip(expected, printed)] == expected
