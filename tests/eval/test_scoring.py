import lzma
import math

import numpy as np
import pytest
import torch

from data_prep.shards import IGNORED_LABEL
from eval.scoring import (
    Score,
    Window,
    exponential,
    mean_and_error,
    rolling_windows,
    row_batches,
    score,
    total,
    window_batches,
)

PREFIX = 9


@pytest.mark.parametrize("stride", [1, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 9, 13])
def test_every_token_is_scored_once_in_order_with_its_left_context(length, stride):
    tokens = list(range(100, 100 + length))
    windows = list(rolling_windows(tokens, PREFIX, window=4, stride=stride))
    assert [t for w in windows for t in w.targets] == tokens
    stream = [PREFIX, *tokens]
    for w in windows:
        last = tokens.index(w.targets[-1])
        assert len(w.inputs) <= 4
        assert list(w.inputs) == stream[last + 1 - len(w.inputs) : last + 1]


def test_last_window_is_filled_to_the_left():
    windows = list(rolling_windows(range(34), PREFIX, window=10, stride=10))
    assert [list(w.inputs)[0] for w in windows] == [PREFIX, 9, 19, 23]
    assert list(windows[-1].targets) == [30, 31, 32, 33]


@pytest.mark.parametrize("stride", [0, 5])
def test_stride_that_skips_tokens_is_refused(stride):
    with pytest.raises(ValueError, match=f"got {stride}"):
        list(rolling_windows([1, 2], PREFIX, window=4, stride=stride))


@pytest.mark.parametrize("vocab_size", [2, 400, 33_278])
def test_uniform_model_scores_log_vocab_size(uniform, vocab_size):
    windows = rolling_windows([1, 0, 1, 1, 0], 0, window=2, stride=2)
    result = total(score(uniform(vocab_size), window_batches(windows, 4)))
    assert result.tokens == 5
    assert result.nll / result.tokens == pytest.approx(math.log(vocab_size), rel=1e-6)


def test_model_that_copies_the_leaked_next_token_has_loss_zero(certain):
    """Labels shifted twice (target t + 2) or not at all would make this loss huge."""
    text = torch.randint(0, 50, (1, 200), generator=torch.Generator().manual_seed(0))[0]
    leak = torch.cat([text[1:], text[:1]])[None]
    model = certain(50, lambda tokens: leak[:, : tokens.shape[1]])
    labels = np.append(text[1:].numpy(), IGNORED_LABEL)
    row = (text.numpy(), labels, np.array([0]))
    result = total(score(model, row_batches([row], 200)))
    assert (result.nll, result.tokens, result.hits) == (0.0, 199, 199)

    window = Window(text[:-1].tolist(), text[1:].tolist())
    result = total(score(model, window_batches([window], 200)))
    assert (result.nll, result.tokens, result.hits) == (0.0, 199, 199)


def test_constant_shift_corpus_has_its_hand_computed_loss(stand_in):
    """Next token = this one + 1; a model that puts half on it and shares half among 9 others."""

    def logits(tokens):
        p = torch.full((*tokens.shape, 10), 0.5 / 9)
        return p.scatter(-1, ((tokens + 1) % 10)[..., None], 0.5).log()

    corpus = [i % 10 for i in range(1, 31)]
    windows = rolling_windows(corpus, 0, window=7, stride=7)
    result = total(score(stand_in(logits), window_batches(windows, 21)))
    assert result.nll == pytest.approx(30 * math.log(2), rel=1e-6)


def test_score_does_not_depend_on_how_windows_are_batched(stand_in):
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(20, 20, generator=generator)
    model = stand_in(lambda tokens: table[tokens].cumsum(1))  # causal, and sees all to the left
    tokens = torch.randint(0, 20, (57,), generator=generator).tolist()
    nll = []
    for batch_tokens in (1, 16, 1000):
        windows = rolling_windows(tokens, 0, window=8, stride=5)
        nll.append(total(score(model, window_batches(windows, batch_tokens))).nll)
    assert nll[1:] == pytest.approx(nll[:1] * 2, rel=1e-6)


def test_packed_rows_keep_their_documents_apart():
    rows = [
        (np.arange(6), np.arange(6), np.array([0, 4])),
        (np.arange(6), np.arange(6), np.array([0, 2, 5])),
    ]
    batch = next(row_batches(rows, 12))
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 8, 11, 12]


def test_standard_error_is_that_of_a_mean_when_documents_are_equally_long():
    values = np.array([1.0, 2.0, 4.0, 5.0])
    mean, error = mean_and_error([Score(10 * v, 10, 0) for v in values])
    assert mean == pytest.approx(3.0)
    assert error == pytest.approx(values.std(ddof=1) / 2)
    assert mean_and_error([Score(3.0, 2, 0)]) == (1.5, None)


@pytest.mark.parametrize("nats", [math.nan, math.inf, 1e4])
def test_diverged_model_has_no_perplexity(nats):
    with pytest.raises(ValueError, match="diverged"):
        exponential(nats)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "count", "perplexity"), [("valid", 217_646, 965.086), ("test", 245_569, 911.705)]
)
def test_unigram_of_wikitext_2_scores_its_known_perplexity(
    shared_data, stand_in, split, count, perplexity
):
    def read_words(name):
        packed = (shared_data / "wikitext-2" / f"wiki.{name}.tokens.xz").read_bytes()
        lines = lzma.decompress(packed).decode("utf-8").splitlines()
        return [word for line in lines for word in [*line.split(), "<eos>"]]

    train, heldout = read_words("train"), read_words(split)
    ids = {word: i for i, word in enumerate(sorted(set(train)))}
    counts = np.bincount([ids[w] for w in train], minlength=len(ids))
    log_p = torch.from_numpy(np.log(counts / counts.sum())).float()
    assert len(ids) == 33_278

    model = stand_in(lambda tokens: log_p.expand(*tokens.shape, -1))
    windows = rolling_windows([ids[w] for w in heldout], 0, window=1024, stride=1024)
    result = total(score(model, window_batches(windows, 2048)))
    assert result.tokens == count
    assert math.exp(result.nll / result.tokens) == pytest.approx(perplexity, rel=1e-5)
