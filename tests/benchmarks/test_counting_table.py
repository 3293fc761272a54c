from __future__ import annotations

from benchmarks.counting_table import Footprint, StepSeconds, added_per_operator, modules_table, step_table
from benchmarks.ratios import Target


def same(inside: float, around: float = 0.0) -> list[StepSeconds]:
    return [StepSeconds(inside=inside, whole=inside + around)] * 3


ROUNDS = {"plain": same(0.010), "no-op": same(0.025), "ours": same(0.030, 0.010)}


def test_a_step_is_divided_by_the_plain_one_and_by_the_floor() -> None:
    lines = step_table(
        ROUNDS, plain="plain", floor="no-op", ours="ours", target=Target(limit=1.2, unit="× no-op"), target_base="no-op"
    )
    assert lines[2:] == [
        "| plain | 10.00 [10.00–10.00] | 1 |  | 1 |  |",
        "| no-op | 25.00 [25.00–25.00] | 2.500 [2.500–2.500] | 1 | 2.500 [2.500–2.500] |  |",
        "| ours | 30.00 [30.00–30.00] | 3.000 [3.000–3.000] | 1.200 [1.200–1.200] | 4.000 [4.000–4.000] "
        "| ≤ 1.2 × no-op: met |",
    ]


def test_what_a_watcher_adds_is_spread_over_the_operators() -> None:
    # 20 ms more over 1000 operators.
    assert added_per_operator(ROUNDS, "ours", plain="plain", operators=1000).text(1) == "20.0 [20.0–20.0]"


def test_only_what_stays_below_every_limit_meets_the_targets_for_large_models() -> None:
    small = Footprint(held_bytes=2**20, left_bytes=0, left_hooks=0, left_attributes=0)
    large = Footprint(held_bytes=2**20 + 1, left_bytes=2**19, left_hooks=1, left_attributes=2)
    (met,) = modules_table({"ours": [0.020] * 3}, {"ours": small}, ours="ours")[2:]
    assert met == (
        "| ours | 20.0 [20.0–20.0] | 1.00 MiB | 0 hooks, 0 attributes, 0.00 MiB "
        "| ≤ 25 ms: met; ≤ 1 MiB held: met; nothing left: met |"
    )
    (missed,) = modules_table({"ours": [0.030] * 3}, {"ours": large}, ours="ours")[2:]
    assert missed == (
        "| ours | 30.0 [30.0–30.0] | 1.00 MiB | 1 hooks, 2 attributes, 0.50 MiB "
        "| ≤ 25 ms: **missed**; ≤ 1 MiB held: **missed**; nothing left: **missed** |"
    )


def test_a_peer_has_no_target() -> None:
    footprint = Footprint(held_bytes=0, left_bytes=0, left_hooks=0, left_attributes=0)
    assert modules_table({"peer": [0.5] * 3}, {"peer": footprint}, ours="ours")[2].endswith("|  |")
