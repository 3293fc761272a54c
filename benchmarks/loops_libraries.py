"""Loops by accelerate, Fabric, transformers, TRL and DeepSpeed, each with its own account of what it does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .loops_account import (
    BATCH,
    HIDDEN,
    IN,
    OUT,
    STEPS,
    Account,
    loader,
    loss_of,
    net,
    sgd,
    update,
)
from .loops_own import loop

# ---- accelerate


def _accelerator(**settings: Any) -> Any:
    # All of a process share one state: where a loop ended within an accumulation, the next one's updates are left out.
    import_module("accelerate.state").GradientState._reset_state()
    return import_module("accelerate").Accelerator(cpu=True, **settings)


def _prepared(account: Account, accelerator: Any, batches: int, **more: Any) -> Any:
    """A net, its optimizer and their data, prepared."""
    model = net()
    return accelerator.prepare(model, sgd(model), loader(account, batches, **more))


@loop("accelerate, accumulates 4, tail of 2")
def accelerate_accumulates(account: Account) -> None:
    accelerator = _accelerator(gradient_accumulation_steps=4)
    batches = 10
    model, optimizer, data = _prepared(account, accelerator, batches)
    with account.profiled(model, optimizer, accelerator=accelerator):
        for _ in range(STEPS // 3):
            for number, rows in enumerate(account.fetches(data), 1):
                with accelerator.accumulate(model):
                    account.pause(0.3)
                    accelerator.backward(loss_of(model(rows)))
                    account.trained(model, len(rows))
                    update(optimizer)
                if number % 4 == 0 or number == batches:
                    account.step()


@loop("accelerate, batch in 4 minibatches")
def accelerate_minibatches(account: Account) -> None:
    accelerator = _accelerator()
    model, optimizer, data = _prepared(account, accelerator, STEPS, size=16)
    with account.profiled(model, optimizer, accelerator=accelerator):
        for rows in account.fetches(data):
            for piece in rows.split(4):
                account.pause(0.3)
                accelerator.backward(loss_of(model(piece)) / 4)
                account.trained(model, len(piece))
            update(optimizer)
            account.step()


@loop("accelerate, GAN")
def accelerate_gan(account: Account) -> None:
    accelerator = _accelerator()
    generator, critic = net(IN, HIDDEN, IN), net(IN, HIDDEN, 1)
    optimizers = sgd(generator), sgd(critic)
    generator, critic, og, od, data = accelerator.prepare(generator, critic, *optimizers, loader(account))
    with account.profiled({"g": generator, "d": critic}, [og, od], accelerator=accelerator):
        for rows in account.fetches(data):
            account.pause()
            fake = generator(torch.randn(BATCH, IN))
            accelerator.backward(critic(rows).mean() - critic(fake.detach()).mean())
            update(od)
            accelerator.backward(critic(fake).mean())
            update(og)
            account.trained(critic, BATCH)
            account.trained(critic, BATCH, samples=0, micro_steps=0)
            account.forward(critic, BATCH)
            account.backward(critic, BATCH, inputs=True)
            account.trained(generator, BATCH, samples=0, micro_steps=0)
            account.step()


# ---- Fabric


def _fabric() -> Any:
    return import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)


@loop("Fabric")
def fabric_plain(account: Account) -> None:
    fabric = _fabric()
    made = net()
    model, optimizer = fabric.setup(made, sgd(made))
    data = fabric.setup_dataloaders(loader(account))
    with account.profiled(model, optimizer, fabric=fabric):
        for rows in account.fetches(data):
            account.pause()
            fabric.backward(loss_of(model(rows)))
            account.trained(model, len(rows))
            update(optimizer)
            account.step()


@loop("Fabric, no_backward_sync, accumulates 4")
def fabric_accumulates(account: Account) -> None:
    fabric = _fabric()
    made = net()
    model, optimizer = fabric.setup(made, sgd(made))
    data = fabric.setup_dataloaders(loader(account, 4 * STEPS))
    with account.profiled(model, optimizer, fabric=fabric):
        for number, rows in enumerate(account.fetches(data), 1):
            with fabric.no_backward_sync(model, enabled=number % 4 != 0):
                account.pause(0.3)
                fabric.backward(loss_of(model(rows)))
                account.trained(model, len(rows))
            if number % 4 == 0:
                update(optimizer)
                account.step()


# ---- transformers and TRL


class Lossy(nn.Module):
    """A net that returns its loss, as transformers wants it."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self.net, self.account = net(), account

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        self.account.pause(0.5)
        if self.training:
            self.account.trained(self.net, len(x))
        return {"loss": loss_of(self.net(x))}

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class _Timed:
    """A loader with the account's clock at its fetches."""

    def __init__(self, account: Account, inner: Any) -> None:
        self._account, self._inner = account, inner

    def __iter__(self) -> Iterator[Any]:
        return self._account.fetches(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def hugging_face_trainer(account: Account, base: Any) -> Any:
    """A subclass of *base* with the account's clock, which leaves out evaluations."""
    made: Any = import_module("transformers").TrainerCallback

    class Says(made):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            account.begins()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            account.step()

    class Accounting(base):  # type: ignore[misc]
        says = Says

        def get_train_dataloader(self) -> Any:
            return _Timed(account, super().get_train_dataloader())

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with account.outside():
                return super().evaluate(*args, **kwargs)

    return Accounting


def _hugging_face(account: Account, *, accumulate: int, evaluates: bool = False) -> None:
    transformers = import_module("transformers")
    trainer = hugging_face_trainer(account, transformers.Trainer)
    data = [{"x": torch.randn(IN)} for _ in range(STEPS * BATCH * accumulate)]
    arguments = transformers.TrainingArguments(
        output_dir="out", per_device_train_batch_size=BATCH, gradient_accumulation_steps=accumulate, use_cpu=True,
        num_train_epochs=1, report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False, eval_strategy="steps" if evaluates else "no", eval_steps=5,
        per_device_eval_batch_size=32, remove_unused_columns=False, label_names=["labels"], optim="sgd",
    )  # fmt: skip

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        account.fetch_pause()
        return {"x": torch.stack([one["x"] for one in rows])}

    made = import_module("lightning_flops").FlopsProfilerTrainerCallback
    trainer(
        model=Lossy(account), args=arguments, train_dataset=data, eval_dataset=data[:64] if evaluates else None,
        data_collator=collate, callbacks=[*account.by(lambda: made(**account.settings)), trainer.says()],
    ).train()  # fmt: skip


@loop("transformers", quick=False)
def hugging_face(account: Account) -> None:
    _hugging_face(account, accumulate=1)


@loop("transformers, accumulates 2, evaluates", quick=False)
def hugging_face_accumulates(account: Account) -> None:
    _hugging_face(account, accumulate=2, evaluates=True)


VOCABULARY, WIDTH, LENGTH = 32, 16, 8


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def _gpt2(account: Account) -> Any:
    """A GPT-2 of one layer whose calls are in the account."""
    transformers = import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)

    def called(module: Any, args: Any, kwargs: Any) -> None:
        account.pause(0.5)
        rows = len(kwargs["input_ids"])
        tokens = rows * LENGTH
        layer = 2 * tokens * WIDTH * (3 + 1 + 4 + 4) * WIDTH + 2 * (2 * tokens * LENGTH * WIDTH)
        head = 2 * (tokens - rows) * WIDTH * VOCABULARY  # TRL's loss leaves out each last position
        # It computes the logits anew in the backward, in chunks, as it never keeps all of them.
        account.computed(forward=layer + head, backward=2 * (layer + head), recompute=head)
        account.handled(rows)

    model.register_forward_pre_hook(called, with_kwargs=True)
    return model


@loop("TRL's SFTTrainer, accumulates 2", quick=False)
def sft(account: Account) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl, dataset = import_module("trl"), import_module("datasets").Dataset
        trainer = hugging_face_trainer(account, trl.SFTTrainer)
        data = [{"input_ids": [2 + (one + place) % 20 for place in range(LENGTH)]} for one in range(STEPS * BATCH * 2)]
        arguments = trl.SFTConfig(
            output_dir="out", per_device_train_batch_size=BATCH, num_train_epochs=1, gradient_accumulation_steps=2,
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
            bf16=False, gradient_checkpointing=False, max_length=None, logging_strategy="no",
        )  # fmt: skip
        made = import_module("lightning_flops").FlopsProfilerTrainerCallback
        trainer(
            model=_gpt2(account), args=arguments, train_dataset=dataset.from_list(data), processing_class=_tokenizer(),
            callbacks=[*account.by(lambda: made(**account.settings)), trainer.says()],
        ).train()  # fmt: skip


# ---- DeepSpeed


def _alone(port: int) -> Any:
    """DeepSpeed, as the only process of its job."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo", verbose=False)
    return deepspeed


def _settings(account: Account, accumulate: int, **more: Any) -> dict[str, Any]:
    block = {"flops_profiler": {"enabled": True, **account.settings}} if account.alone and account.settings else {}
    return {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": accumulate, "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True, **block, **more,
    }  # fmt: skip


@contextmanager
def _attached(account: Account, engine: Any) -> Iterator[None]:
    """The profiler on *engine*, unless its config has asked for one."""
    account.begins()
    if account.alone:
        yield
        return
    account.run = import_module("lightning_flops.deepspeed").attach(engine, {"enabled": True, **account.settings})
    yield
    account.run.detach()


@loop("DeepSpeed's engine, accumulates 2", quick=False)
def engine(account: Account) -> None:
    deepspeed, model = _alone(29711), net()
    made = deepspeed.initialize(model=model, optimizer=sgd(model), config=_settings(account, 2))[0]
    with _attached(account, made):
        for number, rows in enumerate(account.fetches(loader(account, 2 * STEPS)), 1):
            account.pause(0.5)
            made.backward(loss_of(made(rows)))
            made.step()
            account.trained(model, len(rows))
            if number % 2 == 0:
                account.step()


@loop("DeepSpeed's engine by profile_training", quick=False)
def engine_in_a_loop(account: Account) -> None:
    deepspeed, model = _alone(29712), net()
    made = deepspeed.initialize(model=model, optimizer=sgd(model), config=_settings(account, 1))[0]
    with account.profiled(made):
        for rows in account.fetches(loader(account)):
            account.pause()
            made.backward(loss_of(made(rows)))
            made.step()
            account.trained(model, len(rows))
            account.step()


@loop("DeepSpeed's pipeline of 3 micro-batches", quick=False)
def pipeline(account: Account) -> None:
    deepspeed = _alone(29713)
    pipe = import_module("deepspeed.pipe")

    class Slow(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            account.pause(0.3)
            return rows

    layers = [pipe.LayerSpec(nn.Linear, IN, HIDDEN), pipe.LayerSpec(Slow), pipe.LayerSpec(nn.Linear, HIDDEN, OUT)]
    model = pipe.PipelineModule(layers, num_stages=1, loss_fn=functional.mse_loss, partition_method="uniform")
    made = deepspeed.initialize(model=model, optimizer=sgd(model), config=_settings(account, 3))[0]

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            account.fetch_pause()
            yield torch.randn(BATCH, IN), torch.randn(BATCH, OUT)

    data = account.fetches(batches())
    with _attached(account, made):
        for _ in range(STEPS):
            made.train_batch(data)
            for _ in range(3):
                account.trained(model, BATCH)
            account.step()


@loop("Fabric with DeepSpeed", quick=False)
def fabric_engine(account: Account) -> None:
    """Fabric's own strategy needs a GPU: its wrappers around an engine, which is all that the loop sees of it."""
    deepspeed, model, fabric = _alone(29714), net(), _fabric()
    engine, inner, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config=_settings(
            account, 1, bf16={"enabled": True}, zero_optimization={"stage": 1},
            optimizer={"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        ),
    )  # fmt: skip
    wrappers = import_module("lightning.fabric.wrappers")
    wrapped = wrappers._FabricModule(engine, fabric.strategy)
    optimizer = wrappers._FabricOptimizer(inner, fabric.strategy)
    with account.profiled(wrapped, optimizer, fabric=fabric):
        for rows in account.fetches(loader(account)):
            account.pause()
            engine.backward(loss_of(engine(rows.bfloat16())))
            engine.step()
            account.trained(model, len(rows))
            account.step()
