"""Steps of the same shapes that add different numbers of nodes to autograd's graph do different work."""

from __future__ import annotations

import pytest

from lightning_flops.analysis.run_books import RunFlops
from lightning_flops.analysis.same_work import OtherWork, SameWork
from lightning_flops.analysis.step_keys import StepKey, by_kind
from lightning_flops.analysis.step_laws import StepLaws

FORWARD = ("forward", "float32")


def key(length: int) -> StepKey:
    return ((((4, length),),), 1)


def looked_at(nodes: list[int | None]) -> OtherWork | None:
    work = SameWork()
    ((steps, _),) = by_kind([key(8)], [1])
    work.book(steps, nodes)
    return work.other_work()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([8] * 100, None),
        ([500, *[8] * 100], None),  # the first one of its shapes may have been compiled
        ([8] * 80 + [15] * 21, OtherWork(21, 100)),
        ([8] * 97 + [15] * 4, None),  # too few to be sure
        ([8] * 994 + [80] * 5 + [8] * 2, None),  # under one percent of the steps
        ([40] * 900 + [47] * 101, None),  # seven nodes more in a tenth, as for figures that are logged: 1.7 percent
        ([40] * 900 + [49] * 101, OtherWork(101, 1000)),  # 2.2 percent
        ([None, *[8] * 50, None, *[15] * 7, None], OtherWork(7, 56)),
    ],
    ids=["alike", "first", "a fifth", "four", "few", "small", "larger", "unknown"],
)
def test_what_differs_in_many_steps_and_by_much_is_other_work(
    nodes: list[int | None], expected: OtherWork | None
) -> None:
    assert looked_at(nodes) == expected


def test_steps_of_other_shapes_may_do_other_work() -> None:
    work = SameWork()
    keys = [key(8), key(9)] * 50
    ((steps, _),) = by_kind(keys, [1] * 100)
    work.book(steps, [8, 15] * 50)
    assert work.other_work() is None
    work.book(steps, [15, 8] * 50)
    assert work.other_work() == OtherWork(49 + 49, 49 + 49 + 100)


def test_what_was_seen_of_shapes_that_are_forgotten_still_counts() -> None:
    work = SameWork()
    ((steps, _),) = by_kind([key(8)], [1])
    work.book(steps, [8] * 80 + [15] * 21)
    work.forget()
    assert work.other_work() == OtherWork(21, 100)
    work.book(steps, [8] * 50 + [15])  # of the shapes that are seen anew, the first is left out again
    assert work.other_work() == OtherWork(22, 150)


def test_a_runs_flops_are_not_foretold_where_chance_decides() -> None:
    laws = StepLaws(lambda _: None)
    laws.counted(key(8), {FORWARD: 100})
    books = RunFlops(laws)
    autograd = 0
    for _ in range(4):
        nodes = []
        for step in range(50):
            autograd += 15 if step % 5 == 0 else 8
            nodes.append(autograd)
        books.book_one_batch_each([key(8)[0][0]] * 50, [1] * 50, [1.0] * 50, nodes)
    totals = books.totals()
    assert (totals.model_flops, totals.steps_predicted, totals.steps_unknown) == (None, 0, 200)
    # Of each fifty, nobody knows where the first began: 9 of its 49 others do more. The very first of all is left out.
    assert totals.doubt == OtherWork(36, 195)
    assert books.sums(books.reading()) is None


def test_counted_steps_dispel_a_doubt_if_they_are_unlikely_to_be_alike_by_chance() -> None:
    """As with tokens that are sent to more experts, or to fewer, and are as many."""
    laws = StepLaws(lambda _: None)
    laws.counted(key(8), {FORWARD: 100})
    books = RunFlops(laws)
    nodes = [0]
    for step in range(100):
        nodes.append(nodes[-1] + (15 if step % 2 else 8))
    books.book([key(8)] * 101, [1.0] * 101, nodes)
    for confirmed in range(1, 5):  # 1/16 is more than 5%
        laws.counted(key(8), {FORWARD: 100})
        assert laws.confirmed == confirmed
        assert books.totals().model_flops is None
    laws.counted(key(8), {FORWARD: 100})  # 1/32
    assert books.totals().model_flops == 101 * 100
    sums = books.sums(books.reading())
    assert sums is not None and sums.model == 101 * 100


def test_steps_of_several_batches_and_of_several_kinds_are_compared_with_their_like() -> None:
    laws = StepLaws(lambda _: None)
    short: StepKey = ((((4, 8),),), 1)
    whole: StepKey = ((((4, 8),), ((4, 8),)), 1)
    laws.counted(short, {FORWARD: 100})
    laws.counted(whole, {FORWARD: 200})
    books = RunFlops(laws)
    nodes = [0]
    for step in range(99):
        nodes.append(nodes[-1] + (8 if step % 3 == 2 else 16))
    books.book([short, *([whole, whole, short] * 33)], [1.0] * 100, nodes)
    totals = books.totals()
    assert totals.model_flops == 34 * 100 + 66 * 200
