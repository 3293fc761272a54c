"""Replaces methods of other people's objects, classes and modules for a while, so that they run our code.

We replace a method of an instance on the class that defines it, with a descriptor that tells its instances apart. So
there is nothing of ours on the instance. A pickle or a copy of it, or of an object that refers to it, is the same as
without us, and the copy is not tapped. If a pickle or a copy does reach an object of ours, for example in a bound
method that the user keeps, our object becomes the function that it replaces.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from lightning_flops.instrument.border import UndoLedger, on_deletion
from lightning_flops.instrument.torch_private.compiler import (
    COMPILED_CALL,
    IS_EAGER,
    calls_its_attribute,
    eager_call,
    hide,
)
from lightning_flops.instrument.torch_private.modules import REPLICATE

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gets a function, and returns what runs in place of it."""

Broke = Callable[[], object]
"""Removes everything of ours: the user's Ctrl-C has arrived on the way to a wrapper, which did not hear of it."""

_KEPT = "_kept_while_tapped"
"""Attribute of an instance that holds what ``Patches.keep`` gives it."""


def _nothing() -> None:
    pass


def _came_before(function: Callable[..., Any] | None, error: BaseException) -> bool:
    """Whether *error*, which the caller of *function*, a wrapper of ours, has just caught, was not raised inside it.

    A signal's handler may be below the caller, too.
    """
    below = None if error.__traceback__ is None else error.__traceback__.tb_next
    return below is None or below.tb_frame.f_code is not getattr(function, "__code__", None)


class StandsFor:
    """An object that pickles and copies replace by its original; such a pickle loads without this package."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self._original,),)

    def __copy__(self) -> Any:
        return self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)


class _StandIn(StandsFor):
    """A callable in place of a function; it looks and compares like the function, too.

    This class and its subclasses must not have annotated attributes: an instance would show them as the function's.
    """

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(original, name):
                self.__dict__[name] = getattr(original, name)
        self.__wrapped__ = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)  # its code, its defaults

    def __eq__(self, other: object) -> bool:
        return bool(self._original == (other._original if isinstance(other, _StandIn) else other))

    def __hash__(self) -> int:
        return hash(self._original)


class _Wrapped(_StandIn):
    """A function from an instance's own attribute or table, with our wrapper around it until it is undone."""

    def __init__(self, original: Callable[..., Any], make: Make, broke: Broke) -> None:
        super().__init__(original)
        self._inner: Callable[..., Any] | None = make(original)
        self._broke = broke

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            run = self._inner
        except Exception:
            run = None
        except BaseException:
            self._broke()
            raise
        try:
            if run is None:  # another wrapper may still hold us after we were undone
                return self._original(*args, **kwargs)
            return run(*args, **kwargs)
        except BaseException as error:
            if run is not None and _came_before(run, error):
                self._broke()
            raise

    @property
    def alive(self) -> bool:
        return self._inner is not None

    def undo(self) -> None:
        self._inner = None  # this also drops our references: whoever still holds us does not keep our objects alive


class _Direct(_StandIn, functools.partial[Any]):
    """A function with our wrapper around it, which is called without another function of ours on the way.

    This runs in every step of a loop; and no Ctrl-C arrives on the way.
    """

    def __new__(cls, original: Callable[..., Any], make: Make) -> _Direct:
        return super().__new__(cls, make(original))

    def __init__(self, original: Callable[..., Any], make: Make) -> None:
        super().__init__(original)

    @property
    def alive(self) -> bool:
        return self.func is not self._original

    def undo(self) -> None:
        """Call what was called before; whoever still holds us does not keep our objects alive."""
        self.__setstate__((self._original, (), {}, self.__dict__))


class _EagerCall(_Direct):
    """The calls of a module that is not compiled. In a pickle or a copy it is None, and the copy is called as usual."""

    def __init__(self, original: Callable[..., Any], make: Make) -> None:
        super().__init__(original, make)
        self.__dict__[IS_EAGER] = True

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((None,),)

    def __copy__(self) -> Any:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return None


class _ClassTap(_StandIn):
    """The descriptor in place of one attribute of a class, which the tapped ones among its instances see replaced.

    All others, copies of a tapped one among them, have the class's own, and so has who asks the class. It holds nothing
    alive: an instance that its user has let go takes its taps with it.
    """

    def __init__(self, kind: type, name: str) -> None:
        super().__init__(vars(kind)[name])
        self._kind = kind
        self._attribute = name
        self._taps: dict[int, weakref.ref[_Tap]] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        try:
            if is_dynamo_compiling():  # a function of the user's, into which it would read our code
                return _bound(self._original, instance, owner)
            # As in ``_tap_of``, without the call: this runs at every step of an optimizer.
            found = None if instance is None else self._taps.get(id(instance))
            tap = None if found is None else found()
            if tap is not None:
                return tap.seen
            if not self._taps:
                self._leave()  # other code had replaced us, and has put us back since
        except Exception:  # no border is around us here; the instance gets what its class has
            pass
        except BaseException:
            self._broke(instance)
            raise
        return _bound(self._original, instance, owner)

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Whoever has taken the function out of a bound method of ours.
        return self.__get__(instance, type(instance))(*args, **kwargs)

    def _broke(self, instance: Any) -> None:
        tap = self._tap_of(instance)
        if tap is not None:
            tap.broke()

    def _tap_of(self, instance: Any) -> _Tap | None:
        """The latest tap on *instance* that still exists."""
        found = self._taps.get(id(instance))
        return None if found is None else found()

    def reference_to(self, instance: Any) -> weakref.ref[_Tap] | None:
        """The reference that ``_tap_of`` follows."""
        return self._taps.get(id(instance))

    def put_on(self, tap: _Tap) -> None:
        key, below = id(tap.target), tap.below

        @on_deletion
        def forget(gone: weakref.ref[_Tap]) -> None:
            if self._taps.get(key) is gone:
                self._settle(key, below)

        self._taps[key] = weakref.ref(tap, forget)
        if vars(self._kind).get(self._attribute) is not self:
            setattr(self._kind, self._attribute, self)

    def take_off(self, tap: _Tap) -> None:
        self._settle(id(tap.target), self._taps.get(id(tap.target)))

    def _settle(self, key: int, reference: weakref.ref[_Tap] | None) -> None:
        """Let the instance run the first tap that is alive, going down from the one of *reference*."""
        while reference is not None and ((tap := reference()) is None or not tap.alive):
            reference = None if tap is None else tap.below
        if reference is not None:
            self._taps[key] = reference
            return
        self._taps.pop(key, None)
        if not self._taps:
            self._leave()

    def _leave(self) -> None:
        if vars(self._kind).get(self._attribute) is self:
            setattr(self._kind, self._attribute, self._original)


hide(_Wrapped.__call__, alone=True)  # in a loop whose steps are compiled, these run between what is compiled
hide(_ClassTap.__call__, alone=True)
hide(_ClassTap.__get__)


def _bound(attribute: Any, instance: Any, owner: type | None) -> Any:
    """*attribute* of the class *owner*, bound to *instance*, or to the class if *instance* is None."""
    return attribute.__get__(instance, owner) if hasattr(type(attribute), "__get__") else attribute


class _BoundTap(_Direct):
    """What an instance sees in place of a method of its class: it looks like a bound method of the descriptor's."""

    def __new__(cls, function: Any, instance: Any) -> Any:
        """A bound method, as of the type of bound methods: whoever keeps one's parts puts them together so."""
        return MethodType(function, instance)

    def __init__(self, original: Callable[..., Any], on_class: _ClassTap) -> None:
        _StandIn.__init__(self, original)
        self.__func__ = on_class

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return MethodType

    def __repr__(self) -> str:
        return repr(self._original)


def _bound_tap(original: Callable[..., Any], make: Make, on_class: _ClassTap) -> _BoundTap:
    bound: _BoundTap = functools.partial.__new__(_BoundTap, make(original))
    _BoundTap.__init__(bound, original, on_class)
    return bound


class _Tap:
    """One attribute of a class, replaced for one instance."""

    def __init__(self, target: Any, name: str, make: Make | Mapping[Any, Make], broke: Broke) -> None:
        kind = next((kind for kind in type(target).__mro__ if name in vars(kind)), None)
        if kind is None:
            raise AttributeError(f"class {type(target).__name__} has no attribute {name!r}")
        found = vars(kind)[name]
        on_class = found if isinstance(found, _ClassTap) else _ClassTap(kind, name)
        self.target = target
        self.broke = broke
        self.below = on_class.reference_to(target)
        self.alive = True
        self.seen: Any
        """What the instance has in place of its class's."""
        self._wrapped: list[_Wrapped | _BoundTap] = []
        before = getattr(target, name)
        if isinstance(make, Mapping):
            self.seen = dict(before)
            for key, make_entry in make.items():
                self.seen[key] = entry = _Wrapped(before[key], make_entry, broke)
                self._wrapped.append(entry)
        else:
            self.seen = bound = _bound_tap(before, make, on_class)
            self._wrapped.append(bound)
        self._on_class = on_class

    def put_on(self) -> None:
        self._on_class.put_on(self)

    def undo(self) -> None:
        self.alive = False
        for one in self._wrapped:
            one.undo()
        self._on_class.take_off(self)


class _OwnAttribute:
    """Replaces an attribute that the instance itself has, and not only its class."""

    def __init__(self, target: Any, name: str, make: Make, broke: Broke) -> None:
        self._attributes = vars(target)
        self._name = name
        self._wrapped = _Wrapped(self._attributes[name], make, broke)
        self._attributes[name] = self._wrapped

    def undo(self) -> None:
        self._wrapped.undo()
        if self._attributes.get(self._name) is not self._wrapped:
            return  # other code has wrapped it since
        previous = self._wrapped._original
        # We may have replaced another wrapper of ours, which was undone while we were on top of it.
        while isinstance(previous, _Wrapped) and not previous.alive:
            previous = previous._original
        self._attributes[self._name] = previous


class _Calls:
    """Replaces what runs when a module is called: its hooks and its forward.

    ``module.compile()`` sets an attribute for the same purpose. torch leaves that attribute out of pickles and copies,
    and the compiler looks past it, so we use it, too.
    """

    def __init__(self, module: nn.Module, make: Make) -> None:
        self._attributes = vars(module)
        self._wrapped = _EagerCall(eager_call(module), make)
        self._copies = Patches()

    def put_on(self, module: nn.Module) -> None:
        # DataParallel copies the module's attributes to its replicas, and ours calls the module itself.
        if hasattr(module, REPLICATE):
            self._copies.replace(module, REPLICATE, _without_calls)
        self._attributes[COMPILED_CALL] = self._wrapped

    def undo(self) -> None:
        self._copies.undo()
        self._wrapped.undo()
        if self._attributes.get(COMPILED_CALL) is self._wrapped:
            del self._attributes[COMPILED_CALL]


def _without_calls(replicate: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        replica = replicate(*args, **kwargs)
        if isinstance(vars(replica).get(COMPILED_CALL), _EagerCall):
            del vars(replica)[COMPILED_CALL]
        return replica

    return run


class _ModuleFunction(_Direct):
    """A function of a module, which is pickled by its name."""

    def __reduce_ex__(self, protocol: Any) -> str:  # type: ignore[override]
        return str(self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _ClassFunction:
    """A function of a class, which binds to its instances."""

    def __init__(self, original: Callable[..., Any], make: Make, *, ends_itself: bool) -> None:
        self._inner: Callable[..., Any] | None = make(original)
        self.replacement: Callable[..., Any]
        if ends_itself:
            self.replacement = functools.wraps(original)(self._inner)
            return

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # As in _Wrapped.
            return (self._inner or original)(*args, **kwargs)

        hide(replacement, alone=True)
        self.replacement = replacement

    @property
    def alive(self) -> bool:
        return self._inner is not None

    def undo(self) -> None:
        self._inner = None


class _Shared:
    """Replaces one function of a class or a module, for all users of it.

    The replacement is pickled by its name, as the function is. A reference to the function that was taken before cannot
    be pickled until this is undone, because pickle checks that the name leads to the same object.
    """

    def __init__(
        self,
        target: type | types.ModuleType,
        name: str,
        make: Make,
        *,
        missing: Callable[..., Any] | None = None,
        ends_itself: bool = False,
    ) -> None:
        self.target = target
        self.name = name
        self.had = name in vars(target)
        self.previous = vars(target).get(name)
        original: Callable[..., Any] = getattr(target, name) if missing is None else getattr(target, name, missing)
        self.replacement: Any
        self.wrapped: _ClassFunction | _ModuleFunction
        if isinstance(target, type):
            self.wrapped = _ClassFunction(original, make, ends_itself=ends_itself)
            self.replacement = self.wrapped.replacement
        else:
            self.wrapped = self.replacement = _ModuleFunction(original, make)
        self.replacement.__lightning_flops_patch__ = self
        setattr(target, name, self.replacement)

    def undo(self) -> None:
        self.wrapped.undo()
        if vars(self.target).get(self.name) is not self.replacement:
            return
        had, previous = self.had, self.previous
        # As in _OwnAttribute.
        while (older := getattr(previous, "__lightning_flops_patch__", None)) is not None and not older.wrapped.alive:
            had, previous = older.had, older.previous
        if had:
            setattr(self.target, self.name, previous)
        else:
            delattr(self.target, self.name)


class _Kept:
    """An attribute of an instance that keeps something alive; it is not in pickles or copies of the instance."""

    def __init__(self, target: Any, kept: Any) -> None:
        self._attributes = vars(target)
        self._holder = _Holder(kept)
        self._on_class = UndoLedger()

    def put_on(self, kind: type) -> None:
        weakref.finalize(self._holder, on_deletion(self._on_class.close)).atexit = False
        # A copy is made of what __getstate__ returns, which every object has from Python 3.11 on.
        self._on_class.add(_Shared(kind, "__getstate__", _without_kept, missing=vars).undo)
        self._attributes[_KEPT] = self._holder

    def undo(self) -> None:
        self._holder.kept = None
        if self._attributes.get(_KEPT) is self._holder:
            del self._attributes[_KEPT]
        self._on_class.close()


class _Holder(StandsFor):
    """Holds something for as long as an instance lives."""

    def __init__(self, kept: Any) -> None:
        super().__init__(None)
        self.kept = kept


def _without_kept(get_state: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(instance: Any) -> Any:
        state = get_state(instance)
        if isinstance(state, dict) and isinstance(state.get(_KEPT), _Holder):
            return {name: value for name, value in state.items() if name != _KEPT}
        return state

    return run


def untapped(method: Any) -> Any:
    """*method* without our wrapper, if it is a bound method that was taken while it was tapped."""
    function = getattr(method, "__func__", None)
    if not isinstance(function, _StandIn):
        return method
    return _bound(function._original, method.__self__, type(method.__self__))


class Patches:
    """Replaced methods of other people's instances, classes and modules; ``undo`` makes each as it was before.

    Args:
        broke: as ``Broke``; for methods and calls of instances.
    """

    def __init__(self, broke: Broke = _nothing) -> None:
        self._ledger = UndoLedger()
        self._broke = broke

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._ledger)

    def replace(self, target: Any, name: str, make: Make) -> None:
        """Make ``target.name`` of an instance, a class or a module run ``make(original)``.

        On a class, *original* is the plain function, which gets the instance as its first argument. While a function of
        a class or a module is replaced, references to it that were taken before cannot be pickled.

        The taps of an instance end when these ``Patches`` are no longer referenced. They do not hold the instance.

        Raises:
            AttributeError: *target* has no such attribute.
        """
        if isinstance(target, (type, types.ModuleType)):
            self._ledger.add(_Shared(target, name, make).undo)
        elif name in vars(target):
            self._ledger.add(_OwnAttribute(target, name, make, self._broke).undo)
        else:
            self._tap(target, name, make)

    def replace_function(self, kind: type, name: str, make: Make) -> None:
        """As ``replace``, where the wrapper tells its owner of nothing any more when everything of ours is removed.

        It is put in the class as it is: this spares the caller a call of ours.
        """
        self._ledger.add(_Shared(kind, name, make, ends_itself=True).undo)

    def replace_entries(self, target: Any, name: str, make: Mapping[Any, Make]) -> None:
        """Let *target* see its class's table ``name`` with ``make[key](function)`` in place of some functions.

        Raises:
            AttributeError: *target*'s class has no such attribute, or *target* has one of its own.
            KeyError: the table has no such key.
        """
        if name in vars(target):
            raise AttributeError(f"{type(target).__name__} has a {name} of its own, which is not its class's")
        self._tap(target, name, make)

    def _tap(self, target: Any, name: str, make: Make | Mapping[Any, Make]) -> None:
        tap = _Tap(target, name, make, self._broke)
        self._ledger.add(tap.undo)
        tap.put_on()

    def replace_calls(self, module: nn.Module, make: Make) -> None:
        """Run ``make(original)`` when *module* is called: around its hooks, its forward, and its compiled form if any.

        Calls of ``module.forward`` are not seen. In a torch that calls modules in another way, only its forward is
        replaced.
        """
        if vars(module).get(COMPILED_CALL) is not None:
            self.replace(module, COMPILED_CALL, make)
        elif calls_its_attribute():
            calls = _Calls(module, make)
            self._ledger.add(calls.undo)
            calls.put_on(module)
        else:
            self.replace(module, "forward", make)

    def keep(self, target: Any, kept: Any, *, kind: type) -> None:
        """Let *target* keep *kept* alive as long as it lives itself; *kept* is not in its pickles and copies.

        Args:
            target: an instance of *kind*.
            kept: may hold *target* in turn.
            kind: a class that is pickled by its name, so that what we add to it here is in no pickle.
        """
        one = _Kept(target, kept)
        self._ledger.add(one.undo)
        one.put_on(kind)

    def undo(self) -> None:
        """Undo every replacement, the last one first. If one raises, the others are still undone."""
        self._ledger.close()
