"""KnapFormer as a policy of `module:Class`: the rule, its bounds, and commands."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax import cli
from alload_jax.errors import InputError, run_command
from alload_jax.planning.cost import QuadraticCost
from alload_jax.planning.epoch import times_placed
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.samples import Samples

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
POLICY = "knapformer:KnapFormer"
BAGS = (("g1n1", 4, 1), (None, 8, 1), ("g2n1", 4, 2), (None, 8, 4), ("g2n1+g1n2", 8, 2))
# Sums of these numbers, and their shares of 1, 2, 4 or 8 GPUs, are exact: ties are ties.
COST = QuadraticCost(c0=1.0, c1=1.0, c2=0.25)


@pytest.fixture(scope="module")
def knapformer():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield __import__("knapformer")
        del sys.modules["knapformer"]


def naive(workload, tokens, sizes):
    """The sequences of each bag, by the paper's words: every sum is taken anew."""
    capacity = [size * sum(workload) / sum(sizes) for size in sizes]
    bags = [[] for _ in sizes]
    for item in sorted(range(len(workload)), key=lambda n: (-workload[n], n)):
        able = [
            n for n, c in enumerate(capacity) if c >= workload[item] and tokens[item] >= sizes[n]
        ] or [n for n, size in enumerate(sizes) if size == max(sizes)]
        occupancy = [sum(workload[other] for other in bags[n]) / capacity[n] for n in able]
        bags[able[occupancy.index(min(occupancy))]].append(item)
    return bags


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(1, 4) | st.integers(1, 100), min_size=5, max_size=40),
    st.sampled_from(([1, 1, 2], [1, 1, 1, 1, 4], [1, 1, 1, 1], [2, 2])),
)
def test_the_rule_is_the_papers(knapformer, lengths, sizes):
    seq_len = np.asarray(lengths)
    workload = COST.sequence_cost(seq_len)
    found = knapformer.assign(workload, seq_len, sizes)
    wanted = naive(workload.tolist(), lengths, sizes)
    assert [sorted(items) for items in wanted] == [
        np.flatnonzero(found == bag).tolist() for bag in range(len(sizes))
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.sampled_from(BAGS), st.data())
def test_an_epoch_is_batches_in_random_order_that_are_assigned_greedily(
    knapformer, lengths, bags, data
):
    (text, ranks, context), seq_len = bags, np.asarray(lengths)
    m_mem = data.draw(st.integers(-(-max(lengths) // context), 150))
    slots = data.draw(st.sampled_from((None, 3)))
    policy = knapformer.KnapFormer(m_mem, COST, context, text, slots, 0.5)
    samples = Samples(np.zeros((len(seq_len), 3), np.int64), seq_len)
    found, again = (
        policy.plan_epoch(samples, RankTopology(ranks), np.random.default_rng(7)) for _ in range(2)
    )
    assert np.array_equal(found.sample, again.sample)
    assert np.array_equal(found.part_offsets(), again.part_offsets())
    assert (times_placed(found) == 1).all()
    owner, packing = found.micro_batch_of_part(), found.packing
    assert np.bincount(owner, packing.tokens, len(found.rank)).max() <= m_mem
    assert (packing.offset + packing.tokens <= m_mem).all()
    held = [len(found.sample[found.parts_of(row)]) for row in range(len(found.rank))]
    assert (np.asarray(held) <= found.slots()).all()
    sizes = knapformer.bag_sizes(text or f"g{context}n{ranks // context}", ranks, context)
    first = np.cumsum(sizes) - sizes
    order = samples.shuffled(np.random.default_rng(7))
    for step in range(found.steps):
        here = found.step[owner] == step
        batch, order = np.split(order, [len(np.unique(found.sample[here]))])
        for group, drawn in enumerate(np.array_split(batch, ranks // sum(sizes))):
            wanted = naive(COST.sequence_cost(seq_len[drawn]).tolist(), seq_len[drawn], sizes)
            for bag, items in enumerate(wanted):
                begin = group * sum(sizes) + first[bag]
                on = found.rank[owner]
                inside = here & (on >= begin) & (on < begin + sizes[bag])
                assert set(found.sample[inside]) == set(drawn[items])
                assert (packing.is_split[inside] == (sizes[bag] > 1)).all()
    assert not len(order)


def test_bags_that_ranks_cannot_be_are_refused(knapformer):
    for bags, context, reason in (
        *(("", 1, "give g{GPUs}n{bags} for each"), ("g1n4+", 1, "joined by")),
        *(("g1n2+g1n2", 1, "for each size"), ("g1n3", 1, "divides the plan's 8 ranks")),
        *(("g0n4", 1, "joined by"), ("g2n4", 1, "context-parallel groups have 1")),
        *(("g2n1+g4n1+g1n2", 4, "groups have 4"), ("g2n3+g1n1", 2, "divides")),
    ):
        with pytest.raises(InputError, match=reason):
            knapformer.bag_sizes(bags, 8, context)


def test_the_command_plans_with_a_class_that_is_named(knapformer, tmp_path, capsys):
    command = ["plan", "--workload", "wan-480p", "--size", "300", "--ranks", "4", "--json"]
    command += ["--m-mem", "66816", "--context", "2"]
    compare = ["--compare", "balanced", POLICY, f"{POLICY}:independent"]
    assert run_command(cli.main, [*command, *compare[:3]]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)["cases"]
    assert theirs["plan"]["policy"] == "KnapFormer"
    assert theirs["metrics"]["samples"] == 300
    assert theirs["metrics"]["cost"] > ours["metrics"]["cost"]
    assert run_command(cli.main, [*command, *compare]) == 2
    assert f"one shape on all ranks; give {POLICY}" in capsys.readouterr().err
    file = tmp_path / "config.yaml"
    planning = {"policy": POLICY, "m_mem": 66816, "bags": "g1n2+g2n1"}
    config = {"run": {"folder": "r"}, "data": {"folder": "d"}, "planning": planning}
    for key, status, text in (("bags", 0, '"bags": "g1n2+g2n1"'), ("bugs", 2, "planning.bugs")):
        planning[key] = planning.pop("bags", "g1n4")
        file.write_text(yaml.safe_dump(config))
        assert run_command(cli.main, [*command, "--config", str(file)]) == status
        assert text in "".join(capsys.readouterr())
    refused = {"knapformer:Knap": "no attribute 'Knap'", "none:A": "No module", "x": "'x'"}
    refused["knapformer:KnapFormerConfig"] = "with a method plan_epoch"
    for name, text in refused.items():
        assert run_command(cli.main, [*command, "--policy", name]) == 2
        assert text in capsys.readouterr().err
    assert run_command(cli.main, [*command[:-1], "auto", "--policy", POLICY]) == 2
    assert "known for balanced and not for" in capsys.readouterr().err
