"""Coverage, false claims and power of the verdict, by simulation: python evidence/verdict_power.py [--times 4000]

Federations with a known gain, in settings that are easy and hard: labels and errors, clients of unequal size, gains
that depend on size, heavy tails, rows in blocks, and baselines between which validation rows cannot choose. Writes
docs/evidence/verdict-power.md.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from kinfed.core.summary import Metric
from kinfed.verdict.dependence import INDEPENDENT, Blocks
from kinfed.verdict.verdict import HELPS, ScoredBaseline, decide, interval_over_clients, interval_per_row, judge
from kinfed_papers.result_pages import put

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "verdict-power.md"
CLIENTS = (3, 8, 20, 100, 500)
MOST = 100_000  # clients simulated in one cell of the table
POINTS, SHARE = 0.03, 0.05  # the deviation of clients' gains: of an accuracy, of the logarithm of an error
BLOCK = 10  # rows of a block


class Setting(NamedTuple):
    """How clients differ in size and gain, and how their rows do."""

    name: str
    scores: str = "labels"
    sizes: str = "4 to 100"
    gains: str = "normal"
    block: int = 1
    heavy: bool = False  # whether rows' errors have heavy tails


SETTINGS = (
    Setting("20 rows each", sizes="20"),
    Setting("4 to 100 rows"),
    Setting("shares of rows by Dirichlet's .5", sizes="dirichlet"),
    Setting("gain grows with size, mean 0", gains="grows"),
    Setting("small clients gain most", gains="shrinks"),
    Setting("rows in blocks of ten", block=BLOCK),
    Setting("gains with heavy tails (t, 3 degrees)", gains="heavy"),
    Setting("gains that are skewed (exponential)", gains="skewed"),
)
SETTINGS += tuple(setting._replace(scores="errors") for setting in SETTINGS)
SETTINGS += (
    Setting("200 rows each, a tenth gain 27 points, the rest lose 3", sizes="200", gains="few"),
    Setting("rows' errors with heavy tails (t, 2.5 degrees)", "errors", heavy=True),
    Setting("gains of 30 %, skewed (exponential)", "errors", gains="very skewed"),
)


def sizes_of(setting, draw, times, clients):
    """[T, N] test rows of each client."""
    if setting.sizes.isdigit():
        return np.full((times, clients), int(setting.sizes))
    if setting.sizes == "4 to 100":
        return draw.integers(4, 101, (times, clients))
    return np.maximum(2, (draw.dirichlet(np.full(clients, 0.5), times) * 40 * clients).astype(int))


def gains_of(setting, draw, sizes):
    """[T, N] the clients' true gains, of mean 0."""
    scale = POINTS if setting.scores == "labels" else SHARE
    gains = draw.normal(0, scale, sizes.shape)
    slope = 2 * scale * (sizes - 52) / 28
    if setting.gains == "few":
        return np.where(draw.random(sizes.shape) < 0.1, 0.27, -0.03)
    if setting.gains == "heavy":
        return scale * stats.t.rvs(3, size=sizes.shape, random_state=draw)
    if setting.gains.endswith("skewed"):
        scale = 0.3 if setting.gains == "very skewed" else scale
        return scale * (draw.exponential(size=sizes.shape) - 1)
    return gains + {"normal": 0, "grows": slope, "shrinks": -slope}[setting.gains]


def differences_of(setting, draw, sizes, gains):
    """[T, N] the measured differences of clients: of accuracies, or of logarithms of mean errors."""
    rows = -(-sizes // setting.block)  # observations that are independent
    if setting.scores == "labels":  # a fifth of labels are answered differently, or as many as the gain needs
        differ = np.maximum(0.1, np.abs(gains) / 2)
        up, down = (np.clip(differ + sign * gains / 2, 0, 1) for sign in (1, -1))
        counts = draw.multinomial(rows, np.stack([up, 1 - up - down, down], -1))
        return (counts[..., 0] - counts[..., 2]) / rows
    flat, total = rows.ravel(), int(rows.sum())
    common, mine, other = (
        stats.t.rvs(2.5, size=(3, total), random_state=draw) if setting.heavy else draw.normal(size=(3, total))
    )
    begin = np.concatenate([[0], np.cumsum(flat)[:-1]])
    means = [np.add.reduceat(np.abs(0.95 * common + 0.3 * noise), begin) / flat for noise in (mine, other)]
    return np.log(means[1] / means[0]).reshape(sizes.shape) + gains


def student(values):
    """[T] the means of values: [T, N], and half the widths of Student's intervals."""
    count = values.shape[1]
    return values.mean(1), stats.t.ppf(0.975, count - 1) * values.std(1, ddof=1) / np.sqrt(count)


def claims(draw, setting, clients, times, gain):
    """Shares of federations whose interval holds the gain, or that of these clients, lies above 0, and lies below 0."""
    held, held_here, above, below = 0, 0, 0, 0
    for part in np.array_split(np.arange(times), max(1, times * clients // 20_000)):
        sizes = sizes_of(setting, draw, len(part), clients)
        gains = gains_of(setting, draw, sizes) + gain
        mean, half = student(differences_of(setting, draw, sizes, gains))
        held += int((np.abs(mean - gain) <= half).sum())
        held_here += int((np.abs(mean - gains.mean(1)) <= half).sum())
        above += int((mean - half > 0).sum())
        below += int((mean + half < 0).sum())
    return held / times, held_here / times, above / times, below / times


def write_overall(times):
    """The table of the interval over clients, with a line for each setting and number of clients."""
    columns = "clients", "federations", "coverage", "of these clients", "false helps", "false does not", "power"
    lines = [f"| scores, setting | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for setting in SETTINGS:
        gain = 0.04 if setting.scores == "labels" else 0.1
        for clients in CLIENTS:
            count, draw = min(times, MOST // clients), np.random.default_rng(clients)
            shares = claims(draw, setting, clients, count, 0.0)
            power = claims(draw, setting, clients, count, gain)[2]
            numbers = " | ".join(f"{100 * share:.1f} %" for share in (*shares, power))
            lines.append(f"| {setting.scores}, {setting.name} | {clients} | {count:,} | {numbers} |")
        print(lines[-1], flush=True)
    return lines


def write_per_row(times):
    """The table of the mean weighted by rows, whose truth is the mean over rows."""
    lines = ["| setting | clients | coverage |", "| --- | ---: | ---: |"]
    for setting in (SETTINGS[1], SETTINGS[2], SETTINGS[3]):
        for clients in (8, 20, 100):
            draw, held = np.random.default_rng(clients), 0
            for _ in range(times):
                sizes = sizes_of(setting, draw, 1, clients)
                gains = gains_of(setting, draw, sizes)
                values = differences_of(setting, draw, sizes, gains)[0]
                # Of sizes from 4 to 100 the mean per row is the slope times the variance of sizes over their mean.
                truth = 2 * POINTS / 28 * (97**2 - 1) / 12 / 52 if setting.gains == "grows" else 0.0
                _, low, high = interval_per_row(values, sizes[0])
                held += np.isnan(low) or low <= truth <= high
            lines.append(f"| labels, {setting.name} | {clients} | {100 * held / times:.1f} % |")
    return lines


def write_single_clients(times):
    """The table of who is said to gain or lose: half of the clients gain 20 points, and the others nothing."""
    lines = [
        "| 40 to 400 test rows of a client | clients | rows count | said to gain or lose | of these wrong | found |"
    ]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    for block, dealt in ((1, False), (BLOCK, False), (BLOCK, True)):
        for clients in (8, 20, 100):
            for kind in ("each", "declared", "found"):
                draw = np.random.default_rng(clients)
                counts = sum(judged_clients(draw, clients, block, dealt, kind) for _ in range(times // 10 or 1))
                decided, wrong, right, able = counts
                what = f"in blocks of {block}" if block > 1 else "independent"
                what += ", a fifth of them for the test" if dealt else ""
                how = {"each": "each by itself", "declared": "by declared block", "found": "as found"}[kind]
                share = f"{100 * wrong / decided:.1f} %" if decided else "none said"
                lines.append(f"| {what} | {clients} | {how} | {decided:,} | {share} | {100 * right / able:.1f} % |")
        print(lines[-1], flush=True)
    return lines


def judged_clients(draw, clients, block, dealt, kind):
    """[4] how many clients are said to gain or lose, wrongly, rightly, and how many gain, of one federation."""
    gains, mine, others, ids = np.arange(clients) % 2 == 0, [], [], []
    for i in range(clients):
        count = int(draw.integers(40, 401)) * (5 if dealt else 1)
        up, down = (0.25, 0.05) if gains[i] else (0.1, 0.1)
        answers = draw.choice([1.0, 0.0, -1.0], -(-count // block), p=(up, 1 - up - down, down))
        places = np.arange(count)
        if dealt:
            places = np.sort(draw.permutation(count)[: count // 5])
        score = np.repeat(answers, block)[places]
        mine.append((score > 0).astype(float))
        others.append((score < 0).astype(float))
        ids.append(places // block if kind == "declared" else places)
    blocks = INDEPENDENT if kind == "each" else Blocks([ids], kind == "declared")
    names = [str(i) for i in range(clients)]
    gain, lose = decide([mine], [others], names, True, blocks)
    right = sum(gains[int(name)] for name in gain)
    return np.array([len(gain) + len(lose), len(gain) - right + len(lose), right, int(gains.sum())])


def write_pooled(times):
    """The table of a method, a floor and pooled baselines that are all as good, of 20 test rows a client."""
    lines = ["| pooled baselines | clients | method helps | only pooling helps | false helps |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: |")
    metric = Metric(name="accuracy", higher_is_better=True, unit="%")
    for rivals in (1, 3):
        for clients in (8, 20, 100):
            draw, count = np.random.default_rng(clients), max(1, times // 2)
            names, claimed = [str(i) for i in range(clients)], [0, 0]
            for _ in range(count):
                rates = 0.75 + draw.normal(0, 0.05, (clients, 1, 2 + rivals))
                # Rows are hard for all models alike, but for three in ten answers.
                luck = draw.random((clients, 20, 2 + rivals))
                ease = np.where(draw.random(luck.shape) < 0.7, draw.random((clients, 20, 1)), luck)
                mine, alone, *pooled = np.moveaxis((ease < rates).astype(float), 2, 0)
                best = max(pooled, key=np.mean)
                judged = judge(
                    "kin",
                    [mine],
                    ScoredBaseline("a ridge", [alone]),
                    ScoredBaseline("FedAvg", [best], rivals=rivals),
                    names=names,
                    metric=metric,
                )
                if judged.sentence.startswith(HELPS):
                    claimed[judged.over["alone"].low <= 0] += 1
            shares = [100 * part / count for part in (*claimed, sum(claimed))]
            lines.append(f"| {rivals} | {clients} | {' | '.join(f'{share:.1f} %' for share in shares)} |")
    return lines


def write_choice(times):
    """The table of a floor between whose baselines validation rows cannot choose, all as good as the method."""
    lines = ["| baselines as good as the method | clients | false helps | false does not |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for rivals in (1, 3):
        for clients in (8, 20, 100):
            draw = np.random.default_rng(clients)
            shared = draw.normal(0, 0.05, (times, clients, 1))
            values = shared + draw.normal(0, 0.05, (times, clients, rivals))  # over each of the rivals
            hardest = np.take_along_axis(values, values.mean(1).argmin(1)[:, None, None], 2)[..., 0]
            bounds = np.array([interval_over_clients(gains, rivals) for gains in hardest])
            above = float((bounds[:, 1] > 0).mean())
            below = float((bounds[:, 2] < 0).mean())
            lines.append(f"| {rivals} | {clients} | {100 * above:.1f} % | {100 * below:.1f} % |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=4000)
    times = parser.parse_args().times
    title = "How far the verdict can be trusted"
    command = f"`python evidence/verdict_power.py --times {times}`"
    for section, lines in (
        ("power", write_overall(times)),
        ("rows", write_per_row(times)),
        ("clients", write_single_clients(times)),
        ("choice", write_choice(times)),
        ("pooled", write_pooled(times)),
    ):
        put(PAGE, section, "\n".join([command, "", *lines]), title)


if __name__ == "__main__":
    main()
