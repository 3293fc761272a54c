"""The architectures of timm, the smallest of each of its modules, on images as small as they take.

timm imports torchvision for what no model of its here runs: interpolation modes, a frozen batch norm, feature
extractors. torchvision is a build for one exact torch, which may not be the one that is here; so an empty module stands
in for it.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from .zoo_transformers import BATCH, first_that_runs

_MODELS = """
    beit:beit_base_patch16_224 byoanet:eca_botnext26ts_256 byobnet:test_byobnet cait:cait_xxs24_224
    coat:coat_lite_tiny convit:convit_tiny convmixer:convmixer_768_32 convnext:test_convnext
    crossvit:crossvit_tiny_240 cspnet:cs3darknet_s davit:davit_tiny deit:deit_tiny_distilled_patch16_224
    densenet:densenet121 dla:dla46_c dpn:dpn48b edgenext:edgenext_xx_small efficientformer:efficientformer_l1
    efficientformer_v2:efficientformerv2_s0 efficientnet:test_efficientnet efficientvit_mit:efficientvit_b0
    efficientvit_msra:efficientvit_m0 eva:eva02_tiny_patch14_224 fasternet:fasternet_t0 fastvit:fastvit_t8
    focalnet:focalnet_tiny_srf gcvit:gcvit_xxtiny ghostnet:ghostnet_050 hardcorenas:hardcorenas_a
    hgnet:hgnetv2_b0 hiera:hiera_tiny_224 hrnet:hrnet_w18_small iformer:iformer_t
    inception_next:inception_next_atto inception_resnet_v2:inception_resnet_v2 inception_v3:inception_v3
    inception_v4:inception_v4 levit:levit_128s mambaout:test_mambaout maxxvit:test_maxvit
    metaformer:poolformerv2_s12 mlp_mixer:gmlp_ti16_224 mobilenetv3:mobilenetv3_small_050 mobilevit:mobilevit_xxs
    mvitv2:mvitv2_tiny nasnet:nasnetalarge nest:nest_tiny nextvit:nextvit_small nfnet:test_nfnet pit:pit_ti_224
    pnasnet:pnasnet5large pvt_v2:pvt_v2_b0 rdnet:rdnet_tiny regnet:regnetx_002 repghost:repghostnet_050
    repvit:repvit_m0_9 res2net:res2net50_48w_2s resnest:resnest14d resnet:test_resnet resnetv2:resnetv2_18
    rexnet:rexnetr_100 selecsls:selecsls42 senet:legacy_seresnet18 sequencer:sequencer2d_s shvit:shvit_s1
    sknet:skresnet18 starnet:starnet_s050 swiftformer:swiftformer_xs
    swin_transformer:swin_tiny_patch4_window7_224 swin_transformer_v2:swinv2_tiny_window8_256
    swin_transformer_v2_cr:swinv2_cr_tiny_224 tiny_vit:tiny_vit_5m_224 tnt:tnt_s_legacy_patch16_224
    tresnet:tresnet_m twins:twins_pcpvt_small vgg:vgg11 visformer:visformer_tiny vision_transformer:test_vit
    vision_transformer_hybrid:vit_tiny_r_s16_p8_224 vision_transformer_relpos:vit_relpos_small_patch16_224
    vision_transformer_sam:samvit_base_patch16_224 vitamin:vitamin_small_224 volo:volo_d1_224
    vovnet:ese_vovnet19b_dw xception:legacy_xception xception_aligned:xception41 xcit:xcit_nano_12_p16_224
"""

MODELS: dict[str, str] = dict(pair.split(":") for pair in _MODELS.split())
"""By timm's module, the model that stands for it: one of its smallest."""

SMALLER: tuple[dict[str, Any], ...] = (
    {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 4},
    {"img_size": 64, "depth": 2},
    {"img_size": 64},
    {},
)
"""What a model is made with, if it takes it: the first with which it runs."""

SIDES = (64, 96, 160)  # Sides of the images that are tried before the model's own


def architectures() -> list[str]:
    """Timm's modules."""
    return list(MODELS)


def build(architecture: str, *, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training, without dropout, and the arguments of its forward."""
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        _stand_in_for_torchvision()
    import timm

    timm.layers.set_fused_attn(attention == "sdpa")

    def models() -> Iterator[Any]:
        for smaller in SMALLER:
            torch.manual_seed(0)
            with suppress(Exception) if smaller else nullcontext():
                yield timm.create_model(MODELS[architecture], pretrained=False, num_classes=10, **smaller)

    def batches_of(model: Any) -> Iterator[dict[str, Any]]:
        for side in (*SIDES, model.default_cfg["input_size"][-1]):
            image = torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(1))
            yield {type(model).forward.__code__.co_varnames[1]: image}

    return first_that_runs(models(), batches_of)


@contextmanager
def checkpointing(model: Any, checkpoint: Callable[..., Any]) -> Iterator[None]:
    """Inside, the model's blocks go through *checkpoint*, which timm looks up in torch at each call."""
    place: Any = torch.utils.checkpoint
    plain = place.checkpoint
    model.set_grad_checkpointing(True)
    place.checkpoint = checkpoint
    try:
        yield
    finally:
        place.checkpoint = plain
        model.set_grad_checkpointing(False)


class _Nothing(types.ModuleType):
    """A module of torchvision's: each name in it is another of them, or an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return enum.Enum(name, "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (), {})


def _stand_in_for_torchvision() -> None:
    from transformers.utils import import_utils

    # Asked once and remembered: transformers must not take the stand-in for the real one.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    inside = "datasets models models.feature_extraction ops ops.misc transforms transforms.functional utils"
    for name in ("torchvision", *(f"torchvision.{name}" for name in inside.split())):
        sys.modules[name] = _Nothing(name)
