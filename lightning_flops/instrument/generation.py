"""One call of a model's ``generate``: which of its forwards is the prefill, and how many tokens it makes.

Nothing here knows a library. We use what ``generate`` of Hugging Face's models does, and others like it: the first
forward takes the whole prompt, each one after it takes the latest token, and the output is the prompt made longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import nn

from lightning_flops.instrument.module_hooks import module_hooks
from lightning_flops.instrument.torch_private.compiler import COMPILED_CALL, IS_EAGER, eager_call, hide
from lightning_flops.schema.forward import NewTokens

StampT = TypeVar("StampT")


@dataclass(slots=True)
class _Calls:
    module: nn.Module | None = None
    number: int = 0
    before_second: int | None = None


class ModelCalls:
    """Hears, while it is entered, which of the root's modules are called from outside of any other.

    Args:
        root: the model. If its own forward is never called, as in a wrapper that hands ``generate`` on, the module with
            most calls from outside stands for it.
        flops_so_far: says how many FLOPs were counted until now.
    """

    def __init__(self, root: nn.Module, flops_so_far: Callable[[], int]) -> None:
        self._root = root
        self._own = {id(module) for module in root.modules()}
        self._flops_so_far = flops_so_far
        self._running: list[nn.Module] = []
        self._calls: dict[int, _Calls] = {}
        self._undo = ExitStack()

    def __enter__(self) -> ModelCalls:
        """Puts up the hooks."""
        self._undo.enter_context(module_hooks(self._on_enter, self._on_leave))
        return self

    def __exit__(self, *exc: object) -> None:
        """Removes the hooks."""
        self._undo.close()

    @property
    def number(self) -> int:
        """How often the model was called."""
        return self._of_model().number

    @property
    def model(self) -> nn.Module | None:
        """What was called: the root, or what stands for it; None if nothing was."""
        return self._of_model().module

    @property
    def flops_before_second(self) -> int | None:
        """FLOPs that were counted until the model was called for the second time; None if it was not."""
        return self._of_model().before_second

    def _of_model(self) -> _Calls:
        calls = self._calls.get(id(self._root))
        if calls is None:  # of those with equally many, the one that was called first last: what is before it prepares
            calls = max(reversed(self._calls.values()), key=lambda one: one.number, default=_Calls())
        return calls

    def _on_enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._own:
            return
        if not self._running:
            calls = self._calls.setdefault(id(module), _Calls(module))
            calls.number += 1
            if calls.number == 2:
                calls.before_second = self._flops_so_far()
        self._running.append(module)

    def _on_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for depth in reversed(range(len(self._running))):
            if self._running[depth] is module:
                del self._running[depth:]
                return


class SecondCall(Generic[StampT]):
    """Notes, while it is entered, when a module is called for the second time; nothing else listens to it.

    Args:
        module: the module; None: nothing is noted.
        stamp: takes a stamp of the moment.
    """

    def __init__(self, module: nn.Module | None, stamp: Callable[[], StampT]) -> None:
        self.number = 0
        """How often the module was called."""
        self.at: StampT | None = None
        """When the second call began; None if there was none."""
        self._attributes = {} if module is None else vars(module)
        self._before = self._attributes.get(COMPILED_CALL)
        self._call = None if module is None else self._before or eager_call(module)
        self._stamp = stamp

    def __enter__(self) -> SecondCall[StampT]:
        """Wraps the module's calls: ``module.compile()`` sets the same attribute, so no pickle or copy has it."""
        if self._call is not None:
            self._attributes[COMPILED_CALL] = self._noting(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        """Removes the wrapper."""
        if self._before is not None:
            self._attributes[COMPILED_CALL] = self._before
        else:
            self._attributes.pop(COMPILED_CALL, None)

    def _noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            if self.number == 2:
                self.at = self._stamp()
            return call(*args, **kwargs)

        hide(run, alone=True)  # torch.compile(model) calls the model so, and would compile this
        hide(self._stamp)
        setattr(run, IS_EAGER, self._before is None)
        return run


def new_tokens(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> NewTokens | str:
    """The tokens in *output* that are not in the input; in words, why that cannot be told.

    Args:
        model: what generated.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        output: what the call returned.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "the output of an encoder and decoder does not begin with the input"
    prompt = args[0] if args else next((kwargs[name] for name in ("input_ids", "inputs") if name in kwargs), None)
    made = getattr(output, "sequences", output)
    if not _holds_tokens(prompt):
        return "the input is no table of token ids"
    if not _holds_tokens(made):
        return "the output is no table of token ids"
    rows, length = prompt.shape
    if made.shape[0] == 0 or rows == 0 or made.shape[0] % rows or made.shape[1] < length:
        return "the output is not the input made longer"
    begins = prompt.to(made.device, made.dtype).repeat_interleave(made.shape[0] // rows, dim=0)
    if not torch.equal(made[:, :length], begins):
        return "the output does not begin with the input"
    return NewTokens(prompt=rows * length, sequences=made.shape[0], each=made.shape[1] - length)


def _holds_tokens(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
    )


def searches_beams(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the call keeps several beams, of which the best may be shorter than the number of forwards."""
    config = kwargs.get("generation_config", getattr(model, "generation_config", None))
    beams = kwargs.get("num_beams", getattr(config, "num_beams", 1))
    return isinstance(beams, int) and beams > 1
