#!/usr/bin/env python3
"""Whole training steps of small models on one CUDA device: as they are, with this package's `patch`, with the norms of other
packages, and under torch.compile.

    python benches/training.py --out training.json [--models llama,qwen3,..] [--only plain,patch,..]
    python benches/training.py --check               # tiny models on the CPU: whether the program works

A step is forward, loss, backward and AdamW, in bfloat16, of models of transformers with random weights and random tokens:

    llama        16 layers of 2048 columns, 2 norms each; batches of 4 sequences of 2048 tokens
    qwen3        28 layers of 1024 columns, 2 norms each and the norms of queries and keys; batches of 8 such sequences
    qwen3_next   12 layers of 1024 columns, 2 norms each; 9 have a gated norm of heads, 3 norms of queries and keys; batches of 16
    mamba2       12 layers of 1024 columns, a norm and a gated norm of 2048 columns each; batches of 16
    falcon_h1    12 layers of 1024 columns, 2 norms and a gated norm of 2048 columns each; batches of 16

    plain          the model as it is
    patch          rmsnorm.torch.patch
    liger          Liger's RMS norm in place of each plain norm: llama, qwen3
    fla            FLA's gated norm in place of each gated norm: qwen3_next
    mamba_ssm      that of mamba_ssm: mamba2, falcon_h1
    fused          mamba_ssm's one kernel for convolution, scan and norm, as transformers takes it where mamba_ssm and causal_conv1d
                   are installed
    compile, patch+compile   torch.compile
    kernels+compile          the same as the latter, with kernels for all norms; only if it is asked for

All variants but `fused` run the module of the gated norm. Every variant begins with the same weights. The losses of its first three
steps are compared with those of the model as it is before its steps are timed: medians of 15, each from an idle device until it is
idle again. Each line has the time and the ratio of the plain model's time to it.

The output is a list as of peers.py: operations `step_llama` and so on, M tokens of a batch, N columns, and `peak_gib` of
memory. A variant that fails, for example without its package, has a row with an `error`.
"""

import argparse
import contextlib
import gc
import importlib
import os
import statistics
import time

import peers
import torch

DEVICE = "cuda"
STEPS, FIRST = 15, 3
LENGTH = 2048


def llama(tiny):
    from transformers import LlamaConfig, LlamaForCausalLM

    if tiny:
        return LlamaForCausalLM, LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                             num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM, LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                                         num_attention_heads=32, num_key_value_heads=8)


def qwen3(tiny):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if tiny:
        return Qwen3ForCausalLM, Qwen3Config(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                             num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return Qwen3ForCausalLM, Qwen3Config(vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                                         num_attention_heads=16, num_key_value_heads=8, head_dim=128)


def qwen3_next(tiny):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    if tiny:
        return Qwen3NextForCausalLM, Qwen3NextConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    return Qwen3NextForCausalLM, Qwen3NextConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
        linear_num_key_heads=8, linear_num_value_heads=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512,
        shared_expert_intermediate_size=512)


def mamba2(tiny):
    from transformers import Mamba2Config, Mamba2ForCausalLM

    if tiny:
        return Mamba2ForCausalLM, Mamba2Config(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=8, head_dim=16,
                                               n_groups=2, chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return Mamba2ForCausalLM, Mamba2Config(vocab_size=32000, hidden_size=1024, num_hidden_layers=12, state_size=64, num_heads=32, head_dim=64,
                                           n_groups=1, chunk_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def falcon_h1(tiny):
    from transformers import FalconH1Config, FalconH1ForCausalLM

    if tiny:
        return FalconH1ForCausalLM, FalconH1Config(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8, mamba_n_groups=2, mamba_rms_norm=True,
            mamba_norm_before_gate=False)
    return FalconH1ForCausalLM, FalconH1Config(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=2,
        mamba_d_ssm=2048, mamba_n_heads=32, mamba_d_head=64, mamba_d_state=64, mamba_chunk_size=64, mamba_n_groups=1, mamba_rms_norm=True,
        mamba_norm_before_gate=False)


#: {name: (model, sequences of a batch, the variants that it has beside those of every model)}.
MODELS = {
    "llama": (llama, 4, ["liger"]), "qwen3": (qwen3, 8, ["liger"]), "qwen3_next": (qwen3_next, 16, ["fla"]),
    "mamba2": (mamba2, 16, ["mamba_ssm", "fused"]), "falcon_h1": (falcon_h1, 16, ["mamba_ssm", "fused"]),
}


def with_patch(model):
    import rmsnorm.torch

    patched = rmsnorm.torch.patch(model)
    print(f"    {str(patched).splitlines()[0][:120]}", flush=True)
    return model


def with_liger(model):
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = LigerRMSNorm(child.weight.numel(), eps=child.variance_epsilon)
                # Not from a copy: parameters keep their identity.
                norm.weight = child.weight
                setattr(parent, name, norm)
                count += 1
    print(f"    {count} norms of Liger", flush=True)
    return model


def with_gated(model, make):
    """The model with each gated norm replaced by `make(norm)`, which gets the same weight."""
    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNormGated"):
                norm = make(child)
                # Layers read the latter where they offer the norm to a kernel for the whole layer.
                norm.weight, norm.variance_epsilon = child.weight, child.variance_epsilon
                setattr(parent, name, norm)
                count += 1
    print(f"    {count} gated norms", flush=True)
    if not count:
        raise LookupError("the model has no gated norm")
    return model


def with_fla(model):
    from fla.modules import FusedRMSNormGated

    activation = {"silu": "swish", "sigmoid": "sigmoid"}
    return with_gated(model, lambda own: FusedRMSNormGated(own.weight.numel(), eps=own.variance_epsilon, activation=activation[own.activation]))


def with_mamba_ssm(model):
    from mamba_ssm.ops.triton.layernorm_gated import RMSNorm

    width = lambda own: getattr(own, "group_size", own.weight.numel() // getattr(own, "n_groups", 1))  # noqa: E731
    return with_gated(model, lambda own: RMSNorm(own.weight.numel(), own.variance_epsilon, group_size=width(own),
                                                 norm_before_gate=getattr(own, "norm_before_gate", False)))


def with_fused(model):
    import mamba_ssm  # noqa: F401 - transformers takes it if it is there

    return model


def with_compile(model, norms):
    import rmsnorm.torch

    rmsnorm.torch.set_compiled(norms)
    return torch.compile(with_patch(model))


VARIANTS = {
    "plain": lambda model: model,
    "patch": with_patch,
    "liger": with_liger,
    "fla": with_fla,
    "mamba_ssm": with_mamba_ssm,
    "fused": with_fused,
    "compile": torch.compile,
    "patch+compile": lambda model: with_compile(model, "auto"),
    "kernels+compile": lambda model: with_compile(model, "kernels"),
}
#: The function of transformers that computes a whole layer's part with its norm, or gives None.
FUSED = "mamba2_split_conv1d_scan_combined"
COMMON = "plain", "patch", "compile", "patch+compile"


@contextlib.contextmanager
def modules_of_norms(kind):
    """Lets a class's models run their norms' modules also where mamba_ssm's one kernel would do without."""
    module = importlib.import_module(kind.__module__)
    own = getattr(module, FUSED, None)
    if own is not None:
        setattr(module, FUSED, lambda *_, **__: None)
    try:
        yield
    finally:
        if own is not None:
            setattr(module, FUSED, own)


def measured(name, variant, tiny, expected):
    """Medians and losses of a variant; raises if the losses are not the expected ones."""
    make, batch, _ = MODELS[name]
    kind, config = make(tiny)
    with contextlib.nullcontext() if variant == "fused" else modules_of_norms(kind):
        return steps_of(kind, config, variant, batch, tiny, expected)


def steps_of(kind, config, variant, batch, tiny, expected):
    """`measured`, with the model's class and configuration."""
    length = 32 if tiny else LENGTH
    torch.manual_seed(0)
    config.use_cache = False
    # "sdpa" is PyTorch's fused attention. Mamba2 has none.
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    model = VARIANTS[variant](model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (batch, length), generator=generator).to(DEVICE)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    begun = time.monotonic()
    losses = [float(step()) for _ in range(FIRST)]
    print(f"    losses {losses}, first steps {time.monotonic() - begun:.1f} s", flush=True)
    for loss, other in zip(losses, expected or losses):
        # Norms of 16 bits round differently; a wrong norm is off by tenths after a step.
        if not abs(loss - other) < 2e-2 * abs(other):
            raise ArithmeticError(f"losses {losses} are not {expected}")
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    found = dict(ms=statistics.median(times), least_ms=min(times), most_ms=max(times), peak_gib=round(peak, 2), losses=losses, mode="wall")
    return batch * length, config.hidden_size, found


def main():
    global DEVICE, STEPS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default="", help="variants; all that the model has if left out")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tiny", action="store_true", help="small models: whether the program works")
    parser.add_argument("--check", action="store_true", help="--tiny --device cpu --steps 2")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--commit", default=os.environ.get("RMSNORM_COMMIT") or peers.commit_of_tree())
    args = parser.parse_args()
    DEVICE, STEPS, args.tiny = ("cpu", 2, True) if args.check else (args.device, args.steps, args.tiny)
    rows = [peers.machine(args.commit)] if DEVICE == "cuda" else []
    for name in args.models.split(","):
        expected = plain = None
        variants = [variant for variant in VARIANTS if variant in (*COMMON, *MODELS[name][2])]
        for variant in args.only.split(",") if args.only else variants:
            print(f"{name}, {variant}", flush=True)
            row = dict(op=f"step_{name}", provider=variant, M=0, N=0, dtype="bfloat16")
            try:
                row["M"], row["N"], found = measured(name, variant, args.tiny, expected)
                # The rate that matters: thousands of tokens a second. No bytes are counted.
                row |= found | dict(gbps=0.0, tokens_per_s=round(row["M"] / found["ms"] * 1e3))
                expected = expected or found["losses"]
                plain = found["ms"] if variant == "plain" else plain
                ratio = "" if plain is None else f", {plain / found['ms']:.2f} times as fast as plain"
                print(f"    {found['ms']:.1f} ms{ratio}, {found['peak_gib']} GiB", flush=True)
            except Exception as error:
                if args.check and not isinstance(error, ImportError):
                    raise
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"    {row['error']}", flush=True)
            rows.append(row)
            peers.write(args.out, rows)
            torch._dynamo.reset()
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
