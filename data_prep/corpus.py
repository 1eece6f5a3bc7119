"""The files of a request, standard input among them, and what tells them from changed ones.

A file's version is a hash of its content, so a copy of a corpus elsewhere is the same corpus; of a
file above HASHED_BYTES it is the time of its last change, of a remote one what its store says. The
versions decide the data set's identity, and INPUTS_NAME keeps them, one JSON line a file, so that
a changed input can be named.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data_prep.compression import is_remote
from data_prep.dataset_folder import WORK_FOLDER, make_folder
from data_prep.formats import Segment
from data_prep.recipe import PackRequest
from data_prep.sources import STDIN_INPUT, list_files, spool_stdin

HASHED_BYTES = 64 << 20
INPUTS_NAME = "inputs.jsonl"
STDIN_NAME = "stdin.jsonl"


@dataclass(frozen=True)
class Corpus:
    """The files of each source of a request."""

    files: list[list[Segment]]
    stdin: Path | None  # where standard input was read to

    @property
    def listing(self) -> bytes:
        """INPUTS_NAME's content: [source, name, bytes, version] a line."""
        return "".join(
            json.dumps([n, file.name, file.file_bytes, file.version]) + "\n"
            for n, files in enumerate(self.files)
            for file in files
        ).encode()


@contextmanager
def listed(request: PackRequest, output: Path) -> Iterator[Corpus]:
    """The files of all sources. Standard input is read here, once, to a file beside the output.

    That file is removed at the end, unless it was moved; a killed process's by the next one.
    """
    dashes = [
        typed for source in request.sources for typed in source.inputs if typed == STDIN_INPUT
    ]
    if len(dashes) > 1:
        raise ValueError("standard input is given twice: got - and -; expected it once")
    _remove_stale_spools(output)
    spool = _spool_of(output, os.getpid()) if dashes else None
    try:
        read = _read_stdin(spool, output) if spool is not None else None
        files = []
        for source in request.sources:
            typed = [name for name in source.inputs if name != STDIN_INPUT]
            found = list_files(typed, source.include) if typed else []
            found = [replace(file, version=_version(file)) for file in found]
            if read is not None and len(typed) < len(source.inputs):
                found.append(read)
            files.append(found)
        _refuse_shared_files(request, files)
        yield Corpus(files, spool)
    finally:
        if spool is not None:
            spool.unlink(missing_ok=True)


def refuse_changed(output: Path, corpus: Corpus) -> None:
    """ValueError where a finished data set is at `output` whose inputs were others."""
    path = output / INPUTS_NAME
    if not path.is_file() or not (output / "manifest.json").is_file():
        return
    there, now = path.read_bytes(), corpus.listing
    if there == now:
        return
    before, after = ([json.loads(line) for line in text.splitlines()] for text in (there, now))
    old, new = ({line[1]: line[2:] for line in lines} for lines in (before, after))
    name = next((name for name in [*old, *new] if old.get(name) != new.get(name)), None)
    if name is not None:
        change = f"{name} there {_described(old.get(name))}, now {_described(new.get(name))}"
    else:  # the same files in another order, or a name that comes twice
        pairs = enumerate(zip_longest(before, after), 1)
        place, (was, became) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        change = f"input {place} there {was}, now {became}"
    raise ValueError(
        f"output {output} holds a data set of other inputs: {change}; choose another --output or "
        "remove that folder"
    )


def _described(facts: list[Any] | None) -> str:
    return "absent" if facts is None else f"{facts[0]} bytes of {facts[1] or 'unknown content'}"


def _version(file: Segment) -> str:
    if file.kind == "huggingface" or is_remote(file.path):
        return file.version
    if file.file_bytes > HASHED_BYTES:
        return f"mtime {file.version}"
    if not os.path.isfile(file.path):  # a named pipe would block for ever
        return file.version
    try:
        with open(file.path, "rb") as stream:
            return f"sha256 {hashlib.sha256(stream.read(HASHED_BYTES)).hexdigest()[:32]}"
    except OSError:  # reading it will say so and count it
        return file.version


def _spool_of(output: Path, pid: int | str) -> Path:
    return output.absolute().with_name(f".{output.absolute().name}.{pid}.stdin")


def _read_stdin(spool: Path, output: Path) -> Segment:
    made = [folder for folder in spool.parents if not folder.exists()]
    make_folder(spool.parent, output)
    try:
        read = spool_stdin(spool)
    except ValueError:
        spool.unlink()
        for folder in made:
            folder.rmdir()
        raise
    return replace(read, path=str(output / WORK_FOLDER / STDIN_NAME))


def _remove_stale_spools(output: Path) -> None:
    """Removes what commands left behind that were killed while they read standard input."""
    for name in glob.glob(str(_spool_of(Path(glob.escape(str(output))), "*"))):
        pid = name.split(".")[-2]
        if pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                Path(name).unlink(missing_ok=True)
            except PermissionError:
                pass  # alive, and another user's: the number is in use again


def _refuse_shared_files(request: PackRequest, files: Sequence[Sequence[Segment]]) -> None:
    owners: dict[str, int] = {}
    for n, segments in enumerate(files):
        for segment in segments:
            path = os.path.realpath(segment.path) if segment.kind != "huggingface" else segment.path
            other = owners.setdefault(path, n)
            if other == n:
                continue
            if request.sources[other].split != request.sources[n].split:
                raise ValueError(
                    f"a file is in both splits: got {segment.path} in the inputs and in "
                    "--validation; expected separate files; move it, or use --validation-fraction"
                )
            raise ValueError(
                f"a file is in two sources: got {segment.path} in {request.sources[other].name} "
                f"and in {request.sources[n].name}; expected it in one; leave it out of the other"
            )
