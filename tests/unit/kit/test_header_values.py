"""Parameters of header values: read as everybody writes them, and never slower than they are long."""

from __future__ import annotations

import contextlib
import time

import pytest

from corral.kit.header_values import read_parameters


@pytest.mark.parametrize(
    ("value", "first", "told"),
    [
        ("form-data", "form-data", {}),
        ('form-data; name="model"', "form-data", {"name": "model"}),
        ('Form-Data;NAME=model ; filename = "a; b.wav";', "form-data", {"name": "model", "filename": "a; b.wav"}),
        (r'form-data; name="f"; filename="a\"b\\.wav"', "form-data", {"name": "f", "filename": r'a"b\.wav'}),
        ("multipart/form-data; boundary=----x/y=z?", "multipart/form-data", {"boundary": "----x/y=z?"}),
        ("form-data; name=f; filename*=UTF-8''%C3%A9.wav", "form-data", {"name": "f", "filename": "é.wav"}),
        ("a; ;; x=", "a", {"x": ""}),
    ],
)
def test_what_is_said(value: str, first: str, told: dict[str, str]) -> None:
    found, parameters = read_parameters(value)
    assert (found, {name: each for name, each in parameters.items() if not name.endswith("*")}) == (first, told)


@pytest.mark.parametrize(
    "value",
    [
        'a; name="x',
        "a; name",
        'a; name="x"y',
        "a; name=x; Name=y",
        "a; =x",
        "a; f*=x",
        "a; f*=nonsense''x",
        "a; a b=c",
    ],
)
def test_what_cannot_be_read(value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_parameters(value)


@pytest.mark.parametrize("filler", [";", '";', 'a="x";', 'a="', "a*0*=x;", '\\";', " ", "\t;", "a=", '"\\'])
def test_a_long_one_takes_no_longer_than_it_is_long(filler: str) -> None:
    value = 'form-data; name="x"; ' + filler * (1024 * 1024 // len(filler))
    began = time.process_time()
    with contextlib.suppress(ValueError):
        read_parameters(value)
    assert time.process_time() - began < 5, "a megabyte: the standard library takes hours for some of these"
