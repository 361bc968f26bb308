"""llama.cpp behind OpenAI's HTTP, from the `xllamacpp` wheel: its server is C++ and answers without Python's help.

    serve.py --host 127.0.0.1 --port 20001 --model /models/m.gguf --name m --context-size 4096 --parallel 2

Prints `listening on http://…` when the model is loaded; /health answers 200 from then on. Ends at once on SIGTERM or
SIGINT, also in the middle of a load; whoever sends them has let the running requests finish before. Runs in an
environment of its own, so it imports nothing of Corral.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MODES = ("chat", "embeddings", "reranking")
_GGUF_HEAD_BYTES = 1024 * 1024
POOLING = {"": -1, "none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}  # llama.cpp's own numbers


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llama-cpp", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_whole(0, 65535), required=True)
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--name", default="", help="what clients call the model; default: the file's name")
    parser.add_argument(
        "--context-size", type=_whole(0, 1 << 24), default=0, help="tokens per request; 0: the model's own"
    )
    parser.add_argument("--parallel", type=_whole(1, 1024), default=1, help="requests served at once")
    parser.add_argument("--threads", type=_whole(0, 1024), default=0, help="0: one per core")
    parser.add_argument("--gpu-layers", type=int, default=-1, help="-1: as many as fit")
    parser.add_argument("--mmproj", default="", help="the projector of a model that sees")
    parser.add_argument("--mode", choices=MODES, default="chat", help="what it serves: llama.cpp does one of them")
    parser.add_argument(
        "--pooling", choices=POOLING, default="", help="of embeddings; default: the model's own, or mean"
    )
    # llama.cpp would take 8 GiB for prompts it may meet again, which nobody reserved for it.
    parser.add_argument("--cache-ram-mib", type=_whole(0, 1 << 20), default=512)
    return parser.parse_args(words)


def fill_params(params: Any, arguments: argparse.Namespace) -> None:
    """Writes the arguments into llama.cpp's `CommonParams`."""
    params.model.path = arguments.model
    params.model_alias = {arguments.name or os.path.basename(arguments.model)}
    params.hostnames = [arguments.host]
    params.port = arguments.port
    # llama.cpp shares its context out among the slots; people mean the size of one request.
    params.n_ctx = arguments.context_size * arguments.parallel
    params.n_parallel = arguments.parallel
    params.n_gpu_layers = arguments.gpu_layers
    params.cache_ram_mib = arguments.cache_ram_mib
    params.embedding = arguments.mode != "chat"
    pooling = "rank" if arguments.mode == "reranking" else arguments.pooling
    if arguments.mode == "embeddings" and not pooling and not has_own_pooling(arguments.model):
        pooling = "mean"  # llama.cpp's own default is none, with which it answers no request of OpenAI's kind
    if pooling:
        params.pooling_type = type(params.pooling_type)(POOLING[pooling])
    params.ui = False
    params.cors_origins = ""
    params.offline = True  # everything is on this disk; nothing is to be fetched behind the fleet's back
    if threads := arguments.threads or fewer_cpus(os.cpu_count() or 1, allowed_cpus()):
        params.cpuparams.n_threads = threads
    if arguments.mmproj:
        params.mmproj.path = arguments.mmproj


def has_own_pooling(path: str) -> bool:
    """Whether the GGUF file says how its vectors are made. The names of its values stand at its beginning, and this one
    before the vocabulary."""
    with open(path, "rb") as file:
        return b".pooling_type" in file.read(_GGUF_HEAD_BYTES)


def fewer_cpus(has: int, may: int) -> int:
    """How many threads to ask for: 0, llama.cpp's own choice, where we may use the whole machine. It does not know of
    limits, and threads that wait for each other on too few CPUs are many times slower than fewer of them."""
    return may if may < has else 0


def allowed_cpus(quota_file: str = "/sys/fs/cgroup/cpu.max") -> int:
    """What affinity and the container's quota leave us."""
    may = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open(quota_file) as file:
            quota, period = file.read().split()
        return max(1, min(may, -(-int(quota) // int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or no limit: its word for that is `max`
        return may


def main(words: Sequence[str]) -> int:
    arguments = read_arguments(words)
    if not os.path.isfile(arguments.model):
        print(f"there is no file {arguments.model}", file=sys.stderr, flush=True)
        return 2
    # While it loads, llama.cpp keeps Python's lock, and no handler of ours would run: the kernel ends the process.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_DFL)
    try:
        import xllamacpp

        params = xllamacpp.CommonParams()
        fill_params(params, arguments)
        server = xllamacpp.Server(params)
    except Exception as error:
        print(f"llama.cpp did not start: {error}", file=sys.stderr, flush=True)
        return 1
    # Not through the server's destructor: that waits half a minute for the clients of running generations to leave.
    for stop in STOP_SIGNALS:
        signal.signal(stop, lambda _signal, _frame: os._exit(0))
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


def _whole(least: int, most: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
