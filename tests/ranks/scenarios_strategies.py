"""Two and four ranks under every strategy of Lightning's that runs without a GPU, without the profiler and with it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import footprint, new_trainer
from tests.ranks.strategies_truth import BATCH, HEADS, HIDDEN, IN, OUT, PEAK_FLOPS_PER_SEC, TOKENS, WIDTH

WINDOW: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False}
STEPS = 10
"""One before the window, one that is counted, two that settle, two that are timed and two that are traced; the report
comes out a little later."""
BATCHES = 4 * STEPS
"""Four ranks may share them."""


class Net(nn.Module):
    """Three layers, and a norm that multiplies no matrices."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.first = nn.Linear(IN, hidden)
        self.second = nn.Linear(hidden, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.second(torch.relu(self.first(inputs)))))
        return outputs


class Attention(nn.Module):
    """Attention of a rank's own tokens to those of all ranks that share the sequence, which are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.group: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(inputs).chunk(3, -1)
        )
        keys, values = (all_gather_tensor_autograd(part.contiguous(), 2, self.group) for part in (keys, values))
        with sdpa_kernel(SDPBackend.MATH):
            outputs: Tensor = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return outputs


class Task(pl.LightningModule):
    """Trains *net* by SGD; *prepare* cuts it into pieces, when there are processes to share them."""

    def __init__(self, net: nn.Module, prepare: Callable[[Any], None] = lambda task: None) -> None:
        super().__init__()
        self.net = net
        self.losses: list[str] = []
        self._prepare = prepare
        self._is_prepared = False

    def configure_model(self) -> None:
        if not self._is_prepared:
            self._prepare(self)
        self._is_prepared = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(self.part_of(batch[0])).square().mean()
        self.losses.append(float(loss.detach()).hex())
        return loss

    def part_of(self, inputs: Tensor) -> Tensor:
        """What this rank has of a batch."""
        return inputs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.model is not None
        # FSDP without original parameters has others than this module.
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1, momentum=0.9)


class SequenceTask(Task):
    """Ranks of the mesh's context dimension have an equal part of every sequence each."""

    def part_of(self, inputs: Tensor) -> Tensor:
        assert isinstance(self.net, Attention) and self.device_mesh is not None
        mesh = self.device_mesh["context_parallel"]
        self.net.group = mesh.get_group()
        part: Tensor = inputs.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        return part

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            torch.distributed.all_reduce(parameter.grad)


class ShardedOnCpu(FSDPStrategy):
    """Lightning's FSDP, of torch's first kind, without a GPU, which neither of the two has in mind."""

    def __init__(self, *, mesh: tuple[int, int] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._mesh = mesh

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self._mesh is not None:
            self.kwargs["device_mesh"] = init_device_mesh("cpu", self._mesh, mesh_dim_names=("replicate", "shard"))
        return FullyShardedDataParallel(
            model,
            device_id=self.root_device,  # torch asks for an accelerator where nobody names a device
            sharding_strategy=self.sharding_strategy,
            mixed_precision=self.mixed_precision_config,
            **self.kwargs,
        )


class ContextParallel(ModelParallelStrategy):
    """A ModelParallelStrategy with a mesh of its user's: ranks that see different data × ranks that share sequences."""

    def __init__(self, *, data: int, context: int) -> None:
        super().__init__(data_parallel_size=data * context, tensor_parallel_size=1)
        self._shape = (data, context)

    def setup_environment(self) -> None:
        super().setup_environment()
        names = ("data_parallel", "context_parallel")
        assert self.lightning_module is not None
        self._device_mesh = self.lightning_module._device_mesh = init_device_mesh(
            "cpu", self._shape, mesh_dim_names=names
        )


def loader(*shape: int) -> DataLoader[Any]:
    """The same batches of samples of this *shape* each time."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(BATCHES * BATCH, *shape, generator=generator)), batch_size=BATCH)


def twice(
    *,
    strategy: Callable[[], Any],
    shape: Sequence[int] = (IN,),
    hidden: int = HIDDEN,
    prepare: Callable[[Any], None] = lambda task: None,
    attends: bool = False,
    window: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train without the profiler and with it; what differs, and the profile of this rank."""
    settings |= {"devices": int(os.environ["WORLD_SIZE"]), "max_steps": STEPS, "max_epochs": -1}

    def train(*callbacks: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        task = SequenceTask(Attention()) if attends else Task(Net(hidden), prepare)
        trainer = new_trainer("lightning.pytorch", ".", *callbacks, strategy=strategy(), **settings)
        trainer.fit(task, loader(*shape))
        return {
            "losses": task.losses,
            "weights": [_digest(parameter) for parameter in trainer.model.parameters()],
            "random state": _digest(torch.get_rng_state()),
            "footprint": footprint(trainer, task),
        }

    callback = FlopsProfilerCallback(peak_flops_per_sec=PEAK_FLOPS_PER_SEC, **{**WINDOW, **(window or {})})
    plain, profiled = train(), train(callback)
    return {
        "profile": callback.profile and callback.profile.to_json(),
        "differs": [name for name in plain if plain[name] != profiled[name]],
        "losses": profiled["losses"],
        "files": sorted(str(path) for path in Path().rglob("*") if path.is_file()),
    }


def _digest(parameter: Tensor) -> str:
    """What this rank holds of *parameter*, or of any tensor, to the last bit."""
    local = getattr(parameter, "_local_tensor", parameter)
    return hashlib.sha256(local.detach().contiguous().numpy().tobytes()).hexdigest()


def shard(task: Any) -> None:
    """FSDP2: each layer by itself, then what is left."""
    mesh = task.device_mesh["data_parallel"]
    for layer in (task.net.first, task.net.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(task.net, mesh=mesh)


def split(task: Any) -> None:
    """Tensor parallelism: rows of the first layer, the same columns of the second; every rank has the whole head."""
    plan = {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel()}
    parallelize_module(task.net, task.device_mesh["tensor_parallel"], plan)


def split_sequences(task: Any) -> None:
    """Tensor parallelism whose norm is computed on parts of the sequences, and a head in parts as well."""
    plan = {
        "first": ColwiseParallel(),
        "second": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(task.net, task.device_mesh["tensor_parallel"], plan)


def split_and_shard(task: Any) -> None:
    """Rows and columns of the first two layers on two ranks, each of them and the rest sharded over two more."""
    split(task)
    shard(task)


def parallel(data: int, tensor: int) -> Callable[[], Any]:
    """A strategy of so many ranks with different data, and so many that share their tensors."""
    return partial(ModelParallelStrategy, data_parallel_size=data, tensor_parallel_size=tensor)


TRACED = {"trace": True}
OF_TOKENS: dict[str, Any] = {"shape": (TOKENS, WIDTH), "window": {"tokens_per_sample": TOKENS}}
LAYERS = {nn.Linear}
TWO: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp_accumulating": partial(twice, strategy=DDPStrategy, accumulate_grad_batches=3, window=TRACED),
    "fsdp1": partial(twice, strategy=partial(ShardedOnCpu, auto_wrap_policy=LAYERS), hidden=5, window=TRACED),
    "fsdp2": partial(twice, strategy=parallel(2, 1), prepare=shard, hidden=5, window=TRACED),
    "tensors": partial(twice, strategy=parallel(1, 2), prepare=split, window=TRACED),
    "sequences": partial(twice, strategy=parallel(1, 2), prepare=split_sequences, **OF_TOKENS),
    "contexts": partial(twice, strategy=partial(ContextParallel, data=1, context=2), attends=True, **OF_TOKENS),
}
FOUR: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp1_hybrid": partial(
        twice, strategy=partial(ShardedOnCpu, mesh=(2, 2), auto_wrap_policy=LAYERS, sharding_strategy="HYBRID_SHARD")
    ),
    "fsdp2_tensors": partial(twice, strategy=parallel(2, 2), prepare=split_and_shard, window=TRACED),
}
"""Each rank shares data, weights or sequences with one rank and not another."""

SCENARIOS = TWO if os.environ["WORLD_SIZE"] == "2" else FOUR
