"""Generation from text to text: pieces of text as they become certain, and stop texts."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from data_prep.tokenizer import Tokenizer
from models.generate import generate_stream
from models.language_model import LanguageModel


class TextRow:
    """The text of one row: token bytes become characters when they are whole, and characters are
    given out when no stop text can begin with them any more."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def add(self, piece: bytes, *, last: bool = False) -> str:
        """What can be given out after these bytes; up to a stop text if one is complete."""
        self._held += self._decoder.decode(piece, last)
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        kept = 0 if last else self._may_become_stop()
        given, self._held = (
            self._held[: len(self._held) - kept],
            self._held[len(self._held) - kept :],
        )
        return given

    def _may_become_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max((len(text) - 1 for text in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    stop: Sequence[str] = (),
    **settings: Any,
) -> Iterator[tuple[int, str]]:
    """Continues texts; each starts with bos and ends before eos or the first stop text.

    Args:
        stop: texts that end a row wherever they appear, also across tokens; not given out.
        settings: those of `generate_stream` but stop_ids and finished.

    Yields:
        (place in `prompts`, more of its continuation), never empty; characters whole.

    Raises:
        ValueError: an empty stop text, or what `generate_stream` refuses.
    """
    if "" in stop:
        raise ValueError("a stop text is empty; expected at least one character")
    rows = [TextRow(stop) for _ in prompts]
    tokens = generate_stream(
        model,
        [[tokenizer.bos_id, *tokenizer.encode(text)] for text in prompts],
        stop_ids=(tokenizer.eos_id,),
        finished=lambda row, _: rows[row].stopped,
        **settings,
    )
    for row, token in tokens:
        if text := rows[row].add(tokenizer.piece_bytes(token)):
            yield row, text
    for row, state in enumerate(rows):
        if not state.stopped and (text := state.add(b"", last=True)):
            yield row, text


def generate_text(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], **settings: Any
) -> list[str]:
    """The whole continuation of each text; arguments as for `stream_text`."""
    texts = [""] * len(prompts)
    for row, text in stream_text(model, tokenizer, prompts, **settings):
        texts[row] += text
    return texts
