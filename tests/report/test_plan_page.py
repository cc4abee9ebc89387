"""The plan page: well-formed, self-contained, escaped, and within any window's width."""

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser

import numpy as np
import pytest

from alload_jax.errors import InputError
from alload_jax.report.charts import percent
from alload_jax.report.plan_charts import rank_totals
from alload_jax.report.plan_figures import PolicyPart, StepBars, speedup
from alload_jax.report.plan_page import PlanPage, render, write_page

NASTY = "<script>alert('x')</script> & \"quotes\" </title>"
VOID = {"meta", "br", "hr", "input", "img", "link"}
METRICS = {"imbalance": 0.39, "idle": 0.28, "steps": 40, "tokens_per_second": 1e5, "dropped": 0}


def bars(step: int = 3, ranks: int = 8, cost: float = 1.0) -> StepBars:
    parts = []
    for rank in range(ranks):
        parts += [(rank, cost * 0.5, 4096, "split"), (rank, cost * (rank + 1) / 8, 256, "whole")]
        parts += [(rank, cost * 0.05, 64, "padding")]
    return StepBars(step, ranks, parts)


def policy(name: str = "equal_tokens", **values: object) -> PolicyPart:
    fields = {
        "metrics": METRICS,
        "steps": (bars(3), bars(7)),
        "imbalance": np.linspace(0.2, 0.6, 40),
    }
    return PolicyPart(name, **(fields | values))


def page(**values: object) -> PlanPage:
    seq_len = np.random.default_rng(0).choice([64, 256, 4096, 75_600], 500)
    best = policy("balanced", metrics=METRICS | {"idle": 0.01, "tokens_per_second": 1.5e5})
    fields = {
        "title": "A data set",
        "facts": {"data set": "mixed, 500 samples", "ranks": "8"},
        "seq_len": seq_len,
        "sequence_cost": seq_len * 1e-5,
        "cost_unit": "s",
        "policies": (policy(), policy("dual_constraint (independent)"), best),
        "curve": (np.geomspace(1e6, 1e10, 9), np.linspace(90, 60, 9), 1e9),
        "over_ranks": {"equal_tokens": [(8, 0.3), (1024, 1.2)], "balanced": [(8, 0.0)]},
        "notes": ("A note.",),
    }
    return PlanPage(**(fields | values))


PAGES: dict[str, Callable[[], PlanPage]] = {
    "plain": page,
    "one policy, one rank, one step": lambda: page(
        policies=(policy(steps=(bars(ranks=1),), imbalance=np.zeros(1)),)
    ),
    "no steps, no imbalance": lambda: page(policies=(policy(steps=(), imbalance=np.zeros(0)),)),
    "no optional part": lambda: page(curve=None, over_ranks=None, notes=(), facts={}),
    "costs are zero": lambda: page(
        policies=(policy(steps=(bars(cost=0.0),), imbalance=np.zeros(9)),),
        sequence_cost=np.zeros(500),
        curve=(np.ones(1), np.zeros(1), 1.0),
        over_ranks={"equal_tokens": [(8, 0.0)]},
    ),
    "metrics are None": lambda: page(policies=(policy(metrics=dict.fromkeys(METRICS)),) * 2),
    "no metrics": lambda: page(policies=(policy(metrics={}),)),
    "metrics of one alone": lambda: page(policies=(policy(), policy("best", metrics={}))),
    "not finite": lambda: page(
        policies=(policy(metrics={"imbalance": float("nan"), "cost": float("inf")}),) * 2,
        curve=(np.asarray([1e3, 1e4]), np.asarray([np.inf, np.nan]), 1e3),
    ),
    "1,024 ranks": lambda: page(policies=(policy(steps=(bars(ranks=1024),)),) * 3),
    "long epoch": lambda: page(policies=(policy(imbalance=np.ones(100_000)),)),
    "one length": lambda: page(seq_len=np.full(9, 256), sequence_cost=np.ones(9)),
    "no samples": lambda: page(seq_len=np.zeros(0, np.int64), sequence_cost=np.zeros(0)),
    "no unit": lambda: page(cost_unit="", sequence_cost=np.full(500, 5.7e9)),
    "nine policies": lambda: page(policies=tuple(policy(f"policy {n}") for n in range(9))),
    "long names": lambda: page(
        title="x" * 200, facts={"y" * 90: "z" * 300}, policies=(policy("name" * 30),) * 2
    ),
    "nasty names": lambda: page(
        title=NASTY,
        facts={NASTY: NASTY},
        policies=(policy(NASTY, metrics={"idle": 0.1}), policy(NASTY + "2")),
        over_ranks={NASTY: [(8, 0.3), (16, 0.4)]},
        notes=(NASTY,),
        cost_unit=NASTY,
    ),
}


class Balanced(HTMLParser):
    """Collects tags, texts and labels; fails where tags are not balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parse(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


@pytest.mark.parametrize("name", PAGES)
def test_is_well_formed_and_small(name):
    text = render(PAGES[name]())
    parsed = parse(text)
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert not re.search(r"[=\" ,]-?(nan|inf)[%\", ]", text)
    assert len(text.encode()) < 1.5e6


def test_loads_nothing():
    text = render(page())
    for address in ("http:", "https:", "//cdn", "@import", "src=", "@font-face"):
        assert address not in text
    ids = {attrs.get("id") for _, attrs in parse(text).tags}
    assert {link[1:] for link in re.findall(r"url\(([^)]*)\)", text)} <= ids
    assert {link[1:] for link in re.findall(r'href="([^"]*)"', text)} <= ids


def test_escapes_names_given_by_users():
    text = render(PAGES["nasty names"]())
    assert "<script>alert" not in text
    parsed = parse(text)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert parsed.text.count(NASTY) >= 8


def test_equal_pages_give_equal_text():
    assert render(page()) == render(page())


def test_every_chart_has_a_text_alternative():
    parsed = parse(render(page()))
    images = [attrs for tag, attrs in parsed.tags if attrs.get("role") == "img"]
    assert len(images) == 1 + 2 * 3 + 3  # lengths, bars of two steps, three curves
    assert all(len(attrs["aria-label"]) > 20 for attrs in images)
    for title in ("Where the work is", "Who waits for whom", "Imbalance over the epoch"):
        assert title in parsed.text


def test_says_how_many_ranks_are_drawn():
    text = render(PAGES["1,024 ranks"]())
    assert "first 64 of 1,024 ranks" in text
    assert "rank 63:" in text
    assert "rank 64:" not in text


def test_mean_and_makespan_are_those_of_all_ranks():
    totals = rank_totals(StepBars(0, 4, [(0, 1.0, 8, "whole"), (0, 2.0, 8, "whole")]))
    assert totals.tolist() == [3, 0, 0, 0]
    text = render(page(policies=(policy(steps=(StepBars(0, 4, [(0, 3.0, 8, "whole")]),)),)))
    assert "4 ranks, slowest 3 s, mean 750 ms; ranks wait 75.0% of the time" in text


def test_says_what_the_longest_tenth_holds():
    seq_len = np.asarray([10] * 90 + [100] * 10)
    text = render(page(seq_len=seq_len, sequence_cost=seq_len.astype(float) ** 2))
    assert f"<b>{percent(1000 / 1900)}</b> of the tokens" in text
    assert f"<b>{percent(100_000 / 109_000)}</b> of the cost" in text


def test_an_outlier_step_does_not_compress_the_axis():
    imbalance = np.append(np.full(200, 0.5), 36.4)
    text = render(page(policies=(policy(imbalance=imbalance),)))
    assert "the worst step reaches 3,640%" in text
    assert "4,000%" not in text
    assert "Cut off" not in render(page())


def test_bold_marks_the_best_of_a_row():
    text = render(page())
    assert '<td>28.0%</td><td>28.0%</td><td class="best">1.0%</td>' in text
    assert '<td class="best">0</td>' not in text  # all are equal


def test_ten_million_samples():
    seq_len = np.random.default_rng(0).integers(256, 75_600, 10_000_000)
    text = render(page(seq_len=seq_len, sequence_cost=seq_len.astype(np.float64) ** 2))
    assert len(text) < 1.5e6


def test_speedup_uses_a_metric_that_both_policies_have():
    slow, fast = policy(metrics={"seconds_per_epoch": 20.0}), policy(metrics=METRICS)
    assert speedup(slow, fast) is None
    assert speedup(slow, policy(metrics={"seconds_per_epoch": 10.0})) == 2
    assert speedup(fast, policy(metrics={"tokens_per_second": 3e5})) == 3


def test_writes_atomically(tmp_path):
    write_page(tmp_path / "new" / "page.html", page())
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == render(page())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    with pytest.raises(InputError, match="is a folder"):
        write_page(tmp_path, page())
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_page(tmp_path / "file" / "page.html", page())


def test_needs_no_jax():
    code = "import sys, alload_jax.report.plan_page; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


PROBE = """<!DOCTYPE html><body style="margin:0"><iframe id="frame" style="border:0;
width:{width}px;height:{height}px" srcdoc="{page}"></iframe><p id="said">nothing</p><script>
var frame = document.getElementById("frame");
frame.onload = function () {{
  var root = frame.contentDocument.documentElement;
  document.getElementById("said").textContent = "widths " + [
    root.scrollWidth, root.clientWidth, frame.contentDocument.querySelectorAll("title").length,
  ].join(" ") + " end";
}};
</script>"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
@pytest.mark.parametrize("name", ["plain", "1,024 ranks", "nine policies", "long names"])
def test_fits_the_window(name, width, height, tmp_path):
    """The page is shown in a frame: a headless window is never narrower than 500 pixels."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    probe = tmp_path / "probe.html"
    text = html.escape(render(PAGES[name]()))
    probe.write_text(PROBE.format(width=width, height=height, page=text), encoding="utf-8")
    done = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"),
            *("--enable-logging=stderr", f"--window-size={max(width, 520)},{height}"),
            probe.as_uri(),
        ],
        capture_output=True,
        text=True,
    )
    said = re.search(r"widths (\d+) (\d+) (\d+) end", done.stdout)
    assert said, done.stderr[-2000:]
    scroll_width, client_width, titles = map(int, said.groups())
    assert width - 20 <= client_width <= width
    assert scroll_width <= client_width
    assert titles == 1, "the page's script should have turned marks' titles into tooltips"
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
