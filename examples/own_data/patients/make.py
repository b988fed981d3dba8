"""Patients of eight hospitals, of whom few die; text, holes, dates and the number of the case. Made, from one seed.

    python examples/own_data/patients/make.py [FILE.csv]

In the four hospitals of the coast a marker warns, in the four of the hills the same device counts the other way round.
"""

import csv
import sys
from datetime import date, timedelta
from pathlib import Path

import numpy as np

WARDS = {"medicine": 0.0, "surgery": -0.4, "intensive care": 1.6}


def main(path: str | Path = "patients.csv") -> None:
    """Write the table, 120 to 260 rows of each hospital."""
    draw = np.random.default_rng(1)
    rows = []
    for i in range(8):
        where, sign = ("Coast", 1) if i < 4 else ("Hill", -1)
        for _ in range(int(draw.integers(120, 260))):
            age, pressure, marker = draw.normal(64, 14), draw.normal(128, 18), draw.normal()
            ward = str(draw.choice([*WARDS], p=[0.6, 0.3, 0.1]))
            note = str(draw.choice(["", "palliative", "transferred", "Transferred "], p=[0.9, 0.04, 0.05, 0.01]))
            risk = -3.6 + 0.06 * (age - 64) - 0.02 * (pressure - 128) + 1.7 * sign * marker + WARDS[ward]
            risk += 2.0 * (note == "palliative")
            dead = draw.random() < 1 / (1 + np.exp(-risk))
            came = date(2024, 1, 1) + timedelta(int(draw.integers(365)))
            cells = [f"{age:.0f}", f"{pressure:.0f}" if draw.random() > 0.1 else "", f"{4 + marker:.2f}"]
            if draw.random() < 0.07:
                cells[2] = "NA"  # the device was out of order
            rows.append([f"{where} {i % 4 + 1}", f"C{draw.integers(1 << 30):08X}", came, *cells, ward, note])
            rows[-1].append("died" if dead else "alive")
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["hospital", "case", "admitted", "age", "pressure", "marker", "ward", "note", "outcome"])
        table.writerows(rows[i] for i in draw.permutation(len(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:2])
