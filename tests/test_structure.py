"""The structure of the code, computed from its imports: layers, circles, families, folders.

Imports count wherever they stand: under TYPE_CHECKING, in functions, in `try`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    ("benchmarks",),
    ("train",),
    ("alload_jax.cli", "alload_jax.commands"),
    ("alload_jax.run",),
    ("alload_jax.config", "alload_jax.config_parser"),
    ("alload_jax.bench",),
    ("alload_jax.report",),
    ("alload_jax.training",),
    ("alload_jax.sampling",),
    ("alload_jax.objectives",),
    ("alload_jax.data",),
    ("alload_jax.diffusion",),
    ("alload_jax.models",),
    ("alload_jax.distributed",),
    ("alload_jax.sharding",),
    ("alload_jax.encoders",),
    ("alload_jax.planning",),
    ("pallas_kernels",),
    ("alload_jax", "alload_jax.errors", "alload_jax.files", "alload_jax.registry"),
    ("alload_jax.processes",),
)
"""From top to bottom. A module may import its own layer and those below. `alload_jax` stands for
the package's `__init__.py` alone."""

SHARED_MODELS = "common"
"""The folder of models/ that is no family."""

TESTS_OF_NO_PACKAGE = {"plug_points", "docs", "golden", "parity"}
"""Folders of tests/ for the pages of docs/, for files drawn from other implementations, and for
comparisons with these."""

Imports = dict[str, set[str]]
"""Full names of all modules that each module imports, by module."""


# ---------------------------------------------------------------- reading imports


def module_name(path: Path) -> str:
    """`a.b` for a/b.py and for a/b/__init__.py; the path is relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: Path) -> dict[str, Path]:
    """The file of each module of the project, by name."""
    folders = ("alload_jax", "pallas_kernels", "benchmarks")
    files = [root / "train.py", *(path for name in folders for path in (root / name).rglob("*.py"))]
    return {module_name(path.relative_to(root)): path for path in files}


def imported_names(module: str, path: Path) -> Iterator[str]:
    """Full dotted names that a file imports; `from a import b` gives `a.b`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def read_imports(files: Mapping[str, Path]) -> Imports:
    """Imports of each module. A name that is no module is replaced by the module that defines it.

    Modules of other projects keep their full names.
    """

    def module_of(name: str) -> str:
        parent = name.rpartition(".")[0]
        return parent if name not in files and parent in files else name

    return {
        module: {module_of(name) for name in imported_names(module, path)}
        for module, path in files.items()
    }


def belongs(module: str, package: str) -> bool:
    """Whether a module is a package, or lies in it."""
    return module == package or module.startswith(f"{package}.")


# ---------------------------------------------------------------- rules


def layer_of(module: str) -> int | None:
    """Number of the layer of a module, 0 for the highest; None if it is in no layer."""
    if module == "alload_jax":
        return len(LAYERS) - 1
    for number, packages in enumerate(LAYERS):
        if any(belongs(module, package) for package in packages if package != "alload_jax"):
            return number
    return None


def upward_imports(imports: Imports) -> list[str]:
    """A line for each import of a module in a higher layer."""
    layers = {module: layer_of(module) for module in imports}
    return [
        f"{module} imports {name}, which is in a higher layer"
        for module, names in sorted(imports.items())
        for name in sorted(names & imports.keys())
        if None not in (layers[name], layers[module]) and layers[name] < layers[module]
    ]


def reachable(imports: Imports, start: str) -> dict[str, list[str]]:
    """The shortest chain of imports from a module to each one that it leads to."""
    chains = {name: [start, name] for name in imports[start] & imports.keys()}
    queue = list(chains)
    for module in queue:
        for name in sorted(imports[module] & imports.keys() - chains.keys()):
            chains[name] = [*chains[module], name]
            queue.append(name)
    return chains


def circles(imports: Imports) -> list[str]:
    """A line for each shortest circle of imports; one for all modules that share it."""
    found = {}
    for module in sorted(imports):
        if chain := reachable(imports, module).get(module):
            found.setdefault(frozenset(chain), " imports ".join(chain))
    return sorted(found.values())


def family_imports(imports: Imports, families: set[str]) -> list[str]:
    """A line for each import of a model family from outside its folder."""
    return [
        f"{module} imports {name}, which belongs to the model family {family!r}"
        for family in sorted(families)
        for module, names in sorted(imports.items())
        for name in sorted(names)
        if belongs(name, f"alload_jax.models.{family}")
        and not belongs(module, f"alload_jax.models.{family}")
    ]


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def imports():
    return read_imports(sources(ROOT))


def lines(violations):
    return "\n".join(["", *violations])


def test_every_module_has_a_layer(imports):
    missing = [module for module in sorted(imports) if layer_of(module) is None]
    assert not missing, f"add to LAYERS: {missing}"


def test_imports_point_down(imports):
    found = upward_imports(imports)
    assert not found, lines(found)


def test_no_modules_import_each_other(imports):
    found = circles(imports)
    assert not found, lines(found)


def test_a_model_family_is_imported_only_inside_its_folder(imports):
    folders = (path.parent.name for path in (ROOT / "alload_jax/models").glob("*/__init__.py"))
    families = set(folders) - {SHARED_MODELS}
    assert families
    found = family_imports(imports, families)
    assert not found, lines(found)


def test_kernels_import_nothing_of_alload_jax(imports):
    found = [
        f"{module} imports {name}"
        for module, names in sorted(imports.items())
        for name in sorted(names)
        if belongs(module, "pallas_kernels") and belongs(name, "alload_jax")
    ]
    assert not found, lines(found)


def test_the_deprecated_triton_lowering_is_used_in_triton_files_only(imports):
    found = [
        f"{module} imports {name}; only files whose names begin with triton may"
        for module, names in sorted(imports.items())
        for name in sorted(names)
        if belongs(name, "jax.experimental.pallas.triton")
        and not module.rpartition(".")[2].startswith("triton")
    ]
    assert not found, lines(found)


WITHOUT_EXTRAS = """
import importlib, sys
extras = "av torch diffusers transformers ray mlflow wandb trackio sentencepiece accelerate peft"
sys.modules.update(dict.fromkeys(extras.split()))
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
NEED_EXTRAS = ("pipeline", "ray_engine", "unit", "videos")
"""Modules of data/prepare that commands import only for `alload prepare media`."""


def test_everything_but_the_preparation_of_media_imports_without_extras(imports):
    """A first installation has none of the extras, and this environment has most of them."""
    of_media = {f"alload_jax.data.prepare.{name}" for name in NEED_EXTRAS}
    packages = ("alload_jax", "pallas_kernels")
    names = [name for name in imports if name.split(".")[0] in packages and name not in of_media]
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *sorted(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_planning_runs_without_jax(imports):
    modules = [module for module in sorted(imports) if belongs(module, "alload_jax.planning")]
    for names in (modules, ["alload_jax.commands.plan"], ["alload_jax.cli"]):
        code = f"import sys, {', '.join(names)}; sys.exit('jax' in sys.modules)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{names[-1]} imports jax {done.stderr}"


def test_folders_of_tests_are_named_after_packages():
    folders = {path.parent.relative_to(ROOT / "tests") for path in ROOT.glob("tests/**/test_*.py")}
    wrong = [
        f"tests/{folder} has tests, but there is no alload_jax/{folder} or {folder}"
        for folder in sorted(folders)
        if not {str(part) for part in folder.parts[:1]} <= TESTS_OF_NO_PACKAGE
        and not any((base / folder).is_dir() for base in (ROOT / "alload_jax", ROOT))
    ]
    assert not wrong, lines(wrong)


# ---------------------------------------------------------------- the rules find violations


def test_imports_are_found_wherever_they_stand(tmp_path):
    text = """
from typing import TYPE_CHECKING
from . import b
from .c import Name
if TYPE_CHECKING:
    import d.e
def f():
    from g import h
"""
    (tmp_path / "a.py").write_text(text)
    found = set(imported_names("p.a", tmp_path / "a.py"))
    assert found == {"typing.TYPE_CHECKING", "p.b", "p.c.Name", "d.e", "g.h"}
    (tmp_path / "__init__.py").write_text("from .a import Name\nfrom p import x")
    assert set(imported_names("p", tmp_path / "__init__.py")) == {"p.a.Name", "p.x"}


def test_circles_of_any_length_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [
        "a imports b imports c imports a"
    ]
    assert circles({"a": {"a"}, "b": {"a", "numpy"}}) == ["a imports a"]


def test_upward_imports_are_found():
    imports = {
        "alload_jax.data.x": {"alload_jax.training.y", "alload_jax.errors", "alload_jax.models.z"},
        "alload_jax.training.y": {"alload_jax.data.x"},
        "alload_jax.models.z": set(),
        "alload_jax.errors": {"alload_jax"},
        "alload_jax": {"alload_jax.cli"},
        "alload_jax.cli": set(),
    }
    assert upward_imports(imports) == [
        "alload_jax imports alload_jax.cli, which is in a higher layer",
        "alload_jax.data.x imports alload_jax.training.y, which is in a higher layer",
    ]


def test_imports_of_a_family_from_outside_are_found():
    imports = {
        "train": {"alload_jax.models.wan.transformer"},
        "alload_jax.models.wan.block": {"alload_jax.models.wan.transformer"},
        "alload_jax.models.wanted": {"alload_jax.models.common"},
    }
    assert family_imports(imports, {"wan"}) == [
        "train imports alload_jax.models.wan.transformer, which belongs to the model family 'wan'"
    ]
