"""Operations that make weights sparse and keep them weights of a mean."""

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor


def project_simplex(rows: Tensor, counts: Tensor | None = None) -> Tensor:
    """Euclidean projection of each row of [..., N] onto the probability simplex (Held et al., 1974).

    With counts: [..., N] each entry stands for so many equal ones, and the result has the sum over these.
    """
    rows = rows - rows.amax(-1, keepdim=True)  # the projection is the same, and beside large numbers 1 is not lost
    if counts is None or (counts == 1).all():
        ordered, counts = sort_rows(rows), torch.ones_like(rows)
        many = counts
    else:
        ordered, order = rows.sort(dim=-1, descending=True)
        counts = counts.expand_as(rows)
        many = counts.gather(-1, order)
    level = ((ordered * many).cumsum(-1) - 1) / many.cumsum(-1)
    active = (ordered - level > 0).sum(-1, keepdim=True)
    return counts * (rows - level.gather(-1, active - 1)).clamp(min=0)


def sort_rows(rows: Tensor) -> Tensor:
    """[..., N] each row from its largest entry down; by NumPy where it can, as PyTorch sorts places beside entries."""
    if rows.device.type != "cpu" or rows.requires_grad or is_functorch_wrapped_tensor(rows):
        return rows.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=-1)).flip(-1)


def to_rows(weights: Tensor) -> Tensor:
    """[N, N] the rows, each divided by its sum; a row of zeros stays."""
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def with_itself(links: Tensor) -> Tensor:
    """[N, N] links: [N, N] with a self-link of weight 1 for every client that has none."""
    return links + torch.diag((links.diagonal() == 0).to(links.dtype))


def nearest_mixtures(inner: Tensor, target: Tensor, linked: Tensor, gamma: float) -> Tensor:
    r"""[N, N] rows of weights: a, of those linked, minimises $\|v_i - \sum_j a_j v_j\|^2 + \gamma \|a - t_i\|^2$.

    inner: [N, N] float64 are the inner products of the v, target: [N, N] the t, linked: [N, N] bool. Weights are not
    negative and sum to one.
    """
    itself = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    steepest = torch.linalg.eigvalsh(inner)[-1].clamp(min=0) + gamma
    narrow = (gamma / steepest).sqrt()
    # Nesterov's gradient steps shrink the error by 1 - narrow each.
    rows = ahead = target
    for _ in range(int(50 / narrow) + 1):
        grad = (ahead - itself) @ inner + gamma * (ahead - target)
        before = rows
        rows = project_simplex((ahead - grad / steepest).masked_fill(~linked, -torch.inf))
        ahead = rows + (1 - narrow) / (1 + narrow) * (rows - before)
    return rows


def largest(rows: Tensor, count: int) -> Tensor:
    """[K, N] bool: the `count` largest of each row: [N]; of equals the first."""
    count = min(count, rows.shape[1])
    least = rows.topk(count, dim=1).values[:, -1:]
    more, equal = rows > least, rows == least
    return more | (equal & (equal.cumsum(1) <= count - more.sum(1, keepdim=True)))
