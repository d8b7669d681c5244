"""How exactly the caps of the rate hold: of a site (`rate_limit` in its policy) and of the hub (`--rate-limit`).

    sudo python benchmarks/rate_limit.py                         1, 10, 50 and 200 Mbit/s, 6 s each
    sudo python benchmarks/rate_limit.py --rates 10 --seconds 20

Runs in a network namespace of its own, with packets of 1500 bytes on its loopback interface. A site sends as much as
it may, and the hub passes it on to another one. Counted are the bytes of the site's packets that hold data, heads of IP
and TCP included, by the kernel's counters of the connection (TCP_INFO), after the first second.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from command import parser_of
from hub_load import SECONDS, LoadSite, advance
from kits import end, hub_command, make_kits

from dadplug.hub.pki.kits import Kit
from dadplug.hub.site.link import HubLink
from dadplug.hub.wire.messages import Head, Kind
from dadplug.support.processes import free_port

HEADS = 52  # bytes of IPv4 and TCP in a packet, with timestamps
PIECE = 1 << 20


def sent_and_received(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes of the packets with data that a connection has sent and received, their heads included."""
    found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 224)
    (received,) = struct.unpack_from("<Q", found, 128)
    segments_in, segments_out = struct.unpack_from("<II", found, 152)
    (sent,) = struct.unpack_from("<Q", found, 200)
    return sent + HEADS * segments_out, received + HEADS * segments_in


def measure(rate: float, seconds: float, by_hub: bool) -> float:
    """Return the rate in Mbit/s that a cap has let through."""
    with tempfile.TemporaryDirectory() as folder:
        kits = Path(folder) / "kits"
        make_kits(kits, "127.0.0.1", free_port(), ("a", "b"))
        policy = "encrypt_local = true\n" + ("" if by_hub else f"rate_limit = {rate}\n")
        (kits / "a" / "policy.toml").write_text(policy)
        options = ("--rate-limit", str(rate)) if by_hub else ()
        hub = subprocess.Popen(hub_command(kits, "--encrypt-local", *options), stdout=subprocess.PIPE, text=True)
        try:
            assert hub.stdout is not None
            hub.stdout.readline()
            link = HubLink(Kit.load(kits / "a"))
            start = threading.Thread(target=link.start, args=(SECONDS,))
            start.start()
            receiver = LoadSite(Kit.load(kits / "b"))
            advance([receiver], lambda: receiver.started)
            start.join()
            ended = threading.Event()
            content = bytes(PIECE)

            def send() -> None:
                while not ended.is_set():
                    if link.frames.queue.unsent_bytes < 2 * PIECE:
                        link.post(Head(Kind.PAYLOAD, 0, step=1), content)
                    time.sleep(0.002)

            sender = threading.Thread(target=send)
            sender.start()
            assert link._connection is not None
            counted = receiver.connection if by_hub else link._connection
            marks = []
            begin = time.monotonic()
            for until in (1.0, 1.0 + seconds):
                advance([receiver], lambda until=until: time.monotonic() >= begin + until)
                marks.append((time.monotonic(), sent_and_received(counted._socket)[by_hub]))
            ended.set()
            sender.join()
        finally:
            end(hub)
    (first, before), (last, after) = marks
    return 8e-6 * (after - before) / (last - first)


def main() -> None:
    """Print the table; exit with an error if a cap is off by more than 5 %."""
    parser = parser_of(
        __doc__,
        rates=("1,10,50,200", "caps, in Mbit/s"),
        seconds=6.0,
    )
    arguments = parser.parse_args()
    if os.environ.get("DADPLUG_NAMESPACE") != "1":
        command = 'ip link set lo mtu 1500 up && exec "$0" "$@"'
        program = [sys.executable, *sys.argv]
        os.environ["DADPLUG_NAMESPACE"] = "1"
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", command, *program])
    off = 0.0
    print("| cap | of the site | of the hub |\n| ---: | ---: | ---: |")
    for rate in map(float, arguments.rates.split(",")):
        found = [measure(rate, arguments.seconds, by_hub) for by_hub in (False, True)]
        off = max(off, *(abs(each / rate - 1) for each in found))
        print(f"| {rate:g} Mbit/s | {found[0]:.2f} Mbit/s | {found[1]:.2f} Mbit/s |", flush=True)
    print(f"largest deviation: {100 * off:.1f} %")
    sys.exit(off > 0.05)


if __name__ == "__main__":
    main()
