"""A JSON object on a line too long to hold: one string field of it, handed out in parts.

json.loads needs several times the size of a line; here memory stays at a few blocks whatever the
length. Only the shape of what surrounds the field is checked, not every number in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

# As far as the closing quote, or the end of what has been read.
_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]*")
_BRACKETS = re.compile(rb'["\[\]{}]')
_BLANKS = re.compile(rb"[ \t\r\n]*")
# A surrogate pair, the longest thing that must not be cut, is written with 12 bytes.
_LONGEST_ESCAPE = 12
_LONGEST_ID = 1 << 10


class NotJson(ValueError):
    """The line is no JSON object."""


class LongObject:
    """One object, read once: `text_parts` first, then `id`.

    Args:
        blocks: the bytes of the line, in order.
        text_field: the string field to hand out.
        id_field: a field whose value is kept in `id`, a string or a number; None for none.
    """

    def __init__(self, blocks: Iterator[bytes], text_field: str, id_field: str | None) -> None:
        self._blocks = blocks
        self._data = b""
        self._at = 0
        self._text_field = text_field
        self._id_field = id_field
        self.id: str | None = None
        self.found = False
        """Whether there was a string under text_field."""

    def text_parts(self) -> Iterator[str]:
        """The field's text in parts. NotJson or UnicodeDecodeError where the line is damaged."""
        self._expect(b"{")
        if self._peek() == b"}":
            self._at += 1
        else:
            while True:
                self._expect(b'"')
                key = "".join(self._string())
                self._expect(b":")
                yield from self._value(key)
                if self._peek() != b",":
                    break
                self._at += 1
            self._expect(b"}")
        if self._peek():
            raise NotJson("something after the object")

    def _value(self, key: str) -> Iterator[str]:
        first = self._peek()
        if first == b'"':
            self._at += 1
            if key == self._text_field and not self.found:
                self.found = True
                yield from self._string()
            elif key == self._id_field:
                self.id = "".join(self._string())[:_LONGEST_ID]
            else:
                for _ in self._string():
                    pass
        elif first in (b"{", b"["):
            self._skip_nested()
        else:
            scalar = self._scalar()
            if key == self._id_field:
                self.id = scalar

    def _string(self) -> Iterator[str]:
        """The string whose opening quote has been read, to after its closing one."""
        while True:
            match = _STRING.match(self._data, self._at)
            assert match is not None  # it matches nothing at all, too
            piece, end = match[0], match.end()
            if self._data[end : end + 1] == b'"':
                self._at = end + 1
                yield json.loads(b'"' + piece + b'"')
                return
            text, used = _longest(piece)
            self._at += used
            if text:
                yield text
            if not self._fill():
                raise NotJson("a string without an end")

    def _skip_nested(self) -> None:
        depth = 0
        while True:
            match = _BRACKETS.search(self._data, self._at)
            if match is None:
                self._at = len(self._data)
                if not self._fill():
                    raise NotJson("a bracket without its partner")
                continue
            self._at = match.end()
            if match[0] == b'"':
                for _ in self._string():
                    pass
            else:
                depth += 1 if match[0] in b"{[" else -1
                if depth == 0:
                    return

    def _scalar(self) -> str:
        while True:
            match = _SCALAR.match(self._data, self._at)
            assert match is not None
            if match.end() == len(self._data) and len(match[0]) < _LONGEST_ID and self._fill():
                continue
            self._at = match.end()
            json.loads(match[0])  # ValueError where it is no number and no constant
            return match[0].decode("ascii")

    def _peek(self) -> bytes:
        """The next byte that is not blank; b"" at the end."""
        while True:
            match = _BLANKS.match(self._data, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._data):
                return self._data[self._at : self._at + 1]
            if not self._fill():
                return b""

    def _expect(self, byte: bytes) -> None:
        if self._peek() != byte:
            raise NotJson(f"expected {byte!r}")
        self._at += 1

    def _fill(self) -> bool:
        """Put the next block behind what is not read yet; False at the end of the line."""
        block = next(self._blocks, b"")
        self._data = self._data[self._at :] + block
        self._at = 0
        return bool(block)


def _longest(piece: bytes) -> tuple[str, int]:
    """The text of all of a string's bytes but an escape or a character cut at their end."""
    error: ValueError = NotJson("empty")
    for length in range(len(piece), max(len(piece) - _LONGEST_ESCAPE, 0) - 1, -1):
        try:
            text = json.loads(b'"' + piece[:length] + b'"')
        except ValueError as cut:
            error = cut
            continue
        if not text or not "\ud800" <= text[-1] <= "\udbff":
            return text, length
    raise error
