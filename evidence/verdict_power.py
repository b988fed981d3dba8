"""Coverage and power of intervals over clients, by simulation: python evidence/verdict_power.py [--times 2000]

Three intervals of what a method gains over another, for labels (the difference of accuracies) and for errors (the
logarithm of the ratio of mean errors): Student's t of the clients' means, each client counting once; all test examples
pooled, with an error that is robust to clients; and a random-effects mean, in which a client counts by its examples as
far as noise within clients matters. Writes docs/evidence/verdict-power.md.
"""

import argparse
from pathlib import Path

import numpy as np
from scipy import stats

from kinfed.verdict.verdict import weighted_interval
from kinfed_papers.result_pages import put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "verdict-power.md"
CLIENTS = (8, 15, 40, 150)
SIZES = {"20 each": lambda draw, n: np.full(n, 20), "4 to 100": lambda draw, n: draw.integers(4, 101, n)}
RULES = ("t over clients", "all examples", "random effects")


def of_labels(draw, sizes, gain):
    """Differences of paired scores that are 0 or 1, by client: a tenth disagree, client effects of 3 points."""
    effect = gain + draw.normal(0, 0.03, len(sizes))
    up = np.clip(0.05 + effect / 2, 0, 0.5)
    down = np.clip(0.05 - effect / 2, 0, 0.5)
    each = [draw.choice([1.0, 0.0, -1.0], n, p=(a, 1 - a - b, b)) for n, a, b in zip(sizes, up, down, strict=True)]
    mean = np.array([one.mean() for one in each])
    noise = np.array([one.var(ddof=1) for one in each])
    return mean, noise, each


def of_errors(draw, sizes, gain):
    """Logarithms of ratios of mean absolute errors: client effects of 5 %, errors that have much in common."""
    effect = gain + draw.normal(0, 0.05, len(sizes))
    mean, noise, each = [], [], []
    for n, ratio in zip(sizes, effect, strict=True):
        scale, common, (a, b) = np.exp(draw.normal()), draw.normal(size=n), draw.normal(size=(2, n))
        mine, other = (scale * np.abs(0.95 * common + 0.3 * one) for one in (a, b))
        mine *= np.exp(-ratio)
        mean.append(np.log(other.mean() / mine.mean()))
        noise.append((other / other.mean() - mine / mine.mean()).var(ddof=1))
        each.append(other / (other.mean() + mine.mean()) * 2 - mine / (other.mean() + mine.mean()) * 2)
    return np.array(mean), np.array(noise), each


def pooled(each):
    """All examples count once; the error is that of clients' sums."""
    n, count = len(each), np.array([len(one) for one in each])
    total = np.array([one.sum() for one in each])
    mean = total.sum() / count.sum()
    error = np.sqrt(np.square(total - mean * count).sum() * n / (n - 1)) / count.sum()
    half = stats.t.ppf(0.975, n - 1) * error
    return mean - half, mean + half


def student(mean):
    half = stats.t.ppf(0.975, len(mean) - 1) * mean.std(ddof=1) / np.sqrt(len(mean))
    return mean.mean() - half, mean.mean() + half


def measure(make, gain, clients, sizes, times):
    """By rule, the shares of intervals that hold the truth, and that are above 0."""
    draw, found = np.random.default_rng(1), np.zeros((len(RULES), 2))
    for _ in range(times):
        size = SIZES[sizes](draw, clients)
        mean, noise, each = make(draw, size, gain)
        within = float((noise * (size - 1)).sum() / (size - 1).sum()) / size
        intervals = student(mean), pooled(each), weighted_interval(mean, within)[1:]
        found += [[low <= gain <= high, low > 0] for low, high in intervals]
    return found / times


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=2000)
    times = parser.parse_args().times
    lines = [f"`python evidence/verdict_power.py --times {times}`: coverage at a true gain, and power there.", ""]
    lines += [f"| scores | test examples | clients | {' | '.join(f'{rule}: coverage | power' for rule in RULES)} |"]
    lines += [f"| --- | --- | ---: |{' ---: |' * 2 * len(RULES)}"]
    for name, make, gain in (("labels, +2 points", of_labels, 0.02), ("errors, 5 % lower", of_errors, 0.05)):
        for sizes in SIZES:
            for clients in CLIENTS:
                found = measure(make, gain, clients, sizes, times)
                cells = [f"{100 * value:.1f} %" for value in found.flatten()]
                lines.append(f"| {name} | {sizes} | {clients} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    put(PAGE, "power", "\n".join(lines), "How far the verdict's intervals can be trusted")


if __name__ == "__main__":
    main()
