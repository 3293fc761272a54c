"""Engines whose ranks share experts, sequences or weights; each function says what its rank saw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import lightning_flops.deepspeed
from lightning_flops import ProfilerConfig
from tests.deepspeed.engines import config

STEPS = 8
WINDOW: dict[str, Any] = {"profile_step": 1, "timing_steps": 3, "trace": False}

WIDTH, EXPERTS, CLASSES = 8, 4, 3
ROUTES = ((9, 4, 2, 1), (6, 6, 2, 2), (5, 5, 5, 1), (4, 4, 4, 4))
"""How many of a rank's 16 tokens go to each expert."""
SAMPLES, TOKENS, HEADS = 3, 6, 2


def train(engine: Any, batch: Any, **settings: Any) -> dict[str, Any]:
    """Steps on *batch*, profiled."""
    handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**WINDOW, **settings))
    for _ in range(STEPS):
        engine.backward(engine(batch).sum())
        engine.step()
    handle.detach()
    assert handle.profile is not None
    return {"profile": handle.profile.to_json()}


def _engine(model: nn.Module, parameters: Any = None, *, micro_batch: int, **more: Any) -> Any:
    settings = more.pop("settings", {})
    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.0)
    settings = config(block=None, train_micro_batch_size_per_gpu=micro_batch, **settings)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, **more)[0]


class _Routed(nn.Module):
    """Tokens are one-hot in the first EXPERTS places, and the gate is a unit matrix: a token names its expert."""

    def __init__(self, *, ep_size: int) -> None:
        super().__init__()
        self.moe = MoE(
            WIDTH,
            nn.Linear(WIDTH, WIDTH),
            num_experts=EXPERTS,
            ep_size=ep_size,
            k=1,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(torch.eye(EXPERTS, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.moe(tokens)[0])
        return result


def routed() -> dict[str, Any]:
    """Four experts on two ranks; every rank routes its tokens otherwise."""
    model = _Routed(ep_size=2)
    grouped = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine = _engine(model, grouped, micro_batch=16)
    route = torch.tensor(ROUTES[torch.distributed.get_rank()])
    tokens = torch.eye(EXPERTS, WIDTH).repeat_interleave(route, dim=0)
    return train(engine, tokens)


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


def sequences() -> dict[str, Any]:
    """Ulysses on pairs of ranks: each has half of its pair's sequences; two pairs see different data."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(2)
    engine = _engine(
        _Sequences(parallel_state_sp.get_sequence_parallel_group()), micro_batch=SAMPLES, mpu=parallel_state_sp
    )
    return train(engine, torch.randn(SAMPLES, TOKENS // 2, WIDTH), tokens_per_sample=TOKENS)


def mesh_of_sequences() -> dict[str, Any]:
    """The same pairs, named by a mesh in place of a unit."""
    world_size = torch.distributed.get_world_size()
    mesh = (world_size // 2, 2)
    settings = {"data_parallel_size": mesh[0], "sequence_parallel_size": mesh[1]}
    engine = _engine(nn.Linear(WIDTH, CLASSES), micro_batch=SAMPLES, mesh_param=mesh, settings=settings)
    return train(engine, torch.randn(SAMPLES, TOKENS // 2, WIDTH), tokens_per_sample=TOKENS)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(self.up_proj(inputs))
        return result


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = _Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.mlp(inputs)))
        return result


def automatic_tensor_parallel() -> dict[str, Any]:
    """DeepSpeed cuts one block's weights over two ranks, and leaves the rest whole on both."""
    cut = [
        {"patterns": [".*up_proj.weight$"], "partition_type": "column"},
        {"patterns": [".*down_proj.weight$"], "partition_type": "row"},
    ]
    settings = {
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": cut},
        },
    }
    engine = _engine(_Network(), micro_batch=SAMPLES, settings=settings)
    torch.manual_seed(1)
    return train(engine, torch.randn(SAMPLES, WIDTH))


def tensor_parallel_unit() -> dict[str, Any]:
    """A client's own unit, as Megatron has one; its layer holds half of the weight's rows."""
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    alone = [torch.distributed.new_group([one]) for one in range(world_size)][rank]
    unit = SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: world_size,
        get_model_parallel_world_size=lambda: world_size,
        get_model_parallel_rank=lambda: rank,
        get_model_parallel_group=lambda: torch.distributed.group.WORLD,
        get_tensor_model_parallel_rank=lambda: rank,
        get_tensor_model_parallel_group=lambda: torch.distributed.group.WORLD,
        get_data_parallel_world_size=lambda: 1,
        get_data_parallel_rank=lambda: 0,
        get_data_parallel_group=lambda: alone,
        get_data_parallel_group_ranks=lambda: [rank],
    )
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES // world_size + 1, bias=False))
    model[1].weight.tensor_model_parallel = True  # type: ignore[union-attr]
    return train(_engine(model, micro_batch=SAMPLES, mpu=unit), torch.randn(SAMPLES, WIDTH))
