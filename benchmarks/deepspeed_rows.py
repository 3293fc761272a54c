"""Programs with DeepSpeed's profiler switched on by its config's block, one for each way in which it is known to fail.

``python -m benchmarks.deepspeed_rows NAME`` runs one as a user would. Nothing here knows of this project's profiler;
``python -m lightning_flops run -m benchmarks.deepspeed_rows NAME`` is the same program under it. In
``ROWS`` stand the forward FLOPs of the counted step on rank 0, worked out by hand (how is said in
results/deepspeed_side_by_side.md), and the lines of the output that the row is about.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BATCH, WIDTH = 8, 256
LAYER = 2 * BATCH * WIDTH * WIDTH  # FLOPs of the forward of a linear layer from 256 to 256 features, on a batch of 8

SUMMARY = (r"^Profile Summary", r"^The report came out", r"^fwd flops per GPU:")
TRAINED = (*SUMMARY, r"Error", r"^trained")
BLOCK = {"enabled": True, "profile_step": 2, "timing_steps": 5}


class Row(NamedTuple):
    """One way in which DeepSpeed's own profiler fails, and the program that shows it."""

    program: Callable[[], None]
    flops: int | None  # Forward FLOPs of the counted step on rank 0; None if the program never finishes one
    keep: tuple[str, ...]  # Patterns of the lines that the row is about, in both outputs
    block: str | None  # Pattern of a line from which all is kept, up to a closing parenthesis alone on its line
    ranks: int


ROWS: dict[str, Row] = {}
"""By the programs' names."""


def _row(flops: int | None, *keep: str, block: str | None = None, ranks: int = 1) -> Callable[..., Callable[[], None]]:
    """Decorates the program of a row."""

    def put(program: Callable[[], None]) -> Callable[[], None]:
        ROWS[program.__name__] = Row(program, flops, keep, block, ranks)
        return program

    return put


def engine_for(model: nn.Module, *, stage: int = 0, accumulate: int = 1, more: Any = None, **block: Any) -> Any:
    """A DeepSpeed engine whose config has the ``"flops_profiler"`` block, switched on."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "flops_profiler": {**BLOCK, **block},
        **(more or {}),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, micro_steps: int = 16, *inputs: Tensor) -> None:
    """*micro_steps* times forward, backward and step."""
    for _ in range(micro_steps):
        loss = engine(*(inputs or (torch.ones(BATCH, WIDTH),))).square().mean()
        engine.backward(loss)
        engine.step()


def mlp(width: int = WIDTH, layers: int = 2) -> nn.Sequential:
    """Linear layers of one width."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Net(nn.Module):
    """A layer and a weight; its forward is *call*, given it and a batch."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.child = nn.Linear(WIDTH, WIDTH)
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        """What *call* makes of *x*."""
        return self._call(self, x)


@_row(2 * LAYER, *SUMMARY, r"^fwd MACs per GPU", block=r"^Net\($")
def root_module() -> None:
    """A product in the root's own forward, and one in a child."""
    train(engine_for(Net(lambda net, x: net.child(x @ net.weight))))


@_row(4 * 2 * LAYER, *SUMMARY, r"^batch size per GPU", r"^iter latency", r"^samples/second:")
def accumulation() -> None:
    """Four micro-steps to a step."""
    train(engine_for(mlp(), accumulate=4), 40)


@_row(2 * 4 * LAYER, *SUMMARY, r"^params ", r"^trainable params", ranks=2)
def zero_3() -> None:
    """Parameters in parts, one on each of two ranks; smaller layers than these, DeepSpeed does not part."""
    train(engine_for(mlp(2 * WIDTH), stage=3), 16, torch.ones(BATCH, 2 * WIDTH))


@_row(4 * LAYER, *TRAINED)
def two_forwards() -> None:
    """Two forwards and one backward in a step."""
    engine = engine_for(mlp())
    for _ in range(16):
        loss = (engine(torch.ones(BATCH, WIDTH)) - engine(torch.zeros(BATCH, WIDTH))).square().mean()
        engine.backward(loss)
        engine.step()
    print("trained to the end")


@_row(2 * LAYER, *TRAINED)
def lightnings_self() -> None:
    """A LightningModule whose training_step calls ``self(x)``, under DeepSpeedStrategy."""
    from lightning.pytorch import LightningModule
    from torch.utils.data import DataLoader, TensorDataset

    from tests.deepspeed.on_cpu import strategy
    from tests.lightning.nets import ROOT, new_trainer

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: Tensor) -> Any:
            return self.layers(x)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    config = {"zero_allow_untested_optimizer": True, "flops_profiler": BLOCK}
    trainer = new_trainer(ROOT, ".", strategy=strategy(ROOT, config, ranks=1))
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(16 * BATCH, WIDTH)), batch_size=BATCH))
    print("trained to the end")


@_row(8 * LAYER, *TRAINED, r"^params (per|of)", r"^bubble +\d", r"^(stage|[01]) +(ranks|\d) ", ranks=2)
def pipeline() -> None:
    """Two stages of a pipeline, on two ranks."""
    from deepspeed.pipe import PipelineModule

    layers = PipelineModule([nn.Linear(WIDTH, WIDTH) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss())
    engine = engine_for(layers, accumulate=4)
    batches = iter(lambda: (torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)), None)
    for _ in range(16):
        engine.train_batch(batches)
    print("trained to the end")


@_row(2 * LAYER, *SUMMARY, r"^fwd latency:", r"^steps of more", r"^  step \d")
def compiled() -> None:
    """A model that torch.compile compiles, whose slow steps are printed."""
    engine = engine_for(mlp(), profile_step=4)
    engine.compile()
    slow = []
    for step in range(24):
        start = time.perf_counter()
        train(engine, 1)
        slow += [f"step {step}: {time.perf_counter() - start:.1f} s"] * (time.perf_counter() - start > 0.5)
    print("steps of more than half a second:", *slow, sep="\n  ")


@_row(LAYER + 2 * (2 * 8 * 4 * 16 * 16 * 4), *TRAINED)
def attention_by_keywords() -> None:
    """Attention that is called by keywords."""

    def attention(x: Tensor) -> Tensor:
        heads = x.view(BATCH, 4, 16, -1)
        return nn.functional.scaled_dot_product_attention(query=heads, key=heads, value=heads)

    train(engine_for(Net(lambda net, x: attention(net.child(x)))))
    print("trained to the end")


@_row(None, r"^raised", r"^torch\.nn\.functional", r"^hooks", r"^attributes", r"profiled")
def exception_in_the_step() -> None:
    """A user's step that fails in the profiled step, is caught, and goes on without DeepSpeed."""
    linear, steps = nn.functional.linear, iter(range(5))

    def fails_from_the_third_step_on(net: Any, x: Tensor) -> Any:
        result = net.child(x)
        if next(steps) > 1:
            raise RuntimeError("the user's own")
        return result

    model = Net(fails_from_the_third_step_on)
    engine = engine_for(model)
    train(engine, 2)
    for _ in range(3):
        try:
            train(engine, 1)
        except Exception as error:
            print(f"raised: {type(error).__name__}: {error}")
    print("torch.nn.functional.linear is torch's own:", nn.functional.linear is linear)
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.children())
    print("hooks on the model's modules:", hooks)
    print("attributes that a layer did not have:", sorted(set(vars(model.child)) - set(vars(nn.Linear(1, 1)))))


@_row(2 * LAYER, *SUMMARY, r"wall_clock", r"time \(ms\)")
def the_block_itself() -> None:
    """Twelve steps, with DeepSpeed's own log."""
    logging.getLogger("DeepSpeed").setLevel(logging.INFO)
    engine = engine_for(mlp())
    print("wall_clock_breakdown:", engine.wall_clock_breakdown())
    train(engine, 12)


@_row(2 * LAYER, *SUMMARY, r"^tags", r"^  [A-Za-z_]+/")
def tensorboard() -> None:
    """TensorBoard switched on in the config."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(engine_for(mlp(), more={"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"}}), 20)
    read = EventAccumulator("logs/run").Reload()
    print("tags in TensorBoard:")
    for tag in sorted(tag for kind in ("scalars", "tensors") for tag in read.Tags()[kind]):
        print(f"  {tag}")


@_row(4 * LAYER, *SUMMARY, r"^depth", r"^    (params|MACs|fwd latency) ", block=r"^Sequential\($")
def module_depth() -> None:
    """A report down to depth 1: the root and its children."""
    train(engine_for(nn.Sequential(mlp(), mlp()), module_depth=1))


def main() -> None:
    """Run the program that the command line names, as one rank of its job."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute to compile, and not looked at here
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    ROWS[sys.argv[1]].program()


if __name__ == "__main__":
    main()
