"""`benchmarks/hunyuan_video_vae.py` on a tiny VAE."""

import importlib
import json
import sys
from pathlib import Path

import pytest

for package in ("torch", "diffusers"):
    pytest.importorskip(package, reason=f"needs {package}: install alload-jax[parity]")

pytestmark = pytest.mark.parity


def test_every_way_is_measured(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    program, out = importlib.import_module("hunyuan_video_vae"), tmp_path / "found.json"
    argv = ["--frames", "5", "--height", "16", "--width", "272", "--repeats", "1"]
    argv += ["--small", "5", "16", "32", "--widths", *["16", "16", "32", "64", "64"]]
    monkeypatch.setattr(sys, "argv", ["hunyuan_video_vae.py", *argv, "--out", str(out)])
    program.main()
    ways = json.loads(out.read_text())["ways"]
    assert list(ways) == ["chunks", "tiles", "whole"]
    for way in ways.values():
        for direction in ("encode", "decode"):
            assert way[direction]["fits"]
            assert way[direction]["seconds"] > 0
            assert way[f"{direction}_error"] < 1e-2
    assert ways["whole"]["encode_error"] == ways["whole"]["decode_error"] == 0
