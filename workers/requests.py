"""What flows through the worker: a request made ready, and how its generation ended."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from queue_service import keys
from queue_service.broker import Claimed
from queue_service.payload import Encoding
from queue_service.progress import Progress, ProgressHeader
from queue_service.requests import Endpoint
from queue_service.responses import Choice
from workers.answer_forms import PLAIN_TEXT, AnswerForm
from workers.engine import NO_RULES, LogitRules, RowRequest, TokenMatcher
from workers.sampling import SamplingPlan
from workers.text import Decoder


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        ids: token ids, at least one, all inside the vocabulary.
        token_limit: the most tokens of one answer to it, at least 1.
        echo: text that every answer begins with.
        keep: lengths of it after which keys and values are kept for later prompts.
    """

    ids: tuple[int, ...]
    token_limit: int
    echo: str = ""
    keep: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A claimed job whose body was read, checked, rendered and tokenised.

    Attributes:
        model: the name the answer carries.
        prompts: at least one; a chat has one.
        samplings: how each choice is drawn: the first prompt's choices, then the next one's.
        stop_strings: none of them empty.
        stop_ids: tokens that end a choice.
        stream: the text is wanted in the job's stream as it comes.
        encoding: how the job was serialized, and so how its result is.
        rules: what logits go through before a token is drawn.
        form: what the answers consist of, and what their tokens must follow.
        num_top_logprobs: log-probabilities wanted beside each token's own; None for none at all.
        priority: among the requests that a worker holds, higher goes first.
        keeps_answer: keys and values of prompt and answer are kept, for a chat that goes on.
        model_digest: of what generates it; another model does not go on with its tokens.
        resumed: what an earlier execution of the job has generated, to go on with.
    """

    claimed: Claimed
    endpoint: Endpoint
    model: str
    prompts: tuple[Prompt, ...]
    samplings: tuple[SamplingPlan, ...]
    stop_strings: tuple[str, ...]
    stop_ids: frozenset[int]
    stream: bool
    encoding: Encoding
    rules: LogitRules = NO_RULES
    form: AnswerForm = PLAIN_TEXT
    num_top_logprobs: int | None = None
    priority: int = 0
    keeps_answer: bool = False
    model_digest: str = ""
    resumed: Progress | None = None

    @property
    def execution_id(self) -> str:
        """The execution that runs this request; its key everywhere."""
        return self.claimed.execution_id

    @property
    def is_urgent(self) -> bool:
        """Whether it came through a queue above the others, which make room for it."""
        return self.priority >= keys.QUEUE_PRIORITY // 2

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def choices_per_prompt(self) -> int:
        """Answers to each prompt."""
        return len(self.samplings) // len(self.prompts)

    def prompt_of(self, choice: int) -> Prompt:
        """Return the prompt that a choice answers."""
        return self.prompts[choice // self.choices_per_prompt]

    def progress_header(self, *, cached_tokens: int) -> ProgressHeader:
        """Return what the next execution of the job must agree with to go on."""
        digest = blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(array("I", prompt.ids))
            digest.update(b"/")
        return ProgressHeader(
            digest.hexdigest(), self.model_digest, self.samplings[0].seed, cached_tokens
        )

    def resume(self, progress: Progress | None) -> PreparedRequest:
        """Return the request that goes on with what was generated; itself where that cannot be."""
        if progress is None or not self._can_resume(progress):
            return self
        return replace(self, resumed=progress)

    def _can_resume(self, progress: Progress) -> bool:
        header = self.progress_header(cached_tokens=progress.header.cached_tokens)
        return header == progress.header and all(
            choice < len(self.samplings) and len(ids) <= self.prompt_of(choice).token_limit
            for choice, ids in progress.tokens.items()
        )

    def generated(self, choice: int) -> tuple[int, ...]:
        """Return the tokens that an earlier execution generated of a choice, its end included."""
        return self.resumed.tokens.get(choice, ()) if self.resumed is not None else ()

    def rows(self, decoder: Decoder) -> list[RowRequest]:
        """Return a row for each choice, in their order.

        Raises:
            Exception: a matcher refuses what was generated before.
        """
        rows = []
        for choice, sampling in enumerate(self.samplings):
            prompt = self.prompt_of(choice)
            is_sibling = choice % self.choices_per_prompt > 0
            rows.append(
                RowRequest(
                    row_id=self.row_id(choice),
                    prompt_ids=prompt.ids,
                    token_limit=prompt.token_limit,
                    sampling=sampling,
                    stop_ids=self.stop_ids,
                    rules=self.rules,
                    matcher=self._matcher(decoder, choice),
                    generated_ids=self.generated(choice),
                    num_top_logprobs=self.num_top_logprobs,
                    priority=self.priority,
                    keep=() if is_sibling else prompt.keep,
                    keeps_answer=self.keeps_answer,
                    is_sibling=is_sibling,
                )
            )
        return rows

    def _matcher(self, decoder: Decoder, choice: int) -> TokenMatcher | None:
        matcher = self.form.matcher(decoder)
        if matcher is not None:
            for token_id in self.generated(choice):
                if token_id not in self.stop_ids:
                    matcher.accept(token_id)
        return matcher

    def row_id(self, choice: int) -> str:
        """Return the engine's key of a choice."""
        return f"{self.execution_id}/{choice}"


@dataclass(frozen=True, slots=True)
class RunTimes:
    """When a generation came how far, in seconds of the monotonic clock.

    Attributes:
        began: it was handed to the engine.
        admitted: its first row took its place in the batch.
        first_token: the first token of any choice was there.
        ended: the last one was.
    """

    began: float
    admitted: float
    first_token: float
    ended: float


@dataclass(frozen=True, slots=True)
class Generated:
    """A generation that came to its end: every choice has.

    Attributes:
        times: None for one that had its last token before this worker had it.
    """

    request: PreparedRequest
    choices: Sequence[Choice]
    cached_tokens: int = 0
    times: RunTimes | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens that this execution generated, without those of executions before it."""
        earlier = self.request.resumed
        num_earlier = sum(map(len, earlier.tokens.values())) if earlier is not None else 0
        return max(0, sum(choice.completion_tokens for choice in self.choices) - num_earlier)

    @property
    def claimed(self) -> Claimed:
        """The execution that this ends."""
        return self.request.claimed


@dataclass(frozen=True, slots=True)
class Refused:
    """An execution that ended without an answer; the error's class decides what becomes of it."""

    claimed: Claimed
    error: Exception


Result = Generated | Refused
