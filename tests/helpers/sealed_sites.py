"""Sites whose kits require sealed messages."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from frame_parts import Frame
from hub_sites import linked
from running_hub import RunningHub, running_hub

from dadplug.hub import Project
from dadplug.hub.pki import provision
from dadplug.hub.server.session import Received
from dadplug.hub.site.link import HubLink

SENTINEL = b"an activation of a patient, "
SITES = ("a", "b", "c")


def make_kits(folder: Path, sites: Sequence[str] = SITES, sealed: bool = True) -> Path:
    """Make kits of sites that are all on this machine, and return their folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    entries = {"name": "study", "hub": f"127.0.0.1:{port}", "sites": list(sites)}
    # A third party runs the hub, where messages are sealed.
    entries |= {"sealed": True} if sealed else {"hub_at": sites[0]}
    provision.provision(Project.parse(entries), folder)
    return folder


@contextmanager
def sealed_hub(folder: Path, sites: tuple[str, ...] = SITES, sealed: bool = True) -> Iterator[RunningHub]:
    """Run a hub."""
    with running_hub(make_kits(folder / "kits", sites, sealed), sites) as hub:
        yield hub


@contextmanager
def sealed_links(folder: Path, sites: tuple[str, ...] = SITES, sealed: bool = True) -> Iterator[list[HubLink]]:
    """Run a hub, and link sites to it."""
    with sealed_hub(folder, sites, sealed) as hub, linked(hub, len(sites)) as opened:
        yield opened


def opened(frame: Received) -> Frame:
    """Return a frame that the hub has received, as a test reads and alters it."""
    head, body, _ = frame
    return Frame(head, bytes(body))


def packed(frame: Frame) -> Received:
    """Return a frame as the hub passes it on."""
    return frame.head, memoryview(frame.body), frame.head.pack() + frame.body


def flip(frame: Frame, position: int = -1) -> Frame:
    """Return a frame with one bit of its body changed."""
    body = bytearray(frame.body)
    body[position] ^= 1
    return frame._replace(body=bytes(body))
