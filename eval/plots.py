"""Figures as PNG, from the samples on disk: NIAH by depth and length, loss by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.loss_by_position import bucket_ends
from eval.samples import Values, read_samples

DEPTH_BINS = 10
FOLDER_NAME = "plots"
Log = tuple[dict[str, Any], dict[str, Values]]


def of_one_model(folder: Path, tasks: Sequence[str]) -> list[Path]:
    """Draws what the samples beside `folder`/results.json allow, of the given tasks; the files."""
    logs = [log for log in read_samples(folder) if log[0]["task"] in tasks and log[1]]
    made = [
        heat_map(folder / FOLDER_NAME / f"{name}.png", name, by_length)
        for name, by_length in _niah(logs)
    ]
    curves = {
        f"blocks of {header['settings']['length']}": (header, samples)
        for header, samples in logs
        if header["task"] == "loss-by-position"
    }
    if curves:
        made.append(loss_curves(folder / FOLDER_NAME / "loss-by-position.png", curves))
    return made


def _niah(logs: Sequence[Log]) -> Iterator[tuple[str, dict[int, list[Values]]]]:
    """(RULER task, samples by length), newest version only: versions never mix."""
    niah = [log for log in logs if log[0]["task"] == "niah"]
    newest = max((header["version"] for header, _ in niah), default=0)
    found: dict[str, dict[int, list[Values]]] = {}
    for header, samples in niah:
        settings = header["settings"]
        if header["version"] == newest:
            lengths = found.setdefault(settings["ruler_task"], {})
            lengths.setdefault(settings["length"], []).extend(samples.values())
    yield from sorted(found.items())


def heat_map(path: Path, name: str, by_length: Mapping[int, Sequence[Values]]) -> Path:
    """Accuracy in percent against depth (top to bottom) and length (left to right)."""
    lengths = sorted(by_length)
    grid = np.full((DEPTH_BINS, len(lengths)), np.nan)
    for column, length in enumerate(lengths):
        depth = np.array([one["depth"] for one in by_length[length]])
        accuracy = np.array([one["accuracy"] for one in by_length[length]])
        bins = np.minimum((depth * DEPTH_BINS).astype(int), DEPTH_BINS - 1)
        for row in range(DEPTH_BINS):
            if (bins == row).any():
                grid[row, column] = accuracy[bins == row].mean()
    figure, axes = _figure(max(3.6, 1.6 + 0.9 * len(lengths)), 4.5)
    axes.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for row, column in zip(*np.nonzero(~np.isnan(grid)), strict=True):
        value = grid[row, column]
        color = "black" if value > 60 else "white"
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    step = 100 // DEPTH_BINS
    axes.set_yticks(range(DEPTH_BINS), [f"{i * step}-{(i + 1) * step}" for i in range(DEPTH_BINS)])
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("depth of the needle, %")
    axes.set_title(f"{name}: accuracy, %", fontsize=10)
    return _save(figure, path)


def loss_curves(path: Path, logs: Mapping[str, Log]) -> Path:
    """nats a token against position, a line for each name; dashed: the last 512 tokens only."""
    figure, axes = _figure(7, 4.5)
    for name, (header, samples) in logs.items():
        ends = np.array(bucket_ends(header["settings"]["length"]))
        tokens = np.diff(ends, prepend=0)
        center = ends - (tokens - 1) / 2
        color = None
        for column, style in (("buckets", "-"), ("short_buckets", "--")):
            sums = [one[column] for one in samples.values() if column in one]
            if sums:
                label = name if column == "buckets" else f"{name}, last 512 tokens only"
                nats = np.mean(sums, axis=0) / tokens
                (line,) = axes.plot(center, nats, style, color=color, label=label, marker=".")
                color = line.get_color()
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the block, tokens")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)


def bars(
    path: Path, title: str, names: Sequence[str], values: Mapping[str, Sequence[float]]
) -> Path:
    """Groups of bars: one group for each of `values`, one bar in it for each name."""
    figure, axes = _figure(2 + 0.5 * len(names) * len(values), 4)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [group[i] for group in values.values()]
        axes.bar(np.arange(len(values)) + i * width, heights, width, label=name)
    axes.set_xticks(np.arange(len(values)) + 0.4 - width / 2, list(values), fontsize=8, rotation=20)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return _save(figure, path)


def _figure(width: float, height: float) -> Any:
    """(figure, axes) without a display, and without the global state of pyplot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)
    return path
