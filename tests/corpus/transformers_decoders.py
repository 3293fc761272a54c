"""Decoders of the transformers library: small configurations, random weights, counted layer by layer.

Where everything is trained and the input is looked up in a trained embedding, every product needs both gradients: the
backward is twice the forward. Eager attention keeps its scores; fused attention (sdpa) repeats them in the backward.
"""

from __future__ import annotations

from typing import Any

import torch

from .case import Example, Family
from .transformers_parts import above_the_diagonal, attention_scores, linear, stack, tiny, tokens, trained

FAMILY = Family("transformers_decoders")


def gpt2(attention: str) -> Example:
    """Convolutions of width one are what its linear layers are called; the head is the embedding's weight."""
    batch, sequence, hidden, heads, intermediate, layers, vocabulary = 3, 5, 12, 2, 20, 2, 31
    rows = batch * sequence
    scores = attention_scores(batch, heads, sequence, sequence, hidden // heads)
    attended = linear(rows, hidden, 3 * hidden) + 2 * scores + linear(rows, hidden, hidden)
    mlp = 2 * linear(rows, hidden, intermediate)
    head = linear(rows, hidden, vocabulary)
    forward = layers * (attended + mlp) + head
    fused = attention == "sdpa"
    skipped = 2 * batch * heads * above_the_diagonal(sequence) * (hidden // heads)
    model = tiny(
        "GPT2LMHeadModel",
        vocab_size=vocabulary,
        n_positions=16,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_inner=intermediate,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation=attention,
    )
    return Example(model, kwargs={"input_ids": tokens(vocabulary, batch, sequence), "use_cache": False}).costs(
        forward,
        2 * forward,
        layers * scores if fused else 0,
        skipped=layers * (2 + 4 + 1) * skipped if fused else 0,
        by_module={
            "transformer.h.0": trained(attended + mlp, scores if fused else 0),
            "transformer.h.1.attn": trained(attended, scores if fused else 0),
            "transformer.h.1.mlp": trained(mlp),
            "lm_head": trained(head),
        },
    )


# Separate products compute the masked scores too.
FAMILY.put("gpt2_with_eager_attention", lambda: gpt2("eager"))
# Without padding the causal mask is a flag, and the kernel skips.
FAMILY.put("gpt2_with_fused_attention", lambda: gpt2("sdpa"))


class Llama:
    """A tiny Llama's sizes and the cost of its parts: six query heads share two key heads."""

    batch, sequence, hidden, heads, key_heads, head_dim = 2, 7, 12, 6, 2, 4
    intermediate, layers, vocabulary = 20, 3, 37
    rows = batch * sequence
    scores = attention_scores(batch, heads, sequence, sequence, head_dim)
    query = linear(rows, hidden, heads * head_dim)
    key = linear(rows, hidden, key_heads * head_dim)
    value = key
    out = linear(rows, heads * head_dim, hidden)
    attention = query + key + value + 2 * scores + out
    one_of_three = linear(rows, hidden, intermediate)
    mlp = 3 * one_of_three
    layer = attention + mlp
    head = linear(rows, hidden, vocabulary)
    forward = layers * layer + head

    @classmethod
    def example(cls, attention: str, model: str = "LlamaForCausalLM", layers: int = layers, **more: Any) -> Example:
        """The model in eval mode, or another one of these sizes, and its tokens."""
        made = tiny(
            model,
            vocab_size=cls.vocabulary,
            **stack(cls.hidden, layers, cls.heads, cls.intermediate),
            num_key_value_heads=cls.key_heads,
            head_dim=cls.head_dim,
            max_position_embeddings=16,
            attn_implementation=attention,
            **more,
        )
        return Example(made, kwargs={"input_ids": tokens(cls.vocabulary, cls.batch, cls.sequence), "use_cache": False})


@FAMILY.network
def llama_with_eager_attention() -> Example:
    """Three equal layers cost the same, forward and backward."""
    return Llama.example("eager").costs(
        Llama.forward,
        2 * Llama.forward,
        by_module={
            "model.layers.0": trained(Llama.layer),
            "model.layers.1": trained(Llama.layer),
            "model.layers.2": trained(Llama.layer),
            "model.layers.1.self_attn": trained(Llama.attention),
            "model.layers.1.self_attn.k_proj": trained(Llama.key),
            "model.layers.1.mlp": trained(Llama.mlp),
            "lm_head": trained(Llama.head),
        },
    )


@FAMILY.network
def llama_with_fused_attention() -> Example:
    """Fused, causal and grouped at once."""
    skipped = 2 * Llama.batch * Llama.heads * above_the_diagonal(Llama.sequence) * Llama.head_dim
    return Llama.example("sdpa").costs(
        Llama.forward,
        2 * Llama.forward,
        Llama.layers * Llama.scores,
        skipped=Llama.layers * (2 + 4 + 1) * skipped,
        by_module={
            "model.layers.0": trained(Llama.layer, Llama.scores),
            "model.layers.2": trained(Llama.layer, Llama.scores),
            "model.layers.2.self_attn": trained(Llama.attention, Llama.scores),
        },
    )


@FAMILY.network
def llama_with_a_padding_mask() -> Example:
    """With padding the causal mask becomes a tensor: the fused kernel computes every score."""

    example = Llama.example("sdpa")
    mask = torch.ones(Llama.batch, Llama.sequence, dtype=torch.long)
    mask[0, :3] = 0
    example.kwargs = {**example.kwargs, "attention_mask": mask}
    return example.costs(Llama.forward, 2 * Llama.forward, Llama.layers * Llama.scores)


@FAMILY.network
def llama_with_gradient_checkpointing() -> Example:
    """Each layer is repeated up to its last product: mlp.down_proj saves its factors, and the rest is an addition."""

    repeated = Llama.layer - Llama.one_of_three
    example = Llama.example("eager")
    example.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    example.model.train()
    return example.costs(
        Llama.forward,
        2 * Llama.forward,
        Llama.layers * repeated,
        by_module={
            "model.layers.0": trained(Llama.layer, repeated),
            "model.layers.2": trained(Llama.layer, repeated),
            "model.layers.2.mlp.down_proj": trained(Llama.one_of_three),
            "model.layers.2.mlp.up_proj": trained(Llama.one_of_three, Llama.one_of_three),
            "lm_head": trained(Llama.head),
        },
    )


@FAMILY.network
def llama_with_only_its_last_layer_trained() -> Example:
    """Nothing below the last layer needs a gradient; inside it all do, from the norm before q, k and v on."""

    example = Llama.example("eager")
    example.model.requires_grad_(False)
    for name, parameter in example.model.named_parameters():
        if name.startswith(("model.layers.2", "lm_head")):
            parameter.requires_grad_(True)
    return example.costs(
        Llama.forward,
        2 * (Llama.layer + Llama.head),
        by_module={
            "model.layers.0": (Llama.layer,),
            "model.layers.1": (Llama.layer,),
            "model.layers.2": trained(Llama.layer),
            "lm_head": trained(Llama.head),
        },
    )


@FAMILY.part_by_part
def llama_generating_without_grad() -> Example:
    """A prompt of 7, then 3 tokens one at a time: each row attends to everything cached before it and to itself."""
    new_tokens = 3
    per_row = Llama.layers * (Llama.layer - 2 * Llama.scores) // Llama.rows
    prompt = Llama.layers * Llama.layer + linear(Llama.batch, Llama.hidden, Llama.vocabulary)
    later = 0
    for keys in (8, 9):  # the prompt's own forward yields the first of the three
        scores = attention_scores(Llama.batch, Llama.heads, 1, keys, Llama.head_dim)
        later += Llama.batch * per_row + Llama.layers * 2 * scores
        later += linear(Llama.batch, Llama.hidden, Llama.vocabulary)

    def step(example: Example) -> None:
        model: Any = example.model
        model.generate(
            example.kwargs["input_ids"],
            attention_mask=torch.ones(Llama.batch, Llama.sequence, dtype=torch.long),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    example = Llama.example("eager")
    example.step = step
    return example.costs(prompt + later)


def mixtral(experts: str) -> Example:
    """Every token goes to 2 of 4 experts, so the experts' products run over twice as many rows, whichever they are."""
    batch, sequence, hidden, heads, key_heads, head_dim = 2, 7, 12, 6, 2, 4
    intermediate, layers, vocabulary, number_of_experts, chosen = 20, 2, 37, 4, 2
    rows = batch * sequence
    attention = (
        linear(rows, hidden, heads * head_dim)
        + 2 * linear(rows, hidden, key_heads * head_dim)
        + 2 * attention_scores(batch, heads, sequence, sequence, head_dim)
        + linear(rows, heads * head_dim, hidden)
    )
    router = linear(rows, hidden, number_of_experts)
    expert_products = chosen * (linear(rows, hidden, 2 * intermediate) + linear(rows, intermediate, hidden))
    head = linear(rows, hidden, vocabulary)
    forward = layers * (attention + router + expert_products) + head
    more = {"num_local_experts": number_of_experts, "num_experts_per_tok": chosen, "experts_implementation": experts}
    return Llama.example("eager", "MixtralForCausalLM", layers, **more).costs(
        forward,
        2 * forward,
        by_module={
            "model.layers.0.self_attn": trained(attention),
            "model.layers.0.mlp.gate": trained(router),
            "model.layers.0.mlp.experts": trained(expert_products),
            "model.layers.1.mlp": trained(router + expert_products),
            "lm_head": trained(head),
        },
    )


# One product after the other.
FAMILY.put("mixtral_with_a_loop_over_experts", lambda: mixtral("eager"))
# One batched product, the weights gathered for every row.
FAMILY.put("mixtral_with_batched_experts", lambda: mixtral("batched_mm"))
# One grouped product, rows sorted by expert: the library's default.
FAMILY.put("mixtral_with_grouped_experts", lambda: mixtral("grouped_mm"))


@FAMILY.network
def mamba() -> Example:
    """A selective state space: projections, a depthwise convolution, and for every step a product of state and C.

    The time step's projection multiplies its layer's weight from the mixer itself. The convolution is padded on both
    sides and then cut: it computes sequence + kernel - 1 positions.
    """
    batch, sequence, hidden, inner, state, kernel, rank = 2, 7, 12, 2 * 12, 5, 4, 3
    layers, vocabulary = 2, 37
    rows = batch * sequence
    in_projection = linear(rows, hidden, 2 * inner)
    convolution = 2 * batch * inner * (sequence + kernel - 1) * kernel
    state_projection = linear(rows, inner, rank + 2 * state)
    time_step = linear(rows, rank, inner)
    scan = sequence * (2 * batch * inner * state * 1)
    out_projection = linear(rows, inner, hidden)
    mixer = in_projection + convolution + state_projection + time_step + scan + out_projection
    head = linear(rows, hidden, vocabulary)
    forward = layers * mixer + head
    model = tiny(
        "MambaForCausalLM",
        vocab_size=vocabulary,
        hidden_size=hidden,
        state_size=state,
        num_hidden_layers=layers,
        expand=inner // hidden,
        conv_kernel=kernel,
        time_step_rank=rank,
        use_mambapy=False,
    )
    return Example(model, kwargs={"input_ids": tokens(vocabulary, batch, sequence), "use_cache": False}).costs(
        forward,
        2 * forward,
        by_module={
            "backbone.layers.0": trained(mixer),
            "backbone.layers.1.mixer": trained(mixer),
            "backbone.layers.1.mixer.in_proj": trained(in_projection),
            "backbone.layers.1.mixer.x_proj": trained(state_projection),
            "lm_head": trained(head),
        },
    )
