"""Figures of README.md and docs/results.md are those of the files that they link."""

import re
import runpy
import statistics
from pathlib import Path

from alload_jax.config import read_config
from alload_jax.files import read_json
from alload_jax.planning.architecture import from_fields
from benchmarks.paired_runs import ratios_of
from pallas_kernels.layernorm_modulate import tuning as norm_tuning

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

EPOCHS = {
    "equal-tokens": "equal tokens, independent: AdaptiveLoad's baseline",
    "dual-constraint": "`dual_constraint`, independent: AdaptiveLoad's method",
    "dual-constraint-shared": "`dual_constraint`, synchronous",
    "sorted": "`sorted`, independent",
    "knapformer-bags-of-two": "KnapFormer's rule, bags of two GPUs",
    "PyTorch ddp bf16_copy": "diffusers' model in PyTorch 2.11",
    "balanced": "`balanced`",
}
"""Names of measured cases in the results."""


TOKENS = 32_760
"""Of a clip of 81 frames of 480×832."""


def epoch(name):
    """The cases of a measured epoch by name, their tokens/s, and the same with the start."""
    content = read_json(ROOT / f"benchmarks/results/epoch_{name}_x2_h200.json")
    cases = {case["case"]: case for case in content["cases"]}
    steps = {name: case["tokens_per_second"] for name, case in cases.items()}
    spent = {name: case["first_step_seconds"] + case["seconds"] for name, case in cases.items()}
    return cases, steps, {name: case["tokens"] / spent[name] for name, case in cases.items()}


def section(title):
    return (DOCS / "results.md").read_text().partition(f"### {title}\n")[2].partition("###")[0]


def test_the_figures_of_the_epochs_are_those_of_their_files():
    def cell(of, name):
        return f"{of[name]:,.0f} ({of[name] / of['balanced']:.2f}×)"

    page, count = section("An epoch"), 0
    for cases, steps, start in map(epoch, ("again", "pytorch", "lora200")):
        for name, case in cases.items():
            idle = f"{100 * case['idle']:.1f} %" if "idle" in case else "–"
            words = (idle, str(case["programs"]), f"{case['first_step_seconds']:.0f} s")
            row = (EPOCHS[name], cell(steps, name), *words, cell(start, name))
            assert f"| {' | '.join(row)} |" in page
            count += 1
    assert len(re.findall(r"×\) \|$", page, re.M)) == count
    cases, steps, _ = epoch("pytorch")
    method, ours = cases["dual-constraint"], cases["balanced"]
    more = 100 * (steps["balanced"] / steps["dual-constraint"] - 1)
    idle, imbalance = (
        f"{100 * method[name]:.1f} → {100 * ours[name]:.1f} %" for name in ("idle", "imbalance")
    )
    before, after = (
        f"{each['with_tokens']:.2f}, {each['with_cost']:.2f}" for each in (method, ours)
    )
    for claim in (
        f"+27.2 % | `balanced` over the method, here its baseline too: +{more:.1f} % |",
        f"39 → 18.9 % | predicted: {imbalance}; idle, measured: {idle} |",
        f"baseline: 0.35, – | {before} → {after} |".replace("-", "−"),
    ):
        assert claim in page
    _, steps, _ = epoch("lora200")
    shared = steps["dual-constraint-shared"]
    assert f"loses {100 - 100 * steps['balanced'] / shared:.1f} %" in page

    def change(of, name):
        ours = of["balanced"]
        return f"| {of[name]:,.0f} tokens/s | {ours:,.0f} tokens/s ({ours / of[name]:.2f}×) |"

    readme = (ROOT / "README.md").read_text()
    assert f"[buckets are {100 * shared / steps['balanced'] - 100:.0f} % faster]" in readme
    _, steps, start = epoch("again")
    assert f"trains at {steps['balanced'] / steps['equal-tokens']:.2f}× the tokens" in readme
    rows = [(steps, "equal-tokens"), (steps, "dual-constraint-shared")]
    for row in map(change, *zip(*rows, (start, "dual-constraint-shared"), strict=True)):
        assert row in readme
    _, steps, start = epoch("mixed_resolution")
    for of, fastest in ((steps, "sorted"), (start, "knapformer-bags-of-two")):
        assert max(of.keys() - {"balanced"}, key=of.get) == fastest
    best, best_cold, bags, cold = (
        f"{of[name] / of['balanced']:.2f}×"
        for name in ("sorted", "knapformer-bags-of-two")
        for of in (steps, start)
    )
    assert f"`sorted` had {best} the tokens/s of `balanced`, with start {best_cold};" in page
    assert f"KnapFormer's rule with bags of two GPUs {bags} and {cold}:" in page
    assert f"had {best} the\ntokens/s of `balanced` (`sorted`), with start {cold} (Knap" in readme
    before = start["balanced"] / start["dual-constraint-shared"]
    assert f"the third figure was {before:.2f}×" in readme


def test_the_figures_of_several_processes_are_those_of_their_files():
    page, readme = (DOCS / "many-gpus.md").read_text(), (ROOT / "README.md").read_text()
    hosts, slowed = (
        {
            each["case"]: each
            for each in read_json(ROOT / f"benchmarks/results/{name}.json")["cases"]
        }
        for name in ("processes_hosts_x2_h200", "processes_x2_h200")
    )
    cases = ("one", "several", "hosts", "overlapped")
    rates = [hosts[name]["rate"] for name in cases]
    one, several = rates[:2]
    for name, rate in zip(cases, rates, strict=True):
        told = hosts["predicted"]["rates"].get(name)
        assert f"| {rate:,.0f} ({rate / one:.2f}×) | {f'{told:,.0f}' if told else '–'} |\n" in page
    alone = slowed["one"]["rate"]
    for rate in (alone, *slowed["slowed"]["rate_of_epochs"][-2:]):
        assert f" | {rate:,.0f} ({rate / alone:.2f}×) |\n" in page
    words = ["--config", str(ROOT / "benchmarks/epoch.yaml"), "--model.num_layers", "4"]
    program = runpy.run_path(str(ROOT / "benchmarks/processes.py"))
    assert program["predicted"](hosts, read_config(words).model, 2) == {
        key: value for key, value in hosts["predicted"].items() if key != "case"
    }
    two, many = (program["predicted"](hosts, read_config(words).model, n, 8) for n in (2, 128))
    default, settings = (
        [f"{each['rates'][name] / one:.2f}×" for each in (two, many)]
        for name in ("hosts", "overlapped")
    )
    assert f"left out: {default[0]} on 2 hosts and {default[1]} on 128; with" in page
    assert f"settings\n{settings[0]} on both" in page
    assert settings[0] == settings[1]
    row = f"| {one:,.0f} tokens/s | {several:,.0f} tokens/s ({several / one:.2f}×) |"
    assert row in readme
    for number in (1, 2, 3):
        name = f"processes_killed_x2_h200_{number}.json"
        (case,) = read_json(ROOT / f"benchmarks/results/{name}")["cases"]
        told = re.search(rf"\[(\d+)\]\(../benchmarks/results/{name}\)", page)[1]
        assert told == f"{case['kill_to_first_new_step_seconds']:.0f}"
        equal = re.search(r"(\d), (\d) and (\d) of 8 repeated losses", page)[number]
        assert (int(equal), 8) == (case["losses_equal"], case["steps_repeated"])


def test_the_time_to_a_loss_is_that_of_its_file():
    page, found = (DOCS / "walks.md").read_text(), {}
    for name in ("time_to_loss_walks_h200", "time_to_loss_walks_x2_h200"):
        for run in read_json(ROOT / f"benchmarks/results/{name}.json")["runs"]:
            loss = run["validation"][-1]["validation/loss"]
            share = run["time_to_last_loss_of"]["balanced_0"]
            told = f"{share:.2f}".removesuffix(".00") if share else "not reached"
            cells = (f"{run['samples'] / run['steps']:.0f}", f"{loss:.3f}", told)
            found.setdefault(run["folder"], []).append(cells)
    for name, both in found.items():
        label = name.replace("_noise", "`, [`noise_scale: 32").removesuffix("_0")
        cells = " | ".join(", ".join(dict.fromkeys(cells)) for cells in zip(*both, strict=True))
        assert re.search(rf"^\| `{re.escape(label)}`.* \| {re.escape(cells)} \|$", page, re.M), name


def test_the_rates_of_14b_are_those_of_its_files():
    model = read_config(["--config", str(ROOT / "benchmarks/epoch_14b.yaml")]).model
    flops = from_fields(model.architecture()).step_flops(TOKENS) / TOKENS / 2
    page, (_, steps, _) = section("Wan 2.1 14B on two GPUs"), epoch("14b")
    base = steps["offload_attention"]
    for label, name in (("bfloat16", "offload_attention"), ("float8", "float8")):
        speed = f" ({steps[name] / base:.2f}×)" if name == "float8" else ""
        assert f"| {label} | {steps[name]:,.0f}{speed} | {steps[name] * flops / 1e12:.0f} |" in page
    for name in ("14b_auto", "14b_float8"):
        ((case,), (rate,), _) = (list(each.values()) for each in epoch(name))
        peak = max(case["peak_bytes"]) / 1e9
        said = f"_{name}_x2_h200.json) at {rate * flops / 1e12:.0f} TFLOP/s in {peak:.1f} GB"
        assert said in page.replace("\n", " ")


def test_the_shares_of_kernels_are_those_of_what_auto_takes():
    content = read_json(ROOT / "benchmarks/results/kernels_h200.json")
    names = ("kernel", "direction", "width", "implementation")
    found = {tuple(case[name] for name in names): case for case in content["cases"]}
    page = section("Token functions through Triton, Mosaic and XLA")
    readme = (ROOT / "README.md").read_text()
    widths = []
    for line in re.findall(r"^\|.*", page, re.M):
        label, direction, *cells = map(str.strip, line.strip("|").split("|"))
        if direction == "pass":
            widths = [int(cell.replace(",", "")) for cell in cells]
        if label not in KERNELS:
            continue
        for width, cell in zip(widths, cells, strict=True):
            case, mosaic = (KERNELS[label], direction, width), False
            if "norm_m" in case[0]:
                name = "residual_forward" if "residual" in case[0] else "forward"
                faster = norm_tuning.forward_faster_than_triton(name, width, 2)
                mosaic = direction == "backward" or faster
            elif "rms" in case[0]:
                mosaic = (*case, "mosaic") in found
            assert f"{found[*case, ('triton', 'mosaic')[mosaic]]['of_copy']:.2f}" == cell, case
    content = read_json(ROOT / "benchmarks/results/kernels_again_h200.json")
    again = {tuple(case[name] for name in names): case for case in content["cases"]}
    assert max(abs(again[key]["of_copy"] - found[key]["of_copy"]) for key in found) < 0.05
    for label, direction, name in (
        ("layernorm_modulate, residual", "forward", "triton"),
        ("rms_norm_rotary", "backward", "mosaic"),
    ):
        xla, ours = (again[label, direction, 1536, each]["us"] for each in ("xla", name))
        assert f"| {xla:.0f} µs | {ours:.0f} µs ({xla / ours:.2f}×) |" in readme


KERNELS = {
    "LayerNorm-Modulate": "layernorm_modulate, plain",
    "after a residual": "layernorm_modulate, residual",
    "32 segments": "layernorm_modulate, packed",
    "RMSNorm with rotary": "rms_norm_rotary",
    "bias and GELU": "bias_gelu",
}


def test_the_loss_and_the_speed_of_sparse_attention_are_those_of_one_file():
    content = read_json(ROOT / "benchmarks/results/sparse_runs_h200.json")
    middle = [case | {"held_out": case["held_out"][:1]} for case in content["cases"]]
    pages = [section("Loss and speed of the same runs"), (ROOT / "README.md").read_text()]
    pages.append((DOCS / "sparse-attention.md").read_text())
    losses, levels = [], []
    for arm, found in content["ratios"].items():
        (seconds,) = {f"{each:.2f}" for each in found["last_quarter_step_seconds"]}
        both = [ratios["loss"] for ratios in (ratios_of(middle, "dense")[arm], found)]
        words = " | ".join(", ".join(f"{each:.3f}×" for each in one) for one in both)
        assert f"| {words} | {seconds}× |" in pages[0]
        levels += [each for name, each in found.items() if re.fullmatch(r"[\d.]+", name)]
        losses += [loss for one in both for loss in one]
        speed = 1 / statistics.mean(found["last_quarter_step_seconds"])
        assert f"{speed:.2f} times" in pages[2]
        assert arm != "forced" or f"steps were {speed:.2f}× as fast" in pages[1]
    assert f"{min(map(min, levels)):.2f} to {max(map(max, levels)):.2f}" in pages[0]
    assert all(f"{min(losses):.2f} to {max(losses):.2f}" in page for page in pages[1:])
    density = [
        statistics.mean(layer)
        for case in content["cases"]
        if case["arm"] == "switching"
        for layer, sparse in zip(case["layers"]["density"], case["layers"]["sparse"], strict=True)
        if sparse
    ]
    assert f"| {min(density):.2f} to {max(density):.2f} |" in pages[0]
