"""Which module of one run is which of another."""

from __future__ import annotations

from lightning_flops.analysis.compare_modules import match_modules
from lightning_flops.records import PhaseBytes, PhaseFlops
from lightning_flops.schema.modules import ModuleProfile


def module(name: str, type_name: str = "Linear", *, params: int = 0, flops: int = 0, words: str = "") -> ModuleProfile:
    return ModuleProfile(
        name=name,
        type_name=type_name,
        extra_repr=words,
        params=params,
        calls=1,
        own=PhaseFlops(forward=flops),
        total=PhaseFlops(forward=flops),
        total_bytes=PhaseBytes(),
    )


ROOT = module("", "Net")


def block(prefix: str, *, flops: int = 8, type_name: str = "Block") -> list[ModuleProfile]:
    return [
        module(prefix, type_name, params=12, flops=2 * flops),
        module(f"{prefix}.up", params=6, flops=flops),
        module(f"{prefix}.act", "GELU"),
        module(f"{prefix}.down", params=6, flops=flops),
    ]


def partners(a: list[ModuleProfile], b: list[ModuleProfile]) -> dict[str, str]:
    found = match_modules([ROOT, *a], [ROOT, *b])
    return {name: pair for name, pair in found.items() if name}


def test_a_renamed_tree_goes_as_a_whole() -> None:
    a, b = [*block("old0"), *block("old1"), *block("kept")], [*block("kept"), *block("new0"), *block("new1")]
    pairs = {"kept": "kept", "new0": "old0", "new1": "old1"}
    assert partners(a, b) == {
        f"{name}{end}": f"{pair}{end}" for name, pair in pairs.items() for end in ("", ".up", ".act", ".down")
    }


def test_a_layer_put_before_others_moves_their_names_and_not_their_partners() -> None:
    a = [module("0", params=4, flops=1), module("1", "ReLU"), module("2", params=5, flops=2)]
    b = [module("0", "LayerNorm"), module("1", params=4, flops=1), module("2", "ReLU"), module("3", params=5, flops=2)]
    found = partners(a, b)
    assert (found["1"], found["2"], found["3"]) == ("0", "1", "2")
    assert "0" not in found


def test_new_and_gone_modules_have_no_partner() -> None:
    assert partners([module("gone", "Conv2d", params=3)], [module("new", "LSTM", params=3)]) == {}
    # One that has no parameters is like many others; elsewhere it is not taken for the same.
    a = [module("a", "Old", params=1), module("a.drop", "Dropout")]
    b = [module("b", "New", params=2), module("b.drop", "Dropout")]
    assert partners(a, b) == {}
