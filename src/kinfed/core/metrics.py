"""Metrics: the arithmetic of scores, of one client's outputs and targets; all run under vmap.

An example of weight 2 counts as two; those of weight 0 fill a batch up and do not count.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BY_CLASS = ("balanced_accuracy", "auc")
CALIBRATION = ("brier", "ece", "log_loss")  # how far probabilities can be trusted; better if lower
BINS = 15  # of confidence, for `ece`
ALWAYS = "always"  # the class that a model predicts for every example; NaN if it predicts several
RECALL = "recall@"  # before the number of a class


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """[] the mean of values: [B] by weight: [B]; 0 if all weights are."""
    return (values * weight).sum() / positive(weight.sum())


def mean_over_clients(values: Tensor, metric: str) -> float:
    """The mean of clients' scores: [N] without NaN.

    Of root mean squared errors it is the root of the clients' mean squared error, so the square of `rmse` is `mse`.
    """
    values = values.double()
    rooted = metric.partition("@")[0] == "rmse"
    return float(values.square().nanmean().sqrt() if rooted else values.nanmean())


def positive(total: Tensor) -> Tensor:
    """The sums of weights, total: [...], as divisors: 1 in place of 0, which sums of nothing are divided by."""
    return torch.where(total > 0, total, 1)


def effective_rows(weights: Tensor) -> float:
    """As many rows of equal weight would give a mean the same variance as those of weights: [n].

    Kish 1965, Section 8.2.
    """
    weights = weights.double().abs()
    return float(weights.sum().square() / weights.square().sum().clamp(min=torch.finfo(torch.float64).tiny))


def calibration_errors(outputs: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """`brier` and `ece` (see `Classification`) of logits: [B, C] and labels y: [B]."""
    chances = outputs.softmax(-1)  # [B, C]
    squared = (chances - F.one_hot(y, outputs.shape[-1])).square()
    confidence, predicted = chances.max(-1)
    bin_of = (confidence * BINS).ceil().clamp(1, BINS) - 1
    gap = (predicted == y).to(outputs.dtype) - confidence
    gaps = (bin_of == torch.arange(BINS, device=y.device)[:, None]) * (gap * weight)  # [BINS, B] in its bin's row
    return {
        "brier": weighted_mean(squared[:, 1] if outputs.shape[-1] == 2 else squared.sum(-1), weight),
        "ece": gaps.sum(-1).abs().sum() / positive(weight.sum()),
    }


def scores_by_class(outputs: Tensor, y: Tensor, weight: Tensor, classes: int) -> dict[str, Tensor]:
    """`balanced_accuracy`, `auc`, `always` and `recall@c` (see `Classification`) of logits: [B, C], labels y: [B]."""
    predicted, real = outputs.argmax(-1), weight > 0
    of_class = (y == torch.arange(classes, device=y.device)[:, None]) * weight.to(outputs.dtype)  # [C, B]
    count = of_class.sum(-1)  # [C]
    recall = (of_class * (predicted == y)).sum(-1) / count
    several = (count > 0).sum() > 1
    least = torch.where(real, predicted, predicted.max()).min()
    most = torch.where(real, predicted, 0).max()
    scores = {
        "balanced_accuracy": weighted_mean(torch.where(count > 0, recall, 0), count > 0),
        "auc": roc_auc(outputs, of_class),
        ALWAYS: torch.where(least == most, most.to(outputs.dtype), torch.nan),
    }
    scores = {name: torch.where(several, value, torch.nan) for name, value in scores.items()}
    return scores | {f"{RECALL}{c}": value for c, value in enumerate(recall.unbind())}


def roc_auc(outputs: Tensor, of_class: Tensor) -> Tensor:
    """[] the area under the ROC curve of logits: [B, C], the mean over classes beside the rest.

    of_class: [C, B] are the weights of examples of each class, 0 in others.
    """
    classes = len(of_class)
    if classes == outputs.shape[-1] == 2:
        # The difference ranks as the probability of class 1 does, and still ranks where that is rounded to 1.
        p = (outputs[:, 1] - outputs[:, 0])[None]
    else:
        p = outputs.softmax(-1).T[:classes]
        p = p[1:] if classes == 2 else p
    p, of_class = p.contiguous(), of_class.double()  # [A, B] of the classes that are ranked: of two the second alone
    of_this = of_class[-len(p) :]  # [A, B]
    rest = torch.where(of_this > 0, 0, of_class.sum(0))
    ordered, order = torch.where(rest > 0, p, torch.inf).sort(-1)
    of_lowest = F.pad(rest.gather(-1, order).cumsum(-1), (1, 0))  # [A, B + 1] the weight of so many of the lowest
    below, not_above = (of_lowest.gather(-1, torch.searchsorted(ordered, p, right=ties)) for ties in (False, True))
    pairs = of_this.sum(-1) * rest.sum(-1)
    area = (((below + not_above) * of_this).sum(-1) / positive(2 * pairs)).to(p.dtype)  # a tie counts as half
    return weighted_mean(area, pairs > 0) + 0 * p.sum()  # NaN where the outputs are


def r2_score(squared: Tensor, truth: Tensor, weight: Tensor) -> Tensor:
    """[k] the share of the variance of truth: [B, k] that is left by mean squared errors: [k], taken from 1."""
    column, real = weight[:, None], (weight > 0)[:, None]
    middle = (truth * column).sum(0) / column.sum()
    variance = ((truth - middle).square() * column).sum(0) / column.sum()
    high = torch.where(real, truth, -torch.inf).amax(0)
    low = torch.where(real, truth, torch.inf).amin(0)
    return torch.where(high > low, 1 - squared / variance, torch.nan)


def poisson_deviance(log: Tensor, truth: Tensor) -> Tensor:
    """[B] of counts, truth: [B], and of the logarithm of what was expected: [B]."""
    some = truth > 0
    gap = log - torch.where(some, truth, 1).log()  # the difference of large terms would be lost in rounding
    return 2 * torch.where(some, truth * (gap.expm1() - gap), log.exp())


def pinball_loss(outputs: Tensor, truth: Tensor, quantiles: Sequence[float]) -> Tensor:
    """[B, H, Q] of outputs: [B, H, Q] and truth: [B, H]."""
    level = torch.tensor(quantiles, dtype=outputs.dtype, device=outputs.device)
    above = truth.unsqueeze(-1) - outputs
    return torch.maximum(level * above, (level - 1) * above)
