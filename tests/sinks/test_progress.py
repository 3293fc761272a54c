"""The line that says how far long work is."""

from __future__ import annotations

import io

from lightning_flops.sinks.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_shows_the_latest_words_and_nothing_in_the_end() -> None:
    terminal, clock = Terminal(), Clock()
    line = ProgressLine(terminal, clock=clock)
    line("too early")
    clock.now = 1.0
    line("reading: 10 MB")
    clock.now = 1.1
    line("too soon")
    clock.now = 1.2
    line("done: 9")
    line.end()
    assert terminal.getvalue() == "\rreading: 10 MB\rdone: 9       \r       \r"


def test_names_of_files_cannot_move_the_cursor() -> None:
    terminal, clock = Terminal(), Clock()
    line = ProgressLine(terminal, clock=clock)
    clock.now = 1.0
    line("a\x1b[2Jb" + "x" * 200)
    assert terminal.getvalue() == "\r" + ("a\\x1b[2Jb" + "x" * 200)[:79]


def test_what_is_no_terminal_and_quick_work_show_nothing() -> None:
    file, terminal, clock = io.StringIO(), Terminal(), Clock()
    for stream in (file, terminal):
        line = ProgressLine(stream, clock=clock)
        clock.now += 5.0 if stream is file else 0.5
        line("words")
        line.end()
    assert (file.getvalue(), terminal.getvalue()) == ("", "")
