"""Convert a target and a draft head to GGUF and decode prompts in llama-server; run by the Python of
`setup_engine.sh llamacpp`.

    ENGINE/bin/python scripts/engines/run_llamacpp.py REQUEST.json RESULT.json

Request and result are described in scripts/compare_engines.py. llama.cpp drafts at most the tokens
that are left less one (`capped` is true); a last step that has one token left drafts nothing and is not
counted.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ENGINE = Path(sys.executable).parent.parent  # the virtual environment; not resolved: its python is a link
START_TIMEOUT_S = 120
PER_POSITION = r'accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)'


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    server = ENGINE / "bin" / "llama-server"
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = Path(scratch) / "target.gguf", Path(scratch) / "draft.gguf"
        converter = [sys.executable, __file__, "convert"]
        options = ["--outtype", "f32", "--outfile"]
        target_dir, draft_dir = request["target_dir"], request["draft_dir"]
        subprocess.run([*converter, target_dir, *options, target], check=True)
        subprocess.run([*converter, draft_dir, "--target-model-dir", target_dir, *options, draft], check=True)
        port = free_port()
        command = [server, "-m", target, "-md", draft, "--spec-type", "draft-eagle3"]
        command += ["--spec-draft-n-max", request["num_speculative_tokens"]]
        command += ["--host", "127.0.0.1", "--port", port, "-c", context_length(request), "-np", 1]
        command += ["-t", os.environ.get("OMP_NUM_THREADS", "1"), "--metrics"]
        command += ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
        process = subprocess.Popen([str(word) for word in command])
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_ready(address, process)
            results = [
                decode(address, prompt, num_tokens, request["num_speculative_tokens"])
                for prompt, num_tokens in zip(request["prompts"], request["max_new_tokens"], strict=True)
            ]
        finally:
            process.terminate()
            process.wait()
    shown = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    build = re.search(r"version: (\S+) ", shown.stdout + shown.stderr)
    version = (ENGINE / "versions.txt").read_text().split()[0].replace("==", " ")
    text = f"llama.cpp {build[1] if build else '?'} ({version})"
    Path(sys.argv[2]).write_text(json.dumps({"version": text, "capped": True, "prompts": results}))


def convert(arguments: list[str]) -> None:
    """Run the engine's converter. It knows tokenizers by a hash of what they make of a text and refuses
    others; prompts come here as token ids, so for an unknown one the name of any byte-level BPE will do.
    """
    sys.path[:0] = [str(ENGINE / "llama.cpp"), str(ENGINE / "llama.cpp" / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def known_or_gpt2(self, tokenizer) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = known_or_gpt2
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    convert_hf_to_gguf.main()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def context_length(request: dict) -> int:
    longest = max(map(len, request["prompts"])) + max(request["max_new_tokens"])
    longest += request["num_speculative_tokens"]
    return (longest // 256 + 1) * 256


def wait_until_ready(address: str, process: subprocess.Popen) -> None:
    stop = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < stop:
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with code {process.returncode}; its log is above")
        try:
            get(f"{address}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit(f"llama-server was not ready within {START_TIMEOUT_S} s")


def decode(address: str, prompt: list[int], num_tokens: int, num_drafted: int) -> dict:
    before = counts(address, num_drafted)
    body = {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0,
        "top_k": 1,
        "ignore_eos": True,  # it never takes such a token, so answers must not hold one
        "return_tokens": True,
        "cache_prompt": False,
    }
    answer = json.loads(get(f"{address}/completion", json.dumps(body).encode()))
    after = counts(address, num_drafted)
    steps, *per_position = (new - old for new, old in zip(after, before, strict=True))
    return {
        "token_ids": answer["tokens"],
        "verify_steps": steps,
        "drafted": answer["timings"].get("draft_n", 0),
        "accepted": answer["timings"].get("draft_n_accepted", 0),
        "accepted_per_position": per_position,
    }


def counts(address: str, num_drafted: int) -> list[int]:
    """Verify steps, then accepted tokens by position, since the server's start."""
    text = get(f"{address}/metrics")
    steps = re.search(r"^llamacpp:spec_decode_num_drafts_total (\d+)", text, re.MULTILINE)
    by_position = {int(position): int(count) for position, count in re.findall(PER_POSITION, text)}
    return [int(steps[1]) if steps else 0, *(by_position.get(k, 0) for k in range(num_drafted))]


def get(url: str, body: bytes | None = None) -> str:
    headers = {"Content-Type": "application/json"} if body else {}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(sys.argv[2:])
    else:
        main()
