"""The key that signs releases (docs/adr/0048-a-fleet-upgrades-itself.md).

The first controller makes it, in the secrets of the cluster. It can be replaced by one that is kept elsewhere: then the
controllers have its public half only. Each key is signed by the one before it, so workers follow.
"""

from __future__ import annotations

from corral.contract.codec import Undecodable, decode, encode
from corral.contract.releases import KEY_DOMAIN, RELEASE_DOMAIN, ReleaseKeyChange, ReleaseOrder
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, Invalid
from corral.kit.log import get_log
from corral.kit.signing import BadSignature, Signer, Verifier
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import cluster_secrets, release_keys
from corral.store.tables.release_keys import ReleaseKey

log = get_log(__name__)

COUNTER = "releases"
_SECRET = "release_key"
_EVERY_S = 30.0


class ReleaseKeys:
    name = "release keys"

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.wake = Wake()
        self.public_key = ""
        self.changes: tuple[str, ...] = ()  # oldest first; they lead to `public_key`

    async def open(self) -> None:
        """Make the first key, unless there is one."""
        async with self._store.write() as tx:
            if not await release_keys.list_(tx):
                signer = Signer(await cluster_secrets.get_or_create(tx, _SECRET, Signer.new_private_key))
                first = ReleaseKey(number=1, public_key=signer.public_key, proof="", created_at=await tx.now())
                await release_keys.add(tx, first)
        await self.refresh()

    async def run(self) -> None:
        await run_every(self.name, _EVERY_S, self.refresh, clock=self._clock, wake=self.wake)

    async def refresh(self) -> None:
        async with self._store.read() as tx:
            self._learn(await release_keys.list_(tx))

    def _learn(self, keys: list[ReleaseKey]) -> None:
        self.public_key = keys[-1].public_key
        self.changes = tuple(key.proof for key in keys if key.proof)

    async def is_held(self, tx: Transaction) -> bool:
        return await self._signer(tx) is not None

    async def sign(self, tx: Transaction, order: ReleaseOrder) -> str:
        """Raises Invalid if the key is kept elsewhere."""
        signer = await self._signer(tx)
        if signer is None:
            raise Invalid(
                f"the release key is not on the controllers: sign the wheel where it is, with `corral fleet "
                f"release-sign --counter {order.counter}`, and give the file with --signature"
            )
        return signer.sign(encode(order), domain=RELEASE_DOMAIN)

    async def verify(self, tx: Transaction, signed: str) -> ReleaseOrder:
        """The order, if the current key has signed it. Raises Invalid."""
        key = (await release_keys.list_(tx))[-1].public_key
        try:
            return decode(ReleaseOrder, Verifier(key).verify(signed, domain=RELEASE_DOMAIN))
        except (BadSignature, Undecodable) as error:
            raise Invalid(f"the signature is not of the release key of this fleet ({key})") from error

    async def change(self, public_key: str, proof: str, *, is_lost: bool, by: str) -> None:
        """Another key signs from now on; the private half of the one before is removed. `public_key` empty: a new one,
        which the controllers keep. `is_lost`: the present one cannot sign any more, so no worker follows by itself.
        Raises Invalid."""
        private = "" if public_key else Signer.new_private_key()
        public_key = public_key or Signer(private).public_key
        try:
            Verifier(public_key)
        except BadSignature as error:
            raise Invalid(f"{public_key[:100]!r} is no public key: `corral fleet release-keygen` prints one") from error
        async with self._store.write() as tx:
            keys = await release_keys.list_(tx)
            last = keys[-1]
            if public_key in (key.public_key for key in keys):
                raise Conflict("this key signs already, or has done so before: make a new one")
            expected = ReleaseKeyChange(previous=last.public_key, next=public_key)
            if not proof:
                signer = await self._signer(tx)
                if signer is None and not is_lost:
                    raise Invalid(
                        "the present key is not on the controllers: sign the new one where it is, with `corral fleet "
                        "release-sign-key`, and give the file with --proof; if the key is gone, add --lost"
                    )
                proof = signer.sign(encode(expected), domain=KEY_DOMAIN) if signer is not None else ""
            if proof:
                _check_proof(proof, expected)
            number, now = last.number + 1, await tx.now()
            added = ReleaseKey(number=number, public_key=public_key, proof=proof, created_at=now, created_by=by)
            if not await release_keys.add(tx, added):
                raise Conflict("another controller has changed the key at the same moment: look at it again")
            await cluster_secrets.delete(tx, _SECRET)
            if private:
                await cluster_secrets.get_or_create(tx, _SECRET, lambda: private)
            self._learn([*keys, added])
        log.info("release key changed", key=public_key, by=by)

    async def _signer(self, tx: Transaction) -> Signer | None:
        private = await cluster_secrets.find(tx, _SECRET)
        if private is None:
            return None
        signer, keys = Signer(private), await release_keys.list_(tx)
        return signer if keys and keys[-1].public_key == signer.public_key else None


def _check_proof(proof: str, expected: ReleaseKeyChange) -> None:
    try:
        found = decode(ReleaseKeyChange, Verifier(expected.previous).verify(proof, domain=KEY_DOMAIN))
    except (BadSignature, Undecodable) as error:
        raise Invalid(f"the proof was not signed by the present key ({expected.previous})") from error
    if found != expected:
        raise Invalid("the proof is about other keys")
