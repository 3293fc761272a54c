"""Small programs, each with one cause of slowness planted that its remedy takes away, and clean ones without any.

Each trains under the profiler and then alone: `report` says what the profiler advised, and how long a sample took after
its window, with the cause and under the remedy. That is the one that the advice words, with the workers that it names.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops.measure.lines import LEAST_SEC, LEAST_STEPS, MOST_STEPS
from lightning_flops.pytorch import profile_training
from tests.corpus.case import Parts

from .advice_causes import CAUSES
from .advice_frameworks import Lightning, Transformers
from .advice_parts import CLOCK, Planted, Program, Samples, Step, WholeBatches, in_turns, perceptron, same, typical
from .advice_rest import REST

FORK = multiprocessing.get_context("fork")
SECONDS, STEPS, LEFT_OUT = 0.2, 10, 10
"""Of a block of steps that the program itself times, once the profiler is done. The first steps are left out: caches,
and what loaders fetched."""

_FIRST = 4  # steps at least, of programs whose steps are long

_WINDOW_STEPS = 34
"""Counted, left alone, timed, warmed up and traced ones."""


_adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def encoder(width: int, inside: int) -> nn.Module:
    """Two layers of a transformer's encoder, with four heads and *inside* features in their MLPs."""
    layer = nn.TransformerEncoderLayer(width, 4, inside, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def recurrent() -> nn.Module:
    """The output of an LSTM, without its state."""
    return Parts(lambda net, rows: net.layer(rows)[0], layer=nn.LSTM(64, 64, batch_first=True))


def decode() -> None:
    """A sample is computed."""
    sum(number * number for number in range(20_000))


def _loader(load: Callable[[], object], workers: int) -> Iterable[Any]:
    return DataLoader(Samples(load, 384), batch_size=16, num_workers=workers, persistent_workers=workers > 0)


def slow_storage(workers: int | None) -> Program:
    """Each sample is waited for, as on a disk or a network."""
    return Program(perceptron(layers=12), _loader(partial(time.sleep, 0.002), workers or 0), 16)


def slow_decoding(workers: int | None) -> Program:
    """Each sample is computed."""
    return Program(perceptron(layers=12), _loader(decode, workers or 0), 16)


def many_samples(workers: int | None) -> Program:
    """Each batch is collated from many small samples, which takes less than a millisecond."""
    if workers is None:
        return Program(perceptron(width=64), DataLoader(Samples(bool, 64), batch_size=64), 64)
    whole = DataLoader(WholeBatches(bool, 64), batch_size=64, collate_fn=lambda batch: batch)
    return Program(perceptron(width=64), whole, 64)


class TokenModel(nn.Module):
    """An encoder of tokens that takes a batch as Hugging Face's models do."""

    def __init__(self) -> None:
        """Small."""
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.layers = perceptron(nn.GELU, width=128)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """One number a token, zero for padding."""
        return torch.mul(self.layers(self.embedding(input_ids)), attention_mask[..., None])


def padded(workers: int | None) -> Program:
    """Samples of 8 to 256 tokens, padded to the longest that there is; or to that of a batch of similar lengths."""
    lengths = torch.randint(8, 257, (1024,)).tolist()
    if workers is not None:
        lengths.sort()
    groups = [lengths[at : at + 16] for at in range(0, 1024, 16)]

    def batch(group: Sequence[int]) -> dict[str, torch.Tensor]:
        width = 256 if workers is None else max(group)
        mask = torch.arange(width)[None] < torch.tensor(group)[:, None]
        return {"input_ids": torch.randint(1000, mask.shape), "attention_mask": mask.long()}

    order = torch.randperm(len(groups)).tolist()
    return Program(TokenModel(), [batch(groups[at]) for at in order], 16)


def tensor_by_tensor(workers: int | None) -> Program:
    """Many small parameters, updated one after the other."""
    optimizer = partial(_adamw, fused=workers is not None)
    return Program(perceptron(width=32, layers=60), same(64, 32), 64, optimizer)


class WrittenOutNorm(nn.Module):
    """LayerNorm in Python."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of mean 0 and variance 1."""
        centered = rows - rows.mean(-1, keepdim=True)
        return centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)


def written_out_norm(workers: int | None) -> Program:
    """Norms that consist of five operators each."""
    norm = WrittenOutNorm if workers is None else partial(nn.LayerNorm, 128)
    return Program(perceptron(norm, width=128), same(4096, 128), 4096)


def dropout(workers: int | None) -> Program:
    """Dropout of large activations."""
    return Program(perceptron(partial(nn.Dropout, 0.1 if workers is None else 0.0)), same(256, 384), 256)


def keep_busy(cores: int) -> list[Any]:
    """Processes that keep so many cores busy, until they or this process end."""
    processes = [FORK.Process(target=deque, args=(repeat(None), 0), daemon=True) for _ in range(cores)]
    for process in processes:
        process.start()
    return processes


def late_rank(workers: int | None) -> Program:
    """One of two ranks computes something else in each step."""
    rank = int(os.environ["RANK"])
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")

    def batches() -> Iterator[torch.Tensor]:
        for batch in same(64, 384):
            if rank == 1 and workers is None:
                time.sleep(0.02)
            yield batch

    return Program(nn.parallel.DistributedDataParallel(perceptron()), batches(), 64)


PLANTED: dict[str, Planted] = {
    "slow_storage": Planted(slow_storage, "data_wait", "__getitem__"),
    "slow_decoding": Planted(slow_decoding, "data_wait", "decode"),
    "many_samples": Planted(many_samples, "data_wait_short"),
    "padded": Planted(padded, "padding"),
    "tensor_by_tensor": Planted(tensor_by_tensor, "optimizer", "AdamW"),
    "written_out_norm": Planted(written_out_norm, "norm"),
    "dropout": Planted(dropout, "dropout"),
    "late_rank": Planted(late_rank, "straggler", "rank 1"),
    **CAUSES,
    **REST,
}
"""Programs with the rule that knows their cause, or the beginning of its name."""


CLEAN: dict[str, Callable[[], Any]] = {
    "perceptron": lambda: Program(perceptron(), same(256, 384), 256),
    "relu": lambda: Program(perceptron(nn.ReLU), same(256, 384), 256),
    "gelu_fused_adamw": lambda: Program(perceptron(nn.GELU), same(256, 384), 256, _adamw),
    "layer_norm": lambda: Program(perceptron(partial(nn.LayerNorm, 384)), same(256, 384), 256),
    "batch_norm": lambda: Program(perceptron(partial(nn.BatchNorm1d, 384)), same(256, 384), 256),
    "convolutions": lambda: Program(
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)), same(8, 3, 48, 48), 8
    ),
    "lstm": lambda: Program(recurrent(), same(16, 32, 64), 16),
    "encoder": lambda: Program(encoder(128, 256), same(8, 64, 128), 8, _adamw),
    "wide": lambda: Program(perceptron(width=1024, layers=2), same(64, 1024), 64),
    "lightning": Lightning,
    "transformers": Transformers,
    "small": lambda: Program(perceptron(nn.Tanh, width=96, layers=2), same(512, 96), 512),
}
"""Programs in which nothing is to be found."""


def run(name: str, obey: int | None, keep: Path | None) -> dict[str, Any]:
    """Train the program *name* under the profiler, then time it alone beside itself under the remedy.

    With *obey* it is under the remedy, with so many workers, from the start. Its profile is written to *keep*.
    """
    make = PLANTED[name].make if name in PLANTED else lambda workers: CLEAN[name]()
    program = make(obey)
    own = _trained(program)
    profile = own.profile()
    if keep is not None and profile is not None:
        keep.write_text(profile.to_json())
    advice = [] if profile is None else profile.advice
    found = {
        "advice": [[one.rule, one.fact, one.remedy, one.saves, one.at_least] for one in advice],
        "starved": bool(profile and profile.starved),
    }
    if name in CLEAN or obey is not None:
        return found
    workers = re.search(r"num_workers=(\d+)", " ".join(one.remedy for one in advice))
    torch.manual_seed(0)
    remedied = make(int(workers[1]) if workers else 0)
    pairs = [(typical(one), typical(other).seconds) for one, other in own.beside(_trained(remedied))]
    lines = None if profile is None or profile.lines is None else profile.lines.rows
    function = PLANTED[name].where.rpartition(" ")[2]
    shares = [one.share or 0.0 for one in lines or () if one.function.rpartition(".")[2] == function]
    return found | {
        "pairs": [(one.seconds / program.samples, other / remedied.samples) for one, other in pairs],
        "by_clocks": statistics.median(one.cause_sec / one.seconds for one, _ in pairs),
        "by_lines": sum(shares) if shares else None,
    }


def _trained(program: Any) -> Any:
    """What has a profile, and blocks of steps that nothing watches: a fit of a framework has both itself."""
    return _Trained(program) if isinstance(program, Program) else program


class _Trained:
    """A program and its training, a number of steps at a time."""

    def __init__(self, program: Program) -> None:
        self.program, self.optimizer = program, program.optimizer(list(program.model.parameters()))
        self.batches = chain.from_iterable(repeat(program.batches))

    def profile(self) -> Any:
        """Its profile, once all of the window is over."""
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {"profile_step": 3, "log_dir": folder, "html": False}
            with profile_training(self.program.model, self.optimizer, **settings) as profiler:
                step_sec = typical(self.steps(_WINDOW_STEPS)).seconds
                most = MOST_STEPS if torch.distributed.is_initialized() else math.ceil(2 * LEAST_SEC / step_sec)
                self.steps(LEAST_STEPS + min(MOST_STEPS, most))
        return profiler.profile

    def beside(self, other: _Trained) -> Iterator[tuple[list[Step], list[Step]]]:
        """Blocks of its steps and of the *other's*, in turns."""
        return in_turns(self.timed, other.timed)

    def timed(self) -> list[Step]:
        """A block of steps that nothing watches."""
        if torch.distributed.is_initialized():  # other ranks must take as many
            self.steps(LEFT_OUT)
            return self.steps(STEPS)
        step_sec = typical(self.steps(_FIRST)).seconds
        self.steps(min(LEFT_OUT - _FIRST, math.ceil(SECONDS / step_sec)))
        return self.steps(max(_FIRST, math.ceil(SECONDS / step_sec)))

    def steps(self, count: int) -> list[Step]:
        """So many steps."""
        program, ended = self.program, (time.perf_counter(), CLOCK.seconds)
        found = []
        for batch in islice(self.batches, count):
            if program.before is not None:
                batch = program.before(batch)
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(partial(self._forth_and_back, batch))  # type: ignore[no-untyped-call]
            else:
                self._forth_and_back(batch)
                self.optimizer.step()
            before, ended = ended, (time.perf_counter(), CLOCK.seconds)
            found.append(Step(ended[0] - before[0], ended[1] - before[1]))
        return found

    def _forth_and_back(self, batch: Any) -> Any:
        program = self.program
        self.optimizer.zero_grad()
        if program.loss is not None:
            loss = program.loss(program.model, batch)
        else:
            output = program.model(**batch) if isinstance(batch, dict) else program.model(batch)
            loss = output.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if program.after is not None:
            program.after(program.model)
        return loss


def report(name: str, obey: int | None, keep: Path | None) -> dict[str, Any]:
    """What `run` finds of the program *name*, on as many ranks as it has."""
    ranks = 2 if name == "late_rank" else 1
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
    others = [FORK.Process(target=_report, args=(name, obey, None, rank, ranks)) for rank in range(1, ranks)]
    for other in others:
        other.start()
    found = _report(name, obey, keep, 0, ranks)
    for other in others:
        other.join()
    return found


def _report(name: str, obey: int | None, keep: Path | None, rank: int, ranks: int) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return run(name, obey, keep)
