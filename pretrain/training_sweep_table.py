"""The table of a sweep of training runs: for every measurement each arm's mean, std and every seed.

Measurements share a table only if task, version, metric and every setting are the same, as in
`python -m eval compare`, which tests two runs against each other sample by sample.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from eval.compare import Row, shared_rows
from eval.report import brief
from pretrain.training_sweep import TrainingSpec, TrainingSweep

Results = Mapping[TrainingSpec, dict[str, Any]]


def summaries(config: TrainingSweep, results: Results) -> list[dict[str, Any]]:
    """One entry for each measurement, place on the axes and arm that has a complete run."""
    specs = [spec for spec in config.runs() if spec in results]
    groups: dict[tuple[str, str], list[int]] = {}
    for cell in dict.fromkeys(spec.cell for spec in specs):
        for arm in config.arms:
            places = [i for i, s in enumerate(specs) if (s.cell, s.arm) == (cell, arm.name)]
            if places:
                groups[cell, arm.name] = places
    found = []
    for row in shared_rows([results[spec]["results"] for spec in specs]):
        for (cell, arm_name), places in groups.items():
            values = {
                str(specs[i].seed): value[0] for i in places if (value := row.values[i]) is not None
            }
            if values:
                found.append(_summary(row, cell, arm_name, values))
    return found


def _summary(row: Row, cell: str, arm: str, values: dict[str, float]) -> dict[str, Any]:
    numbers = list(values.values())
    return {
        "task": row.task,
        "version": row.version,
        "metric": row.metric,
        "unit": row.unit,
        "settings": row.settings,
        "cell": cell,
        "arm": arm,
        "seeds": values,
        "mean": statistics.fmean(numbers),
        "std": statistics.stdev(numbers) if len(numbers) > 1 else None,
    }


def markdown(config: TrainingSweep, results: Results) -> str:
    """A section for each measurement."""
    lines = [
        f"# {config.sweep_dir.name}",
        "",
        f"{len(results)} of {len(config.runs())} runs complete. Mean (std) over seeds.",
    ]
    sections: dict[str, list[dict[str, Any]]] = {}
    for entry in summaries(config, results):
        settings = entry["settings"]
        bucket = f" {settings['from']}-{settings['to']}" if "to" in settings else ""
        measured = f"{entry['task']} (version {entry['version']}) {entry['metric']}{bucket}"
        title = f"{measured}, {entry['unit']}; {brief(settings)}".rstrip("; ")
        sections.setdefault(title, []).append(entry)
    for title, entries in sections.items():
        lines += ["", f"## {title}", "", "| | arm | mean (std) | every seed |"]
        lines.append("| --- | --- | --- | --- |")
        for entry in entries:
            spread = "" if entry["std"] is None else f" ({entry['std']:.4g})"
            seeds = " ".join(f"{value:.5g}" for value in entry["seeds"].values())
            cells = [entry["cell"], entry["arm"], f"{entry['mean']:.5g}{spread}", seeds]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
