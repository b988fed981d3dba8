"""The models, by the name that a config or the command line uses: each is called with one example's shape and C.

One with an argument annotated `Description | None` is also given what training rows say of a table's columns."""

from ..core.registry import Registry

MODELS = Registry(
    __name__,
    {
        "linear": "linear:linear",
        "mlp": "mlp:mlp",
        "changes": "changes:changes",
        "changes-mlp": "changes:changes_mlp",
        "repeat": "repeat:repeat",
        "holt-winters": "holt_winters:holt_winters",
        "calendar-means": "calendar_means:calendar_means",
        "additive": "additive:additive",
        "log-linear": "log_linear:log_linear",
        "trees": "trees:trees",
        "embedded": "embedded:embedded_mlp",
        "cnn": "cnn:cnn",
        "cnn-bn": "cnn_bn:cnn_bn",
        "vgg": "vgg:vgg",
        "resnet9": "resnet9:resnet9",
        "resnet18": "resnet18:resnet18",
        "rnn": "rnn:rnn",
        "gru": "gru:gru",
        "text": "text:text",
    },
    base="torch.nn:Module",
)
