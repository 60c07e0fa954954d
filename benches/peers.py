#!/usr/bin/env python3
"""Times published GPU norm kernels on one CUDA device, by the method that rmsnorm measures itself with.

    python benches/peers.py --out peers.json [--only cudnn,quack] [--ops rms_fwd,..] [--shapes 4096x1024,..] [--dtype bfloat16]

Input sets that exceed the L2 several times are visited in turn inside one CUDA graph. A time is the median of seven samples
of 30 ms, divided by the number of calls. A call that no graph can hold is timed by events, and its time includes the gaps
between launches (mode `events`). The first result of each call is compared with float64 before it is timed; `off` is the
relative distance. GB/s count the fewest bytes that the operation moves (`least_bytes`).

The output is a list in the format of docs/benchmarks.md. Its first entry has the machine and the version of each package. A
provider that is not installed, lacks an operation or fails has a row with an `error` for it.

Providers
  torch            F.rms_norm and F.layer_norm, eager
  compile          torch.compile of the same, and of quantized norms written in PyTorch; max-autotune without CUDA graphs
  cudnn            cuDNN's graphs, by nvidia-cudnn-frontend
  quack            quack-kernels
  liger            liger-kernel
  flashinfer-cute  flashinfer's CuTe DSL kernels, its default
  flashinfer-cuda  flashinfer's CUDA kernels, which it builds at the first call: they need nvcc and ninja
  triton           quantized norms in Triton, after the method of ROCm TransformerEngine's kernels, written here

Operations
  rms_fwd, ln_fwd  y, and the statistics that backward takes, where the provider returns them
  rms_bwd, ln_bwd  dx, dweight and dbias of given statistics
  add_rms_fwd      h = x + residual, and the norm of h; flashinfer overwrites x and the residual
  rms_static       FP8 values (E4M3) under a given scale; ln_static the same of layer norm
  rms_delayed      the same, and the largest magnitude
  rms_static_t     the same, and the values transposed
  rms_current      values under a scale of this tensor
  rms_row          a scale for each row
  rms_block128     a scale for each 128 columns, the scales column-major
  rms_mx           an E8M0 scale for each 32 columns (MXFP8)
  add_rms_static   residual added, the sum kept
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time

import torch

DEVICE = "cuda"
EPS = 1e-6
LARGEST = 448.0
FP8 = torch.float8_e4m3fn
SETS_BYTES = 512 << 20
FLOATS = ["rms_fwd", "rms_bwd", "add_rms_fwd", "ln_fwd", "ln_bwd"]
CODES = ["rms_static", "rms_delayed", "rms_static_t", "rms_current", "rms_row", "rms_block128", "rms_mx", "add_rms_static", "ln_static"]
PACKAGES = ["triton", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "quack-kernels", "nvidia-cutlass-dsl", "liger-kernel", "flashinfer-python",
            "apache-tvm-ffi", "transformers"]
# A norm rounds once to bfloat16 (2e-3 of its norm), an FP8 value to 3 bits (2.7e-2).
LIMITS = {"floats": 1e-2, "codes": 4e-2}


def least_bytes(op, rows, cols, size):
    """The fewest bytes that an operation moves, as `rmsnorm bench` counts them; `size` is that of an element of x."""
    matrix = rows * cols
    return {
        "copy": 2 * matrix * size,
        "rms_fwd": 2 * matrix * size + cols * size + 4 * rows,
        "ln_fwd": 2 * matrix * size + cols * size + 8 * rows,
        "rms_bwd": 3 * matrix * size + 2 * cols * size + 4 * rows,
        "ln_bwd": 3 * matrix * size + 2 * cols * size + 8 * rows,
        "add_rms_fwd": 4 * matrix * size + cols * size + 4 * rows,
        "rms_static": matrix * (size + 1) + cols * size,
        "rms_delayed": matrix * (size + 1) + cols * size,
        "rms_static_t": matrix * (size + 2) + cols * size,
        "rms_current": matrix * (size + 1) + cols * size,
        "rms_row": matrix * (size + 1) + cols * size + 4 * rows,
        "rms_block128": matrix * (size + 1) + cols * size + 4 * rows * -(-cols // 128),
        "rms_mx": matrix * (size + 1) + cols * size + rows * -(-cols // 32),
        "add_rms_static": matrix * (3 * size + 1) + cols * size,
        "ln_static": matrix * (size + 1) + cols * size,
    }[op]


class Set:
    """One set of inputs, and the outputs of calls that are given theirs."""

    def __init__(self, rows, cols, dtype, generator):
        def normal(*size):
            return torch.randn(*size, device=DEVICE, generator=generator)

        def empty(*size, dtype=torch.float32):
            return torch.empty(*size, device=DEVICE, dtype=dtype)

        self.rows, self.cols = rows, cols
        self.x, self.residual, self.dy = (normal(rows, cols).to(dtype) for _ in range(3))
        self.weight, self.bias = (1 + 0.1 * normal(cols)).to(dtype), (0.1 * normal(cols)).to(dtype)
        self.weight32, self.bias32 = self.weight.float(), self.bias.float()
        self.scale = torch.full((1,), 6 / LARGEST, device=DEVICE)
        self.y, self.dx = empty(rows, cols, dtype=dtype), empty(rows, cols, dtype=dtype)
        self.dweight, self.dbias = torch.empty_like(self.weight), torch.empty_like(self.bias)
        self.mean, self.rstd = empty(rows), empty(rows)
        self.codes, self.transposed = empty(rows, cols, dtype=FP8), empty(cols, rows, dtype=FP8)
        self.amax, self.row_scale = torch.zeros(1, device=DEVICE), empty(rows)
        self.block_scale = empty(-(-cols // 128), -(-rows // 4) * 4)
        self.mx_scale = empty(rows, -(-cols // 32), dtype=torch.uint8)
        self.factor = 1 / self.scale
        # Copies for calls that overwrite their inputs.
        self.own_x, self.own_residual = torch.empty_like(self.x), torch.empty_like(self.x)

    def poison(self):
        for tensor in (self.y, self.dx, self.dweight, self.dbias):
            tensor.fill_(math.nan)
        for codes in (self.codes, self.transposed):
            codes.view(torch.uint8).fill_(0x7F)
        for scale in (self.row_scale, self.block_scale):
            scale.fill_(math.nan)
        self.amax.zero_()


# --- What the operations are, in float64 ------------------------------------------------------------------------------------


class Truth:
    """Results of one set in float64, made when they are first asked for. Statistics go into the set, for backward."""

    def __init__(self, case):
        self.case, self.kept = case, {}
        x = case.x.double()
        case.mean.copy_(x.mean(-1))
        self.rms_rstd = (x.square().mean(-1) + EPS).rsqrt().float()
        self.ln_rstd = (x.var(-1, correction=0) + EPS).rsqrt().float()

    def of(self, op):
        norm = "ln" if op.startswith("ln") else "add" if op.startswith("add") else "rms"
        kind = norm + ("_bwd" if op.endswith("bwd") else "")
        if kind not in self.kept:
            with torch.enable_grad():
                made = self.make(norm, op.endswith("bwd"))
            self.kept = {kind: [result.detach() for result in made]}
        return self.kept[kind]

    def make(self, norm, backward):
        case, functional = self.case, torch.nn.functional
        x, weight, bias = (t.double().requires_grad_(backward) for t in (case.x, case.weight, case.bias))
        size = (case.cols,)
        if norm == "add":
            h = (case.x + case.residual).double()
            return [functional.rms_norm(h, size, weight, EPS), h]
        y = functional.layer_norm(x, size, weight, bias, EPS) if norm == "ln" else functional.rms_norm(x, size, weight, EPS)
        if not backward:
            return [y]
        return torch.autograd.grad(y, [x, weight] + [bias] * (norm == "ln"), case.dy.double())


def distance(got, truth):
    return float((got.double() - truth).norm() / truth.norm())


def decoded(op, case, result):
    """The values that FP8 values stand for, in float64. A result is the values, or (values, scales), else both are in the set."""
    codes, scales = result if isinstance(result, tuple) else (result, None)
    values = codes.double()
    if op in ("rms_row", "rms_current"):
        return values * scales.double().reshape(-1, 1)
    if op == "rms_block128":
        return values * scales[:, : case.rows].t().double().repeat_interleave(128, 1)[:, : case.cols]
    if op == "rms_mx":
        return values * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)[:, : case.cols]
    return values * case.scale.double()


# --- Quantized norms in PyTorch: the source of torch.compile's ---------------------------------------------------------------


def rms32(x, weight):
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight.float()


def rounded(values):
    return values.clamp(-LARGEST, LARGEST).to(FP8)


def static(x, weight, scale):
    return rounded(rms32(x, weight) / scale)


def delayed(x, weight, scale):
    y = rms32(x, weight)
    return rounded(y / scale), y.abs().amax()


def static_t(x, weight, scale):
    y = rms32(x, weight)
    codes = rounded(y / scale)
    return codes, codes.view(torch.uint8).t().contiguous(), y.abs().amax()


def current(x, weight):
    y = rms32(x, weight)
    scale = y.abs().amax() / LARGEST
    return rounded(y / scale), scale


def row(x, weight):
    y = rms32(x, weight)
    scale = y.abs().amax(-1, keepdim=True) / LARGEST
    return rounded(y / scale), scale


def block128(x, weight):
    y = rms32(x, weight)
    groups = y.view(y.shape[0], -1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    return rounded(groups / scale).view(y.shape), scale.squeeze(-1).t().contiguous()


def mx(x, weight):
    y = rms32(x, weight)
    groups = y.view(y.shape[0], -1, 32)
    bits = (groups.abs().amax(-1, keepdim=True) * (1 / LARGEST)).view(torch.int32)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).clamp(1, 253)
    return rounded(groups * ((254 - exponent) << 23).view(torch.float32)).view(y.shape), exponent.squeeze(-1).to(torch.uint8)


def add_static(x, residual, weight, scale):
    h = x + residual
    return rounded(rms32(h, weight) / scale), h


def ln_static(x, weight, bias, scale):
    return rounded(torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, EPS) / scale)


# --- Providers: each a dictionary of functions of a set, by operation --------------------------------------------------------


class Prepared:
    """Makes, for one set, the call that is timed: for backward, whose forward is not."""

    def __init__(self, make):
        self.make = make


def rms(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def layer(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def add_rms(x, residual, weight):
    h = x + residual
    return torch.nn.functional.rms_norm(h, x.shape[-1:], weight, EPS), h


def by_autograd(forward, parameters):
    def make(case):
        leaves = [getattr(case, name).detach().requires_grad_() for name in ("x", *parameters)]
        with torch.enable_grad():
            y = forward(*leaves)
        return lambda: torch.autograd.grad(y, leaves, case.dy, retain_graph=True)

    return Prepared(make)


def functions_of_torch(wrap):
    rms_norm, layer_norm, add = wrap(rms), wrap(layer), wrap(add_rms)
    return {
        "rms_fwd": lambda c: rms_norm(c.x, c.weight),
        "rms_bwd": by_autograd(rms_norm, ["weight"]),
        "add_rms_fwd": lambda c: add(c.x, c.residual, c.weight),
        "ln_fwd": lambda c: layer_norm(c.x, c.weight, c.bias),
        "ln_bwd": by_autograd(layer_norm, ["weight", "bias"]),
    }


def provide_torch():
    return functions_of_torch(lambda function: function)


def provide_compile():
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.recompile_limit = 1000
    # Backward is called several times on what one forward has kept.
    torch._functorch.config.donated_buffer = False

    def wrap(function):
        return torch.compile(function, dynamic=False, mode="max-autotune-no-cudagraphs")

    codes = {f.__name__: wrap(f) for f in (static, delayed, static_t, current, row, block128, mx, add_static, ln_static)}
    return functions_of_torch(wrap) | {
        "rms_static": lambda c: codes["static"](c.x, c.weight, c.scale),
        "rms_delayed": lambda c: codes["delayed"](c.x, c.weight, c.scale),
        "rms_static_t": lambda c: codes["static_t"](c.x, c.weight, c.scale)[:2],
        "rms_current": lambda c: codes["current"](c.x, c.weight),
        "rms_row": lambda c: codes["row"](c.x, c.weight),
        "rms_block128": lambda c: codes["block128"](c.x, c.weight),
        "rms_mx": lambda c: codes["mx"](c.x, c.weight),
        "add_rms_static": lambda c: codes["add_static"](c.x, c.residual, c.weight, c.scale)[0],
        "ln_static": lambda c: codes["ln_static"](c.x, c.weight32, c.bias32, c.scale),
    }


def provide_liger():
    from liger_kernel.ops import fused_add_rms_norm, layer_norm, rms_norm

    def rms_backward(c):
        _, x, rstd, block, warps, mode = rms_norm.rms_norm_forward(c.x, c.weight, EPS, 0.0, "llama", None)
        return lambda: rms_norm.rms_norm_backward(c.dy, x, c.weight, rstd, 0.0, mode, block, warps, False, None)

    def layer_backward(c):
        _, x, mean, rstd, *_ = layer_norm.layer_norm_forward(c.x, c.weight, c.bias, EPS)
        return lambda: layer_norm.layer_norm_backward(c.dy, x, c.weight, c.bias, mean, rstd)

    return {
        "rms_fwd": lambda c: rms_norm.rms_norm_forward(c.x, c.weight, EPS, 0.0, "llama", None),
        "rms_bwd": Prepared(rms_backward),
        "add_rms_fwd": lambda c: fused_add_rms_norm.fused_add_rms_norm_forward(c.x, c.residual, c.weight, EPS, 0.0, "llama"),
        "ln_fwd": lambda c: layer_norm.layer_norm_forward(c.x, c.weight, c.bias, EPS),
        "ln_bwd": Prepared(layer_backward),
    }


def provide_quack():
    # The package has a function of the module's name.
    quack = importlib.import_module("quack.rmsnorm")

    def rms_backward(c):
        rstd = quack.rmsnorm_fwd(c.x, c.weight, eps=EPS, store_rstd=True)[2]
        return lambda: quack.rmsnorm_bwd(c.x, c.weight, c.dy, rstd)

    def layer_backward(c):
        _, rstd, mean = quack.layernorm_fwd(c.x, c.weight32, c.bias32, EPS, True, True)
        return lambda: quack.layernorm_bwd(c.x, c.weight32, c.dy, rstd, mean)

    return {
        "rms_fwd": lambda c: quack.rmsnorm_fwd(c.x, c.weight, eps=EPS, store_rstd=True),
        "rms_bwd": Prepared(rms_backward),
        "add_rms_fwd": lambda c: quack.rmsnorm_fwd(c.x, c.weight, residual=c.residual, eps=EPS, store_rstd=True),
        "ln_fwd": lambda c: quack.layernorm_fwd(c.x, c.weight32, c.bias32, EPS, True, True),
        "ln_bwd": Prepared(layer_backward),
    }


def provide_flashinfer_cute():
    from flashinfer.norm import kernels

    def add(c):
        x, residual = c.own_x, c.own_residual
        kernels.fused_add_rmsnorm_cute(x, residual, c.weight, EPS, 0.0, True)
        return x, residual

    def add_codes(c):
        x, residual = c.own_x, c.own_residual
        kernels.fused_add_rmsnorm_quant_cute(c.codes, x, residual, c.weight, c.scale, EPS, 0.0, True)
        return c.codes

    return {
        "rms_fwd": lambda c: (kernels.rmsnorm_cute(c.x, c.weight, c.y, EPS, 0.0, True), c.y)[1],
        "add_rms_fwd": add,
        "ln_fwd": lambda c: (kernels.layernorm_cute(c.y, c.x, c.weight32, c.bias32, EPS, True), c.y)[1],
        "rms_static": lambda c: (kernels.rmsnorm_quant_cute(c.codes, c.x, c.weight, c.scale, EPS, 0.0, True), c.codes)[1],
        "add_rms_static": add_codes,
    }


def provide_flashinfer_cuda():
    from flashinfer.norm import get_norm_module

    norm = get_norm_module()

    def add(c):
        x, residual = c.own_x, c.own_residual
        norm.fused_add_rmsnorm(x, residual, c.weight, EPS, True)
        return x, residual

    def add_codes(c):
        x, residual = c.own_x, c.own_residual
        norm.fused_add_rmsnorm_quant(c.codes, x, residual, c.weight, c.scale, EPS, True)
        return c.codes

    return {
        "rms_fwd": lambda c: (norm.rmsnorm(c.y, c.x, c.weight, EPS, True), c.y)[1],
        "add_rms_fwd": add,
        "ln_fwd": lambda c: (norm.layernorm(c.y, c.x, c.weight32, c.bias32, EPS), c.y)[1],
        "rms_static": lambda c: (norm.rmsnorm_quant(c.codes, c.x, c.weight, c.scale, EPS, True), c.codes)[1],
        "add_rms_static": add_codes,
        "ln_static": lambda c: (norm.layernorm_quant(c.codes, c.x, c.weight32, c.bias32, c.scale, EPS), c.codes)[1],
    }


def provide_cudnn():
    import cudnn

    kinds = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF, torch.float32: cudnn.data_type.FLOAT}
    handle, plans, epsilon = cudnn.create_handle(), {}, torch.full((1, 1, 1, 1), EPS)

    def four(tensor):
        return tensor.view(*tensor.shape, 1, 1) if tensor.dim() == 2 else tensor.view(1, -1, 1, 1)

    def tensors(c):
        return dict(x=four(c.x), weight=four(c.weight), bias=four(c.bias), dy=four(c.dy), mean=c.mean.view(-1, 1, 1, 1),
                    rstd=c.rstd.view(-1, 1, 1, 1), epsilon=epsilon, y=four(c.y), dx=four(c.dx), dweight=four(c.dweight), dbias=four(c.dbias),
                    codes=four(c.codes), amax=c.amax.view(1, 1, 1, 1), factor=c.factor.view(1, 1, 1, 1))

    def build(op, c):
        float32, have, kind = cudnn.data_type.FLOAT, tensors(c), kinds[c.x.dtype]
        graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=float32, compute_data_type=float32, handle=handle)
        inputs = {}

        def take(name):
            inputs[name] = graph.tensor_like(have[name])
            return inputs[name]

        training = cudnn.norm_forward_phase.TRAINING
        if op == "ln_bwd":
            made = graph.layernorm_backward(name="backward", grad=take("dy"), input=take("x"), scale=take("weight"), mean=take("mean"),
                                            inv_variance=take("rstd"))
            outputs = dict(zip(("dx", "dweight", "dbias"), made))
        elif op == "rms_bwd":
            made = graph.rmsnorm_backward(name="backward", grad=take("dy"), input=take("x"), scale=take("weight"), inv_variance=take("rstd"),
                                          has_dbias=False)
            outputs = dict(zip(("dx", "dweight"), made))
        elif op == "ln_fwd":
            made = graph.layernorm(name="forward", norm_forward_phase=training, input=take("x"), scale=take("weight"), bias=take("bias"),
                                   epsilon=take("epsilon"))
            outputs = dict(zip(("y", "mean", "rstd"), made))
        else:
            made = graph.rmsnorm(name="forward", norm_forward_phase=training, input=take("x"), scale=take("weight"), bias=None,
                                 epsilon=take("epsilon"))
            outputs = dict(zip(("y", "rstd"), made))
        for name, output in outputs.items():
            if op != "rms_delayed" or name != "y":
                output.set_output(True).set_data_type(float32 if name in ("mean", "rstd") else kind)
        if op == "rms_delayed":
            y = outputs.pop("y").set_data_type(float32)
            inputs["factor"] = graph.tensor(name="factor", dim=[1] * 4, stride=[1] * 4, data_type=float32)
            outputs["codes"] = graph.mul(a=y, b=inputs["factor"], name="codes")
            outputs["codes"].set_output(True).set_data_type(cudnn.data_type.FP8_E4M3)
            outputs["amax"] = graph.reduction(input=y, mode=cudnn.reduction_mode.AMAX)
            outputs["amax"].set_output(True).set_data_type(float32).set_dim([1] * 4).set_stride([1] * 4)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), device=DEVICE, dtype=torch.uint8)
        return graph, inputs | outputs, workspace

    def runner(op, results):
        def run(c):
            if (op, c.rows, c.cols) not in plans:
                plans.clear()
                plans[op, c.rows, c.cols] = build(op, c)
            graph, names, workspace = plans[op, c.rows, c.cols]
            have = tensors(c)
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute({tensor: have[name] for name, tensor in names.items()}, workspace, handle=handle)
            return tuple(getattr(c, name) for name in results) if len(results) > 1 else getattr(c, results[0])

        return run

    return {"rms_fwd": runner("rms_fwd", ["y"]), "ln_fwd": runner("ln_fwd", ["y"]), "rms_bwd": runner("rms_bwd", ["dx", "dweight"]),
            "ln_bwd": runner("ln_bwd", ["dx", "dweight", "dbias"]), "rms_delayed": runner("rms_delayed", ["codes", "amax"])}


def provide_triton():
    import triton
    import triton.language as tl

    # Triton's functions find the language among the globals of their module.
    globals().update(tl=tl)

    def norm(x_ptr, w_ptr, q_ptr, s_ptr, scale_ptr, amax_ptr, M, N, ss, eps, MODE: tl.constexpr, B: tl.constexpr, PROGRAMS: tl.constexpr):
        cols = tl.arange(0, B)
        mask = cols < N
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if MODE <= 1:
            inverse = 1.0 / tl.load(scale_ptr)
        amax = 0.0
        for row in tl.range(tl.program_id(0), M, PROGRAMS, num_stages=2):
            r = row.to(tl.int64) * N
            x = tl.load(x_ptr + r + cols, mask=mask, other=0.0).to(tl.float32)
            y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * w
            if MODE == 1:
                amax = tl.maximum(amax, tl.max(tl.abs(y), 0))
            if MODE <= 1:
                z = y * inverse
            if MODE == 2:
                s = tl.max(tl.abs(y), 0) * (1.0 / 448.0)
                tl.store(s_ptr + row, s)
                z = y / s
            if MODE == 3:
                g = tl.reshape(y, (B // 128, 128))
                s = tl.max(tl.abs(g), 1) * (1.0 / 448.0)
                k = tl.arange(0, B // 128)
                tl.store(s_ptr + k.to(tl.int64) * ss + row, s, mask=k < (N + 127) // 128)
                z = tl.reshape(g / tl.where(s > 0, s, 1.0)[:, None], (B,))
            if MODE == 4:
                g = tl.reshape(y, (B // 32, 32))
                bits = (tl.max(tl.abs(g), 1) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
                k = tl.arange(0, B // 32)
                e = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
                e = tl.minimum(tl.maximum(e, 1), 253)
                tl.store(s_ptr + row.to(tl.int64) * ss + k, e.to(tl.uint8), mask=k < (N + 31) // 32)
                z = tl.reshape(g * ((254 - e) << 23).to(tl.float32, bitcast=True)[:, None], (B,))
            z = tl.minimum(tl.maximum(z, -448.0), 448.0)
            tl.store(q_ptr + r + cols, z.to(tl.float8e4nv), mask=mask)
        if MODE == 1:
            tl.atomic_max(amax_ptr, amax, sem="relaxed")

    def transpose(source, target, M, N, BM: tl.constexpr, BN: tl.constexpr):
        rm = tl.program_id(0) * BM + tl.arange(0, BM)
        cn = tl.program_id(1) * BN + tl.arange(0, BN)
        mask = (rm[:, None] < M) & (cn[None, :] < N)
        t = tl.load(source + rm[:, None].to(tl.int64) * N + cn[None, :], mask=mask, other=0)
        tl.store(target + cn[:, None].to(tl.int64) * M + rm[None, :], tl.trans(t), mask=(cn[:, None] < N) & (rm[None, :] < M))

    warps = [triton.Config({}, num_warps=count) for count in (2, 4, 8, 16)]
    tiles = [triton.Config({"BM": m, "BN": n}, num_warps=count)
             for m, n, count in ((32, 64, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (64, 64, 8))]
    norm_kernel = triton.autotune(configs=warps, key=["N", "M", "MODE"])(triton.jit(norm))
    transpose_kernel = triton.autotune(configs=tiles, key=["M", "N"])(triton.jit(transpose))
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def run(c, mode, scales=None, stride=0):
        if c.cols > 32768:
            raise ValueError("a row is too long for one program")
        programs = min(c.rows, processors * 8) if mode == 1 else c.rows
        norm_kernel[(programs,)](c.x, c.weight, c.codes, c.row_scale if scales is None else scales, c.scale, c.amax, c.rows, c.cols, stride, EPS,
                                 MODE=mode, B=max(128, triton.next_power_of_2(c.cols)), PROGRAMS=programs)
        return c.codes if scales is None else (c.codes, scales)

    def run_transposed(c):
        run(c, 1)
        grid = lambda k: (triton.cdiv(c.rows, k["BM"]), triton.cdiv(c.cols, k["BN"]))  # noqa: E731
        transpose_kernel[grid](c.codes.view(torch.uint8), c.transposed.view(torch.uint8), c.rows, c.cols)
        return c.codes, c.transposed

    return {
        "rms_static": lambda c: run(c, 0),
        "rms_delayed": lambda c: (run(c, 1), c.amax),
        "rms_static_t": run_transposed,
        "rms_row": lambda c: run(c, 2, c.row_scale),
        "rms_block128": lambda c: run(c, 3, c.block_scale, c.block_scale.shape[1]),
        "rms_mx": lambda c: run(c, 4, c.mx_scale, c.mx_scale.shape[1]),
    }


PROVIDERS = {
    "torch": provide_torch,
    "cudnn": provide_cudnn,
    "liger": provide_liger,
    "triton": provide_triton,
    "quack": provide_quack,
    "flashinfer-cute": provide_flashinfer_cute,
    "flashinfer-cuda": provide_flashinfer_cuda,
    "compile": provide_compile,
}


# --- Measuring -----------------------------------------------------------------------------------------------------------


def checked(op, result, case, truth):
    """How far a result is from float64. A result that is wrong is not timed."""
    if op in CODES:
        if op == "rms_static_t":
            result, transposed = result
            if not torch.equal(result.view(torch.uint8).t(), transposed.view(torch.uint8)):
                raise ArithmeticError("the transposed values are others")
        if op == "rms_delayed":
            result, amax = result
            if not abs(amax.item() / truth.of(op)[0].abs().max().item() - 1) < 1e-2:
                raise ArithmeticError(f"the largest magnitude is {amax.item()}")
        off, limit = distance(decoded(op, case, result), truth.of(op)[0]), LIMITS["codes"]
    else:
        results = result if isinstance(result, (tuple, list)) else (result,)
        truths, limit = truth.of(op), LIMITS["floats"]
        if op == "add_rms_fwd":
            # Of several results, the two matrices in either order: quack and liger return statistics, too.
            results = [r for r in results if r is not None and torch.is_tensor(r) and r.shape == case.x.shape][:2]
        off = max(distance(got, exact) for got, exact in zip(results, truths))
    if not off < limit:
        raise ArithmeticError(f"the result is off by {off:.1e}, more than {limit:.0e}")
    return off


def timed(calls, samples, sample_ms):
    """Median, least and largest milliseconds of a call, and how it was timed."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph, mode, kept = torch.cuda.CUDAGraph(), "graph", []
    try:
        # On the stream that forward has run on, where autograd runs backward.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            # Results are kept: otherwise the allocator gives every call the same memory, which then stays in the L2.
            for call in calls:
                kept.append(call())
        run = graph.replay
    except Exception as error:
        torch.cuda.synchronize()
        mode = "events"
        print(f"    no graph: {str(error).splitlines()[0][:120]}", flush=True)

        def run():
            for call in calls:
                call()

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample(count):
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    sample(1)
    count = max(1, int(sample_ms / max(sample(1), 1e-3)))
    times = sorted(sample(count) / len(calls) for _ in range(samples))
    return times[len(times) // 2], times[0], times[-1], mode


def machine(commit):
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"machine": dict(device=torch.cuda.get_device_name(), driver=driver[0].strip() if driver else "unknown",
                            date=datetime.date.today().isoformat(), commit=commit, versions=versions)}


def commit_of_tree():
    folder = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", folder, "describe", "--always", "--dirty=+", "--abbrev=12", "--match="]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found or "unknown"


def write(path, rows):
    """The list with a row a line, so that a new run shows as few changed lines."""
    if path:
        with open(path, "w") as file:
            file.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--only", default=",".join(PROVIDERS))
    parser.add_argument("--ops", default=",".join(FLOATS))
    parser.add_argument("--shapes", default="4096x1024,16384x4096")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, after which no further call is measured")
    parser.add_argument("--sample-ms", type=float, default=30)
    parser.add_argument("--commit", default=os.environ.get("RMSNORM_COMMIT") or commit_of_tree())
    args = parser.parse_args()
    begun = time.monotonic()
    dtype = getattr(torch, args.dtype)
    size = torch.empty((), dtype=dtype).element_size()
    rows = [machine(args.commit)]
    print(json.dumps(rows[0]), flush=True)
    known, missing = {}, {}
    for name in args.only.split(","):
        try:
            known[name] = PROVIDERS[name]()
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {str(error)[:300]}"

    torch.cuda.set_stream(torch.cuda.Stream())

    def add(op, provider, shape, **found):
        rows.append(dict(op=op, provider=provider, M=shape[0], N=shape[1], dtype=args.dtype, **found))
        text = f"{found['ms'] * 1e3:9.2f} us {found['gbps']:7.0f} GB/s  {found['mode']}" if "ms" in found else found["error"]
        print(f"{op:15} {provider:16} {shape[0]:>8}x{shape[1]:<6} {text}", flush=True)

    for name in args.shapes.split(","):
        shape = tuple(int(length) for length in name.split("x"))
        count = max(2, min(64, math.ceil(SETS_BYTES / (3 * shape[0] * shape[1] * size))))
        generator = torch.Generator(device=DEVICE).manual_seed(0)
        sets = [Set(*shape, dtype, generator) for _ in range(count)]
        truth = Truth(sets[0])
        if time.monotonic() - begun < args.budget:
            ms, least, most, mode = timed([lambda c=c: c.y.copy_(c.x) for c in sets], 7, args.sample_ms)
            add("copy", "copy", shape, ms=ms, gbps=least_bytes("copy", *shape, size) / ms * 1e-6, mode=mode, least_ms=least, most_ms=most)
        for op in args.ops.split(","):
            for provider in args.only.split(","):
                if provider in missing or op not in known[provider]:
                    add(op, provider, shape, error=missing.get(provider, "has no such operation"))
                    continue
                if time.monotonic() - begun > args.budget:
                    add(op, provider, shape, error="not measured: the time was used up")
                    continue
                function, calls = known[provider][op], None
                try:
                    with torch.no_grad():
                        sets[0].poison()
                        for case in sets:
                            case.own_x.copy_(case.x)
                            case.own_residual.copy_(case.residual)
                            # Backward takes them.
                            case.rstd.copy_(truth.ln_rstd if op == "ln_bwd" else truth.rms_rstd)
                            case.mean.copy_(sets[0].mean)
                        if isinstance(function, Prepared):
                            calls = [function.make(case) for case in sets]
                        else:
                            calls = [lambda case=case: function(case) for case in sets]
                        off = checked(op, calls[0](), sets[0], truth)
                        ms, least, most, mode = timed(calls, 7, args.sample_ms)
                    gbps = least_bytes(op, *shape, size) / ms * 1e-6
                    add(op, provider, shape, ms=ms, gbps=gbps, mode=mode, least_ms=least, most_ms=most, off=float(f"{off:.2e}"))
                except Exception as error:
                    add(op, provider, shape, error=f"{type(error).__name__}: {str(error)[:300]}")
                    # Fails if the device does: then nothing that follows could be measured.
                    torch.cuda.synchronize()
                del calls
                write(args.out, rows)
        del sets, truth
        torch.cuda.empty_cache()
    write(args.out, rows)


if __name__ == "__main__":
    main()
