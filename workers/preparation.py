"""Makes a claimed job ready to run: body, prompt text, token ids, limits, sampling plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from queue_service.broker import Claimed
from queue_service.errors import RequestError
from queue_service.payload import Call, decode_call
from queue_service.requests import ChatRequest, CompletionRequest, Endpoint, parse_request
from workers.requests import PreparedRequest
from workers.sampling import SamplingPlan, default_seed

_T = TypeVar("_T")

# RQ writes this timeout into every job that was enqueued without one.
_RQ_DEFAULT_TIMEOUT_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the operator allow.

    Attributes:
        context_tokens: the most tokens of prompt and answer together.
        ceiling_tokens: the most tokens of one answer, None for no ceiling.
        default_tokens: the answer's limit when the request names none, None for the context's.
        vocabulary_size: token ids are below it.
    """

    context_tokens: int
    vocabulary_size: int
    ceiling_tokens: int | None = None
    default_tokens: int | None = None


class PromptEncoder(Protocol):
    """What is asked of a tokenizer here."""

    def render_chat(self, messages: list[dict[str, Any]], /) -> str:
        """Return the prompt text of a chat; raises RequestError with the template's words."""

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""


class Preparer:
    """Reads jobs for one model. A pure function of the job; safe on several threads.

    Args:
        model: the name that answers carry.
        default_temperature: used when a request names none.
        allowed_callbacks: names that a job may have called at its end.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        limits: Limits,
        *,
        model: str,
        default_temperature: float = 1.0,
        allowed_callbacks: frozenset[str] = frozenset(),
    ) -> None:
        self._encoder = encoder
        self._limits = limits
        self._model = model
        self._default_temperature = default_temperature
        self._allowed_callbacks = allowed_callbacks

    def prepare(self, claimed: Claimed) -> PreparedRequest:
        """Make one job ready.

        Raises:
            RequestError: it can never run; the error says what is wrong with which field.
        """
        self._check_followers(claimed)
        call = decode_call(claimed.fields.get("data", b""))
        endpoint, body = _endpoint_and_body(call)
        request = parse_request(endpoint, body, is_clean=True)
        prompt_ids = self._encode(request)
        return PreparedRequest(
            claimed=claimed,
            endpoint=endpoint,
            model=self._model,
            prompt_ids=tuple(prompt_ids),
            token_limit=self._token_limit(request, len(prompt_ids)),
            sampling=self._sampling(request, claimed),
            stop_strings=request.stop_strings,
            stream=bool(request.stream) or claimed.text("qsvc_stream") == "1",
            encoding=call.encoding,
        )

    def _check_followers(self, claimed: Claimed) -> None:
        """Refuse a job whose end would import a name or call a URL that came from Redis."""
        for kind in ("success", "failure", "stopped"):
            name = claimed.text(f"{kind}_callback_name")
            if name is not None and name not in self._allowed_callbacks:
                raise RequestError(
                    f"the {kind} callback is not one that this worker allows; name it in "
                    "QSVC_WORKER_CALLBACKS there",
                    code="callback_not_allowed",
                )
        if claimed.text("webhooks") not in (None, "[]"):
            raise RequestError("webhooks are not supported", code="webhook_not_allowed")

    def _encode(self, request: ChatRequest | CompletionRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            rendered = self._encoder.render_chat(request.template_messages())
            ids = self._encoder.encode_chat(rendered)
        elif isinstance(request.prompt, str):
            ids = self._encoder.encode(request.prompt, add_special_tokens=True)
        else:
            ids = list(request.prompt)
            wrong = [i for i in ids if not 0 <= i < self._limits.vocabulary_size]
            if wrong:
                raise RequestError(
                    f"prompt holds token id {wrong[0]}, but the model's vocabulary has "
                    f"{self._limits.vocabulary_size} ids",
                    param="prompt",
                )
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        return ids

    def _token_limit(self, request: ChatRequest | CompletionRequest, num_prompt: int) -> int:
        room = self._limits.context_tokens - num_prompt
        if room < 1:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but the model's context holds "
                f"{self._limits.context_tokens}, the answer included; shorten the prompt",
                code="context_length_exceeded",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )
        wanted = request.token_limit or self._limits.default_tokens or room
        return min(wanted, room, self._limits.ceiling_tokens or room)

    def _sampling(self, request: ChatRequest | CompletionRequest, claimed: Claimed) -> SamplingPlan:
        generation = claimed.number("qsvc_generation") or 0
        return SamplingPlan(
            temperature=_given(request.temperature, self._default_temperature),
            top_p=_given(request.top_p, 1.0),
            seed=_given(request.seed, default_seed(claimed.job_id, generation, 0)),
        )


def wants_stream(claimed: Claimed) -> bool:
    """Return whether the job's text is wanted in its stream; False where nobody can tell."""
    if claimed.batch_id is not None:
        return claimed.text("qsvc_stream") == "1"
    try:
        _, body = _endpoint_and_body(decode_call(claimed.fields.get("data", b"")))
    except RequestError:
        return False
    return body.get("stream") is True


def timeout_seconds(claimed: Claimed) -> int | None:
    """Return how long the job may run by its own word; None is for ever.

    RQ's default of 180 seconds, which nobody asked for, is no limit: it was made for web tasks.
    """
    timeout = claimed.number("timeout")
    if timeout is None or timeout <= 0 or timeout == _RQ_DEFAULT_TIMEOUT_SECONDS:
        return None
    return timeout


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _endpoint_and_body(call: Call) -> tuple[Endpoint, dict[str, object]]:
    endpoint = Endpoint.of_function(call.function)
    if endpoint is None:
        known = ", ".join(e.function for e in Endpoint)
        raise RequestError(
            f"function {call.function!r} is not one that qsvc runs ({known})",
            code="unknown_function",
        )
    arguments = [*call.args, *([call.kwargs["body"]] if "body" in call.kwargs else [])]
    extra = call.kwargs.keys() - {"body"}
    if len(arguments) != 1 or extra or not isinstance(arguments[0], dict):
        raise RequestError(
            f"{call.function} takes one argument, the request body as an object",
            code="invalid_payload",
        )
    return endpoint, arguments[0]
