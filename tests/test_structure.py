"""Layers, circles, families and extras, computed from imports wherever they stand."""

import ast
import pkgutil
import subprocess
import sys
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

EXTRAS = {"accelerate", "av", "diffusers", "mlflow", "peft", "ray", "sentencepiece", "torch"}
EXTRAS |= {"trackio", "transformers", "wandb"}
NEED_EXTRAS = {f"alload_jax.data.prepare.{n}" for n in ("pipeline", "ray_engine", "unit", "videos")}
"""Modules that commands import only for `alload prepare media`."""


def module_name(path):
    """`a.b` for a/b.py and for a/b/__init__.py; the path is relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(module, path, nodes):
    """Full dotted names that nodes of a file import; `from a import b` gives `a.b`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def at_start(tree):
    """The nodes that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not for_types and not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from at_start(node)


@pytest.fixture(scope="module")
def imports():
    """Names of what each module imports anywhere, and when it is imported, by module.

    A name that is no module is replaced by the module that defines it.
    """
    folders = ("alload_jax", "pallas_kernels", "benchmarks")
    paths = [ROOT / "train.py", *(path for name in folders for path in (ROOT / name).rglob("*.py"))]
    files = {module_name(path.relative_to(ROOT)): path for path in paths}
    anywhere, first = {}, {}
    for module, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for found, nodes in ((anywhere, ast.walk(tree)), (first, at_start(tree))):
            found[module] = {
                name.rpartition(".")[0]
                if name not in files and name.rpartition(".")[0] in files
                else name
                for name in imported_names(module, path, nodes)
            }
    return anywhere, first


def belongs(module, package):
    return module == package or module.startswith(f"{package}.")


def layer_of(module):
    """Number of the layer of a module, 0 for the highest; None if it is in no layer."""
    if module == "alload_jax":
        return len(LAYERS) - 1
    for number, packages in enumerate(LAYERS):
        if any(belongs(module, package) for package in packages if package != "alload_jax"):
            return number
    return None


def reachable(imports, start):
    """Modules that a module's imports lead to."""
    found = sorted(imports[start] & imports.keys())
    for module in found:
        found += sorted((imports[module] & imports.keys()).difference(found))
    return found


def test_imports_point_down_and_never_in_circles(imports):
    anywhere, _ = imports
    layers = {module: layer_of(module) for module in anywhere}
    assert None not in layers.values(), f"add to LAYERS: {layers}"
    upward = [
        f"{module} imports {name}"
        for module, names in anywhere.items()
        for name in names & anywhere.keys()
        if layers[name] < layers[module]
        or (belongs(module, "pallas_kernels") and belongs(name, "alload_jax"))
    ]
    assert not upward
    assert not [module for module in anywhere if module in reachable(anywhere, module)]


def test_families_are_imported_in_their_folders_alone(imports):
    folders = {path.parent.name for path in (ROOT / "alload_jax/models").glob("*/__init__.py")}
    assert len(folders) > 1
    owned = {f"alload_jax.models.{name}": name for name in folders - {"common"}}
    wrong = [
        f"{module} imports {name}"
        for module, names in imports[0].items()
        for name in names
        for package in owned
        if belongs(name, package) and not belongs(module, package)
    ]
    assert not wrong


def test_everything_but_the_preparation_of_media_imports_without_extras(imports):
    wrong = [
        f"{module} imports {name}"
        for module, names in imports[1].items()
        for name in names
        if module.split(".")[0] != "benchmarks" and module not in NEED_EXTRAS
        if name.split(".")[0] in EXTRAS or name in NEED_EXTRAS
    ]
    assert not wrong


def test_dataclasses_are_frozen():
    """But for those that are filled bit by bit."""
    keywords, not_frozen = set(), set()
    for path in (
        path for name in ("alload_jax", "pallas_kernels") for path in (ROOT / name).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for each in getattr(node, "decorator_list", ()):
                words = ast.unparse(each).removeprefix("dataclasses.")
                if words.startswith("dataclass("):
                    keywords.add(words)
                elif words == "dataclass":
                    not_frozen.add(node.name)
    assert keywords == {
        f"dataclass(frozen=True{more}" for more in (")", ", eq=False)", ", kw_only=True)")
    }
    assert not_frozen == {
        "CostFilter",
        "Found",
        "Message",
        "UnitReport",
        "WindowPlanner",
        "_Received",
    }


def test_planning_runs_without_jax(imports):
    modules = [module for module in sorted(imports[0]) if belongs(module, "alload_jax.planning")]
    names = ", ".join([*modules, "alload_jax.commands.plan", "alload_jax.cli"])
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"planning imports jax {done.stderr}"


def exists(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_what_slow_tests_and_benchmarks_import_exists():
    """Parity, GPU tests and benchmarks are not imported by the quick tier."""
    wrong = [
        f"{path} imports {name}"
        for folder in ("tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for name in imported_names("", path, ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        if name.split(".")[0] in ("alload_jax", "pallas_kernels") and not exists(name)
    ]
    assert not wrong
