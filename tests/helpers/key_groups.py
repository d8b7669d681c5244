"""Sites of one run as `dadplug.hub.secure.epochs` has them, without a network."""

from frame_parts import Frame, read

from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure.epochs import Epochs
from dadplug.hub.secure.key_agreement import Agreement, Offers
from dadplug.hub.wire.messages import Head, Kind


class Group:
    """Sites of one run, with a hub that passes on what they send unless a test does something else.

    Args:
        kits: kits of all sites of the roster.
        slots: slots of those that start together.
    """

    def __init__(self, kits: list[Kit], slots: tuple[int, ...]) -> None:
        self.kits = kits
        self.sites: dict[int, Epochs] = {}
        agreements = {slot: Agreement(kits[slot], slots) for slot in slots}
        messages = {slot: each.offer for slot, each in agreements.items()}
        for name in ("share", "confirmation"):
            messages = {slot: getattr(each, name)(messages) for slot, each in agreements.items()}
        for slot, agreement in agreements.items():
            agreement.check(messages)
            self.sites[slot] = self.fresh(slot)
            self.sites[slot].begin(agreement)

    def fresh(self, slot: int) -> Epochs:
        """Return a site without keys."""
        return Epochs(Offers(self.kits[slot]), slot)

    def leave(self, slot: int) -> Epochs:
        """Announce that a site has left, and return it."""
        left = self.sites.pop(slot)
        for site in self.sites.values():
            site.leave(slot)
        return left

    def ask(self, slot: int, step: int) -> dict[int, bytes]:
        """Let a site join, and return the welcomes of the members, which it has not got yet."""
        joiner = self.fresh(slot)
        offer = joiner.offer()
        joiner.enter(list(self.sites))
        for site in self.sites.values():
            site.take(slot, offer)
            site.join(slot, step)
        welcomes = {}
        for other, site in self.sites.items():
            ((receiver, welcomes[other]),) = site.posts
            site.posts.clear()
            assert receiver == slot
        self.sites[slot] = joiner
        return welcomes

    def join(self, slot: int, step: int) -> None:
        """Let a site join."""
        for other, welcome in self.ask(slot, step).items():
            self.sites[slot].take(other, welcome)
        assert self.sites[slot].complete

    def seal(self, slot: int, step: int, content: bytes = b"gradient") -> list[Frame]:
        """Return the frames of a message of one site to all."""
        return read(*self.sites[slot].frames(Head(Kind.PAYLOAD, slot, step=step), memoryview(content)))

    def everyone_reads(self, step: int) -> None:
        """Check that all sites open the messages of all others."""
        for slot in self.sites:
            frames = self.seal(slot, step)
            for other, site in self.sites.items():
                assert other == slot or opened(site, frames) == b"gradient"


def opened(site: Epochs, frames: list[Frame]) -> bytes:
    """Return the content that a site finds in frames."""
    return b"".join(content for head, body in frames for _, content in site.open(head, body))
