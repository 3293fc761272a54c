"""Language models of the transformers library: small configurations, random weights, counted layer by layer.

Where everything is trained and the input is looked up in a trained embedding, every product needs both gradients: the
backward is twice the forward. Eager attention keeps its scores; fused attention (sdpa) repeats them in the backward.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_flops.records import PhaseFlops

from .case import Example, Expected, Family, Network, forward_without_grad

FAMILY = Family("transformers_text")


def linear(rows: int, inputs: int, outputs: int) -> int:
    """One linear layer over so many rows."""
    return 2 * rows * inputs * outputs


def attention_scores(batch: int, heads: int, queries: int, keys: int, head_dim: int) -> int:
    """Q K^T of every head; the weighted values cost the same again."""
    return 2 * batch * heads * queries * keys * head_dim


def above_the_diagonal(sequence: int) -> int:
    """Scores of one head that a causal mask rules out: 0 + 1 + … + (sequence - 1)."""
    return sum(range(sequence))


def trained(forward: int, recompute: int = 0) -> PhaseFlops:
    """A module whose every product needs both gradients."""
    return PhaseFlops(forward=forward, backward=2 * forward, recompute=recompute)


def tokens(vocabulary: int, batch: int, sequence: int) -> torch.Tensor:
    """Random token ids; 0 to 2 are left to special tokens."""
    return torch.randint(3, vocabulary, (batch, sequence))


def bert(attention: str) -> Network:
    """Encoder layers, and a head that transforms every position before it scores the vocabulary."""
    batch, sequence, hidden, heads, intermediate, layers, vocabulary = 2, 7, 12, 3, 20, 2, 37
    rows = batch * sequence
    scores = attention_scores(batch, heads, sequence, sequence, hidden // heads)
    qkv = linear(rows, hidden, hidden)
    self_attention = 3 * qkv + 2 * scores
    layer = self_attention + linear(rows, hidden, hidden) + 2 * linear(rows, hidden, intermediate)
    head = linear(rows, hidden, hidden) + linear(rows, hidden, vocabulary)
    repeated = scores if attention == "sdpa" else 0

    def build() -> Example:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            max_position_embeddings=16,
            attn_implementation=attention,
        )
        return Example(model=BertForMaskedLM(config).eval(), kwargs={"input_ids": tokens(vocabulary, batch, sequence)})

    return Network(
        build=build,
        expected=Expected(
            forward=layers * layer + head,
            backward=2 * (layers * layer + head),
            recompute=layers * repeated,
            by_module={
                "bert.encoder.layer.0": trained(layer, repeated),
                "bert.encoder.layer.1": trained(layer, repeated),
                "bert.encoder.layer.1.attention.self": trained(self_attention, repeated),
                "bert.encoder.layer.1.attention.self.query": trained(qkv),
                "bert.encoder.layer.1.output": trained(linear(rows, intermediate, hidden)),
                "cls": trained(head),
            },
        ),
    )


@FAMILY.network
def bert_with_eager_attention() -> Network:
    """Separate products."""
    return bert("eager")


@FAMILY.network
def bert_with_fused_attention() -> Network:
    """One kernel, bidirectional: nothing is skipped."""
    return bert("sdpa")


def gpt2(attention: str) -> Network:
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

    def build() -> Example:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
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
        return Example(
            model=GPT2LMHeadModel(config).eval(),
            kwargs={"input_ids": tokens(vocabulary, batch, sequence), "use_cache": False},
        )

    return Network(
        build=build,
        expected=Expected(
            forward=forward,
            backward=2 * forward,
            recompute=layers * scores if fused else 0,
            causal_skipped=layers * (2 + 4 + 1) * skipped if fused else 0,
            by_module={
                "transformer.h.0": trained(attended + mlp, scores if fused else 0),
                "transformer.h.1.attn": trained(attended, scores if fused else 0),
                "transformer.h.1.mlp": trained(mlp),
                "lm_head": trained(head),
            },
        ),
    )


@FAMILY.network
def gpt2_with_eager_attention() -> Network:
    """Separate products compute the masked scores too."""
    return gpt2("eager")


@FAMILY.network
def gpt2_with_fused_attention() -> Network:
    """Without padding the causal mask is a flag, and the kernel skips."""
    return gpt2("sdpa")


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
    def example(cls, attention: str) -> Example:
        """The model in eval mode, and its tokens."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=cls.vocabulary,
            hidden_size=cls.hidden,
            intermediate_size=cls.intermediate,
            num_hidden_layers=cls.layers,
            num_attention_heads=cls.heads,
            num_key_value_heads=cls.key_heads,
            head_dim=cls.head_dim,
            max_position_embeddings=16,
            attn_implementation=attention,
        )
        return Example(
            model=LlamaForCausalLM(config).eval(),
            kwargs={"input_ids": tokens(cls.vocabulary, cls.batch, cls.sequence), "use_cache": False},
        )


@FAMILY.network
def llama_with_eager_attention() -> Network:
    """Three equal layers cost the same, forward and backward."""
    return Network(
        build=lambda: Llama.example("eager"),
        expected=Expected(
            forward=Llama.forward,
            backward=2 * Llama.forward,
            by_module={
                "model.layers.0": trained(Llama.layer),
                "model.layers.1": trained(Llama.layer),
                "model.layers.2": trained(Llama.layer),
                "model.layers.1.self_attn": trained(Llama.attention),
                "model.layers.1.self_attn.k_proj": trained(Llama.key),
                "model.layers.1.mlp": trained(Llama.mlp),
                "lm_head": trained(Llama.head),
            },
        ),
    )


@FAMILY.network
def llama_with_fused_attention() -> Network:
    """Fused, causal and grouped at once."""
    skipped = 2 * Llama.batch * Llama.heads * above_the_diagonal(Llama.sequence) * Llama.head_dim
    return Network(
        build=lambda: Llama.example("sdpa"),
        expected=Expected(
            forward=Llama.forward,
            backward=2 * Llama.forward,
            recompute=Llama.layers * Llama.scores,
            causal_skipped=Llama.layers * (2 + 4 + 1) * skipped,
            by_module={
                "model.layers.0": trained(Llama.layer, Llama.scores),
                "model.layers.2": trained(Llama.layer, Llama.scores),
                "model.layers.2.self_attn": trained(Llama.attention, Llama.scores),
            },
        ),
    )


@FAMILY.network
def llama_with_a_padding_mask() -> Network:
    """With padding the causal mask becomes a tensor: the fused kernel computes every score."""

    def build() -> Example:
        example = Llama.example("sdpa")
        mask = torch.ones(Llama.batch, Llama.sequence, dtype=torch.long)
        mask[0, :3] = 0
        example.kwargs = {**example.kwargs, "attention_mask": mask}
        return example

    return Network(
        build=build,
        expected=Expected(
            forward=Llama.forward, backward=2 * Llama.forward, recompute=Llama.layers * Llama.scores
        ),
    )


@FAMILY.network
def llama_with_gradient_checkpointing() -> Network:
    """Each layer is repeated up to its last product: mlp.down_proj saves its factors, and the rest is an addition."""

    def build() -> Example:
        example = Llama.example("eager")
        example.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        example.model.train()
        return example

    repeated = Llama.layer - Llama.one_of_three
    return Network(
        build=build,
        expected=Expected(
            forward=Llama.forward,
            backward=2 * Llama.forward,
            recompute=Llama.layers * repeated,
            by_module={
                "model.layers.0": trained(Llama.layer, repeated),
                "model.layers.2": trained(Llama.layer, repeated),
                "model.layers.2.mlp.down_proj": trained(Llama.one_of_three),
                "model.layers.2.mlp.up_proj": trained(Llama.one_of_three, Llama.one_of_three),
                "lm_head": trained(Llama.head),
            },
        ),
    )


@FAMILY.network
def llama_with_only_its_last_layer_trained() -> Network:
    """Nothing below the last layer needs a gradient; inside it all do, from the norm before q, k and v on."""

    def build() -> Example:
        example = Llama.example("eager")
        example.model.requires_grad_(False)
        for name, parameter in example.model.named_parameters():
            if name.startswith(("model.layers.2", "lm_head")):
                parameter.requires_grad_(True)
        return example

    return Network(
        build=build,
        expected=Expected(
            forward=Llama.forward,
            without_backward=2 * Llama.layer,
            backward=2 * (Llama.layer + Llama.head),
            by_module={
                "model.layers.0": PhaseFlops(forward=Llama.layer),
                "model.layers.1": PhaseFlops(forward=Llama.layer),
                "model.layers.2": trained(Llama.layer),
                "lm_head": trained(Llama.head),
            },
        ),
    )


@FAMILY.network
def llama_generating_without_grad() -> Network:
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

    def build() -> Example:
        example = Llama.example("eager")
        example.step = step
        return example

    return Network(build=build, expected=Expected(forward=prompt + later))


def mixtral(experts: str) -> Network:
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

    def build() -> Example:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head_dim,
            num_local_experts=number_of_experts,
            num_experts_per_tok=chosen,
            max_position_embeddings=16,
            attn_implementation="eager",
            experts_implementation=experts,
        )
        return Example(
            model=MixtralForCausalLM(config).eval(),
            kwargs={"input_ids": tokens(vocabulary, batch, sequence), "use_cache": False},
        )

    return Network(
        build=build,
        expected=Expected(
            forward=forward,
            backward=2 * forward,
            by_module={
                "model.layers.0.self_attn": trained(attention),
                "model.layers.0.mlp.gate": trained(router),
                "model.layers.0.mlp.experts": trained(expert_products),
                "model.layers.1.mlp": trained(router + expert_products),
                "lm_head": trained(head),
            },
        ),
    )


@FAMILY.network
def mixtral_with_a_loop_over_experts() -> Network:
    """One product after the other."""
    return mixtral("eager")


@FAMILY.network
def mixtral_with_batched_experts() -> Network:
    """One batched product, the weights gathered for every row."""
    return mixtral("batched_mm")


@FAMILY.network
def mixtral_with_grouped_experts() -> Network:
    """One grouped product, rows sorted by expert: the library's default."""
    return mixtral("grouped_mm")


@FAMILY.network
def t5() -> Network:
    """An encoder, and a decoder that also attends to it; keys and values of the latter are as long as the former."""
    batch, source, target, hidden, heads, head_dim = 2, 7, 5, 12, 3, 5
    intermediate, encoder_layers, decoder_layers, vocabulary = 20, 2, 3, 37
    inner = heads * head_dim
    source_rows, target_rows = batch * source, batch * target
    encoder_attention = 4 * linear(source_rows, hidden, inner) + 2 * attention_scores(
        batch, heads, source, source, head_dim
    )
    encoder_layer = encoder_attention + 2 * linear(source_rows, hidden, intermediate)
    own_attention = 4 * linear(target_rows, hidden, inner) + 2 * attention_scores(
        batch, heads, target, target, head_dim
    )
    cross_attention = (
        2 * linear(target_rows, hidden, inner)
        + 2 * linear(source_rows, hidden, inner)
        + 2 * attention_scores(batch, heads, target, source, head_dim)
    )
    decoder_layer = own_attention + cross_attention + 2 * linear(target_rows, hidden, intermediate)
    head = linear(target_rows, hidden, vocabulary)
    forward = encoder_layers * encoder_layer + decoder_layers * decoder_layer + head

    def build() -> Example:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=vocabulary,
            d_model=hidden,
            d_kv=head_dim,
            d_ff=intermediate,
            num_layers=encoder_layers,
            num_decoder_layers=decoder_layers,
            num_heads=heads,
            decoder_start_token_id=0,
            attn_implementation="eager",
        )
        return Example(
            model=T5ForConditionalGeneration(config).eval(),
            kwargs={
                "input_ids": tokens(vocabulary, batch, source),
                "decoder_input_ids": tokens(vocabulary, batch, target),
                "use_cache": False,
            },
        )

    return Network(
        build=build,
        expected=Expected(
            forward=forward,
            backward=2 * forward,
            by_module={
                "encoder": trained(encoder_layers * encoder_layer),
                "encoder.block.1": trained(encoder_layer),
                "decoder.block.0.layer.0": trained(own_attention),
                "decoder.block.0.layer.1": trained(cross_attention),
                "decoder.block.2": trained(decoder_layer),
                "lm_head": trained(head),
            },
        ),
    )


@FAMILY.network
def mamba() -> Network:
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

    def build() -> Example:
        from transformers import MambaConfig, MambaForCausalLM

        config = MambaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            state_size=state,
            num_hidden_layers=layers,
            expand=inner // hidden,
            conv_kernel=kernel,
            time_step_rank=rank,
            use_mambapy=False,
        )
        return Example(
            model=MambaForCausalLM(config).eval(),
            kwargs={"input_ids": tokens(vocabulary, batch, sequence), "use_cache": False},
        )

    return Network(
        build=build,
        expected=Expected(
            forward=forward,
            backward=2 * forward,
            by_module={
                "backbone.layers.0": trained(mixer),
                "backbone.layers.1.mixer": trained(mixer),
                "backbone.layers.1.mixer.in_proj": trained(in_projection),
                "backbone.layers.1.mixer.x_proj": trained(state_projection),
                "lm_head": trained(head),
            },
        ),
    )


@FAMILY.network
def bert_without_grad() -> Network:
    """The encoder and its pooler, which reads the first position alone."""
    batch, sequence, hidden, heads, intermediate, layers, vocabulary = 3, 5, 12, 2, 20, 2, 37
    rows = batch * sequence
    layer = (
        4 * linear(rows, hidden, hidden)
        + 2 * attention_scores(batch, heads, sequence, sequence, hidden // heads)
        + 2 * linear(rows, hidden, intermediate)
    )
    pooler = linear(batch, hidden, hidden)

    def build() -> Example:
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            max_position_embeddings=16,
            attn_implementation="sdpa",
        )
        return Example(
            model=BertModel(config).eval(),
            kwargs={"input_ids": tokens(vocabulary, batch, sequence)},
            step=forward_without_grad,
        )

    return Network(
        build=build,
        expected=Expected(
            forward=layers * layer + pooler,
            by_module={"encoder.layer.1": PhaseFlops(forward=layer), "pooler": PhaseFlops(forward=pooler)},
        ),
    )
