"""The pack command: corpora and a tokenizer in, a data set of packed rows out.

    tokenise   one task a unit of documents -> two files each               (unit_files.py)
    select     duplicates out, weights -> copies of every document          (selection.py)
    lay out    the chosen documents end to end -> the rows of every shard   (pack.py)
    pack       one task a shard -> the shard                                (shard_files.py)
    publish    index, manifest

Every task leaves files that depend on the corpus and the settings alone. So the data set is the
same to the byte for any number of workers, and a run that was killed keeps the tasks it has done.
The unit files need about as much disk as the finished shards, until these are complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.corpus import INPUTS_NAME, STDIN_NAME, Corpus, listed, refuse_changed
from data_prep.dataset_folder import (
    building,
    finished,
    publish,
    remove,
    write_atomically,
)
from data_prep.lengths import length_counts, write_length_plot
from data_prep.near_duplicates import require_datasketch
from data_prep.overlap import EvaluationTexts
from data_prep.pack import Run, lay_out, names_from
from data_prep.parallel import Pool
from data_prep.progress import stage
from data_prep.recipe import PackRequest
from data_prep.selection import Selection, select
from data_prep.shard_files import ShardJob, ShardTools, write_index, write_shard
from data_prep.shards import (
    INDEX_NAME,
    ROW_LENGTHS_NAME,
    SHARD_BYTES,
    Manifest,
    SettingValue,
    SkippedDocuments,
    SourceFacts,
    SplitFacts,
    token_dtype,
)
from data_prep.sources import UNIT_BYTES, make_units
from data_prep.tokenizer import Tokenizer
from data_prep.unit_files import (
    TRAIN,
    VALIDATION,
    Reasons,
    Tools,
    UnitJob,
    UnitTable,
    tokenise_unit,
)

KIND = "text"
TAIL_REASON = "begins in the dropped tail"
LENGTH_PLOT_NAME = "lengths.png"


def prepare(
    request: PackRequest,
    tokenizer: Tokenizer,
    output: Path,
    workers: int | None = None,
    address: str | None = None,
) -> tuple[Manifest, bool]:
    """Make the data set at `output` unless it is there already; returns (manifest, made now).

    workers: processes; None decides by the amount of work. address: of a Ray cluster to work on.
    Raises ValueError or FileNotFoundError in one line for anything wrong with the request, the
    corpus or the output; OSError where the output cannot be written, and the same call goes on.
    """
    if request.near_duplicates is not None:
        require_datasketch()
    with listed(request, output) as corpus:
        return _prepare(request, tokenizer, output, corpus, Pool(workers, address))


def _prepare(
    request: PackRequest, tokenizer: Tokenizer, output: Path, corpus: Corpus, workers: Pool
) -> tuple[Manifest, bool]:
    texts = None
    if request.exclude_overlap:
        texts = EvaluationTexts(request.exclude_overlap, request.overlap_words)
        if texts.short:
            print(
                f"warning: {len(texts.short)} evaluation texts are shorter than "
                f"{request.overlap_words} words and cannot be looked for, such as {texts.short[0]}",
                file=sys.stderr,
            )
    settings = _settings(request, tokenizer, corpus, texts)
    try:
        refuse_changed(output, corpus)
        if (manifest := finished(output, KIND, settings)) is not None:
            return manifest, False
        with building(output) as work, workers as pool:
            if corpus.stdin is not None:
                os.replace(corpus.stdin, work / STDIN_NAME)
            tools = Tools(
                tokenizer, texts, request.overlap == "drop", request.near_duplicates is not None
            )
            jobs = _unit_jobs(request, corpus)
            tables = _tokenise(jobs, tools, work / "units", pool)
            manifest = _pack(request, tokenizer, settings, jobs, tables, work, pool)
            write_length_plot(manifest, output / LENGTH_PLOT_NAME)
            write_atomically(output / INPUTS_NAME, corpus.listing)
            publish(output, manifest, tokenizer.model)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"{output} cannot be written: {error.strerror} (at {error.filename or output}); "
            "nothing done so far is lost; make room and run the same command again"
        ) from None
    return manifest, True


def _settings(
    request: PackRequest, tokenizer: Tokenizer, corpus: Corpus, texts: EvaluationTexts | None
) -> dict[str, SettingValue]:
    """What decides the rows."""
    sources = [
        [source.model_dump(mode="json", exclude={"inputs", "include"})]
        + [[file.name, file.file_bytes, file.version] for file in files]
        for source, files in zip(request.sources, corpus.files, strict=True)
    ]
    weights = ",".join(f"{tokens}:{weight:g}" for tokens, weight in request.length_weights)
    return {
        "tokenizer_sha256": tokenizer.sha256,
        "row_tokens": request.row_tokens,
        "validation_fraction": request.validation_fraction,
        "seed": request.seed,
        "min_tokens": request.min_tokens,
        "max_tokens": request.max_tokens,
        "length_weights": weights,
        "order": request.order,
        "keep_duplicates": request.keep_duplicates,
        "near_duplicates": request.near_duplicates,
        "exclude_overlap_sha256": texts.sha256 if texts is not None else None,
        "overlap_words": request.overlap_words if texts is not None else None,
        "overlap": request.overlap if texts is not None else None,
        "inputs_sha256": hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
    }


def _unit_jobs(request: PackRequest, corpus: Corpus) -> list[UnitJob]:
    """The units of the training sources, then those of validation, without their paths."""
    jobs = []
    by_split = sorted(enumerate(request.sources), key=lambda pair: pair[1].split != "train")
    for n, source in by_split:
        fraction = request.validation_fraction if source.split == "train" else 1.0
        for unit in make_units(corpus.files[n], UNIT_BYTES, source.reading):
            jobs.append(
                UnitJob(unit, n, fraction, request.seed, request.min_tokens, request.max_tokens)
            )
    return jobs


def _tokenise(jobs: Sequence[UnitJob], tools: Tools, folder: Path, pool: Pool) -> list[UnitTable]:
    """The units' tables, in order; those that a killed run finished are not made again."""
    folder.mkdir(exist_ok=True)
    texts = (tools.texts.sha256, tools.texts.words, tools.drop_overlaps) if tools.texts else None
    paths = []
    for n, job in enumerate(jobs):
        what = repr((tools.tokenizer.sha256, texts, tools.sign, replace(job, path="")))
        key = hashlib.sha256(what.encode("utf-8", "surrogateescape")).hexdigest()
        paths.append(folder / f"{n:06d}-{key[:16]}.npz")
    wanted = {path for path in paths for path in (path, path.with_suffix(".tokens"))}
    for stale in set(folder.iterdir()) - wanted:
        stale.unlink()
    missing = [n for n, path in enumerate(paths) if not path.exists()]
    todo = [replace(jobs[n], path=str(paths[n])) for n in missing]
    work_bytes = sum(job.unit.size for job in todo)
    with stage("tokenising", work_bytes) as progress:
        for index, counts in pool.run(tokenise_unit, tools, todo, work_bytes):
            progress.advance(todo[index].unit.size, counts.documents, counts.tokens)
    return [UnitTable(path) for path in paths]


def _pack(
    request: PackRequest,
    tokenizer: Tokenizer,
    settings: Mapping[str, SettingValue],
    jobs: Sequence[UnitJob],
    tables: Sequence[UnitTable],
    work: Path,
    pool: Pool,
) -> Manifest:
    skipped, overlapping = Reasons(), Reasons()
    documents_in = 0
    for table in tables:
        record = table.record()
        documents_in += len(record["names"]) + sum(record["skipped"][0].values())
        skipped.merge(*record["skipped"])
        overlapping.merge(*record["overlapping"])
    if documents_in == sum(skipped.counts.values()):
        found = "; ".join(
            f"{count} {reason} (such as {skipped.examples[reason][0]})"
            for reason, count in skipped.counts.items()
        )
        raise ValueError(
            f"no document could be read: got {found or 'only blank lines'}; expected UTF-8 text, "
            "or records with a text field (--text-field)"
        )
    selection = select(tables, [job.source for job in jobs], request, skipped)
    splits = {"train": TRAIN, "validation": VALIDATION}
    if not request.wants_validation:
        del splits["validation"]
    _forget_other_plan(work, tables, settings)
    facts = {
        name: _pack_split(name, number, request, tokenizer, tables, selection, work, pool, skipped)
        for name, number in splits.items()
    }
    training = [source for source in request.sources if source.split == "train"]
    return Manifest(
        kind=KIND,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        row_tokens=request.row_tokens,
        dtype=token_dtype(tokenizer.vocab_size),
        splits=facts,
        documents_in=documents_in,
        skipped=_for_manifest(skipped),
        inputs=[typed for source in request.sources for typed in source.inputs],
        settings=dict(settings),
        seed=request.seed,
        sources=[
            SourceFacts(
                name=source.name, documents=share.documents, tokens=share.tokens, rate=share.rate
            )
            for source, share in zip(training, selection.shares, strict=True)
        ],
        overlapping=_for_manifest(overlapping),
        arguments=request.arguments(),
    )


def _forget_other_plan(
    work: Path, tables: Sequence[UnitTable], settings: Mapping[str, SettingValue]
) -> None:
    """Removes shards that a killed run made of other documents or with other settings."""
    what = json.dumps([[table.path.name for table in tables], settings])
    plan = hashlib.sha256(what.encode()).hexdigest().encode()
    path = work / "plan"
    if path.is_file() and path.read_bytes() == plan:
        return
    for split in ("train", "validation"):
        remove(work / split)
        remove(work / f"{split}.facts")
    write_atomically(path, plan)


def _pack_split(
    name: str,
    number: int,
    request: PackRequest,
    tokenizer: Tokenizer,
    tables: Sequence[UnitTable],
    selection: Selection,
    work: Path,
    pool: Pool,
    skipped: Reasons,
) -> SplitFacts:
    """Pack one split into work/<name>. Raises ValueError if it has no full row."""
    by_length = request.order == "longest-first"
    runs = lay_out(tables, selection.copies, number, by_length)
    tokens = runs[-1].start + runs[-1].tokens if runs else 0
    rows, tail = divmod(tokens, request.row_tokens)
    if rows == 0:
        raise ValueError(
            f"the {name} split has no full row: got {tail} tokens; expected at least row-tokens = "
            f"{request.row_tokens}; lower --row-tokens or give this split more text"
        )
    folder, facts = work / name, work / f"{name}.facts"
    for made in (folder, facts):
        made.mkdir(exist_ok=True)
    for stale in (*facts.glob(".*.tmp"), *folder.glob(".*.tmp")):
        stale.unlink()
    token_bytes = np.dtype(token_dtype(tokenizer.vocab_size)).itemsize
    jobs = _shard_jobs(runs, rows, request.row_tokens, token_bytes, folder, facts)
    todo = [job for job in jobs if not job.is_done]
    row_bytes = request.row_tokens * token_bytes
    work_bytes = sum(job.rows for job in todo) * row_bytes
    shared = ShardTools(request.row_tokens, tokenizer.vocab_size, tokenizer.token_bytes)
    with stage(f"packing {name}", work_bytes) as progress:
        for index, counts in pool.run(write_shard, shared, todo, work_bytes):
            progress.advance(todo[index].rows * row_bytes, counts.documents, counts.tokens)
    totals = write_index(folder, [Path(job.facts) for job in jobs])
    for document in names_from(runs, rows * request.row_tokens):
        skipped.add(TAIL_REASON, document)
    documents, length_tokens = length_counts(tables, selection.copies, number)
    return SplitFacts(
        rows=rows,
        tokens=rows * request.row_tokens,
        documents=totals.documents,
        bytes=totals.text_bytes,
        dropped_tokens={"tail": tail},
        index_sha256=hashlib.sha256((folder / INDEX_NAME).read_bytes()).hexdigest(),
        row_lengths_sha256=hashlib.sha256((folder / ROW_LENGTHS_NAME).read_bytes()).hexdigest(),
        repeats=totals.repeats,
        length_documents=documents,
        length_tokens=length_tokens,
    )


def _shard_jobs(
    runs: Sequence[Run], rows: int, row_tokens: int, token_bytes: int, folder: Path, facts: Path
) -> list[ShardJob]:
    a_shard = max(1, SHARD_BYTES // (row_tokens * token_bytes))
    starts = np.array([run.start for run in runs])
    jobs = []
    for number, first in enumerate(range(0, rows, a_shard)):
        count = min(a_shard, rows - first)
        low = int(np.searchsorted(starts, first * row_tokens, side="right")) - 1
        high = int(np.searchsorted(starts, (first + count) * row_tokens))
        jobs.append(
            ShardJob(
                folder=str(folder),
                facts=str(facts / f"{number:05d}.npz"),
                number=number,
                first_row=first,
                rows=count,
                runs=tuple(runs[low:high]),
            )
        )
    return jobs


def _for_manifest(reasons: Reasons) -> dict[str, SkippedDocuments]:
    return {
        reason: SkippedDocuments(count=count, examples=reasons.examples[reason])
        for reason, count in reasons.counts.items()
    }
