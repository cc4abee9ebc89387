"""What is wrong with a config is one line that names the place, the value and the remedy."""

from pathlib import Path

import pytest
import yaml

from alload_jax.config import read_config
from alload_jax.config_parser import read_yaml
from alload_jax.errors import InputError

DIGITS = str(Path(__file__).parents[1] / "configs" / "digits.yaml")

WRONG = [
    ("callbacks: null", "callbacks is null; give a value, or leave the key out"),
    ("parameters: null", "parameters is null"),
    ("optimizer: {groups: null}", "optimizer.groups is null"),
    ("parameters: {trained: null}", "parameters.trained is null"),
    ("data: {loader: null}", "data.loader is null"),
    ("parameters: head", "parameters is 'head'; give its keys, such as trained: ..."),
    ("run: 3", "run is 3; give its keys, such as folder: ..."),
    ("callbacks: {name: profile}", "callbacks is {'name': 'profile'}; give a list"),
    ("callbacks: [profile]", "callbacks holds 'profile'; give mappings, as in - {key: value}"),
    ("callbacks: [{steps: 3}]", "callbacks: {'steps': 3} has no name"),
    ("callbacks: [{name: profil}]", "callback 'profil' is unknown; choose one of profile, "),
    ("callbacks: [{name: profile, stepz: 3}]", "callbacks: profile: key stepz is unknown"),
    ("callbacks: [{name: profile, steps: 0}]", "callbacks: profile: steps is 0; it must be at"),
    ("callbacks: [{name: time_limit, minutes: 0}]", "minutes is 0.0; it must be above 0"),
    ("optimizer: {groups: [head]}", "optimizer.groups holds 'head'; give mappings"),
    (
        "optimizer: {groups: [{clip_norm: 1}]}",
        "optimizer.groups: {'clip_norm': 1} lacks parameters",
    ),
    ("optimizer: {groups: [{parameters: [a], clip_norm: 0}]}", "optimizer.clip_norm is 0"),
    ("model: {family: none}", "model.family 'none' is unknown; choose one of wan"),
    ("objective: {name: none}", "objective.name 'none' is unknown; choose one of flow_matching"),
    ("data: {dataset: {name: none}}", "data.dataset 'none' is unknown; choose one of digits"),
    ("diffusion: {condition_dropout: 0}", "key diffusion is now objective; rename it"),
    ("data: {digits: {seed: 1}}", "key data.digits is now data.dataset, with name: digits"),
    ("sampling: {digits_read: 3}", "key sampling.digits_read is now evaluators: "),
    ("[1, 2]", "is empty or holds no sections; start from configs/digits.yaml"),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[text for text, _ in WRONG])
def test_a_wrong_config_is_one_line(text, words, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        read_config(["--config", DIGITS, "--config", str(file)])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match=r"none\.yaml: no such file; give a config such as"):
        read_config(["--config", "none.yaml"])


def test_an_example_is_named_without_its_path(tmp_path, monkeypatch):
    whole = read_config(["--config", DIGITS, "--run.steps", "3"])
    monkeypatch.chdir(tmp_path)
    assert read_config(["--config", "digits", "--run.steps", "3"]) == whole
    assert read_config(["--config=digits", "--run.steps", "3"]) == whole
    Path("digits").write_text("run: {steps: 7}\n")
    assert read_config(["--config", DIGITS, "--config", "digits"]).run.steps == 7
    with pytest.raises(InputError, match="none: no such file"):
        read_config(["--config", "none"])


def test_a_flag_cannot_change_the_family_of_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {family: wan}")
    with pytest.raises(InputError, match=r"--model.family is other, but .*mine.yaml has .* wan"):
        read_config(["--config", DIGITS, "--config", str(file), "--model.family", "other"])


def test_the_last_file_and_the_flags_win(tmp_path):
    file = tmp_path / "mine.yaml"
    content = {"callbacks": [{"name": "profile", "first": 2}], "model": {"dim": 64}}
    file.write_text(yaml.safe_dump(content))
    flags = ["--model.num_layers", "3", "--data.dataset.seed", "7"]
    config = read_config(["--config", DIGITS, "--config", str(file), *flags])
    assert (config.model.dim, config.model.num_layers, config.model.num_heads) == (64, 3, 4)
    assert config.data.dataset.seed == 7
    assert [(each.name, each.first, each.steps) for each in config.callbacks] == [("profile", 2, 3)]
    assert config == read_config(["--config", DIGITS, "--config", str(file), *flags])


SPARSE = ["--run.folder", "r", "--data.folder", "d", "--planning.m_mem", "9"]
PREDICTOR = [*SPARSE, "--model.sparse_attention.selector", "predictor"]


def test_predictors_have_an_optimizer_of_their_own():
    (group,) = read_config(PREDICTOR).optimizer.groups
    assert group.parameters == ("sparse_attention/selector",)
    assert (group.learning_rate, group.weight_decay) == (1e-3, 0.0)
    own = [*PREDICTOR, "--optimizer.groups", "[{parameters: [selector], learning_rate: 0.5}]"]
    assert [each.learning_rate for each in read_config(own).optimizer.groups] == [0.5]
    pooled = [*SPARSE, "--model.sparse_attention.selector", "pooled"]
    assert read_config(pooled).optimizer.groups == ()


def test_frozen_predictors_are_refused():
    with pytest.raises(InputError, match="parameters freezes the predictors"):
        read_config([*PREDICTOR, "--parameters.trained", "[self_attention]"])


def test_aliases_that_stand_for_too_many_values_are_refused_at_once(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    for text in ("\n".join(lines), "a: &a [*a]", "a: " + "[" * 5000):
        bad = tmp_path / "bomb.yaml"
        bad.write_text(text)
        with pytest.raises(InputError, match=r"bomb\.yaml: .*it (holds more|is nested)"):
            read_config(["--config", str(bad)])


def test_aliases_are_values(tmp_path):
    common = tmp_path / "common.yaml"
    common.write_text("run: {steps: &n 7}\ncheckpoint: {every: *n}\n")
    assert read_yaml(str(common))["checkpoint"]["every"] == 7


@pytest.mark.parametrize("text", ["{format: floppy}", "floppy", "[1]", "{", "3"])
def test_a_section_in_one_flag_is_a_mapping_with_a_name(text):
    with pytest.raises(InputError, match=r"data\.source (is given without|is .*; give its keys)"):
        read_config(["--planning.m_mem", "40", "--data.source", text])
