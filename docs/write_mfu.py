"""Writes docs/mfu.md: published training runs, with their MFU worked out anew from the exact FLOPs of their models.

Each model is built from its configuration on the ``meta`` device, so without weights, and one step of one sequence is
counted as any other step is. Takes a minute::

    python -m docs.write_mfu
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_flops import count_flops
from lightning_flops.analysis.rates import peak_for

PAGE = Path(__file__).parent / "mfu.md"
FOUNDRY = "LLM Foundry"
SOURCES = {
    FOUNDRY: "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "TinyLlama": "https://github.com/jzhang38/TinyLlama#blazingly-fast",
    "NeMo": "https://docs.nvidia.com/nemo-framework/user-guide/24.12/nemotoolkit/performance/performance_summary.html",
}
H100, A100, A100_40 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"

MPT: dict[str, tuple[int, int, int]] = {  # width, layers, heads
    "125m": (768, 12, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
LLAMA: dict[str, dict[str, Any]] = {
    "TinyLlama 1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
    },
    "Llama 2 7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32},
    "Llama 2 70B": {
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8},
    },
    "Llama 3 8B": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_key_value_heads": 8, "vocab_size": 128256},
    },
    "Llama 3 70B": {
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    },
}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}  # its two products are operators of their own


@dataclass(frozen=True)
class Published:
    """What was published of one run: tokens/s of one device, and MFU (or FLOP/s) where it is claimed."""

    model: str
    sequence: int
    device: str
    devices: int
    tokens_per_sec: float
    claimed: str
    source: str
    dtype: Literal["bfloat16", "float8"] = "bfloat16"


def _mpt(name: str, *rows: tuple[int, str, int, float, str]) -> list[Published]:
    return [Published(f"MPT {name}", *row, FOUNDRY) for row in rows]


RUNS = [
    *_mpt("125m", (2048, A100, 8, 142830, "44.79%")),
    *_mpt("1b", (2048, A100, 8, 20513, "59.86%"), (2048, H100, 64, 44402, "40.85%"), (65536, H100, 8, 5506, "26.34%")),
    *_mpt("3b", (2048, H100, 64, 22525, "40.8%")),
    *_mpt(
        "7b", (2048, A100, 8, 4641, "64.23%"), (2048, A100_40, 128, 3623, "50.14%"), (2048, H100, 8, 10643, "46.44%")
    ),
    *_mpt("7b", (32768, A100, 8, 1672, "49.46%"), (65536, H100, 8, 1956, "28.59%")),
    *_mpt("13b", (2048, A100, 8, 2262, "59.57%"), (2048, H100, 64, 4800, "39.86%")),
    *_mpt("30b", (2048, H100, 32, 2308, "43.92%")),
    *_mpt("70b", (2048, A100, 64, 410, "53.33%"), (2048, H100, 64, 1039, "42.57%")),
    Published("TinyLlama 1.1B", 2048, A100_40, 16, 24000, "56%", "TinyLlama"),
    Published("Llama 3 8B", 8192, H100, 8, 5762, "33%", "torchtitan"),
    Published("Llama 3 8B", 8192, H100, 8, 6667, "39%", "torchtitan"),
    Published("Llama 3 8B", 8192, H100, 128, 6514, "", "torchtitan"),
    Published("Llama 2 7B", 4096, H100, 8, 16934, "780 TFLOP/s", "NeMo", "float8"),
    Published("Llama 2 70B", 4096, H100, 64, 1728, "768 TFLOP/s", "NeMo", "float8"),
    Published("Llama 3 8B", 8192, H100, 8, 12273, "711 TFLOP/s", "NeMo", "float8"),
    Published("Llama 3 70B", 8192, H100, 64, 1524, "734 TFLOP/s", "NeMo", "float8"),
    Published("GPT-3 175B", 2048, H100, 512, 825, "888 TFLOP/s", "NeMo", "float8"),
]


def _on_meta(model: str) -> Any:
    """The model of this name, without weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MptConfig, MptForCausalLM

    build: Callable[[], Any]
    if model.startswith("MPT"):
        width, layers, heads = MPT[model.split()[1]]
        config = MptConfig(d_model=width, n_layers=layers, n_heads=heads, vocab_size=50368, max_seq_len=65536)
        build = lambda: MptForCausalLM(config)  # noqa: E731
    elif model.startswith("GPT-3"):
        sizes: dict[str, Any] = {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "vocab_size": 51200}
        gpt = GPT2Config(**sizes, **EAGER)
        build = lambda: GPT2LMHeadModel(gpt)  # noqa: E731
    else:
        llama = LlamaConfig(**LLAMA[model], max_position_embeddings=8192, **EAGER)
        build = lambda: LlamaForCausalLM(llama)  # noqa: E731
    with torch.device("meta"):
        return build()


@cache
def flops_per_token(model: str, sequence: int) -> tuple[float, float]:
    """FLOPs of a forward and backward of one token, and those among them of the scores that a causal mask hides.

    Counted in one step of one *sequence*. Hidden are half of the two products of attention (scores and values).
    """
    ids = torch.ones(1, sequence, dtype=torch.long, device="meta")  # its own mask, too: nothing is padded
    with count_flops(built := _on_meta(model)) as counts:
        built(input_ids=ids, attention_mask=ids, labels=ids, use_cache=False).loss.backward()
    if counts.is_lower_bound:
        raise RuntimeError(f"{model}: {counts.uncounted} was not counted")
    of_scores = sum(row.forward + row.backward for name, row in counts.by_operator().items() if "bmm" in name)
    return (counts.forward + counts.backward) / sequence, of_scores / 2 / sequence


def row_of(run: Published) -> str:
    """One row of the table."""
    whole, hidden = flops_per_token(run.model, run.sequence)
    peak = peak_for(run.device, run.dtype)
    if peak is None:
        raise RuntimeError(f"{run.device} has no peak in {run.dtype}")
    full, half = (100 * run.tokens_per_sec * one / peak for one in (whole, whole - hidden))
    device = run.device.removeprefix("NVIDIA ").removesuffix(" HBM3").replace("-SXM4-", " ")
    claimed = run.claimed or "–"
    if "TFLOP/s" in claimed:
        claimed += f" ({100 * float(claimed.split()[0]) * 1e12 / peak:.1f}%)"
    precision = {"bfloat16": "bf16", "float8": "float8"}[run.dtype]
    cells = (run.model, f"{run.sequence:,}", f"{run.devices:,} × {device}", precision, f"{run.tokens_per_sec:,.0f}")
    figures = (f"{whole / 1e9:.2f} G", claimed, f"**{full:.1f}%**", f"{half:.1f}%")
    return f"| {' | '.join((*cells, *figures))} | [{run.source}]({SOURCES[run.source]}) |"


_HEAD = """# Is 34% good?

For people who have an MFU and want to know what others reach. These are published runs whose tokens/s are known. MFU
beside what they claim is worked out anew, in the convention of this package:

```python
tokens_per_sec, flops_per_token, peak = 10643, 43.11e9, 989.4e12  # of one device; MPT 7b, 2,048 tokens, an H100 in bf16
assert f"{tokens_per_sec * flops_per_token / peak:.1%}" == "46.4%"
```

- **34% of an H100 in bf16 is usual, 40% to 47% is good** for a dense decoder of 1 to 70 billion parameters at a few
  thousand tokens; an A100 reaches 50% to 64%: it has a third of an H100's peak, and three fifths of its bandwidth.
- **Small models and long sequences are lower.** At 32,768 tokens and more attention has most of the FLOPs, and its
  kernels reach less of the peak than large products do.
- **float8 doubles the peak, not the speed**: 35% to 45% of its peak are 70% to 90% of the peak of bf16.
- **Compare only what is counted alike.** The FLOPs here are the exact ones of the model, forward and backward, with the
  full score matrix ("full", as PaLM and torchtitan count). Who counts half of it under a causal mask (Megatron,
  FlashAttention) prints the column "half": {span}. Recompute is in HFU alone.
- **Why yours is low, its report says.** The *step time breakdown* divides a typical step into what its FLOPs take at
  the peak (that share is its MFU, masks apart), what products take beyond it, other operators, communication, idle
  time, data and the rest; [advice](advice.md) names what to change. Where the first lines say STARVED, other programs
  took the processors, which lengthens the step and lowers MFU: run it alone before you change anything.
- **Compare with your own device first.** Its clocks, its power limit and its links decide as much as its name;
  `lightning-flops peak` measures what a large product reaches on yours.

"""

_TAIL = """
`python -m docs.write_mfu` writes this page: it builds each model from its configuration without weights, counts a
step of one sequence, and divides by the dense peaks that this package keeps. Claims are MFU, or TFLOP/s of a device
with their share of the peak. LLM Foundry counts learned positions as products, too. NeMo runs attention and the head
in bf16, so against the float8 peak it can reach less. torchtitan's H100 ran at 500 W of 700 W.
"""


def page() -> str:
    """The whole page."""
    columns = (
        "model",
        "tokens",
        "devices",
        "precision",
        "tokens/s of one",
        "FLOPs a token",
        "they say",
        "MFU, full",
        "half",
    )
    head = f"| {' | '.join((*columns, 'source'))} |\n|---|---:|---|---|---:|---:|---:|---:|---:|---|"
    rows = [row_of(run) for run in RUNS]
    counts = [(run.sequence, *flops_per_token(run.model, run.sequence)) for run in RUNS]
    short, long = ([hidden / whole for at, whole, hidden in counts if at == tokens] for tokens in (2048, 65536))
    span = f"{min(short):.0%} to {max(short):.0%} less at 2,048 tokens, {max(long):.0%} at 65,536"
    return "\n".join([_HEAD.replace("{span}", span) + head, *rows, _TAIL])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
