"""Times a small PyTorch call, 1x4096: host time on one thread, for this package's functions and
PyTorch's.

    python rmsnorm-python/benches/torch_calls.py [--device cuda] [--out FILE]
"""

import measure
import torch
import torch.nn.functional as F

import rmsnorm
import rmsnorm.torch as rt

COLS, EPS = 4096, 1e-6


def main():
    args = measure.arguments(__doc__, device="cpu")
    measure.keep_freed_memory()
    torch.set_num_threads(1)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    x, w, b, dy = (torch.randn(shape, device=args.device).to(dtype) for shape in ((1, COLS), (COLS,), (COLS,), (1, COLS)))
    forward = {
        "ours, rms_norm": lambda: rt.rms_norm(x, w, EPS), "F.rms_norm": lambda: F.rms_norm(x, (COLS,), w, EPS),
        "ours, layer_norm": lambda: rt.layer_norm(x, w, b, EPS), "F.layer_norm": lambda: F.layer_norm(x, (COLS,), w, b, EPS),
        "ours, add_rms_norm": lambda: rt.add_rms_norm(x, x, w, EPS), "empty_like": lambda: torch.empty_like(x),
    }
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    xg, wg, bg = leaves
    both = {
        "ours, rms_norm": lambda: torch.autograd.grad(rt.rms_norm(xg, wg, EPS), (xg, wg), dy),
        "F.rms_norm": lambda: torch.autograd.grad(F.rms_norm(xg, (COLS,), wg, EPS), (xg, wg), dy),
        "ours, layer_norm": lambda: torch.autograd.grad(rt.layer_norm(xg, wg, bg, EPS), leaves, dy),
        "F.layer_norm": lambda: torch.autograd.grad(F.layer_norm(xg, (COLS,), wg, bg, EPS), leaves, dy),
    }
    for ours, theirs in (("ours, rms_norm", "F.rms_norm"), ("ours, layer_norm", "F.layer_norm")):
        tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(forward[ours](), forward[theirs](), **tolerance)
        torch.testing.assert_close(both[ours](), both[theirs](), **tolerance)
    report = measure.report(rmsnorm.devices()[args.device][1], {}, torch=torch.__version__)
    with torch.no_grad():
        report["rows"]["forward"] = measure.in_turn(forward, args.rounds, 0.02)
    report["rows"]["forward + backward"] = measure.in_turn(both, args.rounds, 0.02)
    for mode, rows in report["rows"].items():
        measure.show(f"{mode}, 1x{COLS} {dtype}, {args.device}, one thread, host time", rows)
    measure.write(args.out, report)


main()
