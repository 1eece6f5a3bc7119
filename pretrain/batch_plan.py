"""How large every update is: rows, tokens and row length against the step, in closed form.

Positions in the data are counted in rows of data.seq_len, whatever a stage cuts them into, so the
order of the data does not depend on the stages and any step's place in it follows from the config.
"""

from dataclasses import dataclass

from pretrain.config import RunConfig


@dataclass(frozen=True)
class Stage:
    """Updates first..last (counted from 1): rows of data.seq_len each, read as rows of seq_len."""

    first: int
    last: int
    rows: int
    seq_len: int
    first_row: int


class BatchPlan:
    """The stages of a run, the last of which has no end."""

    def __init__(self, config: RunConfig) -> None:
        self.full_len = config.data.seq_len
        stages: list[Stage] = []
        first, row = 1, 0
        for setting in config.batch.stages:
            rows = (setting.batch_tokens or config.batch.batch_tokens) // self.full_len
            last = setting.until_step
            stages.append(Stage(first, last, rows, setting.seq_len or self.full_len, row))
            row += (last - first + 1) * rows
            first = last + 1
        stages.append(Stage(first, 2**62, config.batch_rows, self.full_len, row))
        self.stages = tuple(stages)

    def stage(self, step: int) -> Stage:
        """The stage that update `step` (counted from 1) belongs to."""
        return next(stage for stage in self.stages if step <= stage.last)

    def rows(self, step: int) -> int:
        """Rows of data.seq_len in update `step`, over all ranks."""
        return self.stage(step).rows

    def first_row(self, step: int) -> int:
        """Rows that the updates before `step` have read: where it begins in the data."""
        stage = self.stage(step)
        return stage.first_row + (step - stage.first) * stage.rows

    def tokens(self, step: int) -> int:
        """Tokens in update `step`, over all ranks."""
        return self.rows(step) * self.full_len

    def tokens_until(self, step: int) -> int:
        """Tokens in the updates 1..step."""
        return self.first_row(step + 1) * self.full_len
