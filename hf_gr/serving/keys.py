# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Who may ask the server, and who may change its catalogue. Knows no engine."""

import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from .errors import Error, Refused

_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_PORTS = {"http": 80, "https": 443}
_FIX = "start the server with an admin key (hf-gr serve: $HF_GR_ADMIN_KEY)"


def check_keys(**keys: str | None) -> None:
    """Refuse keys that HTTP cannot carry, and empty ones: a secret that got lost must not open the server."""
    for name, given in keys.items():
        every = ["none"] if given is None else given.split()
        if not every or not all(key.isascii() and key.isprintable() for key in every):
            raise ValueError(f"{name} is empty or not ASCII, expected a secret: openssl rand -hex 32 makes one")


def check_origins(origins: Sequence[str]) -> None:
    """Refuse what is no origin: no browser sends it, so that it would never match."""
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/?#\s]+", origin):
            raise ValueError(
                f"origins has {origin!r}, expected a scheme and a host, such as https://shop.example, or *"
            )


def make_checks(
    api_key: str | None, admin_key: str | None, *, is_read_only: bool, is_public: bool
) -> tuple[list[Any], list[Any]]:
    """Dependencies of endpoints for questions and for changes; none where no key is needed."""
    bearer = HTTPBearer(auto_error=False, description="Authorization: Bearer KEY")
    is_read_only = is_read_only or (admin_key is None and api_key is not None)

    def with_key(check: Callable[[str | None], None]) -> list[Any]:
        given: Any = Depends(bearer)  # annotations of a local variable are not resolved

        async def check_key(credentials: HTTPAuthorizationCredentials | None = given) -> None:
            check(None if credentials is None else credentials.credentials)

        return [Depends(check_key)]

    def may_ask(key: str | None) -> None:
        if not (_is_same(key, api_key) or _is_same(key, admin_key)):
            raise _wrong_key(key, "the server's key")

    def may_change(key: str | None) -> None:
        if is_read_only:
            raise Refused(403, Error(message="this server's catalogue cannot be changed", fix=_FIX))
        if _is_same(key, api_key) and not _is_same(key, admin_key):
            message = "this key is for questions, expected the one for changes of the catalogue"
            raise Refused(403, Error(message=message, argument="Authorization", fix="send the admin key"))
        if not _is_same(key, admin_key):
            raise _wrong_key(key, "the key for changes of the catalogue")

    to_ask = [] if api_key is None else with_key(may_ask)
    if admin_key is not None or is_read_only:
        return to_ask, with_key(may_change)
    return to_ask, [] if is_public else [Depends(_check_way)]


async def _check_way(request: Request) -> None:
    """Refuse a change without a key from afar: through a proxy, or from another site's page in a browser here."""
    headers = request.headers
    found = next((name for name in _PROXY_HEADERS if name in headers), None)
    if found is None and "origin" in headers and not _is_own(headers["origin"], request):
        found = "origin"
    if found is not None:
        message = f"without an admin key the catalogue cannot be changed through a proxy or from another site: {found}"
        raise Refused(403, Error(message=message, argument=found, fix=f"{_FIX}, and send it"))


def _is_own(origin: str, request: Request) -> bool:
    """Whether a page is this server's: of its host and port, and not of a name that was turned to this machine."""
    try:
        page = urlsplit(origin)
        asked = urlsplit(f"{page.scheme}://{request.headers.get('host', '')}")
        default = _PORTS.get(page.scheme)
        is_same = (page.hostname, page.port or default) == (asked.hostname, asked.port or default)
    except ValueError:
        return False
    here = (request.scope.get("server") or ("",))[0]
    return is_same and page.hostname is not None and (is_loopback(page.hostname) or not is_loopback(here))


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches a server at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_same(given: str | None, keys: str | None) -> bool:
    """Whether it is one of some keys, compared in a time that tells nothing of them."""
    if given is None or keys is None:
        return False
    return any([hmac.compare_digest(given.encode(), key.encode()) for key in keys.split()])


def _wrong_key(given: str | None, expected: str) -> Refused:
    message = f"{'no key' if given is None else 'a wrong key'}, expected {expected}"
    error = Error(message=message, argument="Authorization", expected=expected, fix="send Authorization: Bearer KEY")
    return Refused(401, error, **{"www-authenticate": "Bearer"})
