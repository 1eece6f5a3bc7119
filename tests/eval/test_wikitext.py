import lzma
import math

import pytest

from eval.result import Options
from eval.wikitext import (
    check,
    count_words,
    count_words_and_lines,
    detokenise,
    read_articles,
    split_articles,
    wikitext,
)

RAW = (
    " \n = First Thing = \n \n It had a 3 @.@ 5 @-@ litre engine , made in 1 @,@ 000 pieces . \n"
    " \n = = Part = = \n \n He said \" so be it \" ( or not ) ; the boys ' hats 's . \n"
    " \n = Second = \n \n One = two = three \n"
)


def test_articles_begin_at_top_level_headings_only():
    articles = split_articles(RAW)
    assert [article.splitlines()[0] for article in articles] == [
        " = First Thing = ",
        " = Second = ",
    ]
    assert "".join(articles) == RAW.removeprefix(" \n")


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("a 3 @.@ 5 @-@ litre", "a 3.5-litre"),
        ("1 @,@ 000 of them , here", "1,000 of them, here"),
        (' said " so be it " to', ' said "so be it" to'),
        ("( or not ) and [ x ]", "(or not) and [x]"),
        (" = = = Deep = = = \n Text", " === Deep ===\nText"),
        ("the boys ' hats", "the boys' hats"),
        ("Boulter 's role", "Boulter's role"),
        ("who ? me ! yes : no ; ok . Then", "who? me! yes: no; ok. Then"),
    ],
)
def test_detokenise(raw, plain):
    assert detokenise(raw) == plain


def test_word_counts_are_of_the_original_with_its_empty_ends():
    assert count_words(" = A = \n b \n") == 6
    assert count_words_and_lines(" = A = \n b \n") == 6
    assert count_words("a b") == 2


def test_counts_of_wikitext_2(shared_data):
    def read(name):
        return lzma.decompress((shared_data / "wikitext-2" / name).read_bytes()).decode("utf-8")

    articles = split_articles(read("wiki.test.raw.xz"))
    assert len(articles) == 62
    assert sum(map(count_words, articles)) == 241_335
    assert sum(len(article.encode()) for article in articles) == 1_290_588
    assert sum(len(detokenise(article).encode()) for article in articles) == 1_240_525
    tokens = read("wiki.test.tokens.xz")
    assert count_words_and_lines(tokens) == 245_569
    assert count_words_and_lines(read("wiki.valid.tokens.xz")) == 217_646


def test_raw_file_gives_the_three_figures_of_lm_eval(subject, uniform, tokenizer, tmp_path):
    path = tmp_path / "wiki.test.raw"
    path.write_text(RAW, encoding="utf-8", newline="")
    got = {
        r.metric: r
        for r in wikitext(subject(uniform(tokenizer.vocab_size)), Options(wikitext=path))
    }
    articles = split_articles(RAW)
    tokens = sum(len(tokenizer.encode(detokenise(a))) for a in articles)
    nll = tokens * math.log(tokenizer.vocab_size)
    words, size = got["word_perplexity"].count, got["byte_perplexity"].count
    assert (words, size) == (sum(map(count_words, articles)), len(RAW.encode()) - 2)
    assert got["word_perplexity"].value == pytest.approx(math.exp(nll / words), rel=1e-5)
    assert got["bits_per_byte"].value == pytest.approx(nll / size / math.log(2), rel=1e-6)
    assert got["word_perplexity"].value == pytest.approx(
        got["byte_perplexity"].value ** (size / words), rel=1e-6
    )
    assert got["word_perplexity"].settings["tokens"] == tokens


def test_tokens_file_counts_every_line_end_once(subject, uniform, tokenizer, tmp_path):
    path = tmp_path / "wiki.test.tokens.xz"
    path.write_bytes(lzma.compress(RAW.encode()))
    (got,) = wikitext(subject(uniform(tokenizer.vocab_size)), Options(wikitext=path))
    assert got.metric == "word_perplexity_closed"
    assert got.count == len(RAW.split()) + RAW.count("\n")


def test_other_names_and_no_file_are_refused(subject, uniform, tmp_path):
    with pytest.raises(ValueError, match="add --wikitext FILE"):
        check(subject(uniform(400)), Options())
    with pytest.raises(ValueError, match=r"got wiki\.txt"):
        check(subject(uniform(400)), Options(wikitext=tmp_path / "wiki.txt"))
    with pytest.raises(ValueError, match="not found"):
        check(subject(uniform(400)), Options(wikitext=tmp_path / "wiki.raw"))
    blank = tmp_path / "blank.raw"
    blank.write_text(" \n", encoding="utf-8")
    with pytest.raises(ValueError, match="only white space"):
        check(subject(uniform(400)), Options(wikitext=blank))
    with pytest.raises(ValueError, match="got 33 tokens"):
        check(subject(uniform(400)), Options(wikitext=blank, window=33))


def test_downloaded_lines_are_the_articles_of_the_file(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        # The hub has one record a line, and an empty string for a blank one.
        lines = ["" if line == " \n" else line for line in RAW.splitlines(keepends=True)]
        return {"text": lines}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source, kind, articles = read_articles(Options(wikitext_download="wikitext-2-raw-v1:test"))
    assert asked == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"})]
    assert (source, kind) == ("wikitext-2-raw-v1:test", "raw")
    assert articles == split_articles(RAW)


def test_a_download_that_fails_is_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*arguments, **options):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="failed: no route; check the connection") as error:
        read_articles(Options(wikitext_download="wikitext-2-raw-v1:test"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="is not understood: got wikitext-4:test"):
        read_articles(Options(wikitext_download="wikitext-4:test"))
