"""Times the norms of this package, PyTorch (eager and compiled), Liger and Quack, called from
Python in one process.

    python rmsnorm-python/benches/torch_speed.py [--device cuda] [--shapes 4096x1024,..] [--threads 1,2] [--out FILE]

Weights have the dtype of the activations, or the one of --weights. Each result is compared with
float64 before it is timed. Input sets are visited in turn; on CUDA they exceed the L2, and calls
are queued behind a pause. Peers that are not installed, or that fail, are skipped with a message.
"""

import itertools
import warnings

import measure
import torch
import torch.nn.functional as F

import rmsnorm
import rmsnorm.torch as rt

EPS = 1e-6


def llama(x, w):
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def liger():
    from liger_kernel.ops import LigerRMSNormFunction

    return lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)


def quack():
    import quack

    return lambda x, w: quack.rmsnorm(x, w, eps=EPS)


def providers(op, cols, device):
    """(name, function of x and the parameters). This package comes first."""
    if op == "rms_norm":
        yield "ours", lambda x, w: rt.rms_norm(x, w, EPS)
        yield "F.rms_norm", lambda x, w: F.rms_norm(x, (cols,), w, EPS)
        yield "compile(F.rms_norm)", torch.compile(lambda x, w: F.rms_norm(x, (cols,), w, EPS))
        yield "LlamaRMSNorm", llama
        yield "compile(LlamaRMSNorm)", torch.compile(llama)
        yield "compile(ours)", torch.compile(lambda x, w: rt.rms_norm(x, w, EPS), fullgraph=True)
        if device == "cuda":
            for name, make in (("Liger", liger), ("Quack", quack)):
                try:
                    yield name, make()
                except Exception as error:  # A peer that cannot be imported is skipped.
                    print(f"without {name}: {error}")
    else:
        yield "ours", lambda x, w, b: rt.layer_norm(x, w, b, EPS)
        yield "F.layer_norm", lambda x, w, b: F.layer_norm(x, (cols,), w, b, EPS)
        yield "compile(F.layer_norm)", torch.compile(lambda x, w, b: F.layer_norm(x, (cols,), w, b, EPS))
        yield "compile(ours)", torch.compile(lambda x, w, b: rt.layer_norm(x, w, b, EPS), fullgraph=True)


def exact(op, x, parameters):
    cols = x.shape[-1]
    return F.rms_norm(x, (cols,), parameters[0], EPS) if op == "rms_norm" else F.layer_norm(x, (cols,), *parameters, EPS)


def off(got, truth):
    return ((got.double() - truth).norm() / truth.norm()).item()


def copy_us(shape, dtype, device, sets, rounds):
    """The time of a copy of as many bytes as forward moves, in us."""
    pairs = [(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)) for _ in range(sets)]
    turn = itertools.cycle(pairs)

    def copy():
        to, source = next(turn)
        to.copy_(source)

    timed = measure.queued({"copy": copy}, rounds, 16, torch) if device == "cuda" else measure.in_turn({"copy": copy}, rounds, 0.02)
    return timed["copy"]["us"]


def run(op, shape, dtype, weight_dtype, device, rounds, sets):
    cols = shape[1]
    make = lambda *size, dtype: torch.randn(size, device=device).to(dtype).requires_grad_()  # noqa: E731
    xs = [make(*shape, dtype=dtype) for _ in range(sets)]
    dys = [make(*shape, dtype=dtype).detach() for _ in range(sets)]
    parameters = [make(cols, dtype=weight_dtype) for _ in range(1 if op == "rms_norm" else 2)]
    leaves = [tensor.detach().double().requires_grad_() for tensor in (xs[0], *parameters)]
    truth, checked = exact(op, leaves[0], leaves[1:]), {}
    true_gradients = torch.autograd.grad(truth, leaves, dys[0].double())
    torch._dynamo.reset()
    for name, function in providers(op, cols, device):
        try:
            y = function(xs[0], *parameters)
            error = off(y, truth)
            gradients = torch.autograd.grad(y, (xs[0], *parameters), dys[0])
            error = max(error, *(off(got, exact) for got, exact in zip(gradients, true_gradients)))
            limit = 1e-4 if dtype == torch.float32 else 2e-2
            if not error < limit:
                if "ours" in name:
                    raise ArithmeticError(f"{name}: results are off by {error:.1e}")
                # Still timed: on the CPU, PyTorch 2.15's layer norm adds gradients of a bfloat16
                # weight in bfloat16.
                print(f"{name}: its results are off by {error:.1e}")
            checked[name] = function
        except Exception as error:
            if "ours" in name:
                raise
            # A peer that fails is skipped.
            print(f"without {name}: {str(error).splitlines()[0][:160]}")
    found = {}
    for mode in ("forward", "forward + backward"):
        def call(function, turn):
            index = next(turn)
            if mode == "forward":
                with torch.no_grad():
                    function(xs[index], *parameters)
            else:
                torch.autograd.grad(function(xs[index], *parameters), (xs[index], *parameters), dys[index])

        calls = {name: (lambda function=function, turn=itertools.cycle(range(sets)): call(function, turn))
                 for name, function in checked.items()}
        found[mode] = measure.queued(calls, rounds, 16, torch) if device == "cuda" else measure.in_turn(calls, rounds, 0.02)
    return found


def main():
    args = measure.arguments(__doc__, device="cpu", shapes="4096x1024", dtypes="float32,bfloat16", weights="", ops="rms_norm,layer_norm",
                             threads="1,2", sets=6)
    measure.keep_freed_memory()
    rt.set_compiled("kernels")
    warnings.filterwarnings("ignore")
    report = measure.report(rmsnorm.devices()[args.device][1], [], torch=torch.__version__)
    threads = [0] if args.device == "cuda" else [int(count) for count in args.threads.split(",")]
    for count, op, dtype, shape in itertools.product(threads, args.ops.split(","), args.dtypes.split(","), args.shapes.split(",")):
        if count:
            torch.set_num_threads(count)
        size = tuple(int(length) for length in shape.split("x"))
        kind, weight = getattr(torch, dtype), getattr(torch, args.weights or dtype)
        copy = copy_us(size, kind, args.device, args.sets, args.rounds)
        for mode, rows in run(op, size, kind, weight, args.device, args.rounds, args.sets).items():
            where = args.device if args.device == "cuda" else f"cpu, {count} thread{'s' * (count > 1)}"
            measure.show(f"{op} {mode}, {shape} {dtype}, {where}; a copy of as many bytes {copy:.1f} us", rows)
            report["rows"].append(dict(op=op, mode=mode, shape=shape, dtype=dtype, threads=count, device=args.device, copy_us=copy, us=rows))
    measure.write(args.out, report)


main()
