"""The JSON Schema of all documents, with a description of every property."""

from typing import Any

from msgspec.json import schema_components

from planner.report.documents.commands import (
    ComparisonReport,
    DiagnosisReport,
    DiffReport,
    ErrorDocument,
    ExportReport,
    GpusReport,
    ModelsReport,
    ValidationReport,
)
from planner.report.documents.plans import DryRunReport, EstimateReport, PlanReport

DOCUMENTS = (
    PlanReport,
    EstimateReport,
    DryRunReport,
    DiagnosisReport,
    ValidationReport,
    ComparisonReport,
    DiffReport,
    ModelsReport,
    GpusReport,
    ExportReport,
    ErrorDocument,
)
# Descriptions of properties that mean the same in every type, and of those of types that are not defined here.
PROPERTIES: dict[str, str] = {
    "models": "The models.",
    "allocated_bytes": "Memory that tensors hold.",
    "bf16_flops": "Dense operations a second in bf16; in fp16 on cards without bf16.",
    "bytes": "The predicted figure.",
    "capacity_bytes": "Memory that this run may use.",
    "cluster": "The GPUs.",
    "component": "The kind of memory.",
    "compute_capability": "CUDA's compute capability: major and minor number.",
    "count": "How many there are.",
    "differences": "Phases, expected and measured.",
    "environment": "Environment variables to launch with.",
    "epoch": "One pass over the given data; absent: no data was given.",
    "error": "Why there is no answer.",
    "estimated": "The estimate of the same candidate.",
    "evidence": "What the figure stands on: estimated, emulated or measured.",
    "expected_bytes": "The figure before it was measured.",
    "free_bytes": "Memory that is free, or that this run may use.",
    "gpu": "The card.",
    "gpus": "The GPUs by role; all of one role are alike.",
    "gpus_per_node": "GPUs of one node.",
    "teacher_gpus": "GPUs of the node besides, which a teacher's vLLM server has.",
    "gradient_checkpointing_kwargs": "Arguments of gradient checkpointing.",
    "group": "The cases that are summed up.",
    "host": "Host memory of one node.",
    "interrupted": "Whether it was ended before all cases were measured.",
    "job": "The training to plan, and the settings that the user decided.",
    "label": "The name of the case or of the candidate, for a person.",
    "left_out": "Lines that nothing is compared with.",
    "line": "Line of the file.",
    "mean": "Mean signed error.",
    "mean_absolute": "Mean absolute error.",
    "measured_bytes": "The measured figure.",
    "memory_bytes_per_second": "Bandwidth of the card's memory.",
    "method": "The method, as `trl <method>` names it.",
    "model": "Name of the policy on the Hub.",
    "module": "The module whose pass made the tensors.",
    "multiprocessors": "The card's multiprocessors.",
    "name": "The name.",
    "network_bytes_per_second": "Network of one node, one way.",
    "nodes": "Nodes of the cluster.",
    "note": "The cost of it, for a person.",
    "nvlink_bytes_per_second": "One direction; 0: no NVLink.",
    "operator": "The operator that made the tensors.",
    "optimize": "The goal of the search.",
    "origin": "given: --host-memory; local: this machine; assumed: a usual node with this card; unlimited: unknown.",
    "out_of_memory": "Cases that ran out of memory.",
    "pcie_bytes_per_second": "One direction.",
    "peak_bytes": "Memory that the heaviest phase needs.",
    "peak_phase": "The heaviest phase.",
    "phase": "The part of a step.",
    "phases": "The memory of each phase.",
    "pinned": "Settings that the user decided.",
    "predicted": "The predictions by their evidence.",
    "PYTORCH_CUDA_ALLOC_CONF": "Options of PyTorch's allocator.",
    "quantity": "What was measured.",
    "role": "Whose memory it is.",
    "rows": "The compared figures; of an epoch: rows of the data.",
    "seconds": "Seconds of a step by cause.",
    "settings": "The settings, named as the libraries name them.",
    "size_bytes": "Bytes of all of them.",
    "source": "Where the figures come from.",
    "step_seconds": "Seconds of one optimizer step.",
    "summaries": "Signed errors by group.",
    "throughput": "The speed.",
    "tokens_per_second": "Tokens a second over all GPUs, padding left out.",
    "total_bytes": "All memory.",
    "trl_version": "The TRL release that is planned for.",
    "tuning": "full, lora, qlora, or auto: the first that fits.",
    "under_share": "The share below which a prediction counts as too small.",
    "whole": "Whether plans use all of an assumed host memory.",
    "why": "The reason.",
    "worst": "The signed error with the largest absolute value.",
    "drawn_rows": "Rows that are drawn in one pass.",
    "trained_rows": "Rows that are trained on.",
    "tokens": "Tokens that are trained on.",
    "padding": "Tokens of padding.",
    "cut_rows": "Rows that are cut at max_length.",
    "cut_tokens": "Tokens that are cut off.",
    "steps": "Optimizer steps.",
    "layout": "How rows are laid out in batches.",
    "max_length": "Tokens of the longest row.",
}


def _with_descriptions(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return definitions in which every property has a description."""
    for kind in definitions.values():
        for name, schema in kind.get("properties", {}).items():
            if "description" not in schema and name in PROPERTIES:
                kind["properties"][name] = {**schema, "description": PROPERTIES[name]}
    return definitions


def json_schema() -> dict[str, object]:
    """The JSON Schema of all documents, generated from their types."""
    references, definitions = schema_components(DOCUMENTS, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "plan",
        "description": "What `--json` prints: memory in bytes as integers, time in seconds.",
        "oneOf": list(references),
        "$defs": _with_descriptions(definitions),
    }
