"""Makes the requests of Predict, PredictStream, Embedding and TokenizeString (docs/reference/wire/grpc.md#predict).
Pure.

Each value comes from the request, otherwise from the model's definition, otherwise from LocalAI's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.inference.api_errors import invalid_field
from corral.inference.backend_process import BackendProcess
from corral.inference.load_options import is_llama_cpp
from corral.inference.openai.grammars import grammar_of
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.messages import read_conversation, read_tools

_MAX_LOGPROBS = 20

# Key in the request (and below `parameters` of the definition), field, LocalAI's default.
_WHOLE: tuple[tuple[str, str, int], ...] = (
    ("repeat_last_n", "Repeat", 0),
    ("batch", "Batch", 0),
    ("n_keep", "NKeep", 0),
    ("mirostat", "Mirostat", 0),
    ("n_draft", "NDraft", 0),
)
_NUMBERS: tuple[tuple[str, str, float], ...] = (
    ("temperature", "Temperature", 0.9),
    ("top_p", "TopP", 0.95),
    ("min_p", "MinP", 0.0),
    ("repeat_penalty", "Penalty", 0.0),
    ("frequency_penalty", "FrequencyPenalty", 0.0),
    ("presence_penalty", "PresencePenalty", 0.0),
    ("typical_p", "TypicalP", 1.0),
    ("tfz", "TailFreeSamplingZ", 1.0),
    ("mirostat_eta", "MirostatETA", 0.1),
    ("mirostat_tau", "MirostatTAU", 5.0),
    ("rope_freq_base", "RopeFreqBase", 0.0),
    ("rope_freq_scale", "RopeFreqScale", 0.0),
    ("negative_prompt_scale", "NegativePromptScale", 0.0),
)


def chat_options(process: BackendProcess, body: JsonBody, seed: int) -> pb.PredictOptions:
    """Raises ApiError. `seed`: for requests without one."""
    options = _sampling(process, body, seed)
    conversation = read_conversation(body, _text(process.setting("system_prompt")))
    tools, choice = read_tools(body)
    if process.setting("template", "use_tokenizer_template") is False:
        # For a backend that cannot render messages.
        joined_by = _text(process.setting("template", "join_chat_messages_by_character")) or "\n"
        options.Prompt = conversation.plain(_texts(process.setting("roles")), joined_by)
    else:
        options.UseTokenizerTemplate = True
        options.Messages.extend(conversation.messages)
    options.Images.extend(conversation.images)
    options.Audios.extend(conversation.audios)
    options.Videos.extend(conversation.videos)
    options.Tools, options.ToolChoice = tools, choice
    options.Logprobs = options.TopLogprobs = _chat_logprobs(body)
    options.Metadata.update(_metadata(process, body))
    return options


def completion_options(process: BackendProcess, body: JsonBody, prompt: str, seed: int) -> pb.PredictOptions:
    options = _sampling(process, body, seed)
    options.Prompt = prompt
    wanted = body.whole("logprobs")
    if wanted is not None:
        if not 0 <= wanted <= _MAX_LOGPROBS:
            raise invalid_field("logprobs", f"logprobs must be 0 to {_MAX_LOGPROBS}.")
        options.Logprobs = options.TopLogprobs = max(1, wanted)
    return options


def text_options(process: BackendProcess) -> pb.PredictOptions:
    """For RPCs that take a text and do not sample."""
    return pb.PredictOptions(ModelIdentity=process.identity, Threads=_threads(process))


def prompts_of(body: JsonBody) -> list[str]:
    """The prompts of `/v1/completions`: one text, or several."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and any(isinstance(item, int | list) for item in prompt):
        raise invalid_field("prompt", "prompt must be text: token ids cannot be sent to this backend.")
    prompts = body.texts("prompt")
    if not prompts:
        raise invalid_field("prompt", "prompt must be a string or a list of strings.")
    return prompts


def _sampling(process: BackendProcess, body: JsonBody, seed: int) -> pb.PredictOptions:
    parameters = process.setting("parameters")
    defaults: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
    for key in ("max_completion_tokens", "max_tokens"):
        if (body.whole(key) or 0) < 0:
            raise invalid_field(key, f"{key} must not be negative.")
    chosen = _whole(body, defaults, "seed", default=-1)
    options = pb.PredictOptions(
        ModelIdentity=process.identity,
        Seed=seed if chosen == -1 else chosen,
        Threads=_threads(process),
        Tokens=max(0, _whole(body, defaults, "max_completion_tokens", "max_tokens")),
        TopK=_whole(body, defaults, "top_k", default=_top_k(process)),
        StopPrompts=[*_list(process.setting("stopwords")), *body.texts("stop")],
        IgnoreEOS=body.flag("ignore_eos") or defaults.get("ignore_eos") is True,
        F16KV=process.setting("f16") is True,
        MLock=process.setting("mmlock") is True,
        MMap=process.setting("mmap") is not False,
        PromptCacheAll=process.setting("prompt_cache_all") is not False,
        PromptCacheRO=process.setting("prompt_cache_ro") is True,
        MainGPU=_text(process.setting("main_gpu")),
        TensorSplit=_text(process.setting("tensor_split")),
        NegativePrompt=body.text("negative_prompt", _text(defaults.get("negative_prompt"))),
        LogitBias=encode(body.mapping("logit_bias")).decode() if "logit_bias" in body else "",
        Grammar=grammar_of(body) or _text(process.setting("grammar")),
    )
    for key, field, whole in _WHOLE:
        setattr(options, field, _whole(body, defaults, key, default=whole))
    for key, field, number in _NUMBERS:
        value = body.number(key)
        setattr(options, field, value if value is not None else _number(defaults.get(key), number))
    return options


def _whole(body: JsonBody, defaults: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """The request's value under the first of these keys that it has; otherwise the definition's."""
    for key in keys:
        value = body.whole(key)
        if value is not None:
            return value
    own = defaults.get(keys[-1])
    return own if isinstance(own, int) and not isinstance(own, bool) and abs(own) < 2**31 else default


def _chat_logprobs(body: JsonBody) -> int:
    most = body.whole("top_logprobs") or 0
    if not 0 <= most <= _MAX_LOGPROBS:
        raise invalid_field("top_logprobs", f"top_logprobs must be 0 to {_MAX_LOGPROBS}.")
    if not body.flag("logprobs"):
        if most:
            raise invalid_field("top_logprobs", "top_logprobs needs logprobs to be true.")
        return 0
    return max(1, most)


def _metadata(process: BackendProcess, body: JsonBody) -> dict[str, str]:
    metadata = {key: value for key, value in body.mapping("metadata").items() if isinstance(value, str)}
    thinking = body.mapping("chat_template_kwargs").get("enable_thinking")
    if isinstance(thinking, bool):
        metadata["enable_thinking"] = str(thinking).lower()
    elif process.setting("reasoning", "disable") is True:
        metadata["enable_thinking"] = "false"
    if effort := body.text("reasoning_effort") or _text(process.setting("reasoning_effort")):
        metadata["reasoning_effort"] = effort
    metadata.pop("chat_template_kwargs", None)  # templates run code: only the definition may set their arguments
    if isinstance(own := process.setting("chat_template_kwargs"), Mapping) and own:
        metadata["chat_template_kwargs"] = encode(own).decode()
    return metadata


def _top_k(process: BackendProcess) -> int:
    return 40 if not process.backend or is_llama_cpp(process.backend) else 0


def _threads(process: BackendProcess) -> int:
    value = process.setting("threads")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65_536 else 0


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _texts(value: object) -> dict[str, str]:
    return (
        {str(key): text for key, text in value.items() if isinstance(text, str)} if isinstance(value, Mapping) else {}
    )
