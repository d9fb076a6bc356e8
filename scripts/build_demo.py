"""Build the embedded demo: train a tiny target LLM, let it answer prompts, keep what is provably its own.

    python scripts/build_demo.py            # everything, about half an hour on two free CPU cores

Stages, each kept in --work_dir and skipped when it is there with the same settings:
  1. tokenizer   byte-level BPE on the grammar's texts (scripts/demo_texts.py)
  2. target      a small Llama trained on the grammar's conversations, rounded to bfloat16
  3. answers     greedy float32 answers of that target, turn by turn (finished batches are kept)
  4. assets      verification, filters, the split and its figures, written to --output_dir
"""

import argparse
import hashlib
import itertools
import json
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_texts import FAMILIES, HELDOUT_FAMILIES, TRAIN_FAMILIES, Draft, draft_conversation
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PAD, BOS, START, END = "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 2048
MULTI_TURN_SHARE, SYSTEM_SHARE = 0.15, 0.06
# A pool is 1024 conversations. Wording is learnt first; then copying from the prompt needs a denser signal.
FIRST_ECHO_POOL, FEW_ECHOES_POOL = 8, 11
MIN_ANSWER_TOKENS, MAX_ANSWER_TOKENS = 30, 200
NGRAM, MAX_REPEATED_SHARE = 8, 0.3
# Below this gap between the two best logits another machine's rounding could choose the other token.
MIN_LOGIT_MARGIN = 1e-3
CHAIN_LENGTHS = (3, 5, 7)

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation and the half-open ranges of its answers, each with its end-of-turn."""

    ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def answers(self) -> list[list[int]]:
        return [self.ids[start:stop] for start, stop in self.spans]


# ---------------------------------------------------------------- pure functions: chain walk, bigram, filters


def chain_walk(
    next_token: dict[int, int], fallback: int, answer: Sequence[int], num_drafted: int
) -> tuple[int, int]:
    """Emitted tokens and verify steps of a bigram drafter over one answer of the target's own greedy tokens.

    DESIGN section 3: the first token comes from the prefill and is not counted; a step emits its accepted
    tokens and the bonus token, or just the accepted ones where the answer ends first.
    """
    row, last, emitted, steps = 0, len(answer) - 1, 0, 0
    while row < last:
        accepted, token = 0, answer[row]
        while accepted < num_drafted and row + accepted < last:
            token = next_token.get(token, fallback)
            if token != answer[row + accepted + 1]:
                break
            accepted += 1
        emitted += accepted if row + accepted == last else accepted + 1
        steps += 1
        row += accepted + 1
    return emitted, steps


def count_bigrams(answers: Sequence[Sequence[int]]) -> tuple[dict[int, int], int]:
    """The most frequent successor of each token, and the most frequent token of all."""
    followers: dict[int, Counter[int]] = {}
    for answer in answers:
        for token, following in itertools.pairwise(answer):
            followers.setdefault(token, Counter())[following] += 1
    fallback = Counter(token for answer in answers for token in answer).most_common(1)[0][0]
    return {token: counts.most_common(1)[0][0] for token, counts in followers.items()}, fallback


def bigram_acceptance_length(
    train: Sequence[Sequence[int]], heldout: Sequence[Sequence[int]], n: int
) -> float:
    """Expected acceptance length with bonus of the bigram drafter at n drafted tokens a step."""
    next_token, fallback = count_bigrams(train)
    walks = [chain_walk(next_token, fallback, answer, n) for answer in heldout]
    return sum(emitted for emitted, _ in walks) / max(sum(steps for _, steps in walks), 1)


def repeated_share(answer: Sequence[int], ngram: int = NGRAM) -> float:
    """Share of the answer's n-grams that occurred before in it."""
    grams = [tuple(answer[i : i + ngram]) for i in range(len(answer) - ngram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


# ---------------------------------------------------------------- stage 1: tokenizer


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    digits, bytes_ = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, special_tokens=[PAD, BOS, START, END]
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[START], model_max_length=2048, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def to_messages(draft: Draft, answers: Sequence[str]) -> Messages:
    messages = [{"role": "system", "content": draft.system}] if draft.system else []
    for i, prompt in enumerate(draft.prompts):
        messages.append({"role": "user", "content": prompt})
        if i < len(answers):
            messages.append({"role": "assistant", "content": answers[i]})
    return messages


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> Encoded:
    """The chat template's tokens, built piece by piece so that the answers' places are known."""
    ids, spans = [tokenizer.bos_token_id], []
    for message in messages:
        ids += tokenizer.encode(f"{START}{message['role']}\n", add_special_tokens=False)
        content = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        if message["role"] == "assistant":
            spans.append((len(ids), len(ids) + len(content)))
        ids += content + tokenizer.encode("\n", add_special_tokens=False)
    return Encoded(ids, spans)


# ---------------------------------------------------------------- stage 2: target


def new_target(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
            tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def training_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, batch_tokens: int = 1024
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless right-padded ids and answer masks; similar lengths share a batch, batches come shuffled."""
    rng, families = random.Random(f"target {seed}"), FAMILIES
    for pool_index in itertools.count():
        drafts = [draft_conversation(rng, families, MULTI_TURN_SHARE, SYSTEM_SHARE) for _ in range(1024)]
        num_echoes = 0 if pool_index < FIRST_ECHO_POOL else 1024 if pool_index < FEW_ECHOES_POOL else 256
        drafts += [echo(rng.choice(draft.prompts)) for draft in drafts[:num_echoes]]
        pool = sorted(
            (encode(tokenizer, to_messages(d, d.answers)) for d in drafts), key=lambda e: len(e.ids)
        )
        batches: list[list[Encoded]] = [[]]
        for encoded in pool:
            if (len(batches[-1]) + 1) * len(encoded.ids) > batch_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(encoded)
        rng.shuffle(batches)
        for batch in batches:
            width = max(len(encoded.ids) for encoded in batch)
            ids = torch.full((len(batch), width), tokenizer.pad_token_id)
            is_answer = torch.zeros(len(batch), width, dtype=torch.bool)
            for row, encoded in enumerate(batch):
                ids[row, : len(encoded.ids)] = torch.tensor(encoded.ids)
                for start, stop in encoded.spans:
                    is_answer[row, start:stop] = True
            yield ids, is_answer


def echo(text: str) -> Draft:
    """A task in which every token is a copy from the prompt."""
    return Draft(["echo"], None, [f"Repeat: {text}"], [text])


def learning_rate(step: int, num_steps: int, peak: float = 3e-3) -> float:
    """Warm-up, plateau, linear decay over the last 30 %; before that a run does not depend on its length."""
    return peak * min((step + 1) / 100, 1.0, max((num_steps - step) / (0.3 * num_steps), 0.01))


def train_target(
    tokenizer: PreTrainedTokenizerFast, seed: int, num_steps: int
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """AdamW on the answers' cross-entropy; returns the model with its loss curve and seconds."""
    torch.manual_seed(seed)
    model = new_target(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    state: dict[str, Any] = {"step": 0, "tokens": 0, "curve": [], "recent": [], "seconds": 0.0}
    begin = time.monotonic()
    bar = tqdm(total=num_steps, unit="step", desc="target", mininterval=5)
    for step, (ids, is_answer) in zip(range(num_steps), training_batches(tokenizer, seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        hidden = model.model(input_ids=ids, use_cache=False)[0]  # right padding needs no mask: causal
        supervised = is_answer[:, 1:]
        loss = torch.nn.functional.cross_entropy(
            model.lm_head(hidden[:, :-1][supervised]), ids[:, 1:][supervised]
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["recent"].append(loss.item())
        state["seconds"] = time.monotonic() - begin
        state["step"], state["tokens"] = (
            step + 1,
            state["tokens"] + int((ids != tokenizer.pad_token_id).sum()),
        )
        bar.update()
        if len(state["recent"]) == 100:
            state["curve"].append(
                {"step": step + 1, "tokens": state["tokens"], "answer_loss": sum(state["recent"]) / 100}
            )
            state["recent"] = []
            bar.set_postfix(loss=f"{state['curve'][-1]['answer_loss']:.3f}")
    bar.close()
    return model, state


def save_target(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_target(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The shipped bfloat16 weights, computed with in float32."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval(), AutoTokenizer.from_pretrained(folder)


# ---------------------------------------------------------------- stage 3: answers


def draft_prompts(seed: int, split: str, count: int) -> list[Draft]:
    """Drafts of one split, without a repeated prompt."""
    rng, families = random.Random(f"{split} {seed}"), TRAIN_FAMILIES if split == "train" else HELDOUT_FAMILIES
    drafts: list[Draft] = []
    known: set[str] = set()
    while len(drafts) < count:
        draft = draft_conversation(rng, families, MULTI_TURN_SHARE, SYSTEM_SHARE)
        if known.isdisjoint(draft.prompts):
            known.update(draft.prompts)
            drafts.append(draft)
    return drafts


@torch.inference_mode()
def generate_batch(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> list[list[int]]:
    """Greedy answers; an answer that did not end in time lacks the end-of-turn token."""
    inputs = tokenizer(
        prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
    )
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False,
        max_new_tokens=MAX_ANSWER_TOKENS + 1, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )[:, inputs["input_ids"].shape[1] :].tolist()  # fmt: skip
    eos = tokenizer.eos_token_id
    return [row[: row.index(eos) + 1] if eos in row else row for row in output]


def answer_all(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, drafts: list[Draft], cache: Path
) -> list[list[list[int]]]:
    """The target's answers to every turn; each later turn sees the target's own earlier answers."""
    answers: list[list[list[int]]] = [[] for _ in drafts]
    for turn in range(max(len(draft.prompts) for draft in drafts)):
        path = cache.with_suffix(f".turn{turn}.json")
        kept = json.loads(path.read_text()) if path.exists() else {}
        done = {int(i): ids for i, ids in kept.items()}
        todo: list[tuple[int, str]] = []
        for i, draft in enumerate(drafts):
            ended = all(answer[-1] == tokenizer.eos_token_id for answer in answers[i])
            if turn < len(draft.prompts) and ended and i not in done:
                texts = [tokenizer.decode(answer[:-1]) for answer in answers[i]]
                messages = to_messages(Draft([], draft.system, draft.prompts[: turn + 1], []), texts)
                rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                todo.append((i, rendered))
        todo.sort(key=lambda item: (len(item[1]), item[0]))
        for start in tqdm(range(0, len(todo), 96), desc=f"{cache.name} turn {turn}", unit="batch"):
            batch = todo[start : start + 96]
            for (i, _), ids in zip(
                batch, generate_batch(model, tokenizer, [p for _, p in batch]), strict=True
            ):
                done[i] = ids
            path.write_text(json.dumps(done))
        for i, ids in done.items():
            answers[i].append(ids)
    return answers


# ---------------------------------------------------------------- stage 4: assets


@torch.inference_mode()
def smallest_margin(model: LlamaForCausalLM, encoded: Encoded) -> float:
    """The least lead of an answer token's logit over the best other one; negative where it is no arg-max."""
    logits = model(input_ids=torch.tensor([encoded.ids]), use_cache=False).logits[0]
    rows = torch.tensor([t - 1 for start, stop in encoded.spans for t in range(start, stop)])
    chosen = torch.tensor(encoded.ids)[rows + 1].unsqueeze(1)
    own = logits[rows].gather(1, chosen)
    others = logits[rows].scatter(1, chosen, -math.inf).amax(dim=1, keepdim=True)
    return float((own - others).min())


def verify_and_filter(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, split: str, drafts: list[Draft],
    answers: list[list[list[int]]],
) -> tuple[list[dict[str, Any]], list[Encoded], Counter[str]]:  # fmt: skip
    """Rows worth shipping, their tokens, and how many went for which reason."""
    rows, kept, counts, known = [], [], Counter[str](), set[str]()
    for i, (draft, turns) in enumerate(
        zip(tqdm(drafts, desc=f"verify {split}", unit="row"), answers, strict=True)
    ):
        texts = [tokenizer.decode(turn[:-1]) for turn in turns]
        messages = to_messages(draft, texts)
        encoded = encode(tokenizer, messages)
        if len(turns) < len(draft.prompts) or any(turn[-1] != tokenizer.eos_token_id for turn in turns):
            reason = "unfinished"
        elif any(not MIN_ANSWER_TOKENS <= len(turn) <= MAX_ANSWER_TOKENS for turn in turns):
            reason = "too short or too long"
        elif any(repeated_share(turn) > MAX_REPEATED_SHARE for turn in turns):
            reason = "looping"
        elif not known.isdisjoint(texts):
            reason = "duplicate answer"
        elif encoded.answers != turns or encoded.ids != tokenizer.apply_chat_template(
            messages, return_dict=False
        ):
            reason = "text does not give the same tokens"
        elif (margin := smallest_margin(model, encoded)) < MIN_LOGIT_MARGIN:
            reason = "not the arg-max" if margin < 0 else "near tie"
        else:
            reason = "kept"
            known.update(texts)
            kept.append(encoded)
            rows.append({"id": f"{split}-{i:05d}", "family": "+".join(draft.families), "temperature": 0.0,
                         "finish_reason": "stop", "messages": messages})  # fmt: skip
        counts[reason] += 1
    return rows, kept, counts


README = """# The embedded demo

A tiny Llama that was really trained, and conversations in which every answer is its own greedy output.
With no target and no data named, `python -m eagle_train` trains a draft head for it. The prompts belong to
families (stories, recipes, sums, JSON, ...) and no family appears in both splits: a held-out figure is
about kinds of answers that the draft head never saw. The target itself was trained on all families.

Made by `python scripts/build_demo.py --seed {seed} --target_steps {target_steps} --num_train {num_train}
--num_heldout {num_heldout}` in about {build_minutes:.0f} minutes with {num_threads} CPU thread(s) on a busy
machine (torch {torch}).

| | |
|---|---|
| target | {parameters:,} parameters, {layers} layers, vocabulary {vocab_size}, bfloat16 |
| its training | {target_steps:,} steps, {tokens:,} tokens of in-house grammar texts, float32, AdamW |
| its answer loss (nats per token) | {losses} |
| train | {train} |
| held-out | {heldout} |
| acceptance length of a bigram drafter on held-out (with bonus) | {bigrams} |

The training loss jumps where copying tasks join the texts. The target writes fluently but often misses the
names and numbers of a prompt, and its sums are often wrong: it is a test object, no assistant.

Every answer token, the end-of-turn token included, is the arg-max of one unpadded float32 forward pass over
the conversation, ahead of the second best logit by at least {margin}.

Texts, weights and prompts are this project's own work, under the Apache License 2.0.
"""


def write_readme(folder: Path, report: dict[str, Any]) -> None:
    curve = report["loss_curve"]
    points = curve[:: max(len(curve) // 6, 1)] + curve[-1:]
    splits = {
        split: "{conversations:,} conversations ({multi_turn} multi-turn, "
        "{with_system} with a system prompt), "
        "{answer_tokens:,} answer tokens, {families} families; filters: {filter}".format(**report[split])
        for split in ("train", "heldout")
    }
    bigrams = ", ".join(f"{value:.3f} at n = {n}" for n, value in report["bigram_acceptance_length"].items())
    losses = ", ".join(f"{point['answer_loss']:.2f} at {point['tokens'] / 1e6:.2f} M" for point in points)
    figures = {
        "tokens": curve[-1]["tokens"],
        "losses": losses,
        "bigrams": bigrams,
        "margin": MIN_LOGIT_MARGIN,
    }
    (folder / "README.md").write_text(README.format(**(report | splits | figures)))


def build_assets(args: argparse.Namespace, target_dir: Path, report: dict[str, Any], begin: float) -> None:
    """Stages 3 and 4."""
    model, tokenizer = load_target(target_dir)
    staging = args.work_dir / "assets"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(target_dir, staging / "target")
    tokens: dict[str, list[Encoded]] = {}
    for split, count in (("train", args.num_train), ("heldout", args.num_heldout)):
        drafts = draft_prompts(args.seed, split, count)
        answers = answer_all(model, tokenizer, drafts, args.work_dir / split)
        rows, tokens[split], counts = verify_and_filter(model, tokenizer, split, drafts, answers)
        with (staging / f"{split}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        report[split] = {
            "conversations": len(rows),
            "multi_turn": sum(len(encoded.spans) > 1 for encoded in tokens[split]),
            "with_system": sum(row["messages"][0]["role"] == "system" for row in rows),
            "answer_tokens": sum(len(answer) for encoded in tokens[split] for answer in encoded.answers),
            "families": len({name for row in rows for name in row["family"].split("+")}),
            "filter": ", ".join(f"{count} {reason}" for reason, count in counts.most_common()),
        }
    flat = {
        split: [answer for encoded in part for answer in encoded.answers] for split, part in tokens.items()
    }
    report["bigram_acceptance_length"] = {
        n: bigram_acceptance_length(flat["train"], flat["heldout"], n) for n in CHAIN_LENGTHS
    }
    report |= {"parameters": model.num_parameters(), "layers": model.config.num_hidden_layers}
    report |= {
        "vocab_size": len(tokenizer),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    report["build_minutes"] = (report["earlier_seconds"] + time.monotonic() - begin) / 60
    write_readme(staging, report)
    (args.work_dir / "report.json").write_text(json.dumps(report, indent=2))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.output_dir / "target", ignore_errors=True)
    shutil.copytree(staging, args.output_dir, dirs_exist_ok=True)
    print(json.dumps(report, indent=2))


def grammar_digest(seed: int) -> str:
    """Names the kept stages: another grammar or seed gives other texts and must not meet old stages."""
    rng, families = random.Random(f"digest {seed}"), FAMILIES
    drafts = [draft_conversation(rng, families, MULTI_TURN_SHARE, SYSTEM_SHARE) for _ in range(500)]
    return hashlib.sha256(repr(drafts).encode()).hexdigest()[:8]


def parse_args() -> argparse.Namespace:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--output_dir", type=Path, default=root / "eagle_train" / "demo", help="where the assets go"
    )
    parser.add_argument(
        "--work_dir", type=Path, default=root / "build" / "demo", help="where finished stages are kept"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seeds grammar, initial weights and prompts (default 1)"
    )
    parser.add_argument(
        "--target_steps", type=int, default=2600, help="training steps of the target, ~950 tokens each"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads; take 1 when others use the machine too"
    )
    parser.add_argument("--num_train", type=int, default=2200, help="train conversations before the filters")
    parser.add_argument(
        "--num_heldout", type=int, default=260, help="held-out conversations before the filters"
    )
    return parser.parse_args()


def main() -> None:
    args, begin = parse_args(), time.monotonic()
    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    run = grammar_digest(args.seed)
    target_dir = args.work_dir / f"target-{run}-{args.target_steps}"
    args.work_dir = target_dir.parent / f"{target_dir.name}-answers"
    args.work_dir.mkdir(exist_ok=True)
    notes = args.work_dir / "training.json"
    if not notes.exists():
        rng, families = random.Random(f"tokenizer {args.seed}"), FAMILIES
        drafts = [draft_conversation(rng, families, MULTI_TURN_SHARE, SYSTEM_SHARE) for _ in range(6000)]
        tokenizer = train_tokenizer(text for draft in drafts for text in draft.prompts + draft.answers)
        model, state = train_target(tokenizer, args.seed, args.target_steps)
        save_target(model, tokenizer, target_dir)
        notes.write_text(json.dumps({"loss_curve": state["curve"], "earlier_seconds": state["seconds"]}))
        begin = time.monotonic()
    report = {name: getattr(args, name) for name in ("seed", "target_steps", "num_train", "num_heldout")}
    report |= json.loads(notes.read_text())
    build_assets(args, target_dir, report, begin)


if __name__ == "__main__":
    main()
