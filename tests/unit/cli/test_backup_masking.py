"""What leaves in a support bundle: secrets become stars, the rest stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.cli.backup.masking import Masker, known_secrets
from corral.cli.common.data_folder import DataFolder
from corral.kit.secrets import API_KEY, JOIN_TOKEN, NODE_TOKEN, new_secret

SEED = "SAAKEXAMPLE" + "A2B3C4D5" * 6
JWT = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJub2RlIn0.c2lnbmF0dXJl"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"seed {SEED}", SEED),
        (f"jwt={JWT}", JWT),
        (PEM, "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg"),
        (PEM.partition("\n-----END")[0], "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg"),
        ("GET https://anna:s3cret@models.example/x failed", "s3cret"),
        ("postgresql://corral:p%40ss@db/corral", "p%40ss"),
        ("Authorization: Bearer abcdefgh12345678", "abcdefgh12345678"),
        ("Authorization: Basic YW5uYTpzM2NyZXQ=", "YW5uYTpzM2NyZXQ="),
        ("using hf_abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrst"),
        ('{"password": "hunter22"}', "hunter22"),
        ("--registration-token hunter22 --port 1", "hunter22"),
        ("LOCALAI_REGISTRATION_TOKEN=hunter22 corral up", "hunter22"),
        ("https://example.com/file?token=hunter22&x=1", "hunter22"),
        ("AWS key AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, secret: str) -> None:
    assert secret not in Masker(()).mask(text)


@pytest.mark.parametrize("kind", [API_KEY, JOIN_TOKEN, NODE_TOKEN])
def test_keys_and_tokens_are_masked(kind: str) -> None:
    made = new_secret(kind)
    assert made not in Masker(()).mask(f"made {made} now")


@pytest.mark.parametrize(
    "text",
    [
        "12 tokens in, 40 tokens out",
        '"join_token": "set"',
        "the join token is used up",
        "sha256:" + "ab" * 32,
        "node 0d9b2c9e-91a5-4a35-8d27-4f2bd3b0f3f1 healthy",
        "max_tokens: 24",
        "KeyError: 'x'",
    ],
)
def test_the_rest_stays_readable(text: str) -> None:
    assert Masker(()).mask(text) == text


def test_what_this_machine_knows_is_masked_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "worker").mkdir()
    (tmp_path / "secrets/ca.key").write_text(PEM)
    (tmp_path / "secrets/ca.crt").write_text("-----BEGIN CERTIFICATE-----\nMIIBpublicpublicpublic\n")
    (tmp_path / "worker/identity.json").write_text('{"node_token":"an odd-token_of_old_releases","name":"attic"}')
    env = {"CORRAL_HF_TOKEN": "opensesame", "HOME": "/home/anna", "MY_KEY": "letmein", "S_TOKEN": "on"}
    masker = Masker(known_secrets(DataFolder(tmp_path), env))
    line = PEM.splitlines()[1]
    masked = masker.mask(
        f"x{line}y opensesame letmein odd-token_of_old_releases attic /home/anna MIIBpublicpublicpublic on"
    )
    assert masked == "x***y *** *** *** attic /home/anna MIIBpublicpublicpublic on"
