"""What production code imports, and when: no array library, and nothing heavy before it is needed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun
from helpers.table_models import table_pair

PACKAGE = Path(forerun.__file__).parent
BANNED = {"numpy", "cupy", "torch", "transformers", "onnx", "onnx_ir", "onnxscript", "forerun_export"}
ALLOWED = {"click", "forerun", "jinja2", "onnxruntime", "platformdirs", "rich", "tokenizers"}
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that any import in a syntax tree names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "forerun" if node.level else str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield "a module named at run time"


def without_command_bodies(tree: ast.Module) -> ast.Module:
    """A module less the bodies of its functions that are click commands."""
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(d) for d in node.decorator_list))
    ]
    return ast.Module(kept, [])


@pytest.mark.parametrize("module", MODULES)
def test_production_code_imports_the_standard_library_and_its_few_dependencies(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    if module == "cli.py":  # its commands may reach for the export side, when they run
        assert set(imported(tree)) - sys.stdlib_module_names <= ALLOWED | {"forerun_export"}
        tree = without_command_bodies(tree)
    found = set(imported(tree)) - sys.stdlib_module_names
    assert not found & BANNED
    assert found <= ALLOWED


def test_the_walk_over_imports_sees_every_kind() -> None:
    source = """
import os, numpy.linalg
from torch.nn import Linear
from . import errors
if TYPE_CHECKING:
    import cupy
def late():
    import onnx
    importlib.import_module("x")
"""
    assert set(imported(ast.parse(source))) == {
        *("os", "numpy", "torch", "forerun", "cupy", "onnx", "a module named at run time")
    }


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running `code`."""
    program = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return set(result.stdout.split("\n")[-2].split())


HEAVY = {"onnxruntime", "jinja2", "rich", "numpy", "torch", "transformers", "forerun_export"}


def test_importing_forerun_loads_nothing_heavy() -> None:
    loaded = loaded_by("import forerun")
    assert "tokenizers" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["inspect", "--help"], ["export", "--help"], ["bench", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_by(f"from forerun.cli import main; main({arguments!r}, standalone_mode=False)")
    assert "click" in loaded
    assert not loaded & HEAVY


def test_decoding_imports_no_array_library_itself(tmp_path: Path) -> None:
    # onnxruntime loads numpy, so what counts is who asks for it.
    engines = table_pair(tmp_path / "engines").path
    watched = f"""
import builtins
load = builtins.__import__
def watch(name, globals=None, *rest):
    asking = (globals or {{}}).get("__name__", "")
    if name.partition(".")[0] in {BANNED!r} and asking.partition(".")[0] == "forerun":
        raise AssertionError(f"{{asking}} imports {{name}}")
    return load(name, globals, *rest)
builtins.__import__ = watch
import forerun, forerun.oracle, forerun.invariants
with forerun.open({str(engines)!r}) as decoder:
    decoder.generate("w1 w2", max_new_tokens=9, temperature=1.0)
"""
    assert "onnxruntime" in loaded_by(watched)


EXPORTED = {
    *("open", "Decoder", "Generation", "Chunk", "Stats", "Controls", "Request", "Prompt"),
    *("ForerunError", "EngineError", "RequestError", "BackendError", "ExportError"),
}


def test_the_public_names_are_these_and_all_documented() -> None:
    assert set(forerun.__all__) == EXPORTED
    assert sorted(forerun.__all__, key=str) == list(forerun.__all__)
    for name in EXPORTED - {"Prompt"}:  # an alias of types
        assert (getattr(forerun, name).__doc__ or "").strip()


def test_a_version_is_told() -> None:
    assert forerun.__version__.count(".") == 2
