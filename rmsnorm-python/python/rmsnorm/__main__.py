"""`python -m rmsnorm`: versions, devices, and for each framework whether the kernels run, or why not.

Exit code 1 if a kernel that should run fails or gives a wrong result, else 0.
"""

import importlib
import os
import platform
import signal
import sys
import warnings

import rmsnorm
from rmsnorm import _native

FIX_TORCH_CUDA = "install PyTorch for CUDA, for example pip install torch --index-url https://download.pytorch.org/whl/cu130"
FIX_JAX_CUDA = "pip install 'jax[cuda13]', or 'jax[cuda12]' for a driver of CUDA 12"
NO_DEVICE = "no CUDA device can be used, see DEVICES"
X, RMS_NORM_OF_X = (3.0, 4.0), (0.848528, 1.131371)


def module(name):
    """(module, None), or (None, why there is none)."""
    try:
        return importlib.import_module(name), None
    except ModuleNotFoundError as error:
        return None, "is not installed" if error.name == name else f"cannot be imported: {error}"
    except Exception as error:
        return None, f"cannot be imported: {error}"


def entry(name, state, text):
    """One line, and a second one for the fix that `text` may end with."""
    text, _, fix = str(text).partition("; fix: ")
    print(f"{name:<6} {state:<8} {text}")
    if fix:
        print(f"{'':<6} {'fix':<8} {fix}")


def tried(call):
    """None if `call` gives the RMS norm of X, else what went wrong."""
    try:
        y = [float(value) for value in call()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    is_right = len(y) == 2 and all(abs(value - right) < 1e-4 for value, right in zip(y, RMS_NORM_OF_X))
    return None if is_right else f"the RMS norm of {X} is {RMS_NORM_OF_X}, and the kernel gave {y}"


def cuda_devices():
    """The number of each CUDA device; 0 stands for a backend without devices."""
    names = [name for name in rmsnorm.devices() if name.startswith("cuda")]
    return [int(name.partition(":")[2] or 0) for name in names] or [0]


def torch_devices(torch):
    """For each device (name, which operations run there, why, a trial of the kernels or None)."""
    norms = importlib.import_module("rmsnorm.torch")
    why_no_cuda = importlib.import_module("rmsnorm.torch.functional")._why_no_cuda

    def call(device):
        return lambda: norms.rms_norm(torch.tensor([X], device=device), eps=0.0)[0].tolist()

    yield "cpu", "kernels", "float32, float16 and bfloat16; other dtypes run torch.nn.functional", call("cpu")
    if torch.version.cuda is None:
        yield "cuda", "none", f"PyTorch {torch.__version__} is not built for CUDA; fix: {FIX_TORCH_CUDA}", None
        return
    for number in cuda_devices():
        name = f"cuda:{number}" if number else "cuda"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reason = why_no_cuda(number)
        if not torch.cuda.is_available():
            yield name, "none", NO_DEVICE if reason else f"PyTorch {torch.__version__} finds no CUDA device; fix: {FIX_TORCH_CUDA}", None
        elif reason is not None:
            yield name, "PyTorch", f"torch.nn.functional runs instead of the kernels: {reason}", None
        else:
            yield name, "kernels", "float32, float16 and bfloat16; other dtypes run torch.nn.functional", call(name)


def jax_devices(jax):
    """As `torch_devices`. On CUDA `rmsnorm.jax` needs the kernels: without them its calls fail."""
    norms, jnp = importlib.import_module("rmsnorm.jax"), importlib.import_module("jax.numpy")
    dtypes = "float32, float16 and bfloat16; other dtypes run jax.numpy"

    def call(device):
        return lambda: norms.rms_norm(jax.device_put(jnp.asarray([X], jnp.float32), device), eps=0.0)[0].tolist()

    def found(kind):
        try:
            return jax.devices(kind), None
        except RuntimeError as error:
            return [], str(error)

    cpus, reason = found("cpu")
    yield ("cpu", "kernels", dtypes, call(cpus[0])) if cpus else ("cpu", "none", reason, None)
    cards, reason = found("cuda")
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if not cards:
        fix = FIX_JAX_CUDA if "cuda" in platforms or not platforms else f"unset JAX_PLATFORMS, which is {platforms!r}"
        is_usable = _native.why_no_cuda(0) is None
        yield "cuda", "none", f"JAX {jax.__version__} finds no CUDA device ({reason}); fix: {fix}" if is_usable else NO_DEVICE, None
    for card in cards:
        name = f"cuda:{card.id}" if card.id else "cuda"
        reason = _native.why_no_cuda(card.id)
        if reason is None:
            yield name, "kernels", dtypes, call(card)
        else:
            yield name, "FAILS", f"calls on this device raise an error: {reason}", None


def framework(name, library, devices, reason):
    """Prints the devices of a framework; returns whether a kernel failed there."""
    print(f"\n{name}")
    if library is None:
        entry("", "none", f"{library_name(name)} {reason}; fix: in a clone, pip install '.[{name.rpartition('.')[2]}]'")
        return False
    has_failed = False
    try:
        for device, state, text, call in devices(library):
            wrong = None if call is None else tried(call)
            has_failed = has_failed or wrong is not None
            entry(device, *((state, text) if wrong is None else ("FAILED", wrong)))
    except ImportError as error:
        entry("", "none", error)
    return has_failed


def library_name(name):
    """The framework's own spelling."""
    return {"rmsnorm.torch": "PyTorch", "rmsnorm.jax": "JAX"}[name]


def main():
    """Prints the report and returns the exit code."""
    # A check needs little of the GPU: by default JAX reserves most of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(f"rmsnorm {rmsnorm.__version__}, commit {rmsnorm.__revision__}")
    print(f"Python {platform.python_version()}, {sys.platform} {platform.machine()}, {sys.executable}")
    libraries = {name: module(name) for name in ("numpy", "torch", "jax")}
    for title, name in [("NumPy", "numpy"), ("PyTorch", "torch"), ("JAX", "jax")]:
        library, reason = libraries[name]
        print(f"{title} {reason if library is None else getattr(library, '__version__', 'of unknown version')}")

    print("\nDEVICES")
    for name, (is_ready, text) in rmsnorm.devices().items():
        entry(name, "ready" if is_ready else "missing", text)

    failed = [
        framework(f"rmsnorm.{name}", libraries[name][0], devices, libraries[name][1])
        for name, devices in [("torch", torch_devices), ("jax", jax_devices)]
    ]
    print("\nkernels: a call ran rmsnorm's kernels on this device, with the right result. none: no call can run there.")
    return int(any(failed))


if __name__ == "__main__":
    # A reader that closes the pipe, such as head, ends the program without a message.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
