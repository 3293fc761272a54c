from __future__ import annotations

from hypothesis import given, settings, strategies as st

from lightning_flops.analysis.counts import FlopCounts, build_modules, heaviest_types, module_tree
from lightning_flops.records import FlopRecord, ModuleRecord, OperatorCell, PhaseFlops
from lightning_flops.schema.step import ModuleProfile
from tests.analysis.in_memory import known
from tests.report.windows import cell


def _modules(names: list[str], cells: tuple[OperatorCell, ...] = ()) -> tuple[ModuleProfile, ...]:
    records = [ModuleRecord(name=name, type_name="Block" if name else "Net") for name in names]
    return build_modules(records, FlopCounts(FlopRecord(cells=cells)))


def test_module_that_the_model_does_not_list_keeps_its_work_in_the_tree() -> None:
    modules = _modules(["", "a"], (cell("a.late.inner", "forward", 5),))
    assert [module.name for module in modules] == ["", "a", "a.late", "a.late.inner"]
    assert [module.type_name for module in modules] == ["Net", "Block", "", ""]
    assert [module.total.forward for module in modules] == [5, 5, 5, 5]


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.lists(st.from_regex(r"[a-c](\.[a-c]){0,3}", fullmatch=True), max_size=8),
    st.lists(st.tuples(st.from_regex(r"([a-c](\.[a-c]){0,3})?", fullmatch=True), st.integers(0, 9)), max_size=8),
)
def test_tree_loses_no_flops_and_no_module(names: list[str], work: list[tuple[str, int]]) -> None:
    modules = _modules(["", *names], tuple(cell(name, "forward", flops) for name, flops in work))
    by_name = {module.name: module for module in modules}
    assert len(by_name) == len(modules)
    assert {"", *names} <= by_name.keys()
    assert sum(module.own.forward for module in modules) == sum(flops for _, flops in work)
    totals = FlopCounts(FlopRecord(cells=tuple(cell(name, "forward", flops) for name, flops in work))).by_module()
    assert {name for name, total in totals.items() if total.total} <= by_name.keys()
    assert all(module.total == totals.get(module.name, PhaseFlops()) for module in modules)
    for module in modules:
        below = [one for one in modules if one.name and one.name.rpartition(".")[0] == module.name]
        assert module.total.forward == module.own.forward + sum(one.total.forward for one in below)


def test_modules_fold_only_when_they_are_numbered_in_a_row() -> None:
    root = known(module_tree(_modules(["", "0", "2", "3", "query", "key"])))
    assert [node.module.name for node in root.children] == ["0", "2", "query", "key"]
    assert [[one.name for one in node.alike] for node in root.children] == [["0"], ["2", "3"], ["query"], ["key"]]


def test_classes_of_one_level_are_added_up_and_the_heaviest_come_first() -> None:
    types = {"": "Net", "a": "Linear", "b": "Norm", "c": "Linear", "d": "Empty", "c.x": "Linear"}
    records = [ModuleRecord(name=name, type_name=of) for name, of in types.items()]
    cells = (cell("a", "forward", 3), cell("b", "forward", 5), cell("c", "forward", 1), cell("c.x", "forward", 4))
    modules = build_modules(records, FlopCounts(FlopRecord(cells=cells)))

    def heaviest(depth: int) -> list[tuple[str, float]]:
        return heaviest_types(modules, depth=depth, weight=lambda module: module.total.forward)

    # Linear: 3 of a, 1 of c and 4 of what is inside c, which is a level deeper itself.
    assert heaviest(1) == [("Linear", 8), ("Norm", 5)]
    assert heaviest(2) == [("Linear", 4)]


# ---- sums over a hand-built record


def test_a_name_that_begins_with_anothers_is_not_below_it() -> None:
    by_module = FlopCounts(FlopRecord(cells=(cell("layer10", "forward", 5),), module_calls={"layer1": 1})).by_module()
    assert by_module["layer1"].total == 0
    assert by_module["layer10"].total == 5
