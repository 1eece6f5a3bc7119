"""Duplicates, weights, lengths, evaluation texts, orders: what is written, and that it adds up."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import selection as selection_module
from data_prep.overlap import EvaluationTexts, Matcher
from data_prep.prepare import prepare
from data_prep.recipe import PackRequest, Source, load_recipe
from data_prep.shards import Manifest, Rows, read_tokenizer
from data_prep.tokenizer import Tokenizer


def texts_of(dataset: Path, split: str = "train") -> list[str]:
    """The documents of the rows, in order; the last one may be cut."""
    rows = Rows(dataset, split)
    tokenizer = read_tokenizer(dataset)
    stream = np.concatenate([rows[i].tokens for i in range(len(rows))])
    begins = np.flatnonzero(stream == tokenizer.bos_id)
    return [tokenizer.decode(part.tolist()) for part in np.split(stream, begins)[1:]]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def made(
    tmp_path: Path, tokenizer: Tokenizer, sources: list[Source] | list[Path], **settings: Any
) -> Manifest:
    """The manifest of tmp_path/d, packed into short rows so that next to nothing is dropped."""
    sources = [s if isinstance(s, Source) else Source(inputs=(str(s),)) for s in sources]
    request = PackRequest(sources=tuple(sources), row_tokens=4, **settings)
    return prepare(request, tokenizer, tmp_path / "d", workers=1)[0]


def numbered(count: int, words: int = 8, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    vocabulary = ["def", "self", "return", "json", "level", "for", "line", "import", "name", "if"]
    return [f"{n}: " + " ".join(rng.choices(vocabulary, k=words)) for n in range(count)]


def test_equal_content_is_written_once_where_it_first_came(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection_module, "PASS_BYTES", 256)  # many passes over the hashes
    texts = numbered(30)
    a = write_jsonl(tmp_path / "a.jsonl", texts[:20] + texts[5:8])
    b = write_jsonl(tmp_path / "b.jsonl", texts[10:30])
    manifest = made(tmp_path, tokenizer, [a, b])
    assert texts_of(tmp_path / "d")[:29] == texts[:29]
    assert manifest.skipped["duplicate"].count == 13
    assert manifest.skipped["duplicate"].examples[:4] == [
        *(f"a.jsonl@{offset}" for offset in offsets(texts[:20] + texts[5:8])[20:]),
        "b.jsonl@0",
    ]


def offsets(texts: list[str]) -> list[int]:
    lengths = [len(json.dumps({"text": text})) + 1 for text in texts]
    return [sum(lengths[:n]) for n in range(len(texts))]


def test_validation_never_holds_what_training_has(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = numbered(20)
    a = write_jsonl(tmp_path / "a.jsonl", texts[:15])
    b = write_jsonl(tmp_path / "b.jsonl", texts[10:])
    sources = [Source(inputs=(str(b),), split="validation"), Source(inputs=(str(a),))]
    manifest = made(tmp_path, tokenizer, sources)
    assert manifest.skipped["duplicate"].count == 5
    assert texts_of(tmp_path / "d", "validation")[:4] == texts[15:19]


def test_duplicates_stay_where_they_are_wanted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", numbered(5) * 3)
    manifest = made(tmp_path, tokenizer, [a], keep_duplicates=True)
    assert texts_of(tmp_path / "d")[:14] == (numbered(5) * 3)[:14]
    assert "duplicate" not in manifest.skipped


def test_near_duplicates_are_found_and_others_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("datasketch")
    rng = random.Random(0)
    originals = [" ".join(str(rng.randrange(1000)) for _ in range(120)) for _ in range(8)]
    copies = [text.replace(" 1", " one", 1) + " end" for text in originals[:5]]
    short = ["one", "two", "one two"]
    a = write_jsonl(tmp_path / "a.jsonl", originals + copies + short)
    manifest = made(tmp_path, tokenizer, [a], near_duplicates=0.7)
    assert manifest.skipped["near duplicate"].count == 5
    assert texts_of(tmp_path / "d")[:10] == (originals + short)[:10]


def test_sources_get_their_share_of_the_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", numbered(400, seed=n)) for n in range(3)]
    weights, repeats = (3.0, 1.0, 1.0), (1, 1, 2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "sources:\n"
        + "".join(
            f"  - {{inputs: [{path}], weight: {weight}, repeat: {repeat}}}\n"
            for path, weight, repeat in zip(paths, weights, repeats, strict=True)
        )
    )
    manifest = made(tmp_path, tokenizer, list(load_recipe(recipe)), keep_duplicates=True)
    total = sum(source.tokens for source in manifest.sources)
    longest = 40
    for source, weight in zip(manifest.sources, weights, strict=True):
        assert abs(source.tokens - total * weight / 5) < 2 * longest
    assert manifest.sources[0].rate == 1  # the one that runs out first
    counts = Counter(text.partition(":")[0] for text in texts_of(tmp_path / "d"))
    assert set(counts) == {str(n) for n in range(400)}
    left_out = manifest.skipped["left out by weight"].count
    assert (
        manifest.documents_in
        == 1200
        == manifest.splits["train"].documents
        + left_out
        + sum(
            entry.count
            for reason, entry in manifest.skipped.items()
            if reason != "left out by weight"
        )
    )
    assert left_out > 400
    assert sum(source.documents for source in manifest.sources) == 1200 - left_out


def test_a_scarce_source_is_repeated_up_to_its_limit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", numbered(20, seed=1))
    many = write_jsonl(tmp_path / "many.jsonl", numbered(400, seed=2))
    sources = [
        Source(inputs=(str(few),), weight=1, repeat=4),
        Source(inputs=(str(many),), weight=1),
    ]
    manifest = made(tmp_path, tokenizer, sources, keep_duplicates=True)
    assert manifest.sources[0].rate == 4
    assert abs(manifest.sources[0].tokens - manifest.sources[1].tokens) < 80
    used = Counter(texts_of(tmp_path / "d")[:-1])
    assert {used[text] for text in numbered(20, seed=1)} <= {3, 4}
    assert manifest.splits["train"].repeats >= 59
    texts = texts_of(tmp_path / "d")
    assert texts[: len(set(texts)) - 1] == list(dict.fromkeys(texts))[:-1]  # first copies first


def test_lengths_are_filtered_and_weighed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["x"] + numbered(60, words=4) + numbered(60, words=40, seed=3)
    a = write_jsonl(tmp_path / "a.jsonl", texts)
    lengths = [len(tokenizer.encode(text)) + 2 for text in texts]
    long = sorted(lengths)[61]
    manifest = made(tmp_path, tokenizer, [a], min_tokens=4, length_weights=((0, 0.5), (long, 2.0)))
    assert manifest.skipped["shorter than min-tokens 4"].examples == ["a.jsonl@0"]
    used = Counter(texts_of(tmp_path / "d"))
    assert all(used[text] == 2 for text in texts[61:-1])
    assert 15 < sum(used[text] for text in texts[1:61]) < 45
    assert max(used[text] for text in texts[1:61]) == 1
    other = tmp_path / "other"
    other.mkdir()
    manifest = made(other, tokenizer, [a], max_tokens=long - 1)
    assert manifest.skipped[f"longer than max-tokens {long - 1}"].count == 60


def test_longest_first_rows_come_in_buckets_and_keep_every_token(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rng = random.Random(1)
    texts = [f"{n} " + "word " * rng.choice([1, 5, 30, 200]) for n in range(80)]
    a = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = made(tmp_path, tokenizer, [a], order="longest-first")
    read = texts_of(tmp_path / "d")
    assert sorted(read[:-1]) == sorted(set(texts) & set(read[:-1]))
    assert manifest.splits["train"].documents >= 79
    buckets = [(len(tokenizer.encode(text)) + 2).bit_length() for text in read[:-1]]
    assert buckets == sorted(buckets, reverse=True)
    inside = [text for text in read[:-1] if len(text) > 500]
    assert inside == [text for text in texts if len(text) > 500]  # corpus order in a bucket
    lengths = Rows(tmp_path / "d", "train").row_lengths()
    assert lengths is not None
    bits = np.frexp(lengths)[1]
    assert (np.diff(bits) <= 0).all()


def test_row_lengths_are_those_of_the_longest_document_in_the_row(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rng = random.Random(2)
    a = write_jsonl(tmp_path / "a.jsonl", [f"{n}" + "ab " * rng.randrange(60) for n in range(90)])
    manifest = made(tmp_path, tokenizer, [a])
    lengths = [len(tokenizer.encode(json.loads(line)["text"])) + 2 for line in a.open()]
    owner = np.repeat(np.arange(90), lengths)
    rows = manifest.splits["train"].rows
    expected = [max(lengths[d] for d in set(owner[4 * r : 4 * r + 4])) for r in range(rows)]
    found = Rows(tmp_path / "d", "train").row_lengths()
    assert found is not None
    assert found.tolist() == expected
    facts = manifest.splits["train"]
    assert sum(facts.length_documents) == 90
    assert sum(facts.length_tokens) == sum(lengths)
    assert (tmp_path / "d" / "lengths.png").read_bytes().startswith(b"\x89PNG")


EVALUATION = (
    "It was the first of many quiet mornings, and nobody in the house had thought of the letter "
    "that would change the rest of their long and ordinary lives."
)


def copies_of(words: int) -> str:
    """The first words of the evaluation text, in other typography, between other words."""
    copied = EVALUATION.replace(",", "").split()[:words]
    return "Preface text " + "\n- ".join(copied).upper() + " other words follow here"


def test_documents_that_hold_evaluation_text_are_dropped_or_reported(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "eval.txt").write_text(EVALUATION)
    (tmp_path / "short.txt").write_text("too short to find")
    texts = [*numbered(20), copies_of(13), copies_of(12)]
    a = write_jsonl(tmp_path / "a.jsonl", texts)
    evaluation = {"exclude_overlap": (str(tmp_path / "eval.txt"), str(tmp_path / "short.txt"))}
    manifest = made(tmp_path, tokenizer, [a], **evaluation)
    reason = "overlaps evaluation text eval.txt"
    assert manifest.skipped[reason].count == 1
    assert manifest.skipped[reason].examples == [f"a.jsonl@{offsets(texts)[20]}"]
    other = tmp_path / "other"
    other.mkdir()
    manifest = made(other, tokenizer, [a], overlap="report", **evaluation)
    assert reason not in manifest.skipped
    assert manifest.overlapping[reason].count == 1
    assert copies_of(13) in texts_of(other / "d")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_an_overlap_is_found_however_the_document_is_parted(tmp_path: Path, size: int) -> None:
    (tmp_path / "eval.txt").write_text(EVALUATION)
    texts = EvaluationTexts([str(tmp_path / "eval.txt")], 13)

    def owner(text: str) -> str | None:
        matcher = Matcher(texts)
        for begin in range(0, len(text), size):
            matcher.feed(text[begin : begin + size])
        return matcher.finish()

    assert owner(copies_of(13)) == "eval.txt"
    assert owner(copies_of(12)) is None
    assert owner(" ".join(EVALUATION.split()[-13:])) == "eval.txt"
    assert owner(" ".join(EVALUATION.split()[-13:])[:-3]) is None
    assert owner("") is None


def test_evaluation_texts_without_an_n_gram_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a b c")
    with pytest.raises(ValueError, match="exclude-overlap has nothing to look for: got .*13 words"):
        EvaluationTexts([str(tmp_path / "short.txt")], 13)
    (tmp_path / "binary.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"binary.txt cannot be looked for: got not UTF-8"):
        EvaluationTexts([str(tmp_path)], 13)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("sources: []", "sources"),
        ("sorces: [{inputs: [a]}]", "unknown setting: got sorces"),
        (
            "sources: [{inputs: [a], wieght: 1}]",
            r"unknown setting: got sources.0.wieght; did you mean weight\?$",
        ),
        ("sources: [{inputs: a}]", r"sources.0.inputs is wrong: got 'a'; expected a list[^\n]*$"),
        ("sources: [a]", r"sources.0 is wrong: got 'a'; expected settings of a source[^\n]*$"),
        ("", "names no sources: got an empty file; expected `sources:`"),
        ("[a]", "names no sources: got a list; expected `sources:`"),
        ("sources: [{inputs: [a], weight: -1}]", "sources.0.weight is wrong: got -1"),
        ("sources: [{weight: 1}]", "setting is missing: expected sources.0.inputs"),
        ("{", "is not YAML"),
    ],
)
def test_recipes_that_cannot_be_are_refused_in_one_line(
    tmp_path: Path, recipe: str, message: str
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(recipe)
    with pytest.raises(ValueError, match=message):
        load_recipe(path)
    with pytest.raises(FileNotFoundError, match="no recipe"):
        load_recipe(tmp_path / "nothing.yaml")
