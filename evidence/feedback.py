"""Whether feedback on validation examples spoils the scores that they select: python evidence/feedback.py

Methods whose feedback is the validation examples, beside the same with a ninth of the training examples set aside for
it, on the sixteen federations of tune_federations.py, with the library's default training. Prints, as means over
federations with their standard errors, in points: how far validation accuracy lies above test accuracy at the round
and kind of model that validation selects, for each, and by how much the test accuracy of the first is higher.
"""

import argparse
import warnings

import numpy as np
import torch
import tune_federations

import kinfed
from kinfed.methods import METHODS


def measure(method, case, seed):
    """Validation accuracy less test accuracy, and test accuracy, in percent."""
    _, x, y, client, classes = case
    federation = kinfed.Federation.from_arrays(*map(torch.from_numpy, (x, y, client)))
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, classes))
    summary = kinfed.fit(method, federation, net, rounds=20, seed=seed).summary
    scores = summary.chosen_scores
    return 100 * (scores["validation"] - scores["mean"]), 100 * scores["mean"]


def write_mean(values):
    """The mean of values: [n], and its standard error."""
    return f"{values.mean():+.1f} ± {values.std(ddof=1) / np.sqrt(len(values)):.1f}"


def main():
    """Print a line a method."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", default="hedge", help="methods with a setting feedback, separated by commas")
    args = parser.parse_args()
    for name in args.methods.split(","):
        both = [[measure(METHODS[name](feedback=of), case, 0) for case in tune_federations.cases(0)] for of in FEEDBACK]
        (above, test), (above_aside, test_aside) = (np.array(values).T for values in both)
        print(
            f"{name}: validation above test {write_mean(above)}, with examples set aside {write_mean(above_aside)}",
            flush=True,
        )
        print(
            f"{name}: test accuracy higher than with examples set aside by {write_mean(test - test_aside)}", flush=True
        )


FEEDBACK = ("validation", "held-out")

if __name__ == "__main__":
    main()
