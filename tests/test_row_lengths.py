"""Lengths of a dataset's rows: words and files, TRL's packing, and real epochs on the CPU beside what was predicted."""

import csv
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from planner import Candidate, parse_cluster, plan
from planner.commands.main import run
from planner.errors import InputError
from planner.estimation import estimate
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.jobs.setting_values import typed_value
from planner.launch.accelerate import accelerate_yaml
from planner.launch.trl_config import train_yaml
from planner.measurements.documents import candidate_of_report, candidate_report
from planner.models.catalogue import load_model
from planner.report.json import estimate_report
from planner.report.words import describe_epoch
from planner.requests.bodies import PlanRequest
from planner.requests.options import CandidateOptions, SearchOptions
from planner.requests.read_options import read_options
from planner.rows.batches import Order, Rows, epoch_of, expected_longest, micro_batch_of, trained_rows
from planner.rows.lengths import RowLengths, counted_lengths, lengths_in_words, quantile_words
from planner.rows.packing import packed_rows
from planner.rows.reading import row_lengths
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem
from planner.search.search import NEAR_BEST, search
from planner.search.sizes import CandidateSizes, batch_sizes
from planner.search.structures import structures
from planner.serve.requests import Allowed, read_request
from planner.throughput.step import throughput

WORDS = "p50=380,p95=1900,max=8192"
MODEL = load_model(str(Path(__file__).parent / "models" / "tiny-qwen2"))


def log_normal(rows: int, median: float = 60, spread: float = 0.9, most: int = 10**6, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(max(1, min(most, round(median * chance.lognormvariate(0, spread)))) for _ in range(rows))


LENGTHS = counted_lengths(log_normal(5000, most=1000))


def rows_in(lengths: RowLengths, layout: Any, batch: int = 4, **changes: Any) -> Rows:
    usual = Rows(
        lengths=lengths, max_length=128, too_long="cut", layout=layout, order="random", batch_rows=batch, processes=1,
        accumulation=1,
    )  # fmt: skip
    return usual._replace(**changes)


class TestWords:
    def test_quantiles_are_those_of_the_rows_that_are_drawn(self):
        ordered = sorted(lengths_in_words(WORDS).tokens)
        assert len(ordered) == 10_000
        assert ordered[4999] == ordered[5000] == 380
        assert (ordered[9499], ordered[9500], ordered[-1]) == (1899, 1901, 8192)

    def test_rows_between_two_quantiles_are_log_normal(self):
        # exp(mu + sigma^2 / 2) with sigma = log(5) / 1.645: 613; the row of 8,192 is nearer than the tail's 13,900
        drawn = lengths_in_words("p50=380,p95=1900,p99.99=14500,max=15000").tokens
        assert sum(drawn) / len(drawn) == pytest.approx(613, rel=0.01)

    def test_a_count_of_rows_is_kept_and_not_drawn(self):
        lengths = lengths_in_words(f"rows=1_000_000,{WORDS}")
        assert (lengths.rows, len(lengths.tokens)) == (1_000_000, 10_000)
        assert lengths.words == f"rows=1000000,{WORDS}"

    def test_few_rows_are_drawn_as_they_are(self):
        assert lengths_in_words("rows=3,min=10,p50=20,max=30").tokens.__len__() == 3
        assert sorted(lengths_in_words("rows=3,min=10,p50=20,max=30").tokens) == [10, 20, 30]

    @given(st.lists(st.integers(min_value=1, max_value=10**5), min_size=1, max_size=200))
    def test_the_summary_of_a_file_can_be_read_again(self, counts):
        again = lengths_in_words(quantile_words(tuple(counts)))
        assert (again.rows, again.longest, min(again.tokens)) == (len(counts), max(counts), min(counts))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("p50=380", "lacks max, the longest row"),
            ("max=380", "lacks a quantile beside it"),
            ("p50=380,max=100", "max=100 is below p50=380"),
            ("p50=0,max=100", "p50=0 is no quantile"),
            ("p50=ten,max=100", "p50=ten is no quantile"),
            ("p0=1,max=100", "p0 is no quantile"),
            ("mean=5,max=100", "mean is no quantile"),
            ("p50=3,p50=4,max=100", "twice"),
            ("rows=1,min=5,max=9", "of 1 rows all these are one"),
            ("rows=2,p95=5,max=9", "of 2 rows all these are one"),
        ],
    )
    def test_wrong_words_are_refused_in_one_line(self, text, said):
        with pytest.raises(InputError, match=said):
            row_lengths(text)

    @pytest.mark.parametrize("words", ["p50=ten,max=9", "p50=5", "p0=1,max=9", "p50=9,max=5", "none.txt"])
    def test_an_error_names_the_option_that_was_given(self, words: str) -> None:
        with pytest.raises(InputError, match=r"^--completion-lengths "):
            typed_value("completion_lengths", words)


class TestFiles:
    COUNTS = (5, 12, 7, 900)

    def written(self, path: Path) -> Path:
        rows = [{"length": count, "other": "x"} for count in self.COUNTS]
        match path.suffix:
            case ".jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            case ".json":
                path.write_text(json.dumps({"lengths": self.COUNTS}))
            case ".csv":
                with path.open("w", newline="") as file:
                    writer = csv.DictWriter(file, ["other", "length"])
                    writer.writeheader()
                    writer.writerows(rows)
            case ".parquet":
                arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
                parquet.write_table(arrow.Table.from_pylist(rows), path)
            case _:
                path.write_text("\n".join(map(str, self.COUNTS)) + "\n")
        return path

    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet"])
    def test_counts_are_read_in_their_order(self, tmp_path, name):
        assert row_lengths(str(self.written(tmp_path / name))).tokens == self.COUNTS

    def test_a_column_of_tokens_is_counted(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1]}\n')
        assert row_lengths(str(path)).tokens == (3, 1)

    def test_a_dataset_on_disk_is_counted(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]]}).save_to_disk(tmp_path / "data")
        assert row_lengths(str(tmp_path / "data")).tokens == (3, 1)

    def test_a_file_that_changes_is_read_again(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("1\n2\n")
        row_lengths(str(path))
        path.write_text("100\n200\n")
        assert row_lengths(str(path)).tokens == (100, 200)

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("a.txt", "12\nmany\n", "row 2: many is no number of tokens"),
            ("a.txt", "12\n-1\n", "row 2: -1 is no number of tokens"),
            ("a.txt", "\n", "holds no row with a token"),
            ("a.jsonl", "{\n", "row 1: that is no JSON"),
            (
                "a.jsonl",
                '{"messages": [{"role": "user"}, {"role": "x"}]}\n',
                "no number of tokens. plan lengths counts",
            ),
            ("a.jsonl", '{"text": "how are you"}\n', "how are you is no number of tokens. plan lengths counts"),
            ("a.csv", "text,label\na,b\n", "has no column of token counts, but text, label"),
            ("a.parquet", "no", "is no parquet file"),
        ],
    )
    def test_a_file_without_counts_is_refused_in_one_line(self, tmp_path, name, text, said):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=said):
            row_lengths(str(tmp_path / name))

    @pytest.mark.parametrize("rows", [{"messages": [[{"role": "user"}]]}, {"text": ["how"]}, {"x": [[["a"]]]}])
    def test_a_column_of_parquet_without_numbers_is_refused(self, tmp_path, rows):
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table(rows), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"no numbers of tokens\. plan lengths counts"):
            row_lengths(str(tmp_path / "a.parquet"))

    def test_tokens_of_a_parquet_file_become_no_objects_of_python(self, tmp_path):
        """100,000 rows of 1,000 tokens took 11 to 20 s and 2.3 GB; 2,000 of them have 2 million tokens."""
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"input_ids": [[7] * 1000] * 2000}), tmp_path / "a.parquet")
        tracemalloc.start()
        assert row_lengths(str(tmp_path / "a.parquet")).tokens == (1000,) * 2000
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2_000_000

    def test_a_pipe_is_refused(self, tmp_path):
        pytest.importorskip("pyarrow")
        os.mkfifo(tmp_path / "a.parquet")
        with pytest.raises(InputError, match="no regular file"):
            row_lengths(str(tmp_path / "a.parquet"))

    @pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
    @pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"no"])
    def test_a_damaged_dataset_is_refused_in_one_line(self, tmp_path, name, content):
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]]}).save_to_disk(tmp_path / "data")
        (tmp_path / "data" / name).write_bytes(content)
        if name == "dataset_info.json" and content == b"{}":  # its features are in the table, too
            assert row_lengths(str(tmp_path / "data")).tokens == (3, 1)
        else:
            with pytest.raises(InputError, match="holds no dataset that can be read"):
                row_lengths(str(tmp_path / "data"))


class TestBatches:
    def test_the_longest_of_one_row_is_the_mean_and_of_all_the_longest(self):
        rows = trained_rows(LENGTHS, 128, "cut", "padded")
        assert expected_longest(rows, 1) == rows.mean
        assert expected_longest(rows, 5000) == pytest.approx(128)

    def test_the_expected_longest_row_of_two_is_that_of_all_pairs(self):
        rows = trained_rows(counted_lengths((1, 2, 4, 8)), 128, "cut", "padded")
        assert expected_longest(rows, 2) == pytest.approx((2 + 4 + 8 + 4 + 8 + 8) / 6)

    @pytest.mark.parametrize("batch", [2, 3, 8])
    def test_expected_padding_is_the_mean_over_orders(self, batch):
        tokens = list(log_normal(100, most=1000))
        padded = []
        for seed in range(2000):
            random.Random(seed).shuffle(tokens)
            batches = [tokens[start : start + batch] for start in range(0, 100, batch)]
            padded.append(sum(len(each) * max(min(count, 128) for count in each) for each in batches))
        epoch = epoch_of(rows_in(counted_lengths(tuple(tokens)), "padded", batch), 1)
        assert epoch.tokens + epoch.padding == pytest.approx(sum(padded) / len(padded), rel=0.005)

    @pytest.mark.slow
    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_grouped_lengths_have_the_padding_of_the_sampler(self, accumulation):
        torch = pytest.importorskip("torch")
        from transformers.trainer_pt_utils import get_length_grouped_indices

        counts = [min(tokens, 128) for tokens in LENGTHS.tokens]
        padded = 0
        for seed in range(10):
            generator = torch.Generator().manual_seed(seed)
            order = get_length_grouped_indices(counts, 8 * accumulation, generator=generator)
            batches = [order[start : start + 8] for start in range(0, len(order), 8)]
            padded += sum(len(each) * max(counts[index] for index in each) for each in batches) / 10
        rows = rows_in(LENGTHS, "padded", 8, order="group_by_length", accumulation=accumulation)
        epoch = epoch_of(rows, 1)
        assert epoch.tokens + epoch.padding == pytest.approx(padded, rel=0.005)

    def test_pairs_are_two_rows_of_a_sample(self):
        epoch = epoch_of(rows_in(LENGTHS, "padded", 8), 2)
        assert (epoch.trained_rows, epoch.steps) == (5000, 625)

    def test_rows_that_are_left_out_lose_all_their_tokens(self):
        lengths = counted_lengths((100, 200, 300))
        cut = epoch_of(rows_in(lengths, "padded", 1), 1)
        dropped = epoch_of(rows_in(lengths, "padded", 1, too_long="drop"), 1)
        assert (cut.tokens, cut.cut_rows, cut.cut_tokens) == (356, 2, 244)
        assert (dropped.tokens, dropped.cut_rows, dropped.cut_tokens) == (100, 2, 500)

    def test_quantiles_of_many_rows_give_the_steps_of_all(self):
        epoch = epoch_of(rows_in(lengths_in_words(f"rows=1000000,{WORDS}"), "padded", 8, accumulation=2), 1)
        assert (epoch.rows, epoch.drawn_rows, epoch.steps) == (1_000_000, 1_000_000, 62_500)

    @pytest.mark.parametrize("layout", ["padded", "padding_free", "bfd", "bfd_split", "wrapped"])
    def test_attention_sees_every_pair_of_tokens_of_a_batch(self, layout):
        rows = rows_in(LENGTHS, layout)
        seen = micro_batch_of(rows, unpads=True).seen
        assert sum(count * tokens for tokens, count in seen) >= 0.98 * micro_batch_of(rows, unpads=True).tokens
        if layout in ("padded", "bfd"):
            squares = sum(min(count, 128) ** 2 for count in LENGTHS.tokens) / len(packed_or_own(layout))
            assert sum(count * tokens**2 for tokens, count in seen) == pytest.approx(4 * squares)


def packed_or_own(layout: str) -> tuple[int, ...]:
    return LENGTHS.tokens if layout == "padded" else packed_rows(LENGTHS, 128, layout)


def every(sizes: CandidateSizes) -> list[Candidate]:
    return [sizes[index] for index in range(len(sizes))]


def sft(**changes: Any) -> Candidate:
    usual = {"model": MODEL, "method": "sft", "max_length": 128, "per_device_train_batch_size": 4, "lengths": LENGTHS}
    return Candidate(**(usual | changes))


class TestCandidates:
    def test_memory_follows_the_longest_row(self):
        short = counted_lengths((10, 20, 30))
        assert sft(max_length=1024, lengths=short).row_tokens == 30
        assert sft(max_length=1024, lengths=short, packing=True).row_tokens == 1024
        assert sft(max_length=1024, lengths=LENGTHS).row_tokens == LENGTHS.longest
        assert sft(max_length=128).row_tokens == 128
        assert sft(max_length=128, padding_free=True).row_tokens == LENGTHS.longest

    def test_full_rows_have_the_speed_of_no_lengths(self):
        cluster = parse_cluster("1xA100-40G")
        full = sft(lengths=counted_lengths((128,) * 100))
        assert throughput(full, cluster, 0).tokens_per_second == pytest.approx(
            throughput(sft(lengths=None), cluster, 0).tokens_per_second
        )

    def test_the_mean_tokens_of_a_step_are_not_rounded(self):
        held = sft(lengths=counted_lengths((1, 2, 2)), per_device_train_batch_size=4)
        answer = throughput(held, parse_cluster("1xA100-40G"), 0)
        assert answer.tokens_per_second * answer.step_seconds == pytest.approx(4 * (1 + 2 + 2) / 3)

    def test_gpus_wait_for_the_longest_rows(self):
        wide = {
            "num_processes": 8,
            "sharding": "ddp",
            "per_device_train_batch_size": 1,
            "model": load_model("Qwen2.5-7B"),
        }
        answer = throughput(sft(**wide), parse_cluster("8xA100-80G"), 0)
        often = throughput(sft(**wide, gradient_accumulation_steps=16), parse_cluster("8xA100-80G"), 0)
        even = throughput(sft(**wide, lengths=counted_lengths((60,) * 64)), parse_cluster("8xA100-80G"), 0)
        assert answer.seconds["waiting"] > often.seconds["waiting"] / 16 > 0 == even.seconds["waiting"]

    def test_a_document_of_a_candidate_keeps_the_longest_row(self):
        again = candidate_of_report(candidate_report(sft(train_sampling_strategy="group_by_length")))
        assert again.lengths is not None
        assert (again.lengths.longest, again.lengths.rows) == (LENGTHS.longest, 5000)
        assert again.row_tokens == sft().row_tokens

    def test_a_document_of_an_earlier_release_has_no_lengths(self):
        report = candidate_report(sft(lengths=None))
        del report["lengths"], report["train_sampling_strategy"]
        again = candidate_of_report(report)
        assert (again.lengths, again.train_sampling_strategy, again.row_tokens) == (None, "random", 128)

    def test_a_list_of_counts_is_a_value_too(self):
        assert typed_value("lengths", ("10", "20")) == counted_lengths((10, 20))
        with pytest.raises(InputError, match="numbers of tokens"):
            typed_value("lengths", ("10", "x"))


class TestPlans:
    def options(self, **changes: Any) -> CandidateOptions:
        usual = {"model": "Qwen2.5-0.5B", "gpus": "1xRTX-3090", "method": "sft", "lengths": WORDS}
        return CandidateOptions(**(usual | changes))

    def test_packing_is_recommended_for_short_rows(self):
        answer = plan("Qwen2.5-0.5B", "1xRTX-3090", method="sft", max_length=2048, lengths=WORDS)
        assert answer.best.candidate.packing
        epoch = answer.best.throughput.epoch
        assert epoch is not None
        assert epoch.fill > 0.95
        assert "rows_packed" in [note.code for note in answer.warnings]

    def test_packing_is_as_it_is_pinned_and_without_lengths_the_trainers_default(self):
        pinned = plan("Qwen2.5-0.5B", "1xRTX-3090", method="sft", lengths=WORDS, packing=False)
        without = plan("Qwen2.5-0.5B", "1xRTX-3090", method="sft")
        assert not pinned.best.candidate.packing
        assert not without.best.candidate.packing
        assert [note.code for note in without.warnings].count("rows_taken_full") == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("pins", [{}, {"packing": False}, {"attn_implementation": "sdpa"}])
    def test_no_batch_or_packing_is_faster_than_the_plan(self, pins):
        job = {"method": "sft", "max_length": 1024, "lengths": WORDS, "tuning": "lora", "effective_batch_size": 16}
        best = plan("Qwen2.5-1.5B", "2xA100-40G", **job, **pins).best
        for batch in (1, 2, 4, 8):
            for packing in {False, pins.get("packing", True)}:
                pinned = {**job, **pins, "batch_size": batch, "packing": packing}
                found = plan("Qwen2.5-1.5B", "2xA100-40G", **pinned).best
                assert found.throughput.tokens_per_second <= best.throughput.tokens_per_second / 0.98

    def test_grouped_lengths_are_said_where_packing_is_off(self):
        answer = plan("Qwen2.5-0.5B", "1xRTX-3090", method="sft", max_length=2048, lengths=WORDS, packing=False)
        named = {lever.takes[0].code: lever.factor(answer.best) for lever in answer.levers}
        assert named["price_of_grouped_lengths"] > 1.1
        packed = plan("Qwen2.5-0.5B", "1xRTX-3090", method="sft", max_length=2048, lengths=WORDS)
        assert "price_of_grouped_lengths" not in [lever.takes[0].code for lever in packed.levers]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("tuning_class", "method"), [("full", "sft"), ("lora", "sft"), ("qlora", "sft"), ("lora", "dpo")]
    )
    @pytest.mark.parametrize("words", [WORDS, "p50=40,p90=60,max=4000", "rows=32,p50=900,max=1000"])
    def test_a_search_is_as_fast_as_every_structure_and_batch(self, tuning_class, method, words):
        cluster = parse_cluster("2xRTX-3090")
        job = Job(model=load_model("Qwen2.5-0.5B"), method=method, pinned={"lengths": words}, effective_batch_size=32)
        problem = SearchProblem(job=job, cluster=cluster, tuning_class=tuning_class)
        found = search(problem)
        sizes = [size for structure in structures(problem) for size in every(batch_sizes(structure, job))]
        answers = [estimate_or_none(size, problem) for size in sizes]
        fastest = max(answer.throughput.tokens_per_second for answer in answers if answer is not None and answer.fits)
        assert found is not None
        assert found.throughput.tokens_per_second >= NEAR_BEST * fastest

    def test_what_max_length_costs_is_said(self):
        answer = plan("Qwen2.5-0.5B", "1xRTX-3090", method="sft", max_length=4096, lengths=WORDS)
        costs = {note.values["max_length"]: note.values for note in answer.more if note.code == "length_costs"}
        assert set(costs) == {8192, 2048}
        assert costs[8192]["rows"] == 0
        assert costs[2048]["rows"] == pytest.approx(0.0415, abs=0.005)

    def test_a_config_file_may_name_them(self, tmp_path):
        (tmp_path / "train.yaml").write_text(f"lengths: {WORDS}\nmax_length: 2048\n")
        request = read_options(self.options(config=str(tmp_path / "train.yaml"), lengths=None), lambda model: model)
        assert request.job.pinned["lengths"] == lengths_in_words(WORDS)
        assert request.warnings == ()

    def test_a_request_names_a_file_only_where_the_server_allows_it(self, tmp_path):
        body = {"model": "Qwen2.5-0.5B", "gpus": "1xRTX-3090", "method": "sft"}
        path = tmp_path / "counts.txt"
        path.write_text("10\n20\n")
        for where in ({"lengths": str(path)}, {"set": {"lengths": str(path)}}):
            request = PlanRequest(**body, **where)
            with pytest.raises(InputError, match="lengths names a file of the server"):
                read_request(request, SearchOptions, Allowed(paths=False, hub=False))
            assert read_request(request, SearchOptions, Allowed(paths=True, hub=False))
        words = PlanRequest(**body, lengths=WORDS)
        assert read_request(words, SearchOptions, Allowed(paths=False, hub=False)).lengths == WORDS

    def test_the_report_has_the_epoch(self):
        words = f"rows=52002,{WORDS}"
        cluster = parse_cluster("1xRTX-3090")
        answer = estimate(
            single_candidate(read_options(self.options(lengths=words), lambda model: model).job, cluster), cluster
        )
        epoch = to_builtins(estimate_report(answer))["throughput"]["epoch"]
        assert (epoch["rows"], epoch["steps"], epoch["layout"]) == (52_002, 6_501, "padded")
        assert epoch["padding"] > epoch["tokens"] / 2
        said = "\n".join(describe_epoch(answer.throughput))
        assert "of the computed tokens are padding" in said
        assert "an epoch: 52,002 rows in 6,501 steps" in said

    def test_exported_files_keep_the_lengths(self, tmp_path):
        best = plan("Qwen2.5-0.5B", "1xRTX-3090", method="sft", max_length=2048, lengths=WORDS).best
        (tmp_path / "train.yaml").write_text(train_yaml(best.candidate))
        (tmp_path / "accelerate.yaml").write_text(accelerate_yaml(best.candidate))
        request = read_options(self.options(config=str(tmp_path / "train.yaml"), lengths=None), lambda model: model)
        assert request.job.pinned["lengths"] == best.candidate.lengths
        assert request.job.pinned["packing"] is True

    def test_lengths_of_generated_rows_are_refused(self):
        with pytest.raises(InputError, match="grpo has no lengths"):
            plan("Qwen2.5-0.5B", "1xRTX-3090", method="grpo", lengths=WORDS)

    def test_a_job_takes_lengths_as_a_pinned_setting(self):
        job = Job(model=MODEL, method="sft", pinned={"lengths": WORDS})
        assert job.pinned["lengths"] == lengths_in_words(WORDS)
        request = read_options(self.options(), lambda model: model)
        assert request.job.pinned["lengths"] == job.pinned["lengths"]


# -- beside TRL --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_rows_are_packed_as_trl_packs_100_000(strategy):
    trl, datasets, numpy, arrow = (pytest.importorskip(name) for name in ("trl", "datasets", "numpy", "pyarrow"))
    pytest.importorskip("pyarrow.compute")
    counts = log_normal(100_000, median=30, most=1000, seed=1)
    values = numpy.zeros(sum(counts), dtype=numpy.int8)
    ids = arrow.ListArray.from_arrays(numpy.cumsum([0, *counts], dtype=numpy.int32), values)
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(arrow.table({"input_ids": ids}))
    packed = trl.pack_dataset(dataset, 100, strategy).with_format("arrow")[:]
    theirs = arrow.compute.list_value_length(packed["input_ids"]).to_pylist()
    ours = packed_rows(counted_lengths(counts), 100, strategy)
    assert len(ours) == len(theirs)
    assert sum(ours) == sum(theirs)
    assert sorted(ours) == sorted(theirs)


ROWS = log_normal(90, median=12, spread=0.7, most=60, seed=3)


def trained(tmp_path: Path, candidate: Candidate, **settings: Any) -> tuple[int, int, int]:
    """Train a tiny model for one epoch; return the tokens of rows, those of padding, and the optimizer steps."""
    datasets, torch, transformers, trl = (
        pytest.importorskip(name) for name in ("datasets", "torch", "transformers", "trl")
    )
    from probes.worker.random_weights import tokenizer

    class Counted(trl.SFTTrainer):  # type: ignore[name-defined, misc]
        batches: list[tuple[int, int]]

        def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
            computed = inputs["input_ids"].numel()
            own = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else computed
            self.batches.append((own, computed - own))
            return super().training_step(model, inputs, *others)

    datasets.disable_progress_bars()
    torch.manual_seed(0)
    fields = dict(MODEL.config)
    config = transformers.AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    rows = [{"input_ids": [3 + place % 20 for place in range(count)]} for count in ROWS]
    args = trl.SFTConfig(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=candidate.per_device_train_batch_size,
        gradient_accumulation_steps=candidate.gradient_accumulation_steps, packing=candidate.packing,
        packing_strategy=candidate.packing_strategy, padding_free=candidate.padding_free,
        max_length=None if candidate.padding_free else candidate.max_length,
        train_sampling_strategy=candidate.train_sampling_strategy, report_to="none", save_strategy="no", use_cpu=True,
        bf16=False, logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    trainer = Counted(
        model=transformers.AutoModelForCausalLM.from_config(config),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(MODEL.vocab_size),
    )
    trainer.batches = []
    trainer.train()
    own, padding = (sum(batch[place] for batch in trainer.batches) for place in (0, 1))
    return own, padding, trainer.state.global_step


WAYS: dict[str, tuple[dict[str, Any], Order]] = {
    "padded": ({}, "sequential"),
    "packed": ({"packing": True}, "random"),
    "packed in pieces": ({"packing": True, "packing_strategy": "bfd_split"}, "random"),
    "wrapped": ({"packing": True, "packing_strategy": "wrapped"}, "sequential"),
    "padding-free": ({"padding_free": True}, "random"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("way", list(WAYS))
def test_a_real_epoch_has_the_tokens_padding_and_steps_of_the_prediction(tmp_path, way, accumulation):
    settings, order = WAYS[way]
    candidate = sft(
        max_length=40, lengths=counted_lengths(ROWS), train_sampling_strategy=order, per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation, **settings,
    )  # fmt: skip
    epoch = throughput(candidate, parse_cluster("1xA100-40G"), 0).epoch
    assert epoch is not None
    assert trained(tmp_path, candidate) == (epoch.tokens, epoch.padding, epoch.steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_epoch_in_random_order_has_about_the_expected_padding(tmp_path):
    candidate = sft(max_length=40, lengths=counted_lengths(ROWS))
    epoch = throughput(candidate, parse_cluster("1xA100-40G"), 0).epoch
    assert epoch is not None
    runs = [trained(tmp_path, candidate, seed=seed) for seed in range(3)]
    assert {(tokens, steps) for tokens, _, steps in runs} == {(epoch.tokens, epoch.steps)}
    assert sum(padding for _, padding, _ in runs) / 3 == pytest.approx(epoch.padding, rel=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_do_not_see_each_other(attention):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    fields = dict(MODEL.config)
    config = transformers.AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    rows = [[3 + (5 * row + place) % 20 for place in range(count)] for row, count in enumerate((9, 4, 17))]
    packed = [{"input_ids": rows[0] + rows[1], "seq_lengths": [9, 4]}, {"input_ids": rows[2], "seq_lengths": [17]}]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(packed)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    with torch.no_grad():
        together = model(**inputs, use_cache=False).logits[0]  # as SFTTrainer.compute_loss calls it
        alone = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's config and a tokenizer that has a word for each token, and a chat template."""
    pytest.importorskip("trl")
    from probes.worker.random_weights import model_folder

    # Transformers replaces the tokenizer of other architectures by their own class.
    llama = load_model(str(Path(__file__).parent / "models" / "tiny-llama"))
    folder = model_folder(llama, tmp_path_factory.mktemp("counts"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


MESSAGES = [{"role": "w3", "content": "w4 w5"}, {"role": "w6", "content": "w7"}]
FORMATS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "text": ({"text": "w3 w4 w5"}, [4]),
    "prompt and completion": ({"prompt": "w3 w4 ", "completion": "w5"}, [4]),
    "messages": ({"messages": MESSAGES}, [5]),
    "conversations": ({"conversations": [{"from": "human", "value": "w3"}, {"from": "gpt", "value": "w4"}]}, [4]),
    "messages in two parts": ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, [5]),
    "pairs": ({"prompt": "w3 ", "chosen": "w4", "rejected": "w5 w6"}, [3, 4]),
    "pairs of messages": ({"chosen": MESSAGES, "rejected": MESSAGES[:1]}, [5, 3]),
    "prompts": ({"prompt": MESSAGES[:1]}, [4]),
    "tokens": ({"input_ids": [3, 4]}, [2]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(FORMATS))
def test_plan_lengths_counts_every_format_of_trl(name, tmp_path, tokenizer_folder, capsys):
    row, counts = FORMATS[name]
    data, out = tmp_path / "data.jsonl", tmp_path / "counts.txt"
    data.write_text(f"{json.dumps(row)}\n" * 3)
    assert run(["lengths", str(data), "--model", str(tokenizer_folder), "--out", str(out)]) == 0
    assert row_lengths(str(out)).tokens == tuple(counts * 3)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{3 * len(counts)} rows, {3 * sum(counts)} tokens")
    assert second.startswith(f"--lengths {out}, or --lengths rows={3 * len(counts)},")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["text", "prompt and completion", "messages", "conversations", "messages in two parts"]
)
def test_plan_lengths_counts_what_the_trainer_trains_on(name, tmp_path, tokenizer_folder):
    datasets, transformers, trl = (pytest.importorskip(name) for name in ("datasets", "transformers", "trl"))
    from probes.row_counts import row_counts

    fields = dict(MODEL.config)
    config = transformers.AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    rows = [FORMATS[name][0]] * 4
    trainer = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_config(config),
        args=trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer_folder),
    )
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    counted = row_counts(str(data), "train", "text", str(tokenizer_folder))
    assert counted == tuple(len(row["input_ids"]) for row in trainer.train_dataset)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "said"),
    [('{"question": "w3"}', "columns question"), ("", "cannot be loaded"), ('{"text": 5}', "cannot be tokenized")],
)
def test_plan_lengths_refuses_other_datasets_in_one_line(text, said, tmp_path, tokenizer_folder, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    assert run(["lengths", str(data), "--model", str(tokenizer_folder), "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("Error: ")
    assert said in error
    assert not (tmp_path / "x").exists()
