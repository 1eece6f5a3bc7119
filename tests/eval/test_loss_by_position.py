import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval.loss_by_position import SHORT_STRIDE, SHORT_WINDOW, bucket_ends, check, loss_by_position
from eval.result import Options


@pytest.fixture
def book(tmp_path, source_folder):
    path = tmp_path / "books.jsonl"
    texts = [(source_folder / f"{name}.txt").read_text() for name in ("types", "heapq")]
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*texts, "too short"]))
    return path


def run(subject, options):
    check(subject, options)
    return loss_by_position(subject, options)


def test_buckets_end_at_powers_of_two_and_multiples_of_1024():
    assert bucket_ends(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_ends(3000) == [2**i for i in range(12)] + [3000]
    assert bucket_ends(4096) == [*(2**i for i in range(12)), 3072, 4096]


def test_uniform_model_is_flat(subject, uniform, tokenizer, book):
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=64)
    results = run(model, Options(texts=(book,), samples=6))
    assert [(r.settings["from"], r.settings["to"]) for r in results] == [
        (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64),
    ]  # fmt: skip
    for result in results:
        assert result.value == pytest.approx(math.log(tokenizer.vocab_size), rel=1e-6)
        assert result.count == 6 * (result.settings["to"] - result.settings["from"] + 1)
        assert result.settings["blocks"] == 6


def test_position_counts_the_context_tokens(subject, stand_in, tokenizer, book):
    """A model whose loss depends on how much it has read shows it in the right bucket."""

    def sharp_from_8_on(tokens):
        logits = torch.zeros(*tokens.shape, tokenizer.vocab_size)
        following = tokens.roll(-1, dims=1)
        at = torch.arange(8, tokens.shape[1] - 1)
        logits[:, at] = 60.0 * torch.nn.functional.one_hot(following, tokenizer.vocab_size)[:, at]
        return logits

    model = subject(stand_in(sharp_from_8_on), max_seq_len=32)
    values = {r.settings["to"]: r.value for r in run(model, Options(texts=(book,), samples=4))}
    flat = math.log(tokenizer.vocab_size)
    assert values[8] == pytest.approx(flat)
    assert values[16] == pytest.approx(0, abs=1e-6)
    assert values[32] == pytest.approx(flat / 16)  # nothing follows the last token of the block


def test_blocks_stay_inside_documents_and_start_from_nothing(subject, stand_in, tokenizer, book):
    seen = []

    def remember(tokens):
        seen.append(tokens[0].tolist())
        return torch.zeros(*tokens.shape, tokenizer.vocab_size)

    results = run(subject(stand_in(remember), max_seq_len=64), Options(texts=(book,)))
    texts = [json.loads(line)["text"] for line in book.read_text().splitlines()]
    streams = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    whole = [
        stream[i * 64 : (i + 1) * 64] for stream in streams for i in range((len(stream) - 1) // 64)
    ]
    assert sorted(seen) == sorted(whole)[: len(seen)] or len(seen) == 200
    assert all(block in whole for block in seen)
    assert results[0].settings["blocks"] == min(200, len(whole))


def test_short_context_reads_at_most_its_window(subject, stand_in, tokenizer, book):
    longest = []

    def remember(tokens):
        longest.append(tokens.shape[1])
        return torch.zeros(*tokens.shape, tokenizer.vocab_size)

    results = run(subject(stand_in(remember), max_seq_len=700), Options(texts=(book,), samples=1))
    assert longest == [700, SHORT_WINDOW, SHORT_WINDOW, SHORT_WINDOW]
    assert 700 - SHORT_WINDOW == 188 > SHORT_STRIDE
    short = [r for r in results if r.metric == "nll_short"]
    assert sum(r.count for r in short) == 700


def test_error_takes_documents_as_clusters(subject, stand_in, tokenizer, book):
    """Blocks of one document that agree with each other say little about other documents."""
    documents = [json.loads(line)["text"] for line in book.read_text().splitlines()]
    first = set(tokenizer.encode(documents[0])[:2000])

    def by_document(tokens):
        level = np.array([len(first & set(row)) / len(set(row)) for row in tokens.tolist()])
        return torch.tensor(level)[:, None, None] * torch.ones(
            1, tokens.shape[1], tokenizer.vocab_size
        )

    (first_bucket, *_) = run(
        subject(stand_in(by_document), max_seq_len=64), Options(texts=(book,), samples=10)
    )
    assert first_bucket.standard_error is not None


def test_what_does_not_fit_is_refused(subject, uniform, tokenizer, tmp_path):
    model = subject(uniform(tokenizer.vocab_size), max_seq_len=64)
    with pytest.raises(ValueError, match="has no text: .*add --text FILE"):
        check(model, Options())
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(ValueError, match="no document is long enough: got 1 documents"):
        check(model, Options(texts=(short,)))
    with pytest.raises(ValueError, match="got 65 tokens"):
        check(model, Options(texts=(short,), lengths=(65,)))
    with pytest.raises(ValueError, match="longer than the rows the model was trained on"):
        check(replace(model, trained_length=32), Options(texts=(short,), lengths=(64,)))
    with pytest.raises(ValueError, match="too short: got 1"):
        check(model, Options(texts=(short,), lengths=(1,)))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match="no document can be read"):
        check(model, Options(texts=(bad,)))
