"""A config is what its files and flags say; what is wrong with it is one line with a remedy."""

import dataclasses
import json
import re
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from alload_jax import config_parser
from alload_jax.config import (
    _LISTS,
    _PARTS,
    Config,
    experts_of,
    read_config,
    values_in,
    values_of,
    with_context,
    without_effect,
    write_config,
)
from alload_jax.config_parser import build_named, read_yaml
from alload_jax.data.prepare.inputs import MediaFolder
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.distributed.initialize import ClusterConfig
from alload_jax.errors import InputError
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.families import FAMILIES
from alload_jax.models.weights import read_transformer

DIGITS = str(Path(__file__).parents[1] / "configs" / "digits.yaml")
GOLDEN = Path(__file__).parent / "golden"
BASE = ["--run.folder", "r", "--data.folder", "d", "--planning.m_mem", "9"]
PREDICTOR = [*BASE, "--model.sparse_attention.selector", "predictor"]
LONGEST_LINE = 1300

WRONG_FILES = [
    ("callbacks: null", "callbacks is null; give a value, or leave the key out"),
    ("optimizer: {groups: null}", "optimizer.groups is null"),
    ("parameters: {trained: null}", "parameters.trained is null"),
    ("parameters: head", "parameters is 'head'; give its keys, such as {trained: ...}"),
    ("run: 3", "run is 3; give its keys, such as {folder: ...}"),
    ("callbacks: {name: profile}", "callbacks is {'name': 'profile'}; give a list"),
    ("callbacks: [profile]", "callbacks holds 'profile'; give mappings, as in - {key: value}"),
    ("callbacks: [{steps: 3}]", "callbacks: {'steps': 3} has no name"),
    ("callbacks: [{name: profil}]", "callback 'profil' is unknown; choose one of profile, "),
    ("callbacks: [{name: profile, stepz: 3}]", "callbacks: profile: key stepz is unknown"),
    ("callbacks: [{name: profile, '': 1}]", "callbacks: profile: '' is no key; remove it"),
    ("callbacks: [{name: profile, steps: 0}]", "callbacks: profile: steps is 0; it must be at"),
    (
        "callbacks: [{name: profile, steps: null}]",
        "callbacks: profile: steps is null; give a value",
    ),
    (
        'callbacks: [{name: time_limit, minutes: ".inf"}]',
        "time_limit.minutes is inf; give a finite",
    ),
    (
        "run: {epochs: 2, steps: null}\nplanning: {policy: balanced, recalibrate: epoch}",
        "run.epochs is 2, but with planning.recalibrate epoch the length of later epochs is not",
    ),
    ("callbacks: [{name: profile, 1: 2}]", "callbacks: profile: key 1 is unknown; `--help` lists"),
    ("optimizer: {groups: [head]}", "optimizer.groups holds 'head'; give mappings"),
    ("optimizer: {groups: [{clip_norm: 1}]}", "groups: {'clip_norm': 1} lacks parameters"),
    ("optimizer: {groups: [{parameters: [a], clip_norm: 0}]}", "optimizer.clip_norm is 0"),
    ("model: {family: none}", "model.family 'none' is unknown; choose one of wan"),
    ("objective: {name: none}", "objective.name 'none' is unknown; choose one of flow_matching"),
    ("data: {dataset: {name: none}}", "data.dataset 'none' is unknown; choose one of digits"),
    ("data: {source: {format: floppy}}", "data.source is given without data.source.name"),
    ("diffusion: {condition_dropout: 0}", "key diffusion is now objective; rename it"),
    ("planning: {max_delay: 8}", "each epoch holds all of its samples; leave it out"),
    ("data: {digits: {seed: 1}}", "key data.digits is now data.dataset, with name: digits"),
    ("sampling: {digits_read: 3}", "key sampling.digits_read is now evaluators: "),
    ("[1, 2]", "mine.yaml: is empty or holds no sections; start from configs/digits.yaml"),
    (
        "{objective: {weighting: token}, planning: {noise_scale: 30}}",
        "planning.noise_scale is 30 samples, but objective.weighting is token",
    ),
    (
        "{sampling: {high_noise: runs/high, grids: [{frames: 1, height: 8, width: 8}]}}",
        "sampling.high_noise is runs/high, which draws the beginning of prompts alone",
    ),
    (
        "{planning: {policy: sorted, m_mem: 64, noise_scale: 30}}",
        "planning.noise_scale is 30, by which sorted plans nothing",
    ),
    ("{", "mine.yaml: line 1: is not valid YAML"),
    ("a: &a [*a]", "it is nested deeper than 64 levels"),
    ("a: " + "[" * 5000, "it is nested deeper than 64 levels"),
]


def refusal(argv):
    """The line that refuses a command line; empty if it is accepted."""
    try:
        with_context(read_config(argv))
    except InputError as error:
        line = str(error)
        assert line.isprintable(), argv
        assert len(line) < LONGEST_LINE, argv
        return line
    return ""


def test_a_config_that_was_printed_is_read(tmp_path, capsys):
    argv = ["--config", DIGITS, "--model.text", "{dim: 4, length: 3}"]
    with pytest.raises(SystemExit):
        read_config([*argv, "--print_config"])
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert read_config(["--config", str(tmp_path / "mine.yaml")]) == read_config(argv)


def test_a_config_that_leaves_values_out_has_those_that_it_had():
    expected = values_in(GOLDEN / "defaults.yaml")
    names = {key: [{"name": each["name"]} for each in expected[key]] for key in _LISTS}
    flags = [f"--{key}={json.dumps(value)}" for key, value in names.items()]
    flags += ["--model.sparse_attention.selector=pooled", "--model.lora.rank=2"]
    flags += ["--sampling.grids=[{frames: 1, height: 8, width: 8}]", "--data.dataset.name=digits"]
    flags += ["--validation.folder=v", "--validation.source.name=parquet"]
    media = json.loads(json.dumps(dataclasses.asdict(MediaSettings())))
    media = {f"prepare.{key}": value for key, value in media.items()}
    assert values_of(read_config([*BASE, *flags])) | media == expected


@pytest.mark.parametrize(("text", "words"), WRONG_FILES, ids=[t[:50] for t, _ in WRONG_FILES])
def test_a_wrong_file_is_one_line(text, words, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert words in refusal(["--config", DIGITS, "--config", str(file)])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("config", "none.yaml", "none.yaml: no such file; give a config such as"),
        ("config", "none", "none: no such file"),
        ("config", "/", "/: Is a directory; give a config such as"),
        ("run.seed", "9223372036854775808", "run.seed is 9223372036854775808; give a number of at"),
        ("run.seed", "-9223372036854775809", "run.seed is -9223372036854775809; give a number of"),
        ("checkpoint.every", "#100", "checkpoint.every is '#100'; give a value, or null"),
        ("model.lora", " &x", "model.lora is ' &x'; give a value, or null"),
        ("run.folder", "gs://b/x", "run.folder is gs://b/x; it must be a path of a file system"),
        ("run.folder", "x\0", "run.folder is 'x\\x00'; remove the NUL character"),
        ("run.stepz", "3", "command line: key run.stepz is unknown; did you mean run.steps?"),
        ("optimizer.usual_identity", "3", "identity is unknown; did you mean optimizer.mu_dtype?"),
        ("zzzzzzzz", "3", "command line: key zzzzzzzz is unknown; `--help` lists all keys"),
        ("model.eps", ".inf", "model.eps is inf; give a finite number"),
        ("model.num_classes", "9223372036854775806", "775806; it must be at most 1,048,576"),
        ("data.source", "{name: os:system}", "'os:system' is not a dataclass"),
        ("data.source", "{name: 'os:_exit'}", "'os:_exit' is not a dataclass"),
        ("data.source.name", "pathlib:Path", "'pathlib:Path' is not a dataclass with a method"),
        ("data.source", "{format: floppy}", "data.source is given without data.source.name"),
        ("data.source.format", "floppy", "data.source is given without data.source.name"),
        ("run.steps", "3000000000", "run.steps is 3000000000; it must be at most 2,147,483,647"),
        ("model.text", "{dim: 0, length: 3}", "model.text.dim is 0; it must be at least 1"),
        ("model.lora", "3", "line: model.lora is 3; give its keys, such as {rank: 16}"),
        ("model.lora", "[1]", "line: model.lora is [1]; give its keys, such as {rank: 16}"),
        ("model", "wan", "line: model is 'wan'; give its keys, such as {family: ...}"),
        ("data.source", "[1]", "--data.source is '[1]'; give its keys"),
        ("data.source", "{", "--data.source is '{'; give its keys"),
        ("data.source", "3", "--data.source is '3'; give its keys"),
        ("run.folder", "", "run.folder is empty; name a folder"),
    ],
)
def test_a_wrong_flag_is_one_line(key, value, words):
    assert words in refusal([*BASE, f"--{key}", value])


def test_what_is_required_is_named(tmp_path):
    file = tmp_path / "mine.yaml"
    assert "give --config FILE, such as configs/digits.yaml" in refusal(["--run.folder", "r"])
    file.write_text("run: {folder: r}")
    assert refusal(["--config", str(file)]).startswith(f"{file}: lacks data.folder; add")
    flags = ["--config", DIGITS, "--optimizer.groups", "[{clip_norm: 1}]"]
    assert refusal(flags) == "a section or an item of a list lacks parameters; add it"
    flags = ["--config", DIGITS, "--experts.low_noise", "x"]
    assert refusal(flags) == "a section or an item of a list lacks boundary; add it"
    for key, kind in (("run.steps", "a whole number or null"), ("model.eps", "a finite number")):
        expected = f'key "{key}": expected {kind}; the value is empty'
        assert refusal(["--config", DIGITS, f"--{key}", ""]) == expected


FINITE = "expected a finite number"
OF_GROUP = "key model.lora.groups.alfa is unknown; did you mean model.lora.groups.alpha?"


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("model", "dim", "x", 'key "model.dim": expected a whole number. Got value: x'),
        ("model", "dim", "config", 'key "model.dim": expected a whole number. Got value: config'),
        ("run", "stepz", "3", "key run.stepz is unknown; did you mean run.steps?"),
        ("experts", "x", "3", "key experts.x is unknown; did you mean experts?"),
        ("model", "lora", "{groups: [{targets: [a], rank: 8, alfa: 4}]}", OF_GROUP),
        ("experts", "boundary", "x", f'key "experts.boundary": {FINITE}. Got value: x'),
        ("validation", "share", "nan", f'key "validation.share": {FINITE} or null. Got value: nan'),
    ],
)
def test_the_place_of_what_is_wrong_is_a_file_or_the_command_line(
    section, key, value, words, tmp_path
):
    file = tmp_path / "mine.yaml"
    file.write_text(f"{section}: {{{key}: {value}}}")
    told = refusal(["--config", DIGITS, "--config", str(file)])
    assert told.startswith(f"{DIGITS} or {file}: {words}")
    assert ("; `--help` explains every key" in told) == ("unknown" not in told)
    typed = "command line: " if "unknown" in words else ""
    for flags in ([f"--{section}.{key}", value], [f"--{section}.{key}={value}"]):
        assert refusal(["--config", DIGITS, *flags]) == typed + words


def test_numbers_of_64_bits_are_left_to_the_checks_of_their_keys():
    for value in (-(2**63), 2**63 - 1):
        assert "64 bits" not in refusal([*BASE, "--run.seed", str(value)])


def test_context_groups_split_samples_where_one_of_the_policies_can():
    for policy in ("balanced", "auto"):
        argv = ["--config", DIGITS, "--mesh.context", "2", "--planning.policy", policy]
        assert with_context(read_config(argv)).planning.context == 2
        assert read_config([*argv, "--planning.noise_scale", "30"]).planning.noise_scale == 30
    argv[-1] = "equal_tokens"
    assert with_context(read_config(argv)).planning.context == 1


def test_a_flag_cannot_change_the_family_of_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {family: wan}")
    argv = ["--config", DIGITS, "--config", str(file)]
    assert f"--model.family is other, but {file} has model.family wan and its keys" in refusal(
        [*argv, "--model.family", "other"]
    )
    assert read_config([*argv, "--model.family=wan"]) == read_config(argv)
    file.write_text("planning: {policy: equal_tokens}")  # the keys of all policies are the same
    assert read_config([*argv, "--planning.policy", "first_fit"]).planning.policy == "first_fit"


def test_the_last_file_and_the_flags_win_and_aliases_are_values(tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    content = {"callbacks": [{"name": "profile", "first": 2}], "model": {"dim": 64}}
    file.write_text(yaml.safe_dump(content))
    flags = ["--model.num_layers", "3", "--data.dataset.seed", "7"]
    config = read_config(["--config", DIGITS, "--config", str(file), *flags])
    assert (config.model.dim, config.model.num_layers, config.model.num_heads) == (64, 3, 4)
    assert config.data.dataset.seed == 7
    assert [(each.name, each.first, each.steps) for each in config.callbacks] == [("profile", 2, 3)]
    assert [each.name for each in config.trackers] == ["tensorboard"]
    for _ in range(2):
        write_config(config, tmp_path / "a" / "b" / "written.yaml")
    assert read_config(["--config", str(tmp_path / "a" / "b" / "written.yaml")]) == config
    # Of sweeps and of hands; YAML reads other things, or nothing.
    for name in ("1e-4", "1E5", "+1.5e3", "1e-4x", "._5", "#1", "&a b", "---"):
        argv = ["--config", DIGITS, f"--run.folder={name}", f"--data.exclude={name}"]
        write_config(read_config(argv), tmp_path / "named.yaml")
        assert read_config(["--config", str(tmp_path / "named.yaml")]).data.exclude == name
    for name in ("1e-4", "2026", "no", "lr: 3", "# 7"):
        argv = [
            "--config",
            DIGITS,
            "--trackers",
            json.dumps([{"name": "mlflow", "experiment": name}]),
        ]
        write_config(read_config(argv), tmp_path / "named.yaml")
        (tracker,) = read_config(["--config", str(tmp_path / "named.yaml")]).trackers
        assert tracker.experiment == name
    monkeypatch.chdir(tmp_path)
    assert read_config(["--config", "digits", f"--config={file}", *flags]) == config
    # Only --config takes an example's name.
    argv = ["--config", "digits", "--run.folder", "digits"]
    assert read_config(argv).run.folder == "digits"
    Path("digits").write_text("run: {steps: &n 7}\ncheckpoint: {every: *n}\n")
    assert read_yaml("digits")["checkpoint"]["every"] == 7
    assert read_config(["--config", DIGITS, "--config=digits"]).run.steps == 7
    for section in (["--model", "{lora: {alpha: 4}}"], ["--model={lora: {alpha: 4}}"]):
        argv = [*BASE, "--model.lora.rank", "32", *section, "--model.lora.dropout", "0.5"]
        assert read_config(argv).model.lora == LoraConfig(32, 4.0, dropout=0.5)
    sections = ["--model", "{family: hunyuan_video}", "--data={dataset: {name: digits}}"]
    found = read_config([*BASE, *sections, "--data.dataset.pairs", "0.5"])
    assert (found.model.family, found.data.dataset.pairs) == ("hunyuan_video", 0.5)
    assert read_config([*BASE, "--model.family", "hunyuan_video", "--model", "{dim: 64}"])
    assert "nonsense" in refusal([*BASE, "--data", "{dataset: {name: nonsense}}"])


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*/*/transformer")))
def test_the_architecture_is_that_of_the_weights_where_the_model_gives_none(folder, tmp_path):
    """Keys that a file or flag gives win; a run's own config needs no weights."""
    file, released = tmp_path / "mine.yaml", read_transformer(folder)
    file.write_text("model: {lora: {rank: 2}, dtype: bfloat16, text: {length: 9}}")
    argv = [*BASE, "--config", str(file), "--run.initial_weights", str(folder)]
    section = json.dumps({"folder": "x", "initial_weights": str(folder)})  # in one flag
    assert read_config([*BASE, "--run", section]).model == released
    one = read_config([*BASE, "--run", section, "--model", '{"num_layers": 7}']).model
    assert one == dataclasses.replace(released, num_layers=7)
    config = read_config([*argv, "--model.num_layers", "7"])
    changed = {"num_layers": 7, "dtype": "bfloat16", "lora": LoraConfig(2)}
    text = dataclasses.replace(released.text, length=9)
    assert config.model == dataclasses.replace(released, text=text, **changed)
    write_config(config, tmp_path / "config.yaml")
    gone = ["--config", str(tmp_path / "config.yaml"), "--run.initial_weights", "gone"]
    assert read_config(gone).model == config.model


def test_weights_without_a_description_need_a_model_that_gives_one(tmp_path):
    folder = GOLDEN / "wan" / "t2v"
    for place, words in (
        ("gone", "gone, which is not there; name a transformer folder, or"),
        (tmp_path, "no config.json there describes the model"),
        (folder, f"{folder}: is a whole pipeline; did you mean {folder / 'transformer'}?"),
    ):
        assert words in refusal([*BASE, "--run.initial_weights", str(place)])
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file, content in zip(files, ("{dim: 32}", "{lora: {rank: 2}}"), strict=True):
        file.write_text(f"model: {content}")
    length = ["--run.initial_weights", "gone", "--model.text.length", "256"]
    assert "gone, which is not there" in refusal([*BASE, *length])
    for more in (["--model.dim=32"], ["--model", "{dim: 32}"], [f"--config={f}" for f in files]):
        assert not refusal([*BASE, "--run.initial_weights", "gone", *more])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--parameters.frozen_dtype float8", "nothing is frozen"),
        ("--parameters.frozen_memory host", "nothing is frozen"),
        ("--planning.ranks_mode independent --planning.policy first_fit", "packed rows have one"),
        ("--optimizer.decay_steps 3", "optimizer.schedule is not wsd"),
        ("--objective.min_snr_gamma 2.0", "objective.noise_weighting is not min_snr"),
        ("--planning.ranks_per_group 2 --planning.policy balanced", "packed rows have one"),
        ("--planning.align 4 --planning.policy sorted", "planning.policy is sorted"),
        ("--planning.row_tokens 64 --planning.policy first_fit", "planning.policy is first_fit"),
        ("--planning.max_programs 3 --planning.policy balanced", "planning.policy is balanced"),
        ("--objective.timesteps.mode_scale 0.5", "distribution is logit_normal"),
        ("--objective.timesteps.std 2.0 --objective.timesteps.distribution mode", "distribution"),
        ("--sampling.every 3 --sampling.grids []", "sampling.grids and sampling.prompts are"),
    ],
)
def test_a_value_that_nothing_reads_is_told(flags, why):
    key, value = flags.removeprefix("--").split()[:2]
    (told,) = without_effect(read_config([*BASE, *flags.split()]))
    assert told.startswith(f"{key} is {value}, but {why}")


def test_ready_configs_have_no_value_that_nothing_reads():
    for path in Path(DIGITS).parent.glob("*.yaml"):
        assert not without_effect(read_config(["--config", str(path), *BASE])), path
    read = ["--model.lora.rank", "2", "--parameters.frozen_dtype", "float8"]
    assert not without_effect(read_config([*BASE, *read, "--planning.ranks_mode", "independent"]))
    read = ["--planning.align", "4", "--planning.max_programs", "3"]
    assert not without_effect(read_config([*BASE, "--planning.policy", "auto", *read]))


def test_each_expert_has_its_part_of_the_noise_levels():
    for levels, high, low in (
        ("[0.9, 0.5, 1.0, 0.8, 0.1]", (0.9, 1.0, 0.8), (0.5, 0.8, 0.1)),
        ("[0.5]", (0.9,), (0.5,)),
    ):
        argv = [*BASE, "--experts.boundary", "0.8", "--validation.noise_levels", levels]
        experts = experts_of(read_config(argv))
        timesteps = [each.objective.timesteps for each in experts]
        assert [(each.lowest, each.highest) for each in timesteps] == [(0.8, 1.0), (0.0, 0.8)]
        assert [each.validation.noise_levels for each in experts] == [high, low]


def test_predictors_are_trained_by_an_optimizer_of_their_own():
    (group,) = read_config(PREDICTOR).optimizer.groups
    assert group.parameters == ("sparse_attention/selector",)
    assert (group.learning_rate, group.weight_decay) == (1e-3, 0.0)
    own = [*PREDICTOR, "--optimizer.groups", "[{parameters: [selector], learning_rate: 0.5}]"]
    assert [each.learning_rate for each in read_config(own).optimizer.groups] == [0.5]
    prodigy = [*PREDICTOR, "--optimizer.name", "prodigy", "--optimizer.learning_rate", "1"]
    assert [each.name for each in read_config(prodigy).optimizer.groups] == ["adamw"]
    pooled = [*BASE, "--model.sparse_attention.selector", "pooled"]
    assert read_config(pooled).optimizer.groups == ()
    frozen = [*PREDICTOR, "--parameters.trained", "[self_attention]"]
    assert "parameters freezes the predictors" in refusal(frozen)


# ---------------------------------------------------------------- any value of any key

WRONG_VALUES = [
    *("", "null", "true", "abc", "-1", "0", "[]", "{}", "[1, [2]]", "{a: {b: 1}}", "- x\n- y"),
    *("1e999", ".nan", ".inf", "-.inf", "1e308", "5e-324", "2020-13-45", "!!binary aGk="),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "9" * 5000),
    *("[" * 2000, '"a\\0b"', '"\\e[31m\\n"', "&a [*a]", "\ud800", "x" * 10_000),
]
NAMED = {"data.source": "store", "data.dataset": "digits", "validation.source": "parquet"}


def keys():
    """Every key of a config, with those of a data set, a source and each named part."""
    kinds = {part.key: part.kind(part.default or NAMED[part.key]) for part in _PARTS}
    kinds |= dict.fromkeys(_LISTS, list[dict[str, Any]])
    for key in config_parser._keys(config_parser._typed(Config, kinds)):
        named = [f"--{part}.name={name}" for part, name in NAMED.items() if key.startswith(part)]
        yield named, key


PAIRS = [(*key, value) for key in keys() for value in WRONG_VALUES]


@pytest.mark.parametrize("every", [pytest.param(5, marks=pytest.mark.slow), 240])
def test_every_key_has_its_turn_with_some_wrong_values_which_are_one_line(every):
    for named, key, value in PAIRS[::every]:
        refusal([*BASE, *named, f"--{key}", value])


def test_wrong_values_in_lists_of_named_parts_are_refused():
    for value in (".nan", "9223372036854775808"):  # before items are built
        item = f"[{{name: profile, steps: {value}}}]"
        assert "callbacks.0.steps is " in refusal([*BASE, "--callbacks", item])
    for key, registry in _LISTS.items():
        for name in registry.names():
            for field in dataclasses.fields(registry.get(name)):
                with suppress(InputError):
                    build_named(key, {"name": name, field.name: {"a": 1}}, registry)


def sections():
    """Configs with bounds, each class once."""
    parts = {f"--model.{name}": "{dim: 8}" for name in ("text", "image")}
    parts |= {"--model.sparse_attention": "{}", "--model.lora": "{}"}
    one = read_config([*BASE, *chain(*parts.items())])
    for section in (one, one.data, one.objective, one.model):
        yield from filter(dataclasses.is_dataclass, vars(section).values())
    yield from (FAMILIES.get(name).config() for name in FAMILIES.names())
    for name in ("sorted", "balanced"):
        yield read_config([*BASE, "--planning.policy", name]).planning
    for registry in _LISTS.values():
        yield from (registry.get(name)() for name in registry.names())
    yield from (MediaSettings(), MediaFolder("x"), ClusterConfig("host:9", 9, 0))


def bound_of(section, name, value):
    """What a value of a field must be, as its refusal says; empty if it is allowed."""
    try:
        dataclasses.replace(section, **{name: value})
    except InputError as error:
        words = name.replace("_", "[-_]") + " is .*; it must be (.*)"
        return (re.findall(words, str(error)) or [""])[0]
    except (ArithmeticError, AttributeError, TypeError, ValueError):  # it is no number
        return ""
    return ""


LEAST = r"(?:above|at least|from|between) (-?[\d.]+)|^([\d.]+) (?:to|or more)"
MOST = r"(?:below|at most) ([\d.,^]+)|(?:to|and) (-?\d[\d.,]*)"


def test_bounds_are_those_that_are_told():
    bounded = set()
    for section in sections():
        for name in (field.name for field in dataclasses.fields(section)):
            for far, pattern, out in ((-1e30, LEAST, -1), (1e30, MOST, 1)):
                words = bound_of(section, name, far)
                if not (found := re.search(pattern, words)):
                    continue
                bound = next(filter(None, found.groups())).rstrip(".,").replace(",", "")
                bound = float(eval(bound.replace("^", "**")))  # such as 2^32
                step = out * (2 if "even" in words else 0.01)
                allowed = "above" not in found[0] and "below" not in found[0]
                allowed &= "between" not in words
                given = {bound + step: False, bound: allowed, bound - step: True}
                told = {value: bound_of(section, name, value) != words for value in given}
                assert told == given, (section, name, words)
                assert bound_of(section, name, float("nan")), (section, name)
                bounded.add((type(section), name, out))
    assert len(bounded) > 130
