#!/usr/bin/env python3
"""Run `rmsnorm` on norms of two real language models and check every number of its output.

Both models read a text (models.py). The activations, weights and biases of the norms in PLAN are
saved as safetensors files. `rmsnorm run` computes each, and its output is compared with the
definition in float64. Exit code 1 if an error is larger than float32 arithmetic explains.
"""
import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from models import average, gemma_norms, minilm_norms, statistics

TEXT = ("Normalisation layers keep the numbers in a deep network at a steady size: every token's vector "
        "is divided by its own root mean square, then stretched, channel by channel, by weights that "
        "were learned. The capital of France is")

DTYPES = {"f32": np.dtype("f4"), "f16": np.dtype("f2"), "bf16": np.dtype(ml_dtypes.bfloat16)}

PLAN = [  # norm, dtype of x, weight_offset, backward pass too?
    ("blk.0.attn_norm", "f32", 0, True),
    ("blk.0.attn_q_norm", "f32", 0, True),
    ("blk.0.attn_k_norm", "f16", 0, False),
    ("blk.0.post_attention_norm", "f32", 1, False),
    ("blk.0.ffn_norm", "bf16", 0, False),
    ("blk.0.post_ffw_norm", "f16", 0, False),
    ("blk.8.attn_norm", "bf16", 1, True),  # from here on one channel of the first token is too large for f16
    ("blk.8.attn_q_norm", "f16", 1, False),
    ("blk.8.attn_k_norm", "bf16", 1, False),
    ("blk.8.post_attention_norm", "f16", 0, False),
    ("blk.8.ffn_norm", "f32", 1, False),
    ("blk.8.post_ffw_norm", "bf16", 0, False),
    ("blk.14.post_ffw_norm", "f32", 0, True),  # the first token's mean square is 7e-9: eps decides
    ("blk.14.post_ffw_norm", "f16", 0, False),  # ... and most of its activations are subnormal in f16
    ("blk.17.attn_q_norm", "bf16", 0, True),
    ("blk.17.post_attention_norm", "f16", 1, True),
    ("blk.17.ffn_norm", "bf16", 0, False),
    ("blk.17.post_ffw_norm", "f32", 0, False),
    ("output_norm", "f32", 1, True),
    ("embeddings.LayerNorm", "f32", 0, True),
    ("encoder.layer.0.attention.output.LayerNorm", "bf16", 0, False),
    ("encoder.layer.0.output.LayerNorm", "f16", 0, False),
    ("encoder.layer.2.output.LayerNorm", "f32", 0, False),
    ("encoder.layer.5.attention.output.LayerNorm", "f16", 0, True),
    ("encoder.layer.5.output.LayerNorm", "bf16", 0, True),
]

COLUMNS = {"model": 17, "norm": 43, "x": 10, "dtype": 6, "offset": 7, "y ulp": 7, "y exact": 9, "rstd": 9,
           "mean": 9, "dx": 9, "dweight": 9, "dbias": 9, "excess": 8, "verdict": 7}


def save(norm, path, dtype, offset, backward):
    x = norm.x.astype(DTYPES[dtype])
    assert np.isfinite(x.astype("f8")).all(), f"{dtype} cannot hold the activations at {norm.name}"
    tensors = {"x": x, "weight": norm.weight - np.float32(offset)}
    if norm.bias is not None:
        tensors["bias"] = norm.bias
    if backward:
        tensors["dy"] = np.random.default_rng(0).standard_normal(x.shape).astype(x.dtype)
    metadata = {"op": norm.op, "eps": repr(norm.eps), "weight_offset": str(offset)}
    # save_file ignores strides, so every array must be contiguous.
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, path, metadata)
    return tensors


def reference(tensors, op, eps, offset):
    """Every output in float64, and its largest float32 error before it is rounded to its dtype:
    name -> (value, allowed error).

    Derivation: one operation has an error of at most u = 2^-24 of its result. A sum of n terms in
    32 partial sums (4 registers of 8 lanes) rounds every term n/32 times, and up to 32 times more
    when the partial sums are joined: its error is at most c*u * sum|terms|, with c = n/32 + 32. The
    root in rstd halves that, and the remaining c/2 > 16 covers the single steps (square, + eps,
    root, reciprocal, x - mean, the products, + offset, + bias). The largest errors are
      xhat    c*u*a with a = |xhat| + rstd*avg|x|; the second term is the error of the mean (layer_norm
              only)
      y       c*u * (|w|*a + |bias|): c*u*|y| for rms_norm; for layer_norm more than c*u*|y| where
              xhat*w and bias cancel
      dx      4c*u * rstd*(|wdy| + avg|wdy| + a*avg(|wdy|*a)): c for the sum c2, c for the xhat in it,
              c for the xhat that multiplies it, c/2 for rstd, and the single steps
      dweight (c + rows)*u * sum(|dy|*a), for any order of the rows; dbias has at most this error.
    """
    t = {name: v.astype("f8") for name, v in tensors.items()}
    x, w, bias = t["x"], t["weight"] + offset, t.get("bias", 0.0)
    u, c, rows = 2.0 ** -24, x.shape[-1] / 32 + 32, x[..., 0].size
    centred = float(op == "layer_norm")

    mean, rstd = statistics(x, op, eps)
    xhat = (x - mean) * rstd
    a = abs(xhat) + centred * rstd * average(abs(x))
    out = {"y": (xhat * w + bias, c * u * (abs(w) * a + abs(bias))), "rstd": (rstd[..., 0], c * u * rstd[..., 0])}
    if centred:
        out["mean"] = mean[..., 0], c * u * average(abs(x))[..., 0]
    if "dy" in t:
        dy, wdy, leading = t["dy"], t["dy"] * w, tuple(range(x.ndim - 1))
        c1, c2 = centred * average(wdy), average(wdy * xhat)
        size = rstd * (abs(wdy) + centred * average(abs(wdy)) + a * average(abs(wdy) * a))
        out["dx"] = rstd * (wdy - c1 - xhat * c2), 4 * c * u * size
        out["dweight"] = (dy * xhat).sum(leading), (c + rows) * u * (abs(dy) * a).sum(leading)
        if "bias" in t:
            out["dbias"] = dy.sum(leading), (c + rows) * u * abs(dy).sum(leading)
    return out


def ulp(v, dtype):
    """The distance between neighbouring numbers of the dtype at v."""
    info = ml_dtypes.finfo(dtype)
    return np.ldexp(1.0, np.maximum(np.frexp(v)[1] - 1, info.minexp) - info.nmant)


def compare(inputs, expected, answer):
    """(the figures for one line of the table, a list of the faults)."""
    if missing := expected.keys() - answer.keys():
        return {}, [f"{name} is missing" for name in sorted(missing)]
    figures, wrong, excess = {}, [], 0.0
    for name, (want, allowed) in expected.items():
        like = {"y": "x", "dx": "x", "dweight": "weight", "dbias": "weight"}.get(name)
        dtype, got = inputs[like].dtype if like else np.dtype("f4"), answer[name]
        if (got.dtype, got.shape) != (dtype, want.shape):
            wrong.append(f"{name} is {got.dtype} {got.shape} instead of {dtype} {want.shape}")
            continue
        got = got.astype("f8")
        error = abs(got - want)
        # Rounding to the dtype explains half an ulp; the rest must be within the allowed error. In
        # f16 and bf16 the total is far below 1 ulp, unless a y of layer_norm nearly cancels.
        allowed = np.maximum(allowed, 2.0 ** -149)  # some of Gemma's weights, and their allowed errors, are 0
        beyond = ((error - ulp(abs(want) + allowed, dtype) / 2) / allowed).max()
        excess = np.maximum(excess, beyond)  # unlike max(), np.maximum keeps NaN
        if not beyond <= 1:
            wrong.append(f"{name}: the error is {beyond:.3g} times the largest that float32 arithmetic explains")
        if name == "y":
            step = ulp(want, dtype)
            figures["y ulp"] = f"{(error / step).max():.4g}"
            figures["y exact"] = f"{np.mean(got == np.rint(want / step) * step):.2%}"
        else:
            figures[name] = f"{(error / (want if name == 'rstd' else abs(want).max())).max():.1e}"
    return figures | {"excess": f"{excess:.2g}"}, wrong


def main():
    built = Path(__file__).resolve().parents[2] / "target/release/rmsnorm"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rmsnorm", default=shutil.which("rmsnorm") or str(built),
                        help="the tool to check (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the files (default: a new one among the temporary files)")
    parser.add_argument("--text", default=TEXT, help="what the models read; only its first 510 tokens count")
    args = parser.parse_args()
    if not shutil.which(args.rmsnorm):
        parser.error(f"there is no program {args.rmsnorm}: run `cargo build --release`, or pass --rmsnorm FILE")
    out = args.out or Path(mkdtemp(prefix="rmsnorm-real-models-"))
    out.mkdir(parents=True, exist_ok=True)

    print("Running the models (half a minute). Files are written to", out, flush=True)
    norms = {norm.name: norm for norm in gemma_norms(args.text) + minilm_norms(args.text)}
    print("\n" + "".join(title.ljust(width) for title, width in COLUMNS.items()))
    failed = 0
    for name, dtype, offset, backward in PLAN:
        norm = norms[name]
        source = out / f"{norm.model}.{name}.{dtype}.safetensors"
        result = source.with_suffix(".out.safetensors")
        result.unlink(missing_ok=True)  # an answer from an earlier run must not count
        inputs = save(norm, source, dtype, offset, backward)
        run = subprocess.run([args.rmsnorm, "run", source, "-o", result, "--backend", "cpu"],
                             capture_output=True, text=True)
        if run.returncode:
            figures, wrong = {}, [f"exit code {run.returncode}: {run.stderr.strip()}"]
        else:
            figures, wrong = compare(inputs, reference(inputs, norm.op, norm.eps, offset), load_file(result))
        figures |= {"model": norm.model, "norm": name, "x": "x".join(map(str, norm.x.shape)), "dtype": dtype,
                    "offset": str(offset)}
        figures["verdict"] = "WRONG" if wrong else "ok"
        print("".join(figures.get(title, "-").ljust(width) for title, width in COLUMNS.items()))
        for line in wrong:
            print("   ", line)
        failed += bool(wrong)
    print(f"\n{len(PLAN) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
