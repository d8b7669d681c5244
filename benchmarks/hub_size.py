"""What a hub needs: processor time for each MB that it passes on, and memory, by the number of sites.

    python benchmarks/hub_size.py                       2 to 64 sites, payloads of 1 MB
    python benchmarks/hub_size.py --sites 2,8 --megabytes 0.1,4

The sites are connections of one process without models: all send a payload in each round, and receive those of the
others, over TLS. Counted is the hub's own processor time, in the kernel too, so that other work of the machine hardly
matters; and its memory after the rounds. A site on a link of B Mbit/s moves at most B / 8 MB a second in each
direction; the hub's work is the sum over all sites, in both directions.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from command import parser_of
from hub_load import LoadSite, advance, usage
from kits import end, hub_command, make_kits

from dadplug.hub.pki.kits import Kit
from dadplug.processes import free_port

BYTES = 400e6  # passed on in a measurement, about


def measure(count: int, megabytes: float) -> tuple[float, float, float, float]:
    """Measure a hub.

    Args:
        count: number of sites.
        megabytes: size of a payload.

    Returns:
        Memory without sites, memory with them, seconds of processor time for each MB that is received or sent, and for
        each round.
    """
    with tempfile.TemporaryDirectory() as folder:
        kits = Path(folder) / "kits"
        names = [f"site{number}" for number in range(count)]
        make_kits(kits, "127.0.0.1", free_port(), names)
        command = hub_command(kits, "--site-timeout", "300", "--encrypt-local")
        hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert hub.stdout is not None
            hub.stdout.readline()  # it listens
            empty = usage(hub.pid)[1]
            sites = [LoadSite(Kit.load(kits / name)) for name in names]
            advance(sites, lambda: all(each.started for each in sites))
            content = memoryview(bytes(int(megabytes * 1e6)))
            moved = megabytes * count * count  # each payload arrives once, and is sent to all others
            rounds = max(3, min(200, round(BYTES / 1e6 / moved)))
            before = usage(hub.pid)[0]
            for step in range(1, rounds + 1):
                for site in sites:
                    site.begin(step, content)
                advance(sites, lambda step=step: all(each.closed == step for each in sites))
            after, memory = usage(hub.pid)
            assert all(each.nbytes == rounds * (count - 1) * len(content) for each in sites)
            for site in sites:
                site.leave()
                site.advance()
        finally:
            end(hub)
    return empty, memory, (after - before) / (rounds * moved), (after - before) / rounds


def main() -> None:
    """Print the table."""
    parser = parser_of(
        __doc__,
        sites="2,4,8,16,32,64",
        megabytes=("1", "sizes of a payload"),
    )
    arguments = parser.parse_args()
    print("| sites | payload | memory | processor time per MB | per round | one core moves |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for megabytes in map(float, arguments.megabytes.split(",")):
        for count in map(int, arguments.sites.split(",")):
            empty, memory, each, whole = measure(count, megabytes)
            print(
                f"| {count} | {megabytes:g} MB | {memory:.0f} MB ({empty:.0f} without sites) | {1e3 * each:.2f} ms "
                f"| {1e3 * whole:.1f} ms | {1 / each:.0f} MB/s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
