"""What OpenAI's clients ask for, as options of a generation.

`read` takes the body of a request and gives an `Ask`, or raises ValueError with one line that names
the field. Fields are those of OpenAI's API, a few that local servers have in common, and `e2sci`,
our own. What changes the answer and is not supported is refused; what doesn't is let pass, as are
fields that nobody here knows.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from e2sci.decoding.acceptance import Measure, RuleName
from e2sci.decoding.sampling import SamplingParams
from e2sci.runtime.edge import options_from
from e2sci.runtime.options import Mode, OnCloudLoss, Options
from e2sci.runtime.text import Chat, Prompt

DEFAULTS = Options(sampling=SamplingParams(temperature=1.0))
"""What a request gets that names nothing: OpenAI's temperature, and the target's own text."""
REQUESTS = 32
"""Requests at once, those that wait for the draft model included; the next one gets 429."""
MAX_CHOICES = 8
"""Texts for one prompt (`n`)."""
MAX_TEXTS = 32
"""Texts of one request: prompts times `n`."""
COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as OpenAI has it. A chat goes on to its end."""
_ALL_THAT_FIT = 1 << 18
_SEEDS = 2**63


class E2sci(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Our own options; those of `Options` by the same names, but that its `tale` is `trace`."""

    mode: Mode | None = None
    gamma: float | None = None
    accept: RuleName | None = None
    measure: Measure | None = None
    threshold: float | None = None
    budget: float | None = None
    window: int | None = None
    doubt: float | None = None
    on_cloud_loss: OnCloudLoss | None = None
    tale: bool | None = msgspec.field(default=None, name="trace")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    tool_calls: Any = None
    function_call: Any = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request have. None is as good as absent, everywhere."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    e2sci: E2sci | None = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None


class TextRequest(Request, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


HARMLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), "only text is written; ask for JSON in the prompt"),
    "tools": (([],), "functions are not supported; describe them in the prompt"),
    "tool_choice": (("none", "auto"), "there are no tools to choose from; leave it out"),
    "functions": (([],), "functions are not supported; describe them in the prompt"),
    "function_call": (("none", "auto"), "there are no functions to call; leave it out"),
    "modalities": ((["text"],), "only text is written; leave it out"),
    "audio": ((), "only text is written; leave it out"),
    "web_search_options": ((), "nothing is searched here; leave it out"),
    "echo": ((False,), "the prompt is not repeated; put it before the text yourself"),
    "suffix": (("",), "not supported; write the model's own fill-in-the-middle prompt instead"),
    "best_of": ((1,), "not supported; ask for `n` texts and choose yourself"),
}
"""Fields that are refused: the values that change nothing, and what to do about others."""


@dataclass(frozen=True)
class Ask:
    """What a request asks for: `n` texts for each of `prompts`, in that order, by `options`.

    `usage`: let a stream end with the token counts. `options` hold the first text's seed.
    """

    chat: bool
    model: str | None
    prompts: list[Prompt]
    n: int
    stream: bool
    usage: bool
    options: Options

    def seed(self, text: int) -> int:
        """That of text number `text` of a prompt. It does not depend on the other prompts."""
        return (self.options.sampling.seed + text) % _SEEDS


def read(body: bytes, kind: type[ChatRequest] | type[TextRequest], base: Options) -> Ask:
    """The body of a request. `base`: what it does not name. Raises ValueError."""
    request = _decoded(body, kind)
    _refuse(request)
    prompts = _prompts(request)
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_CHOICES:
        raise ValueError(f"n is {n}; expected 1 to {MAX_CHOICES}")
    if n * len(prompts) > MAX_TEXTS:
        raise ValueError(
            f"prompt: {len(prompts)} prompts with n = {n} are {n * len(prompts)} texts; "
            f"{MAX_TEXTS} at most come in one request"
        )
    wanted = request.stream_options
    if wanted is not None and not request.stream:
        raise ValueError("stream_options: goes with stream = true only")
    return Ask(
        chat=isinstance(request, ChatRequest),
        model=request.model,
        prompts=prompts,
        n=n,
        stream=bool(request.stream),
        usage=wanted is not None and bool(wanted.include_usage),
        options=options_from(base, _changes(request, base)),
    )


def field_of(message: str) -> str | None:
    """The field that an error's message begins with."""
    word = re.split(r"[\s:\[.]", message, maxsplit=1)[0]
    return word if word in FIELDS else None


FIELDS = {name for kind in (ChatRequest, TextRequest) for name in kind.__struct_fields__}


def _decoded(body: bytes, kind: type[ChatRequest] | type[TextRequest]) -> ChatRequest | TextRequest:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(_placed(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None


def _placed(message: str) -> str:
    """msgspec's words with the place in front, as in `messages[0].role: expected …`."""
    what, _, where = message.partition(" - at ")
    place = where.removeprefix("`key` in ").strip("`").lstrip("$.")
    return f"{place or 'the body'}: {what[0].lower()}{what[1:]}"


def _refuse(request: Request) -> None:
    """Raises ValueError on what would change the answer and is not supported."""
    for name, (harmless, mend) in HARMLESS.items():
        value = getattr(request, name, None)
        if value is not None and value not in harmless:
            raise ValueError(f"{name}: {mend}")


# ---- prompts ------------------------------------------------------------------------------

_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for it
    "user": "user",
    "assistant": "assistant",
}


def _prompts(request: ChatRequest | TextRequest) -> list[Prompt]:
    """One chat; or a text, token ids, or a list of either."""
    if isinstance(request, ChatRequest):
        return [_chat(request.messages)]
    given = request.prompt
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if kinds in ({str}, {list}):
        return given  # type: ignore[return-value]
    raise ValueError(
        "prompt: expected a text, token ids, or a list of one or the other that is not empty"
    )


def _chat(messages: Sequence[Message]) -> Chat:
    if not messages:
        raise ValueError("messages: there is none; expected one at least")
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Message, number: int) -> dict[str, str]:
    where = f"messages[{number}]"
    if message.tool_calls or message.function_call:
        raise ValueError(f"{where}: functions are not supported; tell of the call in the text")
    role = _ROLES.get(message.role)
    if role is None:
        raise ValueError(
            f"{where}: the role is {message.role!r}; expected system, developer, user or assistant"
        )
    return {"role": role, "content": _content(message.content, where)}


def _content(content: str | list[Part] | None, where: str) -> str:
    """A message's text; that of its parts on lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise ValueError(f"{where}: only parts of type text are read; drop the {part.type!r}")
    return "\n".join(part.text or "" for part in content)


# ---- options ------------------------------------------------------------------------------


def _changes(request: ChatRequest | TextRequest, base: Options) -> dict[str, Any]:
    """What the request asks for instead of what `base` says."""
    given = {name: getattr(request, name) for name in SamplingParams.__struct_fields__}
    changes = {name: value for name, value in given.items() if value is not None}
    if request.top_k == -1:  # off, in some other servers' language
        changes["top_k"] = 0
    if request.seed is None:
        changes["seed"] = secrets.randbelow(1 << 32)
    if request.stop is not None:
        changes["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    changes["max_tokens"] = _length(request)
    changes["logprobs"] = _logprobs(request)
    changes |= _ours(request.e2sci or E2sci(), base, scored=changes["logprobs"] is not None)
    return changes


def _length(request: ChatRequest | TextRequest) -> int:
    if isinstance(request, TextRequest):
        return COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    wanted = request.max_completion_tokens
    wanted = request.max_tokens if wanted is None else wanted
    return _ALL_THAT_FIT if wanted is None else wanted


def _logprobs(request: ChatRequest | TextRequest) -> int | None:
    if isinstance(request, TextRequest):
        return request.logprobs
    if request.top_logprobs and not request.logprobs:
        raise ValueError("top_logprobs: goes with logprobs = true only")
    return (request.top_logprobs or 0) if request.logprobs else None


def _ours(ours: E2sci, base: Options, *, scored: bool) -> dict[str, Any]:
    """The options under `e2sci`. Who names a mode or a rule leaves behind what tunes the one in
    `base`. Raises ValueError."""
    given = msgspec.structs.asdict(ours).items()
    named = {name: value for name, value in given if value is not None}
    changes: dict[str, Any] = {}
    if "mode" in named or "accept" in named:
        changes = {"measure": "js", **dict.fromkeys(("threshold", "budget", "constants", "window"))}
    if "mode" in named:
        changes |= {"gamma": 0.0, "doubt": 0.0}
    mode = named.get("mode", base.mode)
    if mode in ("cloud", "draft"):
        changes |= {"accept": "strict", "on_cloud_loss": "wait"}
    if scored and base.on_cloud_loss == "draft":
        changes |= {"on_cloud_loss": "wait"}
    if scored and ours.on_cloud_loss == "draft":
        raise ValueError(
            "logprobs: are the target's, and what the draft writes alone has none; drop one of "
            "logprobs and on_cloud_loss"
        )
    return changes | named
