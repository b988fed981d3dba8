"""Methods that between them have every kind of state at a server and at clients; test_contract asks all methods."""

KINDS = (
    "local",  # a model that stays at its client
    "fedavg",  # one model for all
    "ditto",  # both
    "fedrep",  # a part of the model at home
    "scaffold",  # control variates of all
    "fedpac",  # moments of each class
    "fedcp",  # layers added to the model
    "pfedbayes",  # two tensors for each of the model's
    "knn-per",  # a memory of examples
    "cfl",  # clusters
    "fedcedar",  # clusters of the last cohort
    "fedfomo",  # several models sent to a client
    "sfl",  # a known graph
    "kin",  # weights by movements
    "fedaghn",  # numbers for each client and layer
    "pfedgat",  # a network of the server
    "pfedla",  # a network for each client
    "panacea",  # a hypernetwork
)
