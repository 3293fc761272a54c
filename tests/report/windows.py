"""Windows with round numbers, so that every number of their reports can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lightning_flops.analysis import profile
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import (
    FlopPhase,
    FlopRecord,
    MemoryRecord,
    ModuleRecord,
    OperatorCell,
    PhaseFlops,
    PhaseSeconds,
    RunContext,
    StepRecord,
    StepSignature,
    UncountedOperator,
    WindowRecord,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TracedStep

CPU = RunContext(
    framework="lightning.pytorch",
    framework_version="2.6.6",
    torch_version="2.13.0",
    device_type="cpu",
    device_name="cpu",
    precision="32-true",
    micro_batch_size=100,
    strategy="SingleDeviceStrategy",
)

A100 = replace(CPU, device_type="cuda", device_name="NVIDIA A100-SXM4-80GB", precision="bf16-mixed")

SHOWN_AT = {3: 7, 10: 33, 0: 0}
"""A window's ``profile_step``, and the run's own step where its report came out."""


def build_profile(window: WindowRecord, *, config: ProfilerConfig, traced: TracedStep | None = None) -> Profile:
    """``analysis.profile.build_profile``, of one of the windows below."""
    built = profile.build_profile(window, config=config, traced=traced)
    return replace(built, report_step=SHOWN_AT.get(window.profile_step, window.profile_step))


def cell(
    module: str, phase: FlopPhase, flops: int, *, operator: str = "aten.mm", dtype: str = "float32", **more: int
) -> OperatorCell:
    """One entry of the counter's table."""
    amounts = {"calls": 1, "skipped": 0, "bytes_read": 0, "bytes_written": 0, **more}
    return OperatorCell(module=module, phase=phase, operator=operator, dtype=dtype, flops=flops, **amounts)


def module(name: str, type_name: str, params: int = 0, extra_repr: str = "") -> ModuleRecord:
    """A module all of whose parameters are trained, and on this rank."""
    described = ModuleRecord(name=name, type_name=type_name, extra_repr=extra_repr)
    return replace(described, params=params, trainable_params=params, local_params=params)


def step(
    index: int, *, micro_steps: int = 1, samples: int | None = 100, shapes: str = "100x1000", **more: Any
) -> StepRecord:
    """One global step."""
    batches = (shapes,) * micro_steps
    signature = StepSignature(batches=batches, forwards=micro_steps, backwards=micro_steps, updates=1)
    return StepRecord(index=index, signature=signature, micro_steps=micro_steps, samples=samples, **more)


def traced(**known: Any) -> TracedStep:
    """A traced step of which no more than this is known."""
    nothing = {"index": 8, "like_counted": True, "files": (), "tables": None}
    return TracedStep(**{**nothing, **known})


def in_turns(times: Callable[[float], PhaseSeconds], **first: Any) -> tuple[StepRecord, ...]:
    """Eight timed steps of *times* of 1 and 3 ms in turns, with what the *first* alone has."""
    units = (0.001, 0.003) * 4
    steps = [step(5 + place, seconds=times(unit), reader_sec=unit) for place, unit in enumerate(units)]
    return (replace(steps[0], **first), *steps[1:])


def mlp_window() -> WindowRecord:
    """1000 -> 2000 -> 500, batch 100, timed steps of 10 and 30 ms in turns: means are 20 ms and parts of it.

    Forward: fc1 2 * 100 * 1000 * 2000 = 400 M, fc2 2 * 100 * 2000 * 500 = 200 M. Backward: fc1 has no input gradient,
    so 400 M; fc2 both, 400 M. Parameters: 1000 * 2000 + 2000 = 2,002,000 and 2000 * 500 + 500 = 1,000,500.
    """
    return WindowRecord(
        profile_step=3,
        context=CPU,
        memory=replace(memory("resident", {"forward": 800}, run_peak=900, parameter=0), parameter_bytes=12_010_000),
        modules=(
            replace(module("", "Net", 3_002_500), parameter_bytes={"float32": 4 * 3_002_500}),
            module("fc1", "Linear", 2_002_000, "in_features=1000, out_features=2000, bias=True"),
            module("act", "ReLU"),
            module("drop", "Dropout", 0, "p=0.1, inplace=False"),
            module("fc2", "Linear", 1_000_500, "in_features=2000, out_features=500, bias=True"),
        ),
        flops=FlopRecord(
            cells=(
                cell("fc1", "forward", 400_000_000, operator="aten.addmm"),
                cell("fc2", "forward", 200_000_000, operator="aten.addmm"),
                cell("fc1", "backward", 400_000_000),
                cell("fc2", "backward", 400_000_000, calls=2),
            ),
            module_calls={"": 1, "fc1": 1, "act": 1, "fc2": 1},
        ),
        counted_steps=(step(3, flops=PhaseFlops(forward=600_000_000, backward=800_000_000)),),
        timed_steps=in_turns(
            lambda unit: PhaseSeconds(data_wait=unit, forward=3 * unit, backward=4 * unit, optimizer=unit, other=unit),
            excluded_sec={"validation": 1.5},
        ),
        timing_steps=8,
    )


def predict_window() -> WindowRecord:
    """The same network in a predict loop: 600 M a batch, in timed batches of 10 and 30 ms in turns."""
    trained = mlp_window()
    cells = (one for one in trained.flops.cells if one.phase == "forward")
    return replace(
        trained,
        context=replace(CPU, loop="predict"),
        flops=replace(trained.flops, cells=tuple(cells)),
        counted_steps=(step(3, flops=PhaseFlops(forward=600_000_000)),),
        timed_steps=in_turns(lambda unit: PhaseSeconds(data_wait=unit, forward=6 * unit, other=3 * unit)),
    )


def _block(prefix: str, *, params: int) -> Sequence[ModuleRecord]:
    attention, mlp = params // 3, 2 * params // 3
    return (
        module(prefix, "Block", params),
        module(f"{prefix}.attn", "SelfAttention", attention),
        module(f"{prefix}.attn.qkv", "Linear", 3 * attention // 4, "in_features=1000, out_features=3000, bias=False"),
        module(f"{prefix}.attn.out", "Linear", attention // 4, "in_features=1000, out_features=1000, bias=False"),
        module(f"{prefix}.mlp", "MLP", mlp),
        module(f"{prefix}.mlp.up", "Linear", mlp // 2, "in_features=1000, out_features=4000, bias=False"),
        module(f"{prefix}.mlp.act", "GELU", 0, "approximate='none'"),
        module(f"{prefix}.mlp.down", "Linear", mlp // 2, "in_features=4000, out_features=1000, bias=False"),
    )


BLOCKS = 12


def memory(kind: Literal["allocated", "resident"], held: Mapping[str, int], **sizes: int) -> MemoryRecord:
    """Memory in megabytes: what each phase held, and other sizes; those that are left out are not known."""
    megabytes: dict[str, Any] = {f"{name}_bytes": 1_000_000 * size for name, size in sizes.items()}
    names = ("run_peak", "run_reserved_peak", "gradient", "optimizer", "kept_by_forward")
    return MemoryRecord(
        kind=kind,
        held_bytes={phase: 1_000_000 * size for phase, size in held.items()},
        **{f"{name}_bytes": None for name in names} | {"buffer_bytes": 0} | megabytes,
    )


def transformer_window() -> WindowRecord:
    """A GPT-like model, width 1000, 12 blocks, vocabulary 10,000, tied head, two micro-steps of 4 x 500 tokens, A100.

    A micro-step has 2000 tokens, a step 4000. Forward of one block and step, 2 FLOPs x 4000 tokens x parameters:
    qkv 2 * 4000 * 3 M = 24 G, out 8 G, up 32 G, down 32 G; attention over full scores
    2 matmuls * 2 * 8 sequences * 500 * 500 * 1000 = 8 G, of which causal kernels skip 4 G. Together 104 G, 12 blocks
    1248 G. Head 2 * 4000 * 1000 * 10,000 = 80 G in float32. Forward 1328 G.

    Backward: twice each; the fused attention's backward recomputes one of its matmuls, 4 G a block, and skips half of
    16 + 4 G. Recompute 48 G. skipped 12 * (4 + 10) = 168 G. Model FLOPs 3 * 1328 = 3984 G, hardware FLOPs
    3984 + 48 - 168 = 3864 G. A step takes 100 ms. The head moves 4 GB forward and 6 GB backward, an activation 0.5 GB.
    """
    params = 12_000_000
    embedding = 10_000_000
    modules = [
        module("", "GPT", BLOCKS * params + embedding),
        module("embed", "Embedding", embedding, "10000, 1000"),
        module("blocks", "ModuleList", BLOCKS * params),
    ]
    cells: list[OperatorCell] = []
    flash = "aten._scaled_dot_product_flash_attention"
    half: dict[str, Any] = {"dtype": "bfloat16"}
    products = {"attn.qkv": 24 * 10**9, "attn.out": 8 * 10**9, "mlp.up": 32 * 10**9, "mlp.down": 32 * 10**9}
    for prefix in (f"blocks.{block}" for block in range(BLOCKS)):
        modules += _block(prefix, params=params)
        for name, flops in products.items():
            cells.append(cell(f"{prefix}.{name}", "forward", flops, calls=2, **half))
            cells.append(cell(f"{prefix}.{name}", "backward", 2 * flops, calls=4, **half))
        attention, backward = f"{prefix}.attn", half | {"operator": f"{flash}_backward"}
        cells += [
            cell(attention, "forward", 8 * 10**9, operator=flash, calls=2, skipped=4 * 10**9, **half),
            cell(attention, "backward", 16 * 10**9, calls=2, skipped=8 * 10**9, **backward),
            cell(attention, "recompute", 4 * 10**9, calls=0, skipped=2 * 10**9, **backward),
        ]
    modules.append(module("head", "Linear", embedding, "in_features=1000, out_features=10000, bias=False"))
    cells += [
        cell("head", "forward", 80 * 10**9, calls=2, bytes_read=3 * 10**9, bytes_written=10**9),
        cell("head", "backward", 160 * 10**9, calls=4, bytes_read=6 * 10**9),
        cell("blocks.0.mlp.act", "forward", 0, operator="aten.gelu", bytes_written=500 * 10**6, **half),
    ]
    calls = {one.name: 2 for one in modules if one.name != "blocks"}
    batch: dict[str, Any] = {"samples": 8, "tokens": 4000, "micro_steps": 2, "shapes": "4x500"}
    seconds = PhaseSeconds(data_wait=0.005, transfer=0.001, forward=0.030, backward=0.050, optimizer=0.010, other=0.004)
    return WindowRecord(
        profile_step=10,
        context=replace(A100, micro_batch_size=4, accumulate=2),
        memory=memory(
            "allocated",
            {"forward": 5_200, "backward": 3_000, "optimizer": 2_500},
            run_peak=5_500,
            run_reserved_peak=6_000,
            parameter=616,
            gradient=616,
            optimizer=1_232,
            kept_by_forward=2_700,
        ),
        modules=tuple(modules),
        flops=FlopRecord(cells=tuple(cells), module_calls=calls),
        counted_steps=(step(10, **batch),),
        timed_steps=tuple(step(index, seconds=seconds, reader_sec=0.020, **batch) for index in range(13, 33)),
        timing_steps=20,
    )


def untimed_window() -> WindowRecord:
    """The MLP, counted in a run that ended before a step was timed."""
    return replace(
        mlp_window(),
        timed_steps=(),
        notes=(
            "Training ended before the window closed.",
            "0 of the 2 steps asked for were timed: the run was too short.",
        ),
    )


def lower_bound_window() -> WindowRecord:
    """The MLP with a kernel that could not be counted, one that is small, and fc1 under checkpointing and a teacher.

    The teacher's forward is 100 M without a backward; recompute repeats fc1's 400 M; the optimizer multiplies 50 M.
    Forward 700 M, estimated backward with factor 1: 3 * (700 - 100) = 1800 M.
    """
    window = mlp_window()
    flops, everywhere = window.flops, ("", "act", "drop", "fc1", "fc2")
    return replace(
        window,
        modules=(*window.modules, ModuleRecord(name="teacher", type_name="Linear", params=0)),
        flops=replace(
            flops,
            cells=(
                *flops.cells,
                cell("fc1", "recompute", 400_000_000),
                cell("teacher", "forward", 100_000_000),
                cell("(outside)", "optimizer", 50_000_000, calls=5),
            ),
            module_calls={**flops.module_calls, "teacher": 1},
            uncounted={
                "mylib.small": UncountedOperator(calls=3, modules=("act",), may_have_flops=False),
                "mylib.fused_gemm": UncountedOperator(calls=2, modules=everywhere, may_have_flops=True),
            },
            notes=("Backward FLOPs of 1 thread were attributed to the root.",),
        ),
    )


def parallel_window() -> WindowRecord:
    """The MLP on rank 2 of 8 (dp 4, tp 2): its shards are half of every layer, its batches one of four.

    Counted: half of each figure. Samples: 100 x 4 ranks a step of 20 ms = 20,000 a second.
    """
    window = mlp_window()
    return replace(
        window,
        context=replace(
            A100, rank=2, world_size=8, dp_size=4, tp_size=2, micro_batch_size=100, strategy="ModelParallelStrategy"
        ),
        modules=tuple(replace(module, local_params=module.params // 2) for module in window.modules),
        flops=replace(
            window.flops, cells=tuple(replace(one, flops=one.flops // 2, dtype="tf32") for one in window.flops.cells)
        ),
    )


def stage_window() -> WindowRecord:
    """The MLP as the second of two stages of a DeepSpeed pipeline, in four micro-steps of 25 samples.

    Of the mean step of 20 ms, 6 ms are forward, 8 ms backward, 2 ms optimizer and 4 ms bubble. The other rank of the
    stage sees other data: 100 x 2 samples a step are 10,000 a second.
    """
    window = mlp_window()
    context = replace(
        CPU,
        framework="deepspeed",
        framework_version="0.19.8",
        rank=2,
        world_size=4,
        dp_size=2,
        pp_size=2,
        pp_rank=1,
        micro_batch_size=25,
        accumulate=4,
        strategy="ZeRO-1",
    )
    timed = in_turns(lambda unit: PhaseSeconds(forward=3 * unit, backward=4 * unit, optimizer=unit, bubble=2 * unit))
    return replace(
        window,
        context=context,
        counted_steps=tuple(replace(one, micro_steps=4) for one in window.counted_steps),
        timed_steps=tuple(replace(one, micro_steps=4, reader_sec=0.0) for one in timed),
    )


def variable_window() -> WindowRecord:
    """The MLP on batches of another size at every step: 100 and 50 samples counted, 50 and 150 timed."""
    window = mlp_window()
    halves = tuple(replace(one, flops=one.flops // 2, calls=one.calls) for one in window.flops.cells)
    merged = tuple(
        replace(one, flops=one.flops + half.flops, calls=one.calls + half.calls)
        for one, half in zip(window.flops.cells, halves, strict=True)
    )
    return replace(
        window,
        flops=replace(window.flops, cells=merged, module_calls=dict.fromkeys(("", "fc1", "act", "drop", "fc2"), 2)),
        counted_steps=(
            step(3, samples=100, flops=PhaseFlops(forward=600_000_000, backward=800_000_000)),
            step(7, samples=50, shapes="50x1000", flops=PhaseFlops(forward=300_000_000, backward=400_000_000)),
        ),
        timed_steps=tuple(
            replace(one, samples=samples) for one, samples in zip(window.timed_steps, (50, 150) * 4, strict=True)
        ),
        variable=True,
    )


def unknown_window() -> WindowRecord:
    """A window of which next to nothing is known."""
    return WindowRecord(
        profile_step=0,
        context=replace(
            CPU,
            framework="torch",
            framework_version="2.13.0",
            device_type="meta",
            device_name="",
            precision="",
            micro_batch_size=None,
            strategy="",
        ),
        modules=(),
        flops=FlopRecord(),
        counted_steps=(step(0, samples=None),),
        timed_steps=(),
        timing_steps=20,
    )


WINDOWS = {
    window.__name__.removesuffix("_window"): window
    for window in (
        *(mlp_window, transformer_window, untimed_window, lower_bound_window, parallel_window, stage_window),
        *(variable_window, unknown_window, predict_window),
    )
}
"""Every window of a run, by its name."""
