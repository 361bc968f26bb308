"""The mock's RPCs that read and write files: each answers with what it was asked and what it was given.

An image is a real PNG of the size asked for, one grey, with the request as a text inside it; a video, a sound and a 3D
object begin as such files do and hold the request behind that. So a test sees at the other end what arrived here.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.sdk import BadRequest
from corral.sdk.grpc_server import GrpcService

RATE = 8000


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(path: str) -> str:
    """Of the file's content: the test that sent it knows it. Empty for no path."""
    return digest(Path(path).read_bytes()) if path else ""


def png(width: int, height: int, text: str) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of grey
    pixels = zlib.compress((b"\0" + b"\x80" * width) * height)
    said = chunk(b"tEXt", b"Comment\0" + base64.b64encode(text.encode()))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + said + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def size_of(content: bytes) -> tuple[int, int]:
    if not content.startswith(b"\x89PNG") or len(content) < 24:
        raise BadRequest("the image is no PNG")
    width, height = struct.unpack_from(">II", content, 16)
    return width, height


def _export(folder: Path, kinds: Iterable[str]) -> list[str]:
    """A file, or a folder of several, per kind."""
    folder.mkdir(exist_ok=True)
    for kind in kinds:
        if kind == "glb":
            (folder / "pointcloud.glb").write_bytes(b"glTF cloud")
        else:
            (folder / kind).mkdir()
            (folder / kind / "points.txt").write_text("1 2 3")
            (folder / kind / "cameras.txt").write_text("one")
    return [str(path) for path in folder.iterdir()]


def wav(samples: bytes) -> bytes:
    samples += b"\0" * (len(samples) % 2)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, RATE * 2, 2, 16)
    data = struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI4s", b"RIFF", 4 + len(form) + len(data), b"WAVE") + form + data


class MediaService(GrpcService):
    backend: Any  # the mock, which has `begin`

    async def GenerateImage(self, request: pb.GenerateImageRequest, context: Any) -> pb.Result:
        return await self._write(
            context,
            request.dst,
            request.positive_prompt,
            lambda prompt: png(
                request.width,
                request.height,
                json.dumps(
                    {
                        "prompt": prompt,
                        "negative": request.negative_prompt,
                        "step": request.step,
                        "seed": request.seed,
                        "src": digest_of(request.src),
                        "refs": [digest_of(path) for path in request.ref_images],
                    }
                ),
            ),
        )

    async def UpscaleImage(self, request: pb.UpscaleImageRequest, context: Any) -> pb.Result:
        def larger(_: str) -> bytes:
            content = Path(request.src).read_bytes()
            width, height = size_of(content)
            return png(width * request.scale, height * request.scale, digest(content))

        return await self._write(context, request.dst, "", larger)

    async def GenerateVideo(self, request: pb.GenerateVideoRequest, context: Any) -> pb.Result:
        def video(prompt: str) -> bytes:
            said = {
                "prompt": prompt,
                "negative": request.negative_prompt,
                "size": [request.width, request.height],
                "frames": [request.num_frames, request.fps],
                "seed": request.seed,
                "step": request.step,
                "cfg_scale": request.cfg_scale,
                "params": dict(request.params),
                "start": digest_of(request.start_image),
                "end": digest_of(request.end_image),
                "audio": digest_of(request.audio),
            }
            return b"\0\0\0\x18ftypmp42" + json.dumps(said).encode()

        return await self._write(context, request.dst, request.prompt, video)

    async def Generate3D(self, request: pb.Generate3DRequest, context: Any) -> pb.Result:
        said = {"src": digest_of(request.src), "quality": request.quality, "background": request.background}
        return await self._write(context, request.dst, "", lambda _: b"glTF" + json.dumps(said).encode())

    async def SoundGeneration(self, request: pb.SoundGenerationRequest, context: Any) -> pb.Result:
        def sound(text: str) -> bytes:
            given = {field.name: value for field, value in request.ListFields()}
            said = {key: value for key, value in given.items() if key not in ("dst", "model", "ModelIdentity")}
            return wav(json.dumps({**said, "text": text}).encode())

        return await self._write(context, request.dst, request.text, sound)

    async def AudioTransform(self, request: pb.AudioTransformRequest, context: Any) -> pb.AudioTransformResult:
        """Turns the audio round; with the parameter `stems` it also writes that many others."""
        stems = []
        async with self.answering(context):
            faults, _ = await self.backend.begin(request.params.get("faults", ""))
            content = await asyncio.to_thread(Path(request.audio_path).read_bytes)
            turned = wav(content[::-1])
            if not faults.no_file:
                await asyncio.to_thread(Path(request.dst).write_bytes, turned)
            for number in range(int(request.params.get("stems", "0"))):
                path = Path(request.dst).with_name(f"stem{number}.wav")
                await asyncio.to_thread(path.write_bytes, wav(b"stem %d" % number))
                stems.append(pb.AudioTransformStem(name=f"stem{number}", dst=str(path)))
        return pb.AudioTransformResult(
            dst=request.dst,
            sample_rate=RATE,
            samples=len(content) // 2,
            reference_provided=bool(digest_of(request.reference_path)),
            stems=stems,
        )

    async def SoundDetection(self, request: pb.SoundDetectionRequest, context: Any) -> pb.SoundDetectionResponse:
        """As if each byte of the file were a sound, the most frequent first."""
        async with self.answering(context):
            content = await asyncio.to_thread(Path(request.src).read_bytes)
        counted = sorted(((content.count(byte), byte) for byte in set(content)), reverse=True)
        found = [pb.SoundClass(label=chr(byte), score=count / len(content), index=byte) for count, byte in counted]
        kept = [each for each in found if each.score >= request.threshold]
        return pb.SoundDetectionResponse(detections=kept[: request.top_k or None])

    async def Detect(self, request: pb.DetectOptions, context: Any) -> pb.DetectResponse:
        """The whole image, named by what it was asked for; a PNG only."""
        async with self.answering(context):
            _, prompt = await self.backend.begin(request.prompt)
            content = base64.b64decode(request.src)
            width, height = size_of(content)
        found = pb.Detection(width=width, height=height, class_name=prompt or digest(content), confidence=0.5)
        if request.points:
            found.mask = png(1, 1, "mask")
        boxes = [
            pb.Detection(x=x1, y=y1, width=x2 - x1, height=y2 - y1)
            for x1, y1, x2, y2 in zip(*[iter(request.boxes)] * 4, strict=True)
        ]
        return pb.DetectResponse(Detections=[each for each in (found, *boxes) if each.confidence >= request.threshold])

    async def Depth(self, request: pb.DepthRequest, context: Any) -> pb.DepthResponse:
        async with self.answering(context):
            width, height = size_of(base64.b64decode(request.src))
            paths = await asyncio.to_thread(_export, Path(request.dst), request.exports) if request.exports else []
        pixels = width * height
        return pb.DepthResponse(
            width=width,
            height=height,
            depth=[0.5] * pixels if request.include_depth else [],
            confidence=[1.0] * pixels if request.include_confidence else [],
            intrinsics=[1.0] * 9 if request.include_pose else [],
            num_points=1 if request.include_points else 0,
            points=[1.0, 2.0, 3.0] if request.include_points else [],
            point_colors=b"rgb" if request.include_points else b"",
            export_paths=paths,
            is_metric=True,
        )

    async def FaceVerify(self, request: pb.FaceVerifyRequest, context: Any) -> pb.FaceVerifyResponse:
        same = request.img1 == request.img2
        area = pb.FacialArea(w=2, h=3)
        return pb.FaceVerifyResponse(
            verified=same,
            distance=0.0 if same else 1.0,
            threshold=request.threshold,
            model="mock",
            img1_area=area,
            img2_area=area,
            img1_is_real=request.anti_spoofing,
        )

    async def FaceAnalyze(self, request: pb.FaceAnalyzeRequest, context: Any) -> pb.FaceAnalyzeResponse:
        gender = {"Woman": 0.75} if "gender" in request.actions else {}
        face = pb.FaceAnalysis(region=pb.FacialArea(w=2, h=3), age=30, gender=gender, is_real=request.anti_spoofing)
        return pb.FaceAnalyzeResponse(faces=[face])

    async def VoiceVerify(self, request: pb.VoiceVerifyRequest, context: Any) -> pb.VoiceVerifyResponse:
        async with self.answering(context):
            same = digest_of(request.audio1) == digest_of(request.audio2)
        return pb.VoiceVerifyResponse(verified=same, distance=0.0 if same else 1.0, threshold=request.threshold)

    async def VoiceAnalyze(self, request: pb.VoiceAnalyzeRequest, context: Any) -> pb.VoiceAnalyzeResponse:
        async with self.answering(context):
            segment = pb.VoiceAnalysis(end=1, age=30, dominant_emotion=digest_of(request.audio))
        return pb.VoiceAnalyzeResponse(segments=[segment] * max(1, len(request.actions)))

    async def VoiceEmbed(self, request: pb.VoiceEmbedRequest, context: Any) -> pb.VoiceEmbedResponse:
        async with self.answering(context):
            content = await asyncio.to_thread(Path(request.audio).read_bytes)
        return pb.VoiceEmbedResponse(embedding=list(content), model="mock")

    async def _write(self, context: Any, dst: str, prompt: str, make: Any) -> pb.Result:
        async with self.answering(context):
            faults, text = await self.backend.begin(prompt)
            if faults.refuses:
                return pb.Result(success=False, message=faults.refuses)
            if not faults.no_file:
                await asyncio.to_thread(lambda: Path(dst).write_bytes(make(text)))
        return pb.Result(success=True)
