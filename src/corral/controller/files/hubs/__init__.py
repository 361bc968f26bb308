"""The hubs of models: which files a repository has, where they are, and what a refusal means."""

from __future__ import annotations

import aiohttp

from corral.controller.files.hubs.hub import Hub, HubSettings
from corral.controller.files.hubs.huggingface import HuggingFace
from corral.controller.files.hubs.modelscope import ModelScope


class Hubs:
    def __init__(self, session: aiohttp.ClientSession, settings: HubSettings) -> None:
        self.huggingface = HuggingFace(session, settings)
        self.modelscope = ModelScope(session, settings)
        self.usual: Hub = self.modelscope if settings.prefers_modelscope else self.huggingface

    def choose(self, *, is_modelscope: bool) -> Hub:
        """ModelScope where it is named, the usual hub otherwise."""
        return self.modelscope if is_modelscope else self.usual
