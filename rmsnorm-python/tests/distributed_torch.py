"""Run by torchrun in two processes: DTensor, SequenceParallel, FSDP2, and `patch` with the wrappers
of models for several processes. See test_torch_distributed.py.

Two arguments: "before" or "after", to import the package before or after DTensor; and the device
type, cpu (gloo) or cuda (NCCL, one GPU per process).
"""

import copy
import functools
import os
import sys

import torch
import torch.distributed as dist

if sys.argv[1] == "before":
    import importlib.util

    import rmsnorm.torch as rt

    # Finding the module's spec must not import it.
    assert importlib.util.find_spec("torch.distributed.tensor") is not None

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

if sys.argv[1] == "after":
    import rmsnorm.torch as rt

FUNCTIONS = {
    "rms_norm": lambda x, r, w, b: (rt.rms_norm(x, w, 1e-6),),
    "layer_norm": lambda x, r, w, b: (rt.layer_norm(x, w, b),),
    "add_rms_norm": lambda x, r, w, b: rt.add_rms_norm(x, r, w, 1e-6),
    "add_layer_norm": lambda x, r, w, b: rt.add_layer_norm(x, r, w, b),
    "rms_norm_add": lambda x, r, w, b: (rt.rms_norm_add(x, r, w, 1e-6),),
    "layer_norm_add": lambda x, r, w, b: (rt.layer_norm_add(x, r, w, b),),
    "rms_norm_add_rms_norm": lambda x, r, w, b: rt.rms_norm_add_rms_norm(x, r, w, b, 1e-6),
    "gate after, groups": lambda x, r, w, b: (rt.Norm.layer().groups(4).gate_after(r).apply(x, w, b),),
    "gate before": lambda x, r, w, b: (rt.Norm.rms(1e-6).gate_before(r).apply(x, w, b),),
    "gate and residual": lambda x, r, w, b: rt.Norm.rms(1e-6).residual(r).gate_after(r).apply(x, w, b),
}
USED = {"rms_norm": "xw", "layer_norm": "xwb", "add_rms_norm": "xrw", "rms_norm_add": "xrw"}


def check_functions(mesh):
    x, r, dy = (torch.randn(4, 6, 64) for _ in range(3))
    w, b = torch.randn(64), torch.randn(64)
    for name, function in FUNCTIONS.items():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, r, w, b)]
        expected = function(*leaves)
        used = [leaf for leaf, kind in zip(leaves, "xrwb") if kind in USED.get(name, "xrwb")]
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
        # Rows that are split over devices are gathered, and the result is right.
        hidden = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in (x, r)]
        got = function(*hidden, *(distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (w, b)))
        for result, exact in zip(got, expected):
            assert torch.equal(result.full_tensor(), exact)
        if name.startswith("add"):
            # The gradient of h only.
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


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.last = torch.nn.Linear(64, 64), torch.nn.RMSNorm(64, 1e-6), torch.nn.LayerNorm(64)

    def forward(self, x):
        return x + self.last(self.linear(self.norm(x)))


def flat(policy, **more):
    return lambda net, mesh: FullyShardedDataParallel(net, device_id=torch.empty(0).device, auto_wrap_policy=ModuleWrapPolicy(policy), **more)


def sharded(kinds, net, mesh):
    for module in net.modules():
        if isinstance(module, kinds):
            fully_shard(module, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def checkpointed(wrap, net, mesh):
    for i, block in enumerate(net):
        net[i] = checkpoint_wrapper(block)
    return wrap(net, mesh)


NORMS = torch.nn.RMSNorm, torch.nn.LayerNorm
WRAPS = {
    "DDP": lambda net, mesh: DistributedDataParallel(net),
    "DDP of checkpoints": functools.partial(checkpointed, lambda net, mesh: DistributedDataParallel(net, static_graph=True)),
    "FSDP": flat({Block}, use_orig_params=False), "FSDP of norms": flat(set(NORMS), use_orig_params=False),
    "FSDP, parameters kept": flat({Block}, use_orig_params=True),
    "FSDP of checkpoints": functools.partial(checkpointed, flat({Block}, use_orig_params=True)),
    "fully_shard": functools.partial(sharded, (Block,)), "fully_shard of norms": functools.partial(sharded, NORMS),
    "fully_shard of checkpoints": functools.partial(checkpointed, functools.partial(sharded, (Block,))),
}


def check_patch(mesh):
    """Compares three training steps of the patched and of the original model, on different rows per
    rank."""
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    rows = [torch.randn(3, 5, 64) * (1 + dist.get_rank()) for _ in range(3)]
    for name, wrap in WRAPS.items():
        for is_patched_first in (True, False):
            own = torch.nn.Sequential(Block(), Block())
            net = copy.deepcopy(own)
            found = rt.patch(net) if is_patched_first else None
            own, net = wrap(own, mesh), wrap(net, mesh)
            found = found or rt.patch(net)
            # A model must be patched before FullyShardedDataParallel, as `patch` and `Patch.left`
            # say.
            is_flat = isinstance(net, FullyShardedDataParallel)
            assert len(found) == (0 if is_flat and not is_patched_first else 4), (name, is_patched_first, found)
            assert all("patch before wrapping" in reason for *_, reason in found.left), found
            optimizers = [torch.optim.SGD(model.parameters(), 0.5) for model in (own, net)]
            for x in rows:
                results = [model(x) for model in (own, net)]
                torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023
                for y, optimizer in zip(results, optimizers):
                    y.square().mul(torch.linspace(0, 1, 64)).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            states = [model.state_dict() for model in (own, net)]
            assert states[0].keys() == states[1].keys(), name
            for key, value in states[0].items():
                if hasattr(value, "local_tensor"):
                    value, got = value.local_tensor(), states[1][key].local_tensor()
                else:
                    value, got = whole(value), whole(states[1][key])
                torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}, {key}: {text}")  # noqa: B023


def main():
    device = sys.argv[2]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group({"cpu": "gloo", "cuda": "nccl"}[device])
    torch.set_default_device(device)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    check_functions(mesh)
    check_sequence_parallel(mesh)
    check_fsdp(mesh, False)
    check_fsdp(mesh, True)
    if sys.argv[1] == "after":
        # Once is enough: the order of the imports does not matter here.
        check_patch(mesh)
    if dist.get_rank() == 0:
        print("all checks passed", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch 2.11 sometimes aborts if gloo's threads still run when the process ends.
    os._exit(0)


main()
