"""Data files, or mock data, as a training and a held-out split within the length limit; all is counted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from eagle_train.bundled import DEMO
from eagle_train.config import TrainConfig
from eagle_train.data.conversations import Conversation, read_rows
from eagle_train.data.holdout import content_keys, split_off
from eagle_train.data.loading import DataReport, load_samples
from eagle_train.data.mock import MockSamples, mock_lengths
from eagle_train.data.packing import Ints
from eagle_train.data.samples import Sample, supervised_rows, truncate
from eagle_train.errors import InputError

MOCK_LEN = "lognormal:1000:4096"
MOCK_LOSS_SHARE = 0.5
SHORTEST_SUPERVISED = 3  # tokens: a prompt of one and an answer of two


@dataclass(frozen=True, slots=True)
class LengthReport:
    """What fitting samples into the length limit did: counts of samples and tokens."""

    limit: int
    truncated_samples: int
    truncated_tokens: int
    dropped_samples: int
    dropped_tokens: int
    unsupervised_samples: int


@dataclass(frozen=True, slots=True)
class SplitReport:
    """How a data split came about. shared_samples: those of which the other split has a copy, with the same
    token ids and supervision.
    """

    data: DataReport | None  # None: mock data, which come from no file
    length: LengthReport
    shared_samples: int = 0


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The samples that a run trains on and validates with. train_lengths, train_supervised: tokens and rows
    supervised at TTT step 0 of each training sample, int64 `[N]`; notes: what is worth knowing about the
    split.
    """

    train_samples: Sequence[Sample]
    train_lengths: Ints
    train_supervised: Ints
    heldout_samples: Sequence[Sample]
    train_report: SplitReport
    heldout_report: SplitReport | None  # None: split off the training data
    notes: tuple[str, ...] = ()


def prepare_data(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, longest: int | None
) -> PreparedData:
    """Both splits. longest: the target's position limit in tokens; tokenizer: None for mock data, or where
    all rows are pre-tokenised.
    """
    limit = min(config.training_seq_len, longest or config.training_seq_len)
    if config.mock_data:
        return _mock_data(config, vocab_size, limit)
    train_paths = [Path(path) for path in config.data] or [DEMO / "train.jsonl"]
    eval_paths = [Path(path) for path in config.eval_data] or (
        [] if config.data else [DEMO / "heldout.jsonl"]
    )
    for path in [*train_paths, *eval_paths]:
        if not path.is_file():
            found = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{path} {found}; --data and --eval_data name JSONL files")
    train, train_report = _load_split(train_paths, tokenizer, vocab_size, limit, config, config.max_samples)
    heldout_report, notes = None, tuple[str, ...]()
    if eval_paths:
        heldout, heldout_report = _load_split(
            eval_paths, tokenizer, vocab_size, limit, config, config.max_eval_samples
        )
    else:
        split = split_off(train, config.eval_fraction, config.seed, config.max_eval_samples)
        train, heldout, notes = split.train, split.heldout, split.notes
    lengths = np.array([len(sample) for sample in train], dtype=np.int64)
    data = PreparedData(train, lengths, supervised_rows(train), heldout, train_report, heldout_report, notes)
    return with_shared_samples(data) if eval_paths else data  # `split_off` leaves none on both sides


def _mock_data(config: TrainConfig, vocab_size: int, limit: int) -> PreparedData:
    """Random samples, made when they are read; held out are others of the same kind."""
    spec = config.mock_len or MOCK_LEN
    lengths, report = fit_lengths(
        mock_lengths(spec, config.mock_num_samples, config.seed)[: config.max_samples],
        limit,
        config.overlong,
    )
    if not len(lengths):
        raise InputError(
            f"--mock_len {spec}: no sample of {SHORTEST_SUPERVISED} to {limit} tokens, as a supervised row "
            "needs; name other lengths, or another --overlong or --training_seq_len"
        )
    share = config.mock_loss_share or MOCK_LOSS_SHARE
    train = MockSamples(lengths, vocab_size, share, config.seed)
    num_heldout = max(round(config.eval_fraction * len(lengths)), int(config.eval_fraction > 0))
    num_heldout = min(num_heldout, config.max_eval_samples or num_heldout)
    heldout = MockSamples(lengths[:num_heldout], vocab_size, share, config.seed + 1)
    return PreparedData(train, lengths, train.supervised_rows, heldout, SplitReport(None, report), None)


def fit_lengths(
    lengths: Ints, limit: int, overlong: str, shortest: int = SHORTEST_SUPERVISED
) -> tuple[Ints, LengthReport]:
    """`fit_length` where there are only lengths; those below `shortest` are left out as unsupervised.

    Raises InputError for an over-long one under "error".
    """
    over = lengths > limit
    if overlong == "error" and over.any():
        first = int(np.flatnonzero(over)[0])
        raise InputError(
            f"sample {first} has {lengths[first]} tokens, the limit is {limit}; raise --training_seq_len or "
            "use --overlong truncate or drop"
        )
    lost = int((lengths[over] - limit).sum())
    if overlong == "drop":
        kept, cut = lengths[~over], (0, 0, int(over.sum()), int(lengths[over].sum()))
    else:
        kept, cut = np.minimum(lengths, limit), (int(over.sum()), lost, 0, 0)
    supervised = kept >= shortest
    return kept[supervised], LengthReport(limit, *cut, int((~supervised).sum()))


def _load_split(
    paths: list[Path],
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    limit: int,
    config: TrainConfig,
    max_rows: int | None,
) -> tuple[list[Sample], SplitReport]:
    if tokenizer is None:
        _check_pretokenised(paths, config, max_rows)
    samples, data_report = load_samples(
        paths,
        tokenizer,
        vocab_size=vocab_size,
        train_on="last" if config.train_on == "last" else "all",
        template_options=config.parsed_template_options(),
        role_map=config.parsed_role_map(),
        on_bad_row="skip" if config.on_bad_row == "skip" else "error",
        max_rows=max_rows,
    )
    kept, length_report = fit_length(samples, limit, config.overlong)
    if not kept:
        raise InputError(
            f"{', '.join(map(str, paths))}: none of {len(samples)} samples has a supervised row "
            f"within {limit} tokens (the shortest has {min(map(len, samples))}); raise "
            "--training_seq_len, or check the data"
        )
    return kept, SplitReport(data_report, length_report)


def _check_pretokenised(paths: list[Path], config: TrainConfig, max_rows: int | None) -> None:
    for row in islice(read_rows(paths, role_map=config.parsed_role_map()), max_rows):
        if isinstance(row, Conversation) and row.input_ids is None:
            raise InputError(
                f"{row.source} is a conversation, which only the target's tokenizer turns into tokens; name "
                "the model as --target, or give rows with input_ids and loss_mask"
            )


def fit_length(samples: list[Sample], limit: int, overlong: str) -> tuple[list[Sample], LengthReport]:
    """Apply --overlong, then leave out samples in which no row is supervised; everything is counted.

    Raises InputError for an over-long sample under "error".
    """
    kept, truncated, dropped = [], [], []
    unsupervised = 0
    for sample in samples:
        if len(sample) > limit:
            if overlong == "error":
                raise InputError(
                    f"{sample.source} has {len(sample)} tokens, the limit is {limit}; raise "
                    "--training_seq_len or use --overlong truncate or drop"
                )
            if overlong == "drop":
                dropped.append(len(sample))
                continue
            truncated.append(len(sample) - limit)
        fitted = truncate(sample, limit)
        if fitted.num_supervised_rows:
            kept.append(fitted)
        else:
            unsupervised += 1
    return kept, LengthReport(limit, len(truncated), sum(truncated), len(dropped), sum(dropped), unsupervised)


def with_shared_samples(data: PreparedData) -> PreparedData:
    """The data with the samples counted that are in both splits, and a note where there are any."""
    train_keys, heldout_keys = (
        list(content_keys(split)) for split in (data.train_samples, data.heldout_samples)
    )
    in_train, in_heldout = set(train_keys), set(heldout_keys)
    num_heldout = sum(key in in_train for key in heldout_keys)
    if not num_heldout:
        return data
    num_train = sum(key in in_heldout for key in train_keys)
    heldout_report = data.heldout_report and replace(data.heldout_report, shared_samples=num_heldout)
    note = (
        f"{num_heldout:,} of {len(heldout_keys):,} held-out samples are also in training, so held-out "
        "figures flatter; hold out conversations that are not trained on"
    )
    return replace(
        data,
        train_report=replace(data.train_report, shared_samples=num_train),
        heldout_report=heldout_report,
        notes=(*data.notes, note),
    )
