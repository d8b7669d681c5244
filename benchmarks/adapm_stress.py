"""The sums of all pushes are exact to the bit after random pulls, pushes, intents, moves and delays.

torchrun --nproc-per-node 3 benchmarks/adapm_stress.py --operations 10_000_000
python benchmarks/adapm_stress.py --hub 3
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from command import parser_of

import dadplug
from dadplug.adapm import ParameterManager


def stress(operations: int, technique: str, *, keys: int = 4000, width: int = 4, seed: int = 0) -> dict[str, Any]:
    """Do random operations on keys at this site and, meanwhile, at the others; check the sums; return figures.

    Args:
        operations: number of keys to pull or push, at each site.
        technique: see `ParameterManager`.
        keys: number of keys, half of which take part in most operations.
        width: number of values a key.
        seed: the same at all sites.
    """
    start = time.perf_counter()
    with ParameterManager(technique=technique, timeout=60) as manager:
        table = manager.table("stress", width, rows=keys)
        rank = manager.rank
        chance = random.Random(seed * 100 + rank)
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        pushed = torch.zeros(keys, width)
        done = 0
        under_way = []
        while done < operations:
            some = torch.randint(keys, (chance.randrange(1, 512),), generator=generator)
            if chance.random() < 0.5:  # a hot part that all sites share, and one that moves from site to site
                some = some % 50 + keys // 2 * ((manager.current_clock // 100 + rank) % 2)
            action = chance.random()
            if action < 0.5:
                deltas = torch.randint(1, 8, (*some.shape, width), generator=generator).float()
                pushed.index_add_(0, some, deltas)
                under_way.append(table.push_async(some, deltas))
                done += some.numel()
            elif action < 0.8:
                least = pushed[some]
                assert (table.pull(some) >= least).all(), "a site does not see its own pushes"
                done += some.numel()
            elif action < 0.9:
                begin = manager.current_clock + chance.randrange(0, 40)
                table.intent(some, begin, begin + chance.randrange(1, 30))
            else:
                manager.advance_clock()
            if chance.random() < 0.002:
                time.sleep(chance.random() * 0.01)
            if len(under_way) > 20:
                under_way.pop(chance.randrange(len(under_way))).wait()
        manager.wait_sync(everywhere=True)
        expected = pushed.clone()
        manager.transport.all_reduce(expected).wait()
        assert torch.equal(table.pull(torch.arange(keys)), expected), "the sums differ"
        owned = torch.tensor([len(table.owned()[0])])
        manager.transport.all_reduce(owned).wait()
        assert int(owned) == int((expected != 0).any(1).sum()), "a key has no owner, or two"
        manager.barrier()
        return {"operations": done, "seconds": time.perf_counter() - start, **manager.counts}


def over_hub(count: int, arguments: list[str]) -> int:
    """Run a hub and sites on this machine; return 0 if none of them fails.

    Args:
        count: number of sites.
        arguments: further arguments of each site.
    """
    names = [f"site{number}" for number in range(count)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        kits = Path(folder) / "kits"
        project = Path(folder) / "project.toml"
        project.write_text(f'name = "stress"\nhub = "127.0.0.1:{port}"\nsites = {names}\nhub_at = "site0"\n')
        command = [sys.executable, "-m", "dadplug"]
        subprocess.run([*command, "provision", project, "--out", kits], check=True)
        hub = subprocess.Popen([*command, "hub", kits / "hub"])
        try:
            own = [sys.executable, __file__, *arguments, "--kit"]
            sites = [subprocess.Popen([*own, kits / name]) for name in names]
            return max(abs(site.wait()) for site in sites)
        finally:
            hub.terminate()
            hub.wait()


if __name__ == "__main__":
    parser = parser_of(
        __doc__.splitlines()[0],
        operations=(1_000_000, "keys, at all sites together"),
        technique="all",
        seed=0,
        hub={"type": int, "metavar": "SITES", "help": "run a hub and so many sites on this machine"},
        kit=(None, "kit of this site, to connect to a hub that runs"),
    )
    args = parser.parse_args()
    if args.hub:
        own = [f"--{name}={getattr(args, name)}" for name in ("operations", "technique", "seed")]
        sys.exit(over_hub(args.hub, own))
    torch.set_num_threads(1)
    dadplug.connect(kit=args.kit)
    sites = dist.get_world_size() if dist.is_initialized() else 1
    print(stress(args.operations // sites, args.technique, seed=args.seed))
