"""Choosing a replica, by how many there are: of integers alone, and by the beginning of a prompt of 16 KiB.

    scripts/bench pick

CPU of this thread, the best of several rounds. The target is 20 µs with 1,000 replicas.
"""

from __future__ import annotations

import json
import random
import time
import timeit
from collections.abc import Callable

from corral.gateway.routing.pick import Policy, PrefixMatch, pick, pick_by_prefix, rank
from corral.gateway.routing.prefixes import PrefixIndex, hash_blocks

COUNTS = (1, 2, 10, 100, 1000)
ROUNDS, TIMES = 7, 500


def best_us(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=TIMES, repeat=ROUNDS, timer=time.thread_time)) / TIMES * 1e6


def measure(count: int, chain: list[int], dice: random.Random) -> tuple[float, float]:
    ranks = [rank(dice.randrange(8), 64) for _ in range(count)]
    names = [f"p{place}" for place in range(count)]
    places = {name: place for place, name in enumerate(names)}
    index = PrefixIndex(ttl_s=300, half_life_s=120)
    index.observe(chain[:32], names[0], 0.0)

    def warm() -> object:
        found = index.match(chain, places, 1.0)
        hot = None if found is None else PrefixMatch(places[found[0]], found[1] / len(chain))
        return pick_by_prefix(ranks, 0, Policy(), hot, lambda place: index.weight(names[place], 1.0))

    return best_us(lambda: pick(ranks, 0)), best_us(warm)


def main() -> None:
    dice = random.Random(1)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a b c d " * 2500}]}).encode()
    print(f"hashing a prompt of {len(body):,} bytes: {best_us(lambda: hash_blocks(body)):.1f} µs\n")
    print("| replicas | least to do | and its cache |")
    print("|---:|---:|---:|")
    for count in COUNTS:
        plain_us, warm_us = measure(count, hash_blocks(body), dice)
        print(f"| {count:,} | {plain_us:.1f} µs | {warm_us:.1f} µs |")


if __name__ == "__main__":
    main()
