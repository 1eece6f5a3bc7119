from __future__ import annotations

import hashlib
import io
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from data_prep import tokenizer as tokenizer_module
from data_prep.tokenizer import Tokenizer, train_tokenizer

FRAGMENTS = [
    *(chr(c) for c in range(0x20)),  # control characters, NUL, tab, newline, return
    *(" ", "  ", " " * 37, "\n\n\n", "\r\n", "\t" * 9, "\x7f", "\u00a0", "\u3000", "\u200b"),
    *("\u2581", "\u2581\u2581", " \u2581 ", "\u2585", "\u2047", "\ufffd", "\ufeff", "\ufb01"),
    *("e\u0301", "\u00e9", "\u0130", "\u4e2d\u6587", "\u05d0", "\U0001f600", "\U0001f468\u200d"),
    *("<s>", "</s>", "<unk>", "<0x41>", "def self", "return", "0", "12345", "https://"),
]


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(40)):
        kind = rng.random()
        if kind < 0.7:
            parts.append(rng.choice(FRAGMENTS))
        elif kind < 0.9:
            parts.append(chr(rng.randrange(0xD800)))
        else:
            parts.append(chr(rng.randrange(0xE000, 0x110000)))
    return "".join(parts)


def test_every_text_round_trips_and_its_bytes_are_counted(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for text in ["", *FRAGMENTS, *(random_text(rng) for _ in range(3000))]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode("utf-8"))
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_every_character_round_trips(tokenizer: Tokenizer) -> None:
    for first in range(0, 0x110000, 4096):
        text = "".join(chr(c) for c in range(first, first + 4096) if not 0xD800 <= c < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_text_is_encoded_in_cuts_without_loss(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "ENCODE_CHARS", 100)
    for text in ("x" * 1234, "one line\n" * 99, "\n" * 777, "ab\u2581" * 555):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_array_of_a_document_is_its_ids_between_bos_and_eos(tokenizer: Tokenizer) -> None:
    text = "import json\n\n\u2581"
    expected = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    for parts in ([text], text, [text[:5], "", text[5:]]):
        arrays = list(tokenizer.encode_document(parts, np.dtype("uint16")))
        assert {array.dtype for array in arrays} == {np.dtype("uint16")}
        assert np.concatenate(arrays).tolist() == expected


def test_a_document_in_parts_is_encoded_as_the_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "ENCODE_CHARS", 50)
    rng = random.Random(5)
    for _ in range(50):
        text = "".join(random_text(rng) for _ in range(20))
        cuts = sorted(rng.randrange(len(text)) for _ in range(9))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = np.concatenate(list(tokenizer.encode_document(parts, np.dtype("uint16"))))
        assert ids[1:-1].tolist() == tokenizer.encode(text)


def test_training_is_deterministic_and_bounded_by_its_sample(corpus: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.rglob("*.py"))]
    settings = {"vocab_size": 500, "sample_bytes": 60_000}
    first = train_tokenizer(texts, **settings, seed=3)
    assert train_tokenizer(iter(texts), **settings, seed=3) == first
    assert train_tokenizer(texts, **settings, seed=4) != first
    kept = tokenizer_module._sample(iter(["abcd"] * 1000), 400, seed=0)
    assert len(kept) == 100


def test_line_ends_and_indentation_are_learned(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("        ")) == 1
    assert len(tokenizer.encode(":\n")) == 1
    assert len(tokenizer.encode("\t\t\t\t")) == 1
    assert len(tokenizer.encode("1234567")) == 7


def test_source_code_costs_few_tokens(corpus: Path, tokenizer: Tokenizer) -> None:
    text = (corpus / "stdlib/json/decoder.py").read_text(encoding="utf-8")
    assert len(text.encode("utf-8")) / len(tokenizer.encode(text)) > 2.0


def test_ids_of_broken_utf8_decode_to_replacement_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f600")
    assert tokenizer.decode(ids[:-1]) == "\ufffd"
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == "\U0001f600"


def test_a_copy_by_pickle_encodes_alike(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.sha256 == tokenizer.sha256
    assert copy.encode("def f(x):\n") == tokenizer.encode("def f(x):\n")


def test_lone_surrogates_and_foreign_ids_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("a\ud800")
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"got {bad}; expected 0 to"):
            tokenizer.decode([bad])


def test_files_that_are_no_lossless_tokenizer_are_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.model does not exist"):
        Tokenizer.load(tmp_path / "nothing.model")
    (tmp_path / "text.model").write_text("not a model")
    with pytest.raises(ValueError, match=r"text\.model is not a tokenizer"):
        Tokenizer.load(tmp_path / "text.model")
    lines = (corpus / "stdlib/json/decoder.py").read_text(encoding="utf-8").splitlines()
    with pytest.raises(ValueError, match="0 byte pieces"):
        Tokenizer(foreign_model(lines, byte_fallback=False))


def foreign_model(lines: list[str], **options: object) -> bytes:
    """A model as others train it: SentencePiece's defaults."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=400, minloglevel=2, **options
    )
    return out.getvalue()


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_model_that_normalises_is_taken_without_its_normalisation(
    corpus: Path, model_type: str
) -> None:
    lines = (corpus / "stdlib/json/decoder.py").read_text(encoding="utf-8").splitlines()
    model = foreign_model(lines, byte_fallback=True, model_type=model_type)
    tokenizer = Tokenizer(model)
    assert tokenizer.sha256 == hashlib.sha256(model).hexdigest()
    rng = random.Random(2)
    for text in ["", *FRAGMENTS, *(random_text(rng) for _ in range(300))]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert processor.decode(processor.encode(" a  b\n")) != " a  b\n"


def test_a_unigram_vocabulary_round_trips_too(corpus: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.rglob("*.py"))]
    model = train_tokenizer(texts, 500, model_type="unigram", sample_bytes=60_000)
    assert train_tokenizer(texts, 500, model_type="unigram", sample_bytes=60_000) == model
    tokenizer = Tokenizer(model)
    rng = random.Random(4)
    for text in [*FRAGMENTS, *texts[:2], *(random_text(rng) for _ in range(300))]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(texts[0].encode()) / len(tokenizer.encode(texts[0])) > 1.4


def test_vocabulary_sizes_that_cannot_be_are_refused_with_the_bound(corpus: Path) -> None:
    text = (corpus / "stdlib/json/decoder.py").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"too large .* got 90000; expected at most \d"):
        train_tokenizer([text], 90_000)
    with pytest.raises(ValueError, match=r"too small .* got 100; expected more than \d"):
        train_tokenizer([text], 100)
    with pytest.raises(ValueError, match="no text to train"):
        train_tokenizer(["", "\t"], 400)
