"""A small tokenizer and the chat templates of shared/reference/user_cases.md, written for these tests.

The tokenizer is byte-level BPE with GPT-2's splitting, as SmolLM2's is; pad = eos = <|im_end|>. Its few
merges matter: " yes" and "\n\n" are single tokens, so that a token can lie across the border of a prompt and
an answer.
"""

import functools
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle_train.data.samples import Sample

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
CORPUS = [
    "yes yes yes yes no no no no user user assistant assistant system system tool tool",
    "2+2? 4 one two three weather\n\nweather\n\nyes\n\nno\n\nyes\n",
    "user: yes\nassistant: no\nuser: one\nassistant: yes\n\n",
    "yes no\n\n",
]
LLAMA3_SPLITTING = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT_SYSTEM = "You are a small test."

OWN = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thinking is dropped from assistant turns that a later user turn follows (Qwen3's habit).
STRIP = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{% set ns.last_user = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and loop.index0 < ns.last_user %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# An empty think block before every answer, in the generation prompt only without thinking.
EMPTY = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
FUSE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
GEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] | tojson + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Phi-3's habit: eos after the whole, unless a generation prompt follows.
EOS_AT_THE_END = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
ORDINARY_END = (
    "{% for message in messages %}"
    "{{ '[' + message['role'] + '] ' + message['content'] + ' [stop]\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
NO_ASSISTANT = (
    "{% for message in messages %}{% if message['role'] != 'assistant' %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def make_tokenizer(
    chat_template: str | None, *, adds_bos: bool = False, trims_offsets: bool = False
) -> PreTrainedTokenizerFast:
    """The tokenizer with a template; LLAMA3 comes with Llama 3's splitting, which keeps line breaks together.

    adds_bos: a post-processor writes <|begin_of_text|>; trims_offsets: offsets
    leave out blanks, as GPT-2's do.
    """
    backend = Tokenizer.from_str(_backend())
    if chat_template == LLAMA3:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_SPLITTING), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if adds_bos:
        bos = "<|begin_of_text|>"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    if trims_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def turns(*texts: str, first: str = "user") -> list[dict[str, Any]]:
    """Messages that alternate between user and assistant."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def supervised_spans(sample: Sample) -> list[tuple[int, int]]:
    """Half-open token ranges of the answers, read back from `answer_remaining`."""
    tokens = np.flatnonzero(sample.answer_remaining >= 1) + 1
    groups = np.split(tokens, np.flatnonzero(np.diff(tokens) > 1) + 1) if len(tokens) else []
    return [(int(group[0]), int(group[-1]) + 1) for group in groups]


def supervised_texts(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each answer."""
    return [tokenizer.decode(sample.input_ids[slice(*span)].tolist()) for span in supervised_spans(sample)]
