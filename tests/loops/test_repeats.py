"""Loops of which no event is applied where a step repeats the one before, beside loops that apply all of them."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.adapters.place import frame_of, loop_output
from lightning_flops.adapters.repeats import Repeats
from lightning_flops.config import config_from
from lightning_flops.measure.recorder import Recorder
from tests.loops.test_steps import LOOPS, rows_of, words_of

MODELS = sorted({*re.findall(r"[a-z](?=[0-9])", LOOPS), *"mdt"})


class Source:
    """An iterator of a loader."""

    def __init__(self, loader: object) -> None:
        self._index_sampler = loader


class Loader:
    """What its iterators have in common."""


class Heard:
    """The adapter of a loop that is played to it word by word, as of ``test_steps``, and what its run hears."""

    def __init__(
        self, optimizers: str, *, skips: bool, timer_only: bool = True, ends_when_dropped: bool = False
    ) -> None:
        models = nn.ModuleDict({name: nn.Identity() for name in MODELS})
        self.optimizers = {name: torch.optim.SGD([nn.Parameter(torch.ones(1))]) for name in "uvw"}
        config = config_from({"timer_only": timer_only, "profile_step": 10**6}, owner="profile_training")
        frame = frame_of(models, accelerator=None, fabric=None)
        output = loop_output(frame, config, log_dir=None)
        given = [self.optimizers[name] for name in optimizers]
        how: dict[str, Any] = {"frame": frame, "output": output, "ends_when_dropped": ends_when_dropped}
        self.adapter = LoopAdapter(models, given, config=config, publish=lambda _: None, **how)
        self.models, self.said, self.skipped = models, list[Any](), 0
        self.loaders = {name: Loader() for name in string.ascii_uppercase}
        self.sources: dict[str, Source] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.open: list[str] = []
        self.masks: Iterator[int] | None = None  # whether batches that a loader brings are tokens, or padding
        self.adapter.run.begin()
        for name in ("batch_done", "between_steps", "fetch_begins", "fetch_ends", "outside", "inside"):
            self._write_down(name)
        if not skips:
            self.adapter._repeats._may_skip = lambda: False

    def _write_down(self, name: str) -> None:
        original = getattr(self.adapter.run, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.said.append((name, args, {name: one for name, one in kwargs.items() if name != "logs"}))
            return original(*args, **kwargs)

        setattr(self.adapter.run, name, call)

    def play(self, text: str) -> Heard:
        for word in words_of(text):
            event = word.groupdict()
            with torch.no_grad() if "-" in (event["fetch"] or event["call"] or "") else nullcontext():
                self.models.train("e" not in (event["fetch"] or event["call"] or ""))
                self._hear(event)
            self.skipped += self.adapter._repeats.at not in (None, 0)
        return self

    def _hear(self, event: dict[str, Any]) -> None:
        adapter = self.adapter
        if name := event["source"]:
            source = self.sources.setdefault(name, Source(self.loaders[name[0]]))
            adapter.fetch_begins(source)
            shape = () if event["brought"] == "?" else (int(event["brought"].replace(".", "0")), 2)
            batch: Any = torch.ones(shape)
            batch = [batch] * int(event["parts"]) if event["parts"] else batch
            if self.masks and shape:
                batch = {"input_ids": batch.long(), "attention_mask": torch.ones(shape).long() * next(self.masks)}
            adapter.fetch_ends(None if event["brought"] == "." else batch)
        elif event["model"]:
            new = torch.ones(int(event["rows"]), 2)
            tensor = self.tensors.setdefault(event["tensor"], new) if event["tensor"] else new
            model = self.models[event["model"]]
            adapter.forward_begins(model, (tensor,), {})
            adapter.forward_ends(model, (), None if event["tensor"] == "x" else tensor)  # x: it raises
        elif (other := event["other"]) in ("b", "a"):
            adapter.backward_begins(grad_only=other == "a")
            adapter.backward_ends(grad_only=other == "a")
        elif other in ("(b", "u("):
            self.open.append(other)
            adapter.backward_begins() if other == "(b" else adapter.update_begins()
        elif other == ")":
            adapter.backward_ends() if self.open.pop() == "(b" else adapter.update_ends(self.optimizers["u"])
        elif other in "uvw":
            adapter.update_begins()
            adapter.update_ends(self.optimizers[other])
        elif other == "[":
            adapter.leave_out("something")
        elif other == "]":
            adapter.take_in()
        else:
            adapter.end_step()


def both(optimizers: str, text: str) -> tuple[Heard, Heard]:
    """The loop *text* with and without leaving out; both have come to the same at each place."""
    skips, applies = Heard(optimizers, skips=True), Heard(optimizers, skips=False)
    for word in words_of(text):
        skips.play(word[0])
        applies.play(word[0])
        assert skips.adapter.run.steps_done == applies.adapter.run.steps_done
    for one in (skips, applies):
        one.adapter._steps.finish()
        one.adapter._follow()
    return skips, applies


def assert_same(skips: Heard, applies: Heard) -> None:
    assert skips.said == applies.said
    assert state_of(skips.adapter) == state_of(applies.adapter)


def state_of(adapter: LoopAdapter) -> Any:
    """What decides on later events, but for names, of which each loop has its own."""
    steps, known = adapter._machine, adapter._machine.known
    sets = [len(one) for one in (known.feeders, known.evaluators, known.trainees, known.usual_lookers or ())]
    flags = (known.says_ends, known.says_batches, known.in_training_mode, known.calls, steps.away, steps._rest)
    step = (steps.step.rows, steps.step.forwards, steps.step.in_round, steps.step.computed, steps.step.why)
    waiting = [(one.rows, one.parts, one.left) for one in steps._waiting]
    return adapter._running, len(adapter._inputs), steps.inside, sets, flags, step, waiting


STEPS = (
    """
F8 m8 b u | F8 m8 b F8 m8 b u | m8 b u | F8 t8e- m8 b u | F8 E8 m8 m8 b u | F8 m8@y m8@y b u | F8*2 m8 b m8 b u
F8 m8 b u ; | F8 a m8 b u | F? m8 b u | F16 m4 b m4 b m4 b m4 b u | m8e- m8 b u | F8 m8 b u V4e- m4e-
F16 m4 b u | F16 m8 F8 m4 b u
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
OTHERS = "m4 m8 d8 m8- m8e- m8@x m8@y F8 F4 F'8 F. V8e- V8- E8 b a u v ; [ m8e- ] F8*2 t8e-".split()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), optimizers=st.sampled_from(["u", "u", "u", "", "uv"]))
def test_wherever_a_loop_departs_from_its_steps_all_is_as_if_applied(data: st.DataObject, optimizers: str) -> None:
    words: list[str] = []
    for _ in range(data.draw(st.integers(1, 3))):
        step = data.draw(st.sampled_from(STEPS) | st.lists(st.sampled_from(OTHERS), min_size=1).map(" ".join)).split()
        words += step * data.draw(st.integers(1, 7))
        words += step[: data.draw(st.integers(0, len(step)))]
        words += data.draw(st.lists(st.sampled_from(OTHERS), max_size=3))
    assert_same(*both(optimizers, " ".join(words)))


@pytest.mark.parametrize(("optimizers", "text", "expected"), rows_of(LOOPS))
def test_any_loop_that_goes_on_and_on_is_as_if_applied(optimizers: str, text: str, expected: str) -> None:
    assert_same(*both(optimizers, " ".join([text] * 4)))


@pytest.mark.parametrize("step", ["F8 m8 b u", "F8 m8 b F8 m8 b u", "m8 b u", "F8 t8e- m8 b u"])
def test_a_step_that_repeats_is_applied_no_more(step: str) -> None:
    skips, applies = both("u", f"({step})12")
    assert applies.skipped == 0 and skips.skipped > 3 * (len(step.split()) - 1)
    assert_same(skips, applies)


def test_alike_events_whose_steps_have_other_rows_are_applied() -> None:
    """Batches of 16 that are fetched ahead, of which 4 rows are trained: what waits grows, and with it the rows."""
    skips, applies = both("u", "(F16 m8 F8 m4 b u)9")
    rows = [said[2]["rows"] for said in skips.said if said[0] == "batch_done"]
    assert rows[:4] == [(12,), (12,), (12,), (16,)] and len(rows) == 9
    assert_same(skips, applies)


def test_tokens_that_a_loader_brings_are_each_step_s_own() -> None:
    """Where the model gets them on a device each batch is read when it was fetched; an evaluation's are no step's."""
    loops = Heard("u", skips=True), Heard("u", skips=False)
    masks = [1] * 9 + [0] + [1] * 9
    for one in loops:
        one.adapter._known.reads_fetched = one.adapter.run.tokens.reads = True
        one.masks = iter(masks)
        one.play("(F8 m8 b u)15 V8e- m8e- F8 m8 b u F8 m8 b u")
    assert_same(*loops)
    done = [said[1][0][2] for said in loops[0].said if said[0] == "batch_done"]
    assert [one.real for one in done] == [16 * one for one in (*masks[:15], *masks[16:18])]
    assert loops[0].skipped > 20


def test_a_step_that_was_drawn_is_counted_from_its_first_forward_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that ends when it is dropped: what counts would keep its model alive before."""
    loop = Heard("u", skips=True, timer_only=False, ends_when_dropped=True)
    counted, run = list[int](), loop.adapter.run
    original = Recorder.sample

    def sample(self: Recorder, *, steps_done: int) -> None:
        counted.append(steps_done)
        original(self, steps_done=steps_done)

    monkeypatch.setattr(Recorder, "sample", sample)
    run.throughput.draws_check = lambda: False
    loop.play("(m8 b u)7")
    assert counted == [1]  # its shapes were new
    drawn = iter([True, False])
    run.throughput.draws_check = lambda: next(drawn)
    loop.play("(m8 b u)2")
    run.close()
    assert counted == [1, 8]


def test_a_step_in_the_state_of_none_before_is_applied() -> None:
    """What is added up is what each event adds to what there was: nothing repeats until the sum does."""
    total, said = [0], list[int]()

    def apply(owner: list[int], more: int) -> None:
        owner[0] += more
        said.append(owner[0])
        repeats.ends(may_repeat=True)

    repeats = Repeats(total, state=lambda: total[0], may_skip=lambda: True, again=lambda: said.append(-1))
    for _ in range(3):
        repeats.hear(apply, 1)
    for _ in range(4):
        repeats.hear(apply, 0)
    assert said == [1, 2, 3, 3, 3, 3, -1]


def test_a_step_that_never_ends_is_not_kept() -> None:
    repeats = Repeats(None, state=lambda: None, may_skip=lambda: True, again=lambda: None)
    for _ in range(5000):
        repeats.hear(lambda _: None)
    assert repeats._events is None
