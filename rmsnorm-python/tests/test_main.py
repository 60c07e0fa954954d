"""`python -m rmsnorm`: a report of versions and devices, and of what runs in each framework."""

import os
import pathlib
import signal
import subprocess
import sys
import types

import pytest
from conftest import framework

import rmsnorm
from rmsnorm import __main__ as report

_RUN = "; import runpy; runpy.run_module('rmsnorm', run_name='__main__')"


_NO_FRAMEWORKS = "import sys; sys.modules.update(numpy=None, torch=None, jax=None)"


def _report(before, *, path=(), stdout=subprocess.PIPE):
    """(exit code, output) of the report in a fresh interpreter that runs the statement first."""
    folders = [*map(str, path), str(pathlib.Path(rmsnorm.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", before + _RUN], env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_without_frameworks_it_lists_devices_and_says_what_to_install():
    code, text = _report(_NO_FRAMEWORKS)
    assert code == 0
    for line in [f"rmsnorm {rmsnorm.__version__}, commit ", "NumPy is not", "PyTorch is not", "JAX is not"]:
        assert f"\n{line}" in f"\n{text}", text
    assert "\nDEVICES\ncpu    ready    " in text and "\ncuda   " in text, text
    for name, title in [("torch", "PyTorch"), ("jax", "JAX")]:
        state, fix = f"       none     {title} is not installed", f"       fix      in a clone, pip install '.[{name}]'"
        assert f"\nrmsnorm.{name}\n{state}\n{fix}\n" in text, text


@pytest.mark.parametrize("name, title, other", [("torch", "PyTorch", "jax"), ("jax", "JAX", "torch")])
def test_with_a_framework_it_tries_the_kernels(name, title, other):
    version = framework(name).__version__
    code, text = _report(f"import sys; sys.modules[{other!r}] = None")
    assert code == 0
    assert f"\n{title} {version}\n" in text and f"\nrmsnorm.{name}\ncpu    kernels  float32, " in text, text


def test_a_framework_that_is_too_old_or_broken_is_reported(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.9.1'\n")
    (tmp_path / "jax.py").write_text("raise OSError('libbroken.so')\n")
    code, text = _report("pass", path=[tmp_path])
    assert code == 0
    assert "\nrmsnorm.torch\n       none     rmsnorm.torch needs torch 2.10 or later, got 2.9.1: " in text, text
    assert "\nrmsnorm.jax\n       none     JAX is cannot" not in text and "JAX cannot be imported: libbroken.so" in text, text


def test_a_wrong_result_is_a_failure():
    framework("torch")
    wrong = "import sys; sys.modules['jax'] = None; import rmsnorm.torch; rmsnorm.torch.rms_norm = lambda x, eps: x"
    code, text = _report(wrong)
    assert code == 1
    assert "\ncpu    FAILED   the RMS norm of (3.0, 4.0) is " in text, text


def test_a_fix_has_a_line_of_its_own(capsys):
    report.entry("cuda", "missing", "no driver; fix: install one")
    report.entry("cpu", "ready", "2 threads")
    expected = ["cuda   missing  no driver", "       fix      install one", "cpu    ready    2 threads"]
    assert capsys.readouterr().out.splitlines() == expected


def test_torch_on_cuda_without_kernels_says_which_operations_run_and_why(monkeypatch):
    torch = framework("torch")
    from rmsnorm.torch import functional

    monkeypatch.setattr(report, "cuda_devices", lambda: [0, 1])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(functional, "_why_no_cuda", lambda number: "no NVRTC; fix: pip install it" if number == 0 else None)
    _, first, second = report.torch_devices(torch)
    reason = "torch.nn.functional runs instead of the kernels: no NVRTC; fix: pip install it"
    assert first == ("cuda", "PyTorch", reason, None)
    assert second[:2] == ("cuda:1", "kernels") and second[3] is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, first, second = report.torch_devices(torch)
    assert first[1:3] == ("none", report.NO_DEVICE) and second[2].endswith(f"; fix: {report.FIX_TORCH_CUDA}")
    monkeypatch.setattr(torch.version, "cuda", None)
    _, only = report.torch_devices(torch)
    assert only[:2] == ("cuda", "none") and only[2].endswith(f"is not built for CUDA; fix: {report.FIX_TORCH_CUDA}")


def test_jax_on_cuda_without_kernels_fails_and_says_why(monkeypatch):
    framework("jax")
    cards = {"cpu": ["cpu"], "cuda": [types.SimpleNamespace(id=0)]}
    jax = types.SimpleNamespace(__version__="1", devices=lambda kind: cards[kind])
    monkeypatch.setattr(report._native, "why_no_cuda", lambda number: "no NVRTC; fix: pip install it")
    _, cuda = report.jax_devices(jax)
    assert cuda == ("cuda", "FAILS", "calls on this device raise an error: no NVRTC; fix: pip install it", None)

    def no_device(kind):
        if kind == "cuda":
            raise RuntimeError("unknown backend cuda")
        return cards[kind]

    jax.devices = no_device
    _, cuda = report.jax_devices(jax)
    assert cuda[1:3] == ("none", report.NO_DEVICE)
    monkeypatch.setattr(report._native, "why_no_cuda", lambda number: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    _, cuda = report.jax_devices(jax)
    assert cuda[2].endswith("(unknown backend cuda); fix: unset JAX_PLATFORMS, which is 'cpu'"), cuda
    monkeypatch.delenv("JAX_PLATFORMS")
    _, cuda = report.jax_devices(jax)
    assert cuda[2].endswith(f"; fix: {report.FIX_JAX_CUDA}"), cuda


def test_a_reader_that_closes_the_pipe_ends_it_without_a_traceback():
    read, write = os.pipe()
    os.close(read)
    code, _ = _report(_NO_FRAMEWORKS, stdout=write)
    os.close(write)
    assert code == -signal.SIGPIPE
