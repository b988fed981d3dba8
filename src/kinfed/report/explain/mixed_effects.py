"""Mixed effects: the table of a mixed model, in the units of its columns, as statistical programs print it."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.sharing import unwrap
from ...core.tasks import Counts
from ...errors import UsageError
from ...methods.solved.generalised import Estimates
from ...methods.solved.laplace import from_outputs, takes
from ...methods.solved.mixed_model import MixedModel
from ...methods.solved.partial_pooling import coefficients_of
from ...runs.run import FinalServer, Run
from ...runs.run_folder import RunFolder
from ..tables.text_table import Grid

Array = NDArray[np.float64]

NORMAL = 1.959964  # deviations of a normal variable, within which 95 % lie
NAME, CONSTANT = "mixed-model", "constant"
HEADINGS = ("", "estimate", "std. error", "95 % interval")
KINDS = {"reml": "restricted maximum likelihood", "ml": "maximum likelihood"}


class MixedEffects(NamedTuple):
    """A mixed model's estimates, in the units of columns and target."""

    run: str
    of: str  # what its coefficients add up to; nothing where that is the target itself
    method: MixedModel
    names: list[str]  # [f] of the fixed effects
    fixed: Array  # [f]
    errors: Array  # [f] their standard errors
    random: list[str]  # [s] of the random effects, and the constant, which those of columns move
    covariance: Array  # [s, s] of the random effects
    spread: Array  # [s] standard errors of the variances of the random effects
    noise: float | None  # the variance of rows; labels and counts have none of their own
    spread_of_noise: float
    deviance: float  # -2 log-likelihood, with all its constants
    clients: int
    rows: int
    units: Array  # [f, f] and [f], which make coefficients of columns as they are
    origin: Array

    @classmethod
    def read(cls, folder: RunFolder) -> "MixedEffects | None":
        """Those of a finished run; None if it is of another method, or if its state is not kept.

        Raises UsageError unless its model is one linear layer.
        """
        if not (folder.state.exists() and folder.is_begun) or folder.read_summary().method != NAME:
            return None
        saved = Run(folder)
        final = FinalServer(saved, saved.task)
        method, server = unwrap(final.method), final.server
        assert isinstance(method, MixedModel)
        if {entry.name for entry in final.model.layout.entries} != final.model.layout.head:
            raise UsageError(
                f"{saved.folder}: only a linear model has coefficients by column; run with model.name=linear"
            )
        solved = method.generalise().estimate(server) if takes(saved.task) else server
        fixed, uncertainty, covariance, spread = (getattr(solved, name).numpy() for name in Estimates._fields)
        names, units, origin = _units(saved, len(fixed) - 1)
        at = server.at.tolist()
        shown = sorted({*at, len(units) - 1})  # a column's own coefficients move the constant of columns as they are
        scale, rows = units[-1, -1], int(server.size[1])  # scale: of the target
        deviance, noise, spread_of_noise = float(server.deviance), None, 0.0
        if not takes(saved.task):
            noise, spread_of_noise = float(server.noise) * scale**2, math.sqrt(server.spread_of_noise) * scale**2
            lost = len(fixed) if method.estimate == "reml" else 0
            deviance += (rows - lost) * math.log(2 * math.pi) + 2 * rows * math.log(scale)
            deviance -= 2 * float(np.linalg.slogdet(units)[1]) if lost else 0.0
        inner = units[np.ix_(shown, at)]  # [s, q]
        return cls(
            run=str(folder),
            of=_name_predictor(saved),
            method=method,
            names=names,
            fixed=units @ fixed + origin,
            errors=np.sqrt(np.diagonal(units @ uncertainty @ units.T)),
            random=[names[place] for place in shown],
            covariance=inner @ covariance @ inner.T,
            spread=np.sqrt(np.einsum("ai,aj,ak,al,ijkl->a", inner, inner, inner, inner, spread)),
            noise=noise,
            spread_of_noise=spread_of_noise,
            deviance=deviance,
            clients=int(server.size[0]),
            rows=rows,
            units=units,
            origin=origin,
        )

    def grids(self) -> list[Grid]:
        """The fixed effects and the variances, as tables."""
        kind, of = KINDS[self._estimate], f" on {self.of}" if self.of else ""
        size = f"{self.clients} clients, {self.rows:,} training rows"
        title = f"fixed effects{of} in {self.run} (mixed-model by {kind}, {size})"
        tables = [Grid("fixed", title, HEADINGS, [_lines(self.names, self.fixed, self.errors)])]
        variances = list(zip(self.random, np.diagonal(self.covariance), self.spread, strict=True))
        if self.noise is not None:
            variances.append(("rows", self.noise, self.spread_of_noise))
        rows = [
            [name, _text(variance), _text(math.sqrt(variance)), _variance_interval(variance, spread)]
            for name, variance, spread in variances
        ]
        notes = [f"-2 log-likelihood: {self.deviance:.3f}" + (" (restricted)" if self._estimate == "reml" else "")]
        if len(self.random) > 1 and self.method.covariance == "full":
            notes.append(f"correlations: {self._correlations()}")
        if len(self.random) == 1 and self.noise is not None:
            share = self.covariance[0, 0] / (self.covariance[0, 0] + self.noise)
            notes.append(f"share of the variance that is between clients: {100 * share:.1f} %")
        headings = ("", "variance", "deviation", "95 % interval of the variance")
        title = "variances between clients" + (", and of rows" if self.noise is not None else "")
        tables.append(Grid("variances", title, headings, [rows], notes))
        return tables

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "estimate": self._estimate,
            "of": self.of,
            "clients": self.clients,
            "rows": self.rows,
            "deviance": self.deviance,
            "fixed": _by_name(self.names, self.fixed, self.errors),
            "random": self.random,
            "covariance": self.covariance.tolist(),
            "noise": self.noise,
        }

    @property
    def _estimate(self) -> str:
        """How it was estimated: labels and counts have no restricted likelihood."""
        return "ml" if self.noise is None else self.method.estimate

    def _correlations(self) -> str:
        """Those of the random effects, in pairs."""
        root = np.sqrt(np.diagonal(self.covariance))
        pairs = itertools.combinations(range(len(root)), 2)
        values = {(i, j): self.covariance[i, j] / (root[i] * root[j]) for i, j in pairs if root[i] * root[j] > 0}
        return ", ".join(f"{self.random[i]} and {self.random[j]} {value:.3f}" for (i, j), value in values.items())


class OwnEffects(NamedTuple):
    """One client's coefficients, in the units of columns and target."""

    client: str
    names: list[str]  # [f]
    coefficients: Array  # [f]
    errors: Array  # [f] their standard errors

    @classmethod
    def from_run(cls, saved: Run, effects: MixedEffects, client: str) -> "OwnEffects":
        """Those of a client of the run that the effects are of; raises UsageError if it has no such client."""
        client, units = saved.name(client), effects.units
        personal = saved.personal(client)
        coefficients = from_outputs(saved.task, coefficients_of(saved.architecture.layout, personal.theta)).numpy()
        errors = np.sqrt(np.diagonal(units @ personal.covariance.double().numpy() @ units.T))
        return cls(client, effects.names, units @ coefficients + effects.origin, errors)

    def grid(self) -> Grid:
        """As a table."""
        title = f"coefficients of '{self.client}': fixed effects and its own, by its rows"
        notes = ["intervals are of what the client's coefficients are, the variances being taken as known"]
        return Grid("own", title, HEADINGS, [_lines(self.names, self.coefficients, self.errors)], notes)

    def to_dict(self) -> dict[str, list[float]]:
        """The same for JSON, by name."""
        return _by_name(self.names, self.coefficients, self.errors)


def _name_predictor(saved: Run) -> str:
    """What coefficients of labels and counts add up to."""
    if isinstance(saved.task, Counts):
        return "the logarithm of the expected count"
    classes = saved.summary.data.classes
    return f"the log odds of '{classes[1]}' over '{classes[0]}'" if isinstance(classes, list) and classes else ""


def _units(saved: Run, inputs: int) -> tuple[list[str], Array, Array]:
    """[f] names, the constant last; matrix [f, f] and origin [f] that make coefficients of columns as they are."""
    scale = saved.summary.data.scale or {}
    parts = scale.get("inputs", {}) if saved.description is not None else {}
    matrix, origin = np.eye(inputs + 1), np.zeros(inputs + 1)
    if saved.description is None or len(parts) != inputs:
        return [*(f"input {i + 1}" for i in range(inputs)), CONSTANT], matrix, origin
    plain = {"mean": math.log(saved.task.mean) if isinstance(saved.task, Counts) else 0.0, "deviation": 1.0}
    (target,) = [plain] if takes(saved.task) else scale["targets"].values()
    means, deviations = ([part[what] for part in parts.values()] for what in ("mean", "deviation"))
    matrix[-1, :-1] = -np.array(means) / np.array(deviations)
    matrix[np.arange(inputs), np.arange(inputs)] = 1 / np.array(deviations)
    origin[-1] = target["mean"]
    return [*parts, CONSTANT], matrix * target["deviation"], origin


def _by_name(names: list[str], values: Array, errors: Array) -> dict[str, list[float]]:
    """Each coefficient with its standard error."""
    return {name: [float(a), float(b)] for name, a, b in zip(names, values, errors, strict=True)}


def _lines(names: list[str], values: Array, errors: Array) -> list[list[str]]:
    """A row for each coefficient, the constant first."""
    rows = [
        [name, _text(value), _text(error), f"{_text(value - NORMAL * error)} to {_text(value + NORMAL * error)}"]
        for name, value, error in zip(names, values.tolist(), errors.tolist(), strict=True)
    ]
    return [rows[-1], *rows[:-1]]


def _variance_interval(variance: float, spread: float) -> str:
    """By the delta method on its logarithm; nothing of a variance that is none."""
    if not spread or variance < 1e-7 * spread:
        return ""
    factor = math.exp(min(50.0, NORMAL * spread / variance))
    return f"{_text(variance / factor)} to {_text(variance * factor)}"


def _text(value: float) -> str:
    return f"{value:.4g}"
