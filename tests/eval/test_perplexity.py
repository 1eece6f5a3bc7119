import errno
import lzma
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_prep.shards import Rows
from eval.perplexity import check, perplexity, unigram_entropy
from eval.result import Options


def by_metric(results):
    return {result.metric: result for result in results}


def test_uniform_model_on_a_text_file(subject, uniform, tokenizer, tmp_path):
    text = "def f(x):\n    return 'caf\N{LATIN SMALL LETTER E WITH ACUTE}'\n" * 5
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    tokens, size = len(tokenizer.encode(text)), path.stat().st_size

    got = by_metric(perplexity(subject(uniform(tokenizer.vocab_size)), Options(texts=(path,))))
    log_v = math.log(tokenizer.vocab_size)
    assert got["nll_per_token"].value == pytest.approx(log_v, rel=1e-6)
    assert got["nll_per_token"].count == tokens
    assert got["nll_per_token"].standard_error is None
    assert got["perplexity"].value == pytest.approx(tokenizer.vocab_size, rel=1e-5)
    assert got["bits_per_byte"].value == pytest.approx(tokens * log_v / math.log(2) / size)
    assert got["bits_per_byte"].count == size
    assert got["bits_per_byte"].settings["window"] == 32


def test_packed_text_is_unpacked_and_two_files_are_two_documents(
    subject, stand_in, tokenizer, tmp_path
):
    seen = []

    def logits(tokens):
        seen.append(tokens)
        return torch.zeros(*tokens.shape, tokenizer.vocab_size)

    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.xz"
    plain.write_text("alpha", encoding="utf-8")
    packed.write_bytes(lzma.compress(b"beta"))
    got = perplexity(subject(stand_in(logits)), Options(texts=(plain, packed)))
    assert by_metric(got)["bits_per_byte"].count == 9
    assert sum(int((tokens[:, 0] == tokenizer.bos_id).sum()) for tokens in seen) == 2


def test_model_never_reads_more_than_the_window(subject, uniform, tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("word " * 200, encoding="utf-8")
    model = uniform(tokenizer.vocab_size)
    perplexity(subject(model), Options(texts=(path,), window=16, stride=4))
    assert model.longest_input == 16


def test_data_set_is_scored_on_its_own_labels(subject, uniform, tokenizer, dataset):
    rows = Rows(dataset, "validation")
    labels = np.concatenate([rows[i].labels for i in range(len(rows))])
    labels = labels[labels != -100]
    size = int(tokenizer.token_bytes[labels].sum())

    model = uniform(tokenizer.vocab_size)
    got = by_metric(perplexity(subject(model, max_seq_len=64), Options(dataset=dataset)))
    assert got["nll_per_token"].count == len(labels)
    assert got["nll_per_token"].value == pytest.approx(math.log(tokenizer.vocab_size), rel=1e-6)
    assert got["bits_per_byte"].count == size
    assert 0 < size <= rows.manifest.splits["validation"].bytes
    frequencies = np.bincount(labels) / len(labels)
    expected = -sum(p * math.log(p) for p in frequencies if p)
    assert got["unigram_entropy"].value == pytest.approx(expected)


def test_unigram_entropy_of_equal_frequencies_is_the_log_of_their_number():
    assert unigram_entropy(np.array([3, 0, 3, 3, 3])) == pytest.approx(math.log(4))


def test_other_tokenizer_is_refused_with_both_hashes(subject, uniform, tokenizer, dataset):
    class Other:
        sha256 = "0123"
        bos_id = 1

    model = subject(uniform(tokenizer.vocab_size), max_seq_len=64)
    model = type(model)(
        model=model.model, vocab_size=400, max_seq_len=64, tokenizer=Other(), device="cpu"
    )
    with pytest.raises(ValueError, match=f"{tokenizer.sha256}.*0123"):
        check(model, Options(dataset=dataset))


def test_rows_longer_than_the_trained_length_are_cut_to_it(subject, uniform, tokenizer, dataset):
    results = {}
    for trained, read in ((16, 16), (None, 64)):
        model = uniform(tokenizer.vocab_size)
        made = replace(subject(model, max_seq_len=64), trained_length=trained)
        check(made, Options(dataset=dataset))
        results[trained] = by_metric(perplexity(made, Options(dataset=dataset)))
        assert model.longest_input == read
    cut, whole = results[16]["nll_per_token"], results[None]["nll_per_token"]
    assert (cut.settings["row_tokens"], cut.settings["cut_from_row_tokens"]) == (16, 64)
    assert "cut_from_row_tokens" not in whole.settings
    assert cut.count == whole.count  # every label, in a cut too
    assert cut.settings["bytes"] == whole.settings["bytes"]
    assert cut.value == pytest.approx(whole.value, rel=1e-6)
    asked = replace(made, trained_length=16, beyond_trained=True)
    (mark,) = {r.settings["trained_length"] for r in perplexity(asked, Options(dataset=dataset))}
    assert mark == 16


def test_rows_that_cannot_be_cut_to_the_trained_length_are_refused(
    subject, uniform, tokenizer, dataset
):
    with pytest.raises(ValueError, match="got 64 tokens; expected a multiple of 24; pack"):
        check(subject(uniform(tokenizer.vocab_size), max_seq_len=24), Options(dataset=dataset))


def test_window_longer_than_the_model_is_refused(subject, uniform, tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match="got 33 tokens"):
        check(subject(uniform(400)), Options(texts=(path,), window=33))
    with pytest.raises(ValueError, match="stride does not fit the window: got 9"):
        check(subject(uniform(400)), Options(texts=(path,), window=8, stride=9))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not found"),
        (b"", "empty"),
        (b"ab\xff", "not UTF-8: got invalid start byte at byte 2"),
    ],
)
def test_unusable_text_is_one_line(subject, uniform, tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check(subject(uniform(400)), Options(texts=(path,)))


def test_no_text_at_all_is_refused(subject, uniform):
    with pytest.raises(ValueError, match="--text FILE or --dataset"):
        check(subject(uniform(400)), Options())


def test_text_that_the_system_does_not_give_is_one_line(subject, uniform, tmp_path, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "text.txt"
    path.write_text("x", encoding="utf-8")
    monkeypatch.setattr(type(path), "read_bytes", broken)
    with pytest.raises(OSError, match=f"^cannot read {path}: {os.strerror(errno.EIO)}$"):
        check(subject(uniform(400)), Options(texts=(path,)))
