"""Converts a chat's messages for the backend: text in the message, media beside it, tool calls as JSON text. Pure.

Media must be data URLs. Any other URL would make this machine fetch what a client names, and a path would let a client
read its files.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.inference.api_errors import invalid_field
from corral.inference.openai.json_body import JsonBody


@dataclass
class Conversation:
    messages: list[pb.Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # base64, without the data URL around it
    audios: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)

    def plain(self, roles: Mapping[str, str], joined_by: str) -> str:
        """All messages as one text, for a backend that does not render them itself."""
        return joined_by.join(roles.get(message.role, "") + message.content for message in self.messages)


def read_conversation(body: JsonBody, system_prompt: str = "") -> Conversation:
    """`system_prompt` comes first, unless the client sends a system message."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise invalid_field("messages", "messages must be a list with at least one message.")
    read = Conversation()
    for position, message in enumerate(given):
        if not isinstance(message, dict):
            raise invalid_field(f"messages[{position}]", f"messages[{position}] must be an object.")
        read.messages.append(_message(message, f"messages[{position}]", read))
    if system_prompt and not any(message.role == "system" for message in read.messages):
        read.messages.insert(0, pb.Message(role="system", content=system_prompt))
    return read


def _message(given: Mapping[str, Any], where: str, read: Conversation) -> pb.Message:
    role = _text(given, "role", where)
    if not role:
        raise invalid_field(f"{where}.role", f"{where} has no role.")
    return pb.Message(
        role="system" if role == "developer" else role,  # OpenAI's newer role, which no model's template knows
        content=_content(given.get("content"), f"{where}.content", read),
        name=_text(given, "name", where),
        tool_call_id=_text(given, "tool_call_id", where),
        reasoning_content=_text(given, "reasoning_content", where),
        tool_calls=_tool_calls(given.get("tool_calls"), f"{where}.tool_calls"),
    )


def _content(given: object, where: str, read: Conversation) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid_field(where, f"{where} must be a string or a list of parts.")
    return "".join(_part(part, f"{where}[{position}]", read) for position, part in enumerate(given))


def _part(part: object, where: str, read: Conversation) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            read.images.append(_payload(url, where))
        case {"type": "video_url", "video_url": {"url": str(url)} | str(url)}:
            read.videos.append(_payload(url, where))
        case {"type": "audio_url", "audio_url": {"url": str(url)} | str(url)}:
            read.audios.append(_payload(url, where))
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            read.audios.append(_base64(data, where))
        case {"type": str(kind)}:
            raise invalid_field(where, f"{where}: a part of type {kind[:40]!r} is not supported.")
        case _:
            raise invalid_field(where, f"{where} must be an object with a type.")
    return ""


def _payload(url: str, where: str) -> str:
    head, comma, payload = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise invalid_field(where, f"{where}: send a data URL (data:…;base64,…); other URLs are not fetched.")
    return _base64(payload, where)


def _base64(payload: str, where: str) -> str:
    try:
        base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_field(where, f"{where} is not base64.") from error
    return payload


def _tool_calls(given: object, where: str) -> str:
    if not given:
        return ""
    if not isinstance(given, list):
        raise invalid_field(where, f"{where} must be a list.")
    return encode([_tool_call(call, position, where) for position, call in enumerate(given)]).decode()


def _tool_call(given: object, position: int, where: str) -> dict[str, Any]:
    match given:
        case {"function": {"name": str(name), **function}, **rest}:
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
            called = {"name": name, "arguments": text}
            return {"index": position, "id": rest.get("id") or "", "type": "function", "function": called}
    raise invalid_field(where, f"{where}[{position}] must have a function with a name.")


def _text(given: Mapping[str, Any], key: str, where: str) -> str:
    value = given.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid_field(f"{where}.{key}", f"{where}.{key} must be a string.")
    return value


def read_tools(body: JsonBody) -> tuple[str, str]:
    """Tools and the tool choice, as JSON texts. OpenAI's older `functions` are treated as tools."""
    tools = offered_tools(body)
    if not tools:
        return "", ""
    choice = body.get("tool_choice")
    if choice is None:
        choice = body.get("function_call")
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
    return encode(tools).decode(), encode(choice).decode() if choice is not None else ""


def offered_tools(body: JsonBody) -> list[dict[str, Any]]:
    tools, functions = body.get("tools") or [], body.get("functions") or []
    if isinstance(functions, list) and not tools:
        tools = [{"type": "function", "function": each} for each in functions]
    if not isinstance(tools, list) or not isinstance(functions, list) or not all(_is_tool(tool) for tool in tools):
        raise invalid_field("tools", "tools must be a list of functions, each with a name.")
    return tools


def _is_tool(given: object) -> bool:
    match given:
        case {"type": "function", "function": {"name": str(name)}}:
            return bool(name)
    return False
