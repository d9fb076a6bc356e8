"""Which variables a chat template reads, so that a misspelt --template_options is no silent default."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from eagle_train.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What transformers itself gives every template; a user has no option of these names.
GIVEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now"),
}
# The one statement that transformers adds to Jinja; what stands between the two is read all the same.
GENERATION_STATEMENT = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def check_template_options(tokenizer: "PreTrainedTokenizerBase", options: Mapping[str, Any]) -> None:
    """Raise InputError for an option that no template of the tokenizer reads, naming those that are read."""
    if not options:
        return
    templates = tokenizer.chat_template  # text, or texts by name
    texts = list(templates.values()) if isinstance(templates, dict) else [templates]
    read = set().union(*map(variables_read, texts))
    unknown = [name for name in options if name not in read - GIVEN]
    if not unknown:
        return
    known = sorted(read - GIVEN - set(tokenizer.special_tokens_map))
    nearest = get_close_matches(unknown[0], known, n=1, cutoff=0.5)
    raise InputError(
        f"--template_options {unknown[0]}: the chat template has no such option"
        f"{f'; did you mean {nearest[0]}' if nearest else ''}; it reads {', '.join(known) or 'no option'}"
    )


def variables_read(template: str) -> set[str]:
    """Names that a template takes from outside. Raises InputError for one that is not Jinja."""
    # Imported here, because measuring and training on token ids need no template.
    import jinja2
    from jinja2.meta import find_undeclared_variables

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        return find_undeclared_variables(environment.parse(GENERATION_STATEMENT.sub("", template)))
    except jinja2.TemplateError as error:
        raise InputError(
            f"the chat template cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); "
            "mend it, or name another one with --chat_template FILE"
        ) from error
