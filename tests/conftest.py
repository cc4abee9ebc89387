import gc
import os
import signal
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# On a busy machine an example may take any time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Eight CPU devices, for tests of sharding; before JAX is imported. GPUs are not affected.
FLAGS = ["--xla_force_host_platform_device_count=8"]
if version("jaxlib").startswith("0.10."):  # another version may not know this flag and abort
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # compiles twice as fast
    FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")  # and with a tenth less work
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

# Tests compile far longer than they compute.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

# What one test compiled, no other compiles again, nor does the next run of the tests.
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


LONG = ("docs", "training", "plug_points", "bench", "models", "pallas_kernels")
"""Folders whose files take longest."""


def pytest_collection_modifyitems(config, items):
    """Samples cases, and puts long files first.

    So no worker is left with a long file at the end (--no-loadscope-reorder).
    """
    left_out = set(beyond_sample(items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    here = Path(__file__).parent

    def place(item):
        folder = item.path.relative_to(here).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


def beyond_sample(items):
    """The cases of the CPU that their marker `sampled` leaves out."""
    cases = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and not item.get_closest_marker("gpu"):
            if cases[item.function] % marker.args[0]:
                yield item
            cases[item.function] += 1


def pytest_collection_finish():
    """Lets the garbage collector skip what was imported: tracing makes objects by the million."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


@pytest.fixture(autouse=True, scope="module")
def norms_as_on_gpus(request):
    """Segments in more runs than the kernels of norms serve give NaN on a CPU, too.

    Not in tests of the kernels themselves, which compare bits.
    """
    if request.path.parent.name == "pallas_kernels":
        yield
        return
    import jax
    import jax.numpy as jnp

    from pallas_kernels.layernorm_modulate import api

    run = api._run

    def strict(function, operands, segments, *rest, **static):
        found, scattered = run(function, operands, segments, *rest, **static), False
        if isinstance(segments, api.Segmentation):
            segments, scattered = segments.ids, not segments.contiguous
        if segments is None or scattered:
            return found
        runs = 1 + (segments[..., 1:] != segments[..., :-1]).sum(axis=-1)
        served = (runs <= 2 * operands.scale.shape[-2] + 1)[..., None, None]
        return jax.tree.map(lambda x: jnp.where(served, x, jnp.nan), found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_run", strict)
        yield


@pytest.fixture(autouse=True, scope="session")
def kept_parsers():
    """Builds a parser once for each choice of parts: four fifths of the time to read a config."""
    from alload_jax import config_parser

    make, type_of, kept = config_parser._Parser, config_parser._typed, {}

    class Kept:
        def __init__(self, **options):
            self.options, self.flags = options, []

        def __getattr__(self, name):
            return getattr(self.parser, name)

        def add_argument(self, *names, **options):
            self.flags.append((names, options))

        def built(self):
            parser = make(**self.options)
            for names, options in self.flags:
                parser.add_argument(*names, **options)
            parser.add_class_arguments(self.kind)
            return parser

        def add_class_arguments(self, kind):
            self.kind, place = kind, (kind, self.options["prog"])
            if place not in kept:
                kept[place] = self.built()
            vars(kept[place]).update(vars(self))
            self.parser = kept[place]

        def set_defaults(self, defaults):
            if not defaults:
                return
            place = (self.kind, self.options["prog"], repr(defaults))  # which a parser keeps
            new = place not in kept
            if new:
                kept[place] = self.built()
            vars(kept[place]).update(vars(self))
            self.parser = kept[place]
            if new:
                self.parser.set_defaults(defaults)

    def typed(kind, kinds, prefix=""):
        choice = (kind, *kinds.items(), prefix)
        if choice not in kept:
            kept[choice] = type_of(kind, kinds, prefix)
        return kept[choice]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_parser, "_Parser", Kept)
        patch.setattr(config_parser, "_typed", typed)
        yield


@pytest.fixture
def alload(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder; returns its status, stdout and stderr."""
    from alload_jax import cli
    from alload_jax.errors import run_command

    monkeypatch.chdir(tmp_path)

    def run(*argv):
        capsys.readouterr()
        status = run_command(cli.main, [str(part) for part in argv])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def refused(alload, tmp_path):
    """Runs a command that must be refused in one line, which says all parts, and write nothing."""

    def files():
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    def run(parts, *argv):
        before = files()
        status, out, err = alload(*argv)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        for part in [parts] if isinstance(parts, str) else parts:
            assert part in err
        assert files() == before

    return run


@pytest.fixture
def own_comparisons(tmp_path, monkeypatch):
    """Comparisons of kernels that neither other tests nor the user's files know."""
    from pallas_kernels.first_use import COMPARISONS

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    COMPARISONS.clear()
    yield
    COMPARISONS.clear()


@pytest.fixture
def no_home(monkeypatch):
    """The user of a container, whom its system does not know."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled():
    """Frees a file's programs, among which later files would be traced more slowly."""
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()


@pytest.fixture
def default_signals():
    """SIGINT and SIGTERM as in a terminal, for this process and those that it starts.

    In a background job SIGINT is ignored, and child processes inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_term = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, before_term)
