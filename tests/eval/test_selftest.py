import pytest

from eval import niah, selftest, wikitext
from eval.selftest import Line, closed_vocabulary, run
from eval.selftest_material import Material


@pytest.fixture(scope="module")
def lines():
    return run()


def test_every_known_score_is_found(lines):
    assert [line.describe() for line in lines if not line.holds] == []


def test_every_task_is_among_them(lines):
    seen = {line.task.split(" ")[0] for line in lines}
    assert seen >= {
        "perplexity",
        "wikitext",
        "loss-by-position",
        "mqar",
        "selective-copy",
        *(f"niah_{name}" for name in selftest.RULER_TASKS),
    }
    assert {line.model for line in lines} >= {"oracle", "random", "uniform", "bigram", "unigram"}


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        # Words counted after detokenising; an answer prefix that is dropped; one target too late.
        ("wikitext", (wikitext, "count_words", lambda article: len(article.split()))),
        ("niah", (niah, "contains", lambda answer, value: False)),
    ],
)
def test_a_broken_task_is_seen(monkeypatch, tmp_path, name, broken):
    monkeypatch.setattr(*broken)
    part = {"wikitext": selftest._wikitext, "niah": selftest._niah}[name]
    wrong = [line for line in part(Material(tmp_path)) if not line.holds]
    assert wrong
    assert wrong[0].task.startswith(name)


def test_a_line_holds_within_rounding_only():
    assert Line("t", "m", "x", 100.001, 100.0).holds
    assert not Line("t", "m", "x", 100.1, 100.0).holds
    assert Line("t", "m", "x", 0.0, 5.0, at_most=True).holds
    assert not Line("t", "m", "x", 6.0, 5.0, at_most=True).holds
    assert "got 6; expected at most 5" in Line("t", "m", "x", 6.0, 5.0, at_most=True).describe()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "expected"), [("test", 911.7), ("valid", 965.1)])
def test_unigram_model_of_wikitext_2_has_its_published_perplexity(shared_data, part, expected):
    folder = shared_data / "wikitext-2"
    train = selftest.read_text(folder / "wiki.train.tokens.xz")
    (line,) = closed_vocabulary(train, folder / f"wiki.{part}.tokens.xz", part)
    assert line.holds
    assert line.found == pytest.approx(expected, abs=0.05)


def test_half_of_the_wikitext_files_is_refused(tmp_path):
    with pytest.raises(ValueError, match="belong together"):
        run(wikitext_train=tmp_path / "wiki.train.tokens")
