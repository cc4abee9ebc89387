"""The course of benchmarks/sparse_quality.py: which runs, in which order, with how many steps."""

import time
from typing import Any

import numpy as np
from sparse_quality_configs import (
    FIRST,
    midway,
    passed_thresholds,
    replaced,
    selector_of,
    selectors,
    variant_config,
)
from sparse_quality_extras import Trained, add_extras
from sparse_quality_record import Record, describe_first, describe_run, rounded
from sparse_quality_runs import Result, Task, train
from sparse_quality_setup import Setup
from sparse_quality_switch import Choice, switch_of, with_switch
from sparse_quality_timing import EVALUATIONS, gradient_seconds, steps_that_fit

from alload_jax.errors import InputError
from alload_jax.training.state import Weights


class Study:
    """The runs of one command, and what they found so far."""

    def __init__(self, setup: Setup, record: Record):
        """Chooses nothing yet: neither the steps nor the thresholds."""
        self._setup, self._record = setup, record
        self._options, self._clock, self._compiled = setup.options, setup.clock, setup.compiled
        self._trained: list[Trained] = []
        self._thresholds: dict[str, float] = {}
        self._steps = 0

    def run(self) -> None:
        """Trains all variants of all seeds, as long as time is left; then does the rest."""
        longest = 0.0
        given = follow = None
        for seed in self._options.seeds:
            for name in self._options.variants:
                if self._clock.left() < 1.05 * longest + 5:
                    self._clock.log(f"no time left for {name}, seed {seed}")
                    self._record.content.setdefault("stopped", f"before {name}, seed {seed}")
                    continue
                if name == self._options.variants[0]:
                    given = self._first_parameters(seed)
                began = time.monotonic()
                result = self._train(name, seed, given, follow if name == "random" else None)
                if name == "predictor":
                    follow = result.choices
                if not self._thresholds:
                    self._choose_thresholds()
                longest = max(longest, time.monotonic() - began)
                self._record.write()
        self._record.draw()
        add_extras(self._setup, self._record, self._trained, given)
        self._record.content["seconds"] = round(self._clock.passed(), 1)
        self._record.write()
        self._record.draw()

    def _first_parameters(self, seed: int) -> Any:
        """Trains on short clips; the parameters at the end, which every program copies."""
        began = time.monotonic()
        config = self._compiled.kinds[FIRST].config
        folder = str(self._options.runs / f"first_{seed}")
        config = replaced(config, "run", folder=folder, seed=seed)
        programs, update = self._compiled.of(FIRST), self._compiled.updates[FIRST]
        task = Task(config, programs, update, self._setup.first.manifest)
        result = train(task, None, self._compiled.mesh)
        entry = describe_first(seed, result.rows)
        self._record.content["first"]["runs"].append(entry)
        loss, seconds = entry["loss"][-1], entry["seconds"]
        self._clock.log(f"short clips, seed {seed}: loss {loss}, {seconds} s")
        given = result.state.params
        if not self._steps:
            self._prepare(given, time.monotonic() - began)
        return given

    def _prepare(self, given: Any, first_seconds: float) -> None:
        """Times the programs and chooses the steps, before the first run on long clips."""
        content = self._record.content
        for name in selectors(self._options.variants):
            found = gradient_seconds(self._compiled, name, given)
            content["gradient_seconds"][name] = found
            self._clock.log(f"{name}: {found}")
        self._steps = self._options.steps or self._steps_in_time(given, first_seconds)
        rows = self._setup.data.rows
        content |= {"steps": self._steps, "samples": self._steps * rows}
        self._clock.log(f"{self._steps} steps of {rows} × {content['tokens']} tokens")
        self._compile_updates(["dense"])

    def _steps_in_time(self, given: Any, first_seconds: float) -> int:
        """Steps of each run such that all runs end within the time limit."""
        variants, seconds = self._options.variants, self._record.content["gradient_seconds"]
        weights = self._compiled.of(variants[0]).start(np.int32(0), given).weights
        self._setup.measure(variants[0], weights)
        began = time.perf_counter()
        self._setup.measure(variants[0], weights)
        evaluating = time.perf_counter() - began
        slowest = [max(seconds[selector_of(name)].values()) for name in variants]
        seeds, left = len(self._options.seeds), self._clock.left()
        steps = steps_that_fit(left, slowest, seeds, evaluating, first_seconds)
        if steps < 10:
            limit = self._options.time_limit
            raise InputError(f"--time-limit {limit} leaves no time for ten steps")
        return steps

    def _choose_thresholds(self) -> None:
        """Chooses them from the first dense run, midway."""
        found = midway(self._record.content["runs"][0]["layers"])
        self._thresholds = passed_thresholds(found)
        self._record.content["thresholds"] = self._thresholds
        self._clock.log(f"thresholds {self._thresholds}; midway {rounded(found, 3)}")
        self._compile_updates([name for name in self._options.variants if name != "dense"])

    def _compile_updates(self, names: list[str]) -> None:
        """Compiles the updates of some variants, which know their steps and thresholds."""
        configs = {name: self._config_of(name) for name in names}
        self._compiled.compile_updates(configs, self._steps)

    def _config_of(self, name: str) -> Any:
        """The config of a variant, with the steps and the thresholds of this study."""
        return variant_config(self._setup.config, name, self._steps, self._thresholds)

    def _train(self, name: str, seed: int, given: Any, follow: list[Choice] | None) -> Result:
        """One run; adds what it found to the record."""
        folder = str(self._options.runs / f"{name}_{seed}")
        config = replaced(self._config_of(name), "run", folder=folder, seed=seed, steps=self._steps)
        programs, update = self._compiled.of(name), self._compiled.updates[name]
        at = sorted({round(self._steps * (n + 1) / EVALUATIONS) for n in range(EVALUATIONS)})
        task = Task(config, programs, update, self._setup.data.manifest, given, follow, at)
        result = train(
            task, lambda weights: self._setup.measure(name, weights), self._compiled.mesh
        )
        entry: dict[str, Any] = {"variant": name, "seed": seed} | describe_run(result, config)
        weights = result.state.weights
        self._measure_last(name, weights, entry)
        self._trained.append(Trained(name, seed, weights, entry))
        self._record.content["runs"].append(entry)
        loss = entry["held_out"][-1]["mean"]
        self._clock.log(f"{name}, seed {seed}: held-out loss {loss:.5f}")
        return result

    def _measure_last(self, name: str, weights: Weights, entry: dict[str, Any]) -> None:
        """Adds losses of the last weights: on more clips, and with dense attention."""
        held_out = self._setup.held_out
        if len(held_out.pixels) > held_out.number:
            more = rounded(self._setup.measure(name, weights, 1))
            entry["last_by_clip"] = [
                first + second for first, second in zip(entry["last_by_clip"], more, strict=True)
            ]
        if name != "dense":
            sparse = switch_of(weights.variables)["sparse"]
            dense = with_switch(weights.variables, sparse=sparse & False)
            losses = self._setup.measure(name, weights._replace(variables=dense))
            entry["last_with_dense_attention"] = rounded(losses.mean(axis=1))
        entry["lists"] = []
