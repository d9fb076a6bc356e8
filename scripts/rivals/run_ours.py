"""Our training steps, for bench_rivals.py: one packed row of the step's samples.

Without job["with_target"] the target's features are made before the clock starts, as a rival that reads them
from elsewhere has them.
"""

from typing import Any

import torch
from protocol import Step, serve

from eagle_train.batch import PackedBatch, TargetFeatures
from eagle_train.config import TrainConfig
from eagle_train.data.collator import BucketingCollator
from eagle_train.model.eagle3 import Eagle3DraftHead
from eagle_train.model.target import load_target
from eagle_train.model.target_config import draft_config
from eagle_train.train.evaluate import micro_batch_sums, step_weights
from eagle_train.train.optim import make_optimizer


def setup(job: dict[str, Any]) -> Step:
    config = TrainConfig(target=job["target"], ttt_steps=job["ttt_steps"])
    target = load_target(
        job["target"], dtype=getattr(torch, job["dtype"]), device=torch.device("cpu"), aux_layer_ids=None
    )
    head = Eagle3DraftHead(draft_config(target, len(job["draft_token_ids"])))
    head.set_vocabulary(torch.tensor(job["draft_token_ids"]))
    example = BucketingCollator(1)(job["samples"][:1])
    head.start_from_target(
        target.lm_head.weight, target.final_norm_weight(), target.features(example).aux_hidden_states
    )
    optimizer = make_optimizer(head, config, 1e-4)
    collator = BucketingCollator(job["bucket_granularity"])
    if not job["with_target"]:
        made = {
            key(collator([job["samples"][i] for i in step])): target.features(
                collator([job["samples"][i] for i in step])
            )
            for step in job["steps"]
        }

        def features(batch: PackedBatch) -> TargetFeatures:
            return made[key(batch)]

        target.features = features  # type: ignore[method-assign]

    def step(samples: list[dict[str, Any]]) -> float:
        batch = collator(samples)
        weights = step_weights(batch.supervised_counts(config.ttt_steps), config.step_decay)
        loss = micro_batch_sums(head, target, batch, weights).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def key(batch: PackedBatch) -> tuple[int, ...]:
    return tuple(batch.input_ids.tolist())


if __name__ == "__main__":
    serve(setup)
