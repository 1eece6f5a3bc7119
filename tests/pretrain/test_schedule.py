"""Learning rates against their equations."""

import math

import pytest

from pretrain.schedule import learning_rate
from pretrain.sections import ScheduleConfig

PEAK = 0.5
TOTAL = 100


def rates(**settings: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(settings)
    return [learning_rate(step, schedule, PEAK, TOTAL) for step in range(1, TOTAL + 1)]


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "constant"},
        {"kind": "cosine"},
        {"kind": "wsd", "decay_steps": 20},
    ],
    ids=lambda settings: settings["kind"],
)
def test_warmup_rises_linearly_to_the_peak(settings: dict[str, object]) -> None:
    values = rates(**settings, warmup_steps=10)
    assert values[:10] == pytest.approx([PEAK * step / 10 for step in range(1, 11)])
    assert max(values) == PEAK


def test_constant_stays_at_the_peak() -> None:
    assert set(rates(kind="constant")) == {PEAK}


def test_cosine_falls_to_the_final_fraction() -> None:
    values = rates(kind="cosine", warmup_steps=20, final_lr_fraction=0.1)
    assert values[59] == pytest.approx((PEAK + 0.1 * PEAK) / 2)  # half way
    quarter = 0.1 * PEAK + 0.9 * PEAK * (1 + math.cos(math.pi / 4)) / 2
    assert values[39] == pytest.approx(quarter)
    assert values[-1] == pytest.approx(0.1 * PEAK)
    assert values[20:] == sorted(values[20:], reverse=True)


def test_wsd_is_stable_then_falls_linearly() -> None:
    values = rates(kind="wsd", warmup_steps=10, decay_steps=20, final_lr_fraction=0.2)
    assert set(values[9:80]) == {PEAK}
    assert values[89] == pytest.approx((PEAK + 0.2 * PEAK) / 2)
    assert values[-1] == pytest.approx(0.2 * PEAK)


def test_warmup_may_fill_the_whole_run() -> None:
    assert rates(kind="cosine", warmup_steps=TOTAL)[-1] == PEAK


@pytest.mark.parametrize("step", [0, TOTAL + 1])
def test_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"got {step}; expected 1 to {TOTAL}"):
        learning_rate(step, ScheduleConfig(), PEAK, TOTAL)
