"""Links, files, commands, flags, keys, names and clusters in README.md and docs/ are right."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

import alload_jax
from alload_jax.cli import main as alload
from alload_jax.config import read_config, values_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

_FENCE = re.compile(r"^(`{3,})(.*?)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OF_OTHER_EXTRAS = ("diffusers",)
"""Packages that readers use beside ours and that the extra `test` does not install."""


class Block(NamedTuple):
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(found[2].strip(), found[3]) for found in _FENCE.finditer(page.read_text())]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of links and images, except those on other sites."""
    return [link for link in _LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


def commands(page: Path) -> list[str]:
    """The commands of a page's blocks without a language, and in backticks, each on one line."""
    lines: list[str] = []
    for block in blocks(page):
        if not block.language:
            lines += block.text.replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:alload|python|make|sbatch) [^`]+)`", prose(page))
    return [" ".join(re.sub(r"\s+#.*", "", line).split()) for line in lines]


ALL_COMMANDS = sorted({command for page in PAGES for command in commands(page)})


# ---------------------------------------------------------------- pages


def test_links_anchors_and_files_that_are_named_exist():
    assert {"docs/planning.md", "docs/images/epoch.png"} <= set(links(ROOT / "README.md"))
    assert "a-training-step-of-wan-21-13b" in anchors(DOCS / "results.md")
    written = (
        "build/",
        "checkpoints/",
        "samples/",
        "tensorboard/",
        "transformer/",
        "mine.yaml",
        ".venv/bin/",
    )
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)
        pattern = r"`((?:[\w.*-]+/)*[\w*-]+(?:\.(?:py|ya?ml|json|sh)|/))`"
        for name in re.findall(pattern, prose(page)):
            places = (ROOT, ROOT / "alload_jax", page.parent)
            if name not in written and re.search(r"/.", name):
                assert any(list(place.glob(name.rstrip("/"))) for place in places), (page, name)


def test_every_page_is_in_the_site_s_table_of_contents_and_the_readme_is_one_page():
    listed = "\n".join(b.text for b in blocks(DOCS / "index.md") if b.language == "{toctree}")
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages == set(re.findall(r"^([\w-]+)$", listed, re.MULTILINE))
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# ---------------------------------------------------------------- the appendix


@pytest.fixture(scope="module")
def appendix():
    return runpy.run_path(str(DOCS / "appendix.py"))


def test_every_json_of_results_has_a_page_that_the_page_of_results_links(appendix, tmp_path):
    (tmp_path / "gone.md").write_text("# gone\n")
    kept = {path.stem: path for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    names = appendix["write_pages"](out=tmp_path)
    assert set(names) == set(kept) == {page.stem for page in tmp_path.glob("*.md")}
    end = appendix["listing"](names)
    for name, path in kept.items():
        assert f"[{name}](appendix/{name}.md)" in end
        assert f"\nappendix/{name}\n" in end
        text = (tmp_path / f"{name}.md").read_text()
        assert f"](../../benchmarks/results/{path.name})" in text
        plain = text.replace("\\", "")
        content = path.read_text()
        for key in ("command", "commit", "date", "device", "driver", "note"):
            for value in re.findall(rf'"{key}": ("(?:[^"\\]|\\.)+")', content):
                assert " ".join(json.loads(value).split()).replace("\\", "") in plain, (name, key)
        versions = re.findall(r'"(jax|torch|numpy)": "([^"]+)"', content)
        assert all(f"{library} {version}" in plain for library, version in versions)
        assert text.count("\n| ") > 8, name
    balance = (tmp_path / "balance_mixed_resolution_h200_x4.md").read_text()
    assert all(figure in balance for figure in ("| 866,924 |", "| 746,687 |", "| 871,067 |"))


def test_a_page_of_the_appendix_has_the_figures_of_its_json(appendix, tmp_path):
    rows = [
        {"case": f"c|{n}", "seconds": n / 3, "same": True, "parts": [{"ms": n}]} for n in range(120)
    ]
    content = {"date": "2026-01-01", "model": {"dim": 1536}, "loss": None, "cases": rows}
    (tmp_path / "x.json").write_text(json.dumps(content))
    text = appendix["page"](tmp_path / "x.json")
    for line in (
        *("| date | 2026-01-01 |", "| model.dim | 1,536 |", "| loss | – |", "| same | yes |"),
        *("| c\\|2 | 0.6667 |", "| c\\|2 | 2 |", "20 more rows are in the JSON."),
    ):
        assert line in text, line
    assert "c\\|100" not in text


# ---------------------------------------------------------------- commands, flags and keys


@functools.cache
def flags_of(*words):
    """The flags of a command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        alload([*words, "--help"])
    assert ended.value.code == 0
    return set(re.findall(r"--[\w-]+", printed.getvalue()))


def test_alload_commands_and_the_text_name_flags_that_exist():
    for command in ALL_COMMANDS:
        if re.search(r"^(\.venv/bin/)?alload ", command):
            words = shlex.split(command)[1:]
            known = flags_of(*words[: 2 if words[0] in ("bench", "lora", "prepare") else 1])
            given = {word.split("=")[0] for word in words if word.startswith("--")}
            assert given <= known, command
    known = {"--help", "--print_config", "--requeue", "--signal"}
    known |= flags_of("prepare", "media")
    for name in ("plan", "calibrate", "data", "sample", "export"):
        known |= flags_of(name)
    for action in ("export", "convert", "merge"):
        known |= flags_of("lora", action)
    for kind in ("kernel", "tune", "step", "epoch"):
        known |= flags_of("bench", kind)
    for page in PAGES:
        assert set(re.findall(r"`(--[\w-]+)[^`.]*`", prose(page))) <= known, page


@pytest.fixture(scope="module")
def keys():
    """Every dotted key that the committed configs have or leave at its default."""
    files = sorted((ROOT / "configs").glob("*.yaml"))
    leaves = [key for file in files for key in values_of(read_config(["--config", str(file)]))]
    return {".".join(key.split(".")[:n]) for key in leaves for n in range(1, 5)}


def test_keys_in_the_text_exist(keys):
    sections = "run|data|planning|model|optimizer|mesh|cluster|checkpoint|sampling"
    for page in PAGES:
        named = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)[^`/(]*`", prose(page)))
        others = (".py", ".json", ".secret")
        assert {name for name in named if not name.endswith(others)} <= keys, page


def test_commands_name_programs_configs_keys_and_flags_that_exist(keys):
    def unknown_keys(command):
        used = set(re.findall(r"--([\w.]+)", command.partition("train.py")[2]))
        return used - {"config", "help", "print_config"} - keys

    wrong = "python train.py --config configs/digits.yaml --run.steps 3 --run.stepz 3"
    assert unknown_keys(wrong) == {"run.stepz"}
    benches = (ROOT / "alload_jax" / "commands").glob("bench*.py")
    of_benches = "".join(path.read_text() for path in benches)
    for command in ALL_COMMANDS:
        if not re.search(r"python (train|benchmarks/\w+)\.py|^make |^sbatch ", command):
            continue
        if command.startswith("make "):
            target = command.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for script in re.findall(r"(?<!/)\b(?:train|benchmarks/\w+)\.py|docs/\S+\.sh", command):
            assert (ROOT / script).exists(), command
        for config in re.findall(r"configs/\S+\.yaml", command):
            assert config == "configs/mine.yaml" or (ROOT / config).exists(), command
        assert not unknown_keys(command), command
        for script in re.findall(r"python (benchmarks/\w+\.py) .*--", command):
            text = (ROOT / script).read_text() + of_benches
            assert all(f'"{flag}"' in text for flag in re.findall(r"(--[\w-]+)", command)), command


# ---------------------------------------------------------------- examples


def test_the_readme_shows_what_its_plan_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    readme = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    (command,) = (c for c in commands(ROOT / "README.md") if "alload plan --workload" in c)
    assert alload(shlex.split(command)[1:]) == 0
    assert (tmp_path / "plan.html").exists()
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| `(\w+)`.*\| ([\d.]+%) \| (\d+) \| ([\d,]+) \|$", readme, re.MULTILINE)
    assert len(rows) == 4
    for policy, idle, programs, speed in rows:
        (line,) = (line for line in printed.splitlines() if line.split()[1:2] == [policy])
        assert {idle, programs, speed} <= set(line.split()), line


def test_python_examples_are_valid_and_import_what_exists():
    parsed = [ast.parse(b.text) for page in PAGES for b in blocks(page) if b.language == "python"]
    for node in (node for tree in parsed for node in ast.walk(tree)):
        if not isinstance(node, ast.ImportFrom):
            continue
        package = node.module.split(".")[0]
        if package in OF_OTHER_EXTRAS and not importlib.util.find_spec(package):
            continue
        module = importlib.import_module(node.module)
        assert all(hasattr(module, name.name) for name in node.names), node.module


def test_the_example_of_planning_from_python_runs(capsys):
    (block,) = (b for b in blocks(DOCS / "planning.md") if b.language == "python")
    exec(compile(block.text.replace("12_345", "0"), "planning.md", "exec"), {})
    assert "Step(" in capsys.readouterr().out


def test_the_example_of_a_model_with_a_kernel_is_adaptive_layer_norm():
    text = next(b.text for b in blocks(DOCS / "kernels.md") if "class Block" in b.text)
    exec(compile(text, "kernels.md", "exec"), names := {})
    block = names["Block"](8, nnx.Rngs(0))
    x, condition = (
        jax.random.normal(jax.random.key(n), s) for n, s in ((0, (2, 3, 8)), (1, (2, 8)))
    )
    scale, shift = jnp.split(block.modulation(condition)[:, None], 2, axis=-1)
    norm = nnx.LayerNorm(8, use_bias=False, use_scale=False, epsilon=1e-6, rngs=nnx.Rngs(0))
    expected = x + block.layer(norm(x) * (1 + scale) + shift)
    np.testing.assert_allclose(block(x, condition), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_examples_of_the_library_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = jax.devices()[:1]  # programs of one device compile in less time
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    names = {}
    for block in blocks(DOCS / "library.md"):
        exec(compile(block.text, "library.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "32 (5, 8, 8, 4)"
    assert [line.split()[0] for line in printed[-4:-1]] == ["0", "1", "2"]
    assert printed[-1] == "(2, 5, 8, 8, 4)"


def test_the_public_names_exist_without_jax_and_are_on_their_page():
    page = (DOCS / "library.md").read_text()
    assert set(alload_jax.__all__) <= set(dir(alload_jax))
    for name in alload_jax.__all__:
        assert getattr(alload_jax, name).__class__
        assert f"`{name}`" in page
    with pytest.raises(AttributeError, match="no attribute 'make_plans'"):
        alload_jax.make_plans  # noqa: B018
    code = "import sys, alload_jax; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    # As text: each page of HTML repeats the tree of all pages, which takes four times as long.
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["-b", "text", "-d", tmp_path / "doctrees", DOCS, tmp_path / "site"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    site = tmp_path / "site"
    for module, word in (
        ("alload_jax/planning/study", "class alload_jax.planning.study.Study"),
        ("alload_jax/data/store/writer", "vae_stride"),
        ("pallas_kernels/layernorm_modulate/api", "Raises"),
    ):
        assert word in (site / "reference" / module / "index.txt").read_text()
    assert not (site / "reference/alload_jax/planning/metrics/index.txt").exists()
    assert "All measurements" in (site / "results.txt").read_text()
    assert "2026-11-25" in (site / "appendix" / "step_bars_h200.txt").read_text()
    assert (site / "architecture.txt").read_text().count("image: The way of one batch") == 1


def test_the_slurm_script_starts_a_task_per_gpu_and_requeues_a_stopped_run(tmp_path):
    path = DOCS / "clusters" / "slurm.sh"
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    command = re.search(r"^srun .*train\.py --config", text.replace("\\\n", ""), re.MULTILINE)
    assert "--kill-on-bad-exit=0" in command[0]
    assert "--cpus-per-task" in command[0]
    assert "--open-mode" in text  # a job that comes back does not erase its log
    assert (ROOT / re.search(r"CONFIG:-([^}]+)}", text)[1]).exists()
    slurm = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
    (tmp_path / "srun").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    (tmp_path / "srun").chmod(0o755)
    for more, words in (
        ({}, {".venv/bin/python", "configs/wan2_1_t2v_1_3b.yaml"}),
        ({"CONTAINER": "a b.sqsh", "PYTHON": "python"}, {"--container-image=a b.sqsh", "python"}),
    ):
        subprocess.run(["bash", path], env=slurm | more, check=True)
        given = set((tmp_path / "words").read_text().splitlines())
        assert words <= given
        assert any("container" in word for word in given) == bool(more)
    said = tmp_path / "scontrol_arguments"
    for status, requeued in ((75, "requeue 7\n"), (0, ""), (1, "")):
        said.write_text("")
        for name, body in (("srun", f"exit {status}"), ("scontrol", f'echo "$@" > {said}')):
            (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(["bash", path], env=slurm, check=False)
        assert (done.returncode, said.read_text()) == (status, requeued)


def test_the_jobset_counts_hosts_and_permits_queries_as_jax_needs_them():
    found = yaml.safe_load_all((DOCS / "clusters" / "jobset.yaml").read_text())
    objects = {part["kind"]: part for part in found}
    (workers,) = objects["JobSet"]["spec"]["replicatedJobs"]
    assert workers["replicas"] == 1
    policy = objects["JobSet"]["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed"  # JOB_COMPLETION_INDEX is JAX's process
    assert job["parallelism"] == job["completions"]  # JAX takes parallelism for processes
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    (stops,) = job["podFailurePolicy"]["rules"]  # its reason, which JobSet's rule names
    assert (stops["action"], rule["onJobFailureReasons"]) == ("FailJob", ["PodFailurePolicy"])
    (status,) = stops["onExitCodes"]["values"]
    assert stops["onExitCodes"]["containerName"] == container["name"]
    assert container["command"][-1].endswith(f"--run.status_when_stopped {status}")
    assert container["ports"] == [{"containerPort": 55527}]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    account = objects["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account == objects["RoleBinding"]["subjects"][0]["name"]
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    rules = objects["Role"]["rules"]
    allowed = {(kind, verb) for r in rules for kind in r["resources"] for verb in r["verbs"]}
    assert {("pods", "list"), ("jobs", "get")} <= allowed


def test_the_trainjob_takes_what_kubeflow_sets_and_shares_a_folder():
    """Its fields were checked against the CRD of Kubeflow Trainer (2026-08-21)."""
    found = yaml.safe_load((DOCS / "clusters" / "trainjob.yaml").read_text())
    spec = found["spec"]
    assert (found["kind"], spec["runtimeRef"]["name"]) == ("TrainJob", "jax-distributed")
    assert spec["trainer"]["command"][-1] == 'exec python train.py --config "$CONFIG"'
    (patch,) = spec["runtimePatches"]
    (jobs,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = jobs["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert jobs["name"] == container["name"] == "node"  # as the runtime calls them
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    (config,) = spec["trainer"]["env"]
    assert config["value"].startswith(mounts["shared"])
