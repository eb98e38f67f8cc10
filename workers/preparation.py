"""Makes a claimed job ready to run: body, prompt text, token ids, limits, sampling plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from queue_service import keys
from queue_service.broker import Claimed
from queue_service.errors import RequestError
from queue_service.json_text import quoted
from queue_service.payload import Call, decode_call
from queue_service.prefix_plan import Mark
from queue_service.progress import Progress
from queue_service.requests import (
    ChatRequest,
    CompletionRequest,
    Endpoint,
    Request,
    parse_request,
)
from queue_service.tool_fields import ToolChoiceMode
from workers.answer_forms import AnswerForms
from workers.chat_prompts import LEAST_PLANNED_TOKENS, OTHER_TEXTS, ChatPrompts
from workers.engine import LogitRules
from workers.known_beginnings import KnownBeginnings
from workers.requests import PreparedRequest, Prompt
from workers.sampling import SamplingDefaults, SamplingPlan, default_seed
from workers.token_history import TokenHistory

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
        eos_token_ids: what ends an answer.
    """

    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    ceiling_tokens: int | None = None
    default_tokens: int | None = None


class PromptEncoder(Protocol):
    """What is asked of a tokenizer here."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt text of a chat; raises RequestError with the template's words."""

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""


class Preparer:
    """Reads jobs for one model. A pure function of the job; safe on several threads.

    Args:
        model: the name that answers carry.
        forms: reads and bounds the form of answers; None where a model's answers are plain text.
        defaults: what a request gets that does not say.
        allowed_callbacks: names that a job may have called at its end.
        history: the tokens of chats whose keys and values are kept; None where none are.
        model_digest: of the model; what another one generated is not gone on with.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        limits: Limits,
        *,
        model: str,
        forms: AnswerForms | None = None,
        defaults: SamplingDefaults | None = None,
        allowed_callbacks: frozenset[str] = frozenset(),
        history: TokenHistory | None = None,
        model_digest: str = "",
    ) -> None:
        self._encoder = encoder
        self._chats = ChatPrompts(encoder, history)
        self._beginnings = KnownBeginnings() if history is not None else None
        self._model_digest = model_digest
        self._limits = limits
        self._model = model
        self._forms = forms or AnswerForms()
        self._defaults = defaults or SamplingDefaults()
        self._usual_rules = LogitRules(repetition_penalty=self._defaults.repetition_penalty)
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
        keeps_answer = False
        _check_agreement(request)
        mark = Mark.parse(claimed.text("qsvc_prefix"))
        if isinstance(request, ChatRequest):
            rendering = self._rendering(request)
            rendered = self._render(request, rendering)
            chat = self._chats.encode(request, rendered, rendering, body=body, mark=mark)
            prompts: tuple[Prompt, ...] = (self._prompt(request, chat.ids, keep=chat.keep),)
            keeps_answer = chat.keeps_answer and request.n == 1
            form = self._forms.of_chat(request, rendered, job_id=claimed.job_id)
        else:
            prompts = tuple(self._text_prompt(request, prompt, mark) for prompt in request.prompts)
            form = self._forms.of_text(request)
        prepared = PreparedRequest(
            claimed=claimed,
            endpoint=endpoint,
            model=self._model,
            prompts=prompts,
            samplings=self._samplings(request, claimed, request.n * len(prompts)),
            stop_strings=request.stop_strings,
            stop_ids=self._stop_ids(request),
            stream=bool(request.stream) or claimed.text("qsvc_stream") == "1",
            encoding=call.encoding,
            rules=self._rules(request),
            form=form,
            num_top_logprobs=request.num_top_logprobs,
            priority=keys.queue_priority(claimed.queue) + request.priority,
            keeps_answer=keeps_answer,
            model_digest=self._model_digest,
        )
        return self._resumed(prepared)

    def prompt_ids(self, claimed: Claimed) -> Sequence[int]:
        """Return the tokens of a job's first prompt, without making it ready to run.

        Raises:
            RequestError: it can never run.
        """
        endpoint, body = _endpoint_and_body(decode_call(claimed.fields.get("data", b"")))
        request = parse_request(endpoint, body, is_clean=True)
        if isinstance(request, ChatRequest):
            return self._encoder.encode_chat(self._render(request, self._rendering(request)))
        prompt = request.prompts[0]
        if isinstance(prompt, str):
            return self._encoder.encode(prompt, add_special_tokens=True)
        self._check_ids(prompt, "prompt")
        return prompt

    def _resumed(self, request: PreparedRequest) -> PreparedRequest:
        """Let a request go on with what an earlier execution of its job has generated."""
        joined = request.claimed.fields.get("qsvc_progress")
        if not joined:
            return request
        progress = Progress.decode(joined, num_top_logprobs=request.num_top_logprobs)
        if progress is not None:
            size = self._limits.vocabulary_size
            if any(token_id >= size for ids in progress.tokens.values() for token_id in ids):
                return request
        return request.resume(progress)

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

    @staticmethod
    def _rendering(request: ChatRequest) -> dict[str, Any]:
        """Return the keywords that a chat's template gets, without those of the last turn."""
        kwargs: dict[str, Any] = dict(request.chat_template_kwargs)
        for name in ("add_generation_prompt", "continue_final_message", "parse_special_tokens"):
            if name in kwargs:
                raise RequestError(
                    f"{name} is a field of the request, not of its chat_template_kwargs",
                    param=f"chat_template_kwargs.{name}",
                )
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
            kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
        if request.tools and request.tool_choice.mode is not ToolChoiceMode.NONE:
            kwargs["tools"] = request.tools_for_template()
        if request.parse_special_tokens:
            kwargs["parse_special_tokens"] = True
        return kwargs

    def _render(self, request: ChatRequest, rendering: dict[str, Any]) -> str:
        return self._encoder.render_chat(
            request.template_messages(),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **rendering,
        )

    def _text_prompt(
        self, request: CompletionRequest, prompt: str | tuple[int, ...], mark: Mark | None
    ) -> Prompt:
        if isinstance(prompt, str):
            ids = self._encoder.encode(prompt, add_special_tokens=True)
        else:
            ids = list(prompt)
            self._check_ids(ids, "prompt")
        echo = ""
        if request.echo:
            if request.num_top_logprobs is not None:
                raise RequestError("'echo' and 'logprobs' together are not supported", param="echo")
            echo = prompt if isinstance(prompt, str) else self._encoder.decode(prompt)
        keep: tuple[int, ...] = ()
        if mark is not None and isinstance(prompt, str) and len(request.prompts) == 1:
            keep = self._planned(prompt, ids, mark)
        return self._prompt(request, ids, echo=echo, keep=keep)

    def _planned(self, prompt: str, ids: Sequence[int], mark: Mark) -> tuple[int, ...]:
        """Return the length of what a text has in common with others, if that is worth keeping."""
        if self._beginnings is None:
            return ()
        length = self._beginnings.length(
            mark.group,
            ids,
            lambda: (
                self._encoder.encode(prompt[: mark.chars] + text, add_special_tokens=True)
                for text in OTHER_TEXTS
            ),
        )
        return (length,) if length >= LEAST_PLANNED_TOKENS else ()

    def _prompt(
        self, request: Request, ids: Sequence[int], *, echo: str = "", keep: tuple[int, ...] = ()
    ) -> Prompt:
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        return Prompt(tuple(ids), self._token_limit(request, len(ids)), echo, keep)

    def _check_ids(self, ids: Iterable[int], field: str) -> None:
        size = self._limits.vocabulary_size
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise RequestError(
                f"{field} holds token id {wrong}, but the model's vocabulary has {size} ids",
                param=field,
            )

    def _token_limit(self, request: Request, num_prompt: int) -> int:
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

    def _stop_ids(self, request: Request) -> frozenset[int]:
        if not request.stop_token_ids and not request.ignore_eos:
            return self._limits.eos_token_ids
        self._check_ids(request.stop_token_ids, "stop_token_ids")
        own = frozenset() if request.ignore_eos else self._limits.eos_token_ids
        return own | frozenset(request.stop_token_ids)

    def _rules(self, request: Request) -> LogitRules:
        if request.logit_bias:
            self._check_ids((token_id for token_id, _ in request.logit_bias), "logit_bias")
        elif (
            request.repetition_penalty is None
            and request.frequency_penalty is None
            and request.presence_penalty is None
            and request.min_tokens is None
        ):
            return self._usual_rules
        return LogitRules(
            bias=request.logit_bias,
            repetition_penalty=_given(
                request.repetition_penalty, self._defaults.repetition_penalty
            ),
            frequency_penalty=_given(request.frequency_penalty, 0.0),
            presence_penalty=_given(request.presence_penalty, 0.0),
            min_tokens=_given(request.min_tokens, 0),
        )

    def _samplings(
        self, request: Request, claimed: Claimed, num_choices: int
    ) -> tuple[SamplingPlan, ...]:
        """Return a plan for each choice; the seed of a choice is the request's plus its index."""
        generation = claimed.number("qsvc_generation") or 0
        defaults = self._defaults
        return tuple(
            SamplingPlan(
                temperature=_given(request.temperature, defaults.temperature),
                top_p=_given(request.top_p, defaults.top_p),
                top_k=_given(request.top_k, defaults.top_k),
                min_p=_given(request.min_p, defaults.min_p),
                xtc_probability=_given(request.xtc_probability, 0.0),
                xtc_threshold=_given(request.xtc_threshold, 0.1),
                seed=default_seed(claimed.job_id, generation, choice)
                if request.seed is None
                else request.seed + choice,
            )
            for choice in range(num_choices)
        )


def _check_agreement(request: Request) -> None:
    """Refuse fields that contradict a constraint: they ask for text beyond its end."""
    is_demanded = isinstance(request, ChatRequest) and request.tool_choice.mode in (
        ToolChoiceMode.REQUIRED,
        ToolChoiceMode.NAMED,
    )
    if request.constraint is None and not is_demanded:
        return
    contradictions = {
        "ignore_eos": request.ignore_eos,
        "min_tokens": bool(request.min_tokens),
        "echo": isinstance(request, CompletionRequest) and request.echo,
    }
    for name, is_set in contradictions.items():
        if is_set:
            raise RequestError(
                f"'{name}' cannot be used where the form of the answer is bound", param=name
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
            f"function {quoted(call.function)} is not one that qsvc runs ({known})",
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
