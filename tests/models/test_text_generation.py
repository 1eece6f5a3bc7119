"""Text in, text out: whole characters, stop texts across tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.tokenizer import Tokenizer, train_tokenizer
from models.language_model import LanguageModel
from models.text_generation import TextRow, generate_text, stream_text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer([Path(pytest.__file__).read_text()], 400))
    return Tokenizer.load(path)


def _given(row: TextRow, pieces: list[bytes]) -> list[str]:
    given = []
    for piece in pieces:
        given.append(row.add(piece))
        if row.stopped:
            return given
    return [*given, row.add(b"", last=True)]


def test_characters_are_given_whole() -> None:
    euro = "\u20ac".encode()
    assert _given(TextRow([]), [b"a" + euro[:1], euro[1:2], euro[2:] + b"b"]) == [
        *("a", "", "\u20acb"),
        "",
    ]
    assert _given(TextRow([]), [b"a" + euro[:2]]) == ["a", "\ufffd"]


def test_stop_text_is_found_across_tokens_and_not_given() -> None:
    row = TextRow(["stop", "\n\n"])
    assert _given(row, [b"go s", b"t", b"ar", b"t st", b"op here"]) == ["go ", "", "star", "t ", ""]
    assert row.stopped
    assert _given(TextRow(["\n\n"]), [b"a\n", b"b\n", b"\nc"]) == ["a", "\nb", ""]


def test_the_earliest_stop_text_counts() -> None:
    assert _given(TextRow(["cd", "b"]), [b"abcd"]) == ["a"]


def test_held_text_is_given_at_the_end() -> None:
    assert _given(TextRow(["stop"]), [b"sto"]) == ["", "sto"]


def test_streamed_pieces_are_the_generated_text(
    small_model: Callable[..., LanguageModel], tokenizer: Tokenizer
) -> None:
    model = small_model("log_linear_mamba2", vocab_size=400)
    prompts = ["import", "def f(x):", "a"]
    settings = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
    free = generate_text(model, tokenizer, prompts, **settings)
    pieces = ["", "", ""]
    for row, text in stream_text(model, tokenizer, prompts, **settings):
        assert text
        pieces[row] += text
    assert pieces == free
    stop = free[1][4:6]
    stopped = generate_text(model, tokenizer, prompts, stop=[stop], **settings)
    assert stopped == [text.split(stop)[0] for text in free]
    with pytest.raises(ValueError, match="a stop text is empty"):
        generate_text(model, tokenizer, prompts, stop=[""], **settings)
