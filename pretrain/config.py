"""RunConfig: every setting of a training run, with its unit and its rule.

A run is described by one YAML file plus `section.key=value` overrides. The tree is frozen, unknown
keys are refused with the nearest known one named, and whatever can be checked without the data set
is checked here; `check_data` holds it against the data set and the number of ranks. DeepSpeed's
JSON and the learning rate are derived from it elsewhere; this module imports no torch, so that
launchers can read a config quickly.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from data_prep.remote_dataset import open_cache
from data_prep.shards import Manifest, pack_command, read_manifest, read_tokenizer
from models.config import MIXER_NAMES, PRESETS, ModelConfig
from pretrain.sections import (
    BatchConfig,
    CheckpointConfig,
    HealthConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    ScheduleConfig,
    Section,
    TrainingConfig,
    ValidationConfig,
)

LOGS_FOLDER = "logs"
"""RUN/logs: what every rank printed, written by the launcher."""
STOP_FILE = "stop"
"""RUN/stop, empty: asks a run in progress to finish its step, save a checkpoint and end."""


class MixedDataset(Section):
    """A data set beside data.dataset."""

    dataset: Path
    weight: float = Field(gt=0)
    remote: str | None = None


class DataConfig(Section):
    """Which rows are read, and in which order."""

    dataset: Path
    """Folder written by `python -m data_prep` (manifest.json, train/, validation/)."""
    seq_len: int = Field(ge=2)
    """Tokens in a training row; divides the row_tokens of the data set."""
    shuffle_seed: int = Field(default=0, ge=0)
    """The order of the rows of epoch e is a function of (shuffle_seed, e) alone."""
    loader_threads: int = Field(default=1, ge=0)
    """Threads per rank, each of which reads one update ahead; 0 reads when the rows are needed."""
    shuffle_shards: int | None = Field(default=None, ge=1)
    """null shuffles all rows at once; N mixes the rows of N shards at a time, for data sets that
    are read from far away.
    """
    damaged_shards: Literal["stop", "skip"] = "stop"
    """When a missing or damaged shard is reached: stop the run, or count its rows for nothing."""
    remote: str | None = None
    """URL (fsspec) of the data set, of which data.dataset is then a cache on each machine."""
    cache_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of shards in each cache; the longest unused are removed. null: all stay."""
    weight: float = Field(default=1.0, gt=0)
    """Share of data.dataset in the rows, relative to the weights in data.mixed_with."""
    mixed_with: tuple[MixedDataset, ...] = ()
    """Further data sets of the same tokenizer to train on, by weight."""

    @model_validator(mode="after")
    def _cache_has_a_source(self) -> "DataConfig":
        remotes = [self.remote, *(other.remote for other in self.mixed_with)]
        if self.cache_bytes is not None and not any(remotes):
            raise ValueError(
                f"data.cache_bytes acts with data.remote only: got {self.cache_bytes}; leave it out"
            )
        return self


class RunConfig(Section):
    """Every setting of a run."""

    run_dir: Path
    """Folder of the run: config.yaml, log.jsonl, tensorboard/, checkpoints/. Start again with it to
    resume.
    """
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides initial parameters and everything random in a step; the order of rows has
    data.shuffle_seed.
    """
    model: ModelConfig
    """Either all of it, or `preset: NAME` (models/config.py) and the settings that differ from
    that.
    """
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig
    health: HealthConfig = HealthConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _preset_is_the_ground_of_model(cls, model: Any) -> Any:
        if not isinstance(model, Mapping) or "preset" not in model:
            return model
        settings = dict(model)
        name = settings.pop("preset")
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            raise ValueError(
                f"expected one of {', '.join(PRESETS)}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        return _merge(PRESETS[name].model_dump(), settings)

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> "RunConfig":
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len is longer than the model reads: got {self.data.seq_len}; expected "
                "at most "
                f"model.max_seq_len={self.model.max_seq_len}; raise model.max_seq_len"
            )
        check_batches(self, world_size=1)
        for stage in self.batch.stages:
            if stage.seq_len and self.data.seq_len % stage.seq_len:
                raise ValueError(
                    f"batch.stages: seq_len does not divide data.seq_len: got {stage.seq_len}; "
                    f"expected a divisor of {self.data.seq_len}; change one of them"
                )
        decay_steps = self.schedule.decay_steps or 0
        if self.schedule.warmup_steps + decay_steps > self.training.total_steps:
            raise ValueError(
                f"schedule.warmup_steps + schedule.decay_steps is longer than the run: got "
                f"{self.schedule.warmup_steps} + {decay_steps}; expected at most "
                f"training.total_steps={self.training.total_steps}; shorten them"
            )
        return self

    @property
    def batch_rows(self) -> int:
        """Rows in one update over all ranks, once batch.stages are over."""
        return self.batch.batch_tokens // self.data.seq_len


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's YAML file and applies overrides.

    Args:
        path: YAML file with the tree of RunConfig.
        overrides: `section.key=value` each, the value in YAML; later ones win.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not YAML or a setting is wrong; one line for each fault.
    """
    tree = read_yaml(Path(path), "config", "run_dir, model, data, ...")
    for override in overrides:
        tree = _merge(tree, _parse_override(override))
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = dict.fromkeys(_one_line(details) for details in error.errors())
        raise ValueError("\n".join(lines)) from None
    _check_wishes(config)
    return config


def read_yaml(path: Path, what: str, expected: str) -> dict[str, Any]:
    """A YAML file's settings as they stand there.

    Args:
        what: the file is, and `expected`: which settings it should hold, for the messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not YAML, or no mapping.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {what}: got {path}; expected a YAML file")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no settings: expected {expected} as a mapping")
    return tree


def _check_wishes(config: RunConfig) -> None:
    """ValueError where a setting asks for what can never happen.

    Not among the rules of RunConfig: a checkpoint that was written with it stays readable.
    """
    names = set(setting_names())
    for name in config.checkpoint.allow_changed:
        if name not in names:
            near = _nearest(name)
            raise ValueError(
                f"checkpoint.allow_changed names no setting: got {name}; expected names like "
                "optimizer.clip_norm" + (f"; did you mean {near}?" if near else "")
            )
    bounds, total = config.profile.bounds, config.training.total_steps
    if bounds is not None and bounds[0] > total:
        raise ValueError(
            f"profile.steps begins after the last update: got {config.profile.steps}; expected "
            f"FIRST-LAST with FIRST at most training.total_steps={total}; lower it"
        )


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; load_config reads it back to an equal RunConfig."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def check_run_dir(run_dir: Path) -> None:
    """ValueError where run_dir is a file."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(
            f"run_dir is not a folder: got {run_dir}; expected a folder or a free name"
        )


def checked_manifest(config: RunConfig, world_size: int) -> Manifest:
    """The manifest of the run's data set, held against the config (`check_data`).

    Raises:
        FileNotFoundError, ValueError: there is no such data set, or it does not fit.
    """
    data = config.data
    places = [(data.dataset, data.remote), *((o.dataset, o.remote) for o in data.mixed_with)]
    for dataset, remote in places:
        if remote is not None:
            open_cache(remote, dataset, data.cache_bytes)
    manifest = read_manifest(config.data.dataset)
    check_data(config, manifest, world_size)
    if manifest.tokenizer_sha256 is not None:
        read_tokenizer(config.data.dataset)  # it goes into every checkpoint
    for other in config.data.mixed_with:
        mixed = read_manifest(other.dataset)
        _check_rows(config, other.dataset, mixed)
        if mixed.tokenizer_sha256 != manifest.tokenizer_sha256:
            raise ValueError(
                f"data sets have different tokenizers: got {other.dataset} with sha256 "
                f"{mixed.tokenizer_sha256}; expected {manifest.tokenizer_sha256} of "
                f"{config.data.dataset}; pack it again with that one"
            )
    return manifest


def check_data(config: RunConfig, manifest: Manifest, world_size: int) -> None:
    """Holds a config against its data set and the number of ranks.

    Raises:
        ValueError: they do not fit; the message names the numbers.
    """
    check_batches(config, world_size)
    _check_rows(config, config.data.dataset, manifest)
    if config.validation.every_steps is not None and _rows(manifest, "validation") == 0:
        raise ValueError(
            f"validation.every_steps is set but {config.data.dataset} has no validation rows; "
            "set validation.every_steps=null or prepare the data with a validation split"
        )


def _check_rows(config: RunConfig, dataset: Path, manifest: Manifest) -> None:
    """ValueError where the training rows of a data set do not fit the model or data.seq_len."""
    if manifest.row_tokens % config.data.seq_len:
        raise ValueError(
            f"data.seq_len does not divide the rows of {dataset}: got {config.data.seq_len}; "
            f"expected a divisor of row_tokens={manifest.row_tokens}; change data.seq_len or "
            f"prepare it anew: {pack_command(manifest, dataset, config.data.seq_len)}"
        )
    if manifest.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size is smaller than that of {dataset}: got {config.model.vocab_size}; "
            f"expected at least {manifest.vocab_size}; raise model.vocab_size"
        )
    if _rows(manifest, "train") == 0:
        raise ValueError(f"{dataset} has no training rows")


def _rows(manifest: Manifest, split: str) -> int:
    return manifest.splits[split].rows if split in manifest.splits else 0


def check_batches(config: RunConfig, world_size: int) -> None:
    """ValueError where an update does not split into equal micro-batches of every rank."""
    rows, seq_len = config.batch.micro_batch_rows, config.data.seq_len
    unit = seq_len * rows * world_size
    stages = [s.batch_tokens for s in config.batch.stages if s.batch_tokens is not None]
    for name, tokens in [
        ("batch.batch_tokens", config.batch.batch_tokens),
        *(("batch_tokens of batch.stages", tokens) for tokens in stages),
    ]:
        if tokens % unit:
            below = tokens // unit * unit
            choices = f"{below} or {below + unit}" if below else f"{unit}"
            raise ValueError(
                f"{name} does not split evenly: got {tokens}; expected a multiple of "
                f"data.seq_len * batch.micro_batch_rows * ranks = {seq_len} * {rows} * "
                f"{world_size} = {unit}; use {choices}, or change batch.micro_batch_rows or the "
                "number of ranks"
            )


def _merge(ground: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`ground` with the leaves of `changes` put in."""
    merged = dict(ground)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _parse_override(override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise ValueError(
            f"override is not understood: got {override!r}; expected section.key=value, "
            "for example optimizer.peak_lr=3e-4"
        )
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"value of {path} is not YAML: got {text!r}") from None
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def setting_names(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of every setting of a section, its sub-sections followed."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")


def _one_line(details: ErrorDetails) -> str:
    """One fault as `<setting> ...: got <value>; expected <rule>`."""
    name = ".".join(str(part) for part in details["loc"])
    message = details["msg"].removeprefix("Value error, ")
    if name.startswith("model.mixer."):  # one fault for each branch of the union
        close = difflib.get_close_matches(str(details["input"]), MIXER_NAMES, n=1)
        return (
            f"model.mixer is wrong: got {details['input']!r}; expected one of "
            f"{', '.join(MIXER_NAMES)}, or a list of them"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    if details["type"] == "extra_forbidden":
        near = _nearest(name)
        return f"unknown setting: got {name}" + (f"; did you mean {near}?" if near else "")
    if details["type"] == "missing":
        return f"setting is missing: expected {name}"
    if details["type"] == "value_error" and isinstance(details["input"], Mapping):
        if name == "model" and "preset" in details["input"]:
            return f"model.preset is unknown: got {details['input']['preset']!r}; {message}"
        return message if name in ("", "schedule", "parallel") else f"{name}: {message}"
    rule = re.sub(r"^Input should be", "expected", message)
    return f"{name} is wrong: got {details['input']!r}; {rule}"


def _nearest(name: str) -> str | None:
    names = list(setting_names())
    section, _, key = name.rpartition(".")
    siblings = {n.rpartition(".")[2]: n for n in names if n.rpartition(".")[0] == section}
    if near := difflib.get_close_matches(key, siblings, n=1):
        return siblings[near[0]]
    by_last_part = {n.rpartition(".")[2]: n for n in names}
    if key in by_last_part:
        return by_last_part[key]
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else None
