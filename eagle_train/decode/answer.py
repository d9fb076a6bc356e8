"""One answer while it is decoded, on the host: its tokens and its counts.

The counts are those of serving engines:

- The prefill's token is nobody's draft: it is not counted, and its pass is no verify step.
- n tokens are drafted at every step (vLLM). With cap_last_step no more than the tokens left less one, and a
  pass with nothing drafted is no verify step (llama.cpp).
- Accepted tokens behind an end of text are not counted; those behind max_new_tokens are.
"""

from dataclasses import dataclass, field

from eagle_train.decode.results import Prompt, PromptResult, is_looping


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """num_drafts: n, 0 in plain decoding; stop_ids: tokens that end an answer; the rest as in
    `measure_acceptance`.
    """

    num_drafts: int
    max_new_tokens: int
    temperature: float
    samples_proposal: bool
    seed: int
    cap_last_step: bool
    stop_ids: frozenset[int]


@dataclass(slots=True)
class Answer:
    """One row's answer so far, on the host. index: the prompt's place in the input."""

    prompt: Prompt
    index: int
    options: DecodeOptions
    tokens: list[int] = field(default_factory=list)
    verify_steps: int = 0
    drafted: int = 0
    accepted: list[int] = field(init=False)
    accepted_per_step: list[int] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.accepted = [0] * self.options.num_drafts

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and the answer."""
        return len(self.prompt.token_ids) + len(self.tokens)

    @property
    def num_left(self) -> int:
        return self.options.max_new_tokens - len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Draft tokens that count at the next step."""
        num_drafts = self.options.num_drafts
        return min(num_drafts, self.num_left - 1) if self.options.cap_last_step else num_drafts

    @property
    def is_done(self) -> bool:
        return self.stopped or self.num_left <= 0

    def count_step(self, accepted_tokens: list[int]) -> None:
        """Count one verify step, before its tokens are added."""
        num_drafted, stop_ids = self.num_drafted, self.options.stop_ids
        if num_drafted == 0 and self.options.cap_last_step:
            return
        end = next((i for i, token in enumerate(accepted_tokens) if token in stop_ids), len(accepted_tokens))
        self.verify_steps += 1
        self.drafted += num_drafted
        num_accepted = min(len(accepted_tokens), end + 1)
        self.accepted_per_step.append(num_accepted)
        for position in range(num_accepted):
            self.accepted[position] += 1

    def add(self, tokens: list[int]) -> None:
        """Add tokens up to the first end of text or the limit."""
        for token in tokens[: self.num_left]:
            self.tokens.append(token)
            if token in self.options.stop_ids:
                self.stopped = True
                return

    def result(self) -> PromptResult:
        return PromptResult(
            source=self.prompt.source,
            category=self.prompt.category,
            token_ids=tuple(self.tokens),
            verify_steps=self.verify_steps,
            drafted=self.drafted,
            accepted_per_position=tuple(self.accepted),
            is_looping=is_looping(self.tokens),
            stopped=self.stopped,
            accepted_per_step=tuple(self.accepted_per_step),
        )
