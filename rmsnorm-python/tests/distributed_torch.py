"""Run by torchrun, two processes over gloo: DTensor, SequenceParallel and FSDP2. See test_torch_distributed.py.

One argument: "before" imports the package before DTensor, "after" after it.
"""

import os
import sys

import torch
import torch.distributed as dist

if sys.argv[1] == "before":
    import importlib.util

    import rmsnorm.torch as rt

    # To ask whether a module is there is not to import it.
    assert importlib.util.find_spec("torch.distributed.tensor") is not None

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module  # noqa: E402

if sys.argv[1] == "after":
    import rmsnorm.torch as rt

FUNCTIONS = {
    "rms_norm": lambda x, r, w, b: (rt.rms_norm(x, w, 1e-6),),
    "layer_norm": lambda x, r, w, b: (rt.layer_norm(x, w, b),),
    "add_rms_norm": lambda x, r, w, b: rt.add_rms_norm(x, r, w, 1e-6),
    "add_layer_norm": lambda x, r, w, b: rt.add_layer_norm(x, r, w, b),
}


def check_functions(mesh):
    x, r, dy = (torch.randn(4, 6, 64) for _ in range(3))
    w, b = torch.randn(64), torch.randn(64)
    for name, function in FUNCTIONS.items():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, r, w, b)]
        expected = function(*leaves)
        used = [leaf for leaf, kind in zip(leaves, "xrwb") if kind in {"rms_norm": "xw", "layer_norm": "xwb",
                                                                          "add_rms_norm": "xrw", "add_layer_norm": "xrwb"}[name]]
        theirs = torch.autograd.grad(expected, used, [dy] * len(expected))
        for dim in (0, 1):
            rows = [distribute_tensor(tensor, mesh, [Shard(dim)]).requires_grad_() for tensor in (x, r)]
            vectors = [distribute_tensor(tensor, mesh, [Replicate()]).requires_grad_() for tensor in (w, b)]
            spread = dict(zip("xrwb", rows + vectors))
            inputs = [spread["xrwb"[index]] for index, leaf in enumerate(leaves) if any(leaf is other for other in used)]
            gradient = distribute_tensor(dy, mesh, [Shard(dim)])
            with CommDebugMode() as communication:
                got = function(*rows, *vectors)
                ours = torch.autograd.grad(got, inputs, [gradient] * len(got))
            assert communication.get_total_counts() == 0, (name, dim, communication.get_comm_counts())
            for result, exact in zip(got, expected):
                assert result.placements == (Shard(dim),) and torch.equal(result.full_tensor(), exact)
            for index, (result, exact) in enumerate(zip(ours, theirs)):
                assert result.placements == ((Partial(),) if exact.ndim == 1 else (Shard(dim),)), (name, index, result.placements)
                torch.testing.assert_close(result.full_tensor(), exact)
        # A row on several devices: gathered, and right.
        hidden = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in (x, r)]
        got = function(*hidden, *(distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (w, b)))
        for result, exact in zip(got, expected):
            assert torch.equal(result.full_tensor(), exact)
        if len(got) == 2:
            # The gradient of the stream alone.
            rows = [distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_() for tensor in (x, r)]
            stream = function(*rows, *vectors)[1]
            for gradient in torch.autograd.grad(stream.sum(), rows):
                assert torch.equal(gradient.full_tensor(), torch.ones_like(x))
        with torch.no_grad():
            rows = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (x, r)]
            got = function(*rows, *(distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (w, b)))
            assert all(torch.equal(result.full_tensor(), exact) for result, exact in zip(got, expected))


def check_sequence_parallel(mesh):
    x = torch.randn(4, 6, 64)
    module = torch.nn.Sequential(rt.RMSNorm(64, eps=1e-6), rt.LayerNorm(64))
    torch.nn.init.normal_(module[0].weight)
    expected = module(x)
    expected.sum().backward()
    gradient = module[0].weight.grad.clone()
    module.zero_grad()
    parallel = parallelize_module(module, mesh, {"0": SequenceParallel(), "1": SequenceParallel()})
    y = parallel(distribute_tensor(x, mesh, [Shard(1)]))
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.sum().backward()
    torch.testing.assert_close(parallel[0].weight.grad.full_tensor(), gradient, rtol=1e-4, atol=1e-4)


def check_fsdp(mesh, is_compiled):
    x = torch.randn(8, 64)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), rt.RMSNorm(64, eps=1e-6), torch.nn.Linear(64, 64), rt.LayerNorm(64))
    expected = plain(x)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    for layer in plain:
        fully_shard(layer, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    step = torch.compile(plain, backend="aot_eager") if is_compiled else plain
    y = step(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    for parameter, exact in zip(plain.parameters(), gradients):
        assert parameter.grad.placements == (Shard(0),)
        torch.testing.assert_close(parameter.grad.full_tensor(), exact, rtol=1e-4, atol=1e-4)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_functions(mesh)
    check_sequence_parallel(mesh)
    check_fsdp(mesh, False)
    check_fsdp(mesh, True)
    if dist.get_rank() == 0:
        print("all checks passed", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch 2.11 aborts now and then when threads of gloo are still there as the process ends.
    os._exit(0)


main()
