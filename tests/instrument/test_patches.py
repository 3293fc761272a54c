from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import cloudpickle
import pytest
from torch import nn

from lightning_flops.instrument.patches import Patches, untapped


class Loop:
    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, what: str) -> str:
        """Run it."""
        self.ran.append(what)
        return what


RUN = vars(Loop)["run"]


def spying(spied: list[str], tag: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(what: str) -> Any:
            spied.append(tag + what)
            return original(what)

        return run

    return make


def test_a_replaced_method_runs_around_the_original_and_keeps_its_name() -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    assert loop.run("a") == "a"
    assert (spied, loop.ran) == (["a"], ["a"])
    assert (loop.run.__name__, loop.run.__doc__) == ("run", "Run it.")


def test_undo_leaves_the_instance_as_it_was() -> None:
    loop, patches = Loop(), Patches()
    before = dict(vars(loop))
    patches.replace(loop, "run", spying([]))
    assert patches
    patches.undo()
    assert vars(loop) == before
    assert not patches


def test_an_instance_attribute_that_was_there_comes_back() -> None:
    loop, patches = Loop(), Patches()
    mine: Any = str.upper
    loop.run = mine  # type: ignore[method-assign]
    patches.replace(loop, "run", spying([]))
    patches.undo()
    assert vars(loop)["run"] is mine


def test_somebody_who_wrapped_us_in_turn_is_left_alone_and_we_are_silent() -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    theirs: list[str] = []
    patches.replace(loop, "run", spying(spied))
    ours = loop.run

    def wrapper(what: str) -> str:
        theirs.append(what)
        return str(ours(what))

    loop.run = wrapper  # type: ignore[method-assign]
    patches.undo()
    assert loop.run("a") == "a"
    assert (spied, theirs, loop.ran) == ([], ["a"], ["a"])


@pytest.mark.parametrize("first_undone", [0, 1])
def test_two_of_ours_on_one_method_leave_nothing_in_either_order(first_undone: int) -> None:
    loop = Loop()
    spied: list[str] = []
    both = [Patches(), Patches()]
    both[0].replace(loop, "run", spying(spied, "inner "))
    both[1].replace(loop, "run", spying(spied, "outer "))
    loop.run("a")
    assert spied == ["outer a", "inner a"]
    both[first_undone].undo()
    both[1 - first_undone].undo()
    assert "run" not in vars(loop)


def test_a_missing_method_is_an_error_of_ours() -> None:
    with pytest.raises(AttributeError, match="walk"):
        Patches().replace(Loop(), "walk", spying([]))


class WithTable:
    @staticmethod
    def double(what: str) -> str:
        return 2 * what

    table: ClassVar[dict[str, Callable[..., Any]]] = {"upper": str.upper, "double": double}


def test_a_table_of_functions_is_seen_with_ours_by_one_instance_and_no_other() -> None:
    one, other, patches = WithTable(), WithTable(), Patches()
    before, spied = WithTable.table, list[str]()
    patches.replace_entries(one, "table", {"upper": spying(spied)})
    assert (one.table["upper"]("a"), one.table["double"]("b"), other.table["upper"]("c")) == ("A", "bb", "C")
    assert spied == ["a"] and WithTable.table is before and vars(one) == {}
    kept = one.table["upper"]
    assert pickle.loads(pickle.dumps(kept)) is str.upper is copy.deepcopy(kept)
    patches.undo()
    assert one.table is before and kept("d") == "D" and spied == ["a"]


@pytest.mark.parametrize("first_undone", [0, 1])
def test_two_of_ours_on_one_table_leave_nothing_in_either_order(first_undone: int) -> None:
    one, spied, both = WithTable(), list[str](), [Patches(), Patches()]
    both[0].replace_entries(one, "table", {"upper": spying(spied, "inner ")})
    both[1].replace_entries(one, "table", {"upper": spying(spied, "outer ")})
    one.table["upper"]("a")
    assert spied == ["outer a", "inner a"]
    both[first_undone].undo()
    one.table["upper"]("b")
    assert spied[2:] == [("inner b", "outer b")[1 - first_undone]]
    both[1 - first_undone].undo()
    assert one.table is vars(WithTable)["table"]


def test_a_table_of_the_instances_own_is_refused() -> None:
    one = WithTable()
    one.table = {}  # type: ignore[misc]
    with pytest.raises(AttributeError, match="table of its own"):
        Patches().replace_entries(one, "table", {})


# ---- what others see of a tap


@pytest.fixture
def tapped() -> Iterator[Loop]:
    """A loop whose ``run`` is tapped; nothing of it is on the class afterwards."""
    original, loop, patches = vars(Loop)["run"], Loop(), Patches()
    patches.replace(loop, "run", spying([]))
    yield loop
    patches.undo()
    assert vars(Loop)["run"] is original


def test_nothing_of_ours_is_on_the_instance_or_in_its_pickle(tapped: Loop) -> None:
    assert vars(tapped) == {"ran": []}
    plain = Loop()
    assert pickle.dumps(tapped) == pickle.dumps(plain)
    again = pickle.loads(pickle.dumps(tapped.run))
    assert (type(again), again.__func__, vars(again.__self__)) == (types.MethodType, RUN, vars(plain))
    assert pickle.dumps(Loop.run) == pickle.dumps(RUN)
    assert b"lightning_flops" not in cloudpickle.dumps(tapped.run)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loop: pickle.loads(cloudpickle.dumps(loop))])
def test_a_copy_is_not_tapped(duplicate: Callable[[Any], Any]) -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    copied = duplicate(loop)
    assert copied.run("a") == "a"
    assert copied.run.__func__ is RUN and spied == []
    loop.run("b")
    assert spied == ["b"]
    patches.undo()


def test_a_copy_of_a_bound_method_calls_the_copy_and_not_us() -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    copied = copy.deepcopy(loop.run)
    copied("a")
    assert (spied, copied.__self__.ran, loop.ran) == ([], ["a"], [])  # type: ignore[attr-defined]
    for loads in (pickle.dumps, cloudpickle.dumps):
        again = pickle.loads(loads(loop.run))
        assert (type(again), again.__func__) == (types.MethodType, RUN)
    patches.undo()


def test_a_tapped_method_looks_like_the_one_it_is(tapped: Loop) -> None:
    plain = Loop()
    assert isinstance(tapped.run, types.MethodType) and inspect.ismethod(tapped.run)
    assert repr(tapped.run) == repr(types.MethodType(RUN, tapped))
    assert tapped.run.__self__ is tapped
    assert inspect.signature(tapped.run) == inspect.signature(plain.run)
    assert inspect.getsource(tapped.run) == inspect.getsource(plain.run)
    assert tapped.run.__code__ is RUN.__code__
    assert tapped.run.__annotations__ == RUN.__annotations__
    assert tapped.run == types.MethodType(RUN, tapped) and hash(tapped.run) == hash(types.MethodType(RUN, tapped))
    assert Loop.run is RUN and plain.run.__func__ is RUN  # type: ignore[attr-defined]


def test_whoever_keeps_the_parts_of_a_tapped_method_is_seen_and_sees_the_end() -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    weakly = weakref.WeakMethod(loop.run)
    again = types.MethodType(loop.run.__func__, loop)  # type: ignore[attr-defined]
    for n, method in enumerate((weakly(), again, loop.run)):
        assert method is not None
        method(str(n))
    assert spied == ["0", "1", "2"]
    patches.undo()
    for method in (weakly(), again):
        assert method is not None
        method("after")
    assert spied == ["0", "1", "2"] and loop.ran[-2:] == ["after", "after"]


def test_a_class_that_is_pickled_by_value_has_its_own_method() -> None:
    class Own(Loop):
        def run(self, what: str) -> str:
            return "own " + super().run(what)

    loop, patches = Own(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    pickled = cloudpickle.dumps(loop)
    assert b"lightning_flops" not in pickled
    again = pickle.loads(pickled)
    assert again.run("a") == "own a" and spied == []
    assert type(vars(type(again))["run"]) is types.FunctionType
    patches.undo()


def test_an_attribute_of_the_instances_own_is_pickled_and_copied_as_it_was() -> None:
    loop, patches = Loop(), Patches()
    own: Any = str.upper
    loop.run = own  # type: ignore[method-assign]
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    for copied in (copy.deepcopy(loop), pickle.loads(pickle.dumps(loop)), pickle.loads(cloudpickle.dumps(loop))):
        assert vars(copied)["run"] is str.upper
    assert b"lightning_flops" not in pickle.dumps(loop)
    assert loop.run("a") == "A" and spied == ["a"]
    patches.undo()


def test_a_bound_method_that_was_kept_is_the_plain_one_in_the_end() -> None:
    loop, patches = Loop(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    kept = loop.run
    assert untapped(kept).__func__ is RUN
    patches.undo()
    assert kept("a") == "a" and (spied, loop.ran) == ([], ["a"])
    assert untapped(loop.run) == loop.run and untapped(None) is None


def test_who_wraps_the_method_on_the_class_is_left_alone_and_who_puts_it_back_puts_back_the_class_own() -> None:
    class Library(Loop):
        def run(self, what: str) -> str:
            return super().run(what)

    original, loop, patches = vars(Library)["run"], Library(), Patches()
    spied: list[str] = []
    patches.replace(loop, "run", spying(spied))
    found = vars(Library)["run"]
    theirs = lambda self, what: found(self, what)  # noqa: E731
    Library.run = theirs  # type: ignore[method-assign]
    loop.run("a")
    patches.undo()
    loop.run("b")
    assert spied == ["a"] and vars(Library)["run"] is theirs
    Library.run = found  # type: ignore[method-assign]
    loop.run("c")
    assert spied == ["a"] and loop.ran == ["a", "b", "c"]
    assert vars(Library)["run"] is original


def test_two_instances_are_tapped_apart_and_the_class_is_whole_after_the_last() -> None:
    one, two, both = Loop(), Loop(), [Patches(), Patches()]
    spied: list[str] = []
    both[0].replace(one, "run", spying(spied, "one "))
    both[1].replace(two, "run", spying(spied, "two "))
    one.run("a"), two.run("b")
    both[0].undo()
    one.run("c"), two.run("d")
    assert spied == ["one a", "two b", "two d"]
    both[1].undo()
    assert vars(Loop)["run"] is RUN


def test_taps_hold_nothing_alive_and_go_with_what_they_are_kept_by() -> None:
    class Engine(Loop):
        def run(self, what: str) -> str:
            return super().run(what)

    original, engine, patches = vars(Engine)["run"], Engine(), Patches()
    patches.keep(engine, patches, kind=Engine)
    patches.replace(engine, "run", spying([]))
    known = weakref.ref(engine)
    del patches
    gc.collect()
    assert vars(Engine)["run"] is not original  # the engine has kept them
    del engine
    gc.collect()
    assert known() is None
    assert vars(Engine)["run"] is original and "__getstate__" not in vars(Engine)


def test_what_an_instance_keeps_is_in_no_copy_of_it() -> None:
    loop, patches = Loop(), Patches()
    patches.keep(loop, patches, kind=Loop)
    for copied in (copy.copy(loop), copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))):
        assert vars(copied) == {"ran": []}
    assert b"lightning_flops" not in pickle.dumps(loop)
    patches.undo()
    assert vars(loop) == {"ran": []} and "__getstate__" not in vars(Loop)


def test_a_class_and_a_module_are_left_as_they_were_found() -> None:
    class Base:
        def greet(self) -> str:
            return "hello"

    class Derived(Base):
        pass

    library = types.ModuleType("library")
    vars(library)["size"] = len
    patches = Patches()
    patches.replace(Base, "greet", lambda original: lambda self: original(self) + "!")
    patches.replace(Derived, "greet", lambda original: lambda self: original(self) + "?")
    patches.replace(library, "size", lambda original: lambda value: original(value) + 1)
    assert (Base().greet(), Derived().greet(), vars(library)["size"]("ab")) == ("hello!", "hello!?", 3)
    patches.undo()
    assert (Base().greet(), Derived().greet()) == ("hello", "hello")
    assert "greet" not in vars(Derived) and vars(library)["size"] is len


@pytest.mark.parametrize("first_undone", [0, 1])
def test_a_wrapper_that_ends_by_itself_is_put_in_as_it_is(first_undone: int) -> None:
    class Greeter:
        def greet(self) -> str:
            """Says hello."""
            return "hello"

    def make(original: Callable[[Greeter], str]) -> Callable[[Greeter], str]:
        made.append(lambda self: original(self) + "!")
        return made[-1]

    made: list[Callable[[Greeter], str]] = []
    before, patches = Greeter.greet, [Patches(), Patches()]
    for one in patches:
        one.replace_function(Greeter, "greet", make)
    assert Greeter.greet is made[1] and Greeter().greet() == "hello!!"
    assert (Greeter.greet.__name__, Greeter.greet.__doc__) == ("greet", "Says hello.")
    patches.pop(first_undone).undo()
    assert Greeter.greet is made[1 if first_undone == 0 else 0]
    patches.pop().undo()
    assert Greeter.greet is before


def test_a_replaced_function_is_pickled_by_its_name_and_one_that_was_taken_before_when_it_is_back() -> None:
    taken, plain = spying, pickle.dumps(spying)
    patches = Patches()
    patches.replace(sys.modules[__name__], "spying", lambda original: lambda *args: original(*args))
    try:
        assert spying is not taken
        assert pickle.dumps(spying) == plain
        assert pickle.loads(plain) is pickle.loads(cloudpickle.dumps(spying)) is spying
        assert copy.deepcopy(taken) is taken
        with pytest.raises(pickle.PicklingError, match="not the same object"):
            pickle.dumps(taken)
    finally:
        patches.undo()
    assert spying is taken and pickle.dumps(taken) == plain and pickle.loads(plain) is taken


# ---- an error of ours, or the user's Ctrl-C, at any line


class Stage(nn.Module):
    """What anything is put on."""

    table: ClassVar[dict[str, Callable[..., Any]]] = {"upper": str.upper}

    def __init__(self) -> None:
        super().__init__()
        self.own: Callable[..., Any] = str.upper

    def run(self, what: str) -> str:
        return what

    def forward(self, what: str) -> str:
        return what


def _twice(patches: Patches, stage: Stage) -> None:
    for tag in ("inner", "outer"):
        patches.replace(stage, "run", spying([], tag))


PUT: dict[str, Callable[[Patches, Stage], None]] = {
    "a method": lambda patches, stage: patches.replace(stage, "run", spying([])),
    "an attribute of its own": lambda patches, stage: patches.replace(stage, "own", spying([])),
    "a class": lambda patches, stage: patches.replace(Stage, "run", spying([])),
    "a table": lambda patches, stage: patches.replace_entries(stage, "table", {"upper": spying([])}),
    "calls": lambda patches, stage: patches.replace_calls(stage, spying([])),
    "a method twice": lambda patches, stage: _twice(patches, stage),
    "what is kept": lambda patches, stage: patches.keep(stage, Loop(), kind=Stage),
}


def test_what_a_wrapper_raises_itself_is_not_told() -> None:
    told: list[str] = []
    stage, patches = Stage(), Patches(lambda: told.append("told"))

    def fails(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(what: str) -> Any:
            raise KeyboardInterrupt

        return run

    for name in ("run", "own"):
        patches.replace(stage, name, fails)
        with pytest.raises(KeyboardInterrupt):
            getattr(stage, name)("a")
    assert told == []
    patches.undo()


@pytest.mark.parametrize("name", ["run", "own"])
def test_what_the_original_raises_after_its_wrapper_was_undone_is_not_told(name: str) -> None:
    told: list[str] = []
    stage, patches = Stage(), Patches(lambda: told.append("told"))

    def undone_within(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(what: str) -> Any:
            patches.undo()
            raise LookupError(what)  # as the original may do

        return run

    patches.replace(stage, name, undone_within)
    with pytest.raises(LookupError):
        getattr(stage, name)("a")
    assert told == []
