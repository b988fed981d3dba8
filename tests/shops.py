"""A table of six shops, and a run on it."""

import numpy as np

from kinfed.cli import main

HEAD = "shop,age,kind,seen,buys"


def shop_lines(count, seed=0):
    """Customers of six shops, with text, dates and missing cells; shops of even number read age in months."""
    draw = np.random.default_rng(seed)
    for i in range(count):
        age, kind = draw.normal(40, 10), draw.choice(["new", "old"])
        shown = "" if i % 17 == 3 else f"{age * (1 if i % 2 else 12):.1f}"
        kind = "" if i % 19 == 4 else kind
        yield f"shop {i % 6},{shown},{kind},2024-0{1 + i % 9}-1{i % 7},{'yes' if (age > 40) == (i % 2 == 0) else 'no'}"


def train(folder):
    """Write shops.csv into a folder, and a run of kNN-Per on it, run; returns the folder."""
    (folder / "shops.csv").write_text("\n".join([HEAD, *shop_lines(360)]) + "\n")
    arguments = [
        "run",
        str(folder / "shops.csv"),
        "--client",
        "shop",
        "--target",
        "buys",
        "rounds=2",
        "model.hidden=[6]",
    ]
    assert main([*arguments, "--method", "knn-per", "--quiet", "--out", str(folder / "run")]) == 0
    return folder
