"""A sweep of whole training runs, from a YAML file with a `config`: which runs there are.

    axes x arms x seeds

Every run is `python -m pretrain CONFIG section.key=value ...`, so all that a run can do it does
here too: data sets, checkpoints, resume. Then comes `python -m eval RUN OPTIONS` for each line of
`evaluate`. training_sweep_run.py runs them, training_sweep_table.py has the table.
"""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrain.config import dump_config, load_config

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Arm(_Section):
    """What is compared: settings under a name."""

    name: Name
    settings: dict[str, Any]
    """section.key: value."""


@dataclass(frozen=True)
class TrainingSpec:
    """One run."""

    arm: str
    axes: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def cell(self) -> str:
        """Where on the axes it is, in words; "" without axes."""
        parts = (f"{name.rpartition('.')[2]}={_short(value)}" for name, value in self.axes)
        return ", ".join(parts)

    @property
    def key(self) -> str:
        """Name of the run's folder."""
        axes = re.sub(r"[^A-Za-z0-9.]+", "-", self.cell)
        return "-".join(filter(None, [self.arm, axes, f"s{self.seed}"]))


class TrainingSweep(_Section):
    """Everything that decides a sweep's numbers, and where they go."""

    sweep_dir: Path
    config: Path
    """The run's YAML file that all runs start from."""
    settings: dict[str, Any] = {}
    """section.key: value of all runs."""
    arms: tuple[Arm, ...] = Field(min_length=1)
    axes: dict[str, tuple[Any, ...]] = {}
    """section.key: values; every arm is run at each of them."""
    seed: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(min_length=1)
    """Of parameters; all runs read the same rows in the same order."""
    evaluate: tuple[str, ...] = Field(min_length=1)
    """Options of `python -m eval`, as on a command line: one evaluation each."""

    @model_validator(mode="after")
    def _every_run_can_be_made(self) -> "TrainingSweep":
        if empty := [name for name, values in self.axes.items() if not values]:
            raise ValueError(f"an axis has no values: got {empty[0]}: []; expected one or more")
        keys = [spec.key for spec in self.runs()]
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ValueError(
                f"two runs have one name: got {twice[0]} twice; expected every arm, value and "
                "seed once"
            )
        for spec in self.runs():
            if not self.config.is_file():
                raise ValueError(f"no config: got {self.config}; expected a run's YAML file")
            try:
                load_config(self.config, self.overrides(spec))
            except ValueError as error:
                first = str(error).splitlines()[0]
                raise ValueError(f"{spec.key} cannot be made: {first}") from None
        return self

    def runs(self) -> list[TrainingSpec]:
        """Every run: a seed of all arms before the next seed, so that a stopped sweep compares."""
        cells = itertools.product(*self.axes.values())
        return [
            TrainingSpec(arm.name, tuple(zip(self.axes, cell, strict=True)), seed)
            for cell, seed in itertools.product(list(cells), self.seed)
            for arm in self.arms
        ]

    def overrides(self, spec: TrainingSpec) -> list[str]:
        """The run as overrides of `config`; those of the arm win, but for its seed and folder."""
        arm = next(arm for arm in self.arms if arm.name == spec.arm)
        folder = str(self.folder_of(spec))
        own = {"seed": spec.seed, "run_dir": folder}
        settings = {**self.settings, **dict(spec.axes), **arm.settings, **own}
        return [f"{name}={json.dumps(value)}" for name, value in settings.items()]

    def folder_of(self, spec: TrainingSpec) -> Path:
        """The run's folder."""
        return self.sweep_dir / "runs" / spec.key

    def identity(self, spec: TrainingSpec) -> dict[str, Any]:
        """What decides the result of a run: the whole of its settings, and how it is evaluated."""
        config = load_config(self.config, [*self.overrides(spec), 'run_dir="RUN"'])
        return {"config": dump_config(config), "evaluate": list(self.evaluate)}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value.rpartition("/")[2] if isinstance(value, str) else json.dumps(value)
