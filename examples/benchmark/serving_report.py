# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What the load test prints: tables for RESULTS.md, and a plot, from the lines of its trials. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import print_table
from serving_contenders import CONTENDERS

BIN_EDGES = [10 ** (power / 12) for power in range(-30, 19)]  # seconds: twelve bins for a factor of 10


def milliseconds(seconds: float | None, digits: int = 0) -> str:
    """As a cell; None, for a request that was never answered, is a dash."""
    return "-" if seconds is None else f"{seconds * 1e3:.{digits}f}"


def print_results(lines: Sequence[dict[str, Any]]) -> None:
    """Tables for RESULTS.md."""
    name = {key: contender.name for key, contender in CONTENDERS.items()}
    highest = [line for line in lines if line["test"] == "highest"]
    for kind in sorted({(line["num_beams"], line["workload"]) for line in highest}):
        rows, first = [], None
        for line in (line for line in highest if (line["num_beams"], line["workload"]) == kind):
            bounds = [key for key in line if key.startswith("highest_")]
            rates = [line[key] for key in bounds]
            first = first or (rates[0] if rates else None)
            rows.append(
                [
                    name[line["contender"]],
                    *(f"{rate:.1f}" for rate in rates),
                    f"{rates[0] / first:.2f}" if rates and first else "",
                    milliseconds(line["bare_p50"]),
                    milliseconds(line["alone_p50"]),
                    milliseconds(line["light_p50"]) if "light_p50" in line else "",
                    f"{line['memory'] / 1e6:.0f}",
                ]
            )
        heads = [f"P99 <= {key.partition('_')[2]} s" for key in highest[0] if key.startswith("highest_")]
        ratio = ["/ first"] if heads else [""]
        print(f"\nhighest rate, requests a second: {kind[0]} beams, {kind[1]}; ms of a request; MB")
        print_table(["contender", *heads, *ratio, "bare P50", "alone P50", "light P50", "memory"], rows)
    rates = [line for line in lines if line["test"] == "rates"]
    if rates:
        print("\nall trials; a request without an answer counts as infinitely late, and a trial ends when P99 is lost")
        rows = []
        for line in sorted(
            rates, key=lambda line: (line["num_beams"], line["workload"], line["contender"], line["rate"])
        ):
            times = [milliseconds(line[key]) for key in ("p50", "p90", "p99")]
            size = mean_batch(line["metrics"])
            counts = [f"{line['answered']} of {line['planned']}", "" if size is None else f"{size:.2f}"]
            kind = f"{line['num_beams']} beams, {line['workload']}"
            rows.append([name[line["contender"]], kind, f"{line['rate']:.2f}", *times, *counts])
        print_table(["contender", "", "rate", "P50 ms", "P90 ms", "P99 ms", "answered", "batch"], rows)
    for line in lines:
        if line["test"] in PRINTED:
            print()
            print_table(["what", "found"], PRINTED[line["test"]](line, name[line["contender"]]))


def mean_batch(metrics: dict[str, float]) -> float | None:
    """Requests a batch, if the server counts them."""
    for key, total in metrics.items():
        if key.startswith("hf_gr_batch_requests") and key.endswith("_sum"):
            number = metrics.get(key.removesuffix("_sum") + "_count", 0.0)
            return total / number if number else None
    return None


def rows_of_overload(line: dict[str, Any], name: str) -> list[list[str]]:
    growth = line["memory_after"] / line["memory_before"] - 1
    return [
        ["overload", f"{name}: {line['rate']:.1f}/s, {line['planned']} requests, deadline {line['deadline']:g} s"],
        ["statuses", json.dumps(line["statuses"])],
        ["served, P50 and P99 ms", f"{milliseconds(line['served_p50'])}, {milliseconds(line['served_p99'])}"],
        ["served a second", f"{line['answered_per_second']:.1f}"],
        [
            "refused after, P50 and P99 ms",
            f"{milliseconds(line['refused_p50'], 1)}, {milliseconds(line['refused_p99'], 1)}",
        ],
        ["memory", f"{line['memory_before'] / 1e6:.0f} to {line['memory_after'] / 1e6:.0f} MB ({growth:+.1%})"],
        ["from 1 s afterwards, P50 ms", f"{milliseconds(line['after_p50'])}, {line['after_failed']} failed"],
    ]


def rows_of_delay(line: dict[str, Any], name: str) -> list[list[str]]:
    size = mean_batch(line["metrics"])
    return [
        [f"{line['added_ms']:g} ms more a batch, 30/s", name],
        ["answered", f"{line['answered']} of {line['planned']}; statuses {json.dumps(line['statuses'])}"],
        ["P50 and P99 ms", f"{milliseconds(line['p50'])}, {milliseconds(line['p99'])}"],
        ["requests a batch", "unknown" if size is None else f"{size:.1f}"],
    ]


def rows_of_http(line: dict[str, Any], name: str) -> list[list[str]]:
    return [
        [name, f"{line['planned']} requests, one after the other"],
        ["P50 and P99 ms", f"{milliseconds(line['p50'], 2)}, {milliseconds(line['p99'], 2)}"],
        ["CPU ms of the server, each", milliseconds(line["cpu_seconds_each"], 2)],
    ]


def rows_of_updates(line: dict[str, Any], name: str) -> list[list[str]]:
    return [
        ["updates under load", f"{name}: {line['planned']} calls, {line['updates']} updates, {line['swaps']} swap"],
        ["statuses", json.dumps(line["statuses"])],
        ["answers illegal in their version", str(line["wrong"])],
        ["versions answered with", str(line["versions"])],
        ["P50 and P99 ms", f"{milliseconds(line['p50'])}, {milliseconds(line['p99'])}"],
        ["update, P50 and P99 ms", f"{milliseconds(line['update_p50'], 1)}, {milliseconds(line['update_p99'], 1)}"],
        ["memory", f"{line['memory_before'] / 1e6:.0f} to {line['memory_after'] / 1e6:.0f} MB"],
    ]


PRINTED = {"overload": rows_of_overload, "delay": rows_of_delay, "http": rows_of_http, "updates": rows_of_updates}


def plot(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """P50 and P99 over the rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trials = [line for line in lines if line["test"] == "rates" and not line["gave_up"]]
    if not trials:
        raise SystemExit("nothing to plot: no trial was finished")
    figure, (axes, right) = pyplot.subplots(1, 2, figsize=(14, 5.5), width_ratios=(3, 2))
    bounds = {line["bound"] for line in trials}
    for number, contender in enumerate(dict.fromkeys(line["contender"] for line in trials)):
        own = sorted((t for t in trials if t["contender"] == contender), key=lambda trial: trial["rate"])
        rates, color = [trial["rate"] for trial in own], f"C{number}"
        label = CONTENDERS[contender].name
        axes.plot(rates, [t["p99"] for t in own], color=color, marker="o", markersize=3, label=label)
        axes.plot(rates, [t["p50"] for t in own], color=color, linestyle=":", marker=".", markersize=3)
        highest = max((t for t in own if t["p99"] <= max(bounds)), default=None, key=lambda trial: trial["rate"])
        if highest is not None:
            label = f"{label} at {highest['rate']:.1f}/s"
            right.hist(highest["latencies"], BIN_EDGES, density=False, histtype="step", color=color, label=label)
    for bound in bounds:
        axes.axhline(bound, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="requests a second", ylabel="seconds: P99 (lines), P50 (dots)")
    right.set(xscale="log", xlabel="seconds, at the highest rate within the bound", ylabel="requests")
    for one in (axes, right):
        one.legend(fontsize="small")
        one.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
