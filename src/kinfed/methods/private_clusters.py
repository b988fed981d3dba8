"""Private clusters: IFCA from one start, whose clients answer with their cluster's model and two of their own.

Differs: of no paper. IFCA (Ghosh et al., 2020) starts from unrelated random models, and answers with a cluster's model.
"""

import math
from dataclasses import dataclass

import torch

from ..core.field_checks import Count
from ..core.seeding import fold, key, normal
from ..core.tasks import Classification
from ..errors import UsageError
from .ifca import IFCA
from .parts.mixed_outputs import MixesOutputs, Mixture, split

NEAR = 0.1  # the deviation of models at the begin, over that of a tensor's numbers
SHARPNESS = 0.5  # the power of the likelihood of validation examples, of which clients have few


@dataclass(frozen=True)
class PrivateClusters(IFCA, MixesOutputs):
    r"""$\theta_c = \theta_0 + 0.1\,\sigma\,\epsilon_c$ at the begin; then clients train and upload as in `ifca`.

    Client $i$ has three models: its cluster's $\theta_{c_i}$, that one tuned, and one that it trains alone. Its answer
    is $\sum_m \pi_{im}\,\mathrm{softmax}(\theta_m(x))$ with $\pi_{im} \propto e^{-L_i(\theta_m) / 2}$, where $L_i$ is
    the sum of its validation losses. Where the same chance for each class fits its training examples better than
    $\theta_{c_i}$ does, $L_i$ of the first two is as much larger, so the client leans on itself.
    """

    length: Count = 10  # of tuning, in rounds of local training

    def start(self, roster):
        models = roster.theta.repeat(self.clusters, 1)
        for number, entry in enumerate(e for e in roster.layout.entries if e.trainable):
            draw, part = key(roster.seed, "near", number, device=models.device), roster.theta[entry.at]
            deviation = part.std(correction=0)
            for c, model in enumerate(models):
                noise = normal(fold(draw, c), part)
                model[entry.at] += NEAR * torch.where(deviation > 0, deviation, 1.0) * noise
        return super().start(roster)._replace(theta=models)

    def train(self, client, state, received):
        if not isinstance(client.task, Classification):
            raise UsageError(
                "private-clusters mixes probabilities of classes, and this data has numbers to predict; use 'ifca'"
            )
        alone = client.descend(state.theta)
        kept, upload = super().train(client, state, received)
        return kept._replace(theta=alone), upload

    def personalise(self, client, state, received):
        theta, alone = self._best(client, received.theta)[1], client.whole(state.theta)
        models = [client.whole(theta), client.whole(client.descend(theta, **client.training.span(self.length))), alone]
        shared, guess = sum_losses(client, models[:1], client.data)
        losses = sum_losses(client, models, client.examples("validation"))[0]
        worse = (shared - guess).clamp(min=0)
        losses = torch.cat([losses[:2] + worse, losses[2:]]).nan_to_num(torch.inf, torch.inf)
        return {"mixture": Mixture(*split(torch.stack(models)), (-SHARPNESS * losses).softmax(0))}


def sum_losses(client, models, examples):
    """[M] the sums of losses of models, [d] each, over examples, and [] that of the same chance for each class."""
    x, y, real = examples
    outputs = torch.stack([client.for_whole_model.model(theta, x) for theta in models])
    losses = torch.stack([client.task.loss(answers, y) for answers in outputs])
    return losses @ real, real.sum() * math.log(outputs.shape[-1])
