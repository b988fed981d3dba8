"""What attention can learn about groups of clients: python evidence/attention.py

Clients of G equal groups, every model of a group the same, nothing trained and no noise: the loss of a mixture is half
its squared distance from its own group's model, so the best weights are all within the group. Shown is the weight for a
client's own group that pFedGAT's networks reach from exact gradients, and a bound on what any of Equation 5 can. The
table goes to docs/papers/pfedgat-tables.md, between marks.
"""

import argparse

import torch
import torch.nn.functional as F

from kinfed.methods.attention import Dynamic
from kinfed.methods.pfedgat import PFedGAT
from kinfed_papers.coverage import COMMITTED
from kinfed_papers.result_pages import put

PAGE, PART = COMMITTED.parent / "pfedgat-tables.md", "attention"
GROUPS, MEMBERS, SIZE, STEPS, RATE, SEEDS = (2, 5), 4, 64, 3_000, 0.01, (0, 1, 2)
SLOPE = PFedGAT().slope


def bound(groups, slope=SLOPE):
    """The most that heads of Equation 5 give to clients' own groups, a mean over clients and heads.

    (1 + V) / G, where V is the total variation between softmax(s) and softmax(slope * s), over all scores s of senders:
    docs/methods/pfedgat.md proves it. Sought from random scores, and from scores of two levels.
    """
    best, generator = 1 / groups, torch.Generator().manual_seed(0)
    levels = [(torch.arange(groups) < leading) * 6.0 for leading in range(1, groups)]
    drawn = [6 * torch.rand(groups, generator=generator) for _ in range(6)]
    for start in levels + drawn:
        speak = start.double().requires_grad_()
        optimiser = torch.optim.Adam([speak], lr=0.05)
        for _ in range(300):
            variation = (speak.softmax(0) - (slope * speak).softmax(0)).abs().sum() / 2
            optimiser.zero_grad()
            (-variation).backward()
            optimiser.step()
            best = max(best, (1 + variation.item()) / groups)
    return best


def train_attention(attention, groups, seed):
    """The mean weight within groups: of a method's network, trained from exact gradients for STEPS steps of Adam."""
    generator = torch.Generator().manual_seed(seed)
    of = torch.arange(groups).repeat_interleave(MEMBERS)  # [N]
    theta = torch.randn(groups, SIZE, generator=generator)[of]  # [N, d]

    def glorot(fans, *shape):
        uniform = 2 * torch.rand(attention.heads, attention.width, *shape, generator=generator) - 1
        return uniform * (6 / fans) ** 0.5

    drawn = attention.network(glorot, SIZE)
    network = type(drawn)(*(weight.requires_grad_() for weight in drawn))
    features = F.layer_norm(theta, theta.shape[1:])
    optimiser = torch.optim.Adam([*network], lr=RATE)
    for _ in range(STEPS):
        weights = attention.scores(network, features).softmax(-1).mean(0)  # [N, N]
        loss = (weights @ theta - theta).square().sum() / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return (weights * (of[:, None] == of)).sum(1).mean().item()


def table():
    lines = ["| weight for the client's own group, % | " + " | ".join(f"{groups} groups" for groups in GROUPS) + " |"]
    lines += ["| --- |" + " ---: |" * len(GROUPS)]
    rows = {
        "one mean for all": [100 / groups for groups in GROUPS],
        "any heads of Equation 5, members alike, at most": [100 * bound(groups) for groups in GROUPS],
    }
    for name, attention in (
        ("`pfedgat`, 8 heads of Equation 5, reached", PFedGAT()),
        ("`kinfed.methods.attention:Dynamic`, reached", Dynamic()),
    ):
        weights_by_seed = [[train_attention(attention, groups, seed) for seed in SEEDS] for groups in GROUPS]
        rows[name] = [100 * sum(values_of_seeds) / len(values_of_seeds) for values_of_seeds in weights_by_seed]
    for name, values in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |")
    caption = (
        f"{MEMBERS} clients a group, {STEPS:,} steps of Adam at {RATE:g} on exact gradients, mean over seeds "
        f"{', '.join(map(str, SEEDS))}: `python evidence/attention.py`."
    )
    return "\n".join([*lines, "", caption])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help alone
    put(PAGE, PART, table(), "Tables of the pFedGAT paper")
