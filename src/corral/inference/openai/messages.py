"""A chat's messages as the backend takes them: text in the message, media beside it, tool calls as JSON text. Pure.

Media come as data URLs only. A URL elsewhere would make this machine fetch whatever a client names, and a path would
let a client read its files.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.inference.api_errors import bad
from corral.inference.openai.json_body import Asked


@dataclass
class Conversation:
    messages: list[pb.Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # base64, without the data URL around it
    audios: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)

    def plain(self, roles: Mapping[str, str], joined_by: str) -> str:
        """One text, for a backend that shall not render the messages itself."""
        return joined_by.join(roles.get(message.role, "") + message.content for message in self.messages)


def read_conversation(asked: Asked, system_prompt: str = "") -> Conversation:
    """`system_prompt` comes first, unless the client brings one of its own."""
    told = asked.get("messages")
    if not isinstance(told, list) or not told:
        raise bad("messages", "messages must be a list with at least one message.")
    read = Conversation()
    for position, message in enumerate(told):
        if not isinstance(message, dict):
            raise bad(f"messages[{position}]", f"messages[{position}] must be an object.")
        read.messages.append(_message(message, f"messages[{position}]", read))
    if system_prompt and not any(message.role == "system" for message in read.messages):
        read.messages.insert(0, pb.Message(role="system", content=system_prompt))
    return read


def _message(told: Mapping[str, Any], where: str, read: Conversation) -> pb.Message:
    role = _text(told, "role", where)
    if not role:
        raise bad(f"{where}.role", f"{where} has no role.")
    return pb.Message(
        role="system" if role == "developer" else role,  # OpenAI's newer word; no model's template knows it
        content=_content(told.get("content"), f"{where}.content", read),
        name=_text(told, "name", where),
        tool_call_id=_text(told, "tool_call_id", where),
        reasoning_content=_text(told, "reasoning_content", where),
        tool_calls=_tool_calls(told.get("tool_calls"), f"{where}.tool_calls"),
    )


def _content(told: object, where: str, read: Conversation) -> str:
    if told is None:
        return ""
    if isinstance(told, str):
        return told
    if not isinstance(told, list):
        raise bad(where, f"{where} must be a string or a list of parts.")
    return "".join(_part(part, f"{where}[{position}]", read) for position, part in enumerate(told))


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
            raise bad(where, f"{where}: a part of type {kind[:40]!r} is not understood.")
        case _:
            raise bad(where, f"{where} must be an object with a type.")
    return ""


def _payload(url: str, where: str) -> str:
    head, comma, payload = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise bad(where, f"{where}: send it as a data URL (data:…;base64,…); nothing is fetched from elsewhere.")
    return _base64(payload, where)


def _base64(payload: str, where: str) -> str:
    try:
        base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(where, f"{where} is not base64.") from error
    return payload


def _tool_calls(told: object, where: str) -> str:
    if not told:
        return ""
    if not isinstance(told, list):
        raise bad(where, f"{where} must be a list.")
    return encode([_tool_call(call, position, where) for position, call in enumerate(told)]).decode()


def _tool_call(told: object, position: int, where: str) -> dict[str, Any]:
    match told:
        case {"function": {"name": str(name), **function}, **rest}:
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
            called = {"name": name, "arguments": text}
            return {"index": position, "id": rest.get("id") or "", "type": "function", "function": called}
    raise bad(where, f"{where}[{position}] must have a function with a name.")


def _text(told: Mapping[str, Any], key: str, where: str) -> str:
    value = told.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise bad(f"{where}.{key}", f"{where}.{key} must be a string.")
    return value


def read_tools(asked: Asked) -> tuple[str, str]:
    """Tools and the choice among them, as JSON texts. OpenAI's older `functions` are the same thing."""
    tools = offered_tools(asked)
    if not tools:
        return "", ""
    choice = asked.get("tool_choice")
    if choice is None:
        choice = asked.get("function_call")
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
    return encode(tools).decode(), encode(choice).decode() if choice is not None else ""


def offered_tools(asked: Asked) -> list[dict[str, Any]]:
    tools, functions = asked.get("tools") or [], asked.get("functions") or []
    if isinstance(functions, list) and not tools:
        tools = [{"type": "function", "function": each} for each in functions]
    if not isinstance(tools, list) or not isinstance(functions, list) or not all(_is_tool(tool) for tool in tools):
        raise bad("tools", "tools must be a list of functions, each with a name.")
    return tools


def _is_tool(told: object) -> bool:
    match told:
        case {"type": "function", "function": {"name": str(name)}}:
            return bool(name)
    return False
