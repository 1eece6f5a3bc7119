"""SweepConfig: a grid of small models on a synthetic task, from one YAML file.

    mixer x level_weights x d_model x (seq_len x pairs) x peak_lr x seed

level_weights applies to log-linear mixers only; the others appear once. Its values are kinds, or
names of one's own with the settings that they stand for. With `mix`, every model is
trained on the listed segments and scored on the listed cells; without, each (seq_len, pairs) of the
grid is a run of its own. max_seq_len is the longest row of the sweep for all, so that the number of
levels never differs between arms.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_prep.mqar import MqarTask
from data_prep.selective_copy import SelectiveCopyTask
from data_prep.synth import SyntheticTask
from models.config import LevelWeightsConfig, MixerName, ModelConfig
from pretrain import sweep_file

LOG_LINEAR = "log_linear_"
KINDS: tuple[str, ...] = get_args(LevelWeightsConfig.model_fields["kind"].annotation)
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskConfig(_Section):
    """Which rows; data_prep/mqar.py and selective_copy.py define them."""

    name: Literal["mqar", "selective-copy"]
    variant: Literal["zoology", "s4", "adaptive-decay"]
    vocab_size: int = Field(ge=3)
    random_non_queries: bool = True
    """MQAR, zoology only."""
    data_seed: int = Field(default=123, ge=0)
    """Every run sees the same rows: seeds of the grid are those of the models."""

    def rows_of(self, seq_len: int, pairs: int) -> SyntheticTask:
        """The task of rows of one length and number of pairs (or of copied tokens).

        Raises:
            ValueError: there are no such rows.
        """
        if self.name == "mqar":
            return MqarTask(
                seq_len=seq_len,
                pairs=pairs,
                vocab_size=self.vocab_size,
                random_non_queries=self.random_non_queries,
                variant=self.variant,  # type: ignore[arg-type]
            )
        return SelectiveCopyTask(
            seq_len=seq_len,
            copied=pairs,
            vocab_size=self.vocab_size,
            variant=self.variant,  # type: ignore[arg-type]
        )

    @property
    def chance(self) -> float:
        """Accuracy, 0 to 1, of a model that knows only which ids can be an answer."""
        if self.name == "mqar":
            return 2 / self.vocab_size
        return 1 / len(self.rows_of(4096, 1).data_ids)  # type: ignore[union-attr]


class Segment(_Section):
    """Rows to train on."""

    seq_len: int = Field(ge=2)
    pairs: int = Field(ge=1)
    rows: int = Field(ge=1)


class Cell(_Section):
    """Rows to score."""

    seq_len: int = Field(ge=2)
    pairs: int = Field(ge=1)
    rows: int = Field(default=1000, ge=1)
    extrapolation: bool = False
    """Reported, but no part of the mean: longer or fuller than what was trained on."""


class Mix(_Section):
    """What every model of the sweep is trained and scored on."""

    train: tuple[Segment, ...] = Field(min_length=1)
    test: tuple[Cell, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _something_is_averaged(self) -> "Mix":
        if all(cell.extrapolation for cell in self.test):
            raise ValueError("mix.test has extrapolation cells only; expected one that is averaged")
        return self


class LevelWeightsArm(_Section):
    """A form of lambda: in the file a kind, or a name of one's own and what it stands for."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    settings: dict[str, Any]
    """Of LevelWeightsConfig, kind among them; they go before those of `model.level_weights`."""

    @model_validator(mode="before")
    @classmethod
    def _of_kind(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in KINDS:
            raise ValueError(
                f"unknown kind of lambda: got {value}; expected {', '.join(KINDS)}, or a mapping "
                "of name and settings"
            )
        return {"name": value, "settings": {"kind": value}}

    @model_validator(mode="after")
    def _names_are_not_taken(self) -> "LevelWeightsArm":
        if "kind" not in self.settings:
            raise ValueError(f"settings lack kind: got {self.settings} for {self.name}")
        if self.name in KINDS and self.settings != {"kind": self.name}:
            raise ValueError(
                f"the name of a kind has its meaning: got {self.name} for {self.settings}; "
                "choose another name"
            )
        return self


class GridConfig(_Section):
    """The axes; every combination is a run."""

    mixer: tuple[MixerName, ...] = Field(min_length=1)
    level_weights: tuple[LevelWeightsArm, ...] = (
        LevelWeightsArm(name="adaptive", settings={"kind": "adaptive"}),
    )
    d_model: tuple[int, ...] = Field(min_length=1)
    seq_len: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    peak_lr: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1)
    seed: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _every_value_once(self) -> "GridConfig":
        for axis, values in self:
            # As in the names of the runs' folders, which two runs may not share.
            names = [_axis_name(value) for value in values]
            if len(set(names)) != len(names):
                raise ValueError(f"{axis} repeats a value: got {names}; expected each once")
        return self

    def level_weights_of(self, name: str) -> dict[str, Any]:
        """The settings that a value of the axis stands for."""
        return next(arm.settings for arm in self.level_weights if arm.name == name)


def _axis_name(value: Any) -> Any:
    if isinstance(value, LevelWeightsArm):
        return value.name
    return f"{value:g}" if isinstance(value, float) else value


class SweepTraining(_Section):
    """How each run is trained."""

    batch_rows: int = Field(ge=1)
    epochs: int | None = Field(default=None, ge=1)
    total_steps: int | None = Field(default=None, ge=1)
    """One of epochs and total_steps."""
    train_rows: int = Field(default=10_000, ge=1)
    """Without `mix`: fixed rows that are read again every epoch."""
    test_rows: int = Field(default=1000, ge=1)
    """Without `mix`."""
    order: Literal["shuffled", "listed"] = "shuffled"
    """listed: segments one after the other, rows in their order, as Zoology's loader does."""
    schedule: Literal["constant", "cosine", "cosine-by-epoch"] = "constant"
    """To 0 at the end of the run; by epoch: one learning rate for each epoch."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    score_every_steps: int = Field(ge=1)
    stop_accuracy: float | None = Field(default=0.99, gt=0, le=1)
    """A run ends when its mean accuracy reaches this; null: never early."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of matrix products."""

    @model_validator(mode="after")
    def _one_length(self) -> "SweepTraining":
        if (self.epochs is None) == (self.total_steps is None):
            raise ValueError(
                f"training needs one of epochs and total_steps: got {self.epochs} and "
                f"{self.total_steps}; expected one of them"
            )
        return self


@dataclass(frozen=True)
class RunSpec:
    """One run of the grid."""

    mixer: MixerName
    level_weights: str | None
    """A kind or a name of the grid's; None where the mixer has no levels."""
    d_model: int
    seq_len: int | None
    pairs: int | None
    """None where all runs have the same mix."""
    peak_lr: float
    seed: int

    @property
    def key(self) -> str:
        """Name of the run's folder."""
        parts = [self.mixer, self.level_weights, f"d{self.d_model}"]
        if self.pairs is not None:
            parts += [f"T{self.seq_len}", f"N{self.pairs}"]
        return "-".join([*filter(None, parts), f"lr{self.peak_lr:g}", f"s{self.seed}"])

    @property
    def arm(self) -> tuple[Any, ...]:
        """What runs have in common that differ in learning rate and seed only."""
        return tuple(
            value for name, value in asdict(self).items() if name not in ("peak_lr", "seed")
        )


class SweepConfig(_Section):
    """Everything that decides a sweep's numbers, and where they go."""

    sweep_dir: Path
    task: TaskConfig
    grid: GridConfig
    mix: Mix | None = None
    model: dict[str, Any]
    """Of ModelConfig, without vocab_size, d_model, mixer and max_seq_len; level_weights without
    kind."""
    training: SweepTraining
    solve_accuracy: float = Field(default=0.99, gt=0, le=1)
    """A seed solves the task when its best mean accuracy reaches this."""
    published: Literal["log-linear-attention", "adaptive-decay"] | None = None
    """Whose numbers stand beside ours in the table (pretrain/sweep_table.py)."""

    @model_validator(mode="after")
    def _everything_can_be_made(self) -> "SweepConfig":
        axes = bool(self.grid.seq_len) + bool(self.grid.pairs)
        if axes != (0 if self.mix else 2):
            raise ValueError(
                "rows are given by grid.seq_len and grid.pairs, or by mix: got "
                f"seq_len={list(self.grid.seq_len)}, pairs={list(self.grid.pairs)}, "
                f"mix={'given' if self.mix else None}; expected one of the two"
            )
        for spec in self.runs():
            self.model_of(spec)
            for sizes in self._sizes(spec):
                self.task.rows_of(*sizes)
        return self

    def runs(self) -> list[RunSpec]:
        """Every run, seeds last, so that a stopped sweep has whole arms."""
        return list(self._runs())

    def _runs(self) -> Iterator[RunSpec]:
        grid = self.grid
        for mixer in grid.mixer:
            names = [arm.name for arm in grid.level_weights]
            for level_weights in names if mixer.startswith(LOG_LINEAR) else [None]:
                for d_model in grid.d_model:
                    for seq_len in grid.seq_len or (None,):
                        for pairs in grid.pairs or (None,):
                            for peak_lr in grid.peak_lr:
                                for seed in grid.seed:
                                    yield RunSpec(
                                        mixer,
                                        level_weights,
                                        d_model,
                                        seq_len,
                                        pairs,
                                        peak_lr,
                                        seed,
                                    )

    def segments(self, spec: RunSpec) -> tuple[Segment, ...]:
        """What a run is trained on."""
        if self.mix is not None:
            return self.mix.train
        assert spec.seq_len is not None
        assert spec.pairs is not None
        return (Segment(seq_len=spec.seq_len, pairs=spec.pairs, rows=self.training.train_rows),)

    def cells(self, spec: RunSpec) -> tuple[Cell, ...]:
        """What a run is scored on."""
        if self.mix is not None:
            return self.mix.test
        assert spec.seq_len is not None
        assert spec.pairs is not None
        return (Cell(seq_len=spec.seq_len, pairs=spec.pairs, rows=self.training.test_rows),)

    def _sizes(self, spec: RunSpec) -> list[tuple[int, int]]:
        """(seq_len, pairs) of everything that a run reads."""
        trained = [(segment.seq_len, segment.pairs) for segment in self.segments(spec)]
        return trained + [(cell.seq_len, cell.pairs) for cell in self.cells(spec)]

    @property
    def pairs_name(self) -> str:
        """What a row has so many of."""
        return "pairs" if self.task.name == "mqar" else "copied"

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row of the sweep."""
        return max(seq_len for spec in self.runs() for seq_len, _ in self._sizes(spec))

    def model_of(self, spec: RunSpec) -> ModelConfig:
        """The model of a run.

        Raises:
            ValueError: its settings do not fit each other.
        """
        settings = dict(self.model)
        level_weights = settings.pop("level_weights", {})
        if not isinstance(level_weights, dict):
            raise ValueError(
                f"model.level_weights is wrong: got {level_weights!r}; expected settings as a "
                "mapping"
            )
        if spec.level_weights is not None:
            level_weights = {**level_weights, **self.grid.level_weights_of(spec.level_weights)}
        return ModelConfig.model_validate(
            {
                **settings,
                "level_weights": LevelWeightsConfig(**level_weights).model_dump(),
                "vocab_size": self.task.vocab_size,
                "d_model": spec.d_model,
                "mixer": spec.mixer,
                "max_seq_len": self.longest_row,
            }
        )

    def identity(self, spec: RunSpec) -> dict[str, Any]:
        """What decides the result of a run: one with another identity is not this run's."""
        return {
            "run": asdict(spec),
            "task": self.task.model_dump(mode="json"),
            "train": [part.model_dump(mode="json") for part in self.segments(spec)],
            "test": [part.model_dump(mode="json") for part in self.cells(spec)],
            "model": self.model_of(spec).model_dump(mode="json"),
            "training": self.training.model_dump(mode="json"),
        }


def load_sweep(path: Path, sweep_dir: Path | None = None) -> SweepConfig:
    """Reads a sweep's YAML file; arguments and errors are those of pretrain.sweep_file.read."""
    return sweep_file.read(path, SweepConfig, sweep_dir)
