"""Engines whose ranks share experts, sequences or weights."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import lightning_flops.deepspeed
from lightning_flops import Profile, ProfilerConfig
from tests.deepspeed.engines import config, job_of
from tests.deepspeed.launching import NOT_IN_0_16, OLD
from tests.deepspeed.scenario import Skipped, scenario

STEPS = 8
WINDOW: dict[str, Any] = {"profile_step": 1, "timing_steps": 3, "trace": False}

WIDTH, EXPERTS, CLASSES = 8, 4, 3
ROUTES = ((9, 4, 2, 1), (6, 6, 2, 2), (5, 5, 5, 1), (4, 4, 4, 4))
"""How many of a rank's 16 tokens go to each expert."""
SAMPLES, TOKENS, HEADS = 3, 6, 2


def trained(model: nn.Module, batch: Any, parameters: Any = None, **more: Any) -> Profile:
    """The profile of steps of *model* on *batch*."""
    given = {"tokens_per_sample": more.pop("tokens_per_sample", None)}
    settings = config(block=None, train_micro_batch_size_per_gpu=len(batch), **more.pop("settings", {}))
    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, **more)[0]
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW, **given))
    for _ in range(STEPS):
        engine.backward(engine(batch).sum())
        engine.step()
    handle.detach()
    assert handle.profile is not None
    return handle.profile


def ranks() -> int:
    return int(torch.distributed.get_world_size())


def skip_old(name: str) -> None:
    if OLD:
        raise Skipped(f"DeepSpeed 0.16 {NOT_IN_0_16[name]}")


class _Routed(nn.Module):
    """Tokens are one-hot in the first EXPERTS places, and the gate is a unit matrix: a token names its expert."""

    def __init__(self, *, ep_size: int) -> None:
        super().__init__()
        routing: dict[str, Any] = {"k": 1, "min_capacity": 0, "drop_tokens": False, "use_rts": False}
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=EXPERTS, ep_size=ep_size, **routing)
        self.head = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(torch.eye(EXPERTS, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.moe(tokens)[0])
        return result


@scenario()
def experts_count_the_tokens_that_were_routed_to_them_and_parameters_of_all() -> None:
    """Four experts on two ranks; every rank routes its tokens otherwise."""
    model = _Routed(ep_size=2)
    grouped = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    rank = torch.distributed.get_rank()
    tokens = torch.eye(EXPERTS, WIDTH).repeat_interleave(torch.tensor(ROUTES[rank]), dim=0)
    profile = trained(model, tokens, grouped)
    # Most tokens that any rank of this rank's group sends to one expert: every expert's buffer.
    busiest_of_all = {2: (9, 9), 4: (9, 9, 5, 5)}[ranks()]
    busiest = busiest_of_all[rank]
    gate, head = 2 * 16 * WIDTH * EXPERTS, 2 * 16 * WIDTH * CLASSES
    # DeepSpeed 0.16 sorts the tokens into the buffers, and back, by products with all places of all buffers.
    sorting = 2 * 16 * (EXPERTS * busiest) * WIDTH if OLD else 0
    # A rank computes two of the four experts, each on a buffer from either rank of its group.
    expert = 2 * (2 * busiest) * WIDTH * WIDTH
    # How many tokens came decides the buffers, so the window counts several steps, of the same batch.
    steps = len(profile.counted_steps)
    forwards = {module.name: module.total.forward / steps for module in profile.modules}
    experts = "moe.deepspeed_moe.experts"
    assert forwards[f"{experts}.deepspeed_experts.0"] == forwards[f"{experts}.deepspeed_experts.1"] == expert
    assert forwards["moe.deepspeed_moe.gate"] == gate
    assert profile.flops.forward == gate + head + 2 * expert + 2 * sorting
    # The tokens need no gradient: neither the gate's product nor the experts' has one to send back.
    assert profile.flops.backward == gate + 2 * head + 2 * expert + 2 * sorting
    assert not profile.uncounted
    of_expert, rest = WIDTH * WIDTH + WIDTH, EXPERTS * WIDTH + WIDTH * CLASSES + CLASSES
    assert profile.params == profile.trainable_params == rest + EXPERTS * of_expert
    assert {module.name: module.params for module in profile.modules}[experts] == EXPERTS * of_expert
    if job := job_of(profile):  # ranks with other experts are all of the job; each has two, on two buffers
        products = 2 * 2 * 2 * WIDTH * WIDTH + (2 * 2 * 16 * EXPERTS * WIDTH if OLD else 0)
        assert job.flops.forward == ranks() * (gate + head) + products * sum(busiest_of_all)
        assert job.params == rest + EXPERTS * of_expert
    assert profile.local_params == rest + EXPERTS // 2 * of_expert
    context = profile.context
    assert (context.world_size, context.dp_size, context.ep_size) == (ranks(), ranks(), 2)
    assert profile.timing is not None and profile.samples == 16
    assert profile.rates.samples_per_sec == ranks() * 16 / profile.timing.global_step_sec


class _Attention(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


class _Sequences(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention = DistributedAttention(_Attention(), group, scatter_idx=2, gather_idx=1)

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = part.shape
        qkv = self.qkv(part).view(samples, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = (one.contiguous() for one in qkv.unbind(2))
        result: torch.Tensor = self.attention(query, key, value, 0)
        return result


def _share_sequences(profile: Profile) -> None:
    context, pairs = profile.context, ranks() // 2
    assert (context.world_size, context.dp_size, context.sp_size, context.tp_size) == (ranks(), pairs, 2, 1)
    assert (profile.samples, profile.tokens) == (SAMPLES, SAMPLES * TOKENS)
    assert profile.timing is not None
    assert profile.rates.samples_per_sec == pairs * SAMPLES / profile.timing.global_step_sec
    assert profile.rates.tokens_per_sec == pairs * SAMPLES * TOKENS / profile.timing.global_step_sec


@scenario()
def ranks_that_share_sequences_count_their_samples_once_and_their_own_tokens_and_heads() -> None:
    """Ulysses on pairs of ranks: each has half of its pair's sequences; two pairs see different data."""
    skip_old("sequences")
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    model = _Sequences(parallel_state_sp.get_sequence_parallel_group())
    batch = torch.randn(SAMPLES, TOKENS // 2, WIDTH)
    profile = trained(model, batch, tokens_per_sample=TOKENS, mpu=parallel_state_sp)
    _share_sequences(profile)
    # Half of the tokens through the projection; the whole sequence for one of the two heads, four wide.
    projection = 2 * (SAMPLES * TOKENS // 2) * WIDTH * 3 * WIDTH
    attention = 2 * 2 * SAMPLES * 1 * TOKENS * TOKENS * 4
    assert {module.name: module.total.forward for module in profile.modules if module.total.forward} == {
        "": projection + attention,
        "qkv": projection,
        "attention": attention,
        "attention.local_attn": attention,
    }
    assert profile.params == 3 * WIDTH * WIDTH
    if job := job_of(profile):
        forward = 2 * SAMPLES * TOKENS * WIDTH * 3 * WIDTH + 2 * 2 * SAMPLES * HEADS * TOKENS * TOKENS * 4
        assert job.flops.forward == ranks() // 2 * forward
        assert job.flops_of_model is not None and job.flops_of_model.forward == forward
        assert job.params == 3 * WIDTH * WIDTH


@scenario()
def a_mesh_names_the_ranks_that_share_sequences() -> None:
    mesh = (ranks() // 2, 2)
    settings = {"data_parallel_size": mesh[0], "sequence_parallel_size": mesh[1]}
    batch = torch.randn(SAMPLES, TOKENS // 2, WIDTH)
    model = nn.Linear(WIDTH, CLASSES)
    _share_sequences(trained(model, batch, tokens_per_sample=TOKENS, mesh_param=mesh, settings=settings))


def _network() -> nn.Module:
    mlp = nn.Sequential()
    mlp.add_module("up_proj", nn.Linear(WIDTH, 4 * WIDTH))
    mlp.add_module("down_proj", nn.Linear(4 * WIDTH, WIDTH))
    return nn.Sequential(OrderedDict(mlp=mlp, norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, CLASSES)))


@scenario()
def weights_that_deepspeed_cut_count_whole_and_the_others_once() -> None:
    """DeepSpeed cuts one block's weights over two ranks, and leaves the rest whole on both."""
    skip_old("automatic_tensor_parallel")
    cut = [
        {"patterns": [".*up_proj.weight$"], "partition_type": "column"},
        {"patterns": [".*down_proj.weight$"], "partition_type": "row"},
    ]
    settings = {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": cut}},
    }
    profile = trained(_network(), torch.ones(SAMPLES, WIDTH), settings=settings)
    assert (profile.context.world_size, profile.context.dp_size, profile.context.tp_size) == (2, 1, 2)
    assert profile.timing is not None
    assert profile.rates.samples_per_sec == SAMPLES / profile.timing.global_step_sec
    block = (WIDTH * 4 * WIDTH + 4 * WIDTH) + (4 * WIDTH * WIDTH + WIDTH)
    rest = 2 * WIDTH + (WIDTH * CLASSES + CLASSES)
    params = {module.name: module.params for module in profile.modules}
    assert (params["mlp"], params["norm"], params["head"]) == (block, 2 * WIDTH, WIDTH * CLASSES + CLASSES)
    assert profile.params == profile.trainable_params == block + rest
    # Each rank has half of both weights and of the first bias.
    assert profile.local_params == rest + (2 * WIDTH * 4 * WIDTH + 4 * WIDTH) // 2 + WIDTH
    shard = 2 * SAMPLES * WIDTH * 4 * WIDTH // 2
    forwards = {module.name: module.total.forward for module in profile.modules}
    assert forwards["mlp.up_proj"] == forwards["mlp.down_proj"] == shard
    head = 2 * SAMPLES * WIDTH * CLASSES
    assert profile.flops.forward == 2 * shard + head
    if job := job_of(profile):  # the head counts on both ranks, and its weights once
        assert job.flops.forward == 2 * 2 * SAMPLES * WIDTH * 4 * WIDTH + 2 * head
        assert job.flops_of_model is not None and job.flops_of_model.forward == job.flops.forward
        assert job.params == block + rest
