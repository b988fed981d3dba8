"""Learned graphs: who listens to whom, from what describes the clients, or by one free number a pair."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.trees import Pairwise, Shared


class Attention(NamedTuple):
    """Heads that add what speaks for the listener and for the speaker: all listeners of a head rank speakers alike."""

    project: Shared  # [H, f, m] one projection a head, from m features of a client
    listen: Shared  # [H, f] scores the client that listens
    speak: Shared  # [H, f] scores the client that is listened to


class DynamicAttention(NamedTuple):
    """Heads that look at listener and speaker together (Brody et al., 2022): each listener has its own ranking."""

    listen: Shared  # [H, f, m] projects the client that listens
    speak: Shared  # [H, f, m] projects the client that is listened to
    score: Shared  # [H, f]


class Pairs(NamedTuple):
    """A graph that is itself what is learned; it knows nothing of clients it has not seen."""

    weights: Pairwise  # [N, N]


Network = Attention | DynamicAttention | Pairs


def draw_attention(heads: int, width: int, size: int, dynamic: bool, draw: torch.Generator, like: Tensor) -> Network:
    """A network for `size` features a client, with numbers after Glorot and Bengio (2010), of the type of `like`."""

    def glorot(fans: int, *shape: int) -> Tensor:
        numbers: Tensor = (2 * torch.rand(shape, generator=draw) - 1) * (6 / fans) ** 0.5
        return numbers.to(like)

    project = glorot(size + width, heads, width, size)
    if dynamic:
        return DynamicAttention(project, glorot(size + width, heads, width, size), glorot(width + 1, heads, width))
    return Attention(project, glorot(2 * width + 1, heads, width), glorot(2 * width + 1, heads, width))


def attend(network: Attention | DynamicAttention, described: Tensor, slope: float) -> Tensor:
    """[K, K] positive rows that sum to one, from described: [K, m]; `slope` is LeakyReLU's below zero."""
    features = F.layer_norm(described, described.shape[1:])
    if isinstance(network, Attention):
        seen = torch.einsum("hfm,km->hkf", network.project, features)
        listen = torch.einsum("hkf,hf->hk", seen, network.listen)
        speak = torch.einsum("hkf,hf->hk", seen, network.speak)
        scores = F.leaky_relu(listen[:, :, None] + speak[:, None, :], slope)  # [H, K, K]
    else:
        listener, speaker = (torch.einsum("hfm,km->hkf", w, features) for w in (network.listen, network.speak))
        together = F.leaky_relu(listener[:, :, None] + speaker[:, None, :], slope)  # [H, K, K, f]
        scores = torch.einsum("hijf,hf->hij", together, network.score)
    return scores.softmax(-1).mean(0)
