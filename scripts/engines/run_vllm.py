"""Decode prompts with a draft head in vLLM on a CPU; run by the Python of `setup_engine.sh vllm`.

    ENGINE/bin/python scripts/engines/run_vllm.py REQUEST.json RESULT.json

Request and result are described in scripts/compare_engines.py. vLLM drafts num_speculative_tokens at
every verify step, the last one too, even where fewer tokens are left (`capped` is false). Greedy only:
sampling is wrong on a CPU (vLLM issue 55005).
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    # One process: three would each spend half a minute on imports. With more threads than free cores,
    # decoding is tens of times slower.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams

    prompts = request["prompts"]
    num_drafted = request["num_speculative_tokens"]
    llm = LLM(
        model=request["target_dir"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_model_len(request),
        max_num_seqs=min(len(prompts), 16),
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config={
            "method": "eagle3",
            "model": request["draft_dir"],
            "num_speculative_tokens": num_drafted,
        },
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [
            SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            for num_tokens in request["max_new_tokens"]
        ],
    )
    results = [prompt_result(output.outputs[0], num_drafted) for output in outputs]
    counters = {metric.name: metric for metric in llm.get_metrics()}
    engine_total = counters["vllm:spec_decode_num_accepted_tokens"].value
    if engine_total != sum(result["accepted"] for result in results):
        raise SystemExit(f"vLLM counts {engine_total} accepted tokens in all, but by prompt another number")
    Path(sys.argv[2]).write_text(
        json.dumps({"version": f"vllm-cpu {version('vllm-cpu')}", "capped": False, "prompts": results})
    )


def max_model_len(request: dict) -> int:
    """Tokens of the longest context, with room to spare as far as the target allows: where it was just long
    enough, prompts of one batch spoilt each other's drafts and counts changed from run to run (seen in
    0.32.0; one prompt at a time was right).
    """
    config = json.loads((Path(request["target_dir"]) / "config.json").read_text())
    longest = max(map(len, request["prompts"])) + max(request["max_new_tokens"])
    roomy = ((longest + request["num_speculative_tokens"]) // 256 + 2) * 256
    return min(roomy, config.get("max_position_embeddings") or roomy)


def prompt_result(output, num_drafted: int) -> dict:
    """Counts from the accepted tokens of each verify step."""
    metrics = output.spec_decode_metrics
    steps = metrics.per_step_accepted
    return {
        "token_ids": list(output.token_ids),
        "verify_steps": len(steps),
        "drafted": sum(metrics.per_step_drafted),
        "accepted": sum(steps),
        "accepted_per_position": [sum(step > k for step in steps) for k in range(num_drafted)],
    }


if __name__ == "__main__":
    main()
