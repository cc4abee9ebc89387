"""What layers keep, chosen by memory."""

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import refusal

from alload_jax.models.hunyuan_video.costs import HUNYUAN_VIDEO_1_5
from alload_jax.models.wan.costs import WAN_1_3B, WAN_14B, WanArchitecture
from alload_jax.planning.analytic import SHORTEST, Trained, step_cost, step_memory
from alload_jax.planning.cost import bucketed_cost
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.remat import LADDER, OFFLOADED, choose_remat, host_bytes

H200 = DEVICES["h200"]
MODELS = {"wan-1.3b": WAN_1_3B, "hunyuan": HUNYUAN_VIDEO_1_5}


def choose(architecture, tokens, gigabytes, **options):
    layers = architecture.num_layers
    return choose_remat(architecture, layers, H200, tokens, gigabytes * 1e9, **options)


def needed(architecture, remat, tokens):
    return step_memory(architecture, H200, remat).bytes_of(tokens, tokens / SHORTEST)


MARGIN = 0.08
"""Share of the memory that a choice leaves free, whatever the code calls it."""

budgets = st.floats(360, 2000)  # the least that fits 80,000 tokens of each


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(256, 80_000), budgets, budgets)
def test_more_memory_is_never_slower_nor_is_a_policy_that_fits_faster(name, tokens, one, other):
    model = MODELS[name]
    small, large = sorted([one, other])
    less, more = (choose(model, tokens, size) for size in (small, large))
    assert more.seconds <= less.seconds
    for choice, size in ((less, small), (more, large)):
        assert model.num_layers % len(choice.policies) == 0
        fitting = needed(model, choice.policies, tokens)
        assert fitting == choice.bytes
        assert fitting <= size * 1e9 * (1 - MARGIN)
        for policy in LADDER:
            if needed(model, policy, tokens) <= size * 1e9 * (1 - MARGIN):
                [seconds] = bucketed_cost(step_cost(model, H200, policy), [1], [tokens])
                assert choice.seconds <= seconds


def test_memory_between_two_policies_is_filled_by_both():
    names = ("feed_forward_and_attention", "matmuls_and_attention")
    few, many, both = (needed(WAN_1_3B, each, 32_760) for each in (*names, names))
    assert (few + many) / 2 < both < many
    choice = choose(WAN_1_3B, 32_760, both * 1.0001 / (1 - MARGIN) / 1e9)
    assert set(choice.policies) == set(names)
    assert choice.bytes > few + 0.4 * (many - few)
    assert "feed_forward_and_attention in 1 of 2 layers" in choice.line()
    # Layers whose number is prime have one policy.
    model = WanArchitecture(1536, 8960, 12, 13)
    assert {len(choose(model, 32_760, size).policies) for size in range(30, 200, 10)} == {1}


def test_a_little_memory_offloads_what_the_host_holds_and_less_is_refused():
    tokens = 60_000
    least = needed(WAN_1_3B, "offload", tokens) / (1 - MARGIN) / 1e9
    for policy in OFFLOADED:
        host = host_bytes(WAN_1_3B, H200, tokens, policy)
        found = choose(WAN_1_3B, tokens, least * 1.001, host_budget=host)
        assert found.policies == (policy,)
    assert choose(WAN_1_3B, tokens, least * 1.001) == found
    message = refusal(choose, WAN_1_3B, tokens, least * 0.999)
    assert message.startswith("model.remat: auto finds nothing that fits: 60,000 tokens need")
    message = refusal(choose, WAN_1_3B, tokens, least * 1.001, host_budget=3e9)
    assert "need 11.1 GB of the host's, and a device may use 3.0 GB of them" in message


def test_nothing_goes_to_the_host_where_the_device_has_room_or_waiting_takes_longer():
    for policy in OFFLOADED.values():
        size = needed(WAN_1_3B, policy, 32_760) / (1 - MARGIN) / 1e9
        found = choose(WAN_1_3B, 32_760, size * 1.001).policies
        fastest = "offload_feed_forward_and_attention"
        assert found == (fastest if policy != OFFLOADED[fastest] else policy,)
    # Where memory is as far as on another machine, computing again takes less time.
    slow = dataclasses.replace(H200, host_bandwidth=1e9)
    size = needed(WAN_1_3B, "full", 16_384) / (1 - MARGIN) * 1.001
    for device, expected in ((H200, fastest), (slow, "full")):
        assert choose_remat(WAN_1_3B, 30, device, 16_384, size).policies == (expected,)


def test_shards_replicas_adapters_one_gradient_and_few_rows_leave_room_to_keep_more():
    tokens, lora = 32_760, Trained(50_000_000, "bfloat16")
    assert choose(WAN_14B, tokens, 140, trained=lora).policies != ("offload",)
    for model, size, less, more in (
        (WAN_14B, 110, {"shards": 8}, {"shards": 16}),
        (WAN_1_3B, 52, {"replicas": 1}, {"replicas": 8}),
        *(
            (WAN_1_3B, 52, {}, more)
            for more in ({"trained": Trained(accumulates=False)}, {"rows": 1})
        ),
    ):
        alone, many = (choose(model, tokens, size, host_budget=0, **o) for o in (less, more))
        assert many.seconds < alone.seconds
    assert many.bytes < needed(WAN_1_3B, many.policies, tokens)
    # A work space is kept free.
    plain = choose(WAN_1_3B, tokens, 60, rows=1)
    beside = choose(WAN_1_3B, tokens, 60, rows=1, work_space=10e9)
    assert needed(WAN_1_3B, beside.policies, tokens) < needed(WAN_1_3B, plain.policies, tokens)
    assert choose(WAN_1_3B, tokens, 70, rows=1, work_space=9.2e9).policies == plain.policies


seconds = st.floats(0.01, 0.1)


@settings(max_examples=15, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(LADDER, seconds)), st.floats(40, 300), st.data())
def test_measured_times_go_before_predicted_ones(measured, gigabytes, data):
    tokens, single = 32_760, Trained(accumulates=False)
    absent = data.draw(st.sampled_from(LADDER[1:]))
    del measured[absent]
    host = host_bytes(WAN_1_3B, H200, tokens, "offload")
    asked = []

    def fits(policies):
        memory = step_memory(WAN_1_3B, H200, policies, trained=single)
        return memory.bytes_of(tokens, 1) <= gigabytes * 1e9 * (1 - MARGIN)

    def measure(policies):
        asked.extend(policies)
        return {each: measured[each] for each in policies if each in measured}

    given = {"rows": 1, "trained": single, "measure": measure, "host_budget": host}
    choice = choose(WAN_1_3B, tokens, gigabytes, **given)
    if choice.policies == ("offload",):
        return
    assert absent not in choice.policies
    # What no choice that fits has, is not measured.
    others = [n - 1 for n in range(2, 11) if 30 % n == 0]
    few = [
        each
        for less, each in pairwise(LADDER[:-1])
        if any(fits((*[less] * count, each)) for count in others)
    ]
    if asked:
        assert asked == ["full", *few, *(["none"] if fits("none") else [])]
    else:
        assert choice.policies == ("full",)
    assert ("by measured time" in choice.line()) == bool(asked)

    def total(policies):
        return sum(measured[each] for each in policies) / len(policies)

    for policy in measured:
        if fits([policy]):
            assert total(choice.policies) <= total([policy]) + 1e-12
    gained = 30 * (measured["full"] - total(choice.policies))
    [full] = bucketed_cost(step_cost(WAN_1_3B, H200, "full", single), [1], [tokens])
    assert choice.seconds == pytest.approx(full - gained)


def measured():
    path = Path(__file__).parents[2] / "benchmarks/results/step_parts_h200.json"
    cases = json.loads(path.read_text())["cases"]
    return {case["remat"]: case for case in cases if case["rows"] == 1 and not case["without"]}


@pytest.mark.parametrize("gigabytes", [55, 70])
def test_what_is_chosen_fits_and_is_near_the_fastest_measured_policy_that_does(gigabytes):
    """Wan 1.3B, 1×32,760 tokens on an H200."""
    single = Trained(accumulates=False)
    choice = choose(WAN_1_3B, 32_760, gigabytes, rows=1, trained=single, host_budget=0)
    steps = measured()
    taken = [steps[policy] for policy in choice.policies]
    # A lower bound of the measured bytes, as the steps held a copy of the parameters.
    assert sum(step["bytes"] for step in taken) / len(taken) - 5.7e9 < gigabytes * 1e9
    seconds = sum(step["seconds"] for step in taken) / len(taken)
    fitting = [step["seconds"] for step in steps.values() if step["bytes"] <= gigabytes * 1e9]
    assert seconds < 1.03 * min(fitting, default=math.inf)


@pytest.mark.parametrize("remat", [("full", "attention"), ("attention", "none", "none")])
def test_costs_of_several_policies_are_their_means_and_an_iteration_is_held_twice_more(remat):
    parts = [step_cost(WAN_1_3B, H200, each) for each in remat]
    found = step_cost(WAN_1_3B, H200, remat)
    assert found.c1 == pytest.approx(sum(each.c1 for each in parts) / len(parts))
    assert found.c2 == pytest.approx(sum(each.c2 for each in parts) / len(parts))
    sizes = [needed(WAN_1_3B, each, 1000) for each in remat]
    kept = sum(1000 * WAN_1_3B.kept_activations(each) for each in remat)
    kept += sum(1000 / SHORTEST * WAN_1_3B.kept_condition(each) for each in remat)
    iteration = 2 * kept / 30
    assert needed(WAN_1_3B, remat, 1000) == pytest.approx(sum(sizes) / len(sizes) + 2 * iteration)
