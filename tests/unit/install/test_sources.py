"""What users write to name a model anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.sources import HUB, is_repository_id, is_safe_path
from corral.controller.install.sources import HubSource, WebSource, parse_source
from corral.kit.errors import Invalid


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hf://org/name", HubSource("org/name")),
        ("huggingface://org/name/", HubSource("org/name")),
        ("hf.co/org/name:Q4_K_M", HubSource("org/name", quant="Q4_K_M")),
        ("hf://org/name@v1:q8_0", HubSource("org/name", "v1", quant="q8_0")),
        ("hf://org/name/sub/x.gguf", HubSource("org/name", path="sub/x.gguf")),
        ("hf://org/name@abc/x.gguf", HubSource("org/name", "abc", path="x.gguf")),
        ("hf://org/name/x.gguf@abc", HubSource("org/name", "abc", path="x.gguf")),
        ("hf://org/name/with space/añ.gguf", HubSource("org/name", path="with space/añ.gguf")),
        (f"{HUB}/org/name", HubSource("org/name")),
        (f"{HUB}/org/name/tree/v2", HubSource("org/name", "v2")),
        (f"{HUB}/org/name/blob/main/a%20b.gguf", HubSource("org/name", "main", path="a b.gguf")),
        ("modelscope://org/name:Q8_0", HubSource("org/name", quant="Q8_0", is_modelscope=True)),
        ("ModelScope://org/name@v1/x.gguf", HubSource("org/name", "v1", "x.gguf", is_modelscope=True)),
        ("https://modelscope.cn/models/org/name", HubSource("org/name", is_modelscope=True)),
        ("https://modelscope.cn/models/org/name/files", HubSource("org/name", is_modelscope=True)),
        (
            "https://modelscope.cn/models/org/name/file/view/master/a%20b.gguf?status=2",
            HubSource("org/name", "master", "a b.gguf", is_modelscope=True),
        ),
        (f"{HUB}/org/name/resolve/v2/d/x.gguf?download=true", HubSource("org/name", "v2", path="d/x.gguf")),
        ("https://host/d/x.GGUF", WebSource("https://host/d/x.GGUF", "x.GGUF")),
        ("https://host:8443/a%20b.gguf?t=1", WebSource("https://host:8443/a%20b.gguf?t=1", "a b.gguf")),
    ],
)
def test_what_is_meant(text: str, meant: HubSource | WebSource) -> None:
    assert parse_source(text, hub_url=HUB) == meant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hf://name", "names no repository"),
        ("hf://../../etc", "names no repository"),
        ("hf://org/name/../../x.gguf", "leads out of the repository"),
        ("hf://org/name//etc/x.gguf", "leads out of the repository"),
        ("hf://org/name/model.bin", "is not a GGUF file"),
        ("modelscope://name", "names no repository"),
        ("modelscope://org/name/../x.gguf", "leads out of the repository"),
        ("https://modelscope.cn/models/org/name/resolve/master/%2e%2e%2fx.gguf", "leads out of the repository"),
        ("https://modelscope.cn/datasets/org/name", "does not end in .gguf"),
        (f"{HUB}/org/name/discussions/1", "is not a repository or a file"),
        ("https://host/page.html", "does not end in .gguf"),
        ("https:///x.gguf", "is not a URL"),
        ("ftp://host/x.gguf", "is not a source of models"),
        ("file:///etc/x.gguf", "is not a source of models"),
        ("hf://org/na\nme", "printable characters"),
        ("hf://org/" + "x" * 2000, "printable characters"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_can(text: str, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        parse_source(text, hub_url=HUB)


@given(
    st.text(max_size=60),
    st.sampled_from(
        [
            "hf://",
            "modelscope://",
            "https://modelscope.cn/models/o/n/resolve/master/",
            "hf.co/",
            "https://",
            f"{HUB}/",
            "hf://org/name/",
            "",
        ]
    ),
)
def test_whatever_is_written_no_path_leaves_its_folder(text: str, start: str) -> None:
    try:
        found = parse_source(start + text, hub_url=HUB)
    except Invalid:
        return
    if isinstance(found, HubSource):
        assert is_repository_id(found.repository)
        assert not found.path or is_safe_path(found.path)
    else:
        assert is_safe_path(found.name)
        assert "/" not in found.name
