"""Connections beside that of training over a hub that is killed and started again: they end with an error."""

from __future__ import annotations

import os

import forkserver
import hub_kits
import mortal_hub
import pytest
import support
from hub_sites import TIMEOUT, open_link, together, transports
from running_hub import free_port, until

from dadplug.errors import SiteError
from dadplug.hub.site.tunnel import check_tunnel, tunnel_of
from dadplug.hub.torch import HubStore

RESTARTED = "has been restarted"


def test_the_store_and_the_messages_of_parameters_end_and_training_goes_on(tmp_path):
    kits = tmp_path / "kits"
    hub_kits.make(kits, hub=f"127.0.0.1:{free_port()}", hub_names=[], sites=["a", "b"], hub_at="a")
    command = [mortal_hub.__file__, str(kits / "hub"), str(tmp_path / "journal"), "never", "0"]
    hub = forkserver.start(command, os.environ | support.ONE_THREAD)
    links = together(lambda rank: open_link(kits, "ab"[rank]))
    sites = transports(links)
    try:
        stores = [HubStore(link.kit, TIMEOUT) for link in links]
        stores[0].set("key", b"value")
        assert stores[1].get("key") == b"value"
        streams = together(lambda rank: sites[rank].open_streams(TIMEOUT)[1 - rank])
        pass_on(*streams)
        tunnels = [tunnel_of(link, TIMEOUT) for link in links]
        hub.kill()
        hub.wait(TIMEOUT)
        hub = forkserver.start(command, os.environ | support.ONE_THREAD)
        assert together(lambda rank: sites[rank].gather_objects(rank)) == [[0, 1]] * 2
        for store in stores:
            with pytest.raises(SiteError, match=RESTARTED):
                store.get("key")
        for link, tunnel in zip(links, tunnels, strict=True):
            until(lambda tunnel=tunnel: tunnel.closed)
            with pytest.raises(SiteError, match=RESTARTED):
                check_tunnel(link)
        assert [receive(stream) for stream in streams] == [b"", b""]  # their ends
        pass_on(*together(lambda rank: sites[rank].open_streams(TIMEOUT)[1 - rank]))  # over the new hub
        others = [HubStore(link.kit, TIMEOUT) for link in links]
        others[0].set("key", b"new")
        assert others[1].get("key") == b"new"
        for store in others:
            store.close()
        assert together(lambda rank: sites[rank].gather_objects(-rank)) == [[0, -1]] * 2
    finally:
        for link in links:
            link.close(0.1)
        hub.kill()


def receive(stream) -> bytes:
    stream.setblocking(True)
    stream.settimeout(TIMEOUT)
    return stream.recv(100)


def pass_on(first, second) -> None:
    """Send bytes from one end of a stream to the other."""
    first.send(b"a row")
    assert receive(second) == b"a row"
