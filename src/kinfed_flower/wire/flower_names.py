"""Everything of Flower that kinfed uses, checked by name and signature when a program starts.

No other module imports Flower except its public `flwr.app`, `flwr.clientapp` and `flwr.serverapp`. What is listed here
is Flower's own program: it may change with any version, and a version in which something is missing is refused in a
line. `VERSIONS` are those that kinfed's tests have run with.
"""

import importlib
import importlib.metadata
import inspect
from types import SimpleNamespace
from typing import Any

from kinfed.errors import UsageError

VERSIONS = ("1.40", "1.41", "1.42")  # the first two numbers; pyproject.toml says the same

# By part of kinfed: the module, the name in it, and the parameters or fields that kinfed gives or reads.
PARTS: dict[str, dict[str, dict[str, str]]] = {
    "server": {  # hub.py: the SuperLink's web application
        "flwr.superlink.main": {"create_app": "config superlink_lifespan_class"},
        "flwr.superlink.cli.flower_superlink": {"SuperLinkLifespan": "", "_parse_superlink_lifespan_config": ""},
    },
    "control": {  # control.py: which nodes may connect
        "flwr.supercore.control": {"ControlHttpClient": "base_url interceptors"},
        "flwr.proto.control_pb2": {
            "RegisterNodeRequest": "public_key name",
            "ListNodesRequest": "",
            "ListNodesResponse": "nodes_info",
        },
        "flwr.proto.node_pb2": {"NodeInfo": "node_id public_key name status"},
    },
    "run": {  # runner.py: a run's task and its grid
        "flwr.supercore.control": {"ControlHttpClient": "base_url interceptors"},
        "flwr.supercore.runtime": {"RuntimeHttpClient": "base_url interceptors"},
        "flwr.supercore.interceptors": {
            "SuperExecAuthHttpInterceptor": "master_secret protected_methods",
            "RuntimeTokenHttpInterceptor": "token",
        },
        "flwr.supercore.heartbeat": {"HeartbeatSender": "heartbeat_fn", "make_task_heartbeat_fn_http": "client"},
        "flwr.supercore.task_identity": {"TaskIdentity": ""},
        "flwr.superlink.grid": {"HttpGrid": "runtime_api_address insecure root_certificates token"},
        "flwr.common.serde": {"run_from_proto": ""},
        "flwr.cli.build": {"build_fab_from_disk": ""},
        "flwr.proto.control_pb2": {"StartRunRequest": "fab", "StartRunResponse": "run_id"},
        "flwr.proto.fab_pb2": {"Fab": "hash_str content"},
        "flwr.proto.runtime_pb2": {
            "AcquireTaskRequest": "supported_task_types",
            "AcquireTaskResponse": "task token",
            "PullTaskInputRequest": "",
            "PullTaskInputResponse": "run context task_id",
            "PushTaskOutputRequest": "sub_status details",
            "PullAppMessagesRequest": "message_ids",
            "PullAppMessagesResponse": "messages_list message_object_trees",
        },
        "flwr.supercore.inflatable.inflatable_object": {"iterate_object_tree": ""},
        "flwr.supercore.inflatable.inflatable_utils": {"inflate_object_from_contents": ""},
        "flwr.proto.message_pb2": {
            "PullObjectRequest": "node run_id object_id",
            "PullObjectResponse": "object_found object_available object_content",
            "ConfirmMessageReceivedRequest": "node run_id message_object_id",
        },
        "flwr.proto.node_pb2": {"Node": "node_id"},
    },
    "site": {  # connection.py: a node
        "flwr.app": {"Message": ""},
        "flwr.supernode.fleet_http_client": {"FleetHttpClient": "base_url interceptors"},
        "flwr.supernode.node_auth_http_interceptor": {"NodeAuthHttpInterceptor": "private_key public_key"},
        "flwr.common.serde": {"message_from_proto": "", "message_to_proto": ""},
        "flwr.app.message": {"remove_content_from_message": ""},
        "flwr.supercore.primitives.asymmetric": {"public_key_to_bytes": ""},
        "flwr.supercore.inflatable.inflatable_object": {
            "get_all_nested_objects": "",
            "get_object_tree": "",
            "iterate_object_tree": "",
            "no_object_id_recompute": "",
        },
        "flwr.supercore.inflatable.inflatable_utils": {"inflate_object_from_contents": ""},
        "flwr.proto.fleet_pb2": {
            "RegisterNodeFleetRequest": "public_key",
            "ActivateNodeRequest": "public_key heartbeat_interval",
            "ActivateNodeResponse": "node_id",
            "DeactivateNodeRequest": "node_id",
            "PullMessagesRequest": "node",
            "PullMessagesResponse": "messages_list message_object_trees",
            "PushMessagesRequest": "node messages_list message_object_trees clientapp_runtime_list",
            "PushMessagesResponse": "objects_to_push session_id",
        },
        "flwr.proto.heartbeat_pb2": {"SendNodeHeartbeatRequest": "node heartbeat_interval"},
        "flwr.proto.message_pb2": {
            "PullObjectRequest": "node run_id object_id",
            "PullObjectResponse": "object_found object_available object_content",
            "PushObjectRequest": "node run_id object_id object_content session_id",
            "PushObjectResponse": "stored",
            "ConfirmMessageReceivedRequest": "node run_id message_object_id",
        },
        "flwr.proto.node_pb2": {"Node": "node_id"},
    },
}


def unusable() -> str:
    """Why the installed version of Flower cannot be used; empty if it can."""
    installed = importlib.metadata.version("flwr")
    if ".".join(installed.split(".")[:2]) in VERSIONS:
        return ""
    return (
        f"kinfed flower needs Flower {VERSIONS[0]} to {VERSIONS[-1]}; found {installed}: "
        f"pip install 'flwr>={VERSIONS[0]},<1.{int(VERSIONS[-1].partition('.')[2]) + 1}'"
    )


def load(part: str) -> Any:
    """What a part of kinfed needs, as attributes; raises UsageError naming the first that Flower lacks."""
    loaded = {}
    for module, names in PARTS[part].items():
        for name, parameters in names.items():
            try:
                loaded[name] = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                why = f"{_version()} has no {module}.{name}, which kinfed needs"
                raise UsageError(f"{why}; {unusable() or _TRY}") from None
            if lacks := set(parameters.split()) - _list_parameters(loaded[name]):
                raise UsageError(
                    f"{module}.{name} of {_version()} has no {', '.join(sorted(lacks))}, which kinfed needs; "
                    f"{unusable() or _TRY}"
                )
    return SimpleNamespace(**loaded)


def _list_parameters(what: Any) -> set[str]:
    """Parameters of a function or a class, or fields of a message of Flower's protocol."""
    if hasattr(what, "DESCRIPTOR"):
        return set(what.DESCRIPTOR.fields_by_name)
    return set(inspect.signature(what).parameters)


def _version() -> str:
    return f"Flower {importlib.metadata.version('flwr')}"


_TRY = "install another version: pip install 'flwr==1.41.0'"
