"""What an epsilon costs, and whether it holds: python evidence/privacy_cost.py [PART ...]

Rewrites the parts of docs/evidence/privacy-cost.md, between marks: ledger, opacus, shops, traps, clients, canary.
`opacus` needs that package (pip install --no-deps opacus opt_einsum), which kinfed does not. The exit code is 1 if a
promise of the page is broken.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import torch
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from scipy.stats import beta
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kinfed
from kinfed.core.layout import Layout
from kinfed.core.method import AveragedParams, SharedParams
from kinfed.core.model import Model
from kinfed.core.private.privacy import NoisedSteps, choose_interval, count_epsilon, noise_for
from kinfed.core.private.private_sums import sum_privately
from kinfed.errors import RunError
from kinfed.simulation.simulation import Simulation
from kinfed_flower import plan
from kinfed_flower.programs.site_check import Here
from kinfed_flower.server.server import serve
from kinfed_flower.site.policy import Policy
from kinfed_flower.site.site import Site
from kinfed_flower.wire.messages import Message
from kinfed_papers.result_pages import put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "privacy-cost.md"
DELTA, SEEDS = 1e-5, (0, 1, 2)
DIGITS = load_digits()
COLUMNS, HIDDEN, BINS = 8, 128, 1024  # of the site that a server lies to, and neurons of its models


def ledger() -> tuple[str, bool]:
    """The ledger's epsilon beside dp-accounting's own on sixty plans."""
    worst, parted, finer, count = 0.0, 0.0, 0.0, 0
    for rows in (20, 63, 200, 1000, 5000):
        for batch in (8, 32, 4000):
            for epochs in (1, 5):
                for epsilon in (8.0, 1.0):
                    rate, steps = min(1.0, batch / rows), epochs * 4 * -(-rows // batch)
                    noise = noise_for(epsilon, DELTA, rate, steps)
                    interval = choose_interval(epsilon)
                    ours = count_epsilon([NoisedSteps(rate, noise, steps)], DELTA, interval)
                    theirs, halves = (PLDAccountant(value_discretization_interval=interval) for _ in range(2))
                    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
                    event = event if rate < 1 else dp_accounting.GaussianDpEvent(noise)
                    theirs.compose(dp_accounting.SelfComposedDpEvent(event, steps))
                    for _ in range(2):
                        halves.compose(dp_accounting.SelfComposedDpEvent(event, steps // 2))
                    fine = PLDAccountant(value_discretization_interval=interval / 10)
                    fine.compose(dp_accounting.SelfComposedDpEvent(event, steps))
                    parted = max(parted, abs(ours / halves.get_epsilon(DELTA) - 1))
                    worst = max(worst, abs(ours / theirs.get_epsilon(DELTA) - 1))
                    finer = max(finer, ours / fine.get_epsilon(DELTA) - 1)
                    count += 1
                    assert ours <= epsilon
    lines = [
        "| plans | greatest relative difference | composed in two halves | above ten times finer losses, at most |",
        "| ---: | ---: | ---: | ---: |",
        f"| {count} | {worst:.1e} | {parted:.1e} | {100 * finer:.2f} % |",
    ]
    return "\n".join(lines), worst < 1e-6


def digits(seed: int) -> kinfed.Federation:
    """The digits of scikit-learn, dealt to twenty clients."""
    order = np.random.default_rng(seed).permutation(len(DIGITS.data))[: 89 * 20]
    x = torch.from_numpy((DIGITS.data[order] / 16).astype(np.float32))
    y = torch.from_numpy(DIGITS.target[order].astype(np.int64))
    split = kinfed.Split(stratify=False)
    return kinfed.Federation.from_arrays(x, y, torch.arange(len(order)) % 20, split=split, seed=seed)


def perceptron(seed: int, inputs: int, outputs: int, hidden: int = 32) -> nn.Module:
    """A network with one hidden layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def train_kinfed(
    method: kinfed.Method, data: kinfed.Federation, net: nn.Module, seed: int, epsilon: float | None, unit="row", **how
):
    """The mean test accuracy in percent, of the last round, and the run."""
    privacy = None if epsilon is None else kinfed.Privacy(epsilon, clip=how.pop("clip", 1.0), unit=unit)
    rounds = how.pop("rounds", 10)
    how.pop("clip", None)
    training = kinfed.Training(privacy=privacy, **how)
    run = kinfed.fit(method, data, net, rounds=rounds, training=training, seed=seed)
    scores = run.history.scores[-1][run.history.headline, "test", "accuracy"]
    return 100 * float(scores.mean()), run


def train_opacus(
    name: str, data: kinfed.Federation, net: nn.Module, seed: int, noise: Tensor, rounds: int, **how
) -> float:
    """The same by a plain loop around opacus, with as much noise for each client."""
    import opacus

    torch.manual_seed(1000 + seed)
    names = [key for key, _ in net.named_parameters()]
    head = {key for key in names if key.startswith("2.")}
    phases = [(head, 1), ({*names} - head, how["epochs"])] if name == "fedrep" else [({*names}, how["epochs"])]
    shared = {key: p.detach().clone() for key, p in net.named_parameters()}
    kept_heads = [{key: shared[key].clone() for key in head} for _ in data.names]
    sizes = data.sizes.double()

    def descend(values, client, moving, epochs, sigma):
        rows = data.rows["train"][client]
        module = perceptron(0, data.x.shape[1], 10)
        module.load_state_dict(values)
        for key, p in module.named_parameters():
            p.requires_grad_(key in moving)
        steps = epochs * -(-len(rows) // how["batch"])
        rate = min(1.0, how["batch"] / len(rows))
        optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=how["optimiser"].lr)
        if sigma:
            module = opacus.GradSampleModule(module, loss_reduction="sum")
            optimiser = opacus.optimizers.DPOptimizer(
                optimiser,
                noise_multiplier=sigma,
                max_grad_norm=how["clip"],
                expected_batch_size=min(how["batch"], len(rows)),
            )
        for _ in range(steps):
            at = rows[torch.rand(len(rows)) < rate] if sigma else rows[torch.randperm(len(rows))[: how["batch"]]]
            if not len(at):
                continue
            optimiser.zero_grad()
            loss = cross_entropy(module(data.x[at]), data.y[at], reduction="sum" if sigma else "mean")
            loss.backward()
            optimiser.step()
        module = module._module if sigma else module
        return {key: p.detach().clone() for key, p in module.named_parameters()}

    for _ in range(rounds):
        trained = []
        for client in range(len(data.names)):
            values = {**shared, **(kept_heads[client] if name == "fedrep" else {})}
            for moving, epochs in phases:
                values = descend(values, client, moving, epochs, float(noise[client]))
            kept_heads[client] = {key: values[key] for key in head}
            trained.append(values)
        shared = {key: sum(s * v[key] for s, v in zip(sizes, trained, strict=True)) / sizes.sum() for key in names}
        shared = {key: value.float() for key, value in shared.items()}
    scores = []
    for client in range(len(data.names)):
        values = {**shared, **(kept_heads[client] if name == "fedrep" else {})}
        if name == "fedavg-ft":
            values = descend(values, client, {*names}, kinfed.methods.FedAvgFT().length * how["epochs"], 0.0)
        module, rows = perceptron(0, data.x.shape[1], 10), data.rows["test"][client]
        module.load_state_dict(values)
        scores.append(float((module(data.x[rows]).argmax(1) == data.y[rows]).float().mean()))
    return 100 * float(np.mean(scores))


def opacus() -> tuple[str, bool]:
    """Three methods on digits at epsilon 8 beside opacus with as much noise."""
    how = {"epochs": 2, "batch": 32, "optimiser": kinfed.SGD(0.5), "clip": 1.0}
    made = {
        "fedavg": kinfed.FedAvg,
        "fedrep": lambda: kinfed.methods.FedRep(head_epochs=1, base_epochs=2),
        "fedavg-ft": kinfed.methods.FedAvgFT,
    }
    lines = [
        "| method | not private | kinfed, epsilon 8 | opacus, as much noise | difference |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    close = True
    for name, make in made.items():
        plain, private, theirs = [], [], []
        for seed in SEEDS:
            data, net = digits(seed), perceptron(seed, 64, 10)
            plain.append(train_kinfed(make(), data, net, seed, None, rounds=10, **how)[0])
            score, run = train_kinfed(make(), data, net, seed, 8.0, rounds=10, **how)
            private.append(score)
            noise = torch.tensor(run.privacy["noise"])
            theirs.append(train_opacus(name, data, net, seed, noise, 10, **how))
        gap = float(np.mean(private) - np.mean(theirs))
        close &= abs(gap) < 3
        lines.append(f"| `{name}` | {_mean(plain)} | {_mean(private)} | {_mean(theirs)} | {gap:+.1f} |")
    return "\n".join(lines), close


def _mean(values: list[float]) -> str:
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"


def open_shops(seed: int) -> kinfed.Federation:
    """Fifteen shops of 120 customers in three groups, each with a plane of its own that splits two classes."""
    rng = np.random.default_rng(seed)
    centres, parts = [[1, -1, 1, 1], [-1, 1, -1, -1], [0.5, 1, -1, 2]], []
    for i in range(15):
        weights = np.asarray(centres[i % 3]) + 0.1 * rng.normal(size=4)
        x = rng.normal(size=(120, 4))
        parts.append((x, x @ weights + 0.3 * rng.normal(size=120) > 0))
    x = torch.from_numpy(np.concatenate([a for a, _ in parts]).astype(np.float32))
    y = torch.from_numpy(np.concatenate([b for _, b in parts]).astype(np.int64))
    client = torch.arange(15).repeat_interleave(120)
    return kinfed.Federation.from_arrays(x, y, client, split=kinfed.Split(stratify=False), seed=seed)


STEPS = {  # the second was chosen on seeds 0 to 2
    "20 rounds of 2 epochs, 8 rows a step": {"rounds": 20, "epochs": 2, "batch": 8, "optimiser": kinfed.SGD(0.2)},
    "5 rounds of 4 steps, all rows a step": {
        "rounds": 5,
        "steps": 4,
        "batch": 84,
        "optimiser": kinfed.SGD(1.0),
        "clip": 0.5,
    },
}


def shops() -> tuple[str, bool]:
    """`kin` and learning alone with linear models on shops of opposite customers."""
    lines = [
        "| method | training | not private | epsilon 8 | epsilon 2 | epsilon 1 |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    losses = {}
    methods = {"kin": kinfed.Kin, "fedavg-ft": kinfed.methods.FedAvgFT, "local": kinfed.Local}
    for name, make in methods.items():
        for label, how in STEPS.items():
            means = {}
            for epsilon in (None, 8.0, 2.0, 1.0):
                scores = []
                for seed in range(10, 16):
                    net = nn.Linear(4, 2)
                    nn.init.zeros_(net.weight)
                    nn.init.zeros_(net.bias)
                    scores.append(train_kinfed(make(), open_shops(seed), net, seed, epsilon, **how)[0])
                means[epsilon] = scores
            losses[name, label] = [np.mean(means[None]) - np.mean(means[epsilon]) for epsilon in (8.0, 2.0)]
            lines.append(f"| `{name}` | {label} | {' | '.join(map(_mean, means.values()))} |")
    return "\n".join(lines), max(losses["kin", [*STEPS][1]]) < 1


def deal_digits(seed: int) -> kinfed.Federation:
    """The digits of scikit-learn at 120 clients, each with three of the ten digits, some 15 rows."""
    rng = np.random.default_rng(seed)
    wanted = np.stack([rng.permutation(10)[:3] for _ in range(120)])
    order = rng.permutation(len(DIGITS.target))
    client = np.empty(len(order), np.int64)
    for digit in range(10):
        owners = np.flatnonzero((wanted == digit).any(1))
        client[order[DIGITS.target[order] == digit]] = np.resize(owners, (DIGITS.target == digit).sum())
    x = torch.from_numpy((DIGITS.data / 16).astype(np.float32))
    y = torch.from_numpy(DIGITS.target.astype(np.int64))
    split = kinfed.Split(stratify=False)
    return kinfed.Federation.from_arrays(x, y, torch.from_numpy(client), split=split, seed=seed)


def open_stores(seed: int) -> kinfed.Federation:
    """300 stores of 30 customers, whose planes that split two classes scatter around a common one, in eight columns."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=8) + 0.5 * rng.normal(size=(300, 1, 8))
    x = rng.normal(size=(300, 30, 8))
    y = (x * weights).sum(2) + 0.5 * rng.normal(size=(300, 30)) > 0
    client = torch.arange(300).repeat_interleave(30)
    x = torch.from_numpy(x.reshape(-1, 8).astype(np.float32))
    y = torch.from_numpy(y.ravel().astype(np.int64))
    return kinfed.Federation.from_arrays(x, y, client, split=kinfed.Split(stratify=False), seed=seed)


def clients() -> tuple[str, bool]:
    """Methods whose server needs the mean alone, at an epsilon for each client, beside learning alone."""
    lines = [
        "| clients | method | not private | epsilon 8 | epsilon 4 | epsilon 2 |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    methods = {
        "local": kinfed.Local,
        "fedavg": kinfed.FedAvg,
        "fedavg-ft": kinfed.methods.FedAvgFT,
        "ditto": lambda: kinfed.methods.Ditto(pull=0.1),
        "fedrep": lambda: kinfed.methods.FedRep(head_epochs=5, base_epochs=2),
    }
    better = True
    for label, deal, hidden, rounds, rate in (
        ("120 with three digits", deal_digits, True, 20, 0.3),
        ("300 stores", open_stores, False, 10, 0.2),
    ):
        means = {}
        for name, make in methods.items():
            if name == "fedrep" and not hidden:  # which would share nothing
                continue
            scores = {}
            for epsilon in (None, 8.0, 4.0, 2.0):
                how = {"epochs": 2, "batch": 8, "optimiser": kinfed.SGD(rate), "rounds": rounds, "unit": "client"}
                scores[epsilon] = [
                    train_kinfed(
                        make(), deal(seed), perceptron(seed, 64, 10) if hidden else plane(seed), seed, epsilon, **how
                    )[0]
                    for seed in SEEDS
                ]
            means[name] = {epsilon: np.mean(values) for epsilon, values in scores.items()}
            lines.append(f"| {label} | `{name}` | {' | '.join(map(_mean, scores.values()))} |")
        better &= means["fedavg-ft"][2.0] > means["local"][2.0]
    return "\n".join(lines), better


def bound_epsilon(outs: np.ndarray, ins: np.ndarray) -> float:
    """A lower bound of epsilon at 95 %: by how a threshold tells runs with a client, ins: [n], from those without.

    The threshold is chosen on the first half of the runs, and its errors are bounded on the second (Clopper and
    Pearson), as by Jagielski et al., *Auditing differentially private machine learning*, 2020.
    """
    half = len(outs) // 2

    def bound(threshold: float, outs: np.ndarray, ins: np.ndarray) -> float:
        above, missed = (outs > threshold).sum(), (ins <= threshold).sum()
        most = [beta.ppf(0.975, count + 1, len(outs) - count) for count in (above, missed)]
        return float(np.log(max(1 - DELTA - most[1], 1e-9) / most[0]))

    best = max(np.quantile(ins[:half], np.linspace(0.02, 0.98, 97)), key=lambda t: bound(t, outs[:half], ins[:half]))
    return bound(best, outs[half:], ins[half:])


def canary() -> tuple[str, bool]:
    """Whether a client that moves as far as it may, in one direction, in every round, can be told from all sums."""
    lines = ["| ledger's epsilon | with its noise | with a quarter of it |", "| ---: | ---: | ---: |"]
    rounds, trials, below = 5, 4000, True
    cohort, sent = torch.arange(4), SharedParams(torch.zeros(8))
    data = kinfed.Federation.from_arrays(torch.randn(80, 4), torch.arange(80) % 2, torch.arange(80) // 20)
    for epsilon in (8.0, 4.0, 2.0, 1.0):
        training = kinfed.Training(privacy=kinfed.Privacy(epsilon, unit="client"))
        roster = replace(Simulation(data, Model(nn.Linear(4, 2)), kinfed.FedAvg(), training).roster(), rounds=rounds)
        shown = []
        for moved in (0.0, 100.0):
            uploads = torch.zeros(4, 8)
            uploads[0, 0] = moved
            sums = []
            for trial in range(trials):
                for round in range(rounds):
                    now = replace(roster, seed=trial + trials * (moved > 0), round=round)
                    given = sum_privately(kinfed.FedAvg(), now, cohort, sent, AveragedParams(uploads))
                    sums.append(4 * float(given.theta[0]))
            shown.append(np.reshape(sums, (trials, rounds)).sum(1))
        outs, ins = shown
        weak = outs / 4, (ins - ins.mean()) / 4 + ins.mean()  # what a mistake in the noise would have shown
        bounds = bound_epsilon(outs, ins), bound_epsilon(*weak)
        below &= bounds[0] <= epsilon
        lines.append(f"| {epsilon:g} | at least {max(0.0, bounds[0]):.2f} | at least {max(0.0, bounds[1]):.2f} |")
    return "\n".join(lines), below


def plane(seed: int) -> nn.Module:
    """A linear model of eight columns and two classes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(8, 2)


def trap(layout: Layout, theta: Tensor, draw: torch.Generator) -> Tensor:
    """A model whose hidden neurons each answer to the few rows that lie farthest in a direction of their own."""
    way = torch.randn(HIDDEN, COLUMNS, generator=draw)
    way = way / way.norm(dim=1, keepdim=True)
    threshold = torch.linspace(1.2, 2.6, HIDDEN)
    head = 0.05 * torch.stack([torch.ones(HIDDEN), -torch.ones(HIDDEN)])
    crafted = {"fc1.weight": way, "fc1.bias": -threshold, "head.weight": head, "head.bias": torch.zeros(2)}
    return layout.flatten(layout.tensors(theta) | crafted)


def line_up(layout: Layout, theta: Tensor, draw: torch.Generator) -> Tensor:
    """A model whose hidden neurons cut one direction into bins, so that neighbours differ by the rows of one bin."""
    way = torch.randn(COLUMNS, generator=draw)
    way = (way / way.norm()).expand(BINS, -1)
    head = 1e-3 * torch.stack([torch.ones(BINS), -torch.ones(BINS)])
    crafted = {"fc1.weight": way, "fc1.bias": -torch.linspace(-3, 3, BINS)}
    crafted |= {"head.weight": head, "head.bias": torch.zeros(2)}
    return layout.flatten(layout.tensors(theta) | crafted)


def read_rows(privacy: float | None, folder: Path, bins: bool) -> tuple[int, int, int]:
    """Training rows of a site that a server reads out of its uploads, how many there are, and uploads it was given.

    The server sends models of its own, with neurons that answer to few rows or with `bins`. A row is read if every one
    of its numbers is off by less than a twentieth of the deviation of its column.
    """
    rng = np.random.default_rng(0)
    sites, tables = [], {}
    for name in ("north", "east", "south"):
        tables[name] = rng.normal(size=(90, COLUMNS)).astype(np.float32)
        y = (tables[name][:, 0] + rng.normal(size=90) > 0).astype(np.int64)
        np.savez(folder / f"{name}.npz", x=tables[name], y=y)
        sites.append(Site(name, folder / f"{name}.npz", folder, "cpu", policy=Policy(runs="any")))
    table = {
        "rounds": 20,
        "method": "fedavg",
        "model": {"name": "mlp", "hidden": [BINS if bins else HIDDEN]},
        "training": {"epochs": 1, "batch": 8} | ({"batch": 1024, "optimiser": {"lr": 1.0}} if bins else {}),
        "flower": {"clients": 3, "beside": [], "classes": 2},
    }
    table |= {} if privacy is None else {"privacy": {"epsilon": privacy}}
    kept: dict[str, Message] = {}

    class Tap(Here):
        def push(self, node, kind, message, seconds):
            if self.sites[node].name == "south":
                kept.setdefault(kind, message)
            return super().push(node, kind, message, seconds)

    planned = plan.resolve(table)
    try:
        serve(planned, Tap(sites), folder / "run", lambda line: None, 0.0)
    except RunError as problem:
        print(problem)
    victim = Site("south", folder / "south.npz", folder / "again", "cpu", policy=Policy(runs="any"))
    victim.reply("join", kept["join"])
    model = planned.model((COLUMNS,), 2)
    layout = model.layout
    draw = torch.Generator().manual_seed(1)
    rows_read = set()
    answered = 0
    for round in range(30):
        theta = (line_up if bins else trap)(layout, model.theta, draw)
        fields = kept["round"].fields | {"round": round, "accepted": round - 1}
        reply = victim.reply("round", kept["round"]._replace(fields=fields, arrays={"train/theta": theta}))
        if "refused" in reply.fields:
            break
        answered += 1
        moved = {
            key: new - old
            for (key, new), old in zip(
                layout.tensors(reply.arrays["upload/theta"]).items(), layout.tensors(theta).values(), strict=True
            )
        }
        weight, bias = moved["fc1.weight"].double(), moved["fc1.bias"].double()
        if bins:
            weight, bias = weight[:-1] - weight[1:], bias[:-1] - bias[1:]
        for neuron in torch.nonzero(bias.abs() > 1e-7).flatten().tolist():
            near = np.abs(tables["south"] - (weight[neuron] / bias[neuron]).numpy()).max(1)
            if near.min() < 0.05:
                rows_read.add(int(near.argmin()))
    return len(rows_read), 63, answered


def traps() -> tuple[str, bool]:
    """What a lying server reads with models of its own making."""
    lines = [
        "| models | | uploads answered | training rows read |",
        "| --- | --- | ---: | ---: |",
    ]
    read = []
    for bins, models in ((False, "a direction for each neuron"), (True, "bins along one direction")):
        for epsilon in (None, 8.0, 2.0):
            with tempfile.TemporaryDirectory() as place:
                count, rows, answered = read_rows(epsilon, Path(place), bins)
            read += [count] if epsilon else []
            label = "without privacy" if epsilon is None else f"epsilon {epsilon:g}"
            lines.append(f"| {models} | {label} | {answered} | {count} of {rows} |")
    return "\n".join(lines), not any(read)


PARTS: dict[str, Callable[[], tuple[str, bool]]] = {
    "ledger": ledger,
    "opacus": opacus,
    "shops": shops,
    "traps": traps,
    "clients": clients,
    "canary": canary,
}


def main(wanted: list[str]) -> int:
    """Measure, and rewrite the parts of the page."""
    warnings.simplefilter("ignore")
    kept = True
    for name in wanted or PARTS:
        text, holds = PARTS[name]()
        print(f"{name}: {'holds' if holds else 'BROKEN'}\n{text}", flush=True)
        kept &= holds
        put(PAGE, name, text, "What an epsilon costs")
    return 0 if kept else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=f"default: all of {', '.join(PARTS)}"
    )
    sys.exit(main(parser.parse_args().parts))
