"""`patch` on small models of transformers with random weights: logits, gradients and training steps beside those of the model as it is."""

import copy

import pytest
from conftest import framework
from judge import judge, judge_gated

torch = framework("torch")
transformers = framework("transformers")
import rmsnorm.torch as rt  # noqa: E402

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
MAMBA = dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
#: {model: (its configuration, how many norms with a gate it has)}.
MODELS = {
    "qwen3_next": (SIZES | LINEAR | EXPERTS | dict(layer_types=["linear_attention", "full_attention"]), 1),
    "mamba2": (dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=16, expand=2, num_heads=4, head_dim=16, n_groups=2, chunk_size=8,
                    pad_token_id=0, bos_token_id=1, eos_token_id=2), 2),
    "falcon_h1": (SIZES | MAMBA | dict(mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False), 2),
}


def made(name, dtype):
    torch.manual_seed(0)
    sizes, _ = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes, use_cache=False))
    for parameter in model.parameters():
        if parameter.dim() == 1 and parameter.numel() > 8:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model.to(dtype).train()


def tokens():
    return torch.randint(3, 96, (2, 21), generator=torch.Generator().manual_seed(1))


def norms_of(model):
    return [module for module in model.modules() if "Norm" in type(module).__name__]


def of_one_step(model):
    """(logits, all gradients as one vector)."""
    found = model(input_ids=tokens(), labels=tokens())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(found.loss, parameters, allow_unused=True)
    return found.logits.detach().float(), torch.cat([torch.zeros(p.numel()) if g is None else g.flatten().float() for p, g in zip(parameters, gradients)])


def losses(model, steps=4):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return torch.tensor(found)


def moved(model, units=8):
    """The model with each result of a norm moved by some units in the last place, at random: how far such errors go."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)

    def move(module, args, y):
        return y * (1 + (torch.randint(2, y.shape, generator=generator) * 2 - 1) * units * torch.finfo(y.dtype).eps / 2)

    for module in norms_of(model):
        module.register_forward_hook(move)
    return model


def apart(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_of_float32(name):
    """No further from the model as it is than that model with a few units in the last place of each norm moved."""
    plain = made(name, torch.float32)
    model, near = copy.deepcopy(plain), moved(plain)
    found = rt.patch(model)
    assert len(found) == len(norms_of(plain)) and not found.left, found
    assert sum("gate" in text for *_, text in found.replaced) == MODELS[name][1], found
    assert list(model.state_dict()) == list(plain.state_dict())
    for got, expected, limit in zip(of_one_step(model), of_one_step(plain), of_one_step(near), strict=True):
        assert 0 <= apart(got, expected) < 2 * apart(limit, expected) < 1e-4
    got, expected, limit = losses(model), losses(plain), losses(near)
    assert (got - expected).abs().max() <= 4 * (limit - expected).abs().max() + 4 * torch.finfo(torch.float32).eps * expected.max()
    assert expected[-1] < 0.9 * expected[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_of_bfloat16(name):
    """As near to the model in float32 as the model as it is."""
    plain = made(name, torch.bfloat16)
    wide, model = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    found = rt.patch(model)
    assert len(found) == len(norms_of(plain)) and not found.left, found
    for got, expected, exact in zip(of_one_step(model), of_one_step(plain), of_one_step(wide), strict=True):
        assert apart(got, exact) < 1.25 * apart(expected, exact) < 0.3
    got, expected, exact = losses(model), losses(plain), losses(wide)
    assert (got - exact).abs().max() <= 2 * (expected - exact).abs().max() + 2.0**-8 * exact.max()
    found.undo()
    assert all(type(module) is type(own) for module, own in zip(model.modules(), plain.modules(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_norm_of_a_patched_model_runs_the_kernel_and_is_within_its_bound(name):
    model, calls = made(name, torch.float32), []
    rt.patch(model)
    norms = norms_of(model)

    def keep(module, args, y):
        y.retain_grad()
        calls.append((module, [arg.detach().clone().requires_grad_() for arg in args], y))

    handles = [module.register_forward_hook(keep) for module in norms]
    with torch.profiler.profile() as profile:
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    for handle in handles:
        handle.remove()
    kernels = sum(event.count for event in profile.key_averages() if event.key.startswith("rmsnorm::") and "backward" not in event.key)
    assert kernels == len(calls) and {id(module) for module, *_ in calls} == {id(module) for module in norms}
    for module, args, y in calls:
        found = vars(module)["_rmsnorm"]
        found = found.gated if len(args) == 2 else found.alone
        kind, eps, names = found.kind, getattr(module, found.eps_name), ("x", "gate")[: len(args)]
        again = module(*args)
        assert torch.equal(again, y)
        gradients = torch.autograd.grad(again, [*args, module.weight], y.grad)
        inputs = dict(zip(names, args)) | dict(weight=module.weight, dy=y.grad)
        got = {"y": again} | dict(zip([f"d{name}" for name in (*names, "weight")], gradients, strict=True))
        if kind.is_plain:
            judge("rms_norm", eps, inputs, got, kind.weight_offset)
        else:
            judge_gated("rms_norm", eps, inputs, got, kind.activation, kind.gate_before, kind.groups, kind.weight_offset)
