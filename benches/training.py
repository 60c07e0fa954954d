#!/usr/bin/env python3
"""Whole training steps of two small models on one CUDA device: as they are, with this package's `patch`, with Liger's RMS norm,
and under torch.compile.

    python benches/training.py --out training.json [--models llama,qwen3] [--only plain,patch,liger,compile,patch+compile]

A step is forward, loss, backward and AdamW, in bfloat16, of models of transformers with random weights and random tokens:

    llama   16 layers of 2048 columns, 2 norms each; batches of 4 sequences of 2048 tokens
    qwen3   28 layers of 1024 columns, 2 norms each and the norms of queries and keys; batches of 8 such sequences

Every variant begins with the same weights. The losses of its first three steps are compared with those of the model as it is
before its steps are timed: medians of 15, each from an idle device until it is idle again.

The output is a list as of peers.py: operations `step_llama` and `step_qwen3`, M tokens of a batch, N columns, and `peak_gib` of
memory. A variant that fails has a row with an `error`.
"""

import argparse
import gc
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


MODELS = {"llama": (llama, 4), "qwen3": (qwen3, 8)}


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


VARIANTS = {
    "plain": lambda model: model,
    "patch": with_patch,
    "liger": with_liger,
    "compile": torch.compile,
    "patch+compile": lambda model: torch.compile(with_patch(model)),
}


def measured(name, variant, tiny, expected):
    """Medians and losses of a variant; raises if the losses are not the expected ones."""
    make, batch = MODELS[name]
    kind, config = make(tiny)
    length = 32 if tiny else LENGTH
    torch.manual_seed(0)
    config.use_cache = False
    # "sdpa" is PyTorch's fused attention.
    config._attn_implementation = "sdpa"
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
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tiny", action="store_true", help="small models: whether the program works")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--commit", default=os.environ.get("RMSNORM_COMMIT") or peers.commit_of_tree())
    args = parser.parse_args()
    DEVICE, STEPS = args.device, args.steps
    rows = [peers.machine(args.commit)] if DEVICE == "cuda" else []
    for name in args.models.split(","):
        expected = None
        for variant in args.only.split(","):
            print(f"{name}, {variant}", flush=True)
            row = dict(op=f"step_{name}", provider=variant, M=0, N=0, dtype="bfloat16")
            try:
                row["M"], row["N"], found = measured(name, variant, args.tiny, expected)
                # The rate that matters: thousands of tokens a second. No bytes are counted.
                row |= found | dict(gbps=0.0, tokens_per_s=round(row["M"] / found["ms"] * 1e3))
                expected = expected or found["losses"]
                print(f"    {found['ms']:.1f} ms, {found['peak_gib']} GiB", flush=True)
            except Exception as error:
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
