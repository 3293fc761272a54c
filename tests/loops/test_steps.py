"""Loops as strings of events, and what each of them would itself say of its steps.

A word is one event:

- ``F8``: the iterator F hands out 8 rows; ``F4*4`` a list of 4 parts of 4 rows, ``F?`` rows that nobody can count,
  ``F.`` its end. ``F'`` is a new iterator of F's loader, as in the next epoch.
- ``m8``: the model m is called with 8 rows; ``m8@x`` with the tensor x.
- Behind either: ``-`` without gradients, ``e`` with every model in evaluation mode.
- ``b``: a backward; ``a``: autograd.grad; ``(b ... )`` updates inside. ``u``, ``v``, ``w``: an update; ``u( ... )``
  calls a closure.
- ``;``: ``profiler.step()``. ``[ ... ]``: ``outside_of_steps()``. ``( ... )3``: three times.

What is expected: ``8/2`` is a step of 8 samples in 2 micro-steps, ``x3`` three of them, ``?`` samples that cannot be
known; ``S2`` two forwards without gradients that are the steps' own, ``O2`` two forwards outside of all steps; ``D2``
two fetches that are the steps' own, where it is asked for.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from lightning_flops.adapters.steps import Part, StepEnd, Steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOOPS = """
plain                                       | u   | (F8 m8 b u)4                                        | 8/1x4
the last batch is smaller                   | u   | (F8 m8 b u)2 F3 m3 b u F.                           | 8/1x2 3/1
without a loader                            | u   | (m8 b u)4                                           | 8/1x4
accumulation                                | u   | (F8 m8 b F8 m8 b F8 m8 b u)2                        | 24/3x2
accumulation with a tail                    | u   | F8 m8 b F8 m8 b u F8 m8 b F2 m2 b u F.              | 16/2 10/2
accumulation, a tail without an update      | u   | F8 m8 b F8 m8 b u F8 m8 b F. F'8 m8 b u             | 16/2x2
accumulation, all fetched first             | u   | (F8 F8 m8 b m8 b u)3                                | 16/2x3
accumulation without a loader               | u   | (m8 b m8 b u)3                                      | 16/2x3
accumulation, one fetched ahead             | u   | F8 (F8 m8 b F8 m8 b u)2 F8 m8 b F. m8 b u           | 16/2x3
GAN, D then G                               | uv  | (F8 d8 b g8 d8 b u d8 b v)3                         | 8/1x3
GAN, its optimizers in the other order      | vu  | (F8 d8 b g8 d8 b u d8 b v)3                         | 8/1x3
GAN, G then D                               | uv  | (F8 g8 d8 b v d8 d8 b u)3                           | 8/1x3
GAN of which D alone is given               | u   | (F8 d8 b d8 b u d8 b)3                              | 8/1x3
GAN of which G alone is given               | v   | (F8 b g8 b g8 b v)3                                 | 8/1x3
GAN, G trained twice                        | uv  | (F8 d8 d8 b u g8 d8 b v g8 d8 b v)3                 | 8/1x3
GAN, fetched ahead                          | uv  | F8 (F8 d8 d8 b u d8 b v)4                           | 8/1x4
GAN without a loader                        | uv  | (d8 b g8 d8 b u g8 d8 b v)3                         | 8/1x3
GAN, G without gradients for D              | uv  | (d8 g8- d8 b u g8 d8 b v)3                          | 8/1x3 S3
critics, each with a batch of its own       | uv  | (F8 d8 d8 b u F8 d8 d8 b u d8 b v)2                 | 8/1x4
critics in turns without a loader           | uv  | (d8 d8 b u d8 d8 b u d8 b v)2                       | ?/1x2
D and G on batches in turns                 | uv  | (F8 d8 b u F8 g8 d8 b v)2                           | 8/1x4
two loaders zipped for two directions       | uv  | (F4 E4 g4 g4 d4 b v d4 d4 b u)3                     | 8/1x3
a model that is not given, after            | u   | (F8 m8 b u b)3                                      | 8/1x3
a model that is not given, before           | u   | (F8 b m8 b u)3                                      | 8/1x3
a model that is not given, after, ahead     | u   | F8 (F8 m8 b u b)3                                   | 8/1x3
a teacher before                            | u   | (F8 t8e- m8 b u)3                                   | 8/1x3 S3
a teacher after                             | u   | (F8 m8 t8e- b u)3                                   | 8/1x3 S3
a teacher in training mode                  | u   | (F8 t8- m8 m8 b u)3                                 | 8/1x3 S3
a teacher, and an iterator for each epoch   | u   | F8 t8e- m8 b u F. F'8 t8e- m8 b u F'.               | 8/1x2 S2
a teacher from the second epoch on          | u   | (F8 m8 b u)2 (F8 t8e- m8 b u)2                      | 8/1x4 S2
crops in a list                             | u   | (F8*3 t8- t8- m8 m8 m8 b u)3                        | 8/1x3 S6
rollouts without a loader                   | u   | (m8e- m8e- m8e- m8 b u)3                            | 8/1x3 S6 O3
rollouts in training mode                   | u   | (m8- m8- m8- m8 b u)3                               | 8/1x3 S9
rollouts, then several epochs on them       | u   | (m8- m8- (m4 b u m4 b u)2)2                         | 4/1x8 S4
rollouts, then epochs of a loader           | u   | (m8- m8- F4 m4 b u F4 m4 b u F. F'4 m4 b u F'.)2    | 4/1x6 S4
rollouts by hand in another model           | u   | (m8- t8- m8 b u)3                                   | 8/1x3 S6
minibatches of a fetched batch              | u   | (F8 m4 b u m4 b u m4 b u m4 b u)2                   | 4/1x8
actor and critic, two optimizers            | uv  | (m8- m4 c4 b u v m4 c4 b u v)2                      | 4/1x4 S2
a prompt's completions                      | u   | (F8 m8e- m8e- m8 b u m8 b u)2                       | 8/1x4 S4
soft actor-critic, three optimizers         | uvw | (p8- c8 c8 b u p8 c8 b v b w)3                      | 8/1x3 S3
a replay buffer                             | u   | (m1- m1- m32 t32- b u)3                             | 32/1x3 S9
gradients of a cache                        | u   | (F8 m2- m2- m2- m2- m2 b m2 b m2 b m2 b u)3         | 8/4x3 S12
a batch in pieces                           | u   | (F16 m4 b m4 b m4 b m4 b u)3                        | 16/4x3
a batch in pieces, fetched ahead            | u   | F16 (F16 m4 b m4 b m4 b m4 b u)3 F.                 | 16/4x3
a batch in pieces, one backward             | u   | (F16 m4 m4 m4 m4 b u)3                              | 16/1x3
a list of batches                           | u   | (F4*4 m4 b m4 b m4 b m4 b u)3                       | 16/4x3
a list of samples                           | u   | (F3*8 m8 b u)3                                      | 8/1x3
pieces of a batch that nobody can count     | u   | (F? m4 b m4 b u)3                                   | ?/1x3
texts, made tensors in the loop             | u   | (F? m8 b u)3                                        | 8/1x3
fetched ahead                               | u   | F8 (F8 m8 b u)3 F. m8 b u                           | 8/1x4
fetched ahead, before the update            | u   | F8 (m8 F8 b u)3 m8 F. b u                           | 8/1x4
two fetched ahead                           | u   | F8 F8 (F8 m8 b u)2 F. m8 b u F. m8 b u              | 8/1x4
batches skipped at a resume                 | u   | F8 F8 F8 (F8 m8 b u)3                               | 8/1x3
two loaders zipped, two losses              | u   | (F8 E8 m8 m8 b u)3                                  | 16/1x3
two loaders zipped, joined                  | u   | (F8 E8 m16 b u)3                                    | 16/1x3
a second loader for pseudo-labels           | u   | (F8 E8 t8e- m8 m8 b u)3                             | 16/1x3 S3
a loader for each task                      | u   | (F8 m8 b E8 m8 b u)3                                | 16/2x3
two views                                   | u   | (F8 m8 m8 b u)3                                     | 8/1x3
two views without a loader                  | u   | (m8 m8 b u)3                                        | 8/1x3
two views joined                            | u   | (F8 m16 b u)3                                       | 8/1x3
two views, fetched ahead                    | u   | F8 (F8 m8 m8 b u)3                                  | 8/1x3
validation after an epoch                   | u   | (F8 m8 b u)2 F. (V8e- m8e-)2 V.e- (F'8 m8 b u)2 F'. | 8/1x4 O2
validation, no_grad around each forward     | u   | (F8 m8 b u)2 (V8e m8e-)2 V.e F8 m8 b u              | 8/1x3 O2
validation in training mode                 | u   | (F8 m8 b u)2 (V8- m8-)2 V.- F8 m8 b u               | 8/1x3 O2
validation, training mode, no_grad inside   | u   | (F8 m8 b u F8 m8 b u V8 m8- V8 m8- V.)2             | 8/1x4 S1 O3
validation inside of an epoch               | u   | (F8 m8 b u F8 m8 b u V4e- m4e- V4e- m4e- V.e-)2     | 8/1x4 O4
validation that breaks early                | u   | (F8 m8 b u V4e- m4e- F8e m8 b u)2                   | 8/1x4 O2
validation without a loader                 | u   | (F8 m8 b u F8 m8 b u m64e- m64e-)2                  | 8/1x4 O4
validation, no loader at all                | u   | (m8 b u m64e-)3                                     | 8/1x3 O3
validation first, no loader at all          | u   | (m8e- m8e- m8 b m8 b u m8 b m8 b u)2                | 16/2x4 O4
validation as a step's body begins          | u   | (F8 m8 b u F8 m64e- m64e- m8 b u)2                  | 8/1x4 O4
validation beside a teacher                 | u   | (F8 t8e- m8 b u F8 t8e- m64e- m8 b u)2              | 8/1x4 S4 O2
validation amid accumulation                | u   | (F8 m8 b V4e m4e- V4e m4e- V.e F8 m8 b u)2          | 16/2x2 O4
validation before training                  | u   | (V8- m8e-)2 V.- (F8 m8 b u)2                        | 8/1x2 O2
validation before training, no_grad inside  | u   | (V8e m8e-)3 V.e (F8 m8 b u)2                        | 8/1x2 S1 O2
validation of a model that is not given     | u   | (F8 m8 m8 b u V32 V32 V.)2 (F8 m8 m8 b u)2          | 8/1x4
a batch of validation at times              | u   | (F8 m8 b u F8 m8 b u V8 m8e-)2                      | 8/1x4 O2
validation after each step, fetched first   | u   | (F8 m8 b u V6 m6e-)4                                | 8/1x4 O4 D5
validation before each step, fetched first  | u   | (V6 m6e- F8 m8 b u)4                                | 8/1x4 S1 O3 D5
validation before each step, two views      | u   | (V6 m6e- F8 m8 m8 b u)4                             | 8/1x4 S1 O3 D5
validation before each step, of like rows   | u   | (V8 m8e- F8 m8 b u)4                                | 8/1x4 S1 O3 D5
all fetched and looked at, then trained     | u   | (F8 t8e- F8 t8e- m8 b m8 b u)3 | ?/1 16/2x2 S5 O1 D5
validation zipped before the batch          | u   | (V6 F8 m8 b u m6e-)4                                | 8/1x4 O4
validation, eval() inside, again and again  | u   | (F8 m8 b u V6 m6e- V6 m6e- V. V'6 m6e- V'.)3        | 8/1x3 O9 D4
validation fetched, no loader trains        | u   | (m8 b u V6 m6e-)4                                   | 8/1x4 O4
adapts to what it was evaluated on          | u   | (F8 m8 b u V6 m6e- V6 m6 b u)2 | 8/1 6/1 8/1 6/1 O2
pseudo-labels, their loader asked first     | u   | (E12 t12e- F8 m8 m12 b u)3                          | 20/1x3 S3 D6
two loaders, a teacher after each           | u   | (F8 t8e- E8 t8e- m8 m8 b u)3                        | 16/1x3 S6 D6
pseudo-labels after a warm-up               | u   | (F8 m8 b u)2 (E12 t12e- F8 m8 m12 b u)2 | 8/1x2 20/1x2 S2
pseudo-labels joined, their loader first    | u   | (E12 t12e- F8 m20 b u)3                             | 20/1x3 S3 D6
pseudo-labels joined, their loader last     | u   | (F8 E12 t12e- m20 b u)3                             | 20/1x3 S3 D6
pseudo-labels of its own, fetched last      | u   | (F8 E12 m12- m8 m12 b u)3                           | 20/1x3 S3 D6
pseudo-labels of its own, joined, last      | u   | (F8 E12 m12- m20 b u)3                              | 20/1x3 S3 D6
a teacher and a new loader later on         | u   | (F8 m8 b u)2 F. (E8 t8e- m8 b u)3                   | 8/1x5 S3 D6
averaged weights evaluated, own loader      | u   | (F8 m8 b u F8 m8 b u V8 t8e- V8 t8e- V.)2           | 8/1x4 S1 O3 D5
two views joined, many batches evaluated    | u   | (F8 m16 b u V8 m8e- V8 m8e- V.)3                    | 8/1x3 O6
a full batch, validation first              | u   | (V6 m6e- m8 b u)3                                   | 8/1x3 S1 O2 D1
the same, in training mode                  | u   | (V6 m6- m8 b u)3                                    | 8/1x3 S1 O2 D1
the same, the loader at its end             | u   | (V6 m6e- V. m8 b u)3                                | 8/1x3 S1 O2 D1
the same, of like rows                      | u   | (V8 m8e- V. m8 b u)3                                | 8/1x3 S1 O2 D1
rollouts of a fetched batch, trained in pieces | u | (F8 m8e- m4 b u m4 b u)3                            | 4/1x6 S3 D3
an epoch that begins in evaluation mode     | u   | (F8 m8 b u V8e- m8e- V.e- F'8e m8 b u F'8 m8 b u)2  | 8/1x6 O2
LBFGS                                       | u   | (F8 u( m8 b m8 b m8 b ))3                           | 8/1x3
LBFGS on a batch in pieces                  | u   | (F8 u( m4 b m4 b m4 b m4 b ))3                      | 8/2x3
LBFGS without a loader                      | u   | (u( m8 b m8 b m8 b ))3                              | 8/1x3
SAM                                         | u   | (F8 m8@x b m8@x b u)3                               | 8/1x3
SAM, targets like inputs                    | u   | (F8*2 m8@x b m8@x b u)3                             | 8/1x3
SAM without a loader                        | u   | (m8@x b m8@x b u)3                                  | 8/1x3
SAM, fetched ahead                          | u   | F8 (F8 m8@x b m8@x b u)3                            | 8/1x3
SAM in a closure                            | u   | (F8 m8@x b u( m8@x b ))3                            | 8/1x3
two optimizers of one model                 | uv  | (F8 m8 b u v)3                                      | 8/1x3
two optimizers in one                       | u   | (F8 m8 b u)3                                        | 8/1x3
two optimizers, accumulation, no loader     | uv  | (m8 b m8 b u v)3                                    | 16/2x3
an update that a scaler skips               | u   | F8 m8 b u F8 m8 b F8 m8 b u F8 m8 b u               | 8/1 16/2 8/1
an optimizer that makes no step             | uv  | (F8 m8 b u)3                                        | 8/1x3
several losses, a backward for each         | u   | (F8 m8 b b b u)3                                    | 8/1x3
several heads                               | uvw | (F8 e8 h8 k8 b u v w)3                              | 8/1x3
truncated backpropagation through time      | u   | (F8 m8 b u m8 b u m8 b u)2                          | 8/1x6
the same with two optimizers                | uv  | (F8 m8 b u v m8 b u v m8 b u v)2                    | 8/1x2
meta-learning by autograd.grad              | u   | (F4 m5 a m5 a m15 b m5 a m5 a m15 b u)3             | 4/1x3
meta-learning by an inner optimizer         | u   | (F4 m5 b m5 b m15 b u)3                             | 4/1x3
a physics-informed network                  | u   | (m90 a a m9 b u)3                                   | 90/1x3
a gradient penalty                          | u   | (F8 m8 a b u)3                                      | 8/1x3
one batch again and again                   | u   | F8 (m8@x b u)4                                      | 8/1x4
generation inside of each step              | u   | (F8 m8e- m8e- m8 b u)3                              | 8/1x3 S6
a batch that raises                         | u   | F8 m8 b u F8 m8 F8 m8 b u F8 m8 b u                 | 8/1x3
compiled: no forward is seen                | u   | (F8 b u)3                                           | 8/1x3
compiled: the whole step                    | u   | (F8 u)3                                             | 8/1x3
compiled, accumulation                      | u   | (F8 b F8 b u)3                                      | 16/2x3
compiled, no loader                         | u   | (b u)3                                              | ?/1x3
updates inside the backward                 | uv  | (F8 m8 (b u v ))3                                   | 8/1x3
no optimizer                                |     | (F8 m8 b u ;)3                                      | 8/1x3
step() after each batch of an accumulation  | u   | (F8 m8 b ; F8 m8 b u ;)3                            | 16/2x3
step() and several optimizers               | vu  | (F8 m8 b u c8 b v ;)3                               | 8/1x3
left out inside of a step                   | u   | (F8 m8 [ m8 V8 m8 ] b u)3                           | 8/1x3 O6
left out between steps                      | u   | (F8 m8 b u [ V8 m8 V8 m8 ])3                        | 8/1x3 O6
recomputation in the backward               | u   | (F8 m8 (b m8 )u)3                                   | 8/1x3
time first, 5 of 8 rows                     | u   | (F8 m5 b u)3 F.                                     | 5/1 8/1x2
time first, 35 of 8 rows                    | u   | (F8 m35 b u)3                                       | 8/1x3
rows that are left out                      | u   | (F8 m6 b u)3 F.                                     | 6/1 8/1x2
"""
UNDECIDED = """
SAM on new tensors, no loader: accumulation | u   | (m8 b m8 b u)3                                      | 16/2x3
sampling in training mode: the step's       | u   | (F8 m8 b u F8 m8 b u m1- m1- m1-)2                  | 8/1x4 S6
generation in every second step: validation | u   | (F8 m8e- m8e- m8 b u F8 m8 b u)2                    | 8/1x4 S2 O2
an item that is a batch: one sample         | u   | (F1 m64 b u)3                                       | 1/1x3
pairs, each trained: a list of batches      | uv  | (F8*2 d8 b g8 d8 b u d8 b v)3                       | 16/2x3
tasks of five shots, no loader              | u   | (m5 a m5 a m15 b u)3                                | 5/1x3
a part of what it was evaluated on          | u   | (V6 m6e- m4 b u)3                                   | 4/1 ?/1x2 S3
pseudo-labels of its own, fetched first     | u   | (E12 m12- F8 m8 m12 b u)3                           | ?/1x3 S1 O2
pseudo-labels of its own, joined            | u   | (E12 m12- F8 m20 b u)3                              | ?/1x3 S1 O2
two views, a batch like them evaluated      | u   | (F8 m8 m8 b u V8 m8e-)3                             | 8/1 ?/1x2 O3
"""  # What is said of loops that no rule can tell apart from others; docs/loops.md has the remedies.

REPEATED = re.compile(r"(?<![a-z])\(((?:[^()]|[ub]?\([^()]*\))*)\)(\d+)")
WORD = re.compile(
    r"(?P<source>[A-Z]'*)(?P<brought>\d+|\?|\.)(?:\*(?P<parts>\d+))?(?P<fetch>[e-]*)"
    r"|(?P<model>[a-z])(?P<rows>\d+)(?P<call>[e-]*)(?:@(?P<tensor>\w))?"
    r"|(?P<other>\(b|u\(|[bauvw();\[\]])"
)


def words_of(text: str) -> Iterator[re.Match[str]]:
    """The events of *text*, repetitions written out."""
    while (found := REPEATED.search(text)) is not None:
        text = text[: found.start()] + f" {found[1]} " * int(found[2]) + text[found.end() :]
    place = 0
    for word in WORD.finditer(text):
        assert not text[place : word.start()].strip(), text[place:]
        place = word.end()
        yield word
    assert not text[place:].strip(), text[place:]


@dataclass
class Played:
    """A loop whose events a machine has heard."""

    steps: Steps
    ended: list[StepEnd] = field(default_factory=list)
    forwards: Counter[Part] = field(default_factory=Counter)  # that bring no samples
    fetches: Counter[Part] = field(default_factory=Counter)
    tensors: set[str] = field(default_factory=set)
    open: list[str] = field(default_factory=list)

    def play(self, text: str) -> Played:
        for word in words_of(text):
            event = word.groupdict()
            if event["source"]:
                self._fetch(event)
            elif event["model"]:
                self._call(event)
            else:
                self._other(event["other"])
        return self

    def _take(self, part: Part = "step") -> Part:
        ended, self.steps.ended = self.steps.ended, None
        if ended is not None:
            self.ended.append(ended)
            self.tensors.clear()
        return part

    def _fetch(self, event: dict[str, Any]) -> None:
        source, brought, how = event["source"], event["brought"], event["fetch"]
        begins = self.steps.fetch_begins(source, source[0], grads="-" not in how, training="e" not in how)
        self.fetches[self._take(begins)] += 1
        if brought == ".":
            self.steps.fetch_fails(source)
        else:
            rows = None if brought == "?" else int(brought)
            self.steps.fetch_ends(source, rows, int(event["parts"] or 1), loader=source[0])

    def _call(self, event: dict[str, Any]) -> None:
        grads, training = "-" not in event["call"], "e" not in event["call"]
        same = event["tensor"] in self.tensors
        begins = self.steps.forward_begins(
            event["model"], int(event["rows"]), grads=grads, training=training, same=same
        )
        part = self._take(begins)
        if not grads or part == "outside":
            self.forwards[part] += 1
        self.steps.forward_ends()
        if event["tensor"]:
            self.tensors.add(event["tensor"])

    def _other(self, word: str) -> None:
        steps = self.steps
        if word in ("b", "a"):
            self._take(steps.backward_begins(grad_only=word == "a"))
            steps.backward_ends(grad_only=word == "a")
        elif word in ("(b", "u("):
            self.open.append(word)
            self._take(steps.backward_begins() if word == "(b" else steps.update_begins())
        elif word == ")" and self.open.pop() == "(b":
            steps.backward_ends()
        elif word == ")":
            self._take(steps.update_ends("u"))
        elif word == "[":
            steps.leave_out()
            self._take()
        elif word == "]":
            steps.take_in()
        elif word == ";":
            steps.mark()
            self._take()
        else:
            self._take(steps.update_begins())
            self._take(steps.update_ends(word))


def rows_of(table: str) -> list[Any]:
    rows = [[cell.strip() for cell in line.split(" | ", 3)] for line in table.strip().splitlines()]
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


@pytest.mark.parametrize(("optimizers", "text", "expected"), [*rows_of(LOOPS), *rows_of(UNDECIDED)])
def test_a_loop_has_the_steps_that_it_would_say_itself(optimizers: str, text: str, expected: str) -> None:
    played = Played(Steps(optimizers)).play(text)
    played.steps.finish()
    played._take()
    steps, looks = list[str](), {"S": 0, "O": 0}
    for word in expected.split():
        if "/" in word:
            what, _, times = word.partition("x")
            steps += [what] * int(times or 1)
        else:
            looks[word[0]] = int(word[1:])
    rows = [one.rows for one in played.ended]
    assert [f"{'?' if None in one else sum(filter(None, one))}/{len(one)}" for one in rows] == steps
    looked = {"S": played.forwards["step"], "O": played.forwards["outside"], "D": played.fetches["step"]}
    assert {kind: looked[kind] for kind in looks} == looks
    assert all(one.why for one in played.ended if None in one.rows)


CALLS = st.sampled_from(["m8", "m8", "m4", "d8", "m8-", "t8e-", "m8e-"])
ROUND = st.tuples(st.lists(CALLS, min_size=1, max_size=2), st.sampled_from(["b", "b", "b u", "b v", "a b"]))


@given(
    optimizers=st.sampled_from(["u", "uv"]),
    fetches=st.sampled_from(["F8", "F8 E8", "", "F8 F8"]),
    rounds=st.lists(ROUND, min_size=1, max_size=3),
    validation=st.sampled_from(["", "", "V32e- m32e- V32e- m32e- V.e-", "m8e-"]),
)
def test_of_any_loop_no_step_has_more_rows_than_were_handed_out_and_turns_are_alike(
    optimizers: str, fetches: str, rounds: Sequence[tuple[list[str], str]], validation: str
) -> None:
    middle = " ".join(" ".join([*calls, ends]) for calls, ends in rounds)
    body = f"{fetches} {middle} {' '.join(optimizers)} {validation}"
    played, turns = Played(Steps(optimizers)), list[list[StepEnd]]()
    for _ in range(16):
        before = len(played.ended)
        played.play(body)
        turns.append(played.ended[before:])
    late = turns[8:]
    assert all(one == late[0] for one in late) or all(one == two for one, two in itertools.pairwise(late[::2]))
    again = middle.count("u") + middle.count("v")  # a batch that is trained once more after an update is a step's again
    if fetches and not again:
        rows = [one for turn in late for step in turn for one in step.rows]
        handed_out = len(late) * 8 * len(fetches.split())
        assert None in rows or sum(filter(None, rows)) <= handed_out


def test_a_loader_that_reads_another_one_is_one_wait() -> None:
    steps = Steps(["optimizer"])
    assert steps.fetch_begins("outer") == "step"
    assert steps.fetch_begins("inner") == "inner"
    steps.fetch_ends("inner", 8)
    steps.fetch_ends("outer", 8)
    assert steps.fetch_begins("outer") == "step"


def test_where_the_loop_says_what_is_outside_only_a_loader_that_feeds_steps_ends_it() -> None:
    steps = Steps(["optimizer"])
    steps.known.says_outside = steps.away = True
    assert steps.fetch_begins("evaluation") == "outside" and steps.away
