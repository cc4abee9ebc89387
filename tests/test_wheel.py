"""A wheel builds, installs into a clean environment, and `alload` runs from it."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    # A clean checkout: files that git does not know must not be needed.
    run("git", "clone", "--quiet", ROOT, sources)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sources)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file(wheel):
    listed = run("git", "ls-files", "alload_jax", "pallas_kernels", cwd=ROOT).splitlines()
    listed += [f"alload_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")]
    with zipfile.ZipFile(wheel) as archive:
        assert set(listed) <= set(archive.namelist())


@pytest.mark.slow
def test_alload_runs_from_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    pip = (binaries / "python", "-m", "pip", "install", "--quiet")
    run(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[digits]")
    plan = ("plan", "--workload", "wan-480p", "--size", "500", "--m-mem", "66816", "--ranks", "4")
    page = tmp_path / "plan.html"
    printed = run(binaries / "alload", *plan, "--report", page, cwd=tmp_path)
    assert "balanced" in printed
    assert "<style>" in page.read_text()
    small = ("--run.steps", "2", "--planning.policy", "balanced", "--sampling.grids", "[]")
    small += ("--evaluators", "[]", "--data.dataset.mix", "[[1, 8, 8, 40], [5, 8, 8, 20]]")
    run(binaries / "alload", "train", "--config", "digits", *small, cwd=tmp_path)
    assert (tmp_path / "runs" / "digits" / "summary.json").exists()
