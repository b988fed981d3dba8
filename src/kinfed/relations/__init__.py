r"""Who learns from whom: client $i$ is sent $u_i = \sum_j w_{ij} \theta_j$, in three parts that a method chooses.

- `comparisons`: what is compared, similarities $s_{ij}$ of a vector of each client, [L, K, N] for K receivers.
- `weighings`: how weights follow, rows $w_i$ that sum to one, of these similarities.
- `neighbourhoods`: among whom, everyone, the nearest few, or the neighbours in a known graph.

In `relation` they meet. There `relate` makes `Weights` of the three, and these mix models. `movements` has what `kin`
asks of movements from the first model, and `own_parts` checks what a user's own part gives.
"""

from .comparisons import Comparison as Comparison, Cosine as Cosine, Distance as Distance
from .neighbourhoods import (
    Drawn as Drawn,
    Everyone as Everyone,
    Linked as Linked,
    Nearest as Nearest,
    Sketches as Sketches,
    list_alike as list_alike,
    renew as renew,
    renew_directions as renew_directions,
    start_sketches as start_sketches,
)
from .relation import Relation as Relation, Weights as Weights, relate as relate
from .weighings import Kernel as Kernel, Simplex as Simplex, Softmax as Softmax, Weighing as Weighing
