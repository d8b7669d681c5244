"""Link between site and hub: who is lost and why, silence, mismatches, and the end of processes."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cutting_relay import CuttingRelay
from hub_sites import NAMES, link_all, links, open_link, together, transports
from running_hub import running_hub, until

from dadplug.errors import MismatchError, SiteError
from dadplug.hub.site import connection as connection_module
from dadplug.hub.wire.frames import SHORT_PIECE_BYTES


def exchange(transport, value: float = 1.0, size: int = 1000):
    """Gather a payload of this site; return all."""
    gather = transport.gather([size] * transport.world_size, torch.float32)
    gather.payload.fill_(value)
    gather.launch()
    return gather


def test_the_reason_of_a_site_that_leaves_reaches_all_others_after_what_it_has_sent(tmp_path):
    with links(tmp_path, 3) as opened:
        a, b, c = transports(opened)
        lengths, complete = [], opened[2].complete
        opened[2].complete = lambda head, body: (lengths.append(head.length), complete(head, body))
        gathers = [exchange(each, rank, 100_000) for rank, each in enumerate((a, b, c))]
        opened[1].leave("ValueError: no data")
        for gather in (gathers[0], gathers[2]):
            assert [payload[0].item() for payload in gather.wait()] == [0.0, 1.0, 2.0]
        assert max(lengths) == SHORT_PIECE_BYTES  # of three sites, two are away from the hub
        for transport in (a, c):
            with pytest.raises(SiteError, match=r"^site 1 \(b\) is gone: ValueError: no data$"):
                exchange(transport).wait()
            with pytest.raises(SiteError, match="site 1"):
                transport.all_reduce(torch.ones(100_000)).wait()
        assert str(a.sites.found_lost()) == "site 1 (b) is gone: ValueError: no data"
        with pytest.raises(SiteError, match="has closed its connection"):
            opened[1].end_step()


def test_the_site_that_was_lost_first_is_named(tmp_path):
    with links(tmp_path, 3) as opened:
        a, _, _ = transports(opened)
        opened[2].leave("KeyError: 'x'")
        until(lambda: opened[1].attend(0.01) or transfer(opened[1]) or opened[1].gone)
        opened[1].leave("SiteError: site 2 (c) is gone: KeyError: 'x'")
        until(lambda: opened[0].attend(0.01) or transfer(opened[0]) or len(opened[0].gone) == 2)
        with pytest.raises(SiteError, match=r"^site 2 \(c\) is gone: KeyError: 'x'$"):
            exchange(a).wait()


def transfer(link) -> None:
    with link.lock:
        link.transfer()


def test_a_site_whose_program_ends_is_gone(tmp_path):
    with links(tmp_path) as opened:
        a, _ = transports(opened)
        opened[1].close()
        with pytest.raises(SiteError, match=r"site 1 \(b\) is gone: its program has ended"):
            exchange(a).wait()


def test_a_site_that_leaves_without_a_reason_is_gone_after_the_grace(tmp_path):
    with links(tmp_path, grace=0.3) as opened:
        a, _ = transports(opened)
        opened[1].close_descriptors()  # as if it had been killed
        with pytest.raises(SiteError, match=r"site 1 \(b\) is gone: its connection was lost"):
            exchange(a).wait()


def test_a_slow_site_is_named_after_the_timeout_and_can_be_waited_for_again(tmp_path):
    with links(tmp_path) as opened:
        a, b = transports(opened, timeout=0.3)
        gather = exchange(a, 1.0)
        with pytest.raises(SiteError, match=r"site 1 \(b\) has not answered for 0.3 s"):
            gather.wait()
        a.timeout = 60.0
        exchange(b, 2.0)
        assert [payload[0].item() for payload in gather.wait()] == [1.0, 2.0]


def test_sites_at_different_exchanges_are_told_so(tmp_path):
    with links(tmp_path) as opened:
        a, b = transports(opened, timeout=0.5)
        first = b.gather([4, 4], torch.float32)
        exchange(b)
        until(lambda: opened[0].attend(0.01) or transfer(opened[0]) or opened[0].early_bytes)
        with pytest.raises(MismatchError, match=r"site 1 \(b\) and site 0 \(a\) are not at the same exchange"):
            exchange(a).wait()
        first.launch()


def test_payloads_of_different_sizes_end_the_link(tmp_path):
    with links(tmp_path) as opened:
        a, b = transports(opened)
        exchange(b, size=1001)
        for _ in range(2):
            with pytest.raises(MismatchError, match=r"site 1 \(b\) sends site 0 \(a\) another message"):
                exchange(a).wait()
        assert opened[0].closed


def test_training_waits_for_all_sites_and_names_those_that_are_missing(tmp_path):
    with running_hub(tmp_path / "kits", NAMES[:3]) as hub:
        with pytest.raises(SiteError, match=r"has not started within 2 s: .*waiting for b, c"):
            open_link(hub.kits, "a", timeout=2)
        for link in link_all(hub, 3):  # the site that has given up can come again
            link.close()


def test_a_hub_may_start_after_its_sites(tmp_path):
    with running_hub(tmp_path / "kits"):
        pass
    opened = []
    dialing = threading.Thread(
        target=lambda: opened.extend(together(lambda rank: open_link(tmp_path / "kits", NAMES[rank])))
    )
    dialing.start()
    time.sleep(0.2)
    with running_hub(tmp_path / "kits"):
        dialing.join()
        a, b = transports(opened)
        exchange(b)
        exchange(a).wait()
        for link in opened:
            link.close()


def test_a_hub_that_is_not_there_is_named(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        pass
    with pytest.raises(SiteError, match=f"the hub at {hub.address[0]}:{hub.address[1]} cannot be reached for 0.3 s"):
        open_link(tmp_path / "kits", "a", timeout=0.3)


def test_two_processes_with_one_kit_are_refused(tmp_path):
    with links(tmp_path), pytest.raises(SiteError, match="another process is connected as site 'a'"):
        open_link(tmp_path / "kits", "a")


def test_a_hub_that_ends_tells_its_sites(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        opened = link_all(hub)
        a, _ = transports(opened)
        hub.hub.stop("maintenance")
        with pytest.raises(SiteError, match="the hub ends: maintenance"):
            exchange(a).wait()
        for link in opened:
            link.close()


def test_a_hub_that_stays_away_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "REDIAL_SECONDS", 0.5)
    with running_hub(tmp_path / "kits") as hub, CuttingRelay(hub.address) as relay:
        opened = link_all(hub, 2, [relay.address, hub.address])
        a, _ = transports(opened)
        relay.refuse = True
        relay.cut()
        with pytest.raises(SiteError, match=r"the hub at 127.0.0.1:\d+ cannot be reached for 0.5 s"):
            exchange(a).wait()
        for link in opened:
            link.close()


def test_a_hub_that_has_been_restarted_gets_what_the_old_one_has_lost(tmp_path):
    with running_hub(tmp_path / "kits", NAMES[:3]) as hub, CuttingRelay(hub.address) as relay:
        opened = link_all(hub, 3, [relay.address] * 3)
        every = transports(opened)
        tensors = [torch.arange(100_000.0) * (rank + 1) for rank in range(3)]
        sums, gathers = [every[0].all_reduce(tensors[0])], [exchange(each, rank) for rank, each in enumerate(every)]
        assert [int(each[0]) for each in gathers[0].wait()] == [0, 1, 2]
        relay.refuse = True
        relay.cut()
    sums += [each.all_reduce(tensor) for each, tensor in zip(every[1:], tensors[1:], strict=True)]
    with running_hub(tmp_path / "kits", NAMES[:3]):
        for link in opened:
            link.address = hub.address
        for reduction in sums:
            reduction.wait()
        for each in tensors:
            assert torch.equal(each, torch.arange(100_000.0) * 6)
        for gather in gathers:
            assert [int(each[0]) for each in gather.wait()] == [0, 1, 2]
        for link in opened:
            link.end_step()
        opened[1].leave("KeyError: 7")
        with pytest.raises(SiteError, match=r"site 1 \(b\) is gone: KeyError: 7"):
            exchange(every[0]).wait()
    for link in opened:
        link.close(0.1)


def test_a_run_ends_if_a_site_has_started_again_with_the_hub(tmp_path):
    with running_hub(tmp_path / "kits", NAMES[:2]) as hub, CuttingRelay(hub.address) as relay:
        opened = link_all(hub, 2, [relay.address] * 2)
        relay.refuse = True
        relay.cut()
    opened[1].close_descriptors()
    with running_hub(tmp_path / "kits", NAMES[:2]), ThreadPoolExecutor(1) as pool:
        new = pool.submit(open_link, hub.kits, "b", hub.address)
        opened[0].address = hub.address
        with pytest.raises(SiteError, match="the hub has been restarted, and b has been started again"):
            exchange(transports(opened)[0]).wait()
        again = open_link(hub.kits, "a", hub.address)
        for link in (again, new.result()):
            link.close(0.1)
    opened[0].close(0.1)


def test_a_dead_link_is_left_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "_SHORTEST_SILENCE", 0.3)
    with (
        running_hub(tmp_path / "kits", rules={"site_timeout": 3.0}, grace=30.0) as hub,
        CuttingRelay(hub.address) as relay,
    ):
        opened = link_all(hub, 2, [relay.address, hub.address])
        a, b = transports(opened)
        relay.hold = True
        other = exchange(b, 2.0)
        gather = exchange(a, 1.0)
        timer = threading.Timer(1.7, lambda: setattr(relay, "hold", False))
        timer.start()
        for each in (gather, other):
            assert [payload[0].item() for payload in each.wait()] == [1.0, 2.0]
        timer.join()
        for link in opened:
            link.close()


def test_frames_that_have_arrived_are_not_kept(tmp_path):
    with links(tmp_path) as opened:
        every = transports(opened)

        def use(transport):
            gather, most = transport.gather([250_000] * 2, torch.float32), 0
            for _ in range(60):
                gather.launch()
                gather.wait()
                transport.end_step()
                most = max(most, transport.link._frames.kept_bytes)
            return most

        assert all(most < 24 << 20 for most in together(lambda rank: use(every[rank])))  # of 60 MB
        assert all(link.early_bytes == 0 for link in opened)


def test_a_forked_child_neither_uses_nor_keeps_the_link(tmp_path):
    with links(tmp_path, grace=0.3) as opened:
        descriptor = opened[0]._connection.fileno()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.fstat(descriptor)
                os.write(write, b"open")
            except OSError:
                os.write(write, b"closed")
            try:
                opened[0].end_step()
            except SiteError:
                os.write(write, b", refused")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 100) == b"closed, refused"
        every = [exchange(each) for each in transports(opened)]
        assert all(len(gather.wait()) == 2 for gather in every)
