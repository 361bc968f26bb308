"""What moving a file over a link with a rate costs: the CPU time of each side, apart.

    scripts/bench link [--rates 2 4 20 100] [--megabytes 96] [--rounds 3]

Two machines are network namespaces on one switch (root only), with `tc tbf` on both directions of each link. A
controller's listener sends to a real worker's side, which verifies and stores; a worker's ingress sends to a client.
Each side is a process of its own that does nothing else, so its CPU time is that of sending or that of receiving; the
rest of what a fleet takes meanwhile is its idle cost, which `scripts/bench swarm` shows.

Prints the median of core-seconds per Gbit, for each rate, beside the target for sending (0.3).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

from bench.files import MAX_CORES_PER_GBIT, Fetched, Order, make_blob, run_worker
from bench.support.blob_senders import (
    NODE,
    Sender,
    core_seconds_per_gbit,
    peer_token,
    sending,
    serve_as_controller,
    serve_as_worker,
)
from bench.support.star_network import star
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.access.signing import IngressTokens
from corral.kit.clock import SystemClock
from corral.kit.signing import Signer
from tests.support.network import Machine


def receive(folder: Path, there: Machine, sender: Sender, file: ReplicaFile, token: str) -> tuple[float, Fetched]:
    """Core-seconds per Gbit of the sender, and what the worker says."""
    before = sender.cpu_s()
    fetched = there.run(partial(run_worker, folder, Order(file, sender.url, token)))
    return (sender.cpu_s() - before) / (file.size_bytes * 8 / 1e9), fetched


def show(rate: float, controller: list[float], received: list[Fetched], worker: list[float]) -> None:
    spent = statistics.median(controller), statistics.median(worker)
    verdict = "met" if max(spent) <= MAX_CORES_PER_GBIT else "MISSED"
    print(
        f"{rate:6g} MB/s  send: controller {spent[0]:.3f}, worker {spent[1]:.3f} (≤ {MAX_CORES_PER_GBIT}: {verdict});  "
        f"receive, verify and store: {statistics.median(each.cores_per_gbit for each in received):.3f}",
        flush=True,
    )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 20.0, 100.0], help="MB/s")
    asked.add_argument("--megabytes", type=int, default=96)
    asked.add_argument("--rounds", type=int, default=3)
    options = asked.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    signing_key = Signer.new_private_key()
    print("core-seconds per Gbit")
    with tempfile.TemporaryDirectory() as name, star(options.rates[0] * 1e6) as network:
        folder, here, there = Path(name), network.add(), network.add()
        file = make_blob(folder / "blobs", options.megabytes)
        for rate in options.rates:
            network.set_rate(rate * 1e6)
            controller: list[float] = []
            received: list[Fetched] = []
            worker: list[float] = []
            for _ in range(options.rounds):
                token = IngressTokens(Signer(signing_key), SystemClock()).sign_for_node(NODE, NODE)
                with sending(
                    serve_as_controller, folder / "blobs", signing_key, None, None, here.address, on=here
                ) as sender:
                    spent, fetched = receive(folder, there, sender, file, token)
                    controller.append(spent)
                    received.append(fetched)
                token = peer_token(signing_key, file.digest)
                with sending(serve_as_worker, folder / "blobs", signing_key, here.address, on=here) as sender:
                    worker.append(there.run(partial(core_seconds_per_gbit, sender, file, token)))
            show(rate, controller, received, worker)


if __name__ == "__main__":
    main()
