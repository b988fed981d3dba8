"""The methods in families, by the name that a config or the command line uses, each with the paper that it is from."""

from ..core.registry import Listed, Registry, lazy_attributes
from .parts import PLACES

FAMILIES: dict[str, dict[str, Listed]] = {
    "kinfed's own": {
        "kin": Listed("kin:Kin"),
        "hedge": Listed("hedge:Hedge"),
        "attention": Listed("attention:Attention"),
        "mixture": Listed("mixture:Mixture"),
    },
    "Alone, or one model for all": {
        "local": Listed("local:Local"),
        "fedavg": Listed(
            "fedavg:FedAvg",
            "McMahan et al.",
            2017,
            "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        ),
        "fedavg-ft": Listed("fedavg_ft:FedAvgFT"),
        "fedprox": Listed("fedprox:FedProx", "Li et al.", 2020, "Federated Optimization in Heterogeneous Networks"),
        "fedprox-ft": Listed("fedprox_ft:FedProxFT"),
        "scaffold": Listed(
            "scaffold:Scaffold",
            "Karimireddy et al.",
            2020,
            "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
        ),
        "per-fedavg": Listed(
            "per_fedavg:PerFedAvg",
            "Fallah et al.",
            2020,
            "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
        ),
        "fedatt": Listed(
            "fedatt:FedAtt", "Ji et al.", 2019, "Learning Private Neural Language Modeling with Attentive Aggregation"
        ),
    },
    "A personal model beside the shared one": {
        "ditto": Listed(
            "ditto:Ditto", "Li et al.", 2021, "Ditto: Fair and Robust Federated Learning Through Personalization"
        ),
        "pfedme": Listed("pfedme:PFedMe", "Dinh et al.", 2020, "Personalized Federated Learning with Moreau Envelopes"),
        "apfl": Listed("apfl:APFL", "Deng et al.", 2020, "Adaptive Personalized Federated Learning"),
        "pfedbayes": Listed(
            "pfedbayes:PFedBayes",
            "Zhang et al.",
            2022,
            "Personalized Federated Learning via Variational Bayesian Inference",
        ),
    },
    "Parts of a model": {
        "fedper": Listed("fedper:FedPer", "Arivazhagan et al.", 2019, "Federated Learning with Personalization Layers"),
        "lg-fedavg": Listed(
            "lg_fedavg:LGFedAvg",
            "Liang et al.",
            2020,
            "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
        ),
        "fedrep": Listed(
            "fedrep:FedRep",
            "Collins et al.",
            2021,
            "Exploiting Shared Representations for Personalized Federated Learning",
        ),
        "fedrod": Listed(
            "fedrod:FedRoD",
            "Chen and Chao",
            2022,
            "On Bridging Generic and Personalized Federated Learning for Image Classification",
        ),
        "fedah": Listed(
            "fedah:FedAH", "Zhou et al.", 2024, "FedAH: Aggregated Head for Personalized Federated Learning"
        ),
        "fedala": Listed(
            "fedala:FedALA",
            "Zhang et al.",
            2023,
            "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
        ),
        "fedpac": Listed(
            "fedpac:FedPAC",
            "Xu et al.",
            2023,
            "Personalized Federated Learning with Feature Alignment and Classifier Collaboration",
        ),
        "fedcp": Listed(
            "fedcp:FedCP",
            "Zhang et al.",
            2023,
            "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy",
        ),
    },
    "Clusters": {
        "cfl": Listed(
            "cfl:CFL",
            "Sattler et al.",
            2020,
            "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints",
        ),
        "ifca": Listed("ifca:IFCA", "Ghosh et al.", 2020, "An Efficient Framework for Clustered Federated Learning"),
        "fedem": Listed(
            "fedem:FedEM", "Marfoq et al.", 2021, "Federated Multi-Task Learning under a Mixture of Distributions"
        ),
        "private-clusters": Listed("private_clusters:PrivateClusters"),
        "fedsem": Listed("fedsem:FedSem", "Xie et al.", 2021, "Multi-Center Federated Learning"),
    },
    "Graphs of the clients": {
        "sfl": Listed("sfl:SFL", "Chen et al.", 2022, "Personalized Federated Learning With a Graph"),
        "fedu": Listed(
            "fedu:FedU",
            "Dinh et al.",
            2022,
            "A New Look and Convergence Rate of Federated Multi-Task Learning With Laplacian Regularization",
        ),
        "fedcedar": Listed(
            "fedcedar:FedCedar",
            "Wang et al.",
            2024,
            "Rethinking Personalized Federated Learning with Clustering-based Dynamic Graph Propagation",
        ),
        "fedamp": Listed(
            "fedamp:FedAMP", "Huang et al.", 2021, "Personalized Cross-Silo Federated Learning on Non-IID Data"
        ),
        "heurfedamp": Listed(
            "heurfedamp:HeurFedAMP", "Huang et al.", 2021, "Personalized Cross-Silo Federated Learning on Non-IID Data"
        ),
        "fedfomo": Listed(
            "fedfomo:FedFomo",
            "Zhang et al.",
            2021,
            "Personalized Federated Learning with First Order Model Optimization",
        ),
        "dpfl": Listed("dpfl:DPFL", "Kharrat et al.", 2025, "DPFL: Decentralized Personalized Federated Learning"),
        "pfedgraph": Listed(
            "pfedgraph:PFedGraph",
            "Ye et al.",
            2023,
            "Personalized Federated Learning with Inferred Collaboration Graphs",
        ),
        "fedaghn": Listed(
            "fedaghn:FedAGHN",
            "Song et al.",
            2025,
            "FedAGHN: Personalized Federated Learning with Attentive Graph HyperNetworks",
        ),
        "pfedgat": Listed(
            "pfedgat:PFedGAT", "Zhou et al.", 2025, "Personalized Federated Learning via Learning Dynamic Graphs"
        ),
    },
    "Hypernetworks": {
        "pfedhn": Listed(
            "pfedhn:PFedHN", "Shamsian et al.", 2021, "Personalized Federated Learning using Hypernetworks"
        ),
        "panacea": Listed(
            "panacea:Panacea",
            "Lin et al.",
            2025,
            "Graph-Relational Federated Learning: Enhanced Personalization and Robustness",
        ),
        "pfedla": Listed(
            "pfedla:PFedLA", "Ma et al.", 2022, "Layer-wised Model Aggregation for Personalized Federated Learning"
        ),
    },
    "A memory at the client": {
        "knn-per": Listed(
            "knn_per:KNNPer", "Marfoq et al.", 2022, "Personalized Federated Learning through Local Memorization"
        )
    },
}

METHODS = Registry(
    __name__,
    {name: listed.place for family in FAMILIES.values() for name, listed in family.items()},
    base="kinfed.core.method:Method",
    by_file=True,
)

__getattr__ = lazy_attributes(__name__, PLACES | METHODS.places)
