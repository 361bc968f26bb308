"""What is asked and answered while plain requests are measured: as a client of OpenAI's package asks, and no two alike.

Bodies and answers have many lengths, so that nothing can be gained by remembering a whole message: real ones never
repeat. The heads do repeat, as those of real clients and engines do.
"""

from __future__ import annotations

import json

KEY = "ck_" + "b" * 52
MODEL = "bench"
_PROSE = "animals are kept together in a corral, fed and counted there, and led out one by one; "

# What openai-python sends with every request, besides Host and Content-Length.
HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "gzip, deflate",
    "Content-Type": "application/json",
    "User-Agent": "OpenAI/Python 1.59.6",
    "X-Stainless-Lang": "python",
    "X-Stainless-Package-Version": "1.59.6",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Runtime": "CPython",
    "X-Stainless-Runtime-Version": "3.12.8",
    "Authorization": f"Bearer {KEY}",
    "X-Stainless-Async": "false",
    "x-stainless-retry-count": "0",
}


def _text(size: int, start: int) -> str:
    return (_PROSE * (size // len(_PROSE) + 2))[start : start + size]


def chat_body(number: int) -> str:
    """Three to nine hundred bytes."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant.\nAnswer in plain words."},
        {"role": "user", "content": _text(60 + 10 * number, number)},
    ]
    return json.dumps({"model": MODEL, "messages": messages, "temperature": 0.7, "max_tokens": 256})


def chat_answer(number: int) -> str:
    """Three to seven hundred bytes."""
    message = {"role": "assistant", "content": _text(60 + 25 * number, number)}
    return json.dumps(
        {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 1_700_000_000 + number,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 30, "completion_tokens": 9 + number, "total_tokens": 39 + number},
        }
    )


BODIES = tuple(chat_body(number) for number in range(64))
ANSWERS = tuple(chat_answer(number) for number in range(16))


def wrk_script() -> str:
    """Sends the bodies in turn, all of them written out before the clock starts, and prints what came of it."""
    headers = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in HEADERS.items())
    bodies = ",\n".join(f"[==[{body}]==]" for body in BODIES)
    return f"""wrk.method = "POST"
{headers}
local bodies = {{{bodies}}}
local written, turn = {{}}, 0
init = function(args)
  for i, body in ipairs(bodies) do written[i] = wrk.format(nil, nil, nil, body) end
end
request = function()
  turn = turn % #written + 1
  return written[turn]
end
done = function(summary, latency)
  io.write(string.format("RESULT %d %d %f\\n", summary.requests, summary.duration, latency:percentile(50)))
  io.write(string.format("FAULTS %d\\n", summary.errors.status + summary.errors.read + summary.errors.connect))
end
"""


def nginx_upstream(port: int) -> str:
    """An upstream that answers from memory, chosen by the request's number on its connection."""
    share = 100 / len(ANSWERS)
    rows = [f"{share}% '{answer}';" for answer in ANSWERS[:-1]] + [f"* '{ANSWERS[-1]}';"]
    return (
        'split_clients "$connection.$connection_requests" $answer { ' + " ".join(rows) + " }\n"
        f"  server {{ listen 127.0.0.1:{port} backlog=4096; default_type application/json;\n"
        "    location / { return 200 $answer; } }"
    )
