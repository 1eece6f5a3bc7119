import io

import pytest

from launch.output import WorkerLines, shown_line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("(RayTrainWorker pid=12) step 5/20  loss 6.1", "step 5/20  loss 6.1"),
        ("(RayTrainWorker pid=12, ip=10.0.0.2)   indented", "  indented"),
        ("(RayTrainWorker pid=12) ", ""),
        ("(RayTrainWorker pid=12) Setting up process group for: env://", None),
        ("(RayTrainWorker pid=12) error: bad", None),
        ("(RayTrainWorker pid=12) rank 1: error: bad", "rank 1: error: bad"),
        ("(PlacementGroupCleaner pid=9) Failed to query", None),
        ("(TrainController pid=9) Requesting resources", None),
        ("(raylet) out of memory", "(raylet) out of memory"),
        ("our own line", "our own line"),
    ],
)
def test_workers_speak_and_ray_is_silent(line, shown):
    assert shown_line(line) == shown


def test_lines_that_come_in_pieces_are_put_together():
    stream = io.StringIO()
    lines = WorkerLines(stream)
    for piece in ("(RayTrain", "Worker pid=1) a", "\n(TrainController pid=2) b\nown\n", "rest"):
        lines.write(piece)
    assert stream.getvalue() == "a\nown\n"
