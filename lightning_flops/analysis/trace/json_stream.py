"""Trace JSON read as a stream: a block of text in memory at a time, whatever the size of the file.

The decoder that is handed in decodes all events that stand whole in a block. Where it cannot, ``json`` of the standard
library reads on value by value, and says what is wrong. Values beside the events that nobody needs are skipped. If such
a value fits into a block, it is decoded and dropped. Of a longer one only the end is searched, block by block, in one
pass, however deeply it is nested.

No library reads such a text both fast and in little memory: ijson, which does the second, takes several times as long
as msgspec (benchmarks/results/traces.md).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Container, Iterator
from typing import IO, Any, NoReturn

import numpy as np

BLOCK_BYTES = 1 << 17
"""How much of the file is read at once; not much more is decoded at once.

What is made of it should stay in a processor's second cache, and larger blocks are returned to the system each time.
"""

VALUE_LIMIT = 4 << 20
"""Most characters of one event, one key, or one value beside the events that is asked for.

torch writes the shapes of every input of an operator that updates thousands of parameters into one event: some 100 KB.
What a value is made of in memory can take 34 times its text (``{"":0},`` over and over).
"""

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"[-+.0-9eE]*")
_SHOWN_CHARS = 40
_EVENTS_KEY = "traceEvents"
_NO_TRACE = "no trace of torch.profiler"

_LEVEL = np.zeros(256, dtype=np.int8)
_LEVEL[[ord("["), ord("{")]] = 1
_LEVEL[[ord("]"), ord("}")]] = -1


class StreamError(ValueError):
    """The text is not the JSON of a trace; the message says what is wrong and after how many characters."""


def event_batches(
    stream: IO[bytes],
    metadata: dict[str, Any],
    *,
    keys: Container[str],
    loads: Callable[[str], Any] | None,
    block_bytes: int = BLOCK_BYTES,
    value_limit: int = VALUE_LIMIT,
) -> Iterator[list[Any]]:
    """The events of a trace in order, a list at a time; what is asked for beside them is put into *metadata*.

    Two shapes are known: an object whose ``traceEvents`` is the list, and the bare list.

    Args:
        stream: the file's bytes, of which only ``read`` is asked: UTF-8, or UTF-16 or -32 as JSON is told from these.
            A byte that is neither becomes the replacement character.
        metadata: filled with the object's other keys, some of which stand behind the events.
        keys: those that are asked for.
        loads: decodes a JSON list from text; None for the standard library alone.
        block_bytes: how many bytes to read at once.
        value_limit: most characters of an event, a key or a value that is asked for.

    Raises:
        StreamError: not JSON, cut off, neither of the two shapes, or something in it is longer than *value_limit*.
    """
    text = _Text(stream, block_bytes, value_limit)
    opening = text.peek()
    if opening == "":
        raise StreamError("the file is empty")
    if opening == "[":
        yield from text.list_batches(loads)
    elif opening == "{":
        text.take()
        found = False
        while text.next_member("}"):
            key = text.value()
            if not isinstance(key, str):
                text.fail("a name in quotes must come here")
            text.expect(":")
            if key == _EVENTS_KEY and text.peek() == "[":
                if found:
                    text.fail(f'"{_EVENTS_KEY}" stands here a second time')
                found = True
                yield from text.list_batches(loads)
            elif key in keys:
                metadata[key] = text.value()
            else:
                text.pass_over()
        if not found:
            raise StreamError(f'a JSON object without a list "{_EVENTS_KEY}"')
    else:
        raise StreamError(f"a trace begins with {{ or [, not with {opening!r}")
    if text.peek() != "":
        text.fail("nothing may follow the end of the trace")


class _Text:
    """A position in a text; only a window of the text is in memory."""

    def __init__(self, stream: IO[bytes], block_bytes: int, value_limit: int) -> None:
        self._stream = stream
        self._block_bytes = block_bytes
        self._value_limit = value_limit
        self._decode: Callable[[bytes, bool], str] | None = None
        # strict=False: names of kernels and files may hold control characters that nobody escaped.
        self._scan = json.JSONDecoder(strict=False).raw_decode
        self._buffer = ""
        self._position = 0
        self._dropped = 0
        self._ended = False
        self._first = True

    def fail(self, message: str, *, what: str = "not valid JSON") -> NoReturn:
        at = self._dropped + self._position
        if self._ended and self._position >= len(self._buffer):
            raise StreamError(f"the file ends in the middle, after {at} characters: it was cut off or is still written")
        shown = self._buffer[self._position : self._position + _SHOWN_CHARS]
        raise StreamError(f"{what} after {at} characters, at {shown!r}: {message}")

    def _read(self, size: int) -> None:
        """Drop what was consumed and read on."""
        self._buffer = self._buffer[self._position :]
        self._dropped += self._position
        self._position = 0
        block = self._stream.read(size)
        if self._decode is None:
            while 0 < len(block) < 4 and (more := self._stream.read(4 - len(block))):  # enough to tell the encoding
                block += more
            self._decode = codecs.getincrementaldecoder(json.detect_encoding(block))(errors="replace").decode
        self._ended = not block
        self._buffer += self._decode(block, self._ended)

    def peek(self) -> str:
        """The next character that is not space, not consumed; empty at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if self._ended:
                return ""
            self._read(self._block_bytes)

    def take(self) -> None:
        self._position += 1
        self._first = True

    def expect(self, character: str) -> None:
        if self.peek() != character:
            self.fail(f"{character} must come here")
        self._position += 1

    def next_member(self, closing: str) -> bool:
        """Whether another member follows; steps over the comma before it, or over *closing*."""
        found = self.peek()
        if found == closing:
            self._position += 1
            return False
        if not self._first:
            self.expect(",")
            self.peek()
        self._first = False
        return True

    def value(self) -> Any:
        """The JSON value that begins here."""
        self.peek()
        size = self._block_bytes
        while True:
            try:
                value, end = self._scan(self._buffer, self._position)
            except json.JSONDecodeError as error:
                self._fail_if_broken(error)
            except RecursionError:
                self.fail("values are nested too deeply", what=_NO_TRACE)
            except ValueError:  # Python refuses integers of thousands of digits
                self.fail("a whole number has too many digits", what=_NO_TRACE)
            else:
                if end < len(self._buffer) or self._ended:  # a number may go on in the next block
                    self._position = end
                    return value
            if len(self._buffer) - self._position > self._value_limit:
                self.fail(f"a value is longer than {self._value_limit:,} characters", what=_NO_TRACE)
            self._read(size)
            size *= 2  # a value larger than a block: not so many tries

    def _fail_if_broken(self, error: json.JSONDecodeError) -> None:
        """Return if *error* may only mean that the rest of the text is not read yet; raise otherwise."""
        unterminated = error.msg.startswith("Unterminated")
        if self._ended:
            self._position = error.pos if error.pos < len(self._buffer) and not unterminated else len(self._buffer)
            self.fail(error.msg)
        if error.pos < len(self._buffer) - 16 and not unterminated:
            # What is here is already wrong: reading on cannot help.
            self._position = error.pos
            self.fail(error.msg)

    def pass_over(self) -> None:
        """Go to the end of the JSON value that begins here: in one pass, and with a block of it in memory."""
        nested = self.peek() in ("[", "{", '"')
        while True:
            try:
                _, end = self._scan(self._buffer, self._position)
            except json.JSONDecodeError as error:
                self._fail_if_broken(error)
            except (
                RecursionError,
                ValueError,
            ):  # deeply nested, or a number of thousands of digits: not needed
                break
            else:
                if end < len(self._buffer) or self._ended:
                    self._position = end
                    return
            if nested or len(self._buffer) - self._position > self._value_limit:
                break
            self._read(self._block_bytes)
        if nested:
            self._pass_over_nested()
        else:
            self._pass_over_number()

    def _pass_over_number(self) -> None:
        while True:
            match = _NUMBER.match(self._buffer, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._buffer) or self._ended:
                return
            self._read(self._block_bytes)

    def _pass_over_nested(self) -> None:
        """The same for a text, list or object: only brackets outside of texts are counted."""
        level, inside = 0, False
        while True:
            held_back = 0
            piece = self._buffer[self._position :]
            if not self._ended and (len(piece) - len(piece.rstrip("\\"))) % 2:
                held_back = 1  # what it escapes is in the next block
            # One byte per character, so positions in the one are positions in the other.
            plain = piece[: len(piece) - held_back].encode("latin-1", errors="replace")
            plain = plain.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
            characters = np.frombuffer(plain, dtype=np.uint8)
            if len(characters):
                quotes = characters == ord('"')
                in_text = np.logical_xor.accumulate(quotes) ^ inside
                levels = level + np.cumsum(np.where(in_text, 0, _LEVEL[characters]), dtype=np.int64)
                ends = (levels == 0) & ~in_text
                if ends.any():
                    self._position += int(ends.argmax()) + 1
                    return
                level, inside = int(levels[-1]), bool(in_text[-1])
            self._position += len(characters)
            if self._ended:
                self.fail("it does not end")
            self._read(self._block_bytes)

    def list_batches(self, loads: Callable[[str], Any] | None) -> Iterator[list[Any]]:
        """The members of the list that begins here, a block at a time."""
        self.expect("[")
        self._first = True
        while True:
            if loads is not None and (batch := self._block(loads)) is not None:
                yield batch
                continue
            batch = []
            while True:
                if not self.next_member("]"):
                    self._first = False
                    if batch:
                        yield batch
                    return
                before = self._dropped
                batch.append(self.value())
                if self._dropped != before:
                    break  # another block was read
            yield batch

    def _block(self, loads: Callable[[str], Any]) -> list[Any] | None:
        """Whole members up to the last border in the buffer, or None to go on one by one.

        A border is a brace that closes followed by a comma. Inside an event such a pair may stand too, in a nested
        value or in a text; the piece before it is then no valid list, so a piece that decodes ends between members.
        """
        if len(self._buffer) - self._position < self._block_bytes // 2 and not self._ended:
            self._read(self._block_bytes)
        start = self._position
        if not self._first:
            if self.peek() != ",":
                return None
            start = self._position + 1
        end = len(self._buffer)
        for _ in range(8):
            end = self._buffer.rfind("}", start, end)
            if end < 0:
                return None
            follows = _SPACE.match(self._buffer, end + 1)
            after = follows.end() if follows else end + 1
            if self._buffer[after : after + 1] != ",":
                continue
            try:
                batch = loads(f"[{self._buffer[start : end + 1]}]")
            except (ValueError, RecursionError):
                continue
            self._position = end + 1
            self._first = False
            return batch if isinstance(batch, list) and batch else None
        return None
