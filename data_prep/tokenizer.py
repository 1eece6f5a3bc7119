"""Text to token ids and back, without loss: a SentencePiece model with byte fallback.

Every text that UTF-8 can hold round-trips. Three choices make that so:

  * the model normalises nothing (identity rule, no dummy prefix, white space kept), and what it
    has no piece for becomes byte pieces <0x00> .. <0xFF>;
  * ids are decoded here from a table of bytes per piece, because SentencePiece's own decoder cannot
    tell its space marker U+2581 from a real U+2581 in the text;
  * for the same reason U+2581 is cut out before encoding and written as its three bytes.

Newlines, runs of spaces and ends of lines such as "):" plus newline are learned like any other
piece, so source code costs few tokens. Tabs cannot be learned (SentencePiece reserves that
character while it trains), hence runs of one to four are given to every model. Digits stay single:
a number is spelled the same way wherever it stands, so it can be copied token by token.

A model trained elsewhere is taken too if it has byte fallback; where it normalises text or adds a
prefix, that is switched off, since a data set must be its corpus to the byte.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece

SPACE_MARKER = "\u2581"
TAB_RUNS = ["\t" * n for n in (1, 2, 3, 4)]
# Longer texts are encoded in cuts: a quarter faster than by 65536 characters, in bounded memory,
# for 0.1 % more tokens (8000 pieces, English books).
ENCODE_CHARS = 1 << 11
# Texts are trained on in cuts of this length, so that a long one is sampled in all its parts.
TRAIN_CHARS = 4096
SAMPLE_BYTES = 64 << 20
ModelType = Literal["bpe", "unigram"]
# What breaks in a model that normalises, adds a prefix or squeezes white space.
ROUND_TRIP_PROBE = (
    " a  b\n\n\n\tc\r\n\u2581 \u2581\ufb01 e\u0301\u3000\x00\x7f<s></s><0x41>\U0001f600 "
)


class Tokenizer:
    """A trained tokenizer. Safe to pickle; holds nothing but the model's bytes and a table."""

    def __init__(self, model: bytes, origin: str = "tokenizer") -> None:
        """`model`: content of a SentencePiece .model file; `origin` names it in errors.

        Raises ValueError if the model cannot represent every text exactly.
        """
        self.model = model
        self.origin = origin
        try:
            self._take(model)
            if self.decode(self.encode(ROUND_TRIP_PROBE)) != ROUND_TRIP_PROBE:
                self._take(_without_normalisation(model))
        except RuntimeError:
            raise ValueError(
                f"{origin} is not a tokenizer: got {len(model)} bytes that SentencePiece cannot "
                "read; expected a .model file; train one with `python -m data_prep tokenizer`"
            ) from None
        self.sha256 = hashlib.sha256(model).hexdigest()
        byte_pieces = sum(self._processor.is_byte(i) for i in range(self.vocab_size))
        if byte_pieces != 256 or self.bos_id < 0 or self.eos_id < 0:
            raise ValueError(
                f"{origin} does not fit: got {byte_pieces} byte pieces, bos id {self.bos_id}, eos "
                f"id {self.eos_id}; expected byte fallback (256 pieces) and both ids; train it "
                "with `python -m data_prep tokenizer`"
            )
        if self.decode(self.encode(ROUND_TRIP_PROBE)) != ROUND_TRIP_PROBE:
            raise ValueError(
                f"{origin} changes text: decoding does not give back what was encoded; expected a "
                "model that loses nothing; train it with `python -m data_prep tokenizer`"
            )

    def _take(self, model: bytes) -> None:
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(model)
        self._processor = processor
        self.vocab_size: int = processor.vocab_size()
        self.bos_id: int = processor.bos_id()
        self.eos_id: int = processor.eos_id()
        self._pieces = _bytes_of_pieces(processor)
        # [vocab_size] int64: UTF-8 bytes of text that each id stands for; 0 for bos, eos and unk.
        self.token_bytes = np.array([len(piece) for piece in self._pieces], np.int64)
        self._marker_ids = [
            processor.piece_to_id(f"<0x{b:02X}>") for b in SPACE_MARKER.encode("utf-8")
        ]

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a .model file. Raises FileNotFoundError or ValueError, naming the file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"tokenizer {path} does not exist: expected a .model file; train one with "
                "`python -m data_prep tokenizer`"
            )
        return cls(path.read_bytes(), origin=str(path))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes, str]]:
        return Tokenizer, (self.model, self.origin)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without bos and eos. Raises ValueError on lone surrogates."""
        return [i for part in self._encode_parts(text) for i in part]

    def encode_document(self, parts: Iterable[str], dtype: np.dtype) -> Iterator[np.ndarray]:
        """[bos] + encode(the parts joined) + [eos] in consecutive arrays: how a document is stored.

        Memory stays at one part, however long the document.
        """
        yield np.array([self.bos_id], dtype)
        marker = np.array(self._marker_ids, dtype)
        for cut in _cuts(parts, ENCODE_CHARS):
            for n, part in enumerate(cut.split(SPACE_MARKER)):
                if n > 0:
                    yield marker
                if part:
                    yield self._processor.encode_as_numpy(part).astype(dtype)
        yield np.array([self.eos_id], dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; exact inverse of `encode`. bos, eos and unk are silent.

        Ids that a model made up may spell broken UTF-8: U+FFFD stands in. Raises ValueError on an
        id outside the vocabulary.
        """
        pieces = []
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"token id out of range: got {i}; expected 0 to {self.vocab_size - 1}"
                )
            pieces.append(self._pieces[i])
        return b"".join(pieces).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        """The name of an id in the vocabulary, such as "<s>" or "<0x41>"."""
        return self._processor.id_to_piece(token)

    def is_byte(self, token: int) -> bool:
        """Whether the id is one of the 256 that stand for a single byte."""
        return bool(self._processor.is_byte(token))

    def piece_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes, maybe not whole characters, that an id stands for."""
        return self._pieces[token]

    def _encode_parts(self, text: str) -> Iterator[list[int]]:
        try:
            for cut in _cuts([text], ENCODE_CHARS):
                for n, part in enumerate(cut.split(SPACE_MARKER)):
                    if n > 0:
                        yield self._marker_ids
                    if part:
                        yield self._processor.encode(part.encode("utf-8"))
        except UnicodeEncodeError as error:
            surrogate = ord(error.object[error.start])
            raise ValueError(
                f"text is not valid Unicode: got a lone surrogate U+{surrogate:04X}; expected text "
                "that UTF-8 can hold"
            ) from None


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    model_type: ModelType = "bpe",
    sample_bytes: int = SAMPLE_BYTES,
    seed: int = 0,
) -> bytes:
    """Learn a vocabulary of `vocab_size` pieces; returns the content of a .model file.

    Ids: 0 unk, 1 bos, 2 eos, then tab runs, 256 bytes, learned pieces. All of `texts` is read
    once; a sample of at most `sample_bytes` (UTF-8) drawn by `seed` is kept and trained on, which
    bounds memory: about 10 times the sample for bpe, 25 times for unigram. The same texts in the
    same order and the same settings give the same bytes.

    Raises ValueError: no text, or too little or too varied text for vocab_size.
    """
    if vocab_size < 1:
        raise ValueError(
            f"vocab-size is too small: got {vocab_size}; expected more than "
            f"{3 + len(TAB_RUNS) + 256} (bytes, "
            "special pieces and runs of tabs); raise it"
        )
    sample = _sample((cut for text in texts for cut in _training_cuts(text)), sample_bytes, seed)
    if not sample:
        raise ValueError(
            "no text to train the tokenizer on: got no readable document that is not empty; "
            "expected UTF-8 text; check the inputs"
        )
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=out,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=TAB_RUNS,
            character_coverage=0.9995,
            max_sentence_length=TRAIN_CHARS * 4,  # a UTF-8 character has at most four bytes
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # kept in the model file, which must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(_training_error(str(error), vocab_size)) from None
    return out.getvalue()


def _cuts(parts: Iterable[str], size: int) -> Iterator[str]:
    """The text of the parts in pieces of at most `size` characters, however it was parted.

    Cut after the last newline that fits, else before the last space, else anywhere.
    """
    rest = ""
    for part in parts:
        text = rest + part if rest else part
        start = 0
        while len(text) - start > size:
            end = text.rfind("\n", start, start + size) + 1
            if end <= start:
                end = text.rfind(" ", start + 1, start + size)
            if end <= start:
                end = start + size
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _training_cuts(text: str) -> Iterator[str]:
    for cut in _cuts([text], TRAIN_CHARS):
        # The encoder never shows these characters to the model; tabs are pieces already.
        for part in re.split(f"[{SPACE_MARKER}\t\x00]", cut):
            if part:
                yield part


def _sample(cuts: Iterable[str], sample_bytes: int, seed: int) -> list[str]:
    """A uniform sample without replacement: the cuts with the smallest random keys that fit."""
    keys = random.Random(seed)
    heap: list[tuple[float, int, str]] = []  # largest key first
    kept_bytes = 0
    for position, cut in enumerate(cuts):
        heapq.heappush(heap, (-keys.random(), position, cut))
        kept_bytes += len(cut.encode("utf-8"))
        while kept_bytes > sample_bytes and len(heap) > 1:
            kept_bytes -= len(heapq.heappop(heap)[2].encode("utf-8"))
    return [cut for _, _, cut in sorted(heap, key=lambda entry: entry[1])]


def _bytes_of_pieces(processor: sentencepiece.SentencePieceProcessor) -> list[bytes]:
    table = []
    for i in range(processor.vocab_size()):
        piece = processor.id_to_piece(i)
        if processor.is_byte(i):
            table.append(bytes([int(piece[3:5], 16)]))
        elif processor.is_control(i) or processor.is_unknown(i):
            table.append(b"")
        else:
            table.append(piece.replace(SPACE_MARKER, " ").encode("utf-8"))
    return table


def _without_normalisation(model: bytes) -> bytes:
    """The same vocabulary in a model that takes text as it is."""
    from sentencepiece import sentencepiece_model_pb2

    schema: Any = sentencepiece_model_pb2  # its classes are made at run time
    proto = schema.ModelProto.FromString(model)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.precompiled_charsmap = b""
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    return proto.SerializeToString()


def _training_error(message: str, vocab_size: int) -> str:
    """SentencePiece's complaint about the vocabulary's size in one line."""
    if too_high := re.search(r"value <= (\d+)", message):
        return (
            f"vocab-size is too large for this text: got {vocab_size}; expected at most "
            f"{too_high[1]}; lower it or give more text"
        )
    if too_low := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"vocab-size is too small for this text: got {vocab_size}; expected more than "
            f"{too_low[1]} (bytes, special pieces and the characters in use); raise it"
        )
    return f"tokenizer training failed with vocab-size {vocab_size}: {' '.join(message.split())}"
