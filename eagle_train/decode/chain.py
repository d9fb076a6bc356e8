"""Chain speculative decoding for measurement: lossless, batched, with key/value caches.

Each pass of the target reads a row's last token and n drafted ones; what it accepts, and one token of its
own, is the answer's next run. How passes are counted: decode/answer.py.

Shapes: B rows, n drafted tokens, T = n + 1 tokens read at a step, P tokens of the longest prompt, V
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from eagle_train.decode.answer import Answer, DecodeOptions
from eagle_train.decode.check import check_options, check_pair, check_prompts, draft_aux_layer_ids
from eagle_train.decode.results import Prompt, PromptResult
from eagle_train.decode.rows import DraftRows, TargetRows
from eagle_train.decode.verify import Verdict, draw, verify_by_sampling, verify_greedily
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget


def measure_acceptance(
    target: FrozenTarget,
    head: Eagle3DraftHead,
    prompts: Sequence[Prompt],
    *,
    num_speculative_tokens: int = 5,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    temperature: float = 0.0,
    proposal: str = "greedy",
    seed: int = 0,
    ignore_eos: bool = False,
    cap_last_step: bool = False,
    progress: bool = True,
) -> list[PromptResult]:
    """Decode an answer to each prompt by speculation and count what was accepted; one result a prompt, in
    order.

    temperature 0 is greedy: in float32 the answer is the target's own greedy one (in bfloat16 two tokens may
    tie, and passes of different lengths round differently). Above 0 it is distributed as the target's own
    samples; proposal says whether draft tokens are the draft's arg-max ("greedy") or drawn from it
    ("sampled"). seed: one stream of random numbers a prompt, so that batch_size changes no answer.
    A target that was loaded with an attention of transformers' own is decoded row by row.

    Raises InputError for a pair that does not belong together, prompts that do not fit, and options out of
    range.
    """
    check_options(num_speculative_tokens, max_new_tokens, batch_size, temperature, proposal, seed)
    check_pair(target, head)
    check_prompts(target, prompts, max_new_tokens)
    options = DecodeOptions(
        num_drafts=num_speculative_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        samples_proposal=temperature > 0 and proposal == "sampled",
        seed=seed,
        cap_last_step=cap_last_step,
        stop_ids=frozenset() if ignore_eos else end_of_text_ids(target),
    )
    return _decode(target, head, prompts, options, batch_size, progress)


def decode_plain(
    target: FrozenTarget,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    ignore_eos: bool = False,
    progress: bool = True,
) -> list[PromptResult]:
    """The target's own answers, a token a pass, by the code of `measure_acceptance` without its draft.

    Its counts are those of n = 0: nothing drafted, verify_steps passes of one token. Raises InputError as
    there.
    """
    check_options(1, max_new_tokens, batch_size, temperature, "greedy", seed)
    check_prompts(target, prompts, max_new_tokens)
    options = DecodeOptions(
        num_drafts=0,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        samples_proposal=False,
        seed=seed,
        cap_last_step=False,
        stop_ids=frozenset() if ignore_eos else end_of_text_ids(target),
    )
    return _decode(target, None, prompts, options, batch_size, progress)


def end_of_text_ids(target: FrozenTarget) -> frozenset[int]:
    """The tokens that end the target's answers: its generation config's, else its config's."""
    for config in (getattr(target.model, "generation_config", None), target.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


@dataclass(frozen=True, slots=True)
class _LastRead:
    """What the target has just read of each row: token_ids_BT from position first_B on, of which num_real_B
    stand, the states there, and the token next_B that it chose behind them.
    """

    token_ids_BT: Tensor
    aux_BT3H: Tensor | None
    first_B: Tensor
    num_real_B: Tensor
    next_B: Tensor

    def keep(self, rows: Tensor) -> "_LastRead":
        aux = None if self.aux_BT3H is None else self.aux_BT3H[rows]
        return _LastRead(
            self.token_ids_BT[rows], aux, self.first_B[rows], self.num_real_B[rows], self.next_B[rows]
        )


class _Batch:
    """Rows that are decoded together, from the prompts on; a row leaves when its answer is done.

    passes: how many times the target has read.
    """

    def __init__(
        self,
        target: FrozenTarget,
        head: Eagle3DraftHead | None,
        answers: list[Answer],
        options: DecodeOptions,
    ) -> None:
        self.target = target
        self.answers = answers
        self.options = options
        longest = max(answer.num_known for answer in answers)
        capacity = longest + options.max_new_tokens + options.num_drafts
        aux_layer_ids = draft_aux_layer_ids(target, head) if head is not None else ()
        self.target_rows = TargetRows(target, aux_layer_ids, capacity)
        self.draft_rows = DraftRows(head, target.embed, capacity) if head is not None else None
        self.uniforms_BSU = self._uniforms() if options.temperature else None
        self.passes = 0
        self.last = self._prefill()

    def _prefill(self) -> _LastRead:
        """Read the prompts and choose each answer's first token."""
        prompts = [torch.tensor(answer.prompt.token_ids) for answer in self.answers]
        ids_BP = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(self.target.device)
        lengths_B = self._tensor([len(prompt) for prompt in prompts])
        first_B = torch.zeros_like(lengths_B)
        aux, final_BPH = self.target_rows.read(ids_BP, first_B, ids_BP.shape[1])
        last_BH = final_BPH[torch.arange(len(prompts), device=ids_BP.device), lengths_B - 1]
        verdict = self._verify(self.target.logits(last_BH)[:, None], ids_BP[:, :0], None)
        for answer, token in zip(self.answers, verdict.next_token_B.tolist(), strict=True):
            answer.add([token])
        return _LastRead(ids_BP, aux, first_B, lengths_B, verdict.next_token_B)

    def step(self) -> None:
        """Draft, verify and add what was accepted."""
        self.passes += 1
        first_B = self.last.first_B + self.last.num_real_B
        drafts_Bn, draft_probs = self._draft()
        ids_BT = torch.cat([self.last.next_B[:, None], drafts_Bn], dim=1)
        num_seen = max(answer.num_known for answer in self.answers) + drafts_Bn.shape[1]
        aux, final_BTH = self.target_rows.read(ids_BT, first_B, num_seen)
        logits_BTV = self.target.logits(final_BTH.flatten(0, 1)).unflatten(0, ids_BT.shape)
        verdict = self._verify(logits_BTV, drafts_Bn, draft_probs)
        table = torch.cat([verdict.num_accepted_B[:, None], drafts_Bn, verdict.next_token_B[:, None]], dim=1)
        for answer, (num_accepted, *tokens) in zip(self.answers, table.tolist(), strict=True):
            answer.count_step(tokens[:num_accepted])
            answer.add([*tokens[:num_accepted], tokens[-1]])
        self.last = _LastRead(ids_BT, aux, first_B, verdict.num_accepted_B + 1, verdict.next_token_B)

    def drop_done(self) -> list[Answer]:
        """Let the rows go whose answers are done, and return these."""
        done = [answer for answer in self.answers if answer.is_done]
        going = [row for row, answer in enumerate(self.answers) if not answer.is_done]
        self.answers = [answer for answer in self.answers if not answer.is_done]
        if done and going:
            rows = self._tensor(going)
            self.target_rows.keep(rows)
            self.last = self.last.keep(rows)
            if self.draft_rows is not None:
                self.draft_rows.keep(rows)
            if self.uniforms_BSU is not None:
                self.uniforms_BSU = self.uniforms_BSU[rows]
        return done

    def _draft(self) -> tuple[Tensor, Tensor | None]:
        """Target ids `[B, n]`, and q `[B, n, V]` where tokens are sampled."""
        num_drafts, last = self.options.num_drafts, self.last
        if self.draft_rows is None or last.aux_BT3H is None:
            return last.token_ids_BT[:, :0], None
        following_BT = F.pad(last.token_ids_BT[:, 1:], (0, 1)).scatter(
            1, last.num_real_B[:, None] - 1, last.next_B[:, None]
        )
        num_rows = max(answer.num_known for answer in self.answers) - 1
        hidden_BH = self.draft_rows.extend(
            following_BT, last.aux_BT3H, last.first_B, last.num_real_B, num_rows
        )
        last_row_B = last.first_B + last.num_real_B - 1
        drafts_Bn, logits = self.draft_rows.draft(hidden_BH, last_row_B, num_drafts, num_rows, self._choose)
        if not self.options.samples_proposal:
            return drafts_Bn, None
        probs_BnVd = self._draft_probs(torch.stack(logits, dim=1))
        probs_BnV = probs_BnVd.new_zeros(*drafts_Bn.shape, self.target.vocab_size)
        probs_BnV[:, :, self.draft_rows.draft_token_ids] = probs_BnVd
        return drafts_Bn, probs_BnV

    def _choose(self, logits_BV: Tensor, step: int) -> Tensor:
        """Draft-vocabulary index `[B]` of a draft step."""
        if not self.options.samples_proposal or self.uniforms_BSU is None:
            return logits_BV.argmax(dim=-1)
        uniform_B = self.uniforms_BSU[:, self.passes, self.options.num_drafts + 1 + step]
        return draw(self._draft_probs(logits_BV), uniform_B)

    def _draft_probs(self, logits: Tensor) -> Tensor:
        return (logits.float() / self.options.temperature).softmax(dim=-1)

    def _verify(self, logits_BTV: Tensor, drafts_Bn: Tensor, draft_probs_BnV: Tensor | None) -> Verdict:
        num_drafts = drafts_Bn.shape[1]
        num_drafted_B = self._tensor([min(answer.num_drafted, num_drafts) for answer in self.answers])
        if self.uniforms_BSU is None:
            return verify_greedily(logits_BTV, drafts_Bn, num_drafted_B)
        last = self.options.num_drafts
        uniforms_BT = self.uniforms_BSU[:, self.passes, last - num_drafts : last + 1]
        temperature = self.options.temperature
        return verify_by_sampling(
            logits_BTV, drafts_Bn, draft_probs_BnV, num_drafted_B, uniforms_BT, temperature
        )

    def _uniforms(self) -> Tensor:
        """`[B, passes, 2n + 1]` draws of [0, 1): n acceptances, the target's own token, n proposals."""
        num_drafts, max_new_tokens = self.options.num_drafts, self.options.max_new_tokens
        draws = [
            np.random.default_rng([self.options.seed, answer.index]).random(
                (max_new_tokens, 2 * num_drafts + 1)
            )
            for answer in self.answers
        ]
        return torch.from_numpy(np.stack(draws)).to(self.target.device)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.target.device)


@torch.no_grad()
def _decode(
    target: FrozenTarget,
    head: Eagle3DraftHead | None,
    prompts: Sequence[Prompt],
    options: DecodeOptions,
    batch_size: int,
    progress: bool,
) -> list[PromptResult]:
    """Prompts of like length share a batch; results come back in the order of the prompts."""
    answers = [Answer(prompt, index, options) for index, prompt in enumerate(prompts)]
    by_length = sorted(answers, key=lambda answer: -answer.num_known)
    num_rows = batch_size if target.isolates_documents else 1
    with tqdm(total=len(answers), desc="decoding", unit="prompt", disable=not progress) as bar:
        for start in range(0, len(answers), num_rows):
            batch = _Batch(target, head, by_length[start : start + num_rows], options)
            bar.update(len(batch.drop_done()))
            while batch.answers:
                batch.step()
                bar.update(len(batch.drop_done()))
    return [answer.result() for answer in answers]
