"""What a scaling study says: a table for the terminal and for documents, and a figure."""

from collections.abc import Sequence
from pathlib import Path

from pretrain.scaling import Case, Launcher, Measurement, Study

COLUMNS = (
    *("scaling", "ZeRO", "ranks", "tokens an update", "launcher", "tokens/s", "efficiency"),
    *("of torchrun", "memory", "collectives", "hidden"),
)
KINDS = ("weak", "strong")


def rows(study: Study, measured: Sequence[Measurement]) -> list[list[str]]:
    """A row a measurement, in the order of COLUMNS.

    efficiency: tokens per second and rank, of those of the smallest number of ranks; of torchrun:
    tokens per second, of torchrun's; collectives: time in them in an update, and its share; hidden:
    the share of that time in which the rank computed too.
    """
    by_case = {found.case: found for found in measured}

    def of(kind: str, stage: int, ranks: int, launcher: Launcher) -> Measurement:
        tokens = study.batch_tokens(ranks, kind)
        return by_case[Case(launcher=launcher, zero_stage=stage, ranks=ranks, batch_tokens=tokens)]

    table = []
    for kind in KINDS:
        for stage in study.zero_stages:
            for ranks in study.ranks:
                for launcher in study.launchers:
                    found = of(kind, stage, ranks, launcher)
                    first = of(kind, stage, study.ranks[0], launcher)
                    beside = of(kind, stage, ranks, study.launchers[0])
                    talk = found.collective_seconds
                    table.append(
                        [
                            *(kind, str(stage), str(ranks), f"{found.case.batch_tokens:,}"),
                            *(launcher, f"{found.tokens_per_second:,.0f}"),
                            f"{100 * efficiency(found, first):.1f} %",
                            f"{100 * found.tokens_per_second / beside.tokens_per_second:.1f} %"
                            if "torchrun" in study.launchers
                            else "-",
                            f"{found.memory_bytes / 2**30:.2f} GiB",
                            f"{1000 * talk:.1f} ms ({100 * talk / found.seconds:.0f} %)",
                            f"{100 * found.hidden_seconds / talk:.0f} %" if talk else "-",
                        ]
                    )
    return table


def efficiency(found: Measurement, first: Measurement) -> float:
    """Tokens per second and rank, relative to those of `first`."""
    return (found.tokens_per_second / found.case.ranks) / (
        first.tokens_per_second / first.case.ranks
    )


def markdown(table: Sequence[Sequence[str]]) -> str:
    """The rows for a document."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *table]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw(study: Study, measured: Sequence[Measurement], path: Path) -> None:
    """Efficiency against ranks, weak and strong beside each other, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    by_case = {found.case: found for found in measured}
    for panel, kind in zip(panels, KINDS, strict=True):
        for stage in study.zero_stages:
            for launcher in study.launchers:
                points = [
                    by_case[
                        Case(
                            launcher=launcher,
                            zero_stage=stage,
                            ranks=ranks,
                            batch_tokens=study.batch_tokens(ranks, kind),
                        )
                    ]
                    for ranks in study.ranks
                ]
                panel.plot(
                    study.ranks,
                    [100 * efficiency(point, points[0]) for point in points],
                    marker="o",
                    color=f"C{stage}",
                    linestyle="-" if launcher == "torchrun" else "--",
                    label=f"ZeRO-{stage}, {launcher}",
                )
        panel.set_title(f"{kind} scaling")
        panel.set_xlabel("GPUs" if study.on_gpus else "CPU processes")
        panel.set_xticks(study.ranks)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens per second and rank, % of the fewest")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    figure.savefig(path, dpi=120)
