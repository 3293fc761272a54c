from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.memory import by_bisection, measured, predicted
from benchmarks.memory_programs import FOREACH, FUSED, LOOP, Program, checkpointed, mlp, programs, rows
from lightning_flops import ConfigError, LightningFlopsError, count_offline, predict_memory
from lightning_flops.report.text import render_text
from lightning_flops.schema.plan import LargestBatch

PROGRAMS = {program.name: program for program in programs()}


def network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


# ---- by hand: a float has four bytes


def test_the_peak_of_two_layers_is_when_the_relus_backward_has_made_its_gradient() -> None:
    prediction = predict_memory(network(8, 512, 4), torch.randn(64, 8))
    weights, batch, hidden = 4 * (8 * 512 + 512 + 512 * 4 + 4), 4 * 64 * 8, 4 * 64 * 512
    assert prediction.at_peak == {
        "temporary": 2 * hidden
        + 4,  # the gradients of the ReLU's result and input, and the 1 that the backward begins with
        "activations": hidden + 4,  # the ReLU's result, and the loss
        "parameters": weights,
        "gradients": 4 * (512 * 4 + 4),  # of the second layer
        "batch": batch,
    }
    assert prediction.peak_bytes == sum(prediction.at_peak.values())
    assert (prediction.when.part, prediction.when.module) == ("backward", "1")
    assert {one.name: one.kept_bytes for one in prediction.modules if one.kept_bytes > 4} == {"1": hidden}


def test_adam_takes_sixteen_bytes_a_parameter() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    prediction = predict_memory(model, torch.randn(1, 1000), torch.optim.AdamW(model.parameters(), fused=True))
    assert {kind: prediction.at_peak[kind] for kind in ("parameters", "gradients", "optimizer")} == {
        "parameters": 4 * 10**6,
        "gradients": 4 * 10**6,
        "optimizer": 8 * 10**6 + 4,  # the step's number is a float, too
    }


def test_on_a_gpu_adam_works_on_all_parameters_at_once_and_sizes_are_rounded_up() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    prediction = predict_memory(model, torch.randn(1, 1000), torch.optim.AdamW(model.parameters()), device="cuda")
    assert prediction.at_peak["temporary"] == 4 * 10**6 + 256  # 4,000,000 is no multiple of 512
    assert prediction.when.part == "optimizer"


@pytest.mark.parametrize(("device", "mask"), [("cpu", 4), ("cuda", 1)])
def test_dropout_keeps_a_number_on_a_cpu_and_one_byte_on_a_gpu(device: Any, mask: int) -> None:
    """Of each of 64 x 512 numbers, beside the result, which is the next layer's input; the rule is torch's own."""
    model = nn.Sequential(nn.Linear(8, 512), nn.Dropout(0.1), nn.Linear(512, 4))
    kept = {one.name: one.kept_bytes for one in predict_memory(model, torch.randn(64, 8), device=device).modules}
    assert kept["1"] == (4 + mask) * 64 * 512
    assert predict_memory(model.eval(), torch.randn(64, 8), device=device).peak_bytes > 0
    assert torch.nn.functional.dropout.__name__ == "dropout"


def test_of_a_checkpointed_block_the_sum_that_the_next_one_takes_is_kept_and_nothing_inside() -> None:
    kept = {one.name: one.kept_bytes for one in predict_memory(checkpointed(), rows(256, 8)).modules}
    # Six sums, the logarithms of the softmax, and the loss with its weight
    assert kept[""] == 6 * 4 * 8 * 256 + 4 * 8 * 10 + 4 + 4
    assert not any(kept.get(f"blocks.{block}.{layer}") for block in range(6) for layer in range(3))


# ---- beside the allocator


@pytest.mark.parametrize(
    "name", ["MLP, SGD", "MLP, AdamW fused", "MLP, momentum", "encoder, AdamW", "GRU, AdamW", "soft experts, foreach"]
)
def test_the_peak_is_the_allocators_to_the_byte(name: str) -> None:
    assert predicted(PROGRAMS[name]).peak_bytes == measured(PROGRAMS[name]).peak


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama, AdamW", "Llama, LoRA", "Bert, AdamW", "ViT, AdamW", "Mixtral, AdamW"])
@pytest.mark.filterwarnings("ignore")
def test_the_peak_of_transformers_is_the_allocators_to_the_byte(name: str) -> None:
    pytest.importorskip("transformers")
    assert predicted(PROGRAMS[name]).peak_bytes == measured(PROGRAMS[name]).peak


@pytest.mark.parametrize("name", ["U-Net, momentum", "residual CNN, momentum", "CNN, AdamW"])
def test_what_the_peak_of_convolutions_lacks_is_their_kernels_own(name: str) -> None:
    truth = measured(PROGRAMS[name])
    found = predicted(PROGRAMS[name]).peak_bytes
    assert found < truth.peak
    assert found == truth.without_kernels


@pytest.mark.parametrize("name", ["checkpointed, AdamW", "checkpointed, reentrant", "checkpointed, 4 accumulated"])
def test_checkpoints_keep_the_state_of_the_random_numbers_and_nothing_else_is_missing(name: str) -> None:
    state = torch.get_rng_state().numel()
    missing = measured(PROGRAMS[name]).peak - predicted(PROGRAMS[name]).peak_bytes
    assert missing in {count * state for count in range(1, 7)}


# ---- other batches


@pytest.mark.parametrize("name", ["MLP, momentum", "CNN, AdamW", "checkpointed, AdamW"])
def test_the_largest_batch_is_that_of_bisection(name: str) -> None:
    prediction = predicted(PROGRAMS[name])
    available = 2 * prediction.peak_bytes + 12_345
    assert prediction.largest_batch(available) == by_bisection(prediction, available)


def test_the_largest_batch_fits_to_the_byte() -> None:
    prediction = predict_memory(network(8, 512, 4), torch.randn(64, 8))
    peak = prediction.at(batch=7).peak_bytes
    assert (prediction.largest_batch(peak), prediction.largest_batch(peak - 1)) == (7, 6)
    assert prediction.largest_batch(prediction.peak_bytes) == 64
    assert prediction.largest_batch(1) == 0


def test_what_a_sample_more_takes_is_no_accident_of_rounding() -> None:
    """A row of three floats, thrice ten hidden ones and what the backward makes of them: 132 bytes, hidden by 512."""
    prediction = predict_memory(network(3, 10, 3), torch.randn(16, 3), device="cuda")
    largest = prediction.report(available_bytes=1e6, largest=True).largest
    assert largest is not None and largest.bytes_per_sample == pytest.approx(4 * (3 + 3 * 10), rel=0.01)


class Compares(nn.Module):
    """A loss of each pair of samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()


def test_where_the_peak_grows_faster_than_the_batch_no_negative_constant_is_printed() -> None:
    """n rows of 4 floats, their gradient of the step before, n x n products, and their sum: 4 n² + 32 n + 4 bytes."""
    report = predict_memory(Compares(), torch.randn(16, 4, requires_grad=True)).report(
        available_bytes=1e6, largest=True
    )
    assert report.largest == LargestBatch(size=496, peak_bytes=999_940, bytes_per_sample=4 * (2 * 496 + 63) + 32)
    said = "with a peak of 1 MB; in a batch an eighth larger each sample more takes 4.25 KB on average."
    assert f"Largest batch in 1 MB: 496, {said}" in render_text(report)


# ---- whose objects these are


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [(group["params"], {**group, "params": None}) for group in optimizer.param_groups] + [dict(optimizer.state)]


@pytest.mark.parametrize("make", [mlp, lambda: checkpointed(reentrant=True), lambda: nn.LSTM(256, 8)])
def test_nothing_of_the_users_is_changed(make: Callable[[], Any]) -> None:
    model = make()
    batch: tuple[torch.Tensor, ...] = rows(256, 4)[: 1 if isinstance(model, nn.LSTM) else 2]
    optimizer = FOREACH(model)
    named = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    given, groups, state = [one.clone() for one in batch], state_of(optimizer), torch.get_rng_state()
    predict_memory(model, batch, optimizer).largest_batch(1e8)
    count_offline(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, batch, given))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is named[name][0] and torch.equal(tensor, named[name][1])
        assert tensor.grad is None
    assert all(vars(module) == before for module, before in attributes)
    assert state_of(optimizer) == groups


def test_a_model_on_meta_is_predicted_as_the_real_one() -> None:
    real, batch = mlp(), rows(256, 4)
    with torch.device("meta"):
        meta, shapes = mlp(), rows(256, 4)
    predictions = [
        predict_memory(model, inputs, LOOP(model), device="cpu") for model, inputs in ((real, batch), (meta, shapes))
    ]
    assert predictions[0].at_peak == predictions[1].at_peak


def test_without_a_device_a_model_is_predicted_where_it_lies_and_on_a_gpu_if_it_lies_nowhere() -> None:
    def peak(where: str, device: Any) -> int:
        with torch.device(where):
            model = mlp()
            return predict_memory(model, rows(256, 4), LOOP(model), device=device).peak_bytes

    assert peak("cpu", None) == peak("cpu", "cpu") != peak("cpu", "cuda")
    assert peak("meta", None) == peak("meta", "cuda")


def test_a_recurrent_model_on_meta_is_predicted_as_the_real_one() -> None:
    predictions = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.GRU(8, 16)
            predictions.append(predict_memory(model, torch.empty(3, 2, 8), LOOP(model), device="cpu"))
    assert predictions[0].at_peak == predictions[1].at_peak


def test_neither_the_users_optimizer_nor_its_hooks_are_called() -> None:
    model, calls = network(8, 16, 4), list[object]()
    optimizer = LOOP(model)
    optimizer.register_step_post_hook(lambda *args: calls.append(args))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the optimizer
    prediction = predict_memory(model, torch.randn(2, 8), optimizer)
    assert prediction.at_peak["optimizer"] > 2 * prediction.at_peak["parameters"]  # with the steps' numbers
    assert not calls and not optimizer.state


def test_an_optimizer_may_ask_for_values() -> None:
    truth = measured(PROGRAMS["MLP, Adafactor"])
    assert predicted(PROGRAMS["MLP, Adafactor"]).peak_bytes == truth.without_kernels


def test_gradients_that_are_there_are_not_held_twice() -> None:
    model, batch = network(8, 512, 4), torch.randn(64, 8)
    before = predict_memory(model, batch).peak_bytes
    model(batch).sum().backward()
    assert predict_memory(model, batch).peak_bytes == before


# ---- what cannot be predicted


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(1) > 0]


def test_a_shape_that_goes_by_values_is_refused_with_its_operator_and_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Chooses())
    with pytest.raises(
        LightningFlopsError, match=r"aten\.index\.Tensor in 1 fails on tensors without values: .*nonzero"
    ):
        predict_memory(model, torch.randn(2, 4))


def test_a_batch_that_does_not_fit_is_refused_with_the_module() -> None:
    with pytest.raises(LightningFlopsError, match=r"aten\.addmm\.default in 0 fails"):
        predict_memory(network(8, 16, 4), torch.randn(2, 9))


def test_an_optimizer_of_other_parameters_is_left_out_and_said() -> None:
    prediction = predict_memory(network(8, 16, 4), torch.randn(2, 8), LOOP(network(8, 16, 4)))
    assert "optimizer" not in prediction.at_peak
    assert prediction.notes == ("AdamW is left out: it has parameters that are not the model's.",)


def test_a_step_that_needs_a_closure_is_left_out_and_said() -> None:
    model = network(8, 16, 4)
    prediction = predict_memory(model, torch.randn(2, 8), torch.optim.LBFGS(model.parameters()))
    assert "LBFGS is left out: its step fails on fake parameters: TypeError" in prediction.notes[0]
    assert prediction.at_peak == predict_memory(model, torch.randn(2, 8)).at_peak


def test_lazy_modules_are_named() -> None:
    with pytest.raises(LightningFlopsError, match=r"0\.bias, 0\.weight of lazy modules"):
        predict_memory(nn.Sequential(nn.LazyLinear(4)), torch.randn(2, 8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"accumulate": 0}, "accumulate must be an integer >= 1, got 0"),
        ({"autocast": "bf16"}, "autocast must be a torch.dtype, got 'bf16'"),
        ({"device": "tpu"}, 'device must be "cpu" or "cuda"'),
    ],
)
def test_an_argument_that_breaks_its_rule_is_named(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict_memory(network(8, 16, 4), torch.randn(2, 8), **arguments)


def test_sizes_that_are_none_are_named() -> None:
    prediction = predict_memory(network(8, 16, 4), torch.randn(2, 8))
    with pytest.raises(ConfigError, match="batch must be an integer >= 1, got 0"):
        prediction.at(batch=0)
    with pytest.raises(ConfigError, match="available_bytes must be a number above 0, got -1"):
        prediction.largest_batch(-1)
    with pytest.raises(TypeError, match="model must be a torch"):
        predict_memory(torch.relu, torch.randn(2, 8))  # type: ignore[arg-type]


def test_the_bytes_of_kernels_are_found_only_where_there_are_some() -> None:
    program = Program(name="", model=mlp, batch=lambda size: rows(256, size), optimizer=FUSED, size=4)
    assert measured(program).kernels == ()
