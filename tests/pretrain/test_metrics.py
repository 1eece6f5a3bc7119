"""log.jsonl and TensorBoard: what is in them, and that a resumed run leaves no overlap."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch.utils.tensorboard import SummaryWriter

from pretrain.curves import EVENTS_SUFFIX, drop_events, drop_log_lines
from pretrain.metrics import WRITERS, thread_ended


def scalar_steps(folder: Path) -> Counter[tuple[str, int]]:
    """How often each (tag, step) is in the event files, whatever TensorBoard would hide."""
    return Counter(
        (value.tag, event.step)
        for path in folder.iterdir()
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    )


def test_log_lines_beyond_the_step_and_half_lines_are_dropped(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"step": 1}, {"step": 2}, {"step": 2, "validation_loss": 1.0}, {"step": 3}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "lo')
    drop_log_lines(log, 2)
    assert [json.loads(line) for line in log.read_text().splitlines()] == lines[:3]


def test_missing_log_is_no_error(tmp_path: Path) -> None:
    drop_log_lines(tmp_path / "log.jsonl", 2)
    drop_events(tmp_path / "tensorboard", 2)
    assert list(tmp_path.iterdir()) == []


def test_events_beyond_the_step_and_half_records_are_dropped(tmp_path: Path) -> None:
    before: set[Path] = set()
    for first in (1, 4):
        before = set(tmp_path.iterdir())
        writer = SummaryWriter(str(tmp_path), filename_suffix=EVENTS_SUFFIX)
        for step in range(first, first + 4):
            writer.add_scalar("train/loss", 1.0 / step, step, walltime=100 + step)
        writer.close()
    (newest,) = set(tmp_path.iterdir()) - before
    newest.write_bytes(newest.read_bytes()[:-3])
    drop_events(tmp_path, 5)
    assert scalar_steps(tmp_path) == {
        ("train/loss", 1): 1,
        ("train/loss", 2): 1,
        ("train/loss", 3): 1,
        ("train/loss", 4): 2,
        ("train/loss", 5): 1,
    }
    assert all(path.name.endswith(EVENTS_SUFFIX) for path in tmp_path.iterdir())


def test_event_files_of_other_programs_stay(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path), filename_suffix=".eval")
    writer.add_scalar("eval/accuracy", 1.0, 9)
    writer.close()
    drop_events(tmp_path, 5)
    assert scalar_steps(tmp_path) == {("eval/accuracy", 9): 1}


def test_resumed_run_has_every_step_once_in_log_and_tensorboard(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    run_ranks: Any,
    read_log: Callable[[Path], list[dict[str, float]]],
) -> None:
    config = write_config(settings)
    run_dir = Path(settings["run_dir"])
    for count in (6, 3):  # killed in step 6, then, gone on from step 3, again in step 6
        run_ranks(config, strike=("pretrain.engine", "Engine.update", count, "before"))
    assert run_ranks(config).exit_codes == [0]

    log = read_log(run_dir)
    trained = [line for line in log if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 11))
    assert [line["step"] for line in log if "validation_loss" in line] == [4, 8, 10]
    assert [line["tokens"] for line in trained] == [128 * step for step in range(1, 11)]
    assert trained[0]["lr"] == pytest.approx(1.5e-3)

    # TensorBoard leaves a file once a newer one appears, so a start writes one and no other.
    files = [path.name for path in (run_dir / "tensorboard").iterdir()]
    assert len(files) == 3
    assert all(name.endswith(EVENTS_SUFFIX) for name in files)
    steps = scalar_steps(run_dir / "tensorboard")
    names = ("loss", "lr", "grad_norm", "tokens_per_second", "tokens", "memory_bytes")
    tags = [f"train/{name}" for name in names]
    tags += ["train/seconds", "train/cpu_seconds"]
    tags += [f"seconds/{phase}" for phase in ("data", "forward", "backward", "step")]
    expected = {(tag, step): 1 for tag in tags for step in range(1, 11)}
    expected |= {("validation/validation_loss", s): 1 for s in (4, 8, 10)}
    parts = ("mixer", "mlp", "lambda")
    groups = [f"blocks.{block}.{part}" for block in (0, 1) for part in parts]
    expected |= {(f"grad_norm/{name}", 10): 1 for name in (*groups, "embedding", "norm")}
    expected |= {("settings/text_summary", 0): 1}
    hparams = ("experiment", "session_start_info", "session_end_info")
    assert steps == expected | {(f"_hparams_/{name}", 0): 1 for name in hparams}

    (last,) = (line for line in trained if line["step"] == 10)
    squares = [last[f"grad_norm/{name}"] ** 2 for name in (*groups, "embedding", "norm")]
    assert sum(squares) == pytest.approx(last["grad_norm"] ** 2, rel=1e-4)

    curves = EventAccumulator(str(run_dir / "tensorboard"))
    curves.Reload()
    values = [event.value for event in curves.Scalars("train/loss")]
    assert values == pytest.approx([line["loss"] for line in trained])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_log_that_cannot_be_written_ends_the_run_in_one_line(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], run_ranks: Any
) -> None:
    run_dir = Path(settings["run_dir"])
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()  # the folder of a run
    (run_dir / "log.jsonl").symlink_to("/dev/full")
    failed = run_ranks(write_config(settings), ranks=2)
    assert failed.exit_codes == [1, 1]
    last = failed.output.splitlines()[-1]
    assert last.startswith(f"error: cannot write {run_dir / 'log.jsonl'} and ")
    assert "No space left on device" in last
    assert "Traceback" not in failed.output


def test_what_tensorboard_s_thread_meets_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> None:
        raise error

    before, threading.excepthook = threading.excepthook, thread_ended
    try:
        full, bug = (threading.Thread(target=fail, args=(e,)) for e in (OSError(28), OSError(29)))
        full.__class__ = type("Writer", (threading.Thread,), {"__module__": WRITERS[0]})
        for thread in (full, bug):
            thread.start()
            thread.join()
    finally:
        threading.excepthook = before
    printed = capsys.readouterr().err
    assert "OSError: 29" in printed
    assert "OSError: 28" not in printed
