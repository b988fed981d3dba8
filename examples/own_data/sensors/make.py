"""Readings as loggers leave them: holes, rows out of order, a sentinel, a battery. Made, from one seed.

    python examples/own_data/sensors/make.py [FOLDER]

Twelve gauges along three rivers, hourly for two weeks. Water that passes a gauge passes the next one downstream two
hours later; each river has a rhythm of its own. `distances.csv` has the kilometres between neighbours on a river.
"""

import csv
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

RIVERS = {"Aue": (9.0, 24.0), "Este": (5.0, 12.0), "Luhe": (14.0, 8.0)}  # metres and hours of a wave
GAUGES, HOURS = 4, 24 * 14


def main(folder: str | Path = ".") -> None:
    """Write readings.csv and distances.csv."""
    draw = np.random.default_rng(0)
    rows, links = [], []
    begin = datetime(2025, 3, 1)
    for river, (level, period) in RIVERS.items():
        rain = np.convolve(
            draw.exponential(0.3, HOURS + 40) * (draw.random(HOURS + 40) < 0.1), np.exp(-np.arange(40) / 9)
        )
        for i in range(GAUGES):
            name = f"{river} {i + 1}"
            hours = np.arange(HOURS) - 2 * i
            wave = 0.6 * np.sin(2 * np.pi * hours / period) + 0.4 * np.sin(4 * np.pi * hours / period + 1)
            metres = level + wave + rain[40 - 2 * i : 40 - 2 * i + HOURS] + draw.normal(0, 0.15, HOURS)
            battery = 12.6 - 0.002 * np.arange(HOURS)
            dead = int(draw.integers(20, HOURS - 20))  # a logger stops for some hours
            for hour in range(HOURS):
                if dead <= hour < dead + 7 or draw.random() < 0.02:
                    continue  # no row at all
                read = "n/a" if draw.random() < 0.02 else f"{metres[hour]:.2f}"
                when = (begin + timedelta(hours=hour)).strftime("%Y-%m-%d %H:%M")
                rows.append([name, when, read, f"{battery[hour]:.1f}"])
            if i:
                links.append([f"{river} {i}", name, f"{draw.uniform(4, 9):.1f}"])
    late = draw.permutation(len(rows))[: len(rows) // 20]  # sent again later, at the end of the file
    kept = [row for i, row in enumerate(rows) if i not in set(late.tolist())]
    for name, heading, table in (
        ("readings.csv", ["gauge", "when", "level", "battery"], kept + [rows[i] for i in late]),
        ("distances.csv", ["from", "to", "km"], links),
    ):
        with open(Path(folder) / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([heading, *table])


if __name__ == "__main__":
    main(*sys.argv[1:2])
