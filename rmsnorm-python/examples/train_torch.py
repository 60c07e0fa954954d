"""Trains a small language model on this project's texts, with the norms of this package and
PyTorch's, and prints both losses.

    python rmsnorm-python/examples/train_torch.py [--device cuda] [--steps 100] [--compile]

The models start from the same weights and see the same bytes. Their sums are rounded differently,
and the difference grows with the steps.
"""

import argparse
import pathlib
import time

import torch
import torch.nn.functional as F

import rmsnorm.torch as rt

COLS, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 3, 96, 16


class AddNorm(torch.nn.RMSNorm):
    """Residual add and norm with PyTorch's operators."""

    def forward(self, x, residual):
        h = x + residual
        return super().forward(h), h


OURS = dict(norm=rt.RMSNorm, add_norm=rt.AddRMSNorm)
THEIRS = dict(norm=torch.nn.RMSNorm, add_norm=AddNorm)


class Layer(torch.nn.Module):
    """Attention and a gated MLP. The norm in front of each also adds the previous output to the
    residual stream."""

    def __init__(self, norm, add_norm):
        super().__init__()
        self.attention_norm, self.product_norm = add_norm(COLS, eps=1e-6), add_norm(COLS, eps=1e-6)
        # q and k are slices of the fused QKV buffer, which are normalized without a copy.
        self.q_norm, self.k_norm = norm(COLS // HEADS, eps=1e-6), norm(COLS // HEADS, eps=1e-6)
        self.qkv, self.out = torch.nn.Linear(COLS, 3 * COLS, bias=False), torch.nn.Linear(COLS, COLS, bias=False)
        self.up, self.down = torch.nn.Linear(COLS, 4 * COLS, bias=False), torch.nn.Linear(2 * COLS, COLS, bias=False)

    def forward(self, x, stream):
        y, stream = self.attention_norm(x, stream)
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, COLS // HEADS)).unbind(-3)
        q, k, v = (tensor.transpose(1, 2) for tensor in (self.q_norm(q), self.k_norm(k), v))
        x = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y, stream = self.product_norm(x, stream)
        gate, value = self.up(y).chunk(2, -1)
        return self.down(F.silu(gate) * value), stream


class Model(torch.nn.Module):
    """Predicts the next byte."""

    def __init__(self, norm, add_norm):
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, COLS), torch.nn.Embedding(LENGTH, COLS)
        self.layers = torch.nn.ModuleList(Layer(norm, add_norm) for _ in range(LAYERS))
        self.norm, self.head = add_norm(COLS, eps=1e-6), torch.nn.Linear(COLS, 256, bias=False)

    def forward(self, ids):
        stream, x = self.bytes(ids), self.places.weight.expand(len(ids), LENGTH, COLS)
        for layer in self.layers:
            x, stream = layer(x, stream)
        return self.head(self.norm(x, stream)[0])


def train(kind, args, text):
    torch.manual_seed(0)
    model = Model(**kind).to(args.device)
    step = torch.compile(model, fullgraph=True) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator, losses = torch.Generator().manual_seed(1), []
    start = time.perf_counter()
    for _ in range(args.steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(args.device)
        loss = F.cross_entropy(step(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = [loss.item() for loss in losses]
    return losses, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[2]
    text = b"".join((root / name).read_bytes() for name in ("README.md", "ARCHITECTURE.md", "rmsnorm-spec/math.md"))
    text = torch.tensor(list(text))
    (ours, our_time), (theirs, their_time) = train(OURS, args, text), train(THEIRS, args, text)
    print(f"{'step':>6} {'rmsnorm':>10} {'torch.nn':>10} {'difference':>12}")
    for index in sorted({0, 1, 3, 10, 30, *range(99, args.steps, 100), args.steps - 1}):
        if index < args.steps:
            print(f"{index + 1:6} {ours[index]:10.5f} {theirs[index]:10.5f} {ours[index] - theirs[index]:12.1e}")
    print(f"{args.steps} steps: {our_time:.1f} s with rmsnorm, {their_time:.1f} s with torch.nn")
    # Early losses agree up to rounding. Later the models have drifted apart, but are equally good.
    assert max(abs(a - b) for a, b in zip(ours[:4], theirs[:4])) < 1e-3
    assert ours[-1] < 0.8 * ours[0] and abs(ours[-1] - theirs[-1]) < 0.05 * theirs[-1]


main()
