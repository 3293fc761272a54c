"""``plan_job``: what one process counts of one rank is what real ranks do, by the ranks' own account and by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import distributed as torch_distributed, nn
from torch.distributed.tensor.experimental import context_parallel

from lightning_flops import ConfigError, LightningFlopsError, Plan, plan_job
from lightning_flops.cli import main
from tests.forks import TORCH
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, run_ranks
from tests.ranks.planned_jobs import (
    BATCH,
    BLOCKS,
    JOBS,
    OUT,
    WIDTH,
    Block,
    Net,
    adamw,
    not_resharded,
    replicated,
    tensor_parallel,
)

distributed: Any = torch_distributed  # which does not say what of it is public
KINDS = {
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "allgather_base_": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""By the name that torch's operator has without underscores at its beginning."""
HIDDEN = 4 * WIDTH


FIRST = ("tensor_parallel", "fully_sharded")
BY_RANKS = [[job for job, (_, mesh) in JOBS.items() if math.prod(mesh.values()) == ranks] for ranks in (2, 4)]


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor_autograd")  # has another name in the latest torch
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # as FSDP of the first kind does
@pytest.mark.parametrize("jobs", [FIRST, *(pytest.param(jobs, marks=pytest.mark.slow) for jobs in BY_RANKS)])
def test_a_plan_is_what_real_ranks_do(jobs: list[str], tmp_path: Path) -> None:
    ranks = math.prod(JOBS[jobs[0]][1].values())
    program = ["-W", "ignore", "-m", "tests.ranks.planned_jobs", *jobs]
    printed = run_ranks(program, ranks=ranks, folder=tmp_path, timeout_sec=270.0, imports=TORCH)
    for rank, text in enumerate(printed):
        for job, real in json.loads(text.strip().splitlines()[-1]).items():
            make, mesh = JOBS[job]
            plan = plan_job(make, mesh, rank)
            assert sum(astuple(plan.flops)) == real["flops"], job
            assert plan.local_params == real["local_params"], job
            planned = {row.kind: [row.calls, row.bytes] for row in plan.collectives}
            names = {name: name.split(".")[1].lstrip("_") for name in real["collectives"]}
            assert planned == {KINDS[names[name]]: found for name, found in real["collectives"].items()}, job
            assert plan.memory is not None
            if job != "in_bfloat16":  # whose products take memory inside of the CPU's kernel
                (least, most), planned_peak = real["peaks"], plan.memory.peak_bytes
                assert 0.99 * least <= planned_peak <= most, (job, rank, least, planned_peak, most)


def layer(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer."""
    return inputs * outputs + outputs


def test_tensor_parallel_by_hand() -> None:
    """Each rank of eight has an eighth of each hidden layer; what is put out is added up once forward and once back."""
    plan = plan_job(tensor_parallel, {"tp": 8}, rank=3, peak_flops_per_sec=1e9, links={"tp": 1e6})
    block, last = 2 * BATCH * WIDTH * HIDDEN // 8, 2 * BATCH * WIDTH * OUT
    assert plan.flops.forward == BLOCKS * 2 * block + last
    # The first layer's inputs need no gradient.
    assert plan.flops.backward == 2 * plan.flops.forward - block
    own = BLOCKS * (layer(WIDTH, HIDDEN) // 8 + WIDTH * HIDDEN // 8 + WIDTH) + layer(WIDTH, OUT)
    assert plan.local_params == own
    assert plan.params == BLOCKS * (layer(WIDTH, HIDDEN) + layer(HIDDEN, WIDTH)) + layer(WIDTH, OUT)
    (row,) = plan.collectives
    message = BATCH * WIDTH * 4
    assert (row.kind, row.dim, row.size) == ("all_reduce", "tp", 8)
    assert (row.calls, row.bytes) == (2 * BLOCKS - 1, (2 * BLOCKS - 1) * message)
    # A ring sends every byte twice, but for the rank's own eighth.
    assert row.floor_sec == pytest.approx(2 * 7 / 8 * row.bytes / 1e6)
    assert plan.arithmetic_sec == pytest.approx((plan.flops.forward + plan.flops.backward) / 1e9)
    assert plan.floor_sec == max(plan.operators_sec or 0.0, row.floor_sec or 0.0)
    assert plan.exposed_floor_sec == pytest.approx((plan.operators_sec or 0.0) + (row.floor_sec or 0.0))


def test_the_memory_of_replicated_parameters_by_hand() -> None:
    """Parameters, their gradients twice, as these lie in buckets once more, and two moments with a step each."""
    plan = plan_job(replicated, {"dp": 8})
    assert plan.memory is not None and plan.memory.when.part == "optimizer"
    weights = 4 * plan.params
    tensors = 4 * BLOCKS + 2 + 2
    assert plan.memory.at_peak["gradients"] == 2 * weights
    assert plan.memory.at_peak["optimizer"] == 2 * weights + 4 * tensors
    assert plan.memory.at_peak["batch"] == 4 * BATCH * WIDTH


class Wide(nn.Module):
    """Products so large that no machine of these tests could hold the model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def test_the_floor_of_the_operators_by_hand() -> None:
    """One product, at a peak that makes its bytes the longer; what has no FLOPs takes no time."""

    def make(mesh: Any) -> Any:
        net = nn.Linear(64, 32, bias=False).requires_grad_(requires_grad=False)
        return nn.Sequential(net, nn.ReLU()), torch.randn(16, 64)

    plan = plan_job(make, {"dp": 2}, peak_flops_per_sec=1e30, memory_bytes_per_sec=1e9)
    assert plan.operators_sec == pytest.approx(4 * (16 * 64 + 64 * 32 + 16 * 32) / 1e9)
    assert plan_job(make, {"dp": 2}, peak_flops_per_sec=1e9, memory_bytes_per_sec=1e30).operators_sec == (
        pytest.approx(2 * 16 * 64 * 32 / 1e9)
    )
    assert plan_job(make, {"dp": 2}).unavailable == {"floor_sec": "no device was given"}


def test_a_dimension_along_which_nothing_is_sent_is_said_first_with_what_to_do() -> None:
    def ignores(mesh: Any) -> Any:
        return nn.Linear(8, 8), torch.randn(2, 8)

    assert plan_job(replicated, {"dp": 2}).unused == ()
    plan = plan_job(ignores, {"dp": 2, "tp": 2, "cp": 1})
    assert plan.unused == ("dp", "tp")
    words = " ".join(str(plan).split())
    assert words.index("Nothing is sent along dp: its ranks would train apart") < words.index("forward FLOPs")
    assert "fully_shard(model, mesh=mesh['tp'])" in words


@pytest.mark.parametrize("count", ["full", "half"])
def test_the_share_of_the_peak_is_of_what_kernels_execute(
    count: Literal["full", "half"],
) -> None:
    """Two products forward, four back and one repeated, over half of the scores: 6 of 7 are the model's."""

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    def make(mesh: Any) -> Any:
        return Attention(), torch.randn(1, 8, 4096, 64, requires_grad=True)

    plan = plan_job(make, {"dp": 1}, peak_flops_per_sec=1e12, causal_attention=count)
    assert plan.arithmetic_sec == pytest.approx(7 * 2 * 8 * 4096**2 * 64 / 2 / 1e12, rel=1e-3)
    assert plan.mfu_at_most == pytest.approx(6 / 7)


def sharded_and_cut(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with torch.device("meta"):
        net = Wide(32_768, 40)
    net = net.bfloat16().to_empty(device="cuda")
    layers = list(net.layers)
    for first, second in zip(layers[::2], layers[1::2], strict=True):
        parallelize_module(first, mesh["tp"], ColwiseParallel())
        parallelize_module(second, mesh["tp"], RowwiseParallel())
        for one in (first, second):
            fully_shard(one, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return net, torch.randn(8192, 32_768, dtype=torch.bfloat16), torch.optim.AdamW(net.parameters())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer alone is wrapped here
def test_one_rank_of_a_model_of_43_billion_parameters_by_hand() -> None:
    plan = plan_job(
        sharded_and_cut,
        {"dp": 8, "tp": 8},
        63,
        device="H100",
        links={"nvlink": 450e9, "net": 50e9},
        steps=3600,
        price=2.0,
    )
    weight, samples = 32_768**2, 8192
    assert (plan.params, plan.local_params) == (40 * weight, 40 * weight // 64)
    assert plan.flops.forward == 40 * 2 * samples * weight // 8
    assert plan.flops.backward == (2 * 40 - 1) * 2 * samples * weight // 8
    rows = {(row.kind, row.dim): row for row in plan.collectives}
    part = weight // 8 * 2  # bytes of a layer that is cut, in bfloat16
    assert rows["all_reduce", "tp"].bytes == rows["all_reduce", "tp"].calls * samples * 32_768 * 2
    assert rows["reduce_scatter", "dp"].bytes == 40 * part
    assert rows["all_gather", "dp"].bytes == rows["all_gather", "dp"].calls * part
    # Eight ranks of a node share nvlink, the same place of eight nodes the net.
    assert rows["reduce_scatter", "dp"].floor_sec == pytest.approx(7 / 8 * 40 * part / 50e9)
    assert rows["all_reduce", "tp"].floor_sec == pytest.approx(14 / 8 * rows["all_reduce", "tp"].bytes / 450e9)
    # 989.4 TFLOP/s is the greatest of the three devices of this name.
    flops = plan.flops.forward + plan.flops.backward
    assert plan.arithmetic_sec == pytest.approx(flops / 989.4e12)
    assert plan.floor_sec is not None and plan.mfu_at_most is not None
    least, usual = plan.runs
    assert least.hours == pytest.approx(plan.floor_sec)
    assert least.price == pytest.approx(plan.floor_sec * 64 * 2.0)
    assert usual.hours == pytest.approx(flops / 989.4e12 / 0.4)
    slow = plan_job(tensor_parallel, {"tp": 8}, device="H100", links={"tp": 1e3}, steps=3600)
    assert [one.at for one in slow.runs] == ["the floor"] and slow.mfu_at_most is not None and slow.mfu_at_most < 0.4
    assert plan.mfu_at_most == pytest.approx(flops / 989.4e12 / plan.floor_sec)


def reads(batch: int, sequence: int) -> Any:
    """A job whose attention makes FLOPs grow with the square of a sequence, and whose labels go with its tokens."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
            x = self.embed(tokens)
            x = nn.functional.scaled_dot_product_attention(x, x, x)
            return nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())

    def make(mesh: Any) -> Any:
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        net = Reader()
        return net, {"tokens": tokens, "labels": tokens}, torch.optim.AdamW(net.parameters())

    return make


def test_a_plan_at_other_sizes_is_that_of_a_function_written_so() -> None:
    asked = plan_job(reads(2, 8), {"dp": 2}, at={"batch": 3, "sequence": 40})
    written = plan_job(reads(3, 40), {"dp": 2})
    assert asked.flops == written.flops and asked.memory == written.memory
    assert asked.flops.forward == 4 * 3 * 40 * 40 * WIDTH + 2 * 3 * 40 * WIDTH * 100
    assert plan_job(reads(2, 8), {"dp": 2}, at={"sequence": 40}).flops == plan_job(reads(2, 40), {"dp": 2}).flops
    assert ", batch 3, sequence 40, counted" in str(asked)
    with pytest.raises(ConfigError, match="at must be by size of the batch, batch, sequence, got length"):
        plan_job(reads(2, 8), {"dp": 2}, at={"length": 40})
    with pytest.raises(ConfigError, match=r"at must have an integer of at least 1 by name, got {'batch': 0}"):
        plan_job(reads(2, 8), {"dp": 2}, at={"batch": 0})


def staged(mesh: Any) -> Any:
    """Two blocks, then one and the last layer."""
    parts, place = (Net().blocks[:2], (Block(), nn.Linear(WIDTH, OUT))), mesh["pp"].get_local_rank()
    return nn.Sequential(*parts[place]), torch.randn(BATCH, WIDTH, requires_grad=place > 0)


def test_the_stages_of_a_pipeline_add_up_to_the_model() -> None:
    """Four microbatches are a batch four times as large; the plan of every rank has all stages of its pipeline."""
    whole = plan_job(lambda mesh: (Net(), torch.randn(4 * BATCH, WIDTH)), {"dp": 1}).flops
    for rank in range(4):
        plan = plan_job(staged, {"pp": 2, "dp": 2}, rank, microbatches=4)
        assert sum(one.forward for one in plan.stages) == whole.forward
        assert sum(one.backward for one in plan.stages) == whole.backward
        assert plan.flops == plan.stages[rank // 2] and plan.stages[0] != plan.stages[1]
        assert plan.params == sum(one.numel() for one in Net().parameters()) and plan.local_params < plan.params
        assert plan.bubble == 1 / 5
        assert "bubble of the pipeline:" in str(plan)
    for mesh, microbatches in (({"dp": 2}, 4), ({"pp": 2}, None), ({"pp": 2}, 0)):
        with pytest.raises(ConfigError, match="microbatches must be"):
            plan_job(staged, mesh, microbatches=microbatches)


@pytest.mark.slow
def test_the_bubble_is_that_of_stages_that_sleep(tmp_path: Path) -> None:
    """Of real ranks of gloo, under both schedules, by their own clock."""
    program = ["-W", "ignore", "-m", "tests.ranks.sleeping_stages"]
    printed = run_ranks(program, ranks=2, folder=tmp_path, timeout_sec=100.0, imports=TORCH)
    bubble = plan_job(staged, {"pp": 2}, microbatches=4).bubble
    for text in printed:
        for waited in json.loads(text.strip().splitlines()[-1]).values():
            assert waited == pytest.approx(bubble, abs=0.04)  # of three microbatches it is 0.25, of five 0.167


def test_nothing_is_left_behind() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    before, state = [dict(vars(one)) for one in (DeviceMesh, torch.UntypedStorage)], torch.get_rng_state()
    for _ in range(2):
        plan_job(tensor_parallel, {"tp": 2})
    assert [dict(vars(one)) for one in (DeviceMesh, torch.UntypedStorage)] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not distributed.is_initialized()


def asks_for_values(mesh: Any) -> Any:
    return nn.Linear(int(torch.ones(3).sum()), 2), torch.randn(1, 3)


def hooked(mesh: Any) -> Any:
    net = nn.parallel.DistributedDataParallel(Net())
    net.register_comm_hook(None, print)
    return net, torch.randn(BATCH, WIDTH)


class CutInKernels(nn.Module):
    """Attention along a sequence that torch cuts."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, query: torch.Tensor) -> Any:
        with context_parallel(self.mesh, buffers=[torch.zeros(BATCH)], buffer_seq_dims=[0]):
            return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def cut_in_kernels(mesh: Any) -> Any:
    return CutInKernels(mesh), torch.randn(2, 4, 8, 8, requires_grad=True)


class DeepSpeedEngine(Net):
    """As if it were one that could be made without values."""

    __module__ = "deepspeed.runtime.engine"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (asks_for_values, "cannot be planned.*_local_scalar_dense.*each expert an even share"),
        (lambda mesh: Block(), "must return a model and a batch"),
        (hooked, "A communication hook is not planned"),
        (cut_in_kernels, "cannot be planned.*kernels of GPUs alone; gather keys and values"),
        (lambda mesh: (DeepSpeedEngine(), torch.randn(BATCH, WIDTH)), "fully_shard.* for ZeRO 3"),
    ],
)
def test_what_cannot_be_planned_is_named(make: Any, words: str) -> None:
    with pytest.raises(LightningFlopsError, match=words):
        plan_job(make, {"dp": 2})
    assert not distributed.is_initialized()


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="mesh must have a size"):
        plan_job(tensor_parallel, {"tp": 0})
    with pytest.raises(ConfigError, match="device must be one whose figures are known"):
        plan_job(tensor_parallel, {"tp": 2}, device="H1000")
    with pytest.raises(ConfigError, match="rank must be one of the 2 of the mesh, got 2"):
        plan_job(tensor_parallel, {"tp": 2}, rank=2)
    with pytest.raises(ConfigError, match=r"links must be by dimension of the mesh, or nvlink and net, got .'pp'"):
        plan_job(tensor_parallel, {"tp": 2}, links={"pp": 1.0})


PROGRAM = "from tests.ranks.planned_jobs import tensor_parallel\n"


def test_the_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs.py").write_text(PROGRAM)
    asked = ["plan", f"{tmp_path}/jobs.py:tensor_parallel", "--mesh", "tp=2", "--device", "H100"]
    assert main([*asked, "--links", "nvlink=450e9", "--steps", "10", "--price", "2.5"]) == 0
    text = capsys.readouterr().out
    plan = plan_job(tensor_parallel, {"tp": 2}, device="H100", links={"nvlink": 450e9}, steps=10, price=2.5)
    assert f"{plan.flops.forward:,}" in text and f"{plan.local_params:,}" in text
    assert main([*asked, "--json", "--at", f"batch={BATCH}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flops"]["forward"] == plan.flops.forward and found["mfu_at_most"] is not None
    assert str(plan) == text and isinstance(plan, Plan)


@pytest.mark.slow
def test_what_is_planned_in_the_place_of_an_engine_is_what_it_does(tmp_path: Path) -> None:
    """Stages 0 to 2 add up gradients as DistributedDataParallel does, and 1 and 2 gather what each rank updates."""
    program = ["-W", "ignore", "-m", "tests.deepspeed.planned_engines"]
    given: dict[str, Any] = {"environment": DEEPSPEED_ON_CPU, "imports": DEEPSPEED}
    printed = run_ranks(program, ranks=2, folder=tmp_path, timeout_sec=200.0, **given)
    (asked,) = run_ranks([*program, "plan"], ranks=1, folder=tmp_path, timeout_sec=100.0, **given)
    refused = json.loads(asked.strip().splitlines()[-1])
    assert len(refused) == 4 and all("DistributedDataParallel for ZeRO 0" in words for words in refused)
    replicas, shards = (plan_job(make, {"dp": 2}) for make in (of_one_kind, not_resharded))
    weights = 4 * replicas.params
    for text in printed:
        for stage, real in enumerate(json.loads(text.strip().splitlines()[-1])):
            plan = replicas if stage < 3 else shards
            assert (real["flops"], real["local_params"]) == (sum(astuple(plan.flops)), plan.local_params)
            sent = {row.kind: row.bytes for row in plan.collectives}
            sent |= {"all_gather": weights} if stage in (1, 2) else {}
            seen = Counter[str]()
            for name, size in real["bytes"].items():
                seen[KINDS[name.split(".")[1].lstrip("_")]] += size
            for kind in {*sent, *seen}:
                assert 0 <= seen[kind] - sent.get(kind, 0) <= 8, (stage, kind)  # a flag or two: has anything overflown?


def of_one_kind(mesh: Any) -> Any:
    net = nn.parallel.DistributedDataParallel(Net())
    return net, torch.randn(BATCH, WIDTH), adamw(net)
