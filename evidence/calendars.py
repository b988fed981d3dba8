"""What the calendar is worth as an input of forecasts: python evidence/calendars.py [--seeds 3]

Series made so that each client has its own week, or its own year, about levels that differ by as much: 24 shops on 400
days, and 30 plants in 180 months. Partial pooling of a linear layer forecasts from as many past steps as are named, by
each choice of `calendar`. Prints the mean absolute error over the clients' own deviations, on test windows.
"""

import argparse
import warnings

import numpy as np
import polars
from torch import nn

import kinfed
from kinfed.methods.solved.partial_pooling import PartialPooling

SETTINGS: list[tuple[str, int, int, list[list[str] | None]]] = [  # series, past, horizon, calendars
    ("days", 14, 7, [[], ["weekday"], None]),
    ("days", 3, 3, [[], None]),
    ("months", 24, 12, [[], None]),
    ("months", 6, 6, [[], None]),
]


def draw_series(kind, seed):
    """A row of each client and step: a level, times a profile of the client's own, times noise that remembers."""
    draw, rows = np.random.default_rng(seed), []
    clients, steps, period = (24, 400, 7) if kind == "days" else (30, 180, 12)
    begin = np.datetime64("2020-01-06") if kind == "days" else np.datetime64("2010-01")
    usual = 0.2 * np.sin(2 * np.pi * np.arange(period) / period)
    for client in range(clients):
        level = draw.lognormal(3, 0.6)
        profile = usual + draw.normal(0, 0.15, period)
        noise = 0.0
        for step in range(steps):
            noise = 0.5 * noise + draw.normal(0, 0.1)
            date = (begin + step).astype("datetime64[D]")
            rows.append((f"client {client}", str(date), level * np.exp(profile[step % period] + noise)))
    return polars.DataFrame(rows, schema=["client", "time", "value"], orient="row")


def measure_error(kind, past, horizon, calendar, seed):
    """The mean over clients of the test error, each over the deviation of the client's readings."""
    federation = kinfed.from_frame(
        draw_series(kind, seed),
        client="client",
        target="value",
        time="time",
        past=past,
        horizon=horizon,
        calendar=calendar,
        seed=seed,
    )
    line = nn.Sequential(nn.Flatten(), nn.Linear(federation.x[0].numel(), horizon))
    history = kinfed.fit(PartialPooling(), federation, line, seed=seed).history
    deviations = [float(federation.y[rows].std()) for rows in federation.rows["test"]]
    return float(np.mean(history.test(history.chosen).numpy() / deviations))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    print("error over the deviation, mean over seeds (each seed)")
    for kind, past, horizon, calendars in SETTINGS:
        for calendar in calendars:
            values = [measure_error(kind, past, horizon, calendar, seed) for seed in range(args.seeds)]
            what = "the default" if calendar is None else ", ".join(calendar) or "none"
            shown = ", ".join(f"{value:.3f}" for value in values)
            print(f"{past:3} past {kind:7} {what:12} {np.mean(values):6.3f}  ({shown})")


if __name__ == "__main__":
    main()
