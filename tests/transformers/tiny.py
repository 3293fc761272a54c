"""A tiny GPT-2 and a smaller net, what they are trained on, and quiet Trainers for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import data_loader as accelerate_loaders
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_flops import FlopsProfilerTrainerCallback
from lightning_flops.records import PhaseFlops
from tests.fake_clock import FakeNow
from tests.left_on_objects import is_ours, written_on
from tests.left_on_torch import torch_state
from tests.lightning import nets

VOCAB, WIDTH, LAYERS, LENGTH, BATCH = 32, 8, 2, 6, 4

ROWS, IN, OUT = 4, nets.IN, nets.OUT


def gpt2_flops(sequences: int) -> PhaseFlops:
    """FLOPs of a forward and backward of the tiny GPT-2; a multiply-add is two."""
    tokens = sequences * LENGTH
    qkv = 2 * tokens * WIDTH * 3 * WIDTH
    projection = 2 * tokens * WIDTH * WIDTH
    scores_and_values = 2 * (2 * tokens * LENGTH * WIDTH)  # over the whole matrix, padding and future included
    mlp = 2 * (2 * tokens * WIDTH * 4 * WIDTH)
    head = 2 * tokens * WIDTH * VOCAB
    forward = LAYERS * (qkv + projection + scores_and_values + mlp) + head
    # The gradients of both factors of each product; the first one's input is an embedding, which is trained, too.
    return PhaseFlops(forward=forward, backward=2 * forward)


def new_gpt2() -> GPT2LMHeadModel:
    """The tiny GPT-2, with dropout, always with the same weights."""
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def length_of(index: int) -> int:
    """Tokens of a sentence that are no padding: 6, 5, 4, 3, 6, …"""
    return LENGTH - index % 4


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of 6 tokens, some of them padding, always the same; without *masks* only labels hint at it."""

    def __init__(self, number: int, *, masks: bool = True) -> None:
        self.number = number
        self.masks = masks

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) * (index + 3)) % VOCAB
        mask = (torch.arange(LENGTH) < length_of(index)).long()
        row = {"input_ids": ids, "labels": torch.where(mask.bool(), ids, -100)}
        return {**row, "attention_mask": mask} if self.masks else row


class Rows(nets.Rows):
    """Rows for the net, always the same; fetching one may take time."""

    def __getitem__(self, index: int) -> Any:
        return dict(zip("xy", super().__getitem__(index), strict=True))


class Net(nn.Module):
    """One layer. A forward takes 2 s of *now*, its backward 4 s in a hook of autograd's, and zero_grad 16 s."""

    def __init__(self, now: FakeNow | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(IN, OUT)
        self.now = now
        self.losses: list[float] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.now is not None:
            self.now.sleep(16.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor, input_ids: Any = None) -> dict[str, torch.Tensor]:
        out = nn.functional.dropout(self.layer(x), 0.25, self.training)
        now = self.now
        if now is not None:
            now.sleep(2.0 if self.training else 1000.0)
            if out.requires_grad:
                out.register_hook(lambda _: now.sleep(4.0))  # type: ignore[no-untyped-call]
        loss = nn.functional.mse_loss(out, y)
        self.losses.append(loss.item())
        return {"loss": loss}


def profiler(**settings: Any) -> FlopsProfilerTrainerCallback:
    """A callback whose window is short, and traces nothing."""
    return FlopsProfilerTrainerCallback(**{"profile_step": 1, "timing_steps": 2, "trace": False, **settings})


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    """Quiet arguments for the CPU; everything is written below *folder*."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "num_train_epochs": 1,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 11,
    }
    return TrainingArguments(**{**settings, **given})


def new_trainer(
    folder: Path, *callbacks: Any, data: Any = None, kind: type[Trainer] = Trainer, **given: Any
) -> Trainer:
    """A Trainer of the tiny GPT-2 on *data*, 8 batches of sentences if there is none."""
    rows = Sentences(8 * BATCH) if data is None else data
    own = {name: given.pop(name) for name in ("eval_dataset", "compute_metrics") if name in given}
    return kind(model=new_gpt2(), args=arguments(folder, **given), train_dataset=rows, callbacks=list(callbacks), **own)


def new_net_trainer(
    folder: Path,
    *callbacks: Any,
    rows: Dataset[Any] | None = None,
    now: FakeNow | None = None,
    kind: type[Trainer] = Trainer,
    eval_dataset: Any = None,
    **given: Any,
) -> Trainer:
    """A Trainer of the net on *rows*, 8 batches if there are none; steps are short."""
    net = Net(now)
    optimizer = nets.SlowSGD(net.parameters(), lr=0.01)
    optimizer.now = now
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return kind(
        model=net,
        args=arguments(folder, **given),
        train_dataset=Rows(8 * ROWS) if rows is None else rows,
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
        optimizers=(optimizer, schedule),
    )


def footprint(trainer: Any) -> dict[str, Any]:
    """Everything of a Trainer, of what it holds and of torch that a profiler might write on, as names and numbers."""
    loader = trainer.callback_handler.train_dataloader
    objects = {
        "trainer": trainer,
        "arguments": trainer.args,
        "state": trainer.state,
        "control": trainer.control,
        "callbacks": trainer.callback_handler,
        "accelerator": trainer.accelerator,
        "optimizer": trainer.optimizer,
        "inner optimizer": trainer.optimizer.optimizer,
        "loader": getattr(loader, "base_dataloader", loader),
        "wrapped": trainer.model_wrapped,
    }
    torchs = torch_state()
    return {
        **written_on(objects, trainer.model),
        "send_to_device": is_ours(accelerate_loaders.send_to_device),
        **{f"torch's {name}": torchs[name] for name in ("functions", "dispatch modes", "function modes", "grad")},
        "torch's hooks": {table: len(hooks) for table, hooks in torchs["hooks"].items()},
    }
