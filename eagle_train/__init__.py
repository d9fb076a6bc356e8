"""Train EAGLE draft heads for speculative decoding: packed, bucketed, with acceptance beside loss.

The public names below are loaded on first use, so that `import eagle_train` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_train.batch import PackedBatch
    from eagle_train.config import TrainConfig
    from eagle_train.data.collator import BucketingCollator
    from eagle_train.data.loader import MultipackSampler
    from eagle_train.data.loading import load_samples
    from eagle_train.data.samples import Sample
    from eagle_train.decode.chain import decode_plain, measure_acceptance
    from eagle_train.decode.figures import group_figures
    from eagle_train.decode.plots import draw_acceptance, draw_answer
    from eagle_train.decode.prompts import read_prompts
    from eagle_train.decode.results import Prompt, PromptResult, answer_runs, answer_samples
    from eagle_train.errors import InputError
    from eagle_train.model.checkpoint import load_draft_head, save_draft_head
    from eagle_train.model.eagle3 import Eagle3DraftHead
    from eagle_train.model.target import load_target
    from eagle_train.train.evaluate import evaluate, evaluate_sampled

__version__ = "0.1.0"
__all__ = [
    "BucketingCollator",
    "Eagle3DraftHead",
    "InputError",
    "MultipackSampler",
    "PackedBatch",
    "Prompt",
    "PromptResult",
    "Sample",
    "TrainConfig",
    "answer_runs",
    "answer_samples",
    "decode_plain",
    "draw_acceptance",
    "draw_answer",
    "evaluate",
    "evaluate_sampled",
    "group_figures",
    "load_draft_head",
    "load_samples",
    "load_target",
    "measure_acceptance",
    "read_prompts",
    "save_draft_head",
]

_HOMES = {
    "BucketingCollator": "eagle_train.data.collator",
    "Eagle3DraftHead": "eagle_train.model.eagle3",
    "InputError": "eagle_train.errors",
    "MultipackSampler": "eagle_train.data.loader",
    "PackedBatch": "eagle_train.batch",
    "Prompt": "eagle_train.decode.results",
    "PromptResult": "eagle_train.decode.results",
    "Sample": "eagle_train.data.samples",
    "TrainConfig": "eagle_train.config",
    "answer_runs": "eagle_train.decode.results",
    "answer_samples": "eagle_train.decode.results",
    "decode_plain": "eagle_train.decode.chain",
    "draw_acceptance": "eagle_train.decode.plots",
    "draw_answer": "eagle_train.decode.plots",
    "evaluate": "eagle_train.train.evaluate",
    "evaluate_sampled": "eagle_train.train.evaluate",
    "group_figures": "eagle_train.decode.figures",
    "load_draft_head": "eagle_train.model.checkpoint",
    "load_samples": "eagle_train.data.loading",
    "load_target": "eagle_train.model.target",
    "measure_acceptance": "eagle_train.decode.chain",
    "read_prompts": "eagle_train.decode.prompts",
    "save_draft_head": "eagle_train.model.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle_train' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
