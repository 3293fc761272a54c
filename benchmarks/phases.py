"""Whether seconds that are planted in a phase of reinforcement learning are found in that phase, and in no other.

``make bench-phases`` trains a small GPT-2 by TRL's GRPO, and by a PPO loop of its own with a reward and a value model,
whose steps are two epochs over two minibatches. Each runs twice: as it is, and with sleeps in the models' own forwards,
in rewards or advantages, and in a phase that the loop names. The difference of the two runs in each phase is right if
it is what was planted, to 5%. The phases of a run add up to its step, beside which is what the loop's own clock says.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from lightning_flops import FlopsProfilerTrainerCallback, Profile, profile_training

from .machine import RESULTS
from .page import described, met, table, write_page
from .runner import start

logger = logging.getLogger("benchmarks.phases")

PLANTED = {"rollout": 0.6, "scoring": 0.4, "training": 0.7, "rest": 0.5}
NAMED = "advantages"
_VOCAB, _WIDTH, _PROMPT, _COMPLETION, _ROWS, _STEPS = 22, 32, 6, 8, 4, 7
_EPOCHS, _MINIBATCHES, _TOLERANCE = 2, 2, 0.05
_SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 3, "trace": False, "lines": False}


@dataclass(slots=True)
class Ran:
    """A run: where its steps have ended by its own clock, and what the profiler says."""

    ended: list[float] = field(default_factory=list)
    profile: Profile | None = None

    def known(self) -> Profile:
        """The profile, which there must be."""
        assert self.profile is not None and self.profile.timing is not None
        return self.profile

    def step_sec(self) -> float:
        """A timed step's mean by the loop's own clock."""
        timed = self.known().timed_steps
        return sum(self.ended[one] - self.ended[one - 1] for one in timed) / len(timed)


def _policy() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=_WIDTH, vocab_size=_VOCAB, n_positions=64, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _plant(policy: Any, scorer: Any, planted: Mapping[str, float], *, updates: int) -> None:
    """Sleep where *policy* reads a prompt of a rollout, where it trains, and where *scorer* is asked."""

    def sleeps(_: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            time.sleep(planted.get("training", 0.0) / updates)
        elif args[0].shape[1] == _PROMPT:  # later calls of a rollout get one token
            time.sleep(planted.get("rollout", 0.0))

    policy.transformer.register_forward_pre_hook(sleeps)
    scorer.transformer.register_forward_pre_hook(lambda *_: time.sleep(planted.get("scoring", 0.0)))


def grpo(planted: Mapping[str, float]) -> Ran:
    """TRL's trainer, with a reference."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(_VOCAB)}, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=made, pad_token="w0", eos_token="w1")
    ran = Ran()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ran.ended.append(time.perf_counter())

    def reward(completions: Sequence[Any], **_: Any) -> list[float | None]:
        time.sleep(planted.get("rest", 0.0))
        return [float(len(set(one))) for one in completions]

    profiler = FlopsProfilerTrainerCallback(**_SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        _policy().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = trl.GRPOConfig(  # type: ignore[attr-defined]
            output_dir=folder, num_generations=2, max_completion_length=_COMPLETION, beta=0.1, max_steps=_STEPS,
            generation_kwargs={"min_new_tokens": _COMPLETION}, per_device_train_batch_size=_ROWS, report_to="none",
            bf16=False, save_strategy="no", use_cpu=True, disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": [" ".join(f"w{2 + place}" for place in range(_PROMPT))] * 64})
        trainer = trl.GRPOTrainer(  # type: ignore[attr-defined]
            model=folder, args=config, train_dataset=data, processing_class=tokenizer, reward_funcs=reward,
            callbacks=[Clock(), profiler],  # the report is made where the last step ends
        )  # fmt: skip
        _plant(trainer.model, trainer.ref_model, planted, updates=1)
        trainer.train()
    ran.profile = profiler.profile
    return ran


class Valued(nn.Module):
    """A number for each sequence, by a trunk of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = _policy().transformer
        self.head = nn.Linear(_WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """By the last token's state."""
        found: torch.Tensor = self.head(self.transformer(input_ids=tokens).last_hidden_state[:, -1])
        return found[:, 0]


def _log_probs(policy: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = policy(input_ids=tokens).logits[:, _PROMPT - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, tokens[:, _PROMPT:, None]).sum((1, 2))
    return found


def ppo(planted: Mapping[str, float]) -> Ran:
    """A loop of its own, which says where its steps end."""
    policy, reward, value, ran = _policy(), Valued().requires_grad_(False), Valued(), Ran()
    optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], lr=1e-4)
    _plant(policy, reward, planted, updates=_EPOCHS * _MINIBATCHES)
    prompts = torch.randint(2, _VOCAB, (_STEPS, _ROWS, _PROMPT))
    with profile_training({"policy": policy, "value": value}, **_SETTINGS) as profiler:
        for rows in profiler.batches(prompts):
            with torch.no_grad():
                tokens = policy.generate(
                    rows, min_new_tokens=_COMPLETION, max_new_tokens=_COMPLETION, pad_token_id=0, do_sample=True
                )
                old, scores, expected = _log_probs(policy, tokens), reward(tokens), value(tokens)
            with profiler.phase(NAMED):
                time.sleep(planted.get(NAMED, 0.0))
                gains = scores - expected
            time.sleep(planted.get("rest", 0.0))
            for _ in range(_EPOCHS):
                for pick in torch.randperm(_ROWS).chunk(_MINIBATCHES):
                    ratio = (_log_probs(policy, tokens[pick]) - old[pick]).exp()
                    clipped = torch.min(ratio * gains[pick], ratio.clamp(0.8, 1.2) * gains[pick])
                    loss = (value(tokens[pick]) - scores[pick]).square().mean() - clipped.mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            profiler.step()
            ran.ended.append(time.perf_counter())
    ran.profile = profiler.profile
    return ran


LOOPS: dict[str, tuple[Callable[[Mapping[str, float]], Ran], dict[str, float]]] = {
    "TRL's GRPO": (grpo, PLANTED),
    "an own PPO loop": (ppo, {**PLANTED, NAMED: 0.45}),
}


def phases_of(name: str, planted: Mapping[str, float], runs: Sequence[Ran]) -> Iterator[list[str]]:
    """A row for each phase of the two *runs*, the planted one last."""
    before, after = (one.known().phases for one in runs)
    for phase in dict.fromkeys([*after, *planted]):
        plain, slow = ((found[phase].seconds or 0.0) if phase in found else 0.0 for found in (before, after))
        asked = planted.get(phase, 0.0)
        verdict = met(abs(slow - plain - asked) <= _TOLERANCE * asked)
        times = [f"{seconds * 1e3:.1f}" for seconds in (plain, slow, slow - plain, asked)]
        yield [name, phase, *times, f"{(slow - plain) / asked - 1:+.1%}" if asked else "–", verdict]


def sums_of(name: str, runs: Sequence[Ran]) -> Iterator[list[str]]:
    """A row for each of two *runs*: its phases together, its step, and the loop's own clock."""
    for sleeps, ran in zip(("as it is", "planted"), runs, strict=True):
        profile, own = ran.known(), ran.step_sec()
        together = sum(one.seconds or 0.0 for one in profile.phases.values())
        step = profile.timing.global_step_sec if profile.timing is not None else 0.0
        flops = sum(one.flops or 0 for one in profile.phases.values())
        holds = abs(together - step) <= 1e-6 and abs(step - own) <= _TOLERANCE * own and flops == profile.flops.model
        times = [f"{seconds * 1e3:.1f}" for seconds in (together, step, own)]
        yield [name, sleeps, *times, f"{flops:,}", f"{profile.flops.model:,}", met(holds)]


def main() -> None:
    """Run both loops twice, and write the page."""
    options = start(__file__, __doc__, RESULTS / "phases.md", only=list(LOOPS))
    times, sums = list[list[str]](), list[list[str]]()
    for name in options.only:
        loop, planted = LOOPS[name]
        runs = [loop({}), loop(planted)]
        times += phases_of(name, planted, runs)
        sums += sums_of(name, runs)
        logger.info("%s has run", name)
    heads = [f">{one}" for one in ("as it is, ms", "with sleeps, ms", "difference, ms", "planted, ms", "off by")]
    lines = [*described(__doc__, "torch", "transformers", "trl"), *table(["loop", "phase", *heads, "5%"], times), ""]
    heads = [f">{one}" for one in ("phases, ms", "step, ms", "own clock, ms", "FLOPs of phases", "FLOPs of the step")]
    write_page(options.output, [*lines, *table(["loop", "run", *heads, "adds up"], sums)])


if __name__ == "__main__":
    main()
