"""From settings to the bus this controller uses and hands out: embedded keys, an external account, or shared users."""

from __future__ import annotations

from dataclasses import dataclass

from corral.bus.api import BusCredentials, BusTls, CredentialSource, FixedCredentials
from corral.bus.auth import BusKeys, MintedUser, inbox_of, mint_service_credentials
from corral.bus.jwt import BadKey, KeyKind, check_seed
from corral.bus.keys import load_or_create_keys
from corral.bus.permissions import INBOX
from corral.controller.access.bus_issuer import BusEndpoint, BusIssuer, SharedUser, split_user
from corral.controller.settings import ControllerSettings
from corral.kit.clock import Clock
from corral.kit.settings import BadSettings

_SERVICE_TTL_S = 3600.0


@dataclass(frozen=True)
class BusSetup:
    urls: tuple[str, ...]
    credentials: CredentialSource
    tls: BusTls | None
    inbox: str
    issuer: BusIssuer
    keys: BusKeys | None  # with them revocations can be pushed


class ServiceCredentials:
    """This controller's own credentials, minted afresh at each connect from keys it holds."""

    def __init__(self, keys: BusKeys, clock: Clock, reply_ttl_s: float) -> None:
        self._keys = keys
        self._clock = clock
        self._reply_ttl_s = reply_ttl_s

    @property
    def inbox(self) -> str:
        return self._mint().inbox

    async def current(self) -> BusCredentials:
        return self._mint().credentials()

    def _mint(self) -> MintedUser:
        return mint_service_credentials(
            self._keys.account_seed,
            self._keys.service_user_seed,
            now=self._clock.now(),
            ttl_s=_SERVICE_TTL_S,
            reply_ttl_s=self._reply_ttl_s,
        )


def set_up_bus(settings: ControllerSettings, clock: Clock) -> BusSetup:
    split = [split_user(url) for url in settings.bus.bus_urls]
    urls = tuple(url for url, _ in split)
    shared = next((user for _, user in split if user is not None), None)
    tls = _tls(settings)
    place = BusEndpoint(settings.bus.bus_public_urls or urls, _read_ca(settings))

    def issuer(*, account_seed: str = "", shared: SharedUser | None = None) -> BusIssuer:
        return BusIssuer(
            place,
            clock,
            account_seed=account_seed,
            shared=shared,
            ttl_s=settings.bus.bus_credential_ttl_s,
            install_timeout_s=max(
                settings.backends.backend_install_timeout_s, settings.backends.backend_upgrade_timeout_s
            ),
        )

    if settings.bus.bus_keys is not None:
        keys = load_or_create_keys(settings.bus.bus_keys, clock.now())
        service = ServiceCredentials(keys, clock, settings.backends.backend_install_timeout_s)
        return BusSetup(urls, service, tls, service.inbox, issuer(account_seed=keys.account_seed), keys)
    if settings.bus.bus_account_seed:
        own, inbox = _account_service(settings)
        return BusSetup(urls, own, tls, inbox, issuer(account_seed=settings.bus.bus_account_seed), None)
    if not settings.bus.bus_shared_credentials:
        raise BadSettings(
            [
                "the bus needs credentials: --bus-keys (embedded server), --bus-account-seed with service credentials "
                "(external NATS), or --bus-shared-credentials if every node may read every other node's messages"
            ]
        )
    plain = FixedCredentials(BusCredentials(user=shared.user, password=shared.password) if shared else BusCredentials())
    return BusSetup(urls, plain, tls, INBOX, issuer(shared=shared), None)


def _account_service(settings: ControllerSettings) -> tuple[FixedCredentials, str]:
    """Our user on an external NATS, and the inbox it may hear. What cannot be used is told now, not by every node."""
    if not (settings.bus.bus_service_jwt and settings.bus.bus_service_seed):
        raise BadSettings(["--bus-service-jwt and --bus-service-seed are required with --bus-account-seed"])
    faults = []
    for flag, seed, kind in (
        ("--bus-account-seed", settings.bus.bus_account_seed, KeyKind.ACCOUNT),
        ("--bus-service-seed", settings.bus.bus_service_seed, KeyKind.USER),
    ):
        try:
            check_seed(seed, kind)
        except BadKey as error:
            faults.append(f"{flag}: {error}")
    inbox = INBOX
    try:
        inbox = inbox_of(settings.bus.bus_service_jwt)
    except BadKey as error:
        faults.append(f"--bus-service-jwt: {error}")
    if faults:
        raise BadSettings(faults)
    credentials = BusCredentials(jwt=settings.bus.bus_service_jwt, seed=settings.bus.bus_service_seed)
    return FixedCredentials(credentials), inbox


def _tls(settings: ControllerSettings) -> BusTls | None:
    files = {"--bus-ca": settings.bus.bus_ca, "--bus-cert": settings.bus.bus_cert, "--bus-key": settings.bus.bus_key}
    faults = [f"{flag}: there is no file {path}" for flag, path in files.items() if path and not path.is_file()]
    if (settings.bus.bus_cert is None) != (settings.bus.bus_key is None):
        faults.append("--bus-cert and --bus-key come together")
    if faults:
        raise BadSettings(faults)
    if settings.bus.bus_ca is None and settings.bus.bus_cert is None:
        return None
    return BusTls(ca=settings.bus.bus_ca, certificate=settings.bus.bus_cert, key=settings.bus.bus_key)


def _read_ca(settings: ControllerSettings) -> str:
    try:
        return settings.bus.bus_ca.read_text() if settings.bus.bus_ca else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings([f"--bus-ca: {settings.bus.bus_ca} cannot be read: {error}"]) from error
