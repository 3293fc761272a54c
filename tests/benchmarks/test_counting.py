"""What the tables on the cost of counting divide by, and what meets a target."""

from __future__ import annotations

from benchmarks.counting import (
    NO_OP,
    OURS,
    PLAIN,
    StepSeconds,
    added_per_operator,
    modules_table,
    step_table,
)
from benchmarks.ratios import Target


def same(inside: float, around: float = 0.0) -> list[StepSeconds]:
    return [StepSeconds(inside=inside, whole=inside + around)] * 3


ROUNDS = {PLAIN: same(0.010), NO_OP: same(0.025), OURS: same(0.030, 0.010)}


def test_a_step_is_divided_by_the_plain_one_and_by_the_floor() -> None:
    lines = step_table(ROUNDS, target=Target(limit=1.2, unit="× no-op"), target_base=NO_OP)
    assert lines[2:] == [
        "| plain | 10.00 [10.00–10.00] | 1 | | 1 | |",
        "| no-op dispatch mode | 25.00 [25.00–25.00] | 2.500 [2.500–2.500] | 1 | 2.500 [2.500–2.500] | |",
        "| lightning_flops | 30.00 [30.00–30.00] | 3.000 [3.000–3.000] | 1.200 [1.200–1.200] | 4.000 [4.000–4.000] "
        "| ≤ 1.2 × no-op: met |",
    ]


def test_what_a_watcher_adds_is_divided_by_the_operators() -> None:
    # 20 ms more over 1000 operators.
    assert added_per_operator(ROUNDS, OURS, operators=1000).text(1) == "20.0 [20.0–20.0]"


def test_only_what_stays_below_every_limit_meets_the_targets_for_large_models_and_a_peer_has_none() -> None:
    met, peer = modules_table({OURS: [0.020] * 3, "peer": [0.5] * 3}, {OURS: 2**20, "peer": 2**21})[2:]
    assert met == "| lightning_flops | 20.0 [20.0–20.0] | 1.00 MiB | ≤ 25 ms: met; ≤ 1 MiB held: met |"
    assert peer == "| peer | 500.0 [500.0–500.0] | 2.00 MiB | |"
    (missed,) = modules_table({OURS: [0.030] * 3}, {OURS: 2**20 + 1})[2:]
    assert missed == (
        "| lightning_flops | 30.0 [30.0–30.0] | 1.00 MiB | ≤ 25 ms: **missed**; ≤ 1 MiB held: **missed** |"
    )
