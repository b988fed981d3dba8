"""The client that a method's code sees under privacy: its rows are read by noised steps alone."""

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor

from ...errors import UsageError
from ..batches import Batch, Draw, Examples
from ..client import Client, GeneralTrainer, Objective, Request, Trainers

ABLE = "'fedavg', 'fedrep', 'ditto' or 'kin'"  # methods that error messages name


class PrivateClient(Client):
    """A client whose rows are read by `descend` alone; what else would read them is refused in a line.

    `draws` collects the batches that were asked for, which decide what the client's upload costs. The number of its
    training rows is public, so `size` and what follows from it are allowed, and `weight` is `size`.
    """

    def __init__(self, client: Client, method: str, trainer: GeneralTrainer) -> None:
        self.__dict__.update(vars(client))
        self._method, self._trainers = method, Trainers(general=trainer)
        self.draws: list[Draw] = []

    @property
    def weight(self) -> Tensor:
        """[]: how many training examples the client has, as the sum of their weights depends on rows."""
        return self.size

    @property
    def data(self) -> NoReturn:
        """Refused."""
        self._withhold("data")

    @property
    def held_out(self) -> NoReturn:
        """Refused."""
        self._withhold("held_out")

    def examples(self, split: str) -> NoReturn:
        """Refused."""
        self._withhold("examples")

    def loss(self, theta: Tensor, batch: Batch | Examples, objective: Objective | None = None) -> NoReturn:
        """Refused."""
        self._withhold("loss")

    def gradient(self, theta: Tensor, batch: Batch | Examples, objective: Objective | None = None) -> NoReturn:
        """Refused."""
        self._withhold("gradient")

    def batches(self, epochs: int | None = None, steps: int | None = None, batch: int | None = None) -> Iterator[Batch]:
        """Refused."""
        self._withhold("batches")

    def pass_over(self, theta: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Refused."""
        self._withhold("pass_over")

    def losses(self, outputs: Tensor, batch: Batch | Examples, objective: Objective | None) -> Tensor:
        """[B] the loss of each example; raises UsageError for an objective that gives one number for all."""
        loss = super().losses(outputs, batch, objective)
        if not loss.ndim:
            raise UsageError(
                f"{self._method} trains on an objective that is one number for all rows of a batch, and privacy needs "
                f"a loss for each row, [B], as it clips the gradient of each; use another method, such as {ABLE}"
            )
        return loss

    def _draw(self, epochs: int | None, steps: int | None, batch: int | None = None, again: bool = False) -> Draw:
        """Batches of their own, also where a method asks for those of the call before: each costs as much."""
        self.draws.append(draw := super()._draw(epochs, steps, batch))
        return draw

    def _withhold(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self._method} reads rows by client.{what}, which has no price under privacy; use a method that trains "
            f"by client.descend alone, such as {ABLE}"
        )


class StepCounter:
    """A trainer that leaves a model as it is, for a program of which only the draws are wanted."""

    def refuses(self, request: Request) -> str:
        """Nothing."""
        return ""

    def train(self, client: Client, request: Request) -> Tensor:
        """[d] where training would start."""
        return request.theta

    def batches(self, client: Client, draw: Draw) -> Iterator[Any]:
        """None."""
        return iter(())

    def gradient(self, client: Client, theta: Tensor, batch: Any, objective: Any) -> Tensor:
        """[d] zero."""
        return theta.new_zeros(theta.shape)
