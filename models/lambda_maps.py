"""Pictures of lambda (models/lambda_reading.py): maps of level x token, means per level."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed, and none is opened

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from models.lambda_reading import LayerLambda

HEADS_IN_A_ROW = 4
MOST_TICKS = 12


def draw_maps(lambdas: LayerLambda) -> Figure:
    """Level x token for every head of a layer, one colour scale for all."""
    weights = lambdas.weights
    H, L, T = weights.shape
    columns = min(H, HEADS_IN_A_ROW)
    rows = -(-H // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.2 * columns + 1, (0.17 * L + 0.75) * rows + 0.7),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    # The largest percent must not hide how the others differ.
    top = max(float(weights.flatten().kthvalue(max(1, int(0.99 * weights.numel()))).values), 1e-6)
    for head, ax in enumerate(axes.flat):
        if head >= H:
            ax.axis("off")
            continue
        image = ax.imshow(
            weights[head].numpy(),
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0,
            vmax=top,
        )
        ax.set_title(f"head {head}", fontsize=9)
        ax.set_yticks(range(0, L, -(-L // MOST_TICKS)))
        ax.tick_params(labelsize=8)
        if head % columns == 0:
            ax.set_ylabel("level", fontsize=9)
        if head + columns >= H:
            ax.set_xlabel("token", fontsize=9)
            ax.tick_params(labelbottom=True)
    figure.colorbar(image, ax=axes, label="lambda", extend="max", fraction=0.05, pad=0.01)
    figure.suptitle(f"layer {lambdas.layer}: weight of each level, token by token", fontsize=11)
    return figure


def draw_means(all_lambdas: list[LayerLambda]) -> Figure:
    """Mean weight per level (line) and its deviation over tokens (band), one panel per layer."""
    columns = min(len(all_lambdas), HEADS_IN_A_ROW)
    rows = -(-len(all_lambdas) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.6 * columns + 1.2, 2.6 * rows + 0.6),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for index, ax in enumerate(axes.flat):
        if index >= len(all_lambdas):
            ax.axis("off")
            continue
        lambdas = all_lambdas[index]
        mean, deviation = lambdas.mean.numpy(), lambdas.deviation.numpy()
        level = range(mean.shape[1])
        for head in range(len(mean)):
            colour = plt.get_cmap("turbo")((head + 0.5) / len(mean))
            ax.plot(level, mean[head], color=colour, label=f"head {head}", marker=".", linewidth=1)
            low, high = mean[head] - deviation[head], mean[head] + deviation[head]
            ax.fill_between(level, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.axhline(1, color="grey", linewidth=0.7, linestyle=":")
        ax.set_title(f"layer {lambdas.layer}", fontsize=9)
        ax.set_xticks(range(0, len(level), -(-len(level) // MOST_TICKS)))
        ax.tick_params(labelsize=8)
        if index % columns == 0:
            ax.set_ylabel("mean lambda, +- std over tokens", fontsize=8)
        if index + columns >= len(all_lambdas):
            ax.set_xlabel("level", fontsize=9)
            ax.tick_params(labelbottom=True)
    if len(all_lambdas[0].mean) <= 2 * MOST_TICKS:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    figure.suptitle("mean weight of each level; dotted: 1, the linear parent", fontsize=11)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG and frees the figure."""
    temporary = path.with_name(f"{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
    plt.close(figure)
