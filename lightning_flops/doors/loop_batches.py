"""Which batch a step of a user's own loop computes on: what loaders deliver, and what the model is called with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_flops.instrument.batches import UNKNOWN, Shapes, beside, known_by, tensor_shapes
from lightning_flops.session.replayed import Replayed

if TYPE_CHECKING:
    from lightning_flops.doors.loader_taps import Fetched
    from lightning_flops.records import BatchTokens
    from lightning_flops.session.noted_calls import Seen
    from lightning_flops.session.session import Session

_FEW_TOGETHER = 16
"""If an iterator delivers more batches than that before a forward, the loop passes over them to the last one."""

_MOST_TOGETHER = 1024
"""Most batches of one step that may be fetched before its first forward, and are told apart."""

_SEVERAL_FETCHED = (
    "A loader delivered several batches before one forward, as where a generator fetches ahead or the loop passes over "
    "batches. Which of them a step computed on is not known: its shapes and samples may be those of a batch before or "
    "after it. If profiler.batches(...) is put around what hands out the batches, they are known."
)

_NOT_FETCHED = (
    "Some steps computed on batches that were not fetched for them: on pieces of one that was, or on batches that the "
    "loop has kept. Only the arguments of the model are seen of those, so such steps are not like others. If "
    "profiler.batches(...) is put around what hands out the batches, all are known alike."
)

_ONE_OF_SEVERAL = (
    "Steps had batches of several loaders, and go on where one of these has no more: its batches may be used again, as "
    "itertools.cycle hands them out, and nobody sees which. So the samples of such steps are n/a. If "
    "profiler.batches(...) is put around what hands out all of them, they are known."
)


class LoopBatches:
    """The running batch of a loop, and those that were fetched before their turn.

    A batch is known as it came from a loader. If none delivered it, the arguments of the model's forward stand for it.

    Args:
        session: returns the loop's session, once there is one.
        keeps: a setting needs the batches themselves.
        one_pass: each batch has one backward after its forwards, as in a loop of one optimizer.
    """

    def __init__(self, session: Callable[[], Session], *, keeps: bool, one_pass: bool) -> None:
        self.keeps = keeps
        self.batch: Any = None
        """The running one, or an empty tuple if nobody needs it; None if there is none yet."""
        self.is_fetched = False
        """It came from a loader, and not from the arguments of a forward."""
        self.is_used = False
        """A forward or a backward has run for it."""
        self.ahead: Fetched | None = None
        """What was fetched while the running batch was in use: it belongs to what comes next."""
        self.lacks_beside = False
        """Of several loaders side by side one has no more batches, and no batch came beside another since."""
        self.replayed = Replayed()
        """Batches that were fetched before."""
        self._session = session
        self._one_pass = one_pass
        self._shapes: Shapes = ()
        self._tokens: BatchTokens | None = None
        self._is_replayed = False
        """The running batch was not fetched, and is one that was fetched before."""
        self._beside = False
        """Several loaders have delivered a batch for the latest step that more than one has."""
        self._together: list[Fetched] = []
        """Batches that one iterator has delivered since the last forward, as long as they are one batch for us."""
        self._others: deque[Fetched] = deque()
        """Those of them that come after the running one, once they are known to be several."""
        self._has_taken = False
        """A batch was fetched in this run."""
        self._fetched = False
        """A batch was fetched since the latest step ended."""
        self._had_fetched = False
        """The same of that step."""

    # ---- loaders

    def seen_of(self, batch: Any) -> Fetched:
        """*batch* where a setting needs it, its shapes and its tokens."""
        return (batch if self.keeps else (), *self.sees(batch))

    def sees(self, batch: Any) -> Seen:
        """The shapes and the tokens of *batch*."""
        tokens = self._session().tokens
        return tensor_shapes(batch), tokens.of(batch) if tokens.reads else None

    def takes(self, kept: Any, shapes: Shapes, tokens: BatchTokens | None, *, again: bool) -> None:
        """The loop has fetched a batch. If the one before it is in use, it belongs to what comes next.

        Args:
            kept: the batch where a setting needs it.
            shapes: of its tensors.
            tokens: what was found in it.
            again: the batch before it came from the same iterator.
        """
        self._has_taken = self._fetched = True
        if self.is_used:
            if self.ahead is not None:
                shapes, tokens = (*self.ahead[1], *shapes), self.ahead[2] or tokens
            self.ahead = (kept, shapes, tokens)
        elif self.batch is None or not self.is_fetched:
            self._is_running((kept, shapes, tokens))
            self._together = [(kept, shapes, tokens)]
        elif again:
            self._takes_together((kept, shapes, tokens))
        else:  # two loaders side by side
            self._together.clear()
            self._beside, self.lacks_beside = True, False
            self._shapes, self._tokens = beside(self._shapes, shapes), self._tokens or tokens

    def _is_running(self, fetched: Fetched) -> None:
        self.batch, self._shapes, self._tokens = fetched
        self.is_fetched = True

    def _takes_together(self, fetched: Fetched) -> None:
        """One iterator has delivered several batches before a forward.

        They may be those of several micro-steps, which the forwards will show. Otherwise the loop computes on all of
        them, or it has passed over all but the last.
        """
        together = self._together
        if together:
            together.append(fetched)
        if len(together) > _MOST_TOGETHER:
            del together[0]
        if len(together) > _FEW_TOGETHER:
            self._shapes = fetched[1]
        else:
            self._shapes = (*self._shapes, *fetched[1])
        self._tokens = None  # nobody knows which of them are in use

    def loader_is_used_up(self) -> None:
        """A loader has no more batches."""
        self.lacks_beside = self.lacks_beside or self._beside

    # ---- forwards

    @property
    def looks_at_arguments(self) -> bool:
        """Whether the arguments of a forward of the running batch tell anything that is not known."""
        return not self.is_fetched or (self.replayed.looks_left > 0 and self._learns_arguments)

    @property
    def _learns_arguments(self) -> bool:
        """Whether the running batch was fetched, and with which arguments the model is called on it is not known."""
        if not self.is_fetched or self.are_several:
            return False
        return known_by(self._shapes, self._tokens) not in self.replayed.known

    def takes_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these, which are looked at here."""
        arguments = batch_of(args, kwargs)
        if self.is_fetched:
            self.replayed.looks_left -= 1
            self.replayed.learn(self._shapes, self._tokens, tensor_shapes(arguments))
        else:
            self.takes_seen_arguments(arguments if self.keeps else (), self.sees(arguments))

    def takes_seen_arguments(self, kept: Any, seen: Seen) -> None:
        """The model was called with arguments that were looked at.

        Args:
            kept: the arguments where a setting needs them.
            seen: their shapes and tokens.
        """
        if self._learns_arguments:
            self.replayed.learn(self._shapes, self._tokens, seen[0])
        elif self.is_fetched:
            return
        elif self.batch is None:
            fetched = self.replayed.fetched_as(*seen)
            self._is_replayed = fetched is not None
            self.batch, self._tokens = kept, seen[1]
            self._shapes = seen[0] if fetched is None else fetched
        elif not self._is_replayed:
            self._shapes = (*self._shapes, *seen[0])

    def running(self) -> Seen:
        """The shapes and the tokens of the running batch, as far as they are known."""
        return self._shapes, self._tokens

    # ---- from one batch to the next

    @property
    def is_unused(self) -> bool:
        """Whether the running batch was fetched, and nothing has run for it."""
        return self.is_fetched and not self.is_used

    @property
    def has_left_over(self) -> bool:
        """Whether a batch was fetched alone and nothing has run for it: the running one, or the one after it."""
        return not self.are_several and (self.is_unused or self.ahead is not None)

    @property
    def are_several(self) -> bool:
        """The loader has delivered several batches together, and the running one is the first of them, or all."""
        return bool(self._others) or len(self._together) > 1

    @property
    def wait(self) -> bool:
        """Batches were fetched that the loop has not used yet, the running one apart."""
        return self.ahead is not None or self.are_several

    def come_apart(self) -> bool:
        """A forward follows a backward. If several batches were fetched before them, each is a micro-step.

        Returns:
            Whether it is so: then the running batch is the first of them.
        """
        if not (self._one_pass and self.are_several):
            return False
        if not self._others:
            first, *others = self._together
            self._together = []
            self._is_running(first)
            self._others.extend(others)
        return True

    def take_ahead_in(self) -> None:
        """What was fetched ahead is a part of the running batch."""
        if self.ahead is not None:
            self._shapes, self._tokens = (*self._shapes, *self.ahead[1]), self._tokens or self.ahead[2]
            self.ahead = None

    def drop_left_over(self) -> None:
        """The loop does not use the batch that nothing has run for."""
        if self.ahead is not None:
            self.ahead = None
        else:
            self.go_on()

    def go_on(self) -> None:
        """The running batch is over: the one that was fetched ahead, if any, is the running one now."""
        self.is_used = False
        self._together = []
        if self._others:
            self._is_running(self._others.popleft())
            return
        ahead, self.ahead = self.ahead, None
        self.batch, self._shapes, self._tokens = (None, (), None) if ahead is None else ahead
        self._is_replayed = False
        self.is_fetched = ahead is not None

    def end(self, *, ends_step: bool) -> Fetched:
        """The running batch is through: go on to the next one.

        Args:
            ends_step: a step ends with it.

        Returns:
            It, its shapes and its tokens; the first is None if there was none.
        """
        note = self._session().notes.add_for_run
        if len(self._together) > 1:
            note(_SEVERAL_FETCHED)
        if ends_step:
            self._others.clear()
            self._had_fetched, self._fetched = self._fetched, False
            was_fetched = self._had_fetched or self.is_fetched or self._is_replayed
            if self.batch is not None and self._has_taken and not was_fetched:
                note(_NOT_FETCHED)
        batch, shapes, tokens = self.batch, self._shapes, self._tokens
        if self.lacks_beside and self.is_fetched:
            shapes = beside(shapes, (UNKNOWN,))
            note(_ONE_OF_SEVERAL)
        self.go_on()
        return batch, shapes, tokens

    @property
    def is_of_ended_step(self) -> bool:
        """Whether the running batch is the model's arguments, and was fetched for the step that ended last."""
        return self.batch is not None and not self.is_fetched and self._had_fetched and not self._fetched


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a forward in their shortest form: the only one, the positional, the named, or both kinds."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return kwargs if not args else (args, kwargs)
