"""What a method asks of its clients that compares classes or trains a head apart from the layers below it."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import one_hot

from ...core.client import Client
from ...core.metrics import positive
from ...core.tasks import Classification
from ...errors import UsageError


def members(client: Client, method: str) -> Tensor:
    """[n, C] a training example's weight where it is of a class, 1 without weights, and 0 in rows that only fill up.

    Raises UsageError if the task is not to tell classes apart.
    """
    if not isinstance(client.task, Classification):
        raise UsageError(f"{method} compares classes, and this data has numbers to predict; use method 'fedrep'")
    _, y, real = client.data
    return one_hot(y, client.task.classes).to(real.dtype) * real[:, None]


def check_head(module: nn.Module, head: str | None, method: str) -> str:
    """The name of a head above other layers; raises UsageError if the module has none, or is nothing but its head."""
    inside = {id(parameter) for parameter in module.get_submodule(head).parameters()} if head else set()
    if not head or all(id(parameter) in inside for parameter in module.parameters()):
        raise UsageError(
            f"{method}: the model needs a head after other layers; name it: kinfed.Model(module, head='NAME')"
        )
    return head


class Moments(NamedTuple):
    """Of the features of a client's training examples, class by class."""

    sizes: Tensor  # [C] examples
    mean: Tensor  # [C, f] their mean features; 0 without any
    moment: Tensor  # [C, f] the share of the class in all examples, times that
    variance: Tensor  # [] of an estimate of all moments by so many examples, summed over classes and features


def moments(chosen: Tensor, z: Tensor) -> Moments:
    """Of features z: [n, f] of examples whose classes are chosen: [n, C]."""
    count = chosen.sum(0)
    mean = chosen.T @ z / positive(count)[:, None]
    total = count.sum()
    share = count / total
    moment = share[:, None] * mean
    square = chosen.T @ z.square().sum(1) / positive(count)  # [C]
    return Moments(count, mean, moment, ((share * square).sum() - moment.square().sum()) / total)
