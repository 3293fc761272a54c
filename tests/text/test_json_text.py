"""Texts from outside are read within bounds, and what is beyond them is one error."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.text.json_text import MOST_DEPTH, JsonSyntaxError, JsonTextError, read_json, shown

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(value=JSON, indent=st.sampled_from([None, 1]))
def test_what_is_within_bounds_is_what_json_gives(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert repr(read_json(text, most_chars=len(text), constants=True)) == repr(json.loads(text))


def test_brackets_in_texts_are_no_depth() -> None:
    within = "[" * MOST_DEPTH + json.dumps('[{"\\' * 200) + "]" * MOST_DEPTH
    assert read_json(within, most_chars=10_000) == json.loads(within)
    with pytest.raises(JsonTextError, match="is nested deeper than 100 levels"):
        read_json(f"[{within}]", most_chars=10_000)


def test_a_program_that_may_recurse_deeply_is_not_ended() -> None:
    # Python's own reader goes as deep as the program may, and then off the stack of its thread.
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(JsonTextError, match="is nested deeper than 100 levels"):
            read_json("[" * 500_000, most_chars=10**6)
    finally:
        sys.setrecursionlimit(before)


def test_bounds_are_told_from_mistakes() -> None:
    for text in ("[1,", "[01]", "{1: 2}", '"\\x"'):
        with pytest.raises(JsonSyntaxError, match="is not valid JSON: line 1 column"):
            read_json(text, most_chars=10)
    for text in ("[1, 2]", '{"a": 1, "a": 2}', "9" * 1_001, "NaN"):
        with pytest.raises(JsonTextError) as caught:
            read_json(text, most_chars=5 if text == "[1, 2]" else 2_000)
        assert not isinstance(caught.value, JsonSyntaxError)


def test_what_cannot_be_written_is_named_by_its_type() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert shown(Broken()) == "a value of type Broken"
    assert shown(10**5_000) == "a value of type int"
    assert shown("x" * 20, chars=10) == "'xxxxxxxx…"
    assert shown("\x1b[2J\u202e") == "'\\x1b[2J\\u202e'"
