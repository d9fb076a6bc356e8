"""Options that a chat template never reads are refused, naming those that it does read."""

from typing import Any

import pytest

from eagle_train.data.chat import open_chat
from eagle_train.data.template_options import variables_read
from eagle_train.errors import InputError
from tests.data.templates import EMPTY, GEN, OWN, TOOLS, make_tokenizer


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{{ a }}{% set b = 1 %}{{ b }}{% for c in d %}{{ c }}{% endfor %}", {"a", "d"}),
        ("{% if not a is defined %}{% set a = false %}{% endif %}{{ a }}", {"a"}),
        ("{% set a = a if a is defined else true %}{{ a }}", {"a"}),
        ("{% for a in b %}{% if loop.first %}{% continue %}{% endif %}{{ a }}{% endfor %}", {"b"}),
        ("{% macro f(a) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}", {"b"}),
        ("{%- generation -%}{{ a }}{%- endgeneration %}", {"a"}),
        (EMPTY, {"messages", "add_generation_prompt", "enable_thinking"}),
        (GEN, {"messages", "add_generation_prompt"}),
    ],
)
def test_what_a_template_reads(template: str, read: set[str]) -> None:
    assert variables_read(template) == read


def test_a_name_that_the_template_reads_passes() -> None:
    assert open_chat(make_tokenizer(EMPTY), {"enable_thinking": False}).options == {"enable_thinking": False}
    open_chat(make_tokenizer(OWN), {})


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (
            EMPTY,
            {"enable_thinkin": False},
            "--template_options enable_thinkin: the chat template has no such option; did you mean "
            "enable_thinking; it reads enable_thinking",
        ),
        (OWN, {"enable_thinking": False}, "has no such option; it reads no option"),
        (OWN, {"messages": []}, "--template_options messages: the chat template has no such option"),
        ({"default": OWN, "tool_use": EMPTY}, {"thinking": 1}, "it reads enable_thinking"),
        ("{% if %}", {"a": 1}, "the chat template cannot be read"),
    ],
)
def test_a_name_that_it_never_reads_is_refused(template: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        open_chat(make_tokenizer(template), options)
    assert words in str(error.value)


def test_each_of_several_named_templates_may_read_an_option() -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": TOOLS, "tool_use": EMPTY}
    open_chat(tokenizer, {"enable_thinking": True})
