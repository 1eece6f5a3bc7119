"""WikiText perplexity: lm-eval's figures for raw text, word level for the tokenised one.

The text is a local copy (`--wikitext`), or is downloaded when asked for by name
(`--wikitext-download wikitext-2-raw-v1:test`, which needs the package `datasets`).

`.raw` (or .raw.xz), metrics word_perplexity, byte_perplexity, bits_per_byte: the task `wikitext`,
version 2, of lm-evaluation-harness. Every article is a document, detokenised, and scored in rolling
windows whose first one starts from BOS; articles never share a window. With ll the summed
log-likelihood of all articles,

    word_perplexity = exp(-ll / W)
    byte_perplexity = exp(-ll / B)      bits_per_byte = -ll / (B ln 2)

W and B are counted on the ORIGINAL articles, before detokenising: W = pieces of a split on white
space, with the empty piece at each end of an article; B = UTF-8 bytes. On the raw test split W =
241,335 and B = 1,290,588, hence word_perplexity = byte_perplexity ^ 5.3477. The window length
changes the value: 39 of the 62 articles are longer than 2,048 GPT-2 tokens. It is in `settings`.

`.tokens` (or .tokens.xz), metric word_perplexity_closed: exp(-ll / (words + lines)), the count of
the WikiText papers, one end-of-line token a line (245,569 on test). The text is scored as it
stands, <unk> and @-@ included. A subword model could spell other words than the 33,278 of the
vocabulary, so its figure is an upper bound on that of a closed vocabulary; a model that never saw
<unk> in training is not comparable with one that did.

    raw article     " = Robert Boulter = \\n He had a guest @-@ starring role , in 2000 . \\n"
    scored          " = Robert Boulter =\\nHe had a guest-starring role, in 2000.\\n"
    W of it counts  "" "=" "Robert" "Boulter" "=" "He" "had" ... "2000" "." ""
"""

from __future__ import annotations

import math
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

from eval.perplexity import score_documents, window_and_stride, window_settings
from eval.result import Options, Result, Subject
from eval.scoring import exponential, mean_and_error, total
from eval.text_files import read_text

VERSION = 2
PAIRED = ("nll",)
HUB_NAME = "Salesforce/wikitext"

_LINE = re.compile(r"[^\n]*\n|[^\n]+$")
_ARTICLE_HEADING = re.compile(r" = [^=](.*[^=])? = ")

# Applied in this order; the order matters (" . " before the line ends, "= = = =" before "= =").
_REPLACE_FIRST = (
    ("s '", "s'"),  # boys ' -> boys'
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
# Blanks just inside a pair of brackets or quotes go; the pair may span lines, as it may in lm-eval.
_INSIDE_PAIRS = tuple(
    (
        re.compile(rf"{re.escape(left)}\s*([^{re.escape(right)}]*?)\s*{re.escape(right)}"),
        left,
        right,
    )
    for left, right in (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
)
_REPLACE_LAST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenise(article: str) -> str:
    """The article with the spacing of ordinary text, as lm-eval defines it for WikiText."""
    for old, new in _REPLACE_FIRST:
        article = article.replace(old, new)
    for pattern, left, right in _INSIDE_PAIRS:
        article = pattern.sub(rf"{left}\g<1>{right}", article)
    for old, new in _REPLACE_LAST:
        article = article.replace(old, new)
    return article


def split_articles(text: str) -> list[str]:
    """The articles, each from its " = Title = " line up to the next; blank lines before the
    first are dropped."""
    articles: list[str] = []
    current: list[str] = []
    for line in _LINE.findall(text):
        if _ARTICLE_HEADING.fullmatch(line.rstrip("\n")):
            articles.append("".join(current))
            current = []
        current.append(line)
    articles.append("".join(current))
    return [article for article in articles if article.strip()]


def count_words(article: str) -> int:
    """lm-eval's word count of an original article: pieces between white space, empty ones at the
    ends included."""
    return len(re.split(r"\s+", article))


def count_words_and_lines(article: str) -> int:
    """Words plus one end-of-line token a line: the count of the WikiText papers."""
    return len(article.split()) + article.count("\n")


def check(subject: Subject, options: Options) -> None:
    """Refuse a file that is missing, unreadable, empty or neither .raw nor .tokens, and windows
    that the model cannot read."""
    subject.need_tokenizer("wikitext")
    window_and_stride(subject, options)
    read_articles(options)


def read_articles(options: Options) -> tuple[str, str, list[str]]:
    """The source's name, its kind ("raw" or "tokens") and its articles as they stand there."""
    path = options.wikitext
    if path is not None:
        source, kind, text = path.name, _kind(path), read_text(path)
    elif options.wikitext_download is not None:
        source = options.wikitext_download
        kind, text = _download(source)
    else:
        raise ValueError(
            "task wikitext has no file: got no --wikitext; expected a local wiki.*.raw or "
            "wiki.*.tokens, plain or .xz; add --wikitext FILE, or --wikitext-download "
            "wikitext-2-raw-v1:test to fetch one"
        )
    articles = split_articles(text)
    if not articles:
        raise ValueError(
            f"no text in {path or source}: got only white space; expected WikiText articles"
        )
    if kind == "tokens":
        # The blank line above the first heading is a line of the file too: scored and counted.
        articles[0] = text[: len(text) - sum(map(len, articles))] + articles[0]
    return source, kind, articles


def _download(source: str) -> tuple[str, str]:
    """("raw" or "tokens", text) of NAME:SPLIT, with the lines as they are in the original files."""
    name, colon, split = source.partition(":")
    kinds = {"raw-v1": "raw", "v1": "tokens"}
    kind = kinds.get(name.removeprefix("wikitext-2-").removeprefix("wikitext-103-"))
    if kind is None or not colon or split not in ("train", "validation", "test"):
        raise ValueError(
            f"--wikitext-download is not understood: got {source}; expected NAME:SPLIT, as in "
            "wikitext-2-raw-v1:test, wikitext-103-v1:validation"
        )
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"the package datasets is not installed: got --wikitext-download {source}; expected "
            "it for a download; install the extra lm-eval, or use --wikitext FILE"
        ) from None
    try:
        lines = datasets.load_dataset(HUB_NAME, name, split=split)["text"]
    except Exception as error:  # whatever a download can raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"download of {source} failed: {reason}; check the connection, or use --wikitext FILE"
        ) from error
    # The hub stores an empty string for a blank line.
    return kind, "".join(line or " \n" for line in lines)


def wikitext(subject: Subject, options: Options) -> list[Result]:
    """lm-eval's three metrics of a .raw file, or the word-level perplexity of a .tokens file."""
    tokenizer = subject.need_tokenizer("wikitext")
    source, kind, articles = read_articles(options)
    scored = [detokenise(article) for article in articles] if kind == "raw" else articles
    documents = [tokenizer.encode(article) for article in scored]
    settings: dict[str, Any] = {
        "file": source,
        "articles": len(articles),
        "text_sha256": sha256("".join(articles).encode()).hexdigest()[:16],
        "tokenizer_sha256": tokenizer.sha256,
        **window_settings(subject, options),
    }
    log = subject.samples.open("wikitext", VERSION, settings)
    scores = score_documents(subject, documents, tokenizer.bos_id, options, log)
    log.close()
    everything = total(scores)
    _, error_per_token = mean_and_error(scores)
    settings["tokens"] = everything.tokens

    def result(metric: str, unit: str, count: int) -> Result:
        nats = everything.nll / count
        value = nats / math.log(2) if metric == "bits_per_byte" else exponential(nats)
        slope = 1 / math.log(2) if metric == "bits_per_byte" else value
        error = error_per_token
        return Result(
            task="wikitext",
            version=VERSION,
            metric=metric,
            value=value,
            unit=unit,
            count=count,
            standard_error=None if error is None else error * everything.tokens / count * slope,
            settings=settings,
        )

    if kind == "tokens":
        words = sum(count_words_and_lines(article) for article in articles)
        return [result("word_perplexity_closed", "per word or end of line", words)]
    words = sum(count_words(article) for article in articles)
    size = sum(len(article.encode("utf-8")) for article in articles)
    return [
        result("word_perplexity", "per word", words),
        result("byte_perplexity", "per byte", size),
        result("bits_per_byte", "bits", size),
    ]


def _kind(path: Path) -> str:
    name = path.name.removesuffix(".xz")
    for kind in ("raw", "tokens"):
        if name.endswith(f".{kind}"):
            return kind
    raise ValueError(
        f"cannot tell which WikiText this is: got {path.name}; expected a name that ends in .raw "
        "or .tokens (or .raw.xz, .tokens.xz); rename it"
    )
