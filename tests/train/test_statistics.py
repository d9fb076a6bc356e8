"""Speed figures: unbiased moving averages, honest ratios, and nothing lost over a resumption."""

import json
import types
from dataclasses import asdict
from typing import Any

import pytest
import torch

from eagle_train.data.collator import BucketingCollator
from eagle_train.train.statistics import COUNTS, Statistics, batch_counts, peak_memory_gib

STEP = {"samples": 4, "tokens": 900, "supervised_tokens": 300, "slots": 1024}


def add(statistics: Statistics, seconds: float, factor: int = 1, **changes: Any) -> None:
    counts = {name: factor * value for name, value in STEP.items()}
    statistics.add(counts, seconds=seconds, data_seconds=seconds / 4, alpha=0.9, **changes)


def test_the_average_of_equal_steps_is_the_step_from_the_first_on() -> None:
    statistics = Statistics()
    for _ in range(3):
        add(statistics, seconds=2.0)
        rates = statistics.rates(steps_per_epoch=50)
        assert rates["step_seconds"] == pytest.approx(2.0)
        assert rates["epoch_seconds"] == pytest.approx(100.0)
        assert rates["tokens_per_second"] == pytest.approx(450.0)
        assert rates["slots_per_second"] == pytest.approx(512.0)
        assert rates["data_wait_share"] == pytest.approx(0.25)


def test_the_average_is_the_weighted_mean_of_the_steps() -> None:
    statistics = Statistics()
    seconds = [1.0, 4.0, 2.0]
    for value in seconds:
        add(statistics, value)
    weights = [0.81, 0.9, 1.0]
    expected = sum(w * s for w, s in zip(weights, seconds, strict=True)) / sum(weights)
    assert statistics.rates(1)["step_seconds"] == pytest.approx(expected)


def test_rates_are_ratios_of_sums_and_no_means_of_rates() -> None:
    """A step of 10x the tokens in 10x the time changes no rate; the mean of rates would hide a slow one."""
    statistics = Statistics()
    add(statistics, 1.0)
    add(statistics, 10.0, factor=10)
    assert statistics.rates(1)["tokens_per_second"] == pytest.approx(900.0)
    add(statistics, 100.0)
    assert statistics.rates(1)["tokens_per_second"] < 200


def test_steps_that_compiled_count_in_the_totals_only() -> None:
    statistics = Statistics()
    add(statistics, 60.0, compiled=True)
    assert statistics.rates(10)["step_seconds"] is None
    add(statistics, 2.0)
    assert statistics.rates(10)["step_seconds"] == pytest.approx(2.0)
    assert statistics.totals["seconds"] == 62.0
    assert statistics.totals["tokens"] == 1800
    assert statistics.updates == 1


def test_a_saved_average_goes_on_as_if_nothing_had_happened() -> None:
    """The correction counts updates; corrected by the steps of the run it would start far too small."""
    whole, first = Statistics(), Statistics()
    for value in (1.0, 3.0):
        add(whole, value)
        add(first, value)
    resumed = Statistics(**json.loads(json.dumps(asdict(first))))
    for statistics in (whole, resumed):
        add(statistics, 2.0)
    assert resumed.rates(7) == whole.rates(7)
    assert resumed.overall() == whole.overall()


def test_another_alpha_after_a_resumption_keeps_the_average_unbiased() -> None:
    statistics = Statistics()
    for _ in range(5):
        add(statistics, 2.0)
    for alpha in (0.999, 0.1):
        statistics.add(dict(STEP), seconds=2.0, data_seconds=0.5, alpha=alpha)
        assert statistics.rates(10)["step_seconds"] == pytest.approx(2.0)


def test_without_a_step_every_figure_is_missing() -> None:
    rates = Statistics().rates(10)
    assert {f"{name}_per_second" for name in COUNTS} <= set(rates)
    assert set(rates.values()) == {None}


def test_counts_are_of_real_and_supervised_tokens_and_computed_slots() -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ]
    batch = BucketingCollator(16)(rows)
    assert batch_counts([batch, batch]) == {"samples": 4, "tokens": 16, "supervised_tokens": 6, "slots": 32}


def test_peak_memory_is_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.05 < peak_memory_gib(torch.device("cpu")) < 64
    in_kib = types.SimpleNamespace(ru_maxrss=3 * 2**19)
    monkeypatch.setattr("resource.getrusage", lambda who: in_kib)
    monkeypatch.setattr("sys.platform", "linux")
    assert peak_memory_gib(torch.device("cpu")) == 1.5
