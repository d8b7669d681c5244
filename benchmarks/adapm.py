"""Pulls and pushes of the parameter manager, and training loops with and without intent, over the skew of the keys.

    python benchmarks/adapm.py rates                              pulls and pushes alone, one site
    torchrun --nproc-per-node 2 benchmarks/adapm.py rates         half the keys remote
    torchrun --nproc-per-node 2 benchmarks/adapm.py latency       a remote pull of a single key
    torchrun --nproc-per-node 2 benchmarks/adapm.py loop          loops with intent beside loops without
    torchrun --nproc-per-node 2 benchmarks/adapm.py loop --techniques all,replication_only,relocation_only,static
    sudo python benchmarks/link.py 100mbit python benchmarks/adapm.py loop

On several machines each site names itself: --rank 0 --num-nodes 2 --dist-url tcp://HOST:PORT, with HOST an address of
site 0. Each command prints one table, at site 0, of means over the sites.

`latency` pulls one key of the next site at a time: at site 0 alone while the others are idle, and at all sites at once.
In `loop`, segments of plain server (no intent) and of each technique alternate in one run on the same keys; times are
medians over segments, the ratio is the median of those of neighbouring segments. "Seen after" is half the time in which
a push of site 0 is seen by site 1, and one of site 1 in answer to it by site 0; both look once a batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from command import parser_of

import dadplug
from dadplug.adapm import Normal, ParameterManager, Table

BATCH, WIDTH, ROWS = 4096, 64, 200_000
FOREVER = 1 << 60


def zipf_keys(batches: int, exponent: float, generator: torch.Generator) -> list[torch.Tensor]:
    """Draw batches of keys, key k as often as 1 / (k + 1)^exponent; 0 is uniform."""
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent
    bounds = weights.cumsum(0)
    return [
        torch.searchsorted(bounds, torch.rand(BATCH, generator=generator, dtype=torch.float64) * bounds[-1])
        for _ in range(batches)
    ]


def over_sites(figures: list[float]) -> list[float]:
    """Take the mean of figures over the sites; all sites call it."""
    if not dist.is_initialized():
        return figures
    total = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def make_table(manager: ParameterManager, name: str) -> Table:
    """Make a table, and the values of its keys."""
    table = manager.table(name, WIDTH, rows=ROWS, initialiser=Normal())
    table.pull(torch.arange(manager.rank, ROWS, manager.world_size))
    return table


def rates(manager: ParameterManager, args: argparse.Namespace) -> None:
    """Print keys per second and site for pulls and pushes, each alone."""
    table = make_table(manager, "rates")
    batches = zipf_keys(args.batches, 0.0, torch.Generator().manual_seed(manager.rank))
    deltas, out = torch.full((BATCH, WIDTH), 1e-3), torch.empty(BATCH, WIDTH)
    plain = torch.empty(ROWS, WIDTH).normal_()
    actions: dict[str, Callable[[torch.Tensor], object]] = {
        "pull": lambda keys: table.pull(keys, out=out),
        "push": lambda keys: table.push(keys, deltas),
        "push_async": lambda keys: table.push_async(keys, deltas),
        "a gather alone": lambda keys: torch.index_select(plain, 0, keys, out=out),
    }
    say(manager, f"| {manager.world_size} sites | M keys/s a site, median batch | over all batches |\n|---|---|---|")
    for name, action in actions.items():
        for keys in batches[:5]:
            action(keys)
        manager.wait_sync(everywhere=True)
        times = []
        start = time.perf_counter()
        for keys in batches:
            before = time.perf_counter()
            action(keys)
            times.append(time.perf_counter() - before)
        whole = time.perf_counter() - start
        manager.wait_sync(everywhere=True)
        middle, over_all = over_sites([BATCH / median(times) / 1e6, BATCH * len(batches) / whole / 1e6])
        say(manager, f"| {name} | {middle:.2f} | {over_all:.2f} |")


def latency(manager: ParameterManager, args: argparse.Namespace) -> None:
    """Print how long a pull of a single key takes whose value is at the next site."""
    table = make_table(manager, "latency")
    generator = torch.Generator().manual_seed(manager.rank)
    say(manager, f"| {manager.world_size} sites | median, µs | p90, µs |\n|---|---|---|")
    out = torch.empty(1, WIDTH)
    for name, pulling in (("site 0 pulls", [0]), ("all sites pull", range(manager.world_size))):
        manager.barrier()
        times = []
        for _ in range(args.pulls if manager.rank in pulling else 0):
            key = torch.randint(ROWS // manager.world_size, (1,), generator=generator) * manager.world_size
            key += (manager.rank + 1) % manager.world_size
            before = time.perf_counter()
            table.pull(key, out=out)
            times.append(1e6 * (time.perf_counter() - before))
        manager.barrier()
        times = sorted(times[len(times) // 10 :]) or [0.0]
        middle, late = over_sites([median(times), times[int(0.9 * len(times))]])
        share = manager.world_size / len(pulling)
        say(manager, f"| {name} | {middle * share:.0f} | {late * share:.0f} |")


def say(manager: ParameterManager, line: str) -> None:
    """Print at site 0."""
    if manager.rank == 0:
        print(line, flush=True)


class Loop:
    """A training loop of one technique (None: the plain server), in segments.

    Args:
        technique: the technique.
        args: the command's.
        name: of its table.
    """

    def __init__(self, technique: str | None, args: argparse.Namespace, name: str) -> None:
        self.technique, self.args = technique, args
        self.manager = ParameterManager(technique=technique or "static")
        self.table = make_table(self.manager, name)
        self.echo = self.manager.table("echo", 1, rows=2)
        self.echo.pull(torch.arange(2))
        self.deltas = torch.full((BATCH, WIDTH), 1e-3)
        self.segments: list[list[float]] = []
        self.asked, self.seen = 0.0, list[float]()
        if technique is not None:
            self.echo.intent(torch.arange(2), 0, FOREVER)
        self.manager.wait_sync(everywhere=True)

    def run(self, batches: list[torch.Tensor]) -> None:
        """Train a segment, and record its figures.

        Args:
            batches: keys of the segment's batches, and of as many that follow it as intent is ahead. Those are
                announced, so that a segment bears the cost of as many intents as it has batches.
        """
        manager, table, ahead = self.manager, self.table, self.args.lookahead
        count, intends = len(batches) - ahead, self.technique is not None
        first = manager.current_clock
        if intends:
            for step in range(ahead):
                table.intent(batches[step], first + step)
            for _ in range(3):  # the keys of the first batches arrive
                manager.wait_sync()
        manager.barrier()
        counts, sent = manager.counts, manager.traffic.total_bytes_sent
        self.asked, work = 0.0, self.args.work / 1e3
        start, spent, worked = time.perf_counter(), time.process_time(), 0.0
        for step in range(count):
            if intends:
                table.intent(batches[step + ahead], first + step + ahead)
            values = table.pull(batches[step])
            before = time.thread_time()
            while (now := time.thread_time()) - before < work:
                values.sum()
            worked += now - before
            table.push_async(batches[step], self.deltas)
            if manager.world_size > 1 and manager.rank < 2 and step % 4 == 0:
                self._echo()
            manager.advance_clock()
        seconds, spent = time.perf_counter() - start, time.process_time() - spent - worked
        manager.barrier()
        seconds = max(seconds, time.perf_counter() - start) if manager.world_size > 1 else seconds
        after = manager.counts
        pulled, remotely, moved, replicated = (
            after[name] - counts[name] for name in ("pulled", "pulled_remotely", "moved", "replicated")
        )
        self.segments.append(
            [
                1e3 * seconds / count,
                1e3 * spent / count,
                100 * (1 - remotely / pulled),
                (manager.traffic.total_bytes_sent - sent) / 1e6 / count,
                moved / count,
                replicated / count,
            ]
        )
        for _ in range(ahead if intends else 0):  # what was announced and will not be used is given up
            manager.advance_clock()
        manager.wait_sync(everywhere=True)

    def _echo(self) -> None:
        first, second = self.echo.pull(torch.arange(2)).flatten().tolist()
        rank = self.manager.rank
        if (rank == 0 and first == second) or (rank == 1 and second < first):
            self.echo.push_async(torch.tensor([rank]), torch.ones(1, 1))
            now = time.perf_counter()
            if self.asked:
                self.seen.append(now - self.asked)
            self.asked = now


def loop(args: argparse.Namespace, rank: int) -> None:
    """Print the table of training loops."""
    techniques = [None, *args.techniques.split(",")]
    loops: list[Loop] = []
    try:
        for exponent in args.exponents:
            for each in loops:
                each.manager.close()
            loops = [Loop(technique, args, f"{exponent}") for technique in techniques]
            if exponent == args.exponents[0]:
                say(
                    loops[0].manager,
                    f"{loops[0].manager.world_size} sites, {BATCH:,} of {ROWS:,} keys a batch, width {WIDTH}, "
                    f"{args.work:g} ms of work a batch, {args.segments} segments of {args.batches}\n\n"
                    "| keys | | ms a batch | of plain | spread | M keys/s | cpu ms beside work | % local | "
                    "MB a batch | seen after, ms | moved | replicated |\n|" + "---|" * 12,
                )
            generator = torch.Generator().manual_seed(rank)
            for segment in range(args.segments + 1):
                batches = zipf_keys(args.batches + args.lookahead, exponent, generator)
                for each in loops:
                    each.run(batches)
                    if segment == 0:  # tables have not settled, memory has not been touched
                        each.segments.clear()
                        each.seen.clear()
            for each in loops:
                figures = [median(column) for column in zip(*each.segments, strict=True)]
                pairs = zip(each.segments, loops[0].segments, strict=True)
                ratios = sorted(over_sites([own[0] / plain[0] for own, plain in pairs]))
                of_plain = f"{median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f}"
                ms, cpu, local, sent, moved, replicated = over_sites(figures)
                seen = 1e3 * median(each.seen or [float("nan")]) / 2
                keys = f"Zipf {exponent:g}" if exponent else "uniform"
                say(
                    loops[0].manager,
                    f"| {keys} | {each.technique or 'plain server'} | {ms:.2f} | {of_plain} | "
                    f"{BATCH / ms / 1e3:.2f} | {cpu:.2f} | {local:.2f} | {sent:.3f} | {seen:.1f} | "
                    f"{moved:,.0f} | {replicated:,.0f} |",
                )
    finally:
        for each in loops:
            each.manager.close()


def main() -> None:
    """Run the benchmark at this site."""
    parser = parser_of(
        __doc__,
        batches=(100, "batches, of a segment where there are segments"),
        pulls=(5000, "pulls of a single key, of which a tenth warm up"),
        segments=(7, "of each loop, after one to warm up"),
        techniques=("all", "beside the plain server, with commas"),
        exponents={"type": float, "nargs": "*", "default": [0.0, 0.9, 1.1], "help": "skews of the loops"},
        work=(2.5, "processor ms of work in a batch of the loops"),
        lookahead=(50, "batches"),
        rank={"type": int, "help": "number of this site; torchrun's variables where not given"},
        num_nodes=(2, "number of sites, with --rank"),
        dist_url=("tcp://127.0.0.1:8998", "meeting point, with --rank"),
    )
    parser.add_argument("table", choices=("rates", "latency", "loop"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.rank is None:
        dadplug.connect()
    else:
        dadplug.connect(args.rank, args.num_nodes, args.dist_url)
    if args.table != "rates" and not dist.is_initialized():
        parser.error(f"{args.table} needs at least two sites: torchrun --nproc-per-node 2, or --rank")
    if args.table in ("rates", "latency"):
        with ParameterManager() as manager:
            {"rates": rates, "latency": latency}[args.table](manager, args)
    else:
        loop(args, dist.get_rank())


if __name__ == "__main__":
    main()
