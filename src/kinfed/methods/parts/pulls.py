"""Pulls: how strong a proximal term may be."""

from ...core.optimiser import SGD, Optimiser
from ...errors import UsageError


def check_pull(
    method: str,
    optimiser: Optimiser,
    pull: float,
    anchor: str = "the shared one",
    strength: str = "pull",
    setting: str = "method.pull",
) -> None:
    """Raise UsageError if SGD's steps along the pull alone, whatever the loss, lead away from the anchor.

    `strength` says what the pull is made of.
    """
    if isinstance(optimiser, SGD):
        step, most = optimiser.lr * pull, 2 * (1 + optimiser.momentum)
        if step >= most:
            raise UsageError(
                f"{method}: lr * {strength} is {step:.3g}, but from {most:.3g} on each local step moves a client's "
                f"model farther from {anchor}; lower {setting} or the learning rate"
            )
