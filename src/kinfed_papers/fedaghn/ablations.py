"""What only the tables of FedAGHN's paper need: its sign, and the method without its parts."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.core.layout import Layout
from kinfed.core.method import Roster
from kinfed.methods.fedaghn import FedAGHN, Server
from kinfed.methods.pfedla import PFedLA


@dataclass(frozen=True)
class Printed(FedAGHN):
    """The rule that is printed and that the released code runs, by which p and q climb the training loss.

    The appendix's "frozen" p and q are lr=0. Its ablations without p are not defined: here the own model is then one
    more entry of the softmax.
    """

    sign: Literal["printed", "descent"] = "printed"  # which way p and q go
    without: Literal["", "p", "q", "p-q", "self"] = ""  # no p, no q (it stays 1), neither, or no own model at all
    shared: bool = False  # one p and q for all layers, which move by the sums over layers

    @property
    def includes_itself(self) -> bool:
        return self.without in ("p", "p-q")

    @property
    def speeds(self) -> tuple[float, float]:
        rate = self.lr if self.sign == "descent" else -self.lr
        return (
            0.0 if self.without in ("p", "p-q", "self") else rate,
            0.0 if self.without in ("q", "p-q") else rate,
        )

    def start(self, roster: Roster) -> Server:
        server: Server = super().start(roster)
        home = server.home[:, :1] if self.shared else server.home
        sharpness = server.sharpness
        return server._replace(
            home=torch.zeros_like(home) if self.without in ("p", "p-q", "self") else home,
            sharpness=(torch.ones_like(sharpness) if self.without in ("q", "p-q") else sharpness)[:, : home.shape[1]],
        )


@dataclass(frozen=True)
class Ascent(PFedLA):
    """pFedLA with the sign that is printed, and that both public codes run: networks climb the loss."""

    def slopes(self, change: Tensor, theta: Tensor, layout: Layout) -> Tensor:
        descent: Tensor = super().slopes(change, theta, layout)
        return -descent
