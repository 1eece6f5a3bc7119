"""One run of a sweep: a small model, trained and scored on rows that are drawn in memory.

Logits are taken at the labelled positions only, which are a few of each row: at a vocabulary of
8,192 the others would cost more than the model. On a CUDA device an update (forward, backward,
AdamW) is captured as one CUDA graph for each shape of batch and replayed on the run's own stream:
small models are bound by launches, and graphs of several runs overlap on one GPU.

A run's folder, RUNS below the sweep's:

    state.pt       weights, optimizer and history at the last scoring; gone when the run is complete
    model/         a model directory, for `python -m eval`
    result.json    written last
"""

import io
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.shards import IGNORED_LABEL
from data_prep.synth import SyntheticTask, draw_rows
from eval.scoring import Score, score_batch, total
from models.checkpoint_directory import write_atomically
from models.initialize import initialize
from models.language_model import LanguageModel
from models.weights import save_model
from pretrain.config import OptimizerConfig
from pretrain.optimizer import build_optimizer
from pretrain.sweep_config import Cell, RunSpec, SweepConfig

RESULT_NAME, STATE_NAME, MODEL_FOLDER = "result.json", "state.pt", "model"
SCORE_TOKENS = 65_536  # tokens of one forward pass while scoring
WARMUP_UPDATES = 3  # before a capture; undone


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

    def __init__(self, config: SweepConfig, spec: RunSpec, folder: Path, device: torch.device) -> None:
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
        settings = OptimizerConfig(
            peak_lr=spec.peak_lr, betas=training.betas, weight_decay=training.weight_decay
        )
        self.optimizer = build_optimizer(self.model, settings)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            for group in self.optimizer.param_groups:
                group["capturable"] = True
                group["lr"] = torch.tensor(spec.peak_lr, device=device)
        self.loss = torch.zeros((), device=device)
        self._graphs: dict[tuple[int, ...], _Graph] = {}
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
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            self._update(self._batch(history.step))
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
        (self.folder / STATE_NAME).unlink(missing_ok=True)
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

    def _update(self, batch: Batch) -> None:
        lr = self._learning_rate(self.history.step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        rows = self.train[batch.segment]
        columns = (rows.tokens[batch.rows], rows.where[batch.rows], rows.labels[batch.rows])
        if self.stream is None:
            self.loss = self._step(*columns)
            return
        shape = (*columns[0].shape, columns[1].shape[1])
        if shape not in self._graphs:
            self._graphs[shape] = self._captured(columns)
        self.loss = self._graphs[shape].replay(columns)

    def _step(self, tokens: Tensor, where: Tensor, labels: Tensor) -> Tensor:
        """Forward, backward, AdamW; the loss, nats a label."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            logits = logits_at(self.model, tokens, where)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
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
            cache_enabled=False,  # a graph must read the weights anew
        )

    def _captured(self, columns: tuple[Tensor, ...]) -> "_Graph":
        """The update for batches of this shape. What the warm-up changes is put back."""
        state = io.BytesIO()
        torch.save(self._state(), state)
        fixed = tuple(column.clone() for column in columns)
        for _ in range(WARMUP_UPDATES):
            self._step(*fixed)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            loss = self._step(*fixed)
        state.seek(0)
        self._put(torch.load(state, weights_only=True, map_location=self.device))
        return _Graph(graph, fixed, loss)

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
            task.rows_of(cell.seq_len, cell.pairs), cell.rows, "test", task.data_seed, str(self.device)
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

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _put(self, state: dict[str, Any]) -> None:
        """Numbers into the tensors that are there: a captured update goes on using those."""
        with torch.no_grad():
            for name, parameter in self.model.state_dict().items():
                parameter.copy_(state["model"][name])
            if not self.optimizer.state or self.stream is None:
                self.optimizer.load_state_dict(state["optimizer"])
                return
            before = state["optimizer"]["state"]
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            for place, parameter in enumerate(parameters):
                for name, value in self.optimizer.state[parameter].items():
                    value.copy_(before[place][name]) if place in before else value.zero_()

    def _save_state(self) -> None:
        content = io.BytesIO()
        history = json.dumps(self.history.__dict__)
        identity = json.dumps(self.config.identity(self.spec), sort_keys=True)
        torch.save({**self._state(), "history": history, "identity": identity}, content)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / STATE_NAME, content.getvalue())

    def _load_state(self) -> None:
        path = self.folder / STATE_NAME
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True, map_location=self.device)
        if state["identity"] != json.dumps(self.config.identity(self.spec), sort_keys=True):
            return
        self._put(state)
        for group in self.optimizer.param_groups:
            if self.stream is not None and not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(self.spec.peak_lr, device=self.device)
        self.history = History(**json.loads(state["history"]))


@dataclass(frozen=True)
class _Graph:
    """A captured update with the tensors that it reads and the loss that it writes."""

    graph: torch.cuda.CUDAGraph
    columns: tuple[Tensor, ...]
    loss: Tensor

    def replay(self, columns: tuple[Tensor, ...]) -> Tensor:
        for fixed, new in zip(self.columns, columns, strict=True):
            fixed.copy_(new)
        self.graph.replay()
        return self.loss


def finished_result(config: SweepConfig, spec: RunSpec, folder: Path) -> dict[str, Any] | None:
    """The result of a complete run; None where there is none of this identity."""
    path = folder / RESULT_NAME
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_bytes())
    except ValueError:
        return None
    same = json.loads(json.dumps(config.identity(spec)))
    return result if isinstance(result, dict) and result.get("identity") == same else None


Notice = Callable[[RunSpec, dict[str, Any]], None]
"""Called with every run that has become complete, and its result."""


def run_lanes(
    config: SweepConfig,
    next_spec: Callable[[], RunSpec | None],
    folder_of: Callable[[RunSpec], Path],
    device: torch.device,
    lanes: int,
    notice: Notice,
) -> None:
    """Trains runs, `lanes` of them at a time in turns, until `next_spec` has no more."""
    running: list[SweepRun] = []
    more = True
    while True:
        while more and len(running) < lanes:
            spec = next_spec()
            if spec is None:
                more = False
            else:
                running.append(SweepRun(config, spec, folder_of(spec), device))
        if not running:
            return
        for run in running:
            if not run.complete:
                run.advance()
        for run in [run for run in running if run.complete]:
            running.remove(run)
            notice(run.spec, run.finish())
