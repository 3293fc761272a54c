"""What holds for the counts of every network, whatever its layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.pytorch import count_flops
from lightning_flops.records import PhaseFlops

from .networks import SEQUENCE, WIDTH, Spec, build, specs, without_checkpoints

law = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
batches = st.integers(1, 4)


def inputs(batch: int) -> Tensor:
    """A batch of sequences that needs its gradient, so that there always is a backward."""
    return torch.randn(batch, SEQUENCE, WIDTH, requires_grad=True)


def trained(model: nn.Module, batch: int) -> FlopCounts:
    """The counts of a forward and a backward."""
    x = inputs(batch)
    with count_flops(model) as counts:
        model(x).sum().backward()
    return counts


def scaled(flops: PhaseFlops, factor: int) -> PhaseFlops:
    """Every phase times *factor*."""
    return PhaseFlops(
        forward=factor * flops.forward,
        backward=factor * flops.backward,
        recompute=factor * flops.recompute,
        optimizer=factor * flops.optimizer,
    )


@law
@given(spec=specs(), batch=batches, factor=st.integers(2, 4))
def test_counts_scale_with_the_batch(spec: Spec, batch: int, factor: int) -> None:
    """Every sample costs the same, in every module and phase."""
    model = build(spec)
    small = trained(model, batch).by_module()
    large = trained(model, factor * batch).by_module()
    assert large == {name: scaled(flops, factor) for name, flops in small.items()}


@law
@given(spec=specs(), batch=batches)
def test_a_parent_is_its_own_plus_its_children(spec: Spec, batch: int) -> None:
    """By the module tree, not by how names happen to be summed."""
    model = build(spec)
    counts = trained(model, batch)
    totals, own = counts.by_module(), counts.own_by_module()
    for name, module in model.named_modules():
        children = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
        below = sum((totals.get(child, PhaseFlops()) for child in children), start=PhaseFlops())
        assert totals.get(name, PhaseFlops()) == own.get(name, PhaseFlops()) + below


@law
@given(spec=specs(), batch=batches)
def test_the_sum_over_operators_is_the_sum_over_modules(spec: Spec, batch: int) -> None:
    """Both are the whole, and so is the sum over both at once."""
    counts = trained(build(spec), batch)
    whole = PhaseFlops(
        forward=counts.forward, backward=counts.backward, recompute=counts.recompute, optimizer=counts.optimizer
    )
    by_operator = sum(counts.by_operator().values(), start=PhaseFlops())
    by_module = sum(counts.own_by_module().values(), start=PhaseFlops())
    assert whole.forward > 0
    assert by_operator == whole
    assert by_module == whole
    assert counts.by_module()[""] == whole


@law
@given(spec=specs(), batch=batches)
def test_a_forward_costs_the_same_without_grad(spec: Spec, batch: int) -> None:
    """Module by module."""
    model, x = build(spec), inputs(batch)
    with count_flops(model) as with_grad:
        model(x)
    with torch.no_grad(), count_flops(model) as without_grad:
        model(x)
    assert with_grad.backward == with_grad.recompute == 0
    assert with_grad.by_module() == without_grad.by_module()


@law
@given(spec=specs(), batch=batches)
def test_a_training_step_has_the_forward_of_an_evaluation(spec: Spec, batch: int) -> None:
    """What a backward adds, it adds to the other phases."""
    model = build(spec)
    step = trained(model, batch)
    with torch.inference_mode(), count_flops(model) as evaluation:
        model(torch.randn(batch, SEQUENCE, WIDTH))
    assert {name: flops.forward for name, flops in step.by_module().items()} == {
        name: flops.forward for name, flops in evaluation.by_module().items()
    }


@law
@given(spec=specs(), batch=batches)
def test_checkpointing_changes_recompute_alone(spec: Spec, batch: int) -> None:
    """The model's arithmetic is the same; what is repeated is listed apart."""
    checkpointed = trained(build(spec), batch)
    plain = trained(build(without_checkpoints(spec)), batch)
    assert (checkpointed.forward, checkpointed.backward) == (plain.forward, plain.backward)
    assert plain.recompute == 0


@law
@given(spec=specs(checkpoints=False), batch=batches)
def test_a_frozen_network_passes_its_gradient_on_and_computes_no_other(spec: Spec, batch: int) -> None:
    """Less backward than when trained, and none at all once the input needs no gradient either."""
    model = build(spec)
    usual = trained(model, batch)
    model.requires_grad_(False)
    frozen = trained(model, batch)
    assert frozen.forward == usual.forward
    assert 0 < frozen.backward <= usual.backward
    with count_flops(model) as nothing_to_train:
        model(torch.randn(batch, SEQUENCE, WIDTH))
    assert nothing_to_train.without_backward == nothing_to_train.forward == usual.forward


@law
@given(spec=specs(), batch=batches, times=st.integers(2, 3))
def test_micro_steps_add_up(spec: Spec, batch: int, times: int) -> None:
    """A step of several micro-batches costs as often what one costs."""
    model = build(spec)
    once = trained(model, batch)
    with count_flops(model) as counts:
        for _ in range(times):
            model(inputs(batch)).sum().backward()
    assert counts.by_module() == {name: scaled(flops, times) for name, flops in once.by_module().items()}


@law
@given(
    batch=batches,
    groups=st.integers(1, 3),
    shared=st.integers(1, 3),
    queries=st.integers(1, 6),
    keys=st.integers(1, 6),
    head_dim=st.integers(1, 9),
    causal=st.booleans(),
)
def test_model_flops_do_not_depend_on_the_attention_backend(
    batch: int, groups: int, shared: int, queries: int, keys: int, head_dim: int, causal: bool
) -> None:
    """Fused or not, grouped or not, causal or not: 2 products forward and 4 backward over the full score matrix."""
    heads = groups * shared
    scores = 2 * batch * heads * queries * keys * head_dim
    # Query i of a causal mask sees keys 0 to i.
    seen = 2 * batch * heads * sum(min(query + 1, keys) for query in range(queries)) * head_dim
    model = _Sdpa(causal=causal)
    for backend, repeated in ((SDPBackend.MATH, 0), (SDPBackend.FLASH_ATTENTION, 1)):
        query = torch.randn(batch, heads, queries, head_dim, requires_grad=True)
        key = torch.randn(batch, groups, keys, head_dim, requires_grad=True)
        value = torch.randn(batch, groups, keys, head_dim, requires_grad=True)
        with sdpa_kernel(backend), count_flops(model) as counts:
            model(query, key, value).sum().backward()
        skipped = (2 + 4 + 1) * (scores - seen) if causal and repeated else 0
        assert (counts.forward, counts.backward, counts.recompute) == (2 * scores, 4 * scores, repeated * scores)
        assert counts.causal_skipped == skipped
        assert counts.hardware_flops == (6 + repeated) * scores - skipped


class _Sdpa(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=query.shape[1] != key.shape[1]
        )


_CONVOLUTIONS: tuple[Callable[..., nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: tuple[Callable[..., nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@law
@given(
    batch=batches,
    groups=st.integers(1, 3),
    channels=st.integers(1, 3),
    filters=st.integers(1, 3),
    sizes=st.lists(st.integers(5, 8), min_size=1, max_size=3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
)
def test_a_convolution_costs_its_taps_at_every_output_position(
    batch: int,
    groups: int,
    channels: int,
    filters: int,
    sizes: list[int],
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
) -> None:
    """In one to three dimensions, grouped, strided, padded, dilated; each of the two gradients costs the same again."""
    positions = 1
    for size in sizes:
        positions *= (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    product = 2 * batch * (groups * filters) * positions * channels * kernel ** len(sizes)
    model = _CONVOLUTIONS[len(sizes) - 1](
        groups * channels,
        groups * filters,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )
    x = torch.randn(batch, groups * channels, *sizes, requires_grad=True)
    with count_flops(model) as counts:
        model(x).sum().backward()
    assert (counts.forward, counts.backward) == (product, 2 * product)


@law
@given(
    batch=batches,
    groups=st.integers(1, 3),
    channels=st.integers(1, 3),
    filters=st.integers(1, 3),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
)
def test_a_transposed_convolution_costs_its_taps_at_every_input_position(
    batch: int, groups: int, channels: int, filters: int, sizes: list[int], kernel: int, stride: int
) -> None:
    """However far apart the stride lays them out."""
    positions = 1
    for size in sizes:
        positions *= size
    product = 2 * batch * (groups * channels) * positions * filters * kernel ** len(sizes)
    model = _TRANSPOSED[len(sizes) - 1](groups * channels, groups * filters, kernel, stride=stride, groups=groups)
    x = torch.randn(batch, groups * channels, *sizes, requires_grad=True)
    with count_flops(model) as counts:
        model(x).sum().backward()
    assert (counts.forward, counts.backward) == (product, 2 * product)


@law
@given(batch=st.integers(1, 5), widths=st.lists(st.integers(2, 9), min_size=2, max_size=6))
def test_a_perceptron_costs_its_layers_forward_and_twice_that_backward_but_for_its_input(
    batch: int, widths: list[int]
) -> None:
    """The first layer's input needs no gradient, so one product is left out."""
    products = [2 * batch * inputs * outputs for inputs, outputs in itertools.pairwise(widths)]
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    model = nn.Sequential(*layers)
    with count_flops(model) as counts:
        model(torch.randn(batch, widths[0])).sum().backward()
    assert counts.forward == sum(products)
    assert counts.backward == 2 * sum(products) - products[0]
    for index, product in enumerate(products):
        backward = product if index == 0 else 2 * product
        assert counts.by_module()[str(index)] == PhaseFlops(forward=product, backward=backward)


@law
@given(
    batch=batches,
    widths=st.lists(st.integers(2, 9), min_size=2, max_size=6),
    trained_layers=st.lists(st.booleans(), min_size=5, max_size=5),
    input_needs_gradient=st.booleans(),
)
def test_a_gradient_is_computed_only_where_something_before_it_or_it_is_trained(
    batch: int, widths: list[int], trained_layers: list[bool], input_needs_gradient: bool
) -> None:
    """A weight's own gradient if it is trained; its input's if the input needs one or a layer before is trained."""
    sizes = list(itertools.pairwise(widths))
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    for layer, is_trained in zip(model, trained_layers, strict=False):
        layer.requires_grad_(is_trained)
    passes_on = input_needs_gradient
    backward = without_backward = 0
    for (inputs_, outputs), is_trained in zip(sizes, trained_layers, strict=False):
        product = 2 * batch * inputs_ * outputs
        backward += product * (int(is_trained) + int(passes_on))
        passes_on = passes_on or is_trained
        without_backward += 0 if passes_on else product
    x = torch.randn(batch, widths[0], requires_grad=input_needs_gradient)
    with count_flops(model) as counts:
        loss = model(x).sum()
        if loss.requires_grad:
            loss.backward()
    assert counts.forward == sum(2 * batch * inputs_ * outputs for inputs_, outputs in sizes)
    assert counts.backward == backward
    assert counts.without_backward == without_backward


class _Segments(nn.Module):
    """Layers in segments, some of which are checkpointed."""

    def __init__(self, segments: list[nn.Sequential], checkpointed: list[bool], *, reentrant: bool) -> None:
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.checkpointed = checkpointed
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for segment, is_checkpointed in zip(self.segments, self.checkpointed, strict=True):
            x = checkpoint(segment, x, use_reentrant=self.reentrant) if is_checkpointed else segment(x)
        return x


@law
@given(
    batch=batches,
    segments=st.lists(st.tuples(st.lists(st.integers(2, 9), max_size=3), st.booleans()), min_size=1, max_size=4),
    reentrant=st.booleans(),
)
def test_a_checkpointed_segment_is_run_again_and_no_other(
    batch: int, segments: list[tuple[list[int], bool]], reentrant: bool
) -> None:
    """Each segment ends in a tanh, which saves its result: all of it is run again, by both kinds of checkpointing."""
    built: list[nn.Sequential] = []
    costs: list[int] = []
    for hidden, _ in segments:
        sizes = list(itertools.pairwise([WIDTH, *hidden, WIDTH]))
        built.append(nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh()))))
        costs.append(sum(2 * batch * SEQUENCE * inputs_ * outputs for inputs_, outputs in sizes))
    checkpointed = [is_checkpointed for _, is_checkpointed in segments]
    counts = trained(_Segments(built, checkpointed, reentrant=reentrant), batch)
    assert counts.forward == sum(costs)
    assert counts.backward == 2 * sum(costs)
    assert counts.recompute == sum(
        cost for cost, is_checkpointed in zip(costs, checkpointed, strict=True) if is_checkpointed
    )
    for index, (cost, is_checkpointed) in enumerate(zip(costs, checkpointed, strict=True)):
        assert counts.by_module()[f"segments.{index}"] == PhaseFlops(
            forward=cost, backward=2 * cost, recompute=cost if is_checkpointed else 0
        )
