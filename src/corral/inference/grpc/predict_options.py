"""What Predict, PredictStream, Embedding and TokenizeString are asked (docs/reference/wire/grpc.md#predict). Pure.

Each value is the request's, else the model definition's, else what LocalAI's own core would send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.inference.api_errors import bad
from corral.inference.backend_process import Served
from corral.inference.load_options import is_llama_cpp
from corral.inference.openai.grammars import grammar_of
from corral.inference.openai.json_body import Asked
from corral.inference.openai.messages import read_conversation, read_tools

_MOST_LOGPROBS = 20

# Request key (and key below `parameters` of the definition), field, what core sends when nobody says.
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


def chat_options(served: Served, asked: Asked, seed: int) -> pb.PredictOptions:
    """Raises Refused. `seed` is for requests that bring none."""
    options = _sampling(served, asked, seed)
    conversation = read_conversation(asked, _text(served.setting("system_prompt")))
    tools, choice = read_tools(asked)
    if served.setting("template", "use_tokenizer_template") is False:
        # Somebody said so: a backend that cannot render messages gets one text.
        joined_by = _text(served.setting("template", "join_chat_messages_by_character")) or "\n"
        options.Prompt = conversation.plain(_texts(served.setting("roles")), joined_by)
    else:
        options.UseTokenizerTemplate = True
        options.Messages.extend(conversation.messages)
    options.Images.extend(conversation.images)
    options.Audios.extend(conversation.audios)
    options.Videos.extend(conversation.videos)
    options.Tools, options.ToolChoice = tools, choice
    options.Logprobs = options.TopLogprobs = _chat_logprobs(asked)
    options.Metadata.update(_metadata(served, asked))
    return options


def completion_options(served: Served, asked: Asked, prompt: str, seed: int) -> pb.PredictOptions:
    options = _sampling(served, asked, seed)
    options.Prompt = prompt
    wanted = asked.whole("logprobs")
    if wanted is not None:
        if not 0 <= wanted <= _MOST_LOGPROBS:
            raise bad("logprobs", f"logprobs must be 0 to {_MOST_LOGPROBS}.")
        options.Logprobs = options.TopLogprobs = max(1, wanted)
    return options


def text_options(served: Served) -> pb.PredictOptions:
    """For the RPCs that take a text and sample nothing."""
    return pb.PredictOptions(ModelIdentity=served.identity, Threads=_threads(served))


def prompts_of(asked: Asked) -> list[str]:
    """What `/v1/completions` shall continue: one text, or several."""
    told = asked.get("prompt")
    if isinstance(told, list) and any(isinstance(item, int | list) for item in told):
        raise bad("prompt", "prompt must be text: token ids cannot be sent to this backend.")
    prompts = asked.texts("prompt")
    if not prompts:
        raise bad("prompt", "prompt must be a string or a list of strings.")
    return prompts


def _sampling(served: Served, asked: Asked, seed: int) -> pb.PredictOptions:
    parameters = served.setting("parameters")
    told: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
    for key in ("max_completion_tokens", "max_tokens"):
        if (asked.whole(key) or 0) < 0:
            raise bad(key, f"{key} must not be negative.")
    chosen = _whole(asked, told, "seed", default=-1)
    options = pb.PredictOptions(
        ModelIdentity=served.identity,
        Seed=seed if chosen == -1 else chosen,
        Threads=_threads(served),
        Tokens=max(0, _whole(asked, told, "max_completion_tokens", "max_tokens")),
        TopK=_whole(asked, told, "top_k", default=_top_k(served)),
        StopPrompts=[*_list(served.setting("stopwords")), *asked.texts("stop")],
        IgnoreEOS=asked.flag("ignore_eos") or told.get("ignore_eos") is True,
        F16KV=served.setting("f16") is True,
        MLock=served.setting("mmlock") is True,
        MMap=served.setting("mmap") is not False,
        PromptCacheAll=served.setting("prompt_cache_all") is not False,
        PromptCacheRO=served.setting("prompt_cache_ro") is True,
        MainGPU=_text(served.setting("main_gpu")),
        TensorSplit=_text(served.setting("tensor_split")),
        NegativePrompt=asked.text("negative_prompt", _text(told.get("negative_prompt"))),
        LogitBias=encode(asked.mapping("logit_bias")).decode() if "logit_bias" in asked else "",
        Grammar=grammar_of(asked) or _text(served.setting("grammar")),
    )
    for key, field, whole in _WHOLE:
        setattr(options, field, _whole(asked, told, key, default=whole))
    for key, field, number in _NUMBERS:
        value = asked.number(key)
        setattr(options, field, value if value is not None else _number(told.get(key), number))
    return options


def _whole(asked: Asked, told: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """The request's, by the first of these names it uses; else the definition's."""
    for key in keys:
        value = asked.whole(key)
        if value is not None:
            return value
    own = told.get(keys[-1])
    return own if isinstance(own, int) and not isinstance(own, bool) and abs(own) < 2**31 else default


def _chat_logprobs(asked: Asked) -> int:
    most = asked.whole("top_logprobs") or 0
    if not 0 <= most <= _MOST_LOGPROBS:
        raise bad("top_logprobs", f"top_logprobs must be 0 to {_MOST_LOGPROBS}.")
    if not asked.flag("logprobs"):
        if most:
            raise bad("top_logprobs", "top_logprobs needs logprobs to be true.")
        return 0
    return max(1, most)


def _metadata(served: Served, asked: Asked) -> dict[str, str]:
    told = {key: value for key, value in asked.mapping("metadata").items() if isinstance(value, str)}
    thinking = asked.mapping("chat_template_kwargs").get("enable_thinking")
    if isinstance(thinking, bool):
        told["enable_thinking"] = str(thinking).lower()
    elif served.setting("reasoning", "disable") is True:
        told["enable_thinking"] = "false"
    if effort := asked.text("reasoning_effort") or _text(served.setting("reasoning_effort")):
        told["reasoning_effort"] = effort
    told.pop("chat_template_kwargs", None)  # the template runs code: what it is given is the model owner's to say
    if isinstance(own := served.setting("chat_template_kwargs"), Mapping) and own:
        told["chat_template_kwargs"] = encode(own).decode()
    return told


def _top_k(served: Served) -> int:
    return 40 if not served.backend or is_llama_cpp(served.backend) else 0


def _threads(served: Served) -> int:
    value = served.setting("threads")
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
