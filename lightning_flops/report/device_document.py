"""Memory and the traced step of a profile as sections of a document."""

from __future__ import annotations

from lightning_flops.report.document import Column, Figure, Item, Section, table
from lightning_flops.schema.profile import Profile
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, duration, plural, si

_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "optimizer"}


def memory_section(profile: Profile) -> Section | None:
    """What each phase holds, and what it is for; None if memory was not looked at."""
    memory = profile.memory
    if memory is None:
        return None
    on_device, trains = memory.kind == "allocated", profile.context.trains

    columns = [
        Column("", lambda held: _PHASES[held[0]], str),
        Column(f"{memory.kind} at its end", lambda held: si(held[1], "B"), str),
    ]
    figures = {f"peak {memory.kind}, of this process so far": si(memory.run_peak_bytes, "B")}
    if on_device:
        figures["peak reserved, of this process so far"] = si(memory.run_reserved_peak_bytes, "B")
    figures["parameters on this rank"] = si(memory.parameter_bytes, "B")
    if profile.parameter_bytes:
        figures["parameters of the model"] = bytes_by_dtype(profile.parameter_bytes)
    figures["buffers"] = si(memory.buffer_bytes, "B")
    if trains:
        figures["gradients"] = _or_why_not(memory.gradient_bytes, "on no parameter, as under ZeRO")
        figures["optimizer states"] = _or_why_not(memory.optimizer_bytes, "not where torch's optimizers keep them")
        figures["activations that a forward keeps, with its outputs"] = _or_why_not(
            memory.kept_by_forward_bytes, "Memory by module has it, with profile_memory"
        )
    about = (
        "Bytes on the device, as its caching allocator counts them."
        if on_device
        else "Bytes of this process on the host, all of it."
    )
    items: list[Item] = [
        table(tuple(memory.held_bytes.items()), columns, whole=True),
        *(Figure(label, value) for label, value in figures.items()),
    ]
    return Section(f"Memory of this rank in the counted {'step' if trains else 'batch'}", about, items)


def _or_why_not(value: float | None, reason: str) -> str:
    return f"{NOT_AVAILABLE} ({reason})" if value is None else si(value, "B")


def traced_section(profile: Profile) -> Section | None:
    """What was traced, and where all of its tables are; None if no step was traced."""
    traced, word = profile.traced, profile.context.step_word
    if traced is None or traced.tables is None:
        return None
    wall_sec = traced.tables.step_times.mean.wall_us * 1e-6
    about = (
        f"{traced.named(word).capitalize()} ran under torch.profiler, apart from the counted and the timed "
        f"{plural(word, 2)}, in {duration(wall_sec)} each."
    )
    if traced.steps > 1:
        about += " Times of modules and operators are medians over them."
    if not traced.like_counted:
        about += (
            " Its batch shapes, or its numbers of forwards, backwards and updates, are not the counted step's: FLOP/s "
            "of modules and operators are estimates, by the elements of the batches."
        )
    return Section(f"Traced {word}", about, [f"Every table: lightning-flops trace {file}" for file in traced.files])
