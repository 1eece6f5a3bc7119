"""Several models side by side: a table, paired tests and plots, in one Markdown report.

Two numbers share a row only if task, version, metric, unit and every setting are the same; what
was measured otherwise gets a row of its own. Where samples are on disk for both models, each model
is tested against the first one, sample by sample (significance.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import plots, report
from eval.evaluation import Target
from eval.samples import Values, read_samples
from eval.significance import PairedTest, paired_test
from eval.task import find_task
from models.checkpoint_directory import write_atomically

REPORT_NAME = "report.md"
# Differ between models without making their numbers incomparable.
_NOT_COMPARED = ("trained_length",)
Logs = dict[str, tuple[dict[str, Any], dict[str, Values]]]


@dataclass(frozen=True)
class Row:
    """One measurement: its value and standard error for each model, None where it was not made."""

    task: str
    version: int
    metric: str
    unit: str
    settings: dict[str, Any]
    values: list[tuple[float, float | None] | None]


@dataclass(frozen=True)
class Test:
    """One value of one measurement, a model against the first."""

    what: str
    metric: str
    model: str
    result: PairedTest


def write(found: Sequence[Target], folder: Path, tasks: Sequence[str] | None = None) -> Path:
    """Writes the report of the models' results on disk; its path.

    Args:
        found: at least two models.
        tasks: names in TASKS or lm-eval:NAME; None: all.

    Raises:
        ValueError: fewer than two models, or no results.
        OSError: it cannot be written.
    """
    if len(found) < 2:
        raise ValueError(
            f"nothing to compare: got {len(found)} model; expected two or more; name more models"
        )
    report.check_writable(folder)
    contents = [
        [
            entry
            for entry in report.earlier_results(target.output, target.described)
            if tasks is None or entry["task"] in tasks
        ]
        for target in found
    ]
    if empty := [t.model_dir for t, entries in zip(found, contents, strict=True) if not entries]:
        raise ValueError(
            f"no results to compare: got none of {empty[0]}; expected some; run "
            f"python -m eval {empty[0]} --tasks {','.join(tasks or ['TASKS'])} first"
        )
    names = model_names(found)
    logs = [_logs(target, tasks) for target in found]
    rows = shared_rows(contents)
    tests = paired_tests(names, logs)
    folder.mkdir(parents=True, exist_ok=True)
    figures = _figures(folder, names, rows, logs)
    path = folder / REPORT_NAME
    write_atomically(path, _markdown(found, names, rows, tests, figures).encode())
    return path


def model_names(found: Sequence[Target]) -> list[str]:
    """The shortest ends of the paths that tell the models apart."""
    parts = [target.model_dir.absolute().parts for target in found]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(target.model_dir) for target in found]


def shared_rows(contents: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    """Every measurement of any model, in the order of the first that made it."""
    rows: dict[str, Row] = {}
    for place, entries in enumerate(contents):
        for entry in entries:
            settings = {k: v for k, v in entry["settings"].items() if k not in _NOT_COMPARED}
            identity = {name: entry[name] for name in ("task", "version", "metric", "unit")}
            key = json.dumps([identity, settings], sort_keys=True)
            if key not in rows:
                none: list[tuple[float, float | None] | None] = [None] * len(contents)
                rows[key] = Row(**identity, settings=entry["settings"], values=none)
            rows[key].values[place] = (entry["value"], entry["standard_error"])
    return list(rows.values())


def _logs(target: Target, tasks: Sequence[str] | None) -> Logs:
    """The sample logs of a model by what they measure; those of other weights are left out."""
    found = {}
    for header, samples in read_samples(target.output.parent):
        of_model = header["weights_sha256"] == target.described["weights_sha256"]
        if of_model and samples and (tasks is None or header["task"] in tasks):
            settings = {k: v for k, v in header["settings"].items() if k not in _NOT_COMPARED}
            key = json.dumps([header["task"], header["version"], settings], sort_keys=True)
            found[key] = (header, samples)
    return found


def paired_tests(names: Sequence[str], logs: Sequence[Logs]) -> list[Test]:
    """Every model against the first, by every value that samples of both have."""
    tests = []
    for key, (header, first) in logs[0].items():
        what = f"{header['task']} (version {header['version']}) {report.brief(header['settings'])}"
        for name, others in zip(names[1:], logs[1:], strict=True):
            if key not in others:
                continue
            second = others[key][1]
            shared = [k for k in first if k in second]
            for metric in find_task(header["task"]).paired:
                pairs = [
                    (first[k][metric], second[k][metric])
                    for k in shared
                    if metric in first[k] and metric in second[k]
                ]
                if len(pairs) < 2:
                    continue
                clusters = [first[k].get("document") for k in shared]
                result = paired_test(
                    [a for a, _ in pairs],
                    [b for _, b in pairs],
                    None if None in clusters else clusters,  # type: ignore[arg-type]
                )
                tests.append(Test(what, metric, name, result))
    return tests


def _figures(
    folder: Path, names: Sequence[str], rows: Sequence[Row], logs: Sequence[Logs]
) -> list[tuple[str, Path]]:
    """(title, file) of each plot."""
    made = []
    for key, (header, _) in logs[0].items():
        if header["task"] == "loss-by-position":
            curves = {n: log[key] for n, log in zip(names, logs, strict=True) if key in log}
            length = header["settings"]["length"]
            path = folder / f"loss-by-position-{length}.png"
            made.append((f"Loss by position, blocks of {length}", plots.loss_curves(path, curves)))
    accuracies: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in rows:
        if row.metric == "accuracy" and all(row.values):
            label = str(row.settings.get("ruler_task", row.settings.get("variant") or row.task))
            numbers = (row.settings.get(n) for n in ("length", "pairs", "copied"))
            label += "".join(f" {n}" for n in numbers if n is not None)
            group = accuracies.setdefault((row.task, row.version), {})
            group[label] = [value[0] for value in row.values if value is not None]
    for (task, version), values in accuracies.items():
        title = f"{task} (version {version}): accuracy, %"
        path = folder / f"accuracy-{task.replace(':', '-')}-{version}.png"
        made.append((title, plots.bars(path, title, names, values)))
    return made


def _markdown(
    found: Sequence[Target],
    names: Sequence[str],
    rows: Sequence[Row],
    tests: Sequence[Test],
    figures: Sequence[tuple[str, Path]],
) -> str:
    lines = ["# Comparison", "", *_table(["model", "path", "step", "weights", "tokenizer"])]
    for name, target in zip(names, found, strict=True):
        facts = target.described
        hashes = [(facts[k] or "none")[:12] for k in ("weights_sha256", "tokenizer_sha256")]
        step = "-" if facts["step"] is None else str(facts["step"])
        lines.append(_line([name, str(target.model_dir), step, *hashes]))
    titles: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{row.task} (version {row.version}) {report.brief(row.settings)}".strip()
        titles.setdefault(title, []).append(row)
    for title, group in titles.items():
        lines += ["", f"## {title}", "", *_table(["metric", "unit", *names])]
        for row in group:
            s = row.settings
            bucket = f" {s['from']}-{s['to']}" if "to" in s else ""
            lines.append(_line([row.metric + bucket, row.unit, *map(_value, row.values)]))
    if tests:
        lines += [
            "",
            f"## Paired tests against {names[0]}",
            "",
            f"{len(tests)} tests on the same samples; about {0.05 * len(tests):.1f} of them fall "
            "below p = 0.05 by chance alone. Difference: model minus first, with its 95 % "
            "interval.",
            "",
            *_table(["measurement", "value", "model", "difference", "p", "samples", "test"]),
        ]
        for test in tests:
            r = test.result
            span = f"{r.difference:+.4f} [{r.low:+.4f}, {r.high:+.4f}]"
            lines.append(
                _line(
                    [
                        test.what,
                        test.metric,
                        test.model,
                        span,
                        f"{r.p:.4f}",
                        str(r.samples),
                        r.method,
                    ]
                )
            )
    for title, path in figures:
        lines += ["", f"## {title}", "", f"![{title}]({path.name})"]
    return "\n".join(lines) + "\n"


def _value(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return "-"
    return f"{value[0]:.4f}" + ("" if value[1] is None else f" +- {value[1]:.4f}")


def _table(header: Sequence[str]) -> list[str]:
    return [_line(header), _line(["---"] * len(header))]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
