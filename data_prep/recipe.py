"""What to prepare: sources, and how their documents are filtered, weighed and laid out.

A recipe file mixes several sources (YAML):

    sources:
      - inputs: [books/, more-books/*.jsonl.zst]
        weight: 3            # share of the training tokens, relative to the other sources
        repeat: 2            # a document may be used up to twice to reach it
      - inputs: [web/]
        include: ["*.parquet"]
        text_field: content
        id_field: url
        weight: 1
      - inputs: [held-out/]
        split: validation
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data_prep.formats import Reading

# What pydantic would say in words of Python.
EXPECTED = {
    "tuple_type": "a list, such as [corpus/]",
    "model_type": "settings of a source, such as {inputs: [corpus/]}",
}
Order = Literal["corpus", "longest-first"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Source(_Model):
    """Inputs that are read alike and weighed as one."""

    inputs: tuple[str, ...] = Field(min_length=1)
    include: tuple[str, ...] = ()
    """File names to take inside folders; none: all."""
    text_field: str = "text"
    id_field: str | None = None
    """A record's field that names the document; none: its file and position."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the training tokens relative to the other sources. As much is taken as the source
    that runs out first allows. None, for all sources alike: every document once.
    """
    repeat: int = Field(default=1, ge=1)
    """The most often that a document may be used to reach the weight."""
    split: Literal["train", "validation"] = "train"

    @property
    def reading(self) -> Reading:
        return Reading(self.text_field, self.id_field)

    @property
    def name(self) -> str:
        return ", ".join(self.inputs)


class PackRequest(_Model):
    """What to pack; checked when made. Lengths count a document's bos and eos too."""

    sources: tuple[Source, ...] = Field(min_length=1)
    row_tokens: int
    validation_fraction: float = 0.0
    seed: int = 0
    min_tokens: int | None = None
    max_tokens: int | None = None
    length_weights: tuple[tuple[int, float], ...] = ()
    """(tokens, weight): documents of at least so many tokens are used `weight` times; the last
    one that fits counts.
    """
    order: Order = "corpus"
    """longest-first: rows of the longest documents first, in buckets of powers of two."""
    keep_duplicates: bool = False
    near_duplicates: float | None = None
    """Jaccard similarity of word 5-grams from which on a later document is a duplicate."""
    exclude_overlap: tuple[str, ...] = ()
    """Evaluation texts; training documents that share overlap_words words in a row with one are
    dropped, or only reported.
    """
    overlap_words: int = 13
    overlap: Literal["drop", "report"] = "drop"
    recipe: str | None = None
    """The file that the sources are from; for the reader only."""

    @model_validator(mode="after")
    def _rules(self) -> PackRequest:
        if self.row_tokens < 2:
            raise ValueError(f"row-tokens is too small: got {self.row_tokens}; expected at least 2")
        check_fraction(self.validation_fraction)
        training = [source for source in self.sources if source.split == "train"]
        if not training:
            raise ValueError("no source is for training: got validation only; expected one more")
        if len(training) < len(self.sources) and self.validation_fraction:
            raise ValueError(
                "validation is given twice: got sources of its own and --validation-fraction; "
                "expected one of them; leave one out"
            )
        weights = [source.weight is not None for source in training]
        if any(weights) and not all(weights):
            raise ValueError(
                "a weight is missing: got some sources with one and some without; expected all or "
                "none"
            )
        for source in self.sources:
            if source.weight is not None and source.split == "validation":
                raise ValueError(
                    f"a weight acts on training sources only: got weight {source.weight} for "
                    f"validation source {source.name}; leave it out"
                )
            if source.weight is None and source.repeat > 1:
                raise ValueError(
                    f"repeat acts with a weight only: got repeat {source.repeat} for "
                    f"{source.name} without one; give a weight"
                )
        if self.min_tokens is not None and self.min_tokens < 0:
            raise ValueError(f"min-tokens is too small: got {self.min_tokens}; expected at least 0")
        shortest, longest = self.min_tokens or 0, self.max_tokens
        if longest is not None and longest < max(shortest, 3):
            raise ValueError(
                f"max-tokens leaves nothing: got {longest}; expected at least "
                f"{max(shortest, 3)} (min-tokens, and one token between bos and eos)"
            )
        for tokens, weight in self.length_weights:
            if tokens < 0 or not 0 <= weight <= 1000:
                raise ValueError(
                    f"length-weight is out of range: got {tokens}:{weight}; expected TOKENS:WEIGHT "
                    "with TOKENS >= 0 and 0 <= WEIGHT <= 1000"
                )
        if self.near_duplicates is not None and not 0.1 <= self.near_duplicates <= 1:
            raise ValueError(
                f"near-duplicates is out of range: got {self.near_duplicates}; expected a Jaccard "
                "similarity from 0.1 to 1, such as 0.8"
            )
        if self.overlap_words < 5:
            raise ValueError(
                f"overlap-words is too small: got {self.overlap_words}; expected at least 5, since "
                "shorter phrases are shared by chance"
            )
        return self

    @property
    def wants_validation(self) -> bool:
        return self.validation_fraction > 0 or any(s.split == "validation" for s in self.sources)

    def arguments(self) -> list[str]:
        """Arguments of `pack` that ask for this, without tokenizer, output and row-tokens."""
        first = self.sources[0]
        words: list[str] = ["--recipe", self.recipe] if self.recipe else list(first.inputs)
        options: dict[str, object] = {
            "validation-fraction": self.validation_fraction or None,
            "seed": self.seed or None,
            "min-tokens": self.min_tokens,
            "max-tokens": self.max_tokens,
            "order": self.order if self.order != "corpus" else None,
            "near-duplicates": self.near_duplicates,
            "overlap": self.overlap if self.overlap != "drop" else None,
            "overlap-words": self.overlap_words if self.exclude_overlap else None,
        }
        many: list[tuple[str, object]] = [
            *(("exclude-overlap", name) for name in self.exclude_overlap),
            *(("length-weight", f"{tokens}:{w:g}") for tokens, w in self.length_weights),
        ]
        if not self.recipe:
            options["text-field"] = first.text_field if first.text_field != "text" else None
            options["id-field"] = first.id_field
            many += [("include", pattern) for pattern in first.include]
            many += [("validation", v) for source in self.sources[1:] for v in source.inputs]
        for name, value in [*options.items(), *many]:
            if value is not None:
                words += [f"--{name}", str(value)]
        return words + (["--keep-duplicates"] if self.keep_duplicates else [])


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless 0 <= fraction < 1."""
    if not 0 <= fraction < 1:
        raise ValueError(
            f"validation-fraction is out of range: got {fraction}; expected 0 <= fraction < 1"
        )


def one_line(error: ValidationError) -> str:
    """pydantic's complaints as the lines that the command prints."""
    lines = []
    places = [details["loc"] for details in error.errors()]
    for details in error.errors():
        place = details["loc"]
        if any(len(other) > len(place) and other[: len(place)] == place for other in places):
            continue  # of a fault inside it
        name = ".".join(str(part) for part in details["loc"])
        message = details["msg"].removeprefix("Value error, ")
        if details["type"] == "value_error":
            lines.append(message)
        elif details["type"] == "extra_forbidden":
            known = Source.model_fields if len(place) > 1 else _Recipe.model_fields
            near = get_close_matches(str(place[-1]), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            lines.append(f"unknown setting: got {name}; {hint}")
        elif details["type"] == "missing":
            lines.append(f"setting is missing: expected {name}")
        elif details["type"] in EXPECTED:
            lines.append(
                f"{name} is wrong: got {details['input']!r}; expected {EXPECTED[details['type']]}"
            )
        else:
            lines.append(f"{name} is wrong: got {details['input']!r}; {message}")
    return "\n".join(lines)


class _Recipe(_Model):
    sources: tuple[Source, ...] = Field(min_length=1)


def load_recipe(path: Path) -> tuple[Source, ...]:
    """The sources of a recipe file. FileNotFoundError or ValueError, one line for each fault."""
    if not path.is_file():
        raise FileNotFoundError(f"no recipe: got {path}; expected a YAML file")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        found = "an empty file" if tree is None else f"a {type(tree).__name__}"
        raise ValueError(
            f"recipe {path} names no sources: got {found}; expected `sources:` and a list of them"
        )
    try:
        return _Recipe.model_validate(tree).sources
    except ValidationError as error:
        faults = [f"recipe {path}: {line}" for line in one_line(error).splitlines()]
        raise ValueError("\n".join(faults)) from None
