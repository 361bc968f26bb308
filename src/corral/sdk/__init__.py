"""What a backend's author imports: a class to fill in, and `serve`. See docs/how-to/write-a-backend.md.

Nothing of the rest of the house comes along: a backend runs on machines of its own kind, under supervisors not ours.
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
