"""Links, files, commands, flags, keys and Python names in README.md and docs/ exist."""

import ast
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from pages import DOCS, PAGES, ROOT, anchors, blocks, commands, links, prose

import alload_jax
from alload_jax.cli import main as alload
from alload_jax.config import read_config, values_of
from alload_jax.errors import InputError

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
BENCHES = (["bench", "kernel"], ["bench", "tune"], ["bench", "step"], ["bench", "balance"])
OF_OTHER_EXTRAS = ("diffusers",)
"""Packages that readers use beside ours and that the extra `test` does not install."""
ALL_COMMANDS = sorted({command for page in PAGES for command in commands(page)})


@pytest.fixture(scope="module")
def keys():
    """Every dotted key that the committed configs have or leave at its default."""
    files = sorted((ROOT / "configs").glob("*.yaml"))
    leaves = [key for file in files for key in values_of(read_config(["--config", str(file)]))]
    return {".".join(key.split(".")[:n]) for key in leaves for n in range(1, 5)}


def commands_of(pattern):
    found = [command for command in ALL_COMMANDS if re.search(pattern, command)]
    return pytest.mark.parametrize("command", found)


@by_page
def test_links_and_their_anchors_exist(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@by_page
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:[\w.*-]+/)*[\w*-]+(?:\.(?:py|ya?ml|json|sh)|/))`", prose(page))
    written = ("build/", "checkpoints/", "samples/", "tensorboard/", "transformer/", "mine.yaml")
    for name in named:
        if name in written or not re.search(r"/.", name):
            continue
        places = (ROOT, ROOT / "alload_jax", page.parent)
        assert any(list(place.glob(name.rstrip("/"))) for place in places), name


def test_links_are_found():
    assert {"docs/planning.md", "docs/images/waiting.png"} <= set(links(ROOT / "README.md"))
    assert "a-training-step-of-wan-21-13b" in anchors(DOCS / "results.md")


def test_every_page_is_in_the_site_s_table_of_contents():
    listed = "\n".join(b.text for b in blocks(DOCS / "index.md") if b.language == "{toctree}")
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages == set(re.findall(r"^([\w-]+)$", listed, re.MULTILINE))


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.fixture(scope="module")
def appendix():
    return runpy.run_path(str(DOCS / "appendix.py"))


def test_every_json_of_results_has_a_page_that_the_page_of_results_links(appendix, tmp_path):
    kept = {path.stem: path for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    names = appendix["write_pages"](out=tmp_path)
    assert set(names) == set(kept) == {page.stem for page in tmp_path.glob("*.md")}
    end = appendix["listing"](names)
    for name, path in kept.items():
        assert f"[{name}](appendix/{name}.md)" in end
        assert f"\nappendix/{name}\n" in end
        text = (tmp_path / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
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
        "| date | 2026-01-01 |",
        "| model.dim | 1,536 |",
        "| loss | – |",
        "| same | yes |",
        "| c\\|2 | 0.6667 |",
        "| c\\|2 | 2 |",
        "20 more rows are in the JSON.",
    ):
        assert line in text, line
    assert "c\\|100" not in text


def test_a_page_whose_json_is_gone_is_removed(appendix, tmp_path):
    (tmp_path / "gone.md").write_text("# gone\n")
    appendix["write_pages"](out=tmp_path)
    assert not (tmp_path / "gone.md").exists()


@commands_of(r"^(\.venv/bin/)?alload ")
def test_alload_commands_name_flags_that_exist(command, capsys):
    words = shlex.split(command)[1:]
    subcommand = words[: 2 if words[0] in ("bench", "lora", "prepare") else 1]
    with pytest.raises(SystemExit) as ended:
        alload([*subcommand, "--help"])
    assert ended.value.code == 0
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


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


@by_page
def test_flags_in_the_text_exist(page, capsys):
    named = set(re.findall(r"`(--[\w-]+)[^`.]*`", prose(page)))
    known = {"--help", "--print_config", "--requeue", "--signal"}
    for words in (
        ["plan"],
        ["calibrate"],
        ["data"],
        ["prepare", "media"],
        ["sample"],
        ["export"],
        *(["lora", action] for action in ("export", "convert", "merge")),
        *BENCHES,
    ):
        with pytest.raises(SystemExit):
            alload([*words, "--help"])
        known |= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert named <= known


@by_page
def test_keys_in_the_text_exist(page, keys):
    sections = "run|data|planning|model|optimizer|mesh|cluster|checkpoint|sampling"
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)[^`/(]*`", prose(page)))
    assert {name for name in named if not name.endswith((".py", ".json", ".secret"))} <= keys


def unknown_keys(command, keys):
    """Keys of a command of train.py that no config has."""
    used = set(re.findall(r"--([\w.]+)", command.partition("train.py")[2]))
    return used - {"config", "help", "print_config"} - keys


def test_an_unknown_key_of_a_command_is_found(keys):
    command = "python train.py --config configs/digits.yaml --run.steps 3 --run.stepz 3"
    assert unknown_keys(command, keys) == {"run.stepz"}


@commands_of(r"python (train|benchmarks/\w+)\.py|^make |^sbatch ")
def test_commands_name_programs_configs_and_keys_that_exist(command, keys):
    if command.startswith("make "):
        target = command.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for script in re.findall(r"(?<!/)\b(?:train|benchmarks/\w+)\.py|docs/\S+\.sh", command):
        assert (ROOT / script).exists()
    for config in re.findall(r"configs/\S+\.yaml", command):
        assert config == "configs/mine.yaml" or (ROOT / config).exists()
    assert not unknown_keys(command, keys)


@commands_of(r"python benchmarks/\w+\.py .*--")
def test_programs_of_benchmarks_know_their_flags(command):
    script = re.search(r"benchmarks/\w+\.py", command)[0]
    text = (ROOT / script).read_text() + "".join(
        path.read_text() for path in (ROOT / "alload_jax" / "commands").glob("bench*.py")
    )
    for flag in re.findall(r"(--[\w-]+)", command):
        assert f'"{flag}"' in text


@by_page
def test_python_examples_are_valid_and_import_what_exists(page):
    for block in blocks(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom):
                    package = node.module.split(".")[0]
                    if package in OF_OTHER_EXTRAS and not importlib.util.find_spec(package):
                        continue
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, name.name) for name in node.names)


def test_the_example_of_planning_from_python_runs(capsys):
    (block,) = (b for b in blocks(DOCS / "planning.md") if b.language == "python")
    exec(compile(block.text.replace("12_345", "0"), "planning.md", "exec"), {})
    assert "Step(" in capsys.readouterr().out


def test_the_examples_of_the_library_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(DOCS / "library.md"):
        exec(compile(block.text, "library.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "32 (5, 8, 8, 4)"
    assert [line.split()[0] for line in printed[-4:-1]] == ["0", "1", "2"]
    assert printed[-1] == "(2, 5, 8, 8, 4)"


def test_the_public_names_exist_and_are_on_their_page():
    page = (DOCS / "library.md").read_text()
    assert set(alload_jax.__all__) <= set(dir(alload_jax))
    for name in alload_jax.__all__:
        assert getattr(alload_jax, name).__class__
        assert f"`{name}`" in page
    with pytest.raises(AttributeError, match="no attribute 'make_plans'"):
        alload_jax.make_plans  # noqa: B018


def test_the_package_imports_no_jax():
    code = "import sys, alload_jax; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_first_picture_shows_the_figures_of_the_readme():
    program = runpy.run_path(str(ROOT / "benchmarks" / "waiting_picture.py"))
    content = program["json"].loads((ROOT / program["RESULTS"]).read_text())
    before, after = (program["measured"](content, program[name]) for name in ("BEFORE", "AFTER"))
    shown = {t.get_text() for a in program["draw"](content, before, after).axes for t in a.texts}
    assert {"30% waiting", "3% waiting", "866,924 tokens/s\n1.40× the speed"} <= shown
    readme = (ROOT / "README.md").read_text()
    assert all(figure in readme for figure in ("29.9 %", "3.2 %", "866,924", "1.40×"))


def test_the_first_picture_says_what_was_not_measured():
    program = runpy.run_path(str(ROOT / "benchmarks" / "waiting_picture.py"))
    with pytest.raises(InputError, match=r"^x: has no GPU times of balanced"):
        program["measured"]({"workload": "x", "cases": [{"case": "balanced"}]}, "balanced")


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
