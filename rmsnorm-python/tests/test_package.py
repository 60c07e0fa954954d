"""The quality of the Python package: type hints, errors with a next step, an import without side
effects."""

import ast
import importlib
import importlib.metadata
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import framework

import rmsnorm
from rmsnorm import _native, arrays

_FOLDER = pathlib.Path(rmsnorm.__file__).parent


def _python(code, *, path=(), **environment):
    """The output of a program in a fresh interpreter."""
    path = os.pathsep.join([*map(str, path), str(_FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "RMSNORM_NVRTC"} | {"PYTHONPATH": path} | environment
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def _says(statement, **options):
    """(type, message) of the error of a statement in a fresh interpreter."""
    code = f"try:\n    {statement}\nexcept Exception as error:\n    print(type(error).__name__, '|', error)"
    return _python(code, **options)


def test_the_stub_has_the_names_and_parameters_of_the_native_half():
    stub = ast.parse((_FOLDER / "_native.pyi").read_text())
    functions = {node.name: [argument.arg for argument in node.args.args] for node in stub.body if isinstance(node, ast.FunctionDef)}
    constants = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    names = {name for name in dir(_native) if not name.startswith("_")}
    assert names == functions.keys() | constants
    for name, parameters in functions.items():
        assert list(inspect.signature(getattr(_native, name)).parameters) == parameters, name


CONSUMER = """
from typing_extensions import assert_type
import numpy as np
import numpy.typing as npt
import rmsnorm
from rmsnorm import arrays

def use(x: npt.NDArray[np.float32], h: npt.NDArray[np.float16]) -> None:
    assert_type(rmsnorm.__version__, str)
    assert_type(rmsnorm.devices(), dict[str, tuple[bool, str]])
    assert_type(rmsnorm.arrays.rms_norm(x), npt.NDArray[np.float32])
    assert_type(arrays.rms_norm(x, x[0], 1e-6, weight_offset=1.0, cast_before_weight=True, out=x, stream=None), npt.NDArray[np.float32])
    assert_type(arrays.layer_norm(h, None, x[0]), npt.NDArray[np.float16])
    assert_type(arrays.l2_norm(h, clamped=True, out=h), npt.NDArray[np.float16])
    y: npt.NDArray[np.float32] = arrays.rms_norm(h, out_dtype=np.float32, cast_order="rstd_first")
    assert_type(arrays.add_rms_norm(h, x, out=(h, x)), tuple[npt.NDArray[np.float16], npt.NDArray[np.float32]])
    assert_type(arrays.add_layer_norm(x, h, eps=1e-6), tuple[npt.NDArray[np.float32], npt.NDArray[np.float16]])
    assert_type(arrays.rms_norm_add(h, x, out=x), npt.NDArray[np.float32])
    assert_type(arrays.layer_norm_add(h, h), npt.NDArray[np.float16])
    assert_type(arrays.rms_norm_add_rms_norm(h, x), tuple[npt.NDArray[np.float16], npt.NDArray[np.float32]])
    arrays.forward("layer_norm", x=x, y=x, mean=x[0])
    arrays.forward("rms_norm", x=x, y=None, residual=x, residual_out=x, residual_after=True)
    arrays.backward("rms_norm", dy=x, x=x, rstd=x[0], dx=x)
    arrays.rms_norm([1.0], None)  # error: a list lends nothing
    arrays.rms_norm(x, eps="1e-6")  # error: no number
    arrays.forward("rmsnorm", x=x, y=x)  # error: no such norm
    arrays.forward("rms_norm", x=x)  # error: without an output
"""


def _mypy(tmp_path, code):
    """The result of mypy --strict for a program that uses the package: (lines with errors, revealed
    types, all output)."""
    framework("mypy")
    (tmp_path / "consumer.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), "consumer.py"]
    # mypy finds an installed package by itself, and refuses site-packages in MYPYPATH.
    environment = os.environ if _FOLDER.parent.name == "site-packages" else os.environ | {"MYPYPATH": str(_FOLDER.parent)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in found.stdout.splitlines() if line.startswith("consumer.py")]
    errors = [int(line.split(":")[1]) for line in lines if " error: " in line]
    return errors, [line.partition("Revealed type is ")[2] for line in lines if "Revealed type" in line], found.stdout


def test_a_strictly_typed_program_finds_the_types_of_arrays(tmp_path):
    framework("numpy")
    errors, _, output = _mypy(tmp_path, CONSUMER)
    wrong = [number for number, line in enumerate(CONSUMER.splitlines(), 1) if "# error" in line]
    assert errors == wrong, output


# Stubs of the framework types in this package's hints. With the frameworks' own hints mypy takes
# minutes.
STUBS = {
    "torch/__init__.pyi": "class dtype: ...\nclass device: ...\nclass Tensor:\n    def __getitem__(self, index: object) -> Tensor: ...\n",
    "torch/nn/__init__.pyi": "class Module: ...\nclass RMSNorm(Module): ...\nclass LayerNorm(Module): ...\n",
    "jax/__init__.pyi": "class Array:\n    def __getitem__(self, index: object) -> Array: ...\n",
    "jax/typing.pyi": "from jax import Array\nArrayLike = Array | float\n",
}


@pytest.mark.parametrize("name, array", [("torch", "torch.Tensor"), ("jax", "jax.Array")])
def test_a_strictly_typed_program_finds_the_types_of_each_framework(tmp_path, name, array):
    framework(name)
    module = importlib.import_module(f"rmsnorm.{name}")
    functions = [public for public in module.__all__ if inspect.isfunction(getattr(module, public))]
    for stub, text in STUBS.items():
        (tmp_path / stub).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / stub).write_text(text)
    code = f"""
from typing_extensions import assert_type
import {name}
import rmsnorm
import rmsnorm.{name} as r

def use(x: {array}) -> None:
    assert_type(r.rms_norm(x, x[0], 1e-6, weight_offset=1.0, cast_before_weight=True), {array})
    assert_type(r.layer_norm(x, x[0], x[0], 1e-6), {array})
    assert_type(r.add_rms_norm(x, x), tuple[{array}, {array}])
    assert_type(r.add_layer_norm(x, x), tuple[{array}, {array}])
    assert_type(r.layer_norm_add(x, x), {array})
    assert_type(r.rms_norm_add_rms_norm(x, x), tuple[{array}, {array}])
    assert_type(r.Norm.rms(1e-6, weight_offset=1.0).residual_after(x).next_norm(x[0]).apply(x), {array} | tuple[{array}, {array}])
    assert_type(rmsnorm.{name}.rms_norm(x), {array})
    r.rms_norm(x, eps="1e-6")  # error
"""
    wrong = code.count("\n")
    code += "".join(f"    reveal_type(r.{function})\n" for function in functions)
    errors, types, output = _mypy(tmp_path, code)
    assert errors == [wrong] and len(types) == len(functions), output
    # A parameter or result without a hint would be Any, which is also what mypy makes of JAX's DTypeLike.
    hints = [line.replace("out_dtype: Any | None", "") for line in types]
    assert not [line for line in hints if re.search(r"\bAny\b", line)], output


def test_py_typed_is_part_of_the_package():
    assert (_FOLDER / "py.typed").exists()


def _public(module):
    yield module.__name__, module
    yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__)


def test_public_names_and_documentation():
    for name, item in [*_public(rmsnorm), *_public(arrays)]:
        assert inspect.getdoc(item), name
        if inspect.isfunction(item):
            parameters = inspect.signature(item).parameters.values()
            assert all(parameter.annotation is not parameter.empty for parameter in parameters), name
    assert {"arrays", "torch", "jax", "devices"} <= set(dir(rmsnorm))
    with pytest.raises(AttributeError, match="module 'rmsnorm' has no attribute 'no_such'"):
        rmsnorm.no_such


def test_parts_are_imported_when_they_are_first_used():
    assert _python("import sys, rmsnorm; print([m for m in ('numpy', 'torch', 'jax') if m in sys.modules])") == "[]"
    assert _python("import rmsnorm; print(rmsnorm.arrays.rms_norm.__name__)") == "rms_norm"


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_parts_of_frameworks_are_attributes(name):
    framework(name)
    assert _python(f"import rmsnorm; print(rmsnorm.{name}.rms_norm.__name__)") == "rms_norm"


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("statement", ["import rmsnorm.{0}", "from rmsnorm import {0}", "import rmsnorm; rmsnorm.{0}"])
def test_a_missing_framework_names_the_extra(name, statement):
    absent = f"import sys; sys.modules[{name!r}] = None; "
    text = _says(absent + statement.format(name))
    assert text.startswith("ModuleNotFoundError | ") and f"in a clone, pip install '.[{name}]'" in text, text
    extras = importlib.metadata.metadata("rmsnorm").get_all("Provides-Extra")
    assert name in extras


@pytest.mark.parametrize("name, old", [("torch", "2.9.1+cpu"), ("jax", "0.4.38")])
def test_a_framework_that_is_too_old_is_named_with_its_version(tmp_path, name, old):
    (tmp_path / f"{name}.py").write_text(f"__version__ = {old!r}\n")
    text = _says(f"import rmsnorm.{name}", path=[tmp_path])
    assert text.startswith("ImportError | ") and f"got {old}" in text and "or later" in text, text


def test_a_framework_s_own_missing_part_is_not_taken_for_the_framework(tmp_path):
    (tmp_path / "torch.py").write_text("import no_such_part\n")
    text = _says("import rmsnorm.torch", path=[tmp_path])
    assert text == "ModuleNotFoundError | No module named 'no_such_part'"


def test_import_changes_neither_the_environment_nor_the_import_system(tmp_path):
    _wheel_of_nvrtc(tmp_path, "cuda_nvrtc", 12)
    code = "import os, sys; before = dict(os.environ), list(sys.meta_path), list(sys.path); import rmsnorm, rmsnorm.arrays; "
    assert _python(code + "print((dict(os.environ), sys.meta_path, sys.path) == before)", path=[tmp_path]) == "True"


def _wheel_of_nvrtc(root, package, major):
    folder = root / "nvidia" / package / "lib"
    folder.mkdir(parents=True)
    (folder / f"libnvrtc.so.{major}").write_text("no library")
    return folder


def test_nvrtc_is_found_in_every_wheel_of_nvidia_s(tmp_path):
    folders = [_wheel_of_nvrtc(tmp_path, package, major) for package, major in [("cuda_nvrtc", 12), ("cu13", 13)]]
    (tmp_path / "nvidia" / "cublas" / "lib").mkdir(parents=True)
    found = ast.literal_eval(_python("import rmsnorm; print(rmsnorm._nvrtc_folders())", path=[tmp_path]))
    # Which version is taken among them is the native half's: `of_other_folders_the_best_version_is_tried_first` in rmsnorm-cuda.
    assert {str(folder) for folder in folders} <= set(found)
    assert not any("cublas" in folder for folder in found)


def test_one_rule_for_the_default_eps():
    numpy = framework("numpy")
    x = numpy.random.default_rng(0).standard_normal((4, 16)).astype(numpy.float32) * 1e-3
    rms, layer = arrays.rms_norm(x, eps=2.0**-23), arrays.layer_norm(x, eps=1e-5)
    assert (arrays.rms_norm(x) == rms).all() and (arrays.layer_norm(x) == layer).all()
    assert (arrays.rms_norm(x, eps=1e-6) != rms).any() and (arrays.layer_norm(x, eps=1e-6) != layer).any()
    assert (arrays.add_rms_norm(x, 0 * x)[0] == rms).all() and (arrays.add_layer_norm(x, 0 * x)[0] == layer).all()


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_default_eps_of_each_framework_is_the_same(name, dtype):
    """A default, and None, are 2**-23 for RMS norms and 1e-5 for layer norms."""
    library = framework(name)
    numpy = library if name == "torch" else importlib.import_module("jax.numpy")
    norms = importlib.import_module(f"rmsnorm.{name}")
    x = numpy.arange(64, dtype=getattr(numpy, dtype)).reshape(4, 16) * 1e-4
    for function, eps in [(norms.rms_norm, 2.0**-23), (norms.layer_norm, 1e-5)]:
        expected = function(x, eps=eps)
        assert bool((expected != function(x, eps=1e-6)).any())
        assert bool((function(x) == expected).all()) and bool((function(x, eps=None) == expected).all()), function
    for function, eps in [(norms.add_rms_norm, 2.0**-23), (norms.add_layer_norm, 1e-5)]:
        expected = function(x, 0 * x, eps=eps)[0]
        assert bool((function(x, 0 * x)[0] == expected).all()) and bool((function(x, 0 * x, eps=None)[0] == expected).all())
