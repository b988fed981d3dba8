"""The quadratic programme of mixtures: weights of a mean that make a quadratic form smallest."""

import torch
from torch import Tensor


def smallest_mixture(form: Tensor) -> Tensor:
    r"""[K] the weights, not negative and of sum one, at which $a^\top Q a$ is smallest; Q: [K, K] has no negative part.

    By non-negative least squares: with any $s > 0$ the $x \ge 0$ that minimises $x^\top Q x + s (1 - \sum_k x_k)^2$ is
    a multiple of it. Where several are, a small part of the identity decides.
    """
    from scipy.optimize import nnls

    q = form.double().cpu()
    scale = q.diagonal().mean()
    if not scale > 0:
        return torch.full_like(form[0], 1 / len(form))
    q = q / scale + 1 + 1e-9 * torch.eye(len(q), dtype=q.dtype)
    root = torch.linalg.cholesky(q)
    goal = torch.linalg.solve_triangular(root, torch.ones(len(q), 1, dtype=q.dtype), upper=False)
    solution = torch.from_numpy(nnls(root.T.numpy(), goal[:, 0].numpy())[0]).to(form)
    return solution / solution.sum()
