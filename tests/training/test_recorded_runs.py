"""Runs of many features go as they went: what they compute and say is kept in tests/golden.

Where a change is meant to change it, `RECORD=1 pytest tests/training/test_recorded_runs.py` writes
it anew, and the difference of the file shows what has changed.
"""

import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml
from training_runs import metrics_of, run_here

RECORDED = Path(__file__).parents[1] / "golden" / "runs.json"
TIMED = re.compile("second|wait|speed|drift")
SAID = re.compile("data|steps|weights|validation|gradient|warning|note|model")
COMPUTED = re.compile(r" · [\d.]+ s$|(?<=(loss|west) )[\d.]+|(?<=: )[\d.]+(?= tokens$)")

COMMON = """
run: {steps: 6, seed: 3}
data:
  dataset: {name: digits, mix: [[1, 8, 8, 50], [1, 8, 16, 12], [5, 8, 8, 24], [9, 16, 16, 5]]}
  loader: {threads: 1, read_ahead: 2}
model: {in_channels: 4, dim: 16, ffn_dim: 24, num_heads: 2, num_layers: 2, patch_size: [1, 4, 4]}
checkpoint: {every: 3, keep_best: 1}
validation: {share: 0.2, every: 2, noise_levels: [0.2, 0.7], max_samples: 6}
sampling: {steps: 2, grids: [{frames: 5, height: 8, width: 8, rows: 1}]}
trackers: []
"""
RUNS = {
    "packed": """
data: {dataset: {pairs: 0.5}}
planning:
  {policy: balanced, m_mem: 48, p: 1.5, micro_batches_per_step: 2, align: 2, look_ahead: 2}
model: {freq_dim: 8}
objective:
  condition_dropout: 0.3
  given_first_frame: 0.4
  weighting: token
  noise_weighting: min_snr
  min_snr_gamma: 2.0
  timesteps: {distribution: mode, shift: 2.0, shift_power: 0.3}
optimizer:
  name: muon
  learning_rate: 0.01
  schedule: wsd
  decay_steps: 2
  warmup_steps: 2
  clip_norm: 0.5
  ema_decay: 0.9
  gradient_mean: step
  groups: [{parameters: [head], learning_rate: 0.02, weight_decay: 0.1}]
callbacks: [{name: gradient_noise, every: 4, steps: 2}]
""",
    "sparse": """
data: {dataset: {mix: [[1, 8, 8, 20], [9, 16, 16, 12]], motion: drift}}
planning: {policy: dual_constraint, m_mem: 256, ranks_mode: independent}
model:
  patch_size: [1, 2, 2]
  freq_dim: 8
  qk_norm: false
  scan_layers: false
  position_embedding: true
  residual_dtype: float32
  sparse_attention:
    min_tokens: 128
    dense_steps: 2
    profile_every: 1
    sparse_profile_every: 1
    min_sparsity: 0.1
    min_recall: 0.1
    max_density: 0.9
    coverage: 0.5
    anneal_steps: 2
    capacities: [0.5]
objective: {weighting: sample, timesteps: {std: 1.4, shift_seq_len: 4}}
optimizer: {name: adamw8bit, learning_rate: 0.01, warmup_steps: 1}
""",
    "joint": """
planning: {policy: first_fit, m_mem: 64, look_ahead: 3}
model:
  family: hunyuan_video
  num_layers: 1
  lora: {rank: 2, alpha: 3.0, targets: [head, query], dropout: 0.2}
objective: {noise_weighting: cosmap}
optimizer: {learning_rate: 0.02, schedule: linear, warmup_steps: 1, accumulate_dtype: bfloat16}
parameters: {frozen_dtype: bfloat16}
""",
}


def merged(config, changes):
    """The config with other values, at any depth; lists are replaced."""
    if not isinstance(config, dict) or not isinstance(changes, dict):
        return changes
    return config | {key: merged(config.get(key), value) for key, value in changes.items()}


def ran(name, steps):
    """What a run of RUNS computes in each step, and what it says of itself and at its end."""
    config = merged(yaml.safe_load(COMMON), yaml.safe_load(RUNS[name]))
    own = {"run": {"steps": steps, "folder": name}, "data": {"folder": "data"}}
    Path("config.yaml").write_text(yaml.safe_dump(merged(config, own)))
    ended = run_here("--config", "config.yaml", devices=2)
    assert ended.returncode == 0, ended.stderr
    lines = filter(SAID.match, (ended.stdout + ended.stderr).split("\n"))
    summary = json.loads((Path(name) / "summary.json").read_text())
    values = [*metrics_of(Path(name)), summary]
    return {
        "values": [{k: v for k, v in each.items() if not TIMED.search(k)} for each in values],
        "lines": [COMPUTED.sub("#", each) for each in lines],
    }


def differs(found, known, place=""):
    """Where values are not those of the record; "" for nowhere."""
    if isinstance(known, dict) and found.keys() == known.keys():
        each = (differs(found[key], known[key], f"{place}/{key}") for key in known)
        return next(filter(None, each), "")
    if isinstance(known, list) and len(found) == len(known):
        pairs = enumerate(zip(found, known, strict=True))
        return next(filter(None, (differs(*pair, f"{place}/{n}") for n, pair in pairs)), "")
    if isinstance(known, float):
        same = math.isclose(found, known, rel_tol=0.02, abs_tol=1e-6)
    else:
        same = found == known
    return "" if same else f"{place}: {found} is not {known}"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_as_it_went(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {"begun": ran(name, 6), "continued": ran(name, 9)}
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("RECORD"):
        known[name] = found
        RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert not differs(found, known.get(name))
