"""Writes checkpoints, in the background if asked, and removes old ones.

    begin      all ranks copy what they save into the memory of the CPU
    thread     every rank writes and syncs its file of optimizer state, rank 0 the model too
    votes      ride along with the next updates: how many ranks have written?
    thread     when all have, rank 0 writes checkpoint.json, then `latest`, then removes old ones

What is saved is the copy, so training that goes on meanwhile does not change it. A process killed
at any moment leaves the earlier checkpoints as they are.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from data_prep.shards import Manifest
from models.checkpoint_directory import (
    MANIFEST_NAME,
    step_folder,
    step_folders,
    sync_folder,
    write_atomically,
    write_manifest,
)
from models.weights import save_model
from pretrain.batch_plan import BatchPlan
from pretrain.checkpoint import STATE_FORMAT, Facts
from pretrain.config import RunConfig
from pretrain.distributed import World
from pretrain.engine import Engine
from pretrain.errors import TrainingFailed
from pretrain.health import Health
from pretrain.same_run import dataset_facts
from pretrain.state import ENGINE_FOLDER, write_shard

RANDOM_RULE = "torch seeded with SeedSequence([seed, step, rank]) before every step"


class Saver:
    """The checkpoints of a run; at most one is being written. All ranks call everything alike."""

    def __init__(
        self, engine: Engine, config: RunConfig, manifest: Manifest, world: World, console: Console
    ) -> None:
        self._engine, self._config, self._world = engine, config, world
        self._manifest, self._console = manifest, console
        self._plan = BatchPlan(config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._folder: Path | None = None
        self._facts: Facts | None = None
        self._writing: Future[None] | None = None
        self._publishing: Future[None] | None = None
        self._began = 0.0

    def save(self, step: int, health: Health) -> None:
        """Begins the checkpoint of `step`, and ends it too unless it may go on in the background.

        Raises:
            TrainingFailed: this one or the one before cannot be written.
        """
        self.finish()
        self._began = time.perf_counter()
        folder = step_folder(self._config.run_dir, step)
        self._folder = folder
        self._facts = self._facts_of(step, health)
        self._raise_any(_error_of(lambda: self._make_room(folder)))
        optimizer_state, weights = self._engine.snapshot(), self._engine.full_weights()
        self._writing = self._thread.submit(self._write, folder, optimizer_state, weights)
        if not self._config.checkpoint.background:
            self.finish()

    def votes(self) -> list[float]:
        """[this rank has written, this rank has published, this rank has failed]"""
        written, published = _is_done(self._writing), _is_done(self._publishing)
        failed = any(f and f.done() and f.exception() for f in (self._writing, self._publishing))
        return [float(written), float(published), float(failed)]

    def heed(self, votes: Sequence[float]) -> None:
        """Goes on according to the votes of all ranks.

        Raises:
            TrainingFailed: the checkpoint cannot be written.
        """
        written, published, failed = votes
        if self._folder is None:
            return
        if failed or published:
            self.finish()
        elif written == self._world.size and self._world.rank == 0 and self._publishing is None:
            self._publishing = self._thread.submit(self._publish)

    def finish(self) -> None:
        """Returns when the checkpoint that is being written is complete.

        Raises:
            TrainingFailed: it cannot be written; those before it stay as they are.
        """
        if self._folder is None:
            return
        writing, publishing = self._writing, self._publishing
        assert writing is not None
        self._raise_any(_error_of(writing.result))
        if self._world.rank == 0:
            if publishing is None:
                publishing = self._thread.submit(self._publish)
            error = _error_of(publishing.result)
        else:
            error = None
        self._raise_any(error)
        seconds = time.perf_counter() - self._began
        self._console.print(f"saved {self._folder} ({seconds:.1f} s)")
        self._folder = self._writing = self._publishing = None

    def _make_room(self, folder: Path) -> None:
        if self._world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a save that was killed
            (folder / ENGINE_FOLDER).mkdir(parents=True)

    def _write(
        self, folder: Path, optimizer_state: dict[str, Tensor], weights: dict[str, Tensor]
    ) -> None:
        world = self._world
        write_shard(folder / ENGINE_FOLDER, optimizer_state, world.rank, world.size)
        if world.rank == 0:
            tokenizer = self._config.data.dataset / "tokenizer.model"
            path = tokenizer if tokenizer.is_file() else None
            save_model(folder, weights, self._config.model, tokenizer_path=path)

    def _publish(self) -> None:
        assert self._folder is not None
        assert self._facts is not None
        sync_folder(self._folder / ENGINE_FOLDER)
        write_manifest(self._folder, self._facts)
        sync_folder(self._folder.parent)
        write_atomically(self._folder.parent / "latest", f"{self._folder.name}\n".encode())
        remove_old(self._config, self._folder)

    def _raise_any(self, error: str | None) -> None:
        """TrainingFailed on every rank if one has an error; also a barrier."""
        errors = [message for message in self._world.gather(error) if message]
        if errors:
            folder, self._folder = self._folder, None
            why = _why(errors[0], self._config.run_dir)
            assert folder is not None
            # No rank writes in it any more, and it shall not fill the disk. Complete, as where only
            # an older one could not be removed, it stays.
            if self._world.rank == 0 and not (folder / MANIFEST_NAME).exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise TrainingFailed(
                f"cannot write checkpoint {folder}: {why}; the newest complete one stays; mend "
                "that and start the same command again",
                on_all_ranks=True,
            )

    def _facts_of(self, step: int, health: Health) -> Facts:
        return Facts(
            state_format=STATE_FORMAT,
            step=step,
            tokens=self._plan.tokens_until(step),
            sample_position=self._plan.first_row(step + 1),
            updates_taken=self._engine.updates_taken,
            health=health.state,
            random_state=RANDOM_RULE,
            world_size=self._world.size,
            zero_stage=self._config.parallel.zero_stage,
            dataset=dataset_facts(self._config, self._manifest),
            config=self._config.model_dump(mode="json"),
        )


def remove_old(config: RunConfig, newest: Path) -> None:
    """Removes checkpoints that are not to stay, and what killed saves and removals left behind."""
    keep_last, keep_every = config.checkpoint.keep_last, config.checkpoint.keep_every_steps
    older = step_folders(config.run_dir)
    older = older[older.index(newest) + 1 :]
    complete = [path for path in older if (path / MANIFEST_NAME).exists()]
    keep = complete if keep_last is None else complete[: keep_last - 1]
    if keep_every is not None:
        keep += [
            path for path in complete if int(path.name.removeprefix("step-")) % keep_every == 0
        ]
    for path in older:
        if path not in keep:
            # First of all the manifest: what is left of a killed removal is no checkpoint.
            (path / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(path)


def _is_done(future: "Future[None] | None") -> bool:
    return future is not None and future.done() and future.exception() is None


def _error_of(work: Callable[[], None]) -> str | None:
    """What went wrong in `work`, in a few words."""
    try:
        work()
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def _why(error: str, run_dir: Path) -> str:
    """torch and safetensors do not name a full disk as such."""
    free = shutil.disk_usage(run_dir).free
    return f"no space left on device ({free:,} bytes free)" if free < 1 << 20 else error
