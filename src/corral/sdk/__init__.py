"""The SDK for authors of backends: a base class and `serve`. See docs/how-to/write-a-backend.md.

It imports nothing else of Corral except backend.proto: a backend also runs under other supervisors.
"""

from corral.sdk.backend import (
    Backend,
    BackendError,
    BadRequest,
    Busy,
    Chat,
    ChatMessage,
    Model,
    NotLoaded,
    ToolCall,
    Unsupported,
)
from corral.sdk.serving import serve

__all__ = [
    "Backend",
    "BackendError",
    "BadRequest",
    "Busy",
    "Chat",
    "ChatMessage",
    "Model",
    "NotLoaded",
    "ToolCall",
    "Unsupported",
    "serve",
]
