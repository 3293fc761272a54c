"""Parts 1 and 9: counts on a GPU are those by hand, and the work of autograd's device threads is its module's."""

from __future__ import annotations

import importlib.util
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import count_flops
from lightning_flops.records import PhaseFlops
from tests.corpus import Network, on_a_gpu
from tests.corpus.case import Parts

from .checks import Check, Here, Row, exactly, holds, not_here, reported
from .nets import FIRST_STEP, SETTLES, forget, gpt_fit, layers, profiler, size_for

_SMALL_FAMILIES = ("mlp", "autograd_forms")
_SHOWN = 5


# ---- the corpus


def _corpus(here: Here) -> Iterator[Row]:
    """Every network that is counted by hand and costs the same on a GPU."""
    networks = on_a_gpu.networks()
    for family in _SMALL_FAMILIES if here.small else on_a_gpu.FAMILIES:
        if family.startswith("transformers") and importlib.util.find_spec("transformers") is None:
            yield not_here(f"corpus: networks of {family}", "transformers is not installed")
            continue
        chosen = [network for network in networks if network.family == family]
        wrong = [words for network in chosen if (words := _not_exact(here, network))]
        claim = f"corpus: networks of {family} that are exact, of {len(chosen)}"
        yield exactly(claim, len(chosen) - len(wrong), len(chosen))
        yield from (reported("not exact", words) for words in wrong[:_SHOWN])


def _not_exact(here: Here, network: Network) -> str:
    """What is wrong with the counts of *network*, in words; empty if nothing is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = on_a_gpu.differences(network, here.device)
    except Exception as error:  # one that does not run here is one that was not seen
        return f"{network.name}: {type(error).__name__}: {error}"
    if not found:
        return ""
    module, (seen, truth) = next(iter(found.items()))
    return f"{network.name}: {module or 'the root'}: {seen}, not {truth}"


# ---- attention


def _two() -> nn.Module:
    """Two attentions of different lengths, so that work under the wrong name shows."""

    def attention() -> nn.Module:
        return Parts(lambda _, q, k, v: functional.scaled_dot_product_attention(q, k, v).float().sum())

    both = {"first": attention(), "second": attention()}
    return Parts(lambda net, short, long: net.first(*short) + net.second(*long), **both)


_BATCH, _HEADS, _WIDTH = 2, 4, 64
_BACKENDS = {
    "math": (SDPBackend.MATH, False),
    "flash": (SDPBackend.FLASH_ATTENTION, True),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, True),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, True),
}
"""Each with whether its backward repeats the product of queries and keys."""
_ON_A_CPU = ("math", "flash")


def _attention(here: Here) -> Iterator[Row]:
    """Each backend's forward and backward, in the module that called it."""
    lengths = {"first": here.pick(256, 32), "second": here.pick(512, 64)}
    # One product of an L × d with a d × L matrix is 2 L² d; a forward has two, a backward four.
    products = {name: 2 * _BATCH * _HEADS * length**2 * _WIDTH for name, length in lengths.items()}
    for name, (backend, repeats) in _BACKENDS.items():
        claim = f"{name} attention, forward, backward and what it repeats, by module"
        if not here.on_gpu and name not in _ON_A_CPU:
            yield not_here(claim, "on a CPU: there is no such kernel")
            continue
        by_hand = {name: (2 * one, 4 * one, one if repeats else 0) for name, one in products.items()}
        try:
            yield exactly(claim, _attention_counted(here, backend, lengths), by_hand)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                raise
            yield not_here(claim, f"torch has no such kernel for this device: {error}")


def _attention_counted(here: Here, backend: SDPBackend, lengths: dict[str, int]) -> dict[str, tuple[int, int, int]]:
    model, how = _two(), {"device": here.device, "dtype": torch.bfloat16, "requires_grad": True}
    shapes = [(_BATCH, _HEADS, length, _WIDTH) for length in lengths.values()]
    inputs = [[torch.randn(shape, **how) for _ in range(3)] for shape in shapes]  # type: ignore[call-overload]
    with sdpa_kernel(backend), count_flops(model) as counts:
        model(*inputs).backward()
    here.settle()
    by_module = counts.by_module()
    found = {name: by_module.get(name, PhaseFlops()) for name in lengths}
    return {name: (one.forward, one.backward, one.recompute) for name, one in found.items()}


# ---- a GPT through Lightning


def _gpt(here: Here) -> Iterator[Row]:
    """Eager: exact, with nothing uncounted."""
    profile = _gpt_fit(here)
    size = size_for(here)
    yield reported("the GPT: parameters of its matrices", size.parameters)
    claim = "eager GPT through Lightning, bf16: forward FLOPs of a step"
    yield exactly(claim, profile.flops.forward, size.forward_flops)
    yield exactly("eager GPT: forward and backward FLOPs of a step", profile.flops.model, size.model_flops)
    names = sorted(name for name, one in profile.uncounted.items() if one.may_have_flops)
    yield exactly("eager GPT: operators that may have FLOPs and are not counted", names, [])
    blocks = {module.name: module.total.total for module in profile.modules if module.name.startswith("model.blocks.")}
    alike = {total for name, total in blocks.items() if name.count(".") == 2}
    yield exactly("eager GPT: all blocks cost the same, forward, backward and recomputed", len(alike), 1)


def _compiled_gpt(here: Here) -> Iterator[Row]:
    """Compiled: what is inside of what the compiler made is counted, or listed as not counted."""
    profile = _gpt_fit(here, backend="inductor" if here.on_gpu else "aot_eager")
    size = size_for(here)
    how = "inductor" if here.on_gpu else "aot_eager, as inductor's compiler would take too long here"
    same = profile.flops.model == size.model_flops
    listed = sorted(name for name, one in profile.uncounted.items() if one.may_have_flops)
    yield holds(
        "compiled GPT: its model FLOPs are the formula's, or a lower bound that names what it lacks",
        same or (profile.lower_bound and bool(listed) and profile.flops.model < size.model_flops),
        f"{profile.flops.model:,} of {size.model_flops:,} ({how}), not counted: {', '.join(listed) or 'nothing'}",
    )


def _compiled_for_speed(here: Here) -> Iterator[Row]:
    """Replayed CUDA graphs, and templates of max-autotune: counted to the FLOP."""
    for mode in ("reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune") if here.on_gpu else ("default",):
        torch.manual_seed(0)
        width, number, rows = (1024, 4, 512) if here.on_gpu else (16, 2, 4)
        model = layers(here, width, number)
        # CUDA graphs keep their inputs where they are: the tensor that they replay is the same in every step.
        backend: dict[str, str] = {"mode": mode} if here.on_gpu else {"backend": "aot_eager"}
        compiled: Any = torch.compile(model, **backend)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(rows, width, device=here.device)
        with profile_training(
            compiled, optimizer, profile_step=FIRST_STEP + 2, timing_steps=2, trace=False
        ) as profiler:
            for _ in range(FIRST_STEP + SETTLES + 8):
                compiled(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        here.settle()
        # A product a layer forward, two backward, of which the first layer's input needs none.
        by_hand, profile = 2 * rows * width**2 * (3 * number - 1), profiler.profile
        assert profile is not None
        yield exactly(f"torch.compile, {mode}: model FLOPs of a step", profile.flops.model, by_hand)
        yield exactly(f"torch.compile, {mode}: whether that is a lower bound", profile.lower_bound, False)
        torch.compiler.reset()
        forget(here)


def _gpt_fit(here: Here, **compiled: str) -> Profile:
    torch.manual_seed(0)
    steps = FIRST_STEP + 1 + SETTLES + 2
    done = gpt_fit(here, size_for(here), steps, profiler(here, timing_steps=2), **compiled)
    forget(here)
    return done.profile


# ---- dtypes


def _tf32(here: Here) -> Iterator[Row]:
    """The same product counts as TF32 or as float32, as torch's switch says."""
    model = nn.Linear(256, 512, bias=False, device=here.device)
    batch = torch.randn(128, 256, device=here.device)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, dtype in (("highest", "float32"), ("high", "tf32")):
            torch.set_float32_matmul_precision(precision)
            with count_flops(model) as counts:
                model(batch).sum().backward()
            by_dtype = Counter[str]()
            for cell in counts.record.cells:
                by_dtype[str(cell.dtype)] += cell.flops
            # The batch needs no gradient: one product forward, one backward.
            claim, by_hand = f'set_float32_matmul_precision("{precision}")', {dtype: 2 * 2 * 128 * 256 * 512}
            yield exactly(claim, dict(+by_dtype), by_hand)
    finally:
        torch.set_float32_matmul_precision(before)


def _float8(here: Here) -> Iterator[Row]:
    """torch._scaled_mm, where the device has it: compute capability 8.9 and above."""
    claim = "torch._scaled_mm of float8 matrices"
    if here.on_gpu and torch.cuda.get_device_capability(here.device) < (8, 9):
        yield not_here(claim, "this device has no float8")
        return
    rows, inner, columns = 64, 128, 256
    a = torch.randn(rows, inner, device=here.device).to(torch.float8_e4m3fn)
    b = torch.randn(columns, inner, device=here.device).to(torch.float8_e4m3fn).t()  # the second by columns
    scale = torch.ones((), device=here.device)
    with count_flops(nn.Module()) as counts:
        torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    here.settle()
    seen = {cell.dtype: cell.flops for cell in counts.record.cells if cell.flops}
    yield exactly(claim, seen, {"float8": 2 * rows * inner * columns})


CHECKS = (
    Check("attention", _attention),
    Check("eager GPT", _gpt),
    Check("TF32", _tf32, "a CPU has no TF32"),
    Check("float8", _float8),
    Check("compiled GPT", _compiled_gpt),
    Check("corpus", _corpus),  # last: it has most to do
)
FOR_SPEED = (Check("compiled for speed", _compiled_for_speed),)
