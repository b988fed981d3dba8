"""What clients with biased data do to the accuracy of the others: python evidence/bias.py --data-dir DIR

Rotated digits, 20 clients of four hidden groups, with the settings of `evidence/tuned/rotated-digits.toml`. A share of
the clients, drawn by the seed, has training and validation examples of half of the classes only; they do not attack.
Shown is the test accuracy of all others, who are the same clients in every column of a seed, and of the worst of them.
The table goes to docs/papers/panacea-tables.md, between marks.
"""

import argparse
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import torch

from kinfed import fit
from kinfed.runs.config import experiment as config
from kinfed_papers.coverage import COMMITTED
from kinfed_papers.result_pages import put

PAGE, PART = COMMITTED.parent / "panacea-tables.md", "bias"
METHODS = ("local", "fedavg", "fedavg-ft", "pfedhn", "panacea", "sfl", "fedaghn", "kin")
SHARES, SEEDS, CLASSES = (0.0, 0.2, 0.4, 0.6), (0, 1, 2), 5


def biased(federation, seed, share):
    """The federation with so large a share of biased clients, and who is never one of them: [M]."""
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(federation), generator=draw)
    kept = [torch.randperm(federation.task.classes, generator=draw)[:CLASSES] for _ in range(len(federation))]
    who, rows = set(order[: round(share * len(order))].tolist()), dict(federation.rows)
    for split in ("train", "validation"):
        rows[split] = [
            each[torch.isin(federation.y[each], kept[i])] if i in who else each
            for i, each in enumerate(federation.rows[split])
        ]
    return replace(federation, rows=rows), order[round(max(SHARES) * len(order)) :]


def accuracy(name, share, seed, data):
    """The others' mean test accuracy and that of the worst of them, in per cent."""
    told = tomllib.loads((Path(__file__).parent / "tuned" / "rotated-digits.toml").read_text())
    graph = ['federation.graph="oracle"'] * (name == "panacea")
    made = config.resolve(config.override(told, [f'method.name="{name}"', f"seed={seed}", *graph]))
    whole = made.federation(data, seed)
    federation, others = biased(whole, seed, share)
    run = fit(
        made.method,
        federation,
        made.module(federation, seed),
        rounds=made.rounds,
        training=made.training,
        participation=made.participation,
        seed=seed,
    )
    scores = 100 * run.history.test(run.history.chosen)[others]
    return scores.mean().item(), scores.min().item()


def table(data):
    lines = ["| accuracy of the others, % | " + " | ".join(f"{share:.0%} biased" for share in SHARES) + " | lost |"]
    lines += ["| --- |" + " ---: |" * (len(SHARES) + 1)]
    for name in METHODS:
        found = torch.tensor([[accuracy(name, share, seed, data) for seed in SEEDS] for share in SHARES])
        means, lost = found.mean(1), found[0, :, 0] - found[-1, :, 0]
        cells = [f"{mean:.1f} ({worst:.1f})" for mean, worst in means.tolist()]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {lost.mean():.1f} ± {lost.std():.1f} |")
    told = (
        f"In brackets the worst client's; means over seeds {', '.join(map(str, SEEDS))}, and what is lost from the "
        "first column to the last with its deviation over them: `python evidence/bias.py`."
    )
    return "\n".join([*lines, "", told])


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--data-dir", type=Path, default=os.environ.get("KINFED_DATA"))
    put(PAGE, PART, table(asked.parse_args().data_dir), "Tables of the Panacea paper")
