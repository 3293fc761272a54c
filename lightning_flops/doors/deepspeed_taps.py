"""Where one DeepSpeed engine is tapped: its methods, autograd's backward and torch's DataLoaders.

A tap tells that something begins or ends, and calls what it stands around. What of that belongs to a step, and to which
part of it, is for ``EngineProfiler`` to say.
"""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private.loading import iterator_class
from lightning_flops.session.run_profiler import RunProfiler
from lightning_flops.session.taps import guarded

if TYPE_CHECKING:
    from lightning_flops.analysis.profile import Profile
    from lightning_flops.config import ProfilerConfig


class EngineTaps(RunProfiler):
    """The taps on one engine, on one rank."""

    def __init__(self, engine: Any, *, config: ProfilerConfig, publish: Callable[[Profile], None]) -> None:
        super().__init__(
            engine.module,
            config=config,
            publish=publish,
            rank=int(engine.global_rank),
            world_size=int(engine.world_size),
        )
        self._engine = engine
        self._thread: int | None = None
        """The one that trains, once it is known."""
        self._evaluating = False
        """What runs now is no step's."""
        self._forward_depth = 0
        self._backward_depth = 0
        self._monitored_fetch = False
        self._on_class = Patches()

    # ---- what a tap tells; none of these raises

    @abstractmethod
    def _forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """A forward of the engine begins; True if it is a part of a step."""

    @abstractmethod
    def _forward_ends(self) -> None:
        """One that is a part of a step ends."""

    @abstractmethod
    def _backward_begins(self) -> bool | None:
        """A backward begins; True if it is a part of a step, and not inside another backward."""

    @abstractmethod
    def _gradients_are_there(self) -> None:
        """A backward is done, and with it what the engine does at its end."""

    @abstractmethod
    def _step_begins(self) -> bool | None:
        """``engine.step`` begins; True if it is a part of a step."""

    @abstractmethod
    def _micro_step_ends(self, *, ends_step: bool) -> None:
        """``engine.step`` is done; *ends_step* if it attempted an update."""

    @abstractmethod
    def _mode_changes(self, training: bool) -> None:
        """The engine is put into training or evaluation mode."""

    @abstractmethod
    def _loader_starts(self) -> bool | None:
        """A DataLoader is asked for an iterator; True if that is for the loop that trains."""

    @abstractmethod
    def _fetch_starts(self, iterator: Any) -> bool | None:
        """*iterator* is asked for a batch; True if the loop that trains waits for it."""

    @abstractmethod
    def _fetch_ends(self, *, used_up: bool) -> None:
        """The loop has its batch, or there is none any more."""

    @abstractmethod
    def _looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that a loop does after it has left a step half done."""

    @abstractmethod
    def _interrupted(self, error: BaseException) -> None:
        """The user's step raised."""

    @abstractmethod
    def end(self) -> None:
        """The run is over."""

    def __del__(self) -> None:
        # The user has let the engine go. Its own __del__ calls destroy, of which no tap tells any more.
        if not getattr(self, "_out", True):
            self.end()

    def _on_our_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""
        return self._thread in (None, threading.get_ident())

    # ---- the taps

    def _tap_engine(self, taps: Patches) -> None:
        """Put the taps that stay for the whole run: they tell steps and evaluation, and whether the engine raises."""
        engine = self._engine
        self._live_as_long_as_the_engine(taps)
        taps.replace(engine, "forward", self._around_forward)
        taps.replace(engine, "backward", self._around_backward)
        taps.replace(engine, "step", self._around_step)
        taps.replace(engine, "train", self._around_train)
        taps.replace(engine, "eval", self._around_eval)
        taps.replace(engine, "save_checkpoint", self._around_checkpoint)
        taps.replace(engine, "destroy", self._around_destroy)
        if callable(getattr(type(engine), "_backward_epilogue", None)):
            taps.replace(engine, "_backward_epilogue", self._around_backward_epilogue)
        if self._monitor is not None and iterator_class() is not None:
            self._on_class.replace(iterator_class(), "__next__", self._around_monitored_fetch)
            weakref.finalize(self, self._on_class.undo).atexit = False

    def _live_as_long_as_the_engine(self, taps: Patches) -> None:
        """Taps hold nothing alive, and the user need not keep the handle."""
        kinds = type(self._engine).__mro__
        taps.keep(self._engine, self, kind=next(kind for kind in kinds if kind.__module__.startswith("deepspeed.")))

    def _tap_parts(self, taps: Patches) -> None:
        # What loss.backward() calls, and engine.backward() in the end.
        taps.replace(torch.autograd, "backward", self._around_backward)
        self._tap_loaders(taps)
        self._tap_optimizer_work(taps)

    def _tap_loaders(self, taps: Patches) -> None:
        """See every torch DataLoader, whoever made it."""
        if iterator_class() is not None:
            taps.replace(iterator_class(), "__next__", self._around_fetch)
        taps.replace(DataLoader, "__iter__", self._around_loader_start)

    def _tap_optimizer_work(self, taps: Patches) -> None:
        """Have what the engine itself computes for the update, as Muon's products, counted as the optimizer's."""
        for name in ("_backward_epilogue", "_take_model_step"):
            if callable(getattr(type(self._engine), name, None)):
                taps.replace(self._engine, name, self._around_optimizer_work)

    def _take_out_taps(self) -> None:
        self._on_class.undo()

    def _around_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            marked = self._forward_begins(args, kwargs)
            self._forward_depth += 1
            try:
                result = forward(*args, **kwargs)
            except BaseException as error:
                self._interrupted(error)
                raise
            finally:
                self._forward_depth -= 1
            if marked:
                self._forward_ends()
            return result

        return run

    def _around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._backward_begins():
                return backward(*args, **kwargs)
            self._backward_depth += 1
            try:
                result = backward(*args, **kwargs)
            except BaseException as error:
                self._interrupted(error)
                raise
            finally:
                self._backward_depth -= 1
            self._leave()
            return result

        return run

    def _around_backward_epilogue(self, epilogue: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = epilogue(*args, **kwargs)
            self._gradients_are_there()
            return result

        return run

    def _around_optimizer_work(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            scope = self._optimizer_work_begins()
            try:
                return work(*args, **kwargs)
            finally:
                if scope is not None:
                    self._optimizer_work_ends(scope)

        return run

    def _around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            marked = self._step_begins()
            before = self._engine.global_steps
            try:
                result = step(*args, **kwargs)
            except BaseException as error:
                self._interrupted(error)
                raise
            if marked:
                self._leave()
            self._micro_step_ends(ends_step=self._engine.global_steps != before)
            return result

        return run

    def _around_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        def run(mode: bool = True) -> Any:
            self._mode_changes(mode)
            return train(mode)

        return run

    def _around_eval(self, evaluate: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._mode_changes(False)
            return evaluate()

        return run

    def _around_checkpoint(self, save: Callable[..., Any]) -> Callable[..., Any]:
        outside = self._outside_of_steps("checkpoint")(save)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._looks_left("checkpoint", "a checkpoint was saved")
            return outside(*args, **kwargs)

        return run

    def _around_destroy(self, destroy: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.end()
            return destroy(*args, **kwargs)

        return run

    def _around_fetch(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(iterator: Any) -> Any:
            if not self._fetch_starts(iterator):
                return fetch(iterator)
            try:
                batch = fetch(iterator)
            except StopIteration:
                self._fetch_ends(used_up=True)
                raise
            except BaseException as error:
                self._interrupted(error)
                raise
            self._fetch_ends(used_up=False)
            return batch

        return run

    def _around_monitored_fetch(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # The class lives on; through it the engine would, too, when its user has let it go.
        profiler = weakref.ref(self)

        # Called for every batch of the run: it asks little, and what it calls only looks at a clock.
        def run(iterator: Any) -> Any:
            known = profiler()
            monitor = None if known is None else known._monitor
            if known is None or monitor is None or known._monitored_fetch or known._evaluating:
                return fetch(iterator)
            if not known._on_our_thread():
                return fetch(iterator)
            known._monitored_fetch = True
            try:
                monitor.fetch_begins()
            except Exception as error:
                known._fail(error)
            try:
                return fetch(iterator)
            finally:
                known._monitored_fetch = False
                try:
                    monitor.fetch_ends()
                except Exception as error:
                    known._fail(error)

        return run

    def _around_loader_start(self, start: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(loader: Any) -> Any:
            if not self._loader_starts():
                return start(loader)
            try:
                return start(loader)
            finally:
                self._leave()

        return run

    @guarded
    def _optimizer_work_begins(self) -> ExitStack:
        assert self._recorder is not None
        scope = ExitStack()
        scope.enter_context(self._recorder.optimizer_work())
        return scope

    def _optimizer_work_ends(self, scope: ExitStack) -> None:
        # Not @guarded: what was entered is left, also when the profiler has taken itself out meanwhile.
        try:
            scope.close()
        except Exception as error:
            self._fail(error)
