"""One run of a sweep: a small model, trained and scored on rows that are drawn in memory.

Logits are taken at the labelled positions only, which are a few of each row: at a vocabulary of
8,192 the others would cost more than the model.

A run's folder, RUNS below the sweep's:

    state.safetensors   weights, AdamW's moments and, as JSON, the history at the last scoring; gone
                        when the run is complete
    model/              a model directory, for `python -m eval`
    result.json         written last
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_safetensors
from torch import Tensor
from torch.optim import AdamW

from data_prep.shards import IGNORED_LABEL
from data_prep.synth import SyntheticTask, draw_rows
from eval.scoring import Score, score_batch, total
from models.checkpoint_directory import write_atomically
from models.initialize import initialize
from models.language_model import LanguageModel
from models.parameter_groups import decays
from models.weights import save_model
from pretrain.errors import Refused
from pretrain.same_run import leaves
from pretrain.sweep_config import Cell, RunSpec, SweepConfig

RESULT_NAME, STATE_NAME, MODEL_FOLDER = "result.json", "state.safetensors", "model"
SCORE_TOKENS = 65_536  # tokens of one forward pass while scoring


@dataclass(frozen=True)
class DrawnRows:
    """Rows of one task on a device: tokens [rows, T], where [rows, N] their labels stand, labels
    [rows, N]; all int64."""

    tokens: Tensor
    where: Tensor
    labels: Tensor


@lru_cache(maxsize=64)
def drawn(task: SyntheticTask, rows: int, split: str, seed: int, device: str) -> DrawnRows:
    """The rows of a task; runs of one process share them."""
    pairs = list(draw_rows(task, rows, split=split, seed=seed))
    tokens = np.stack([tokens for tokens, _ in pairs])
    labels = np.stack([labels for _, labels in pairs])
    where = np.nonzero(labels != IGNORED_LABEL)[1].reshape(rows, -1)
    columns = (tokens, where, np.take_along_axis(labels, where, axis=1))
    return DrawnRows(*(torch.from_numpy(column).to(device) for column in columns))


def logits_at(model: LanguageModel, tokens: Tensor, where: Tensor) -> Tensor:
    """Logits [B, N, vocab_size] at positions `where` [B, N] of tokens [B, T]."""
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x, None, tokens.shape[1])
    return model._logits(x.gather(1, where[:, :, None].expand(-1, -1, x.shape[2])))


@dataclass(frozen=True)
class Batch:
    """Which rows make an update: of which segment, and their places in it."""

    segment: int
    rows: Tensor


@dataclass
class History:
    """What a run has seen of itself; plain values."""

    step: int = 0
    scored: list[dict[str, Any]] = field(default_factory=list)
    """For each scoring: step, mean accuracy, and of each cell the accuracies, 0 to 1."""
    diverged: bool = False
    seconds: float = 0.0

    @property
    def last(self) -> float:
        return self.scored[-1]["accuracy"] if self.scored else 0.0


class SweepRun:
    """A run in progress; `advance` makes one update."""

    def __init__(
        self, config: SweepConfig, spec: RunSpec, folder: Path, device: torch.device
    ) -> None:
        self.config, self.spec, self.folder, self.device = config, spec, folder, device
        self.cells = config.cells(spec)
        self.train = [
            drawn(
                config.task.rows_of(part.seq_len, part.pairs),
                part.rows,
                "train",
                config.task.data_seed,
                str(device),
            )
            for part in config.segments(spec)
        ]
        self.epoch_steps = sum(
            math.ceil(len(rows.tokens) / config.training.batch_rows) for rows in self.train
        )
        training = config.training
        self.total_steps = training.total_steps or self.epoch_steps * (training.epochs or 0)
        self.model = LanguageModel(config.model_of(spec))
        initialize(self.model, spec.seed)
        self.model.to(device)
        named = list(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in named if decays(name)]},
            {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
        ]
        self.optimizer = AdamW(
            groups,
            lr=spec.peak_lr,
            betas=training.betas,
            weight_decay=training.weight_decay,
        )
        self.loss = torch.zeros((), device=device)
        self._epoch: tuple[int, list[Batch]] | None = None
        self.history = History()
        self._load_state()
        self._began = time.perf_counter() - self.history.seconds

    @property
    def complete(self) -> bool:
        """Whether nothing is left to train."""
        stop = self.config.training.stop_accuracy
        return (
            self.history.diverged
            or self.history.step >= self.total_steps
            or (stop is not None and self.history.last >= stop)
        )

    def advance(self) -> None:
        """One update; where one is due, a scoring, after which the run's state is on disk."""
        training, history = self.config.training, self.history
        self.loss = self._update(self._batch(history.step))
        history.step += 1
        if history.step % training.score_every_steps and history.step != self.total_steps:
            return
        if not math.isfinite(float(self.loss)):
            history.diverged = True
        else:
            history.scored.append(self._score())
        history.seconds = time.perf_counter() - self._began
        self._save_state()

    def finish(self) -> dict[str, Any]:
        """Writes the model directory and the result; the result."""
        result = self._result()
        save_model(self.folder / MODEL_FOLDER, self.model.state_dict(), self.model.config)
        write_atomically(self.folder / RESULT_NAME, json.dumps(result, indent=1).encode())
        for path in self.folder.glob(f"{STATE_NAME}*"):  # also what a killed worker left half
            path.unlink()
        return result

    def _batch(self, step: int) -> Batch:
        epoch, place = divmod(step, self.epoch_steps)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._batches(epoch))
        return self._epoch[1][place]

    def _batches(self, epoch: int) -> list[Batch]:
        """The batches of an epoch: a function of the run's seed and the epoch."""
        random = torch.Generator().manual_seed(self.spec.seed * 1_000_003 + epoch)
        shuffled = self.config.training.order == "shuffled"
        batches = []
        for segment, rows in enumerate(self.train):
            n = len(rows.tokens)
            order = torch.randperm(n, generator=random) if shuffled else torch.arange(n)
            parts = order.to(self.device).split(self.config.training.batch_rows)
            batches += [Batch(segment, part) for part in parts]
        if not shuffled:
            return batches
        return [batches[i] for i in torch.randperm(len(batches), generator=random).tolist()]

    def _learning_rate(self, step: int) -> float:
        kind = self.config.training.schedule
        if kind == "constant":
            return self.spec.peak_lr
        done = step / self.total_steps
        if kind == "cosine-by-epoch":
            done = step // self.epoch_steps * self.epoch_steps / self.total_steps
        return self.spec.peak_lr * (1 + math.cos(math.pi * done)) / 2

    def _update(self, batch: Batch) -> Tensor:
        """Forward, backward, AdamW; the loss, nats a label."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.history.step)
        rows = self.train[batch.segment]
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            logits = logits_at(self.model, rows.tokens[batch.rows], rows.where[batch.rows])
        loss = F.cross_entropy(logits.flatten(0, 1), rows.labels[batch.rows].flatten())
        loss.backward()
        if (norm := self.config.training.clip_norm) is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        self.optimizer.step()
        return loss.detach()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.config.training.precision == "bf16",
        )

    @torch.no_grad()
    def _score(self) -> dict[str, Any]:
        cells = [self._score_cell(cell) for cell in self.cells]
        counted = [
            found["accuracy"]
            for cell, found in zip(self.cells, cells, strict=True)
            if not cell.extrapolation
        ]
        mean = sum(counted) / len(counted)
        return {"step": self.history.step, "accuracy": mean, "cells": cells}

    def _score_cell(self, cell: Cell) -> dict[str, float]:
        task = self.config.task
        rows = drawn(
            task.rows_of(cell.seq_len, cell.pairs),
            cell.rows,
            "test",
            task.data_seed,
            str(self.device),
        )
        scores: list[Score] = []
        size = max(1, SCORE_TOKENS // cell.seq_len)
        for part in torch.arange(cell.rows, device=self.device).split(size):
            with self._autocast():
                logits = logits_at(self.model, rows.tokens[part], rows.where[part])
            scores += score_batch(logits, rows.labels[part])
        everything = total(scores)
        return {
            "accuracy": everything.hits / everything.tokens,
            "sequence_accuracy": sum(s.hits == s.tokens for s in scores) / len(scores),
        }

    def _result(self) -> dict[str, Any]:
        scored, chance = self.history.scored, self.config.task.chance
        best = max(scored, key=lambda one: one["accuracy"], default=None)

        def first(accuracy: float) -> int | None:
            return next((one["step"] for one in scored if one["accuracy"] >= accuracy), None)

        return {
            "identity": self.config.identity(self.spec),
            "steps": self.history.step,
            "seconds": round(self.history.seconds, 1),
            "diverged": self.history.diverged,
            "last": scored[-1] if scored else None,
            "best": best,
            "left_chance_step": first(2 * chance + 0.01),
            "solved_step": first(self.config.solve_accuracy),
            "curve": [[one["step"], one["accuracy"]] for one in scored],
        }

    def _save_state(self) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in moments.items()}
        facts = {
            "history": json.dumps(asdict(self.history)),
            "identity": json.dumps(self.config.identity(self.spec)),
        }
        content = as_safetensors({n: t.contiguous() for n, t in tensors.items()}, metadata=facts)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / STATE_NAME, content)

    def _load_state(self) -> None:
        path = self.folder / STATE_NAME
        if not path.is_file():
            return
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata()
                if json.loads(facts["identity"]) != plain(self.config.identity(self.spec)):
                    raise ValueError("the state of other settings")
                history = History(**json.loads(facts["history"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            print(
                f"warning: {path} is no state of a run: got {' '.join(str(error).split())}; the "
                "run starts from its beginning",
                file=sys.stderr,
                flush=True,
            )
            return
        weights: dict[str, Tensor] = {}
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, rest = name.split(".", 1)
            if kind == "model":
                weights[rest] = tensor
            else:
                number, moment = rest.split(".", 1)
                moments.setdefault(int(number), {})[moment] = tensor
        self.model.load_state_dict(weights)
        # The groups are this run's own: their settings are part of its identity.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.history = history


def finished_result(config: SweepConfig, spec: RunSpec, folder: Path) -> dict[str, Any] | None:
    """The result of a complete run; None where it is not complete.

    Raises:
        Refused: the folder holds this run, complete or not, with other settings.
    """
    try:
        result = json.loads((folder / RESULT_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        result = None  # none yet, or damaged: it is run again
    if not isinstance(result, dict) or not isinstance(result.get("identity"), dict):
        result = None
    found = result["identity"] if result is not None else _identity_of_state(folder)
    if found is not None:
        _refuse_other_settings(folder, found, plain(config.identity(spec)))
    return result


def plain(tree: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a JSON file."""
    return dict(json.loads(json.dumps(tree)))


def _identity_of_state(folder: Path) -> dict[str, Any] | None:
    """Whose state the folder holds; None where it has none, or a damaged one."""
    try:
        with safe_open(folder / STATE_NAME, framework="pt") as file:
            identity = json.loads(file.metadata()["identity"])
    except (SafetensorError, OSError, ValueError, TypeError, KeyError):
        return None
    return identity if isinstance(identity, dict) else None


def _refuse_other_settings(folder: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = leaves(there), leaves(now)
    changed = [
        f"{name}: there {old.get(name)}, now {new.get(name)}"
        for name in dict.fromkeys([*new, *old])
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise Refused(
            f"{folder} holds a run with other settings: {'; '.join(changed)}; choose another "
            "sweep_dir"
        )


def train_run(
    config: SweepConfig, spec: RunSpec, folder: Path, device: torch.device
) -> dict[str, Any]:
    """Trains a run to its end, from where it was; its result."""
    run = SweepRun(config, spec, folder, device)
    while not run.complete:
        run.advance()
    return run.finish()
