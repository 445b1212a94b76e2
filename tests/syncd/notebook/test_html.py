"""What the notebook's cell shows of a run."""

from __future__ import annotations

from protocol.status import RunningLine, Status
from syncd.notebook.html import render_html

NOW = 1796025600.0


def test_the_newest_safe_checkpoint_and_the_work_at_risk_are_shown() -> None:
    run = RunningLine(
        run_id="train.0001.7f3a",
        stage="train",
        attempt=1,
        started=NOW - 600,
        checkpoint="<10>.pt",
        at_risk_since=NOW - 125,
    )
    status = Status(time=NOW, worker="w", host="vm", sealed=True, running=(run,))
    text = render_html(status, [], now=NOW)
    assert "safe up to &lt;10&gt;.pt; 2 min 5 s of work at risk" in text
