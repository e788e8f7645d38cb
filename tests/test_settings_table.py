"""The settings table: one row for each field of a candidate, and the page that is made from it."""

import os
from operator import attrgetter
from typing import get_args

import pytest

from planner.candidate import DEFAULTS, FIELDS, Candidate
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.settings.setting import Role, Search
from planner.settings.table import (
    ALIASES,
    SETTING_OF,
    SETTINGS,
    STAGE_3_SIZES,
    ZERO_SIZES,
    details_of,
    with_role,
)
from scripts.settings_page import PAGE, page


def test_every_field_of_a_candidate_has_one_row():
    assert sorted(row.field for row in SETTINGS) == sorted(FIELDS)


def test_every_number_has_bounds_that_its_default_is_within():
    for row in SETTINGS:
        default = DEFAULTS.get(row.field)
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            assert row.bounds is not None, row.field
            assert row.bounds[0] <= default <= row.bounds[1], row.field


def test_a_detail_belongs_to_a_setting_that_can_have_the_values():
    choices = {
        "gradient_checkpointing": {True, False},
        "vllm": {"off", "colocate", "server"},
        "eval_strategy": {"steps", "epoch"},
    }
    for row in SETTINGS:
        if row.owner:
            possible = choices.get(row.owner) or set(SETTING_OF[row.owner].values)
            assert set(row.owner_values) <= possible, row.field
            assert not SETTING_OF[row.owner].owner  # no detail of a detail


def test_what_a_setting_needs_is_a_property_of_a_candidate():
    candidate = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft")
    for row in SETTINGS:
        if row.needs:
            assert isinstance(attrgetter(row.needs)(candidate), bool), row.field


def test_no_name_means_two_settings():
    names = [name for row in SETTINGS for name in dict.fromkeys((row.field, *row.library_names, *row.aliases))]
    assert len(names) == len(set(names))
    assert not ALIASES.keys() & SETTING_OF.keys()


def test_the_names_of_a_methods_arguments_are_accepted():
    for method in METHODS.values():
        for field, name in method.argument_names.items():
            assert ALIASES[name] == field


def test_deepspeeds_sizes_are_those_that_its_file_has():
    assert ("reduce_bucket_size", *STAGE_3_SIZES) == ZERO_SIZES
    assert STAGE_3_SIZES == (
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "sub_group_size",
    )


@pytest.mark.parametrize("role", get_args(Role))
def test_every_role_is_used(role):
    assert with_role(role)


def test_what_is_learned_is_never_a_size():
    for row in SETTINGS:
        assert row.search in get_args(Search)
        if row.role == "learning":
            assert row.search in ("never", "choice"), row.field


def test_gpus_that_share_a_row_are_details_of_the_sharding():
    assert {"cp_size", "sp_size", "dp_replicate_size"} <= set(details_of("sharding", "run"))


def test_the_page_is_that_of_the_table():
    if os.environ.get("PLAN_REWRITE_GOLDEN") == "1":
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
