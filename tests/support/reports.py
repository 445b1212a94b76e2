"""A benchmark's report to be shown: a figure with two baselines, one that misses its goal."""

from protocol.bench import Figure, Report

REPORT = Report(
    bench="link",
    machine={"cores": "2", "system": "Linux 6"},
    figures=(
        *Figure(name="append, p50", value=0.61234, unit="s", goal="<= 1.0").beside(
            {"a loop": 2.5, "the old system": 15.2}
        ),
        Figure(name="speed", value=0.5, unit="ratio", goal=">= 0.8"),
        Figure(name="bytes", value=6994, unit="bytes"),
    ),
)
