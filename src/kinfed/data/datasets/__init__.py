"""The data sets, by the name that a config or the command line uses: each is called with the data directory."""

from ...core.registry import Made, Registry
from .files import IMAGES, TRAFFIC

DATASETS = Registry(
    __name__,
    {
        "digits": "digits:digits",
        "synthetic": "synthetic:synthetic",
        "csv": "table:Table",
        "parquet": "table:Table",
        "sql": "table:Table",
        "image_folder": "image_folder:ImageFolder",
        "huggingface": "huggingface:HuggingFace",
        "leaf": "leaf:Leaf",
        "leaf_text": "leaf:LeafText",
        "dg15": Made("domains:domains", "Points [n, 2] of two classes in domains that are linked, from dg15.npz."),
        "dg60": Made("domains:domains", "Points [n, 2] of two classes in domains that are linked, from dg60.npz."),
        **{name: Made("images:images", form.summary(name)) for name, form in IMAGES.items()},
        **{name: Made("traffic:traffic", form.summary(name)) for name, form in TRAFFIC.items()},
        "tpt48": "tpt48:tpt48",
        "compcars": "cars:compcars",
    },
    base="kinfed.data.dataset:Dataset",
)
OWNED = frozenset(DATASETS) - {"digits", *IMAGES}  # whose examples come with their owners
