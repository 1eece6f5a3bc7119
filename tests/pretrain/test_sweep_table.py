"""The table of a sweep of small models."""

import pytest

from pretrain.sweep_config import load_sweep
from pretrain.sweep_table import markdown, published, summaries
from tests.small_sweeps import SHIPPED, sweep


def result(last, best, solved=None):
    cell = {"accuracy": last, "sequence_accuracy": last / 2}
    return {
        "last": {"accuracy": last, "cells": [cell]},
        "best": {"accuracy": best, "cells": [cell]},
        "left_chance_step": 10,
        "solved_step": solved,
        "diverged": False,
    }


def test_table_has_mean_std_every_seed_and_the_share_that_solves(tmp_path):
    config = sweep(tmp_path, grid={"pairs": [2], "seed": [0, 1, 2], "peak_lr": [0.1, 0.01]})
    values = {0.1: (0.1, 0.2, 0.3), 0.01: (0.5, 0.9, 1.0)}
    results = {
        spec: result(values[spec.peak_lr][spec.seed], values[spec.peak_lr][spec.seed])
        for spec in config.runs()
    }
    (row,) = summaries(config, results)
    assert row["peak_lr"] == 0.01
    assert row["mean"] == pytest.approx(80)
    assert row["std"] == pytest.approx(26.458, abs=1e-3)
    assert list(row["seeds"].values()) == [50, 90, 100]
    assert row["solved_share"] == pytest.approx(1 / 3)
    assert row["cells"][0]["sequence_accuracy"] == pytest.approx(40)
    line = markdown(config, results).splitlines()[-1]
    assert "| 80.0 (26.5) | 80.0 | 50.0 90.0 100.0 | 0.33 of 3 | 10 |" in line


def test_published_numbers_stand_beside_their_own_arm_only():
    shipped = {path.stem: load_sweep(path) for path in SHIPPED}
    config = shipped["mqar-zoology"]
    found = {published(config, spec).split(" ")[0] for spec in config.runs()}
    assert {"46.9", "75.1", "89.6", "55.9", "76.5", "92.9", "-"} <= found
    for spec in config.runs():
        if spec.level_weights == "adaptive":
            assert published(config, spec) == "-"
    decay = shipped["mqar-adaptive-decay"]
    with_number = {
        (spec.pairs, spec.level_weights) for spec in decay.runs() if published(decay, spec) != "-"
    }
    assert with_number == {(32, "linear"), (32, "adaptive")}
