"""Services that reports go to in the middle of training, and that may be down; and TensorBoard's own event files."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, Final

from lightning_flops import host_clock
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

PLUGIN: Final = "lightning_flops"  # name of the tab's data in event files, and of its addresses in TensorBoard's server

# Where a service that has this name keeps what it writes to.
_WRITTEN_TO: Final = {
    "log_metrics": "experiment",  # Lightning's loggers
    "write_events": "summary_writer",  # DeepSpeed's monitors
    "store_init_configuration": "tracker",  # accelerate's trackers
    "tb_writer": "tb_writer",  # TensorBoard's callback of transformers
}


class Services:
    """Gives scalars and texts to every service, each of which takes what it can; imports none of their packages.

    A service is a logger of Lightning's, a monitor of DeepSpeed's, TensorBoard's ``SummaryWriter`` or what has
    ``add_scalar`` as that has, a tracker of accelerate's, or a function of a dict of scalars and a step, as
    ``wandb.log``. One that raises costs one warning, however often it does, and keeps nothing from the others.
    """

    def __init__(self, services: Iterable[Any]) -> None:
        self._services = tuple(services)
        self._refused: set[int] = set()
        self.now = 0  # where the run itself is on its x-axis

    @property
    def has_board(self) -> bool:
        """Whether TensorBoard is one of them, as far as that can be said without opening anything."""
        return self._each(_is_board)

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write all *scalars* at *step* of the run's own x-axis, in one call per service.

        The run may be further on by *now*: W&B, which drops what is behind, has them there.
        """
        self._each(lambda one: _write_scalars(one, scalars, step, max(step, self.now)))

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Show *text*, which is Markdown, wherever a text can be shown; returns whether any service took it."""
        return self._each(lambda service: _write_text(service, tag, text, step))

    def folder(self) -> str | None:
        """The local folder of the first service that has one."""
        found: list[str] = []
        self._each(lambda service: found.extend(_folders(service)))
        return next(iter(found), None)

    def close(self) -> None:
        """Close the files that were made here; those of the user are left open."""
        self._each(lambda service: service.close() if isinstance(service, TensorBoardFiles) else None)

    def _each(self, ask: Callable[[Any], Any]) -> bool:
        """Call *ask* with every service; whether any call returned True."""
        taken = False
        for service in self._services:
            try:
                taken |= ask(service) is True
            except Exception as error:  # of the user's, in the middle of training: whatever it raises stays here
                words = words_of(error)
                ours = isinstance(service, TensorBoardFiles) and isinstance(error, OSError)
                if id(service) not in self._refused and not ours:  # our own files, in the same folder, have said so
                    self._refused.add(id(service))
                    name = _kinds(service)[0]
                    logger.warning("%s did not take the FLOPs report, the others did not notice: %s", name, words)
        return taken


class TrainerLog(Services):
    """What watches the training of a transformers Trainer: its integrations with TensorBoard, W&B and others.

    They get our scalars in a call of their own, behind each log of the Trainer's: so ours are neither on the console
    nor in ``trainer_state.json``. We do not call ``Trainer.log``, which may be more than writing: TRL's averages its
    metrics there and starts anew. Texts go to TensorBoard's callback.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        super().__init__(callbacks)
        self._waiting: dict[int, dict[str, float]] = {}

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Keep *scalars* of *step* until the Trainer has logged."""
        finite = {tag: float(value) for tag, value in scalars.items() if math.isfinite(value)}
        self._waiting.setdefault(step, {}).update(finite)

    def log_ends(self, arguments: Any, state: Any, control: Any) -> None:
        """The Trainer has logged: its integrations log what waits, each at its own step, as if that were its *state*'s.

        *arguments*, *state* and *control* are those of the Trainer's event.
        """
        waiting, self._waiting = self._waiting, {}
        for step, scalars in sorted(waiting.items()):
            there = copy.copy(state)
            there.global_step = step
            self._each(functools.partial(_log_in, event=(arguments, there, control), scalars=scalars))


class TensorBoardFiles:
    """TensorBoard's files in one folder, made when there is something to write.

    They are written here, and not by the thread of torch's ``SummaryWriter``, which would print what it raises. After
    the first error nothing more is tried: a record that is there in part ends the file for its readers.
    """

    def __init__(self, folder: str) -> None:
        self.log_dir = folder
        self._file: Any = None
        self._error: OSError | None = None

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write one number."""
        self._write("scalar", tag, value, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Write one text, which TensorBoard reads as Markdown."""
        self._write("text", tag, text, step)

    def _write(self, kind: str, tag: str, value: Any, step: int) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)
        summary = getattr(importlib.import_module("torch.utils.tensorboard.summary"), kind)(tag, value)
        try:
            if self._file is None:  # in a folder that is a path or a URL that TensorBoard opens
                files = importlib.import_module("tensorboard.compat").tf.io.gfile
                files.makedirs(self.log_dir)
                self._file = _records(files.GFile(f"{self.log_dir.rstrip('/')}/{event_file_name(0)}", "wb"))
            self._file.write(event(step=step, summary=summary))
        except OSError as error:
            self._error = error
            raise

    def flush(self) -> None:
        """Let TensorBoard see what was written."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the files, if any were made."""
        if self._file is not None:
            self._file.close()


def _log_in(callback: Any, event: tuple[Any, ...], scalars: Mapping[str, float]) -> None:
    if any(kind.__module__.startswith("transformers.integrations") for kind in type(callback).__mro__):
        callback.on_log(*event, logs=dict(scalars))


def monitors_in(master: Any, *, tensorboard_dir: str | None) -> Services:
    """The monitors of an engine, which DeepSpeed's *master* has as attributes, and files in *tensorboard_dir*."""
    monitors = [one for one in vars(master).values() if callable(getattr(one, "write_events", None))]
    return Services(monitors if tensorboard_dir is None else [*monitors, TensorBoardFiles(tensorboard_dir)])


def is_writer(value: object) -> bool:
    """Whether *value* is something to write to."""
    return callable(getattr(value, "add_scalar", None)) or hasattr(value, "store_init_configuration") or callable(value)


def _write_scalars(service: Any, scalars: Mapping[str, float], step: int, now: int) -> None:
    scalars = dict(scalars)  # some change it in place
    if not {"WandbMonitor", "WandBTracker"}.isdisjoint(_kinds(service)):
        step = now
    if callable(log := getattr(service, "log_metrics", None)):
        # By name, as Lightning's own call has it: a logger of the user's need not take it in any other way.
        log(metrics=scalars, step=step)
    elif callable(write := getattr(service, "write_events", None)):
        write([(tag, value, step) for tag, value in scalars.items()])
    elif callable(add_scalar := getattr(service, "add_scalar", None)):
        for tag, value in scalars.items():
            add_scalar(tag, value, step)
        if callable(flush := getattr(service, "flush", None)):
            flush()
    elif hasattr(service, "store_init_configuration"):
        service.log(scalars, step=step)
    else:
        service(scalars, now)  # it may be ``wandb.log``


def _write_text(service: Any, tag: str, text: str, step: int) -> bool:
    writer = _written_to(service)
    # Asked of the class: the experiment of a DummyLogger, and of every rank but the first, answers to any name.
    if callable(getattr(type(writer), "add_text", None)):
        writer.add_text(tag, text, step)
        if callable(getattr(type(writer), "flush", None)):
            writer.flush()  # so that it shows at once
        return True
    return False


def _is_board(service: Any) -> bool:
    if hasattr(service, "log_metrics"):  # known by its name: an experiment that is asked for is made
        return "TensorBoardLogger" in _kinds(service)
    return hasattr(type(_written_to(service)), "add_text")


def _written_to(service: Any) -> Any:
    """What takes the texts of *service*, if anything does: itself, or what it writes to."""
    attribute = next((kept_as for name, kept_as in _WRITTEN_TO.items() if hasattr(service, name)), None)
    return service if attribute is None else getattr(service, attribute, None)


def _folders(service: Any) -> list[str]:
    places = [service] if hasattr(service, "log_metrics") else [service, _written_to(service)]
    folders = (getattr(place, "log_dir", None) for place in places)
    return [str(one) for one in folders if isinstance(one, (str, PurePath)) and str(one)]  # of a mock all is something


def _kinds(service: Any) -> list[str]:
    return [kind.__name__ for kind in type(service).__mro__]


# ---- event files, and what TensorBoard's tab "FLOPs" shows: one window of a run in a file of its own


def tab_events(*, tag: str, figures: bytes, packed: bytes, step: int) -> bytes:
    """The content of an event file; an ImportError without TensorBoard.

    The *tag* is of this window alone: TensorBoard keeps only some steps of a tag, and all tags. *figures* are JSON of
    a few of the window's, which TensorBoard knows without reading the profile: *packed*, JSON compressed by gzip.
    """
    # The training thread may import the same at this moment, for its writer: two orders of import would deadlock.
    torchs = importlib.import_module("torch.utils.tensorboard.summary")
    plugin = torchs.SummaryMetadata.PluginData(plugin_name=PLUGIN, content=figures)
    metadata = torchs.SummaryMetadata(plugin_data=plugin, data_class="DATA_CLASS_TENSOR")
    tensor = torchs.TensorProto(dtype="DT_STRING", string_val=[packed])
    summary = torchs.Summary(value=[torchs.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
    file = io.BytesIO()
    _records(file).write(event(step=step, summary=summary))
    return file.getvalue()


def event(**content: Any) -> bytes:
    """One event of a TensorBoard event file, as bytes, with the wall clock of now and this *content*."""
    kind = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
    return bytes(kind(wall_time=host_clock.wall_sec(), **content).SerializeToString())


def _records(file: Any) -> Any:
    """What writes events to *file*; the first says what the others are."""
    writer = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter(file)
    writer.write(event(file_version="brain.Event:2"))
    return writer


def event_file_name(number: int) -> str:
    """A name that no other program uses: TensorBoard reads a folder's event files in the order of their names."""
    return f"events.out.tfevents.{int(host_clock.wall_sec()):010d}.{number:06d}.{secrets.token_hex(4)}"
