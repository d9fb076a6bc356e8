"""Who may import whom, which libraries stay behind which fence, and how long a file may grow."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "eagle_train"
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80

PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path, *, at_run_time: bool = True) -> set[str]:
    """Dotted names of every module that a file imports, wherever in the file; `from a import b` is a and a.b.

    at_run_time: leave out what only a type checker sees.
    """
    tree = ast.parse(path.read_text())
    hidden = {node for block in typing_blocks(tree) for node in ast.walk(block)} if at_run_time else set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(path)}:{node.lineno} is a relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            first = node.args[0] if node.args else None
            if called == "import_module" and isinstance(first, ast.Constant):
                names.add(str(first.value))
    return names


def typing_blocks(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from node.body


def imports_any(path: Path, *modules: str) -> set[str]:
    """Those imports of a file that are one of the modules or lie in it."""
    return {name for name in imported(path) for module in modules if f"{name}.".startswith(f"{module}.")}


def files_of(folder: str) -> list[Path]:
    paths = [path for path in PACKAGE_FILES if path.parent.name == folder]
    assert paths, f"eagle_train/{folder} has no file: this test looks at nothing"
    return paths


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("data", ("model", "objective", "decode", "export", "train")),
        ("model", ("data", "objective", "decode", "export", "train")),
        ("objective", ("data", "decode", "export", "train")),
        ("decode", ("export", "train", "__main__")),
        ("export", ("data", "objective", "decode", "train", "__main__")),
        ("train", ("__main__",)),
    ],
)
def test_a_folder_imports_only_what_lies_below_it(folder: str, forbidden: tuple[str, ...]) -> None:
    modules = [f"eagle_train.{name}" for name in forbidden]
    found = {label(path): names for path in files_of(folder) if (names := imports_any(path, *modules))}
    assert found == {}


def test_only_the_command_line_imports_the_training_loop() -> None:
    found = {
        label(path)
        for path in PACKAGE_FILES
        if path.parent.name != "train" and imports_any(path, "eagle_train.train")
    }
    assert found == {"eagle_train/__main__.py"}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("flash_attn", "eagle_train/model/attention.py"),
        ("accelerate", "eagle_train/train/distributed.py"),
        ("torch.distributed", "eagle_train/train/distributed.py"),
    ],
)
def test_a_fenced_library_is_imported_in_its_home_only(library: str, home: str) -> None:
    files = [path for path in (*PACKAGE_FILES, *SCRIPTS) if label(path) != home]
    assert {label(path) for path in files if imports_any(path, library)} == set()


def test_a_program_for_an_engine_imports_nothing_of_ours() -> None:
    """It is run by the engine's own Python, where this package is not installed."""
    programs = sorted((ROOT / "scripts" / "engines").glob("run_*.py"))
    assert programs
    assert {label(path) for path in programs if imports_any(path, "eagle_train", "scripts")} == set()


def test_the_planner_needs_numpy_and_the_standard_library_only() -> None:
    names = {name.split(".")[0] for name in imported(PACKAGE / "data" / "packing.py")}
    assert names - set(sys.stdlib_module_names) == {"numpy"}


def test_nothing_is_pickled() -> None:
    found = set()
    for path in (*PACKAGE_FILES, *SCRIPTS):
        if imports_any(path, "pickle", "cloudpickle", "dill", "joblib"):
            found.add(f"{label(path)} imports a pickler")
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in {("torch", "load"), ("torch", "save"), ("np", "load")}
            ):
                found.add(f"{label(path)}:{node.lineno} {node.value.id}.{node.attr}")
    assert found == set()


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, eagle_train, eagle_train.config, eagle_train.flags, eagle_train.__main__\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'accelerate'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert done.stderr == ""


def test_every_public_name_is_found_where_the_package_says() -> None:
    import eagle_train

    assert sorted(eagle_train._HOMES) == eagle_train.__all__ == dir(eagle_train)
    for name in eagle_train.__all__:
        assert getattr(eagle_train, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"):
        _ = eagle_train.Nothing


def test_a_module_does_no_work_when_it_is_imported() -> None:
    allowed = (
        ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.If
    )
    found = []
    for path in PACKAGE_FILES:
        for node in ast.parse(path.read_text()).body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.If):
                test = ast.unparse(node.test)
                is_allowed = test in ("TYPE_CHECKING", "__name__ == '__main__'")
            else:
                is_allowed = isinstance(node, allowed) or is_docstring
            if not is_allowed:
                found.append(f"{label(path)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=label)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = int(node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
