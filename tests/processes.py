"""kinfed in several processes, as torchrun starts them."""

import os
import socket
import subprocess
import sys


def run_kinfed(tmp_path, processes, *arguments, script=None, check=True):
    """Runs kinfed in so many processes, as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(processes):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if processes > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, *(["-c", script] if script else ["-m", "kinfed"]), *map(str, arguments)]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    if check:
        assert [code for _, _, code in ended] == [0] * processes, ended
    return ended
