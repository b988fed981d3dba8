"""SCAFFOLD: control variates correct client drift in local steps (Karimireddy et al., 2020, Algorithm 1).

Differs: nothing; option II, which the paper's experiments use.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..core.client import Quadratic
from ..core.field_checks import Positive
from ..core.method import SharedParams
from ..core.optimiser import SGD
from ..core.trees import Averaged, ModelOf, PerClient, Shared, Summed
from ..errors import UsageError
from .bases import Averaging


class Server(NamedTuple):
    """What the server keeps and sends."""

    theta: ModelOf[Shared]  # [d] the shared model
    control: Shared  # [d] the server's control variate c


class Upload(NamedTuple):
    """What a client sends back."""

    theta: ModelOf[Averaged]  # [d] its trained model
    control: Summed  # [d] the change of its own control variate


class Control(NamedTuple):
    """A client's control variate."""

    control: PerClient  # [d] c_i


@dataclass(frozen=True)
class Scaffold(Averaging):
    r"""Steps follow $g_i(y) - c_i + c$; then $c_i \leftarrow c_i - c + \frac{\theta - y}{K \eta}$ (option II).

    $\theta \leftarrow \theta + \eta_g \frac1{|S|} \sum_S (y_i - \theta)$,
    $c \leftarrow c + \frac1N \sum_S (c_i^+ - c_i)$.
    """

    server_lr: Positive = 1.0  # eta_g
    option: Literal[1, 2] = 2  # 1: the new control variate is the gradient at theta over all training examples

    def start(self, roster):
        if roster.training.optimiser != SGD(lr=roster.training.optimiser.lr):
            raise UsageError("scaffold needs plain SGD: set training.optimiser to sgd without momentum or decay")
        return Server(roster.theta, torch.zeros_like(roster.theta))

    def weights(self, roster, cohort):
        return torch.ones(len(cohort), device=cohort.device)

    def send(self, roster, server, cohort):
        return server

    def aggregate(self, roster, server, cohort, uploads):
        theta = server.theta + self.server_lr * (uploads.theta - server.theta)
        return Server(theta, server.control + uploads.control / len(roster))

    def add_clients(self, roster, server, newcomers):
        # c is the mean of all c_i, and those of newcomers are zero.
        return server._replace(control=server.control * (1 - len(newcomers) / len(roster)))

    def init_client(self, client):
        return Control(torch.zeros_like(client.model.theta))

    def train(self, client, state, received):
        drift = received.control - state.control
        theta = client.descend(received.theta, penalty=Quadratic(0.0, drift))
        if self.option == 1:
            control = client.gradient(received.theta, client.data)
        else:
            span = client.count_steps().to(theta.dtype) * client.training.optimiser.lr
            control = state.control - received.control + (received.theta - theta) / span
            control = control * client.model.layout.trainable_on(theta.device)  # statistics have no gradient
        return Control(control), Upload(theta, control - state.control)

    def personalise(self, client, state, received):
        return {"shared": SharedParams(received.theta)}
