"""The plan page: well-formed, self-contained, escaped, within any window's width; its charts."""

import functools
import html
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.metadata import version

import numpy as np
import pytest
from looks import PINS

from alload_jax.errors import InputError
from alload_jax.report.charts import (
    compact,
    percent,
    show_cost,
)
from alload_jax.report.plan_charts import PolicyPart, StepBars, rank_totals
from alload_jax.report.plan_page import render, show, speedup, write_page

NASTY = "<script>alert('x')</script> & \"quotes\" </title>"
VOID = {"meta", "br", "hr", "input", "img", "link"}
METRICS = {"imbalance": 0.39, "idle": 0.28, "steps": 40, "tokens_per_second": 1e5, "dropped": 0}


def bars(step: int = 3, ranks: int = 8, cost: float = 1.0) -> StepBars:
    parts = []
    for rank in range(ranks):
        parts += [(rank, cost * 0.5, 4096, "split"), (rank, cost * (rank + 1) / 8, 256, "whole")]
        parts += [(rank, cost * 0.05, 64, "padding"), (rank, cost * 0.03, 256, "whole")]
        parts += [(rank, cost * 0.001, 4096, "whole")] * 2
    return StepBars(step, ranks, parts)


def policy(name: str = "equal_tokens", **values: object) -> PolicyPart:
    fields = {
        "metrics": METRICS,
        "steps": (bars(3), bars(7)),
        "imbalance": np.linspace(0.2, 0.6, 40),
    }
    return PolicyPart(name, **(fields | values))


def page(**values: object) -> str:
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
    return render(**(fields | values))


LONG = policy("name" * 30, imbalance=np.random.default_rng(0).random(100_003))
NASTY_NAMES = (policy(NASTY), policy(NASTY + "2"))
PAGES = {
    "plain": {},
    "one policy, one rank, one step": {
        "policies": (policy(steps=(bars(ranks=1),), imbalance=np.zeros(1)),),
        "seq_len": np.full(9, 256),
        "sequence_cost": np.ones(9),
    },
    "no optional part": {"curve": None, "over_ranks": None, "notes": (), "facts": {}},
    "costs are zero": {
        "policies": (policy(steps=(bars(cost=0.0),), imbalance=np.zeros(9)),),
        "sequence_cost": np.zeros(500),
        "curve": (np.ones(1), np.zeros(1), 1.0),
        "over_ranks": {"equal_tokens": [(8, 0.0)]},
    },
    "metrics are unknown": {
        "policies": (policy(metrics=METRICS | {"utilisation": None, "longest_weight": math.nan}),)
    },
    "1,024 ranks": {"policies": (policy(steps=(bars(ranks=1024),)),) * 3},
    "nine policies": {"policies": tuple(policy(f"policy {n}", steps=(bars(),)) for n in range(9))}
    | {"cost_unit": "", "sequence_cost": np.full(500, 5.7e9)},
    "long names": {"title": "x" * 200, "facts": {"y" * 90: "z" * 300}, "policies": (LONG,) * 2},
    "nasty names": {"title": NASTY, "facts": {NASTY: NASTY}, "notes": (NASTY,), "cost_unit": NASTY}
    | {"policies": NASTY_NAMES, "over_ranks": {NASTY: [(8, 0.3), (16, 0.4)]}},
}


DRAWN = {
    "plain": (9803, -67.6413),
    "one policy, one rank, one step": (2454, 36.8270),
    "costs are zero": (4840, -112.4167),
    "1,024 ranks": (16957, -21.4450),
    "nine policies": (13392, -65.7521),
    "long names": (10331, -34.3317),
}
"""Of charts when last looked at: how many numbers, and their sum, each with a factor of place."""


@functools.cache
def text_of(name):
    return page(**PAGES[name])


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
def test_is_well_formed_and_small_loads_nothing_and_looks_as_ever(name):
    text = text_of(name)
    parsed = parse(text)
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert not re.search(r"[=\" ,]-?(nan|inf)[%\", ]", text)
    assert len(text.encode()) < 1.5e6
    for address in ("http:", "https:", "//cdn", "@import", "src=", "@font-face"):
        assert address not in text
    for links in (r"url\(([^)]*)\)", r'href="([^"]*)"'):
        assert {link[1:] for link in re.findall(links, text)} <= set(ids)
    # Names that users give are escaped.
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert name != "nasty names" or parsed.text.count(NASTY) >= 8
    if name in DRAWN and version("matplotlib") == PINS["matplotlib"]:
        drawn = "".join(re.findall("(?s)<svg.*?</svg>", text))
        numbers = np.array(re.findall(r"\d+(?:\.\d+)?", drawn), float)
        found = len(numbers), np.cos(np.arange(len(numbers))) @ np.log1p(numbers)
        assert found == pytest.approx(DRAWN[name], abs=2e-3)


def test_every_chart_has_a_text_alternative_and_the_best_of_a_row_is_bold():
    text = text_of("plain")
    parsed = parse(text)
    images = [attrs for tag, attrs in parsed.tags if attrs.get("role") == "img"]
    assert len(images) == 1 + 2 * 3 + 3  # lengths, bars of two steps, three curves
    assert all(len(attrs["aria-label"]) > 20 for attrs in images)
    for title in ("Where the work is", "Who waits for whom", "Imbalance over the epoch"):
        assert title in parsed.text
    assert '<td>28.0%</td><td>28.0%</td><td class="best">1.0%</td>' in text
    assert '<td class="best">0</td>' not in text  # all are equal


def test_says_how_many_ranks_are_drawn_and_what_all_of_them_take():
    text = text_of("1,024 ranks")
    assert "first 64 of 1,024 ranks" in text
    assert "rank 63:" in text
    assert "rank 64:" not in text
    totals = rank_totals(StepBars(0, 4, [(0, 1.0, 8, "whole"), (0, 2.0, 8, "whole")]))
    assert totals.tolist() == [3, 0, 0, 0]
    text = page(policies=(policy(steps=(StepBars(0, 4, [(0, 3.0, 8, "whole")]),)),))
    assert "4 ranks, slowest 3 s, mean 750 ms; ranks wait 75.0% of the time" in text


def test_says_what_the_longest_tenth_holds_and_cuts_off_an_outlier_step():
    seq_len, imbalance = np.asarray([10] * 90 + [100] * 10), np.append(np.full(200, 0.5), 36.4)
    cost, policies = seq_len.astype(float) ** 2, (policy(imbalance=imbalance),)
    text = page(seq_len=seq_len, sequence_cost=cost, policies=policies)
    assert f"<b>{percent(1000 / 1900)}</b> of the tokens" in text
    assert f"<b>{percent(100_000 / 109_000)}</b> of the cost" in text
    assert "the worst step reaches 3,640%" in text
    assert "4,000%" not in text
    assert "Cut off" not in text_of("plain")


def test_millions_of_samples_make_a_small_page():
    seq_len = np.random.default_rng(0).integers(256, 75_600, 2_000_000)
    text = page(seq_len=seq_len, sequence_cost=seq_len.astype(np.float64) ** 2)
    assert len(text) < 1.5e6


def test_speedup_uses_a_metric_that_both_policies_have():
    slow, fast = policy(metrics={"cost": 20.0}), policy(metrics=METRICS)
    assert speedup(slow, fast) is None
    assert speedup(slow, policy(metrics={"cost": 10.0})) == 2
    assert speedup(fast, policy(metrics={"tokens_per_second": 3e5})) == 3


def test_equal_pages_give_equal_files_written_atomically(tmp_path):
    write_page(tmp_path / "new" / "page.html", page())
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == text_of("plain")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    (tmp_path / "file").write_text("")
    for place, words in (("", "is a folder"), ("file/page.html", "cannot be written")):
        with pytest.raises(InputError, match=words):
            write_page(tmp_path / place, page())


FRAME = '<iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>'
PROBE = """<!DOCTYPE html><body style="margin:0">{frames}<p id="said">nothing</p><script>
window.onload = function () {{
  var frames = Array.from(document.querySelectorAll("iframe"));
  document.getElementById("said").textContent = frames.map(function (frame) {{
    var root = frame.contentDocument.documentElement;
    var titles = frame.contentDocument.querySelectorAll("title").length;
    return "widths " + [root.scrollWidth, root.clientWidth, titles].join(" ") + " end";
  }}).join(" ");
}};
</script>"""


def test_fits_the_window(tmp_path):
    """Pages are shown in frames: a headless window is never narrower than 500 pixels."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    names = ("plain", "1,024 ranks", "nine policies", "long names")
    cases = [(name, width) for name in names for width in (390, 1440)]
    frames = [FRAME.format(width=width, page=html.escape(text_of(name))) for name, width in cases]
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(frames="".join(frames)), encoding="utf-8")
    done = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"),
            *("--enable-logging=stderr", "--window-size=1440,900", probe.as_uri()),
        ],
        capture_output=True,
        text=True,
    )
    found = re.findall(r"widths (\d+) (\d+) (\d+) end", done.stdout)
    assert len(found) == len(cases), done.stderr[-2000:]
    for (name, width), (scroll_width, client_width, titles) in zip(cases, found, strict=True):
        assert width - 20 <= int(client_width) <= width, name
        assert int(scroll_width) <= int(client_width), name
        assert titles == "1", "the page's script should have turned marks' titles into tooltips"
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]


# ---------------------------------------------------------------- parts of charts


def test_numbers_are_short():
    for shown, values, expected in (
        (compact, (0, 640, 4400, 29_000, 1.5e6, 2e11), "0 640 4.4k 29k 1.5M 200G"),
        (compact, (1e9, 999_600), "1G 1M"),
        (percent, (0, 1e-6, 0.0012, 0.392, 7.1), "0% <0.01% 0.12% 39.2% 710%"),
        (lambda v: show_cost(v, "s"), (2e-5, 1e-3, 0.999, 1, 179), "20 µs 1 ms 999 ms 1 s 179 s"),
        (lambda v: show_cost(v, "s"), (180, 10_740, 10_800), "3 min 179 min 3 h"),
        (lambda v: show_cost(v, ""), (5.72e9,), "5.72×10⁹"),
        (lambda v: show("idle", v), (None,), "–"),
    ):
        assert " ".join(map(shown, values)) == expected
