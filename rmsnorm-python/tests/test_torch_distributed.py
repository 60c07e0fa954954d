"""PyTorch on several devices: two GPUs, and two processes on one CPU that act as devices."""

import pathlib
import subprocess
import sys

import pytest
from conftest import framework, need

torch = framework("torch")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_rows_on_two_devices(order, device):
    """DTensor (communication only for split rows), SequenceParallel, FSDP2. distributed_torch.py
    has the checks."""
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed: not in this PyTorch")
    need(device, device == "cpu" or torch.cuda.device_count() >= 2, "PyTorch finds fewer than two such devices")
    script = pathlib.Path(__file__).parent / "distributed_torch.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), order, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stdout[-4000:] + done.stderr[-8000:]


@pytest.mark.parametrize("rank", range(1, 6))
def test_every_dimension_may_be_split_but_that_of_a_row(rank):
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed: not in this PyTorch")
    from torch.distributed.tensor import Partial, Replicate, Shard

    from rmsnorm.torch import sharding

    rows = [(Shard(dim), Partial()) for dim in range(rank - 1)]
    assert sharding._placements(torch.empty([2] * rank)) == [(Replicate(), Replicate()), *rows]


def test_every_rule_has_a_placement_for_each_argument_and_result(monkeypatch):
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed: not in this PyTorch")
    import torch.distributed.tensor.experimental as experimental

    from rmsnorm.torch import sharding

    rules = {}
    monkeypatch.setattr(experimental, "register_sharding", lambda operator: lambda rule: rules.update({operator: rule}))
    sharding._register()
    assert len(rules) == 12
    for operator, rule in rules.items():
        schema = operator._schema
        are_tensors = ["Tensor" in str(argument.type) for argument in schema.arguments]
        for results, arguments in rule(*(torch.empty(2, 3, 4) if is_tensor else True for is_tensor in are_tensors)):
            assert len(results) == len(schema.returns), operator
            assert [placement is not None for placement in arguments] == are_tensors, operator
