"""The sites' agreement on secrets: who may take part, and what a hub cannot do without being found out."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import hub_kits
import pytest

from dadplug.errors import KitError, SealingError
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import Kit, current_time
from dadplug.hub.secure import key_agreement
from dadplug.hub.secure.key_agreement import OFFER_BYTES, Agreement
from dadplug.hub.wire.messages import Head, Kind

HEAD_BYTES = 32
SITES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hub_kits.make(tmp_path_factory.mktemp("sealing") / "kits", sites=SITES)


@pytest.fixture
def kits(folder):
    return load(folder)


def load(folder, sites=SITES) -> dict[int, Kit]:
    return {slot: Kit.load(folder / name) for slot, name in enumerate(sites)}


def relay(messages: dict[int, bytes], hub=None) -> dict[int, dict[int, bytes]]:
    """Return what each site receives of the others; a hub may change it."""
    received = {to: {slot: each for slot, each in messages.items() if slot != to} for to in messages}
    if hub is not None:
        hub(received)
    return received


def run(kits, hub=None, number=0):
    """Return the secrets of all sites by slot, or the error of each, for a hub that does something in a round."""
    sites = {slot: Agreement(kit) for slot, kit in kits.items()}
    messages = {slot: site.offer for slot, site in sites.items()}
    for each, name in enumerate(("share", "confirmation", "check")):
        received = relay(messages, hub if each == number else None)
        steps = {slot: partial(getattr(site, name), received[slot]) for slot, site in sites.items()}
        messages = {slot: hub_kits.attempt(step) for slot, step in steps.items()}
        if any(isinstance(message, Exception) for message in messages.values()):
            return messages
    return {slot: site.keys for slot, site in sites.items()}


def agree(sites) -> None:
    """Let sites agree over a hub that passes on what they send."""
    messages = {slot: site.offer for slot, site in sites.items()}
    for name in ("share", "confirmation", "check"):
        messages = {slot: getattr(site, name)(relay(messages)[slot]) for slot, site in sites.items()}


def blames_b(error) -> bool:
    return isinstance(error, SealingError) and "site 1 (b)" in str(error)


def test_all_sites_get_the_same_secret_and_every_pair_its_own(kits):
    results = run(kits)
    assert len({keys.group for keys in results.values()}) == 1
    pairs = {frozenset((slot, other)): keys.pairs[other] for slot, keys in results.items() for other in keys.pairs}
    assert len(pairs) == 3
    assert all(
        keys.pairs[other] == pairs[frozenset((slot, other))] for slot, keys in results.items() for other in keys.pairs
    )
    assert len({results[0].group, *pairs.values()}) == 4
    head = Head(Kind.PAYLOAD, 0, exchange=1)
    frame = results[0].sealer().frame(head, b"content")
    assert results[2].opener(0).open(Head.unpack(frame[:HEAD_BYTES]), frame[HEAD_BYTES:]) == b"content"


def test_one_site_and_two_sites_agree_too(tmp_path):
    for sites in (["a"], ["a", "b"]):
        results = run(load(hub_kits.make(tmp_path / str(len(sites)), sites=sites), sites))
        assert len({keys.group for keys in results.values()}) == 1


def test_every_run_has_its_own_secrets(kits):
    secrets = [run(kits)[0] for _ in range(3)]
    assert len({each.group for each in secrets} | {each.pairs[1] for each in secrets}) == 6


def test_secrets_do_not_rest_on_the_operating_system_s_random_numbers_alone(kits, monkeypatch):
    monkeypatch.setattr(key_agreement.os, "urandom", bytes)
    monkeypatch.setattr(key_agreement.time, "time_ns", lambda: 0)
    sites = [Agreement(kit) for kit in kits.values()]
    assert len({site.offer[18:82] for site in sites}) == 3  # differ by the kits' keys, which nobody else knows


def test_the_secret_depends_on_every_contribution(kits, monkeypatch):
    """The hub knows the contribution of one site, or of two; the group's secret is another one for each third."""
    groups = set()
    for contribution in (b"1" * 32, b"2" * 32):
        sites = {slot: Agreement(kit) for slot, kit in kits.items()}
        for site in sites.values():
            site._contribution = b"0" * 32
        sites[2]._contribution = contribution
        agree(sites)
        groups |= {site.keys.group for site in sites.values()}
    assert len(groups) == 2


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_change_of_any_byte_is_found_out_by_its_receiver(kits, number):
    lengths = (len(Agreement(kits[1]).offer.rstrip(b"\0")), 32 + 2 * 48 + 64, 32)
    positions = [*range(0, lengths[number], 1 + lengths[number] // 40), lengths[number] - 1]
    if number == 0:
        positions.append(OFFER_BYTES - 1)
    for position in positions:

        def hub(received, position=position):
            altered = bytearray(received[0][1])
            altered[position] ^= 1
            received[0][1] = bytes(altered)

        assert blames_b(run(kits, hub, number)[0]), f"byte {position} of message {number}"


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("attack", ["drop", "empty", "swap", "reflect", "cut"])
def test_a_message_dropped_exchanged_or_sent_back_is_found_out(kits, number, attack):
    def hub(received):
        if attack == "drop":
            del received[0][1]
        elif attack == "empty":
            received[0][1] = b""
        elif attack == "swap":
            received[0][1], received[0][2] = received[0][2], received[0][1]
        elif attack == "reflect":
            received[0][1] = received[1][0]
        else:
            received[0][1] = received[0][1][:-1]

    assert blames_b(run(kits, hub, number)[0])


def test_a_repeated_offer_is_found_out(kits):
    """The hub shows one site or all others an offer of an earlier run, whose key the real site does not have."""
    old = Agreement(kits[1]).offer
    for receivers in ([0], [0, 2]):

        def hub(received, receivers=receivers):
            for slot in receivers:
                received[slot][1] = old

        results = run(kits, hub)
        assert all(isinstance(each, SealingError) for each in results.values())
        assert "site 1 (b): it was shown other offers than this site" in str(results[0])


def test_a_whole_run_cannot_be_repeated_to_a_site(kits):
    record = []
    first = {slot: Agreement(kit) for slot, kit in kits.items()}
    messages = {slot: site.offer for slot, site in first.items()}
    for name in ("share", "confirmation"):
        record.append(messages)
        messages = {slot: getattr(site, name)(relay(messages)[slot]) for slot, site in first.items()}
    again = Agreement(kits[0])
    again.share(relay(record[0])[0])
    with pytest.raises(SealingError, match=r"site 1 \(b\): it was shown other offers"):
        again.confirmation(relay(record[1])[0])


def test_a_hub_that_makes_offers_of_its_own_is_found_out(kits):
    """The hub takes the place of a site: it has the certificate, which is public, but not its key."""
    forged = Agreement(kits[1])
    forged._key = forged._checks.key = provision.new_key()
    offer = forged._checks.make()[1]

    def hub(received):
        received[0][1] = offer

    assert "the signature of its offer is not its own" in str(run(kits, hub)[0])


def test_a_site_of_another_authority_is_refused(kits, tmp_path):
    others = load(hub_kits.make(tmp_path / "others", sites=SITES))
    result = run({0: kits[0], 1: others[1], 2: kits[2]})
    assert "site 1 (b): its certificate is signed by another authority" in str(result[0])
    assert "its certificate is signed by another authority" in str(result[1])


def test_a_certificate_of_another_site_is_refused(kits):
    """Site c, a member, takes the place of b."""
    offer = Agreement(replace(kits[2], name="b"))
    assert offer._kit.slot == 1

    def hub(received):
        received[0][1] = offer.offer

    assert "site 1 (b): its certificate is that of c" in str(run(kits, hub)[0])


def test_the_certificate_of_a_hub_is_refused(kits, folder):
    agreement = Agreement(replace(kits[1], certificate=Kit.load(folder / "hub").certificate))
    with pytest.raises(SealingError, match="its certificate is that of hub"):
        Agreement(kits[0]).share({1: agreement.offer, 2: Agreement(kits[2]).offer})


def test_a_revoked_site_is_refused_by_sites_that_know(tmp_path):
    folder = hub_kits.make(tmp_path / "kits", sites=SITES)
    provision.revoke(folder, "b")
    revoked = (folder / "hub" / "revoked.pem").read_bytes()
    (folder / "a" / "revoked.pem").write_bytes(revoked)
    assert "site 1 (b): its certificate has been revoked" in str(run(load(folder))[0])
    (folder / "b" / "revoked.pem").write_bytes(revoked)
    with pytest.raises(KitError, match="has been revoked"):
        Agreement(Kit.load(folder / "b"))


def test_certificates_count_between_their_dates_only(tmp_path):
    folder = hub_kits.make(tmp_path / "kits", sites=SITES)
    provision.renew(folder, "b", days=5)
    later = current_time() + timedelta(days=10)
    kits = load(folder)
    with pytest.raises(KitError, match="is valid from"):
        Agreement(kits[1], now=later)
    site = Agreement(kits[0], now=later)
    with pytest.raises(SealingError, match=r"site 1 \(b\): its certificate is valid from"):
        site.share({1: Agreement(kits[1]).offer, 2: Agreement(kits[2]).offer})


def test_different_rosters_are_found_out(kits):
    roster = replace(kits[1].roster, sites=("a", "b", "d"))
    result = run({0: kits[0], 1: replace(kits[1], roster=roster), 2: kits[2]})
    assert "site 1 (b): the rosters of its kit and of this site's kit differ" in str(result[0])


def test_a_part_of_the_sites_can_agree(kits):
    sites = {slot: Agreement(kits[slot], slots=(0, 2)) for slot in (0, 2)}
    agree(sites)
    assert sites[0].keys.group == sites[2].keys.group
    assert set(sites[0].keys.pairs) == {2}


def test_sites_that_expect_different_participants_do_not_agree(kits):
    two, three = Agreement(kits[0], slots=(0, 2)), Agreement(kits[2])
    offers = {0: two.offer, 1: Agreement(kits[1]).offer, 2: three.offer}
    two.share(offers)
    with pytest.raises(SealingError, match=r"site 2 \(c\)"):
        two.confirmation({2: three.share(offers)})
