"""What clients with biased data do to the accuracy of the others: python evidence/bias.py

Rotated digits, 20 clients of four hidden groups, with the settings of `evidence/tuned/rotated-digits.toml`. A share of
the clients, drawn by the seed, has training and validation examples of half of the classes only; they do not attack.
Shown is the test accuracy of all others, who are the same clients in every column of a seed, and of the worst of them.
The table goes to docs/papers/panacea-tables.md, between marks.
"""

import argparse
from dataclasses import replace
from functools import partial

import torch
from hidden_groups import train

from kinfed_papers.coverage import COMMITTED
from kinfed_papers.result_pages import put

PAGE, PART = COMMITTED.parent / "panacea-tables.md", "bias"
METHODS = ("local", "fedavg", "fedavg-ft", "pfedhn", "panacea", "sfl", "fedaghn", "kin")
SHARES, SEEDS, CLASSES, DIGITS = (0.0, 0.2, 0.4, 0.6), (0, 1, 2), 5, 10


def draw(seed, count):
    """[N] clients in the order in which they are biased, those at the end never; and for each the classes it keeps."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    return order, [torch.randperm(DIGITS, generator=generator)[:CLASSES] for _ in range(count)]


def bias(federation, seed, share):
    """The federation with so large a share of biased clients."""
    order, kept = draw(seed, len(federation))
    who, rows = set(order[: round(share * len(order))].tolist()), dict(federation.rows)
    for split in ("train", "validation"):
        rows[split] = [
            own_rows[torch.isin(federation.y[own_rows], kept[i])] if i in who else own_rows
            for i, own_rows in enumerate(federation.rows[split])
        ]
    return replace(federation, rows=rows)


def accuracy(name, share, seed):
    """The others' mean test accuracy and that of the worst of them, in per cent."""
    run = train(name, seed, change=partial(bias, share=share))
    scores = 100 * run.history.test(run.history.chosen)
    others = scores[draw(seed, len(scores))[0][round(max(SHARES) * len(scores)) :]]
    return others.mean().item(), others.min().item()


def table():
    lines = ["| accuracy of the others, % | " + " | ".join(f"{share:.0%} biased" for share in SHARES) + " | lost |"]
    lines += ["| --- |" + " ---: |" * (len(SHARES) + 1)]
    for name in METHODS:
        accuracies = torch.tensor([[accuracy(name, share, seed) for seed in SEEDS] for share in SHARES])
        means, lost = accuracies.mean(1), accuracies[0, :, 0] - accuracies[-1, :, 0]
        cells = [f"{mean:.1f} ({worst:.1f})" for mean, worst in means.tolist()]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {lost.mean():.1f} ± {lost.std():.1f} |")
    caption = (
        f"The worst client's is in brackets. Means are over seeds {', '.join(map(str, SEEDS))}. `lost` is the first "
        "column less the last, with its deviation over seeds. `python evidence/bias.py` writes the table."
    )
    return "\n".join([*lines, "", caption])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone
    put(PAGE, PART, table(), "Tables of the Panacea paper")
