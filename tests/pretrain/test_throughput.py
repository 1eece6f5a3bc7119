"""What `python -m pretrain bench` measures and shows, at sizes that a CPU does in a moment."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from models.accounting import parameter_count
from models.fla_peer import fla_model
from pretrain.__main__ import app
from pretrain.config import RunConfig
from pretrain.distributed import World
from pretrain.kernel_kinds import kind_of
from pretrain.throughput import OUR, Sizes, bench_config, measure
from pretrain.throughput_report import RESULT_LINE, jobs_of, kinds_table, plot, search, table

WriteConfig = Callable[[dict[str, Any]], Path]
CPU = torch.device("cpu")


def small_sizes(**fields: Any) -> Sizes:
    sizes = {"seq_len": 64, "batch_tokens": 256, "micro_batch_tokens": 128, "updates": 2}
    return Sizes(**{**sizes, "checkpointing": "none", **fields})


def test_batches_have_the_tokens_asked_for_or_one_row() -> None:
    assert (small_sizes().micro_batch_rows, small_sizes().batch_rows) == (2, 4)
    long = small_sizes(seq_len=1024)
    assert (long.micro_batch_rows, long.batch_rows) == (1, 1)
    assert small_sizes(seq_len=100).batch_rows == 2


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_measurement_is_whole(settings: dict[str, Any], world: World, checkpointing: str) -> None:
    settings["data"]["dataset"] = "/there/is/none"
    config = RunConfig.model_validate(settings)
    sizes = small_sizes(seq_len=128, checkpointing=checkpointing)
    config = bench_config(config, "mamba2", sizes)
    assert config.model.max_seq_len == 128
    assert config.parallel.activation_checkpointing == checkpointing
    found = measure(config, OUR, sizes, world, CPU)
    assert found["parameters"] == parameter_count(config.model)
    assert (found["mixer"], found["seq_len"], found["batch_tokens"]) == ("mamba2", 128, 256)
    assert set(found["seconds"]) == {"all", "data", "forward", "backward", "step"}
    phases = sum(found["seconds"].values()) - found["seconds"]["all"]
    assert 0 < phases <= 1.01 * found["seconds"]["all"]
    assert found["tokens_per_second"] == pytest.approx(256 / found["seconds"]["all"])
    assert found["peak_bytes"] > 0
    assert "matrix product" in found["kinds"]
    assert json.loads(json.dumps(found))["mfu"] is None  # nobody knows a CPU's peak


def test_a_peer_without_such_a_mixer_or_not_installed_is_told(settings: dict[str, Any]) -> None:
    config = RunConfig.model_validate(settings)
    with pytest.raises(ValueError, match="no such mixer|needs flash-linear-attention"):
        fla_model(config.model)  # a hybrid with log-linear Gated DeltaNet


@pytest.mark.parametrize(
    ("most", "limit", "found"),
    [
        (10**9, 2**20, 2**20),
        (10**9, 5000, 5000),
        (2047, 2**20, 0),
        (2048, 2**20, 2048),
        (100_000, 2**20, 98304),  # 64K + 32K
        (131_071, 2**20, 122_880),
        (700, 700, 700),
    ],
)
def test_the_longest_row_is_found_in_few_tries(most: int, limit: int, found: int) -> None:
    tries: list[int] = []

    def trains(length: int) -> bool:
        tries.append(length)
        return length <= most

    assert search(trains, limit) == found
    assert len(tries) == len(set(tries)) <= 14
    assert max(tries) <= limit


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix product"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "matrix product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("key_value_kernel", "operator"),
        ("out_kernel", "operator"),
        ("chunk_fwd_kernel_o", "operator"),
        ("pair_walk_kernel", "operator"),
        ("level_softplus_backward_kernel", "lambda"),
        ("void elementwise_kernel<128, 2, add::{lambda(int)#1}>(int)", "elementwise and sums"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "elementwise and sums"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_table_and_plot_show_what_failed_too(tmp_path: Path) -> None:
    measured = {
        "peer": OUR, "mixer": "mamba2", "seq_len": 2048, "micro_batch_rows": 16,
        "checkpointing": "none", "tokens_per_second": 12345.6, "mfu": 0.451,
        "peak_bytes": 3 * 2**30, "seconds": {"all": 0.5, "forward": 0.1, "step": 0.05},
        "kinds": {"matrix product": 0.3},
    }  # fmt: skip
    failed = {"peer": "fla", "mixer": None, "seq_len": 2048, "failure": "out of memory"}
    result = {"hardware": "a device", "commit": "abc", "measurements": [measured, failed]}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(result))
        console.print(kinds_table(result))
    shown = captured.get()
    for words in ("fenwick mamba2", "12,346", "45.1%", "3.0", "500.0", "failed", "300.0"):
        assert words in shown
    plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_every_mixer_meets_every_peer() -> None:
    sizes = {"batch_tokens": 1, "micro_batch_tokens": 1, "updates": 1}
    jobs = jobs_of(["fla"], ["mamba2", "attention"], (8,), **sizes, checkpointing=None,
                   memory_gib=None)  # fmt: skip
    names = [job.name for job in jobs]
    assert names == ["fenwick/mamba2", "fla/mamba2", "fenwick/attention", "fla/attention"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "12,x"], "--lengths has something else than lengths: got 12,x"),
        (["--lengths", "1"], "expected whole numbers from 2"),
        (["--mixers", "mamba"], "--mixers has an unknown name: got mamba"),
        (["--against", "torch"], "--against has an unknown name: got torch"),
        (["model.d_mode=3"], "d_mode"),
    ],
)
def test_bench_refuses_in_one_line(
    settings: dict[str, Any], write_config: WriteConfig, options: list[str], words: str
) -> None:
    refused = CliRunner().invoke(app, ["bench", str(write_config(settings)), *options])
    assert refused.exit_code == 2
    assert refused.output.startswith("error: ")
    assert words in refused.output
    assert len(refused.output.splitlines()) == 1


@pytest.mark.slow
def test_bench_measures_in_processes_of_their_own(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path
) -> None:
    output = tmp_path / "bench"
    sizes = ["--lengths", "32", "--batch-tokens", "64", "--micro-batch-tokens", "32"]
    done = CliRunner().invoke(
        app,
        ["bench", str(write_config(settings)), *sizes, "--updates", "1", "--longest",
         "--limit", "48", "--output", str(output)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert RESULT_LINE not in done.output
    result = json.loads((output / "throughput.json").read_text())
    (measured,) = result["measurements"]
    assert measured["tokens_per_second"] > 0
    assert [found["tokens"] for found in result["longest"]] == [48]
    assert (output / "throughput.png").is_file()
    assert "rows of up to 48 tokens train" in done.output


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_a_result(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path
) -> None:
    sizes = ["--lengths", "32", "--updates", "1", "--memory-gib", "0.5"]
    done = CliRunner().invoke(
        app, ["bench", str(write_config(settings)), *sizes, "--output", str(tmp_path / "bench")]
    )
    assert done.exit_code == 1, done.output
    result = json.loads((tmp_path / "bench" / "throughput.json").read_text())
    assert [m["seq_len"] for m in result["measurements"] if "failure" in m] == [32]
