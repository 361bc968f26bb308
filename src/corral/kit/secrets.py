"""Bearer secrets: generation, digest, comparison.

Only the SHA-256 of a secret is ever stored. A slow hash would add nothing: an attacker would have to guess 256 random
bits, and every request pays for the check.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os

API_KEY = "ck_"
JOIN_TOKEN = "cj_"
NODE_TOKEN = "cn_"
WEB_SESSION = "cs_"
ENROLMENT = "ce_"
PLAYGROUND = "cp_"  # before a signed token, which is no random secret: `contract/playground.py`
PREFIXES = (API_KEY, JOIN_TOKEN, NODE_TOKEN, WEB_SESSION, ENROLMENT)  # `log.py` masks whatever starts with one of these


def new_secret(prefix: str) -> str:
    """256 random bits as text that survives shells, URLs and double-click selection."""
    return prefix + base64.b32encode(os.urandom(32)).decode().rstrip("=").lower()


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def matches(secret: str, stored_digest: str) -> bool:
    return hmac.compare_digest(digest(secret), stored_digest)
