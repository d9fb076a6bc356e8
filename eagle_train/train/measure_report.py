"""What a measurement found, as text for a person and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle_train.config_measure import MeasureConfig
from eagle_train.decode.figures import ALL, Estimate, GroupFigures
from eagle_train.decode.prompts import PromptReport
from eagle_train.model.target import FrozenTarget
from eagle_train.train.report import format_facts, format_figure, format_table

# Below these a speed-up is mostly noise: of the machine, and of which prompts they happen to be.
ENOUGH_PROMPTS, ENOUGH_SECONDS = 20, 5


@dataclass(frozen=True, slots=True)
class Expected:
    """What the chain walk finds on the answers that were decoded: counts of greedy ones, expectations of
    counts of sampled ones.

    acceptance_length: emitted tokens per verify step, 1..n+1; accepted_per_position: `[n]` verify steps.
    """

    acceptance_length: float | None
    verify_steps: float
    accepted_per_position: list[float]

    def shares(self) -> list[float]:
        """Share of the verify steps in which each position is accepted, `[n]`, 0..1."""
        return [accepted / (self.verify_steps or 1) for accepted in self.accepted_per_position]


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of decoding all prompts with the draft and without it, and tokens generated (both of them)."""

    tokens: int
    seconds: float
    plain_tokens: int | None
    plain_seconds: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def plain_tokens_per_second(self) -> float | None:
        return self.plain_tokens / self.plain_seconds if self.plain_tokens and self.plain_seconds else None

    @property
    def speedup(self) -> float | None:
        """Tokens per second, as a multiple of plain decoding's."""
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything that the command reports. num_different: answers that differ from plain decoding's; None
    where that was not decoded, or where answers are sampled.
    """

    groups: dict[str, GroupFigures]
    expected: Expected
    speed: Speed
    num_different: int | None


def format_measurement(
    options: MeasureConfig,
    target: FrozenTarget,
    report: PromptReport,
    num_prompts: int,
    measurement: Measurement,
) -> str:
    """What a person reads: how it was decoded, acceptance by group and position, then what it compares to."""
    how = (
        "greedy"
        if not options.temperature
        else f"temperature {options.temperature}, {options.proposal} proposal"
    )
    place = f"{target.dtype} on {target.device}".removeprefix("torch.")
    facts = {
        "draft": options.draft,
        "target": f"{options.target} ({type(target.model).__name__}, {place})",
        "prompts": f"{num_prompts:,}",
        "decoding": f"chains of {options.num_speculative_tokens} drafted tokens, {how}, up to "
        f"{options.max_new_tokens} new tokens, {options.batch_size} prompts at a time",
    }
    notes = "".join(f"\n  note: {note}" for note in report.notes())
    return "\n".join(
        [
            format_facts("measure", facts) + notes,
            "",
            format_groups(measurement.groups),
            "",
            format_positions(measurement),
            "",
            format_facts("beside it", comparison_facts(options, target, measurement)),
        ]
    )


def format_groups(groups: Mapping[str, GroupFigures]) -> str:
    """A line a group; its acceptance length with the interval, and without looping answers."""
    header = ["", "prompts", "looping", "tokens", "verify steps", "acceptance length", "95 % interval"]
    header += ["not looping", "looping alone"]
    rows = []
    for name, group in groups.items():
        every, apart = group.every, (group.without_looping, group.looping)
        rows.append(
            [name, f"{every.prompts:,}", f"{group.looping.prompts:,}", f"{every.tokens:,}"]
            + [f"{every.verify_steps:,}", *format_estimate(every.acceptance_length, 2)]
            + [format_estimate(figures.acceptance_length, 2)[0] for figures in apart]
        )
    return format_table(header, rows)


def format_positions(measurement: Measurement) -> str:
    """Acceptance per position over all prompts, with the interval and beside the expected one."""
    positions = measurement.groups[ALL].every.acceptance_per_position
    columns = [format_estimate(estimate, 3) for estimate in positions]
    rows = [["measured share of steps", *(value for value, _ in columns)]]
    rows += [["95 % interval", *(interval for _, interval in columns)]]
    if positions:
        rows.append(["expected", *(format_figure(share) for share in measurement.expected.shares())])
    return format_table(["drafted token", *(str(i + 1) for i in range(len(positions)))], rows)


def format_estimate(estimate: Estimate | None, digits: int) -> tuple[str, str]:
    """The figure and its interval; dashes where there is none."""
    if estimate is None:
        return "-", "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{digits}f}", "-"
    return f"{estimate.value:.{digits}f}", f"{estimate.low:.{digits}f}..{estimate.high:.{digits}f}"


def comparison_facts(
    options: MeasureConfig, target: FrozenTarget, measurement: Measurement
) -> dict[str, str]:
    """Expected against measured, the mean of means under its own name, speed, and whether answers differ."""
    every, expected, speed = measurement.groups[ALL].every, measurement.expected, measurement.speed
    emitted, interval = format_estimate(every.emitted_per_step, 3)
    steps = f"{expected.verify_steps:,.1f}" if options.temperature else f"{expected.verify_steps:,}"
    facts = {
        "emitted tokens per verify step": f"expected {format_figure(expected.acceptance_length)} by the "
        f"chain walk over these answers ({steps} steps), measured {emitted} ({interval}; "
        f"{every.verify_steps:,} steps); without what a last step accepts beyond "
        "an answer's end, which acceptance length counts"
    }
    facts["acceptance_length_prompt_mean"] = (
        f"{format_figure(every.acceptance_length_prompt_mean)} (each prompt weighs the same; not pooled)"
    )
    facts["speed"] = f"{speed.tokens_per_second:,.1f} tokens/s"
    if speed.plain_tokens_per_second is not None:
        facts["speed"] += (
            f", without the draft {speed.plain_tokens_per_second:,.1f} tokens/s: "
            f"{format_figure(speed.speedup, 2)}x{doubt_of_speed(speed, every.prompts)}"
        )
    if measurement.num_different is not None:
        facts["answers unlike plain decoding's"] = f"{measurement.num_different:,} of {every.prompts:,}"
        if measurement.num_different:
            facts["answers unlike plain decoding's"] += (
                " (in float32 there should be none: two logits were equal up to rounding)"
                if target.dtype == torch.float32
                else " (near-ties fall either way in bfloat16; --dtype float32 decides them)"
            )
    return facts


def doubt_of_speed(speed: Speed, num_prompts: int) -> str:
    """Why a ratio of speeds says little, where it does."""
    seconds = min(speed.seconds, speed.plain_seconds or speed.seconds)
    if num_prompts >= ENOUGH_PROMPTS and seconds >= ENOUGH_SECONDS:
        return ""
    return (
        f" (a rough figure: {num_prompts:,} prompts in {seconds:.1f} s; take {ENOUGH_PROMPTS} prompts and "
        f"{ENOUGH_SECONDS} s or more)"
    )


def as_json(
    options: MeasureConfig, target: FrozenTarget, report: PromptReport, measurement: Measurement
) -> dict[str, Any]:
    """The options, and every figure under its own name."""
    speed = measurement.speed
    return {
        "options": asdict(options),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "data": asdict(report),
        "groups": {name: asdict(group) for name, group in measurement.groups.items()},
        "expected": asdict(measurement.expected),
        "speed": asdict(speed)
        | {
            "tokens_per_second": speed.tokens_per_second,
            "plain_tokens_per_second": speed.plain_tokens_per_second,
            "speedup": speed.speedup,
        },
        "answers_unlike_plain": measurement.num_different,
    }
