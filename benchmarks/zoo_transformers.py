"""The architectures of the transformers library, each as a tiny model of random weights, and a batch for it.

Every configuration class starts from its own defaults, and the fields that say how large the model is are made small:
by their names, since the library names them alike. ``SMALL`` has what that rule gets wrong for one architecture.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.corpus.case import tensors_in

BATCH, TOKENS, VOCABULARY = 2, 12, 160

NUMBERS: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "n_vocab vocabulary_size .*_vocab_size.* .*vocab_size"),
    (64, "max_position_embeddings n_positions max_seq_len seq_length max_sequence_length n_ctx block_size"),
    (64, "max_source_positions max_target_positions"),
    (2, "num_(key_value|kv|k_v)_heads num_query_groups n_kv_heads .*num_key_value_heads"),
    (4, "num_.*heads .*attention_heads n_heads? n_head heads .*_heads"),
    (2, "num_.*layers? n_layers? .*_layers depth num_blocks num_hidden_layers.* layers"),
    (32, "d_model n_embd embed_dim dim n_embed hidden_dim embedding_size emb_dim model_dim hidden_dim_size"),
    (32, "hidden_size .*_hidden_size output_dim d_embed .*_embed_dim proj_dim .*projection_dim .*_dim_model"),
    (8, "d_kv d_head attention_head_size head_size head_dim .*_head_dim"),
    (48, ".*intermediate_size .*ffn_dim d_ff n_inner d_inner .*ffn_hidden_size feedforward_.* .*_ffn_.*"),
    (48, ".*mlp_dim dim_feedforward mlp_hidden_size"),
    (2, "num_experts_per_tok num_selected_experts top_k moe_topk moe_top_k moe_k num_experts_per_token topk"),
    (4, "num_.*experts n_routed_experts moe_num_experts n_experts"),
    (1, "n_shared_experts n_group topk_group first_k_dense_replace moe_layer_start_index"),
    (16, ".*_rank"),
    (32, "image_size img_size input_size crop_size"),
    (8, "patch_size sliding_window attention_window local_attention window_size local_window"),
    (5, "num_queries num_query_tokens num_latents num_object_queries"),
    (4, "rotary_dim"),
)
"""How large a field is made where its default is a larger number, and the names of such fields."""

STARTS_FROM_DEFAULT = ("mamba_", "conv", "kernel", "stride", "ssm", "state", "expand", "chunk", "time_step")
"""Fields that are small by default, or whose size others are worked out from."""

HEADS = ("mamba_n_heads", "mamba_num_heads")

WHERE_THERE_IS_NONE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": VOCABULARY,
}
"""By a field's name, what it becomes where the library leaves it to the checkpoint."""

TOKEN_IDS = r".*(token_id|token_ids|token_index|_id|_index)$"

_THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TWO_AXES = {**_THREE_AXES, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}

_ALIKE: dict[str, dict[str, Any]] = {
    "glm4v_text glm_image_text glm_ocr_text qwen2_vl_text qwen2_5_vl_text": {"rope_parameters": _THREE_AXES},
    "glm4v glm46v glm_image glm_ocr glmga qwen2_vl qwen2_5_vl": {"text_config.rope_parameters": _THREE_AXES},
    "glm4v_moe_text": {"rope_parameters": _TWO_AXES},
    "glm4v_moe": {"text_config.rope_parameters": _TWO_AXES},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mimi": {"upsample_groups": 32},
    "csm": {"codec_config.upsample_groups": 32},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [3, 4]},
    # Windows that fit into each stage's grid: 16, 8, 4 and 2 wide.
    "donut-swin maskformer-swin swin swinv2": {"image_size": 64, "window_size": 2},
    "efficientnet": {"hidden_dim": 2560},
    "esm": {"pad_token_id": 1, "mask_token_id": 32, "vocab_size": VOCABULARY},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "detr table-transformer conditional_detr dab-detr deformable_detr": {
        "backbone_config": _BACKBONE,
        "use_timm_backbone": False,
        "backbone": None,
    },
}
SMALL = {name: fields for names, fields in _ALIKE.items() for name in names.split()}
"""What the rule by names gets wrong: by architecture, fields (``text_config.x`` reaches into a part)."""


def architectures() -> dict[str, str]:
    """By architecture, the name of its base model's class."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return {name: model if isinstance(model, str) else model[0] for name, model in sorted(MODEL_MAPPING_NAMES.items())}


def build(architecture: str, *, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training, without dropout, and the arguments of its forward."""
    import transformers

    config = shrunk(transformers.CONFIG_MAPPING[architecture](), SMALL.get(architecture, {}))
    model_class = getattr(transformers, architectures()[architecture])
    torch.manual_seed(0)
    config._attn_implementation = attention
    model = model_class._from_config(config, attn_implementation=attention)
    return first_that_runs([model], lambda model: batches_for(model, config))


def first_that_runs(
    models: Iterable[Any], batches_of: Callable[[Any], Iterable[dict[str, Any]]]
) -> tuple[nn.Module, dict[str, Any]]:
    """The first of *models* in training, without dropout, that runs with one of its batches, and that batch."""
    errors = list[Exception]()
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif type(module).__name__ == "DropPath":
                module.drop_prob = 0.0
        model.train()
        for batch in batches_of(model):
            try:
                with torch.no_grad():
                    output = model(**batch)
            except Exception as error:
                errors.append(error)
                continue
            if any(True for _ in tensors_in(output)):
                return model, batch
    raise errors[0] if errors else ValueError("there is no batch for this model")


def shrunk(config: Any, special: Mapping[str, Any]) -> Any:
    """The same configuration with the fields that say a size made small, also in its parts."""
    from transformers import PretrainedConfig

    fields: dict[str, Any] = {}
    known = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    parts = {name for name, value in known.items() if isinstance(value, PretrainedConfig)}
    declared = set(getattr(type(config), "__dataclass_fields__", {}))
    accepted = declared | set(inspect.signature(type(config)).parameters)
    for name, value in known.items():
        if name in parts:
            inside = {key.partition(".")[2]: one for key, one in special.items() if key.startswith(f"{name}.")}
            fields[name] = shrunk(value, inside)
        elif name == "embed_dim" and isinstance(known.get("num_heads"), (list, tuple)):
            continue  # it goes with the heads of the stages
        elif not declared or name in accepted:
            smaller = _smaller(name, value)
            if smaller is not value:
                fields[name] = smaller
    ids = [name for name, value in known.items() if re.fullmatch(TOKEN_IDS, name) and isinstance(value, int)]
    for place, name in enumerate(sorted(ids)):
        if not isinstance(known[name], bool) and known[name] >= VOCABULARY:
            fields[name] = VOCABULARY - 1 - place
    if "kv_lora_rank" in known and "num_attention_heads" in known:
        fields["num_key_value_heads"] = fields.get("num_attention_heads", known["num_attention_heads"])
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        fields["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    if known.get("use_pretrained_backbone"):
        fields["use_pretrained_backbone"] = False
    if "use_cache" in known:
        fields["use_cache"] = False
    fields |= {key: value for key, value in special.items() if "." not in key}
    layers = fields.get("num_hidden_layers", known.get("num_hidden_layers"))
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types"):
        if isinstance(known.get(name), list) and isinstance(layers, int) and name not in special:
            fields[name] = _one_of_each(known[name], layers)
    return type(config)(**fields)


def _one_of_each(kinds: list[Any], count: int) -> list[Any]:
    """*count* of the layers' kinds, such that each kind is there if there is room."""
    different = list(dict.fromkeys(kinds))
    return (different + kinds)[:count] if len(different) > 1 else kinds[:count]


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and ("drop" in name or name == "mask_time_prob" or name == "mask_feature_prob"):
        return 0.0
    if isinstance(value, int) and "drop" in name and "top" not in name:
        return 0
    if isinstance(value, int) and (name in HEADS or not name.startswith(STARTS_FROM_DEFAULT)):
        for size, names in NUMBERS:
            if re.fullmatch(names.replace(" ", "|"), name):
                return min(size, value)
    if value is None and name in WHERE_THERE_IS_NONE:
        return WHERE_THERE_IS_NONE[name]
    if name == "depths" and isinstance(value, (list, tuple)):
        return type(value)(min(item, 1) for item in value)
    return value


def batches_for(model: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Arguments that the model's forward may take, by the names in its signature; the likeliest first."""
    signature = inspect.signature(model.forward).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [name for name, one in signature.items() if one.default is one.empty and one.kind in named]
    main, values = model.main_input_name, values_for(config)
    text, image, sound = (
        [name for name in names.split() if name in signature]
        for names in ("input_ids", "pixel_values", "input_features input_values")
    )
    wanted: list[list[str]] = [required, [main], text, text + image, text + sound, image, sound, [*text, "bbox"]]
    wanted += [["encoder_hidden_states"], sorted(OPTIONAL & set(signature))]
    for names in dict.fromkeys(tuple(dict.fromkeys([*required, *names])) for names in wanted):
        if not names or not all(name in signature or name == main for name in names):
            continue
        if config.is_encoder_decoder and "decoder_input_ids" in signature:
            names = (*names, "decoder_input_ids")
        if "input_ids" in names and "attention_mask" in signature:
            names = (*names, "attention_mask")
        if not all(name in values for name in names):
            continue
        choices = {name: values[name] for name in names}
        for place in range(max(map(len, choices.values()))):
            batch = {name: made[min(place, len(made) - 1)]() for name, made in choices.items()}
            yield {**batch, "use_cache": False} if "use_cache" in signature else batch


OPTIONAL = {"input_ids", "pixel_values", "bbox", "query_embeds", "inputs_embeds", "input_features", "input_values"}


def values_for(config: Any) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """By the name of an argument, values that may fit, the likeliest first."""
    vision = getattr(config, "vision_config", None) or config
    parts = (config, vision, getattr(config, "text_config", None) or config, getattr(config, "audio_config", None))
    generator = torch.Generator().manual_seed(1)

    def floats(*shapes: tuple[int, ...]) -> list[Callable[[], torch.Tensor]]:
        return [partial(torch.randn, shape, generator=generator) for shape in shapes]

    def first(names: str, default: int) -> int:
        found = (getattr(part, name, None) for part in parts for name in names.split())
        return next((one for one in found if isinstance(one, int) and not isinstance(one, bool)), default)

    width, patch = first("hidden_size d_model", 32), first("patch_size", 8)
    size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None)
    sides = [tuple(size)[-2:] if isinstance(size, (list, tuple)) else (size, size)] if size else []
    sides = list(dict.fromkeys([*sides, (64, 64), (32, 32), (224, 224)]))
    channels, frames = first("num_channels in_channels in_chans num_image_channels", 3), first("num_frames frames", 2)
    flat = (16, channels * first("temporal_patch_size", 1) * patch * patch)
    films = [(BATCH, frames, channels, *side) for side in sides[:2]]
    images = floats(*((BATCH, channels, *side) for side in sides), *films, flat)
    bins = first("num_mel_bins feature_size num_mels input_feat_per_channel input_dim n_mels", 80)
    times = 2 * first("max_source_positions", 32)
    features = floats(
        *((BATCH, *one) for one in ((bins, times), (times, bins), (bins, 128), (128, bins), (1, 128, bins)))
    )
    mels = (first("max_length", 128), first("num_mel_bins", 80))
    # The highest ids stand for images, padding and the like.
    ids: list[Callable[[], torch.Tensor]] = [
        partial(torch.randint, 3, VOCABULARY - 60, (BATCH, TOKENS), generator=generator)
    ]
    grid = [lambda: torch.tensor([[1, 4, 4]])]
    return {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "attention_mask": [lambda: torch.ones(BATCH, TOKENS, dtype=torch.long)],
        "inputs_embeds": floats((BATCH, TOKENS, width)),
        "query_embeds": floats((BATCH, 5, width)),
        "encoder_hidden_states": floats((BATCH, 7, first("encoder_hidden_size hidden_size d_model", 32))),
        "bbox": [lambda: torch.zeros(BATCH, TOKENS, 4, dtype=torch.long), lambda: torch.zeros(BATCH, TOKENS, 8)],
        "pixel_values": images,
        "pixel_values_videos": images,
        "input_features": features,
        "audio_values": features,
        "input_values": floats(*((BATCH, *one) for one in ((1600,), (1, 1600), mels, (16000,), (1, 16000)))),
        "grid_thw": grid,
        "image_grid_thw": grid,
        "hidden_states": floats(flat, (16, channels, patch, patch)),
    }


@contextmanager
def checkpointing(model: Any, checkpoint: Callable[..., Any]) -> Iterator[None]:
    """Inside, the model's layers go through *checkpoint*."""
    model._set_gradient_checkpointing(True, checkpoint)
    yield
    model._set_gradient_checkpointing(False)
