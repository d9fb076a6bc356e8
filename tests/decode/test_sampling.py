"""Sampled answers are distributed as the target's own, whatever the draft proposes."""

from itertools import product

import pytest
import torch
from torch import Tensor

import eagle_train.decode.chain
from eagle_train.decode.chain import measure_acceptance
from eagle_train.decode.results import Prompt
from eagle_train.decode.verify import Verdict, draw, verify_by_sampling, verify_greedily
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import FrozenTarget
from tests.decode.pairs import own_head, random_prompts
from tests.tiny import tiny_target

VOCAB_SIZE = 8
NUM_TOKENS = 3
NUM_SAMPLES = 5000
PROMPT = (3, 1, 5)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def pair() -> tuple[FrozenTarget, Eagle3DraftHead]:
    target = tiny_target(vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        target.lm_head.weight.mul_(2)  # peaked enough that p and q differ
    prompts = [Prompt(PROMPT, str(index)) for index in range(16)]
    return target, own_head(target, prompts, draft_vocab_size=5, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def llama() -> tuple[FrozenTarget, Eagle3DraftHead]:
    target = tiny_target()
    return target, own_head(target, random_prompts())


@torch.no_grad()
def exact_probabilities(target: FrozenTarget) -> Tensor:
    """Probability `[8 ** 3]` of every answer, from one plain forward over all of them."""
    answers = torch.tensor(list(product(range(VOCAB_SIZE), repeat=NUM_TOKENS)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], dim=1)
    log_probs = (target.model(input_ids=ids, use_cache=False).logits / TEMPERATURE).log_softmax(dim=-1)
    rows = log_probs[:, len(PROMPT) - 1 : -1].gather(2, answers[..., None])
    return rows.sum(dim=(1, 2)).double().exp()


def p_value(pair: tuple[FrozenTarget, Eagle3DraftHead], proposal: str) -> float:
    """Pearson's chi-square test of the answers' counts; cells of fewer than 5 expected are pooled."""
    target, head = pair
    prompts = [Prompt(PROMPT, str(index)) for index in range(NUM_SAMPLES)]
    results = measure_acceptance(
        target,
        head,
        prompts,
        num_speculative_tokens=2,
        max_new_tokens=NUM_TOKENS,
        batch_size=NUM_SAMPLES,
        temperature=TEMPERATURE,
        proposal=proposal,
        ignore_eos=True,
        progress=False,
    )
    weights = torch.tensor([VOCAB_SIZE**power for power in reversed(range(NUM_TOKENS))])
    cells = (torch.tensor([result.token_ids for result in results]) * weights).sum(dim=1)
    observed = torch.bincount(cells, minlength=VOCAB_SIZE**NUM_TOKENS).double()
    expected = exact_probabilities(target) * NUM_SAMPLES
    assert expected.sum() == pytest.approx(NUM_SAMPLES)
    common = expected >= 5
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    assert len(expected) > 50
    accepted = [sum(column) for column in zip(*(r.accepted_per_position for r in results), strict=True)]
    assert 0.05 < accepted[0] / sum(r.verify_steps for r in results) < 0.95, "acceptance and rejection"
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), chi_square / 2))


@pytest.mark.parametrize("proposal", ["greedy", "sampled"])
def test_sampled_answers_pass_a_chi_square_test(
    pair: tuple[FrozenTarget, Eagle3DraftHead], proposal: str
) -> None:
    assert p_value(pair, proposal) > 1e-3


@pytest.mark.parametrize("proposal", ["greedy", "sampled"])
def test_the_chi_square_test_sees_a_sampler_that_forgets_the_residual(
    pair: tuple[FrozenTarget, Eagle3DraftHead], proposal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(
        logits_BTV: Tensor,
        drafts_Bn: Tensor,
        draft_probs_BnV: Tensor | None,
        num_drafted_B: Tensor,
        uniforms_BT: Tensor,
        temperature: float,
    ) -> Verdict:
        verdict = verify_by_sampling(
            logits_BTV, drafts_Bn, draft_probs_BnV, num_drafted_B, uniforms_BT, temperature
        )
        probs_BTV = (logits_BTV / temperature).softmax(dim=-1)
        rows = torch.arange(len(logits_BTV))
        return Verdict(
            verdict.num_accepted_B, draw(probs_BTV[rows, verdict.num_accepted_B], uniforms_BT[:, -1])
        )

    monkeypatch.setattr(eagle_train.decode.chain, "verify_by_sampling", forgetful)
    assert p_value(pair, proposal) < 1e-6


@pytest.mark.parametrize("proposal", ["greedy", "sampled"])
def test_answers_depend_on_the_seed_and_not_on_the_batch(
    llama: tuple[FrozenTarget, Eagle3DraftHead], proposal: str
) -> None:
    target, head = llama
    prompts = random_prompts()
    small, large, other = (
        measure_acceptance(
            target,
            head,
            prompts,
            max_new_tokens=16,
            batch_size=batch_size,
            temperature=0.8,
            proposal=proposal,
            seed=seed,
            progress=False,
        )
        for batch_size, seed in ((3, 0), (4, 0), (4, 1))
    )
    assert small == large != other


def test_a_tiny_temperature_is_greedy(llama: tuple[FrozenTarget, Eagle3DraftHead]) -> None:
    target, head = llama
    prompts = random_prompts()
    greedy = measure_acceptance(target, head, prompts, max_new_tokens=16, progress=False)
    assert greedy == measure_acceptance(
        target, head, prompts, max_new_tokens=16, temperature=1e-6, progress=False
    )


def test_a_cap_ends_the_run_without_a_rejection() -> None:
    """All drafts match; where only one counts, the target's own token behind it is the next one."""
    logits_BTV = torch.full((2, 4, 5), -100.0)
    for position, token in enumerate((4, 3, 2, 1)):
        logits_BTV[:, position, token] = 0.0
    drafts_Bn = torch.tensor([[4, 3, 2], [4, 3, 2]])
    num_drafted_B = torch.tensor([1, 3])
    uniforms_BT = torch.full((2, 4), 0.5, dtype=torch.float64)
    for verdict in (
        verify_greedily(logits_BTV, drafts_Bn, num_drafted_B),
        verify_by_sampling(logits_BTV, drafts_Bn, None, num_drafted_B, uniforms_BT, 1.0),
    ):
        assert verdict.num_accepted_B.tolist() == [1, 3]
        assert verdict.next_token_B.tolist() == [3, 1]


def test_an_impossible_token_is_never_drawn() -> None:
    weights_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    uniform_B = torch.tensor([0.0, 0.49, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights_BV, uniform_B).tolist() == [1, 1, 3, 3]
