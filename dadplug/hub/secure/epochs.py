"""Keys of the members of a run, which change with them, and the sealing of a link by them.

`Epochs` is the state machine of one site, without input and output. Each sender has a chain of keys of its own (Sender
Keys, as in group messengers), which it gives to every other member over a secret of the pair.

- **A site leaves.** Each sender draws a new chain before it sends anything further, and sends a *rekey*: the new key,
  wrapped for each member that is left. Nobody waits for that.
- **A site joins.** It sends an offer, as in `dadplug.hub.secure.key_agreement`. Each member answers with a *welcome*:
  an offer of its own, and under the secret of the pair the key of its chain in the open round, from which no earlier
  one follows. Then the donor's state is sealed for the pair. The site's own chain is in its first rekey.

An *epoch* is a set of members with their offers. Every rekey names its sender's epoch, and every welcome lists it: a
hub that shows sites different members is found out.

`LinkSealing` is the sealing of one link: the keys of the run at a site, what of its frames is sealed, and the kit.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Meta
from msgspec.msgpack import Decoder, encode

from ...errors import SealingError
from ...support.logs import get_logger
from ...support.structs import Count, Slot, decode
from ..pki.kits import Kit, KitWatch
from ..wire.messages import Exclude, Head, KeyMessage, Kind, frames
from .key_agreement import CONFIRMATION_BYTES, OFFER_BYTES, SIGNATURE, Agreement, Offers, random_secret, sign, verify
from .sealing import SECRET_BYTES, ChainKey, Keys, Opener, Sealer, derive, extract, opened_offset

AGREEMENT = 0xFF << 24  # exchanges of the agreement itself, in a channel that nothing else uses
REKEY = AGREEMENT | 3  # after the three of the agreement at the start
OFFER, WELCOME = b"O", b"W"  # first bytes of messages between one site and others
_DIGEST = 32
_WRAPPED = SECRET_BYTES + 8 + 16  # a key, its step and a tag
_EARLY_LIMIT = 1 << 30  # bytes of frames that wait for their sender's welcome
DIGEST_BYTES = 16  # of the rounds so far, see `dadplug.hub.site.history`
_KEY = struct.Struct(">Q32s")  # step, or number of a rekey, and key
_MEMBER = struct.Struct(">H32s")  # slot, digest of the offer
_Digest = Annotated[bytes, Meta(min_length=_DIGEST, max_length=_DIGEST)]
_Wrapped = Annotated[bytes, Meta(min_length=_WRAPPED, max_length=_WRAPPED)]
_REKEYS = Decoder(tuple[Count, _Digest, dict[Slot, _Wrapped]])  # number, digest of the epoch, the key for each receiver
_WELCOMES = Decoder(tuple[Count, dict[Slot, _Digest], dict[Count, _Digest]])  # step, members, keys by their rekeys

Frame = tuple[Head, bytes]


class Pair:
    """Secrets of this site and one other.

    Args:
        root: uniform secret of the pair.
        own: slot of this site.
        other: slot of the other site.
        name: name of the other site.

    Attributes:
        sealer: seals states for the other site.
        opener: opens those of the other site.
    """

    def __init__(self, root: bytes, own: int, other: int, name: str) -> None:
        self._out = ChainKey(0, derive(root, "wrap", own))
        self._in = ChainKey(0, derive(root, "wrap", other))
        self.sealer = Sealer(derive(root, "state", own), own)
        self.opener = Opener(derive(root, "state", other), other, name)

    def wrap(self, number: int, content: bytes, context: bytes) -> bytes:
        """Encrypt what the other site gets in a rekey; each number may be used once."""
        chain = self._out.at(number)
        self._out = chain.at(number + 1)
        return AESGCM(derive(chain.key, "key")).encrypt(bytes(12), content, context)

    def unwrap(self, number: int, content: bytes, context: bytes) -> bytes:
        """Decrypt it; raises InvalidTag or ValueError if it is anything else."""
        chain = self._in.at(number)
        found = AESGCM(derive(chain.key, "key")).decrypt(bytes(12), content, context)
        self._in = chain.at(number + 1)
        return found


@dataclass
class Reception:
    """Chains of one sender.

    Attributes:
        number: number of the rekey that the present chain is from.
        opener: opens its frames; None before the first rekey of a site that has joined.
        known: keys of later chains, by number.
    """

    number: int = 0
    opener: Opener | None = None
    known: dict[int, ChainKey] = field(default_factory=dict, repr=False)


class Epochs:
    """Keys of one site. All methods are to be called in the order of the hub's announcements.

    Args:
        offers: makes and checks offers.
        slot: slot of this site.

    Attributes:
        members: digests of the offers of all members, by slot; empty before the first welcome.
        posts: messages that are to be sent: the receiver and the content.
        refused: sites whose offers this site has refused, and why, which are to be told to the hub.
        serials: serial numbers of the certificates of the other members, by slot.
    """

    def __init__(self, offers: Offers, slot: int) -> None:
        self._offers, self._slot = offers, slot
        self.posts: deque[tuple[int, bytes]] = deque()
        self.refused: deque[tuple[int, str]] = deque()
        self._offered: dict[int, bytes] = {}
        self._number = 0  # of this site's last rekey
        self._forget()

    def _forget(self) -> None:
        self.members: dict[int, bytes] = {}
        self._seen: set[bytes] = set()  # digests of all epochs so far
        self._pairs: dict[int, Pair] = {}
        self.serials: dict[int, int] = {}
        self._receptions: dict[int, Reception] = {}
        self._early: defaultdict[int, list[tuple[Head, bytes]]] = defaultdict(list)
        self._early_bytes = 0
        self._lacking: set[int] = set()  # members whose welcome has not arrived
        self._expected: frozenset[int] = frozenset()  # members when this site joined
        self._base: dict[int, bytes] = {}  # the same with digests, as the welcomes say
        self._later: list[tuple[int, int, bytes | None]] = []  # that joined or left before the first welcome
        self._listens = False  # whether this site's own Join has not been announced
        self._sealer: Sealer | None = None
        self._stale = True  # whether a member has left since the chain was drawn
        self._earlier: list[tuple[int, ChainKey]] = []  # chains before it, in the step in which they ended
        self._rekey = b""  # the last one, until all members have it
        self._rekeyed_in = self._sent_in = -1  # steps

    # The start of a run, with all sites

    def begin(self, agreement: Agreement) -> None:
        """Take the secrets that all sites have agreed on.

        Args:
            agreement: the agreement, complete but for the check of confirmations.
        """
        keys = agreement.keys
        self._forget()
        self._sealer, self._stale = keys.sealer(), False
        self.serials = agreement.serials
        for slot, root in keys.pairs.items():
            self._pairs[slot] = Pair(root, self._slot, slot, self._offers.names[slot])
            self._receptions[slot] = Reception(opener=keys.opener(slot))
        self._set_members(dict(agreement.identities))

    def _set_members(self, members: dict[int, bytes]) -> None:
        self.members = members
        self._seen.add(digest_of(members))

    def replace_kit(self, kit: Kit) -> None:
        """Check further offers by a kit that has been read again."""
        self._offers = Offers(kit, self._offers.names)

    # This site joins

    def offer(self) -> bytes:
        """Forget all keys, and return the message that asks the members for theirs."""
        self._forget()
        self._listens = True
        self._private, self._own = self._offers.make()
        return OFFER + self._own

    def enter(self, members: Sequence[int]) -> None:
        """Take the announcement that this site joins.

        Args:
            members: slots of the other members.
        """
        self._listens = False
        self._lacking = set(members)
        self._expected = frozenset(members)

    @property
    def complete(self) -> bool:
        """Whether this site has the keys of all members."""
        return not self._listens and not self._lacking

    # Messages between this site and one other

    def take(self, slot: int, content: bytes) -> list[Frame]:
        """Take a message, and return the frames that can be opened now.

        Args:
            slot: its sender.
            content: the message.

        Raises:
            SealingError: if it is damaged, or its sender knows other members.
        """
        kind, content = content[:1], bytes(content[1:])
        if kind == OFFER:
            self._offered[slot] = content
            return []
        if kind != WELCOME:
            raise self._offers.error(slot, "a message about keys is damaged")
        return self._take_welcome(slot, content) if slot in self._lacking else []

    def _take_welcome(self, slot: int, content: bytes) -> list[Frame]:
        answered, content = content[:_DIGEST], content[_DIGEST:]
        offer, signature = content[:OFFER_BYTES], content[OFFER_BYTES : OFFER_BYTES + SIGNATURE]
        sealed = content[OFFER_BYTES + SIGNATURE :]
        certificate, public = self._offers.check(slot, offer)
        transcript = _transcript(self._own, offer)
        known = answered == hashlib.sha256(self._own).digest()
        if not known or not verify(certificate, b"welcome" + transcript + sealed, signature):
            raise self._offers.error(slot, "the signature of its welcome is not its own, or answers another offer")
        root = extract(self._offers.secret(slot, self._private, public), transcript, "join", self._slot, slot)
        try:
            plain = AESGCM(derive(root, "welcome")).decrypt(bytes(12), sealed, transcript)
            step, members, chains = decode(_WELCOMES, plain, "welcome", ValueError)
        except (InvalidTag, ValueError):
            raise self._offers.error(slot, "its welcome was altered") from None
        own = members.get(self._slot) == hashlib.sha256(self._own).digest()
        self._base = self._base or members
        if not own or members.keys() - {self._slot} != self._expected or members != self._base:
            # A member has to know the members that the hub has announced, and that others know.
            raise self._offers.error(slot, "it has been shown other members than this site")
        self.serials[slot] = certificate.serial_number
        self._pairs[slot] = Pair(root, self._slot, slot, self._offers.names[slot])
        self._receptions[slot] = self._make_reception(slot, step, chains)
        self._lacking.discard(slot)
        if not self.members:
            self._set_members(dict(members))
            later, self._later = self._later, []
            for other, joined_in, offered in later:
                if offered is None:
                    self.leave(other)
                else:
                    self._welcome(other, joined_in, offered)
        early = self._early.pop(slot, [])
        self._early_bytes -= sum(len(body) for _, body in early)
        return [frame for head, body in early for frame in self.open(head, body)]

    def _make_reception(self, slot: int, step: int, chains: dict[int, bytes]) -> Reception:
        known = {number: ChainKey(step, key) for number, key in sorted(chains.items())}
        if not known:
            return Reception()
        first = min(known)
        return Reception(first, self._opener(slot, known.pop(first)), known)

    def _opener(self, slot: int, chain: ChainKey) -> Opener:
        return Opener(chain.key, slot, self._offers.names[slot], chain.step)

    # Others join and leave

    def join(self, slot: int, step: int) -> None:
        """Take the announcement that another site joins, and welcome it if its offer is valid.

        Args:
            slot: the site.
            step: the open step, of which it is sent all frames.
        """
        if self._listens or not (self.members or self._expected):
            return  # it joined before this site, which it welcomes, or both start together
        offer = self._offered.pop(slot, None)
        if offer is None:
            if slot not in self.members and slot not in self._expected:
                self.refused.append((slot, "it has not offered a key: its kit does not require sealed messages"))
        elif not self.members:
            self._later.append((slot, step, offer))
        else:
            self._welcome(slot, step, offer)

    def _welcome(self, slot: int, step: int, offer: bytes) -> None:
        self._set_members({**self.members, slot: hashlib.sha256(offer).digest()})
        try:
            certificate, public = self._offers.check(slot, offer)
            private, own = self._offers.make()
            secret = self._offers.secret(slot, private, public)
            chains = self._chains_at(step)
        except (SealingError, ValueError) as error:
            self.refused.append((slot, str(error)))  # it gets no keys, and does not complete its return
            return
        transcript = _transcript(offer, own)
        root = extract(secret, transcript, "join", slot, self._slot)
        plain = encode((step, self.members, chains))
        sealed = AESGCM(derive(root, "welcome")).encrypt(bytes(12), plain, transcript)
        signature = sign(self._offers.key, b"welcome" + transcript + sealed)
        self.serials[slot] = certificate.serial_number
        self._pairs[slot] = Pair(root, self._slot, slot, self._offers.names[slot])
        self._receptions[slot] = Reception()
        self.posts.append((slot, WELCOME + self.members[slot] + own + signature + sealed))

    def _chains_at(self, step: int) -> dict[int, bytes]:
        """Return the keys by which this site seals its messages of the open step, by number of their rekey."""
        found = {number: chain.key for number, chain in self._earlier if chain.step == step}
        if self._sealer is not None:
            found[self._number] = self._sealer.chain.at(step).key
        return found

    def leave(self, slot: int) -> None:
        """Take the announcement that a site has left: it gets no key any more.

        Args:
            slot: the site.
        """
        self._offered.pop(slot, None)
        self._early_bytes -= sum(len(body) for _, body in self._early.pop(slot, []))
        self._lacking.discard(slot)
        for found in (self._pairs, self.serials, self._receptions):
            found.pop(slot, None)
        if not self.members:
            self._later.append((slot, 0, None))
        elif slot in self.members:
            self._set_members({other: each for other, each in self.members.items() if other != slot})
            self._stale = True

    # Frames

    def frames(self, head: Head, content: memoryview) -> Iterator[bytes]:
        """Seal a message, after a rekey if the members have changed.

        Args:
            head: head of the frames.
            content: the message, of bytes.

        Yields:
            The frames, which have to be sent in this order.

        Raises:
            SealingError: if a state is for a site that is no member.
            RuntimeError: if this site has no keys yet.
        """
        if head.kind is Kind.STATE:
            pair = self._pairs.get(head.slot)
            if pair is None:
                raise self._offers.error(head.slot, "it is no member")
            yield from pair.sealer.frames(head, content)
            return
        if not self.members:
            raise RuntimeError("this site has no keys yet: its messages cannot be sealed")
        if self._stale:
            self._draw_chain(head.step)
        if self._rekey and self._sent_in != head.step:
            self._sent_in = head.step
            yield head._replace(exchange=REKEY, offset=0, tag=0, to=0, length=len(self._rekey)).pack() + self._rekey
        assert self._sealer is not None
        yield from self._sealer.frames(head, content)

    def _draw_chain(self, step: int) -> None:
        """Draw a new chain, and make its rekey for all members."""
        self._earlier = [(number, chain) for number, chain in self._earlier if chain.step == step]
        if self._sealer is not None and self._sealer.chain.step == step:
            self._earlier.append((self._number, self._sealer.chain))
        self._number += 1
        key = random_secret(self._offers.key)
        self._sealer, self._stale = Sealer(key, self._slot, step), False
        epoch = digest_of(self.members)
        context, plain = _context(self._slot, self._number, epoch), _KEY.pack(step, key)
        wrapped = {slot: pair.wrap(self._number, plain, context) for slot, pair in self._pairs.items()}
        self._rekey = encode((self._number, epoch, wrapped))
        self._rekeyed_in, self._sent_in = step, -1

    def confirm(self, step: int, contributors: Sequence[int]) -> None:
        """Take the close of a round: its contributors' messages have reached all members.

        Args:
            step: the step of the round.
            contributors: slots of the sites that have taken part in it.
        """
        if self._slot in contributors and self._rekeyed_in <= self._sent_in <= step:
            self._rekey = b""

    def open(self, head: Head, body: bytes | memoryview) -> list[Frame]:
        """Open a frame, and return what it holds; nothing for a rekey, or before the sender's welcome has arrived.

        Args:
            head: its head, with the sender's slot.
            body: its body; empty for a frame that only another site gets.

        Raises:
            SealingError: if it is not what its sender has sent, or the sender is no member.
        """
        slot = head.slot
        if self._listens or slot in self._lacking:
            self._early[slot].append((head, bytes(body)))
            self._early_bytes += len(body)
            if self._early_bytes > _EARLY_LIMIT:
                raise self._offers.error(slot, f"it has sent {self._early_bytes >> 20} MB before its welcome")
            return []
        if head.kind is Kind.STATE and (pair := self._pairs.get(slot)) is not None:
            return [(head, pair.opener.open(head, body))]
        reception = self._receptions.get(slot)
        if reception is not None and head.exchange == REKEY:
            self._take_rekey(slot, reception, bytes(body))
            return []
        if reception is None or reception.opener is None:
            raise SealingError(
                f"site {slot} ({self._offers.names[slot]}) sends messages that are not sealed, which this site's "
                "kit requires: copy the same roster.json to all kits. If they agree, the hub has made up the message"
            )
        if head.to and not len(body):
            reception.opener.skip(head)
            return []
        return [(head, reception.opener.open(head, body))]

    def _take_rekey(self, slot: int, reception: Reception, body: bytes) -> None:
        number, epoch, receivers = decode(_REKEYS, body, "rekey", lambda what: self._offers.error(slot, what))
        if number <= reception.number:
            return  # it is sent again until all have it
        if (chain := reception.known.pop(number, None)) is None:
            chain = self._unwrapped(slot, number, epoch, receivers)
        reception.number, reception.opener = number, self._opener(slot, chain)

    def _unwrapped(self, slot: int, number: int, epoch: bytes, receivers: dict[int, bytes]) -> ChainKey:
        """Return the chain that another site gives to this one."""
        if epoch not in self._seen or self._slot not in receivers:
            raise self._offers.error(slot, "it has been shown other members than this site")
        context = _context(slot, number, epoch)
        try:
            step, key = _KEY.unpack(self._pairs[slot].unwrap(number, receivers[self._slot], context))
        except (InvalidTag, ValueError):
            raise self._offers.error(slot, "its rekey was altered, or repeated") from None
        return ChainKey(step, key)


def answers(content: bytes, offer: bytes) -> bool:
    """Return whether a message about keys is a welcome that answers an offer, as far as it says itself.

    Args:
        content: the message.
        offer: the message with the offer, of a site that may have left and joined anew since the answer was sent.
    """
    return content[: 1 + _DIGEST] == WELCOME + hashlib.sha256(offer[1:]).digest()


def digest_of(members: Mapping[int, bytes]) -> bytes:
    """Return the digest of an epoch."""
    return hashlib.sha256(b"epoch" + b"".join(_MEMBER.pack(*each) for each in sorted(members.items()))).digest()


def _transcript(joiner: bytes, member: bytes) -> bytes:
    """Return the digest of the two offers of a pair; each names its slot."""
    return hashlib.sha256(b"join" + joiner + member).digest()


def _context(slot: int, number: int, epoch: bytes) -> bytes:
    return b"rekey" + struct.pack(">HQ", slot, number) + epoch


_log = get_logger(__name__)
_EXCLUDE_SECONDS = 10.0  # for the hub to end a site whose certificate has been revoked

Swap = Callable[[int, bytes, int], Mapping[int, bytes]]


class LinkSealing:
    """Sealing of one link. It is in use where the kit's roster requires it.

    Args:
        kit: kit of this site.
        names: names of the sites by slot, to which those of further sites are appended.

    Attributes:
        required: whether messages have to be sealed.
        keys: the secrets of sites that have started together, once they have agreed on them.
        complete: whether this site has the keys of all members.
    """

    def __init__(self, kit: Kit, names: Sequence[str]) -> None:
        self.required = kit.roster.sealed
        self.keys: Keys | None = None
        self._kit, self._names = kit, names
        self._known = len(names)
        self._epochs = Epochs(Offers(kit, names), kit.slot)  # without members where nothing is sealed
        self._watch = KitWatch(kit)
        self._excluded: dict[int, float] = {}  # when the hub was told, by slot

    @property
    def complete(self) -> bool:
        return self._epochs.complete

    @property
    def has_keys(self) -> bool:
        """Whether this site can send to all others."""
        return not self.required or bool(self._epochs.members)

    @property
    def first_digest(self) -> bytes:
        """Beginning of the digest of rounds at all sites that start together; unknown to the hub if sealed."""
        return (derive(self.keys.group, "rounds") if self.keys is not None else bytes(DIGEST_BYTES))[:DIGEST_BYTES]

    def negotiate(self, kit: Kit, slots: Sequence[int], swap: Swap) -> None:
        """Agree on keys with the other sites with which a run starts.

        Args:
            kit: kit of this site.
            slots: slots of all of them, this one included.
            swap: function of the number of an exchange, this site's message and the size of each of the others', which
                sends it to all others and returns theirs by slot.

        Raises:
            KitError: if this site's certificate is not valid.
            SealingError: if a message of another site was altered, or the site may not take part.
        """
        agreement = Agreement(kit, slots)
        offers = swap(AGREEMENT, agreement.offer, OFFER_BYTES)
        shares = swap(AGREEMENT | 1, agreement.share(offers), agreement.share_bytes)
        confirmation = agreement.confirmation(shares)
        # A site that has all confirmations may send before this one has them, but not before it has this one's.
        self._epochs.begin(agreement)
        agreement.check(swap(AGREEMENT | 2, confirmation, CONFIRMATION_BYTES))
        self.keys = agreement.keys

    # Members that change

    def offer(self) -> KeyMessage | None:
        """Return the message by which this site asks the members for keys, to join; None where nothing is sealed."""
        if not self.required:
            return None
        self.keys = None
        return KeyMessage(self._kit.slot, self._epochs.offer())

    def enter(self, members: Sequence[int]) -> None:
        """Take the announcement that this site joins some others."""
        if self.required:
            self._epochs.enter(members)

    def join(self, slot: int, step: int) -> list[KeyMessage | Exclude]:
        """Take the announcement that another site joins in a step, and return what is to be sent for that."""
        self._epochs.join(slot, step)
        return self._due()

    def leave(self, slot: int) -> None:
        """Take the announcement that a site has left."""
        self._excluded.pop(slot, None)
        if self.required:
            self._epochs.leave(slot)

    def close(self, step: int, contributors: Sequence[int]) -> None:
        """Take the announcement that a round is closed."""
        self._epochs.confirm(step, contributors)

    def take(self, message: KeyMessage) -> tuple[list[Frame], list[KeyMessage | Exclude]]:
        """Take a message of another site about keys; return frames that can be opened now, and what is to be sent.

        Raises:
            SealingError: if it is not what the site has sent, or this site's kit does not require sealed messages.
        """
        if not self.required:
            raise SealingError(self._differs(message.slot))
        return [_opened(*each) for each in self._epochs.take(message.slot, message.content)], self._due()

    def _due(self) -> list[KeyMessage | Exclude]:
        posts, refused = self._epochs.posts, self._epochs.refused
        due: list[KeyMessage | Exclude] = [KeyMessage(*posts.popleft()) for _ in range(len(posts))]
        for slot, reason in [refused.popleft() for _ in range(len(refused))]:
            _log.warning("site %d (%s) is refused: %s", slot, self._names[slot], reason)
            due.append(Exclude(slot, reason))
        return due

    def check_kit(self, elastic: bool = False) -> list[Exclude]:
        """Read this site's kit again if it has changed: sites do not rely on the hub to tell them of revocations.

        Args:
            elastic: whether the run goes on without a site that leaves.

        Returns:
            What the hub has to be told: which sites it has to end.

        Raises:
            SealingError: if the certificate of another site has been revoked, and the run needs that site, or the hub
                keeps it.
        """
        if not self._epochs.members:
            return []
        for slot, since in self._excluded.items():
            if time.monotonic() > since + _EXCLUDE_SECONDS:
                raise self._revoked(slot)
        change = self._watch.changed()
        if change is None:
            return []
        kit, problems = change
        for problem in problems:
            _log.warning("the kit has changed, and a part of it is not used: %s", problem)
        if (new := kit.roster.sites[self._known :]) and not elastic:
            _log.warning("the roster has new sites, which take part in the next run: %s", ", ".join(new))
        self._epochs.replace_kit(kit)
        due = []
        for slot, serial in self._epochs.serials.items():
            if serial in kit.revoked and slot not in self._excluded:
                if not elastic:
                    raise self._revoked(slot)
                self._excluded[slot] = time.monotonic()
                due.append(Exclude(slot, "its certificate has been revoked"))
        return due

    def _revoked(self, slot: int) -> SealingError:
        return SealingError(f"site {slot} ({self._names[slot]}): its certificate has been revoked")

    # Frames

    def covers(self, head: Head) -> bool:
        """Return whether a frame is sealed, or holds keys, so that `open` takes it.

        Args:
            head: its head.

        Raises:
            SealingError: if another site requires it, and this one's kit does not.
        """
        if head.exchange < AGREEMENT:
            return self.required
        if not self.required:
            raise SealingError(self._differs(head.slot))
        return head.exchange == REKEY

    def _differs(self, slot: int) -> str:
        return (
            f"site {slot} ({self._names[slot]}) has a kit that requires sealed messages, and this site's "
            "kit does not: copy the same roster.json to all kits"
        )

    def frames(self, head: Head, content: memoryview) -> Iterator[bytes]:
        """Seal a message, unless it is one of the agreement, and cut it into frames.

        Args:
            head: head of the frames.
            content: the message, of bytes.

        Yields:
            The frames, which have to be sent in this order, before those of other messages.

        Raises:
            RuntimeError: if it cannot be sealed, since it is of a kind that the hub has to read.
        """
        if not self.covers(head):
            yield from map(b"".join, frames(head, content))
        elif head.kind not in (Kind.PAYLOAD, Kind.STATE):
            raise RuntimeError(f"a {head.kind.name} message cannot be sealed, which this site's kit requires")
        else:
            yield from self._epochs.frames(head, content)

    def open(self, head: Head, body: memoryview) -> list[Frame]:
        """Open a frame that has arrived.

        Args:
            head: its head.
            body: its body.

        Returns:
            Head and body as they were before the message was sealed. None of a frame that holds keys, or whose keys
            have not arrived: `take` returns it then.

        Raises:
            SealingError: if it is not what its site has sent.
        """
        return [_opened(*each) for each in self._epochs.open(head, body)]


def _opened(head: Head, content: bytes) -> Frame:
    return head._replace(offset=opened_offset(head.offset), length=len(content)), content
