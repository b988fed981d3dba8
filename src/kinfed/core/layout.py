"""Where each named tensor and each layer of a model lies in its flat vector theta: [d]."""

import fnmatch
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UsageError, nearest

CPU = torch.device("cpu")
HEAD = ("head", "head.*")  # patterns that mean the named head, whatever its layer is called
BASE = "base"  # means all tensors but those of the head
NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Entry(NamedTuple):
    """One named tensor of the model."""

    name: str
    at: slice
    shape: torch.Size
    trainable: bool
    channels_last: bool = False  # stored as [out, height, width, in], the order in which convolutions run fastest
    buffer: bool = False  # moved by a training pass instead of a gradient, such as BatchNorm's running statistics
    dtype: torch.dtype | None = None  # of integers and truth values, each byte of which is a number of theta

    def __repr__(self) -> str:
        fields = self._asdict()
        if self.dtype is None:  # as it was before there were such entries: digests of models are made of it
            del fields["dtype"]
        return f"Entry({', '.join(f'{key}={value!r}' for key, value in fields.items())})"


def head_of(module: nn.Module) -> str | None:
    """The name of the layer that serves as head by default: the last nn.Linear; None if there is none."""
    return next((path for path, part in reversed(list(module.named_modules())) if isinstance(part, nn.Linear)), None)


class Layer(NamedTuple):
    """One module with tensors of its own: weight and bias (and buffers) side by side."""

    name: str
    at: slice  # parameters, then float buffers
    trainable: slice  # the parameters alone: what distances and similarities compare


@dataclass(frozen=True)
class Layout:
    """Module by module, each with its parameters first and its buffers after them."""

    entries: tuple[Entry, ...]
    layers: tuple[Layer, ...]
    head: frozenset[str]  # tensors of the last linear layer
    norms: frozenset[str] = frozenset()  # tensors of normalisation layers: weights and running statistics
    _whole: "Layout | None" = field(default=None, repr=False)
    # Results of `index` and `trainable_on`: to compute them for every client would take longer than its training.
    _cache: dict[tuple[frozenset[str] | None, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @staticmethod
    def from_module(module: nn.Module, head: str | None = None, counters: Collection[str] = ()) -> "Layout":
        """Read the layout off a module; `head` names its classifier layer (default: the last nn.Linear).

        Of the buffers of integers and truth values only those that `counters` names are part of it.
        """
        entries: list[Entry] = []
        layers: list[Layer] = []
        seen: set[int] = set()
        norms: set[str] = set()
        start = 0
        for path, part in module.named_modules():
            at = start
            held = list(part.named_parameters(prefix=path, recurse=False))
            trained = [(n, t, True, False) for n, t in held if t.requires_grad]
            frozen = [(n, t, False, False) for n, t in held if not t.requires_grad]
            buffers = [(n, t, False, True) for n, t in part.named_buffers(prefix=path, recurse=False)]
            for name, tensor, trainable, buffer in trained + frozen + buffers:
                if tensor.is_complex():
                    raise UsageError(
                        f"'{name}' of the model is complex; keep it as real numbers and use torch.view_as_complex on "
                        "them in its forward pass"
                    )
                exact = None if tensor.is_floating_point() else tensor.dtype
                if id(tensor) in seen or (exact and name not in counters):
                    continue
                seen.add(id(tensor))
                last = type(part) is nn.Conv2d and tensor.ndim == 4  # a subclass may read its weight in another way
                stop = at + (tensor.nbytes if exact else tensor.numel())
                entries.append(Entry(name, slice(at, stop), tensor.shape, trainable, last, buffer, exact))
                if isinstance(part, NORMS):
                    norms.add(name)
                at = stop
            learned = sum(e.shape.numel() for e in entries if e.at.start >= start and e.trainable)
            _add_layer(layers, path, at, slice(start, start + learned) if learned else None)
            start = at
        if not layers:
            raise UsageError("the model has no trainable parameter, so there is nothing to learn")
        head = head_of(module) if head is None else head  # "" is the whole module
        inside = {e.name for e in entries if head is not None and e.name.startswith(f"{head}." if head else "")}
        if head is not None and not inside:
            paths = [path for path, _ in module.named_modules() if path]
            raise UsageError(f"the model has no layer {head!r:.80} to serve as head; {nearest(str(head), paths)}")
        return Layout(tuple(entries), tuple(layers), frozenset(inside), frozenset(norms))

    def part(self, names: frozenset[str]) -> "Layout":
        """The layout of the named tensors alone, one after the other; of layers, those with a learned tensor left."""
        entries: list[Entry] = []
        layers: list[Layer] = []
        at = 0
        for layer in self.layers:
            learned: list[slice] = []
            for entry in self.entries:
                if entry.name in names and layer.at.start <= entry.at.start < layer.at.stop:
                    size = entry.at.stop - entry.at.start
                    entries.append(entry._replace(at=slice(at, at + size)))
                    at += size
                    learned += [entries[-1].at] * entry.trainable
            _add_layer(layers, layer.name, at, slice(learned[0].start, learned[-1].stop) if learned else None)
        return Layout(tuple(entries), tuple(layers), self.head & names, self.norms & names)

    def freeze(self, names: frozenset[str]) -> "Layout":
        """The layout of models that all have the same values in the named tensors: theta leaves these out."""
        if names.isdisjoint(self.names):
            return self
        return replace(self.part(self.names - names), head=self.head, norms=self.norms, _whole=self.whole)

    @property
    def whole(self) -> "Layout":
        """The layout with the frozen tensors that this one leaves out; itself if there are none."""
        return self._whole or self

    @property
    def frozen(self) -> frozenset[str]:
        """The tensors that theta leaves out, as they never change."""
        return self.whole.names - self.names

    def without_frozen(self, theta: Tensor) -> Tensor:
        """[..., d] of models: [..., d], or of whole ones, as servers of sites hold them."""
        if theta.shape[-1] == self.size or theta.shape[-1] != self.whole.size:
            return theta
        return theta[..., self.whole.index(self.names, theta.device)]

    @property
    def size(self) -> int:
        """d, the length of theta."""
        return sum(e.at.stop - e.at.start for e in self.entries)

    @property
    def parameters(self) -> int:
        """How many of the d entries are trainable."""
        return sum(e.shape.numel() for e in self.entries if e.trainable)

    @cached_property
    def names(self) -> frozenset[str]:
        """All tensors of theta."""
        return frozenset(e.name for e in self.entries)

    @property
    def trainable_names(self) -> frozenset[str]:
        """Everything but buffers such as BatchNorm's running statistics."""
        return frozenset(e.name for e in self.entries if e.trainable)

    @property
    def base(self) -> frozenset[str]:
        """Everything but the head."""
        return self.whole.names - self.head

    @cached_property
    def trainable(self) -> Tensor:
        """[d] bool: False on buffers such as BatchNorm's running statistics."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        for entry in self.entries:
            mask[entry.at] = entry.trainable
        return mask

    def match(self, patterns: Iterable[str]) -> frozenset[str]:
        """Tensors, frozen ones among them, whose name matches one of the shell patterns, such as `*.bn*`.

        `head` and `head.*` mean the head, and `base` all tensors but the head's.
        """
        chosen, names = set[str](), self.whole.names
        for pattern in patterns:
            if pattern in (*HEAD, BASE) and not self.head:
                meant = "all but the head" if pattern == BASE else "the head"
                raise UsageError(
                    f"'{pattern}' means {meant}, and the model has no nn.Linear that could be its head; name the "
                    "layer that is one: kinfed.Model(module, head='NAME')"
                )
            if pattern == BASE and not self.base:
                raise UsageError("'base' means all layers but the head, and the model is nothing but its head")
            parts = dict.fromkeys(HEAD, self.head) | {BASE: self.base}
            hits = parts[pattern] if pattern in parts else fnmatch.filter(names, pattern)
            if not hits:
                layers = {f"{name.rpartition('.')[0]}.*" for name in names if "." in name}
                choices = layers.union(names, (*HEAD, BASE) if self.head else ())
                raise UsageError(f"no tensor of the model matches '{pattern}'; {nearest(pattern, choices)}")
            chosen.update(hits)
        return frozenset(chosen)

    def trainable_on(self, device: torch.device) -> Tensor:
        """[d] bool: `trainable` on a device. Cached: do not write to it."""
        if (None, device) not in self._cache:
            self._cache[None, device] = self.trainable.to(device)
        return self._cache[None, device]

    def index(self, names: frozenset[str], device: torch.device = CPU) -> Tensor:
        """[m] int64: the positions of the named tensors in theta, in order. Cached: do not write to it."""
        if (names, device) not in self._cache:
            parts = [torch.arange(e.at.start, e.at.stop) for e in self.entries if e.name in names]
            self._cache[names, device] = (torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)).to(device)
        return self._cache[names, device]

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """Named views into theta: [d]; those of convolutions lie channels-last in memory. Integers are copies."""
        return {e.name: _view(theta[e.at], e) for e in self.entries}

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """[d] from named tensors."""
        return torch.cat([_numbers(tensors[e.name], e) for e in self.entries])

    def settle(self, theta: Tensor, tensors: dict[str, Tensor]) -> None:
        """Write to theta: [d] those of its named tensors that are copies."""
        for entry in self.entries:
            if entry.dtype:
                theta[entry.at] = _numbers(tensors[entry.name], entry).to(theta.dtype)


def _add_layer(layers: list[Layer], name: str, stop: int, learned: slice | None) -> None:
    """Add the layer that ends at `stop`; one that learns nothing belongs to the layer before, if there is one."""
    if learned is not None:
        layers.append(Layer(name, slice(layers[-1].at.stop if layers else 0, stop), learned))
    elif layers:
        layers[-1] = layers[-1]._replace(at=slice(layers[-1].at.start, stop))


def _numbers(tensor: Tensor, entry: Entry) -> Tensor:
    """[m] a tensor as a part of theta; of integers and truth values their bytes, which any kind of float holds."""
    if entry.dtype:
        return tensor.reshape(-1).view(torch.uint8)
    return (tensor.movedim(1, -1) if entry.channels_last else tensor).reshape(-1)


def _view(part: Tensor, entry: Entry) -> Tensor:
    if entry.dtype:
        return part.round().to(torch.uint8).view(entry.dtype).view(entry.shape)
    if entry.channels_last:
        out, inner, *space = entry.shape
        return part.view(out, *space, inner).movedim(-1, 1)
    return part.view(entry.shape)
