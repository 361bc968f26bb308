from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from corral.bus.keys import file_names, load_or_create_keys
from corral.kit.errors import Invalid

NOON = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)
LATER = datetime(2027, 1, 1, tzinfo=UTC)

FILES = {
    "operator.seed",
    "operator.jwt",
    "account.seed",
    "system_account.seed",
    "system_user.seed",
    "service_user.seed",
}


def test_keys_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "secrets" / "bus"
    made = load_or_create_keys(folder, NOON)
    assert load_or_create_keys(folder, LATER) == made
    assert {file.name for file in folder.iterdir()} == FILES == set(file_names().values())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert [child.name for child in folder.parent.iterdir()] == ["bus"]


def test_two_folders_have_different_keys(tmp_path: Path) -> None:
    one, two = (load_or_create_keys(tmp_path / name, NOON) for name in ("a", "b"))
    assert one.account_seed != two.account_seed


@pytest.mark.parametrize("missing", sorted(FILES))
def test_a_missing_key_is_named_and_never_replaced(tmp_path: Path, missing: str) -> None:
    load_or_create_keys(tmp_path / "bus", NOON)
    (tmp_path / "bus" / missing).unlink()
    with pytest.raises(Invalid, match=f"lacks {missing}"):
        load_or_create_keys(tmp_path / "bus", NOON)
    assert not (tmp_path / "bus" / missing).exists()


def test_a_key_of_the_wrong_kind_is_named_but_not_shown(tmp_path: Path) -> None:
    keys = load_or_create_keys(tmp_path / "bus", NOON)
    (tmp_path / "bus" / "account.seed").write_text(keys.service_user_seed)
    with pytest.raises(Invalid, match=r"account\.seed: this seed is not an account seed") as refused:
        load_or_create_keys(tmp_path / "bus", NOON)
    assert keys.service_user_seed not in refused.value.message


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "bus").mkdir()
    load_or_create_keys(tmp_path / "bus", NOON)
    assert {file.name for file in (tmp_path / "bus").iterdir()} == FILES


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus" / "notes.txt").write_text("mine")
    with pytest.raises(Invalid, match="holds other files"):
        load_or_create_keys(tmp_path / "bus", NOON)
    assert [file.name for file in tmp_path.rglob("*")] == ["bus", "notes.txt"]
