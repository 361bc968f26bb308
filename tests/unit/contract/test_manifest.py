"""How a build is run: placeholders, and what nobody could run."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.codec import decode, encode
from corral.contract.manifest import (
    LOCALAI,
    Manifest,
    Placeholders,
    Ready,
    check_manifest,
    fill_command,
    fill_environment,
)
from corral.kit.errors import Invalid

HERE = Placeholders(host="127.0.0.1", port=20001, model_name="m", model_file="/m/m.gguf", context_size=4096, slots=2)
GOOD = Manifest("openai", ("serve", "{port}"))


def test_every_placeholder_is_filled() -> None:
    values = Placeholders(
        host="::1",
        port=1,
        model_name="a",
        model_file="/d/f",
        model_dir="/d",
        context_size=2,
        devices="0,1",
        device_count=2,
        slots=3,
        backend_dir="/b",
    )
    command = ("{host}:{port}", "{model_name}", "{model_file}", "{model_dir}", "{context_size}", "{devices}")
    assert fill_command(command, values) == ("::1:1", "a", "/d/f", "/d", "2", "0,1")
    assert fill_command(("{device_count}", "{slots}", "{backend_dir}/x"), values) == ("2", "3", "/b/x")


def test_localais_own_way() -> None:
    assert fill_command(LOCALAI.command, HERE) == ("./run.sh", "--addr", "127.0.0.1:20001")


def test_what_nobody_said_is_not_said() -> None:
    command = (
        "vllm",
        "serve",
        "{model_dir}",
        "--max-model-len",
        "{context_size}",
        "--tp={device_count}",
        "--port",
        "{port}",
    )
    bare = Placeholders(host="h", port=7, model_dir="/m")
    assert fill_command(command, bare) == ("vllm", "serve", "/m", "--port", "7")


def test_a_flag_is_dropped_with_its_own_value_only() -> None:
    bare = Placeholders(host="h", port=7)
    assert fill_command(("x", "--verbose", "--a", "{model_file}", "{model_dir}"), bare) == ("x", "--verbose")
    assert fill_command(("x", "--a", "1", "{model_file}"), bare) == ("x", "--a", "1")
    assert fill_command(("x", "--keep", "{model_name}", "{devices}"), HERE) == ("x", "--keep", "m")


def test_other_braces_are_left_alone() -> None:
    assert fill_command(("--json", '{"a": {}}', "{}", "{A}"), HERE) == ("--json", '{"a": {}}', "{}", "{A}")


def test_a_value_that_looks_like_a_placeholder_stays_a_value() -> None:
    tricky = Placeholders(host="h", port=7, model_name="{port}", model_file="{model_name}")
    assert fill_command(("{model_name}", "{model_file}"), tricky) == ("{port}", "{model_name}")


def test_the_environment_leaves_out_what_nobody_said() -> None:
    env = {"A": "{devices}", "B": "x{port}", "C": "plain"}
    assert fill_environment(env, HERE) == {"B": "x20001", "C": "plain"}


def test_an_unknown_placeholder_is_refused_when_it_is_filled_too() -> None:
    with pytest.raises(Invalid, match="prot"):
        fill_command(("{prot}",), HERE)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"protocol": "http"}, "protocol"),
        ({"protocol": ""}, "protocol"),
        ({"command": ()}, "command"),
        ({"command": ("a", "{prot}")}, "prot"),
        ({"command": ("a\0",)}, "NUL"),
        ({"env": {"A B": "1"}}, "environment"),
        ({"env": {"A": "{nope}"}}, "nope"),
        ({"slots": 0}, "slots"),
        ({"devices": "all"}, "devices"),
        ({"ready": Ready(path="health")}, "path"),
        ({"ready": Ready(path="/a b")}, "path"),
        ({"ready": Ready(timeout_s=0)}, "timeout"),
        ({"ready": Ready(timeout_s=float("nan"))}, "timeout"),
    ],
)
def test_what_nobody_could_run_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(Invalid, match=word):
        check_manifest(msgspec.structs.replace(GOOD, **change))


def test_a_grpc_backend_needs_no_command() -> None:
    check_manifest(Manifest("grpc"))


def test_on_the_wire() -> None:
    manifest = Manifest("openai", ("a", "{port}"), {"K": "v"}, Ready("/ok", 5.0), 4, "none")
    wire = encode(manifest)
    assert wire == (
        b'{"protocol":"openai","command":["a","{port}"],"env":{"K":"v"},"ready":{"path":"/ok","timeout_s":5.0},'
        b'"slots":4,"devices":"none"}'
    )
    assert decode(Manifest, wire) == manifest
    assert decode(Manifest, b'{"protocol":"grpc"}') == Manifest("grpc")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0{}"), max_size=10), max_size=6))
def test_words_without_placeholders_are_kept(words: list[str]) -> None:
    assert fill_command(words, HERE) == tuple(words)
