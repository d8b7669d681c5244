"""Keys of members that change: what a site that has left, one that joins, and a hub that cheats can do with them."""

import hub_kits
import pytest
from key_groups import Group, opened

from dadplug.errors import SealingError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure.sealing import Sealer, derive
from dadplug.hub.wire.messages import Head, Kind

SITES = "abcd"


@pytest.fixture(scope="module")
def kits(tmp_path_factory) -> list[Kit]:
    folder = hub_kits.make(tmp_path_factory.mktemp("epochs") / "kits", sites=list(SITES))
    return [Kit.load(folder / name) for name in SITES]


def altered(content: bytes, place: int, mask: int = 1) -> bytes:
    changed = bytearray(content)
    changed[place] ^= mask
    return bytes(changed)


def test_a_site_that_has_left_gets_no_key_even_if_it_pretends_to_know_of_the_change(kits):
    group = Group(kits, (0, 1, 2))
    left = group.leave(2)
    rekey, _ = group.seal(0, 1)
    left._seen.add(bytes(rekey.body[4:36]))  # the epoch of the others
    with pytest.raises(SealingError, match="shown other members"):
        left.open(rekey.head, rekey.body)


@pytest.mark.parametrize("rekeys", [False, True])
def test_a_site_that_joins_opens_nothing_that_came_before(kits, rekeys):
    group = Group(kits, (0, 1, 2))
    if rekeys:
        group.leave(1)
    before = group.seal(0, 4)
    group.join(3, 5)
    known = group.sites[3]._receptions[0].opener._chain
    assert known.step == 5
    assert known.key == group.sites[0]._sealer.chain.at(5).key
    with pytest.raises(SealingError):
        opened(group.sites[3], before)
    with pytest.raises(ValueError, match="a chain of keys at step 5 has none for step 4"):
        known.at(4)
    group.everyone_reads(5)


def test_a_site_that_joins_reads_the_open_step_from_its_beginning(kits):
    group = Group(kits, (0, 1, 2))
    first = group.seal(0, 5, b"first")
    group.leave(1)
    second = group.seal(0, 5, b"second")
    group.join(3, 5)
    assert opened(group.sites[3], first) == b"first"
    assert opened(group.sites[3], second) == b"second"


def test_frames_that_overtake_a_welcome_are_opened_after_it(kits):
    group = Group(kits, (0, 1))
    welcomes = group.ask(2, 3)
    assert opened(group.sites[2], group.seal(0, 3)) == b""
    ((_, content),) = group.sites[2].take(0, welcomes[0])
    assert content == b"gradient"


# A hub that cheats


def test_an_old_welcome_is_found_out(kits):
    group = Group(kits, (0, 1))
    old = group.ask(2, 3)
    group.leave(2)
    group.ask(2, 4)
    with pytest.raises(SealingError, match=r"site 0 \(a\): .* answers another offer"):
        group.sites[2].take(0, old[0])


@pytest.mark.parametrize("place", [0, 1, 60, 300, 4095, 4096, 4100, 4159, 4160, 4200, -1])
def test_a_welcome_that_was_altered_is_found_out(kits, place):
    group = Group(kits, (0, 1))
    welcome = group.ask(2, 3)[0]
    with pytest.raises(SealingError, match=r"site 0 \(a\)"):
        group.sites[2].take(0, altered(welcome, place))
    assert not group.sites[2].complete


def test_a_welcome_of_another_site_is_found_out(kits):
    group = Group(kits, (0, 1))
    welcomes = group.ask(2, 3)
    with pytest.raises(SealingError, match=r"site 0 \(a\): its offer is that of slot 1"):
        group.sites[2].take(0, welcomes[1])


@pytest.mark.parametrize("place", [1, 60, 300, -1])
def test_an_offer_that_was_altered_gets_no_keys(kits, place):
    group = Group(kits, (0, 1))
    offer = altered(group.fresh(2).offer(), place)
    site = group.sites[0]
    site.take(2, offer)
    site.join(2, 3)
    assert not site.posts
    ((slot, reason),) = site.refused
    assert slot == 2
    assert reason.startswith("no key can be agreed on with site 2 (c)")


def test_a_site_without_an_offer_gets_no_keys(kits):
    site = Group(kits, (0, 1)).sites[0]
    site.join(2, 3)
    assert not site.posts
    assert site.refused.pop() == (2, "it has not offered a key: its kit does not require sealed messages")


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (1, "altered, or repeated"),  # the number
        (20, "shown other members"),  # the epoch
        (36, "damaged"),  # the number of receivers
        (37, "shown other members"),  # the receiver
        (60, "altered, or repeated"),  # the key for it
    ],
)
def test_a_rekey_that_was_altered_is_found_out(kits, place, what):
    group = Group(kits, (0, 1, 2))
    group.leave(2)
    rekey, _ = group.seal(0, 2)
    with pytest.raises(SealingError, match=rf"site 0 \(a\): .*{what}"):
        group.sites[1].open(rekey.head, altered(rekey.body, place, 2 if place == 1 else 1))


def test_a_rekey_that_is_left_out_or_made_an_old_one_is_found_out_by_the_next_message(kits):
    group = Group(kits, (0, 1, 2))
    group.leave(2)
    rekey, frame = group.seal(0, 2)
    group.sites[1].open(rekey.head, altered(rekey.body, 1))  # its number is 0 now
    with pytest.raises(SealingError, match=r"site 0 \(a\): .* is not what it has sent at this place"):
        group.sites[1].open(frame.head, frame.body)


def test_an_old_rekey_changes_nothing(kits):
    group = Group(kits, (0, 1, 2, 3))
    group.leave(3)
    rekey, frame = group.seal(0, 2)
    assert opened(group.sites[1], [rekey, frame]) == b"gradient"
    group.leave(2)
    frames = group.seal(0, 3)
    assert opened(group.sites[1], [*frames[:1], rekey, *frames[1:]]) == b"gradient"


def test_a_hub_that_shows_two_members_different_sites_is_found_out(kits):
    group = Group(kits, (0, 1, 2))
    left = group.sites.pop(2)
    group.sites[0].leave(2)  # and not to site 1
    rekey, _ = group.seal(0, 2)
    for site in (group.sites[1], left):
        with pytest.raises(SealingError, match=r"site 0 \(a\): it has been shown other members than this site"):
            site.open(rekey.head, rekey.body)


def test_a_hub_that_shows_a_joiner_other_members_is_found_out(kits):
    group = Group(kits, (0, 1))
    joiner, other = group.fresh(2), group.sites[0]
    offer = joiner.offer()
    joiner.enter([0])  # without site 1
    other.take(2, offer)
    other.join(2, 3)
    with pytest.raises(SealingError, match=r"site 0 \(a\): it has been shown other members than this site"):
        joiner.take(0, other.posts.pop()[1])


def test_a_hub_that_gives_two_members_different_offers_of_a_joiner_is_found_out(kits):
    group = Group(kits, (0, 1))
    first, second = group.fresh(2), group.fresh(2)
    for joiner, member in ((first, 0), (second, 1)):
        group.sites[member].take(2, joiner.offer())
        group.sites[member].join(2, 3)
    first.enter([0, 1])
    first.take(0, group.sites[0].posts.pop()[1])
    with pytest.raises(SealingError, match=r"site 1 \(b\)"):
        first.take(1, group.sites[1].posts.pop()[1])


def test_a_message_that_a_hub_makes_up_for_a_stranger_is_found_out(kits):
    group = Group(kits, (0, 1))
    (frame,) = group.seal(0, 1)
    with pytest.raises(SealingError, match=r"site 3 \(d\) sends messages that are not sealed"):
        group.sites[1].open(frame.head._replace(slot=3), frame.body)


def test_the_vector_of_the_protocol_page():
    group = bytes(range(32))
    first = derive(group, "sender", 1)
    assert first.hex() == "c837f481108f4fdd802526f4de0bf13d65619a368944ee7f6f0846a25868ef47"
    sealer = Sealer(first, 1)
    frame = sealer.frame(Head(Kind.PAYLOAD, 1, step=3, exchange=5), b"gradient")
    assert sealer.chain.key.hex() == "ddde072a375375f7ee59556c2b7577259f853b5110a23e84b8c117d99afcbb0a"
    cipher = derive(sealer.chain.key, "pieces", 0)
    assert cipher.hex() == "c13a1e9bb66363f0e00673239321b220a49059d5c2426146cd810874dc44c533"
    assert frame[:32].hex() == "d9da020001000000050000000300000000000000000000000000000020000000"
    assert frame[32:].hex() == "0000000000000000f2dc87a64db38b2688c9e52fe3ec76060690a6acf0b68f65"
