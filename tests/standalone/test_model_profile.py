"""``get_model_profile``: one call that counts and times a model's forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_flops import get_model_profile
from tests.fake_clock import FakeNow
from tests.golden_files import golden
from tests.left_on_torch import torch_state_and_warnings
from tests.standalone.nets import FIRST, PARAMS, SECOND, Block, Calling, Sleeping, model_of_two, model_state


def quiet(model: nn.Module, **settings: Any) -> tuple[Any, Any, Any]:
    return get_model_profile(model, print_profile=False, as_string=False, **settings)


def test_numbers_are_exact_and_strings_are_deepspeeds() -> None:
    assert quiet(model_of_two(), input_shape=(2, 3)) == (FIRST + SECOND, (FIRST + SECOND) // 2, PARAMS)
    model = nn.Linear(1000, 1000, bias=False)
    assert get_model_profile(model, (2, 1000), print_profile=False) == ("4 M", "2 MMACs", "1 M")


def test_arguments_may_be_positional_keywords_both_or_none_for_the_other() -> None:
    class Adding(nn.Linear):
        def forward(self, input: Tensor, other: Tensor | None = None) -> Tensor:
            return super().forward(input if other is None else input + other)

    x = torch.ones(2, 3)
    flops = (FIRST, FIRST // 2, 3 * 5 + 5)
    assert quiet(Adding(3, 5), input_shape=(2, 3), args=None, kwargs=None) == flops
    assert quiet(Adding(3, 5), args=[x]) == flops
    assert quiet(Adding(3, 5), kwargs={"input": x}) == flops
    assert quiet(Adding(3, 5), args=(x,), kwargs={"other": x}) == flops
    assert quiet(Adding(3, 5), input_shape=(2, 3), args=["not used"], kwargs={"other": x}) == flops


@pytest.mark.parametrize("root_trains", [True, False])
def test_every_module_is_left_in_the_mode_it_came_in(root_trains: bool) -> None:
    last = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 7))
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), last)
    model.train(root_trains)
    model[1].eval()
    last[0].train()
    before, weights = model_state(model), {name: value.clone() for name, value in model.state_dict().items()}
    torch_before, random = torch_state_and_warnings(), torch.get_rng_state()
    modes = []
    hook = last.register_forward_hook(lambda module, args, output: modes.append([m.training for m in model.modules()]))
    quiet(model, input_shape=(2, 3))
    hook.remove()
    assert modes
    assert not any(any(training) for training in modes)
    assert model_state(model) == before
    assert torch_state_and_warnings() == torch_before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


class Merging(nn.Linear):
    """Puts its weights together where it is set to evaluation, as LoRA does, and apart where it is set to training."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("trains", [True, False])
def test_what_a_module_does_when_its_mode_changes_is_undone(trains: bool) -> None:
    layer = Merging(3, 5)
    model = nn.Sequential(layer).train(trains)
    quiet(model, input_shape=(2, 3))
    assert (model.training, layer.merged) == (trains, not trains)


def test_several_timed_runs_have_a_mean_a_spread_and_a_rate(now: FakeNow, capsys: pytest.CaptureFixture[str]) -> None:
    # After one to warm up, the timed forwards take 1 s, 2 s, 6 s and 3 s; the counted one and the one after it, 50 s.
    seconds = iter([9.0, 1.0, 2.0, 6.0, 3.0, 50.0, 50.0])

    def slow(self: Calling, x: Tensor) -> Tensor:
        now.sleep(next(seconds))
        assert self.layer is not None
        return self.layer(x)  # type: ignore[no-any-return]

    get_model_profile(Calling(slow, nn.Linear(3, 5)), (2, 3), timed_runs=4, detailed=False)
    assert list(seconds) == []
    printed = capsys.readouterr().out
    lines = {label: value.strip() for label, _, value in (line.partition(":") for line in printed.splitlines())}
    assert lines["fwd latency"] == "3 s"
    assert lines["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"] == f"{FIRST // 3} FLOPS"
    # Typical (the middle two), its share of the step, mean, least and greatest.
    row = next(line for line in printed.splitlines() if line.startswith("forward "))
    assert row.split() == ["forward", "2.50", "100%", "3.00", "1.00", "6.00"]
    assert lines["samples/second"] == "0.67"  # 2 in 3 s


def test_the_report_is_this(now: FakeNow, capsys: pytest.CaptureFixture[str]) -> None:
    body = Block(now, nn.Linear(3, 5), Sleeping(now, 4.0), nn.Linear(5, 5))
    model = nn.Sequential(body, nn.ReLU(), nn.Linear(5, 7))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_: now.sleep(0.5))
    get_model_profile(model, (2, 3), top_modules=2)
    golden("text/standalone.txt", capsys.readouterr().out)


def test_a_module_depth_shows_the_levels_down_to_it(now: FakeNow, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Block(now, nn.Linear(3, 5), Block(now, nn.Linear(5, 5))), nn.Linear(5, 7))

    def depths(module_depth: int) -> list[str]:
        get_model_profile(model, (2, 3), module_depth=module_depth)
        printed = capsys.readouterr().out
        tree = printed.split("Sequential(\n")[1]
        # Deepest names: depth 1 is "(0)", 2 its layers, 3 what is in them, and so on.
        assert ("(layers)" in tree) == (module_depth != 1 and module_depth != 0)
        assert ("modules inside, deeper than module_depth" in tree) == (module_depth in (0, 1, 2))
        return [line for line in printed.splitlines() if line.startswith("depth ")]

    assert depths(0) == ["depth 0:"]
    assert depths(1) == ["depth 0:", "depth 1:"]
    assert depths(2) == ["depth 0:", "depth 1:", "depth 2:"]
    every = [f"depth {depth}:" for depth in range(6)]
    assert depths(-1) == every
    assert depths(99) == every


def test_an_output_file_gets_the_report_and_none_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made" / "for" / "it" / "profile.txt"
    for _ in range(2):
        get_model_profile(model_of_two(), (2, 3), output_file=str(path))
    assert path.read_text().count("Profile Summary at step 1:") == 1
    assert capsys.readouterr().out == ""


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    model: Any = Calling(lambda self, *args: pytest.fail("the model was called"))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        quiet(lambda x: x, input_shape=(2, 3))  # type: ignore[arg-type]
    for args in (torch.ones(2, 3), "text", 3):
        kind = type(args).__name__
        with pytest.raises(TypeError, match=f"args must be a list or tuple of the model's .* arguments, got {kind}"):
            quiet(model, args=args)
    with pytest.raises(ValueError, match="input_shape, args or kwargs must be given"):
        quiet(model)
    with pytest.raises(ValueError, match='mode must be "forward" or "generate", got \'train\''):
        quiet(model, input_shape=(2, 3), mode="train")


# ---- mode="generate": all that a generation computes, counted by hand

VOCABULARY, WIDTH, LAYERS, HEADS = 64, 32, 2, 4
ROWS, PROMPT, NEW = 2, 5, 4
TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **TOKENS))


def gpt2_flops(*, rows: int, tokens: int, seen: int) -> int:
    """One forward on *tokens* a row, which attend to *seen* positions; logits are of the last token alone.

    A layer's weights: qkv 3, output 1, feed-forward 4 and 4 times WIDTH x WIDTH.
    """
    weights = 12 * WIDTH * WIDTH
    attention = 2 * tokens * seen * WIDTH
    return 2 * rows * (LAYERS * (tokens * weights + attention) + WIDTH * VOCABULARY)


def prompt() -> Tensor:
    return torch.arange(1, 1 + ROWS * PROMPT).reshape(ROWS, PROMPT)


def flops_of(model: Any, **kwargs: Any) -> int:
    flops, macs, _ = get_model_profile(
        model, args=[prompt()], kwargs=kwargs, mode="generate", print_profile=False, as_string=False
    )
    assert flops == 2 * macs
    return int(flops)


def test_gpt2s_first_forward_takes_the_prompt_and_every_other_one_token_or_all_without_a_cache() -> None:
    prefill = gpt2_flops(rows=ROWS, tokens=PROMPT, seen=PROMPT)
    decode = sum(gpt2_flops(rows=ROWS, tokens=1, seen=PROMPT + step) for step in range(1, NEW))
    # The generation of one token is the prefill alone.
    for new, expected in ((NEW, prefill + decode), (1, prefill)):
        assert flops_of(tiny_gpt2(), max_new_tokens=new, do_sample=False, use_cache=True) == expected
    again = sum(gpt2_flops(rows=ROWS, tokens=one, seen=one) for one in range(PROMPT, PROMPT + NEW))
    assert flops_of(tiny_gpt2(), max_new_tokens=NEW, do_sample=False, use_cache=False) == again


def test_sampling_draws_the_same_tokens_in_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt2()
    drawn: list[list[list[int]]] = []
    generate = model.generate

    def keep(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        drawn.append(output.tolist())
        return output

    model.generate = keep
    random = torch.get_rng_state()
    flops_of(model, max_new_tokens=20, do_sample=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(drawn) == 4 and all(tokens == drawn[0] for tokens in drawn)  # to warm up, timed, counted, by modules
