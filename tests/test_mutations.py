"""The list of mutations is one of today's package: each stands where it says, and names tests that exist."""

from __future__ import annotations

from tests.mutations import MUTATIONS, wrong


def test_each_mutation_changes_one_place_and_names_its_tests() -> None:
    assert [words for one in MUTATIONS if (words := wrong(one))] == []


def test_the_list_is_long_goes_over_all_folders_and_has_nothing_twice() -> None:
    assert len({(one.file, one.before, one.after) for one in MUTATIONS}) == len(MUTATIONS) >= 80
    folders = {one.file.partition("/")[0] for one in MUTATIONS if "/" in one.file}
    assert folders >= {"adapters", "analysis", "measure", "report", "run", "sinks", "trace"}
    assert all(one.before != one.after for one in MUTATIONS)
